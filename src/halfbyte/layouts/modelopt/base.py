"""ModelOpt: what NVIDIA's unified export writes, and its in-memory tensors saved as they are. Which one it is, the dtypes say.

| kind | weight | scales | value |
|---|---|---|---|
| nvfp4 | `weight` uint8 [*lead, n, k/2], low nibble even | `weight_scale` E4M3 [.., k/16], `.._scale_2` float32 | e2m1 · s · s2 |
| mxfp4 | the same | `weight_scale` E8M0 bytes [*lead, n, k/32] | e2m1 · 2^(b − 127) |
| mxfp8 | `weight` E4M3 [*lead, n, k] | the same | e4m3 · 2^(b − 127) |
| int4 export | `weight` uint8 [*lead, n/2, k]: low nibble row 2i, high row 2i + 1 | `weight_scale` float [*lead, n, G] | q · s |
| fp8 | `weight` E4M3 [*lead, n, k] | `weight_scale` float: one, one a row, or one a tile | e4m3 · s |
| int8 | `weight` int8 [*lead, n, k] | `weight_scale` float, one a row | q · s |
| INT4QTensor | `weight` uint8 [n, k/2], high nibble even, q + 8 | `weight_scale_inv` float [n·k/g, 1] | (c − 8) / s |
| NF4QTensor | `weight` uint8, high nibble even, flat | int8 [B, S], `.._double_scale` [B], `.._zeros` [] | table · (b / d + z) |

The int4 export's codes are two's complement, NF4QTensor's blocks run over the flattened weight.

Config: `group_size` where the shapes leave it open; NF4QTensor needs `shape`, (n, k), which its flat tensor does not tell. A
`quant_algo` ("NVFP4", "MXFP4", "MXFP8", "W4A16_AWQ", "FP8", ...) must agree with what the tensors are.

An exported `pre_quant_scale` belongs to the activations (x · pre_quant_scale meets this weight) and stays a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from ...errors import LayoutError
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, only, refuse
from .export import FP8, INT8, MXFP4, MXFP8, NVFP4, INT4Export, Kind
from .qtensor import INT4QTensor, NF4QTensor

KINDS: tuple[Kind, ...] = (NVFP4(), MXFP4(), MXFP8(), INT4Export(), FP8(), INT8(), INT4QTensor(), NF4QTensor())
"""No two of them recognise the same tensors."""


class ModelOpt(Layout):
    """Whichever kind recognises the tensors."""

    name = "modelopt"
    required = ("weight",)
    optional: ClassVar[tuple[str, ...]] = (
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_double_scale",
        "weight_scale_zeros",
    )

    def matches(self, suffixes: Collection[str]) -> bool:
        return "weight" in suffixes and ("weight_scale" in suffixes or "weight_scale_inv" in suffixes)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        return self._kind(tensors, config, name).describe(tensors, config, name)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        return self._kind(tensors, config, name).unpack(tensors, config, name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        kind = self._holder(q)
        if "group_index" in q.parts:
            raise refuse("modelopt", q, "ModelOpt has no group index (act-order)")
        return kind.pack(q, q.details if q.origin == "modelopt" else {})

    def config(self, q: QTensor) -> dict[str, Any]:
        kind = self._holder(q)
        algo = kind.algos[0]
        if algo == "W8A8" or (algo == "FP8" and q.format.grouping == "row"):
            algo = "W8A8_SQ_PER_CHANNEL" if algo == "W8A8" else "FP8_PER_CHANNEL_PER_TOKEN"
        elif algo == "FP8" and q.format.group_rows != -1:
            algo = "FP8_PB_WO"
        out: dict[str, Any] = {"quant_algo": algo, "group_size": q.format.group_size}
        return {**out, "shape": list(q.shape)} if isinstance(kind, NF4QTensor) else out

    @staticmethod
    def _kind(tensors: Mapping[str, HasHeader], config: Config, name: str) -> Kind:
        kind = next((c for c in KINDS if c.recognises(tensors)), None)
        have = ", ".join(f"{s} {t.dtype.name}" for s, t in sorted(tensors.items()))
        if kind is None:
            raise LayoutError(
                f"[modelopt] {name or 'weight'}: {have or 'no tensors'} is none of the ways ModelOpt stores a weight"
            )
        only("modelopt", tensors, kind.suffixes, name, kind.algos[0])
        algo = str(config.get("quant_algo") or "").upper()
        if algo and algo != "MIXED_PRECISION" and not any(a in algo for a in kind.algos):
            raise LayoutError(f"[modelopt] {name or 'weight'}: quant_algo {algo}, but the tensors ({have}) are {kind.algos[0]}")
        return kind

    @staticmethod
    def _holder(q: QTensor) -> Kind:
        for kind in KINDS:
            if kind.holds(q.format):
                return kind
        raise refuse(
            "modelopt",
            q,
            "ModelOpt holds nvfp4 (global scale multiplies), mxfp4, mxfp8_e4m3, int4, int8, fp8_e4m3 and nf4_modelopt (nested)",
        )
