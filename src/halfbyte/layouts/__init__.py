"""The registry of layouts: one producer's order of packed weights a class, each a bijection with
the canonical order.

Adding a layout is one new file and one line in `_ALL` (docs/adding-a-layout.md): targets of
conversions, config readers and writers, detection and the ledger derive from the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import LayoutError
from .awq.gemm import AWQGemm
from .awq.gemv import AWQGemv
from .awq.gemv_fast import AWQGemvFast
from .awq.marlin import AWQMarlin
from .base import Described, Header, Holds, Layout
from .bitsandbytes import BitsAndBytes
from .compressed_tensors.marlin24 import Marlin24
from .compressed_tensors.read import CompressedTensors, CompressedTensorsStack
from .exl3 import EXL3
from .fine_grained_fp8 import FineGrainedFP8
from .gguf.layout import GGUF
from .gpt_oss import GptOss
from .gptq import GPTQ
from .hqq import HQQ
from .metal_marlin import MetalMarlin
from .mlx import MLX
from .modelopt.base import ModelOpt
from .modelopt.stacked_experts import ModelOptStack
from .native import Native
from .onnx import ONNX
from .quant_config.autoround import AutoRoundConfig
from .quant_config.reader import ConfigReader
from .quark import Quark
from .torchao import TorchAO
from .vllm_experts import VLLMExperts

_ALL: tuple[type[Layout], ...] = (
    GPTQ,
    AWQGemm,
    AWQGemv,
    AWQGemvFast,
    AWQMarlin,
    CompressedTensors,
    CompressedTensorsStack,
    Marlin24,
    MetalMarlin,
    ModelOpt,
    ModelOptStack,
    FineGrainedFP8,
    Quark,
    GptOss,
    VLLMExperts,
    GGUF,
    BitsAndBytes,
    ONNX,
    HQQ,
    TorchAO,
    MLX,
    EXL3,
    Native,
)

LAYOUTS: dict[str, Layout] = {cls.name: cls() for cls in _ALL}
"""Layouts by name."""

BORROWING_READERS: tuple[type[ConfigReader], ...] = (AutoRoundConfig,)
"""Readers of producers that write other producers' layouts."""


def config_readers() -> tuple[type[ConfigReader], ...]:
    """The readers of quantization configs, in the order in which they are asked to recognise one
    that names no producer: MLX's last, for its keys (`bits`, `group_size`) are among those of
    others.
    """
    own = (layout.config_reader for layout in LAYOUTS.values() if layout.config_reader)
    return tuple(dict.fromkeys((*own, *BORROWING_READERS)))


def layout_aliases() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Other words for layouts in a target -> (name, the parameters that the word fixes)."""
    return {alias: (layout.name, params) for layout in LAYOUTS.values() for alias, params in layout.aliases.items()}


def safetensors_layouts() -> tuple[Layout, ...]:
    """The layouts that a producer's safetensors files may follow, in the order they are tried."""
    return tuple(layout for layout in LAYOUTS.values() if layout.container == "safetensors")


def written_layouts() -> tuple[str, ...]:
    """Names of the layouts in which whole checkpoints are written."""
    return tuple(n for n, layout in LAYOUTS.items() if layout.writes_checkpoints or layout.container == "gguf")


def layout_named(name: str) -> Layout:
    """The layout called `name`. Raises LayoutError naming all of them when there is none."""
    if name not in LAYOUTS:
        raise LayoutError(f"[layout] {name!r} is not a layout; known: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name]


__all__ = [
    "LAYOUTS",
    "Described",
    "Header",
    "Holds",
    "Layout",
    "config_readers",
    "layout_aliases",
    "layout_named",
    "safetensors_layouts",
    "written_layouts",
]
