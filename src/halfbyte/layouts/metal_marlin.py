"""Metal-Marlin buffers: eight codes of one output a word, words down k, scales and zero points
beside them.

| tensor | dtype | shape |
|---|---|---|
| `qweight` | uint32 | [*lead, k/8, n], eight consecutive inputs of one output, low nibble first |
| `scales` | float16 | [*lead, G, n] |
| `zeros` | as scales | [*lead, G, n], integers; absent for codes that need none |

Codes are `uint4` with zero points, else `int4` (code − 8) or `fp4` (E2M1), as `codec` in the config
says (`int4` when it does not). Neighbouring threads hold neighbouring outputs, so a row of words is
one coalesced read. Source: the kernels of the Metal-Marlin project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..numerics.exact import bfloat16
from ..numerics.transpose import transpose
from ..spec import Format
from ..tensor.qtensor import QTensor
from .awq.gemm import awq_group
from .base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, cannot_hold, check_requested, label, require
from .common.integers import check_no_group_index, integer_misfit
from .common.words import as_bytes, as_words, recall, remember
from .quant_config.reader import PlainReader

U32 = np.dtype(np.uint32)
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))
CODECS = ("int4", "uint4", "fp4")


class MetalMarlinConfig(PlainReader):
    """Buffers of the fused Metal kernels: `codec`, `group_size`."""

    method = "metal-marlin"
    consumed = ("codec", "bits", "group_size")


class MetalMarlin(Layout):
    """Buffers of the fused Metal kernels."""

    name = "metal-marlin"
    holds = Holds(("int4", "uint4", "fp4"), "matrices and stacks whose rows are whole words of 8 codes")
    config_reader = MetalMarlinConfig
    one_format = True
    required = ("qweight", "scales")
    parts: ClassVar[dict[str, str]] = {"qweight": "codes"}
    optional = ("zeros",)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        shape = require(self.name, tensors, "qweight", name, (U32,))
        if len(shape) not in (2, 3):
            raise LayoutError(
                f"[metal-marlin] {label(name, 'qweight')} has shape {list(shape)}; wanted [k/8, n] or [experts, k/8, n]"
            )
        *lead, words, n = shape
        *_, groups, _ = require(
            self.name, tensors, "scales", name, FLOATS, (*lead, None, n), f"for {label(name, 'qweight')} {list(shape)}"
        )
        dtype = tensors["scales"].dtype
        codec = config.get("codec")
        if codec is None:
            codec = "uint4" if "zeros" in tensors else "int4"
        if codec not in CODECS or ("zeros" in tensors) != (codec == "uint4"):
            have = "with" if "zeros" in tensors else "without"
            raise LayoutError(
                f"[metal-marlin] {name}: codec {codec!r} {have} zeros; allowed: uint4 with zeros, int4 or fp4 without"
            )
        if "zeros" in tensors:
            require(self.name, tensors, "zeros", name, (dtype,), (*lead, groups, n), f"as {label(name, 'scales')}")
        size = awq_group(self.name, config, name, 8 * words, groups)
        return Described(format_named(codec, size, scale_dtype=dtype.name), (*lead, n, 8 * words))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        details: dict[str, Any] = {"layout": self.name}
        parts: dict[str, Array] = {
            "codes": as_bytes(transpose(tensors["qweight"])),
            "scales": transpose(tensors["scales"]),
        }
        if fmt.zero == "int":
            stored = transpose(tensors["zeros"])
            with np.errstate(invalid="ignore"):
                wide = stored.astype(np.float32)
                bad = ~((np.rint(wide) == wide) & (np.abs(wide) <= 32767))
                if bad.any():
                    at = tuple(int(i) for i in np.argwhere(bad)[0])
                    raise LayoutError(
                        f"[metal-marlin] {label(name, 'zeros')} holds {wide[at]} at group {at}; "
                        "zero points are integers of at most 16 bits"
                    )
            parts["zeros"] = wide.astype(np.int16)
            remember(details, "negative zeros", stored if (np.signbit(wide) & (wide == 0)).any() else None)
        return QTensor(fmt, shape, parts, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt.name == "fp4" and fmt.family == "fp4":
            why = "" if fmt.grouping == "row" else "the layout holds groups in order only"
        else:
            why = integer_misfit(fmt, shape, (4,), ndims=(2, 3))
        return why or (f"{shape[-1]} inputs are not whole words of 8" if shape[-1] % 8 else "")

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if q.format.family == "fp4" and "group_index" in q.parts:
            raise cannot_hold(self.name, q, "the layout holds groups in order only")
        check_no_group_index(self.name, q)
        dtype = q.parts["scales"].dtype
        check_requested(self.name, q, config, {"codec": q.format.name, "group_size": q.format.group_size})
        out: dict[str, Array] = {
            "qweight": transpose(as_words(q.parts["codes"], np.uint32)),
            "scales": transpose(q.parts["scales"]),
        }
        if q.format.zero == "int":
            zeros = q.parts["zeros"]
            stored = zeros.astype(dtype)
            if not np.array_equal(stored.astype(np.float32), zeros.astype(np.float32)):
                raise cannot_hold(
                    self.name, q, f"a zero point of up to {int(np.abs(zeros.astype(np.int32)).max())} is no {dtype.name} number"
                )
            signed = recall(self.own_details(q), "negative zeros", zeros.shape, dtype)
            if signed is not None:
                stored = np.where(signed == stored, signed, stored)
            out["zeros"] = transpose(stored)
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_method": self.name, "codec": q.format.name, "bits": 4, "group_size": q.format.group_size}
