"""gpt-oss: MXFP4 blocks with their scales beside them, as OpenAI's checkpoints and transformers
keep expert stacks.

    PROJ_blocks  uint8 [*lead, rows, k/32, 16]    low nibble first: byte j of a block holds elements 2j and 2j + 1
    PROJ_scales  uint8 [*lead, rows, k/32]        E8M0 bytes

The weight is (experts, rows, k). Rows of `gate_up_proj` alternate gate, up, gate, up, …; they are
kept so. A GGUF MXFP4 block holds the same nibbles in another order (elements 0–15 low, 16–31 high),
so the two convert exactly. transformers itself keeps the decoded stack transposed, (experts, k,
rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import LayoutError
from ..formats import format_named
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, cannot_hold, require
from .common.float8 import E8M0, U8, bytes_of, view_as
from .quant_config.reader import SkipListReader
from .quant_config.writer import ConfigFiles, DenseTensor, PackedModule, dense_modules


class GptOssConfig(SkipListReader):
    """gpt-oss's config as transformers writes it: `modules_to_not_convert`; the layout has no
    parameters.
    """

    method = "gpt-oss"
    methods = ("mxfp4",)
    skip_keys = ("modules_to_not_convert",)
    layouts = ("gpt-oss", "vllm-experts")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {"whether transformers decodes when it loads": ("dequantize",)}


class GptOss(Layout):
    """MXFP4 blocks of 16 bytes and their scales."""

    name = "gpt-oss"
    producers = ("transformers",)
    holds = Holds(("mxfp4",), "stacks and matrices whose rows are whole blocks of 32")
    config_reader = GptOssConfig
    required = ("blocks", "scales")
    parts: ClassVar[dict[str, str]] = {"blocks": "codes"}
    separator = "_"
    stacks_only = one_format = inputs_first = alternating = True

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        full = {_full(name, s): t for s, t in tensors.items()}
        got = require("gpt-oss", full, _full(name, "blocks"), "", (U8,))
        if len(got) < 3 or got[-1] != 16:
            raise LayoutError(
                f"[gpt-oss] {_full(name, 'blocks')} has shape {list(got)}; wanted [experts, rows, k/32, 16] or [rows, k/32, 16]"
            )
        *rows, groups, _ = got
        require("gpt-oss", full, _full(name, "scales"), "", (U8, E8M0), (*rows, groups), "as the blocks")
        return Described(format_named("mxfp4", 32), (*rows, groups * 32))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        scales = tensors["scales"]
        parts = {"codes": tensors["blocks"].reshape(*shape[:-1], shape[-1] // 2), "scales": bytes_of(scales)}
        details = {} if scales.dtype == U8 else {"scales_dtype": scales.dtype.name}
        return QTensor(fmt, shape, parts, origin="transformers", details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt != format_named("mxfp4", 32):
            return "this layout holds mxfp4:g32 only"
        return f"k = {shape[-1]} is not whole blocks of 32" if shape[-1] % 32 else ""

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if "group_index" in q.parts:
            raise cannot_hold("gpt-oss", q, "it has no group index (act-order)")
        codes = q.parts["codes"].reshape(*q.shape[:-1], q.shape[-1] // 32, 16)
        dtype = q.details.get("scales_dtype", "uint8") if q.origin == "transformers" else "uint8"
        return {"blocks": codes, "scales": view_as(q.parts["scales"], str(dtype))}

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_method": "mxfp4"}

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization_config`: MXFP4, and the modules that stay dense."""
        skipped = dense_modules(dense)
        return ConfigFiles({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}})


def _full(name: str, suffix: str) -> str:
    """Full tensor name for a message: gpt-oss joins with an underscore."""
    return f"{name}_{suffix}" if name else suffix
