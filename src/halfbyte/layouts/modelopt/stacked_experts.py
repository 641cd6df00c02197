"""ModelOpt's stacks of experts: one tensor for all of them, each matrix (k, n) as the model keeps
it, NVFP4 along k.

    PROJ                  uint8 [e, k/2, n]      byte j of output i holds inputs 2j (low nibble) and 2j + 1
    PROJ_weight_scale     E4M3  [e, k/16, n]
    PROJ_weight_scale_2   float32, one factor for the whole stack     value = e2m1 · scale · factor

The parameter keeps its name (`experts.gate_up_proj`, no `.weight`), the rest is joined to it by an
underscore. Written for models whose experts are one parameter, gpt-oss and Llama 4. Its FP8, MXFP8
and MXFP4 exports of them have no second scale and are refused by name: MXFP8 and MXFP4 have groups
along the outputs, which no matrix product reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...errors import LayoutError, UnsupportedError
from ...formats import format_named
from ...numerics.transpose import transpose
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold
from ..common.float8 import E4M3, F32, U8, bytes_of, view_as


class ModelOptStack(Layout):
    """NVFP4 stacks, transposed."""

    name = "modelopt-stack"
    producers = ("modelopt",)
    required = ("", "weight_scale")
    optional = ("weight_scale_2",)
    parts: ClassVar[dict[str, str]] = {"": "codes", "weight_scale": "scales", "weight_scale_2": "global_scale"}
    harmless: ClassVar[dict[str, str]] = {"input_scale": "scale of the activations"}
    separator = "_"
    inputs_first = True

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        # `PARAMETER` and `PARAMETER_weight_scale` are ordinary names; a stack of codes is not.
        return self.matches(headers) and headers[""].dtype in (U8, E4M3) and len(headers[""].shape) == 3

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        codes, scales, factor = (tensors.get(s) for s in (*self.required, *self.optional))
        if codes is None or scales is None:
            raise LayoutError(f"[modelopt-stack] {name or 'weight'}: wanted the stack, its _weight_scale and its _weight_scale_2")
        if factor is None and (codes.dtype, scales.dtype) == (U8, E4M3):
            raise LayoutError(f"[modelopt-stack] {name}_weight_scale_2 is missing; NVFP4 stacks have one factor")
        if factor is None:
            kind = {(U8, U8): "MXFP4", (E4M3, U8): "MXFP8"}.get((codes.dtype, scales.dtype), "FP8")
            raise UnsupportedError(
                f"[modelopt-stack] {name or 'weight'}: {codes.dtype.name} {list(codes.shape)} under {scales.dtype.name} "
                f"{list(scales.shape)} is ModelOpt's {kind} stack of experts. It is recognised and not read; read: NVFP4. Export "
                "NVFP4, or experts one by one"
            )
        have = f"{codes.dtype.name} {list(codes.shape)}, {scales.dtype.name} {list(scales.shape)}, factors {list(factor.shape)}"
        if (codes.dtype, scales.dtype, factor.dtype) != (U8, E4M3, F32) or len(codes.shape) != 3:
            raise LayoutError(
                f"[modelopt-stack] {name or 'weight'}: {have}; wanted uint8 [e, k/2, n], E4M3 [e, k/16, n] and a float32"
            )
        e, half, n = codes.shape
        if tuple(scales.shape) != (e, half // 8, n) or half % 8 or tuple(factor.shape) not in ((), (1,)):
            raise LayoutError(
                f"[modelopt-stack] {name or 'weight'}: {have}; wanted scales [{e}, {half // 8}, {n}] and one factor"
            )
        return Described(format_named("nvfp4", 16), (e, n, half * 2))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts = {
            "codes": transpose(tensors[""]),
            "scales": transpose(bytes_of(tensors["weight_scale"])),
            "global_scale": np.full(shape[0], tensors["weight_scale_2"].reshape(()), np.float32),
        }
        details = {"layout": self.name, "factor_shape": list(tensors["weight_scale_2"].shape)}
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        fits = fmt == format_named("nvfp4", 16) and len(shape) == 3
        return "" if fits else "this layout holds stacks (e, n, k) in nvfp4:g16, the global scale multiplying"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if "group_index" in q.parts:
            raise cannot_hold(self.name, q, "it has no group index (act-order)")
        factors = q.parts["global_scale"]
        if factors.size and len(set(factors.reshape(-1).view(np.uint32).tolist())) > 1:
            raise cannot_hold(self.name, q, "it has one factor for the stack, and these experts have several")
        shape = tuple(self.own_details(q).get("factor_shape", ()))
        return {
            "": transpose(q.parts["codes"]),
            "weight_scale": view_as(transpose(q.parts["scales"]), "float8_e4m3fn"),
            "weight_scale_2": np.float32(factors.reshape(-1)[0] if factors.size else 1).reshape(shape),
        }

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_algo": "NVFP4", "group_size": 16}
