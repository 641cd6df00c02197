"""A format as a grid of values under the parameters of a group: what GPTQ rounds to, and what a search tries.

    value = (element(code) − zero) · scale + bias            scale, zero and bias as the format stores them

Formats whose groups run along rows and whose scales are one level of floats, powers of two, or E4M3 under one tensor scale:
integers, affine, Q4_0 … Q8_0, MX, NVFP4, FP4, FP8, IQ4_NL, NF4. K-quants and flat blocks are rounded by their own encoders only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bits import pack
from ..errors import FormatError
from ..formats.base import SCALE_DTYPES
from ..formats.decode import scale_values
from ..minifloat import MINIFLOATS, element_table, round_to_element
from ..qtensor import QTensor
from ..spec import Format

F64 = NDArray[np.float64]

_LEVELS = ("e8m0", "e4m3", "ue4m3", "float16", "bfloat16", "float32")


def round_e2m1(t: NDArray[Any]) -> NDArray[Any]:
    """The nearest E2M1 values of float32 or float64 t, in place; halfway to the even code, saturating.

    Steps are 1/2 below 2, 1 below 4, 2 beyond. Adding and taking off 2^m of them, m the mantissa's bits, rounds to whole steps.
    """
    np.clip(t, -6, 6, out=t)
    power = np.maximum(np.abs(t), 1)
    bits, field, mantissa = (np.int32, 0x7F800000, 23) if t.dtype == np.float32 else (np.int64, 0x7FF << 52, 52)
    power.view(bits)[...] &= field
    power *= t.dtype.type(1.5 * 2 ** (mantissa - 1))
    t += power
    t -= power
    return t


@dataclass(frozen=True)
class Params:
    """Parameters of groups, arrays [...] of one shape, float64 values as the format stores them.

    scale  times the tensor scale
    zero   whole numbers, in codes; None without
    bias   None without
    """

    scale: F64
    zero: F64 | None = None
    bias: F64 | None = None

    def where(self, mask: NDArray[np.bool_], other: Params) -> Params:
        """These where `mask`, else the other's."""

        def pick(a: F64 | None, b: F64 | None) -> F64 | None:
            return None if a is None or b is None else np.where(mask, a, b)

        return Params(np.where(mask, self.scale, other.scale), pick(self.zero, other.zero), pick(self.bias, other.bias))

    def at(self, index: Any) -> Params:
        """The parameters under an index."""
        return Params(
            self.scale[index], None if self.zero is None else self.zero[index], None if self.bias is None else self.bias[index]
        )


@dataclass(frozen=True)
class Grid:
    """The values a format can have.

    fmt      the format
    factor   tensor scale: what multiplies every stored scale
    """

    fmt: Format
    factor: float = 1.0

    def __post_init__(self) -> None:
        f = self.fmt
        simple = f.grouping == "row" and not f.super_size and not f.minimum and not f.inverse and f.zero != "float"
        if not simple or f.scale not in _LEVELS or (f.divisor != 1.0 and not f.global_op):
            raise FormatError(
                f"[quantize] {f} is no grid of one scale a group; allowed for mse and gptq: int, uint, affine, q4_0 to q8_0, "
                "mxfp, nvfp4, fp4, fp8, iq4_nl, nf4. Use rtn"
            )

    @cached_property
    def table(self) -> F64:
        """Element values in order of size, without NaN, infinities and duplicates."""
        f = self.fmt
        if f.element in ("int", "uint"):
            low = -(1 << (f.bits - 1)) if f.element == "int" else 0
            return np.arange(low, low + (1 << f.bits), dtype=np.float64)
        values = element_table(f.element, f.bits)
        return np.unique(values[np.isfinite(values)])

    @property
    def top(self) -> float:
        """Largest magnitude of an element."""
        return float(np.abs(self.table).max())

    def with_factor(self, factor: float) -> Grid:
        """The grid under another tensor scale."""
        return replace(self, factor=factor)

    def stored(self, scale: F64) -> F64:
        """The nearest scale that the format stores, times the tensor scale."""
        kind = self.fmt.scale
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            if kind == "e8m0":
                power = np.rint(np.log2(np.where(scale > 0, scale, 1)))
                two: F64 = np.ldexp(1.0, np.clip(power, -127, 127).astype(int))
                return two
            if kind in ("e4m3", "ue4m3"):
                byte = round_to_element(np.maximum(np.abs(scale) / self.factor, 2.0**-9), "e4m3")
                return element_table("e4m3", 8)[byte] * self.factor
            limit = float(np.finfo(np.float16).max) if kind == "float16" else 3e38
            out: F64 = np.clip(scale, -limit, limit).astype(SCALE_DTYPES[kind]).astype(np.float64)
            return out

    def stored_bias(self, bias: F64) -> F64:
        """The nearest bias that the format stores."""
        return bias.astype(SCALE_DTYPES[self.fmt.scale]).astype(np.float64)

    def codes(self, x: F64, params: Params) -> NDArray[np.uint8]:
        """The nearest code of each x, saturating; parameters broadcast against x."""
        f = self.fmt
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            t = x if params.bias is None else x - params.bias
            t = np.where(params.scale == 0, 0.0, t / np.where(params.scale == 0, 1.0, params.scale))
        if f.element in ("int", "uint"):
            zero = params.zero if params.zero is not None else float(1 << (f.bits - 1)) if f.element == "int" else 0.0
            return np.clip(np.rint(t) + zero, 0, (1 << f.bits) - 1).astype(np.uint8)
        if f.element in MINIFLOATS:
            return round_to_element(t, f.element)
        values = element_table(f.element, f.bits)
        order = np.argsort(values, kind="stable").astype(np.uint8)
        middle = (values[order][1:] + values[order][:-1]) / 2
        return order[np.searchsorted(middle, t)]

    def values(self, codes: NDArray[np.uint8], params: Params) -> F64:
        """What codes stand for."""
        f = self.fmt
        if f.element in ("int", "uint"):
            zero = params.zero if params.zero is not None else float(1 << (f.bits - 1)) if f.element == "int" else 0.0
            out = (codes - zero) * params.scale
        else:
            out = element_table(f.element, f.bits)[codes] * params.scale
        return out if params.bias is None else out + params.bias

    def rounded(self, x: F64, params: Params) -> F64:
        """The value of the nearest code; what a search does most, so integers and E2M1 are rounded without looking codes up."""
        f = self.fmt
        if f.element not in ("int", "uint", "e2m1"):
            return self.values(self.codes(x, params), params)
        t = self.steps(x, params)
        t *= params.scale
        if params.bias is not None:
            t += params.bias
        return t

    def steps(self, x: F64, params: Params) -> F64:
        """The element of the nearest code, less its zero point: integers and E2M1 only."""
        f = self.fmt
        t: F64 = x - params.bias if params.bias is not None else x.copy()
        empty = params.scale == 0
        with np.errstate(over="ignore", invalid="ignore"):
            t /= np.where(empty, 1.0, params.scale)
        if empty.any():
            t *= ~empty
        if f.element == "e2m1":
            return round_e2m1(t)
        np.rint(t, out=t)
        zero = params.zero if params.zero is not None else float(1 << (f.bits - 1)) if f.element == "int" else 0.0
        np.clip(t, -zero, (1 << f.bits) - 1 - zero, out=t)
        return t

    def tensor(self, codes: NDArray[np.uint8], params: Params, shape: tuple[int, ...]) -> QTensor:
        """The packed weight [n, k] of codes [n, k] and parameters [n, G]."""
        f = self.fmt
        parts: dict[str, NDArray[Any]] = {"codes": pack(codes, f.bits), "scales": self._scales(params.scale)}
        if f.zero == "int":
            assert params.zero is not None
            parts["zeros"] = params.zero.astype(np.int16)
        if f.bias:
            assert params.bias is not None
            parts["biases"] = params.bias.astype(SCALE_DTYPES[f.scale])
        if f.global_op:
            parts["global_scale"] = np.array(1 / self.factor if f.global_op == "divide" else self.factor * f.divisor, np.float32)
        return QTensor(f, shape, parts)

    def _scales(self, scale: F64) -> NDArray[Any]:
        kind = self.fmt.scale
        if kind == "e8m0":
            _, power = np.frexp(scale)
            return (power + 126).astype(np.uint8)
        if kind in ("e4m3", "ue4m3"):
            return round_to_element(scale / self.factor, "e4m3")
        return scale.astype(SCALE_DTYPES[kind])

    def params_of(self, q: QTensor) -> Params:
        """The parameters [n, G] of a weight in this format."""
        f = self.fmt
        scale = scale_values(f.scale, q.parts["scales"]) * self.factor
        zero = q.parts["zeros"].astype(np.float64) if f.zero == "int" else None
        return Params(scale, zero, q.parts["biases"].astype(np.float64) if f.bias else None)


def factor_of(q: QTensor) -> float:
    """What multiplies every stored scale of a matrix, as its tensor scale says."""
    f = q.format
    if not f.global_op:
        return 1.0
    g = float(q.parts["global_scale"])
    return 1 / g if f.global_op == "divide" else g / f.divisor
