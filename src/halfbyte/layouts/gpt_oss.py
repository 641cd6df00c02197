"""gpt-oss: MXFP4 blocks with their scales beside them, as OpenAI's checkpoints and transformers keep expert stacks.

    PROJ_blocks  uint8 [*lead, rows, k/32, 16]    low nibble first: byte j of a block holds elements 2j and 2j + 1
    PROJ_scales  uint8 [*lead, rows, k/32]        E8M0 bytes

The weight is (experts, rows, k). Rows of `gate_up_proj` alternate gate, up, gate, up, …; they are kept so. A GGUF MXFP4 block
holds the same nibbles in another order (elements 0–15 low, 16–31 high), so the two convert exactly. transformers itself keeps
the decoded stack transposed, (experts, k, rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import LayoutError
from ..formats import format_named
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, refuse, want
from .common.float8 import E8M0, U8, bytes_of, named


class GptOss(Layout):
    """MXFP4 blocks of 16 bytes and their scales."""

    name = "gpt-oss"
    required = ("blocks", "scales")
    joint = "_"

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        full = {_full(name, s): t for s, t in tensors.items()}
        got = want("gpt-oss", full, _full(name, "blocks"), "", (U8,))
        if len(got) < 3 or got[-1] != 16:
            raise LayoutError(
                f"[gpt-oss] {_full(name, 'blocks')} has shape {list(got)}; wanted [experts, rows, k/32, 16] or [rows, k/32, 16]"
            )
        *rows, groups, _ = got
        want("gpt-oss", full, _full(name, "scales"), "", (U8, E8M0), (*rows, groups), "as the blocks")
        return Described(format_named("mxfp4", 32), (*rows, groups * 32))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        scales = tensors["scales"]
        parts = {"codes": tensors["blocks"].reshape(*shape[:-1], shape[-1] // 2), "scales": bytes_of(scales)}
        details = {} if scales.dtype == U8 else {"scales_dtype": scales.dtype.name}
        return QTensor(fmt, shape, parts, origin="transformers", details=details, name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        if q.format != format_named("mxfp4", 32):
            raise refuse("gpt-oss", q, "this layout holds mxfp4:g32 only")
        if q.shape[-1] % 32:
            raise refuse("gpt-oss", q, f"k = {q.shape[-1]} is not whole blocks of 32")
        if "group_index" in q.parts:
            raise refuse("gpt-oss", q, "it has no group index (act-order)")
        codes = q.parts["codes"].reshape(*q.shape[:-1], q.shape[-1] // 32, 16)
        dtype = q.details.get("scales_dtype", "uint8") if q.origin == "transformers" else "uint8"
        return {"blocks": codes, "scales": named(q.parts["scales"], str(dtype))}

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_method": "mxfp4"}


def _full(name: str, suffix: str) -> str:
    """Full tensor name for a message: gpt-oss joins with an underscore."""
    return f"{name}_{suffix}" if name else suffix
