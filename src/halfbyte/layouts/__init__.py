"""The registry of layouts: one foreign order of packed weights a file, each a bijection with the canonical order."""

from __future__ import annotations

from ..errors import LayoutError
from .awq.gemm import AWQ
from .awq.gemv import AWQGemv
from .awq.gemv_fast import AWQGemvFast
from .awq.marlin import AWQMarlin
from .base import Described, Header, Layout
from .bitsandbytes import BitsAndBytes
from .compressed_tensors.read import CompressedTensors
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
from .torchao import TorchAO

_ALL: tuple[type[Layout], ...] = (
    GPTQ,
    AWQ,
    AWQGemv,
    AWQGemvFast,
    AWQMarlin,
    CompressedTensors,
    MetalMarlin,
    ModelOpt,
    ModelOptStack,
    FineGrainedFP8,
    GptOss,
    MLX,
    GGUF,
    BitsAndBytes,
    HQQ,
    ONNX,
    TorchAO,
    Native,
)

LAYOUTS: dict[str, Layout] = {cls.name: cls() for cls in _ALL}
"""Layouts by name."""


def layout_named(name: str) -> Layout:
    """The layout called `name`. Raises LayoutError naming all of them when there is none."""
    if name not in LAYOUTS:
        raise LayoutError(f"[layout] {name!r} is not a layout; known: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name]


__all__ = ["LAYOUTS", "Described", "Header", "Layout", "layout_named"]
