"""A format as a grid of representable values, given the parameters of a group: the target of GPTQ
and of the scale search.

    value = (element(code) − zero) · scale + bias            scale, zero and bias as the format stores them

Formats whose groups run along rows and whose scales are one level of floats, powers of two, or E4M3
under one tensor scale: integers, affine, Q4_0 … Q8_0, MX, NVFP4, FP4, FP8, IQ4_NL, NF4. K-quants
are fitted by `super_blocks`; flat blocks have their own encoders only.

For integers and E2M1, numbers may be torch tensors instead of arrays (`arrays`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..formats.base import SCALE_DTYPES
from ..formats.decode import scale_values
from ..numerics.bits import pack
from ..numerics.minifloat import MINIFLOATS, element_table, round_to_element
from ..spec import Format
from ..tensor.qtensor import QTensor
from .arrays import functions, host

F64 = NDArray[np.float64]

_LEVELS = ("e8m0", "e4m3", "ue4m3", "float16", "bfloat16", "float32")


_FLOATS = {
    "e2m1": (1, 0, 6.0), "e4m3": (3, -6, 448.0), "float16": (10, -14, 65504.0), "bfloat16": (7, -126, 3e38),
    "float32": (23, -126, 3e38),
}  # fmt: skip
"""Mantissa bits, exponent of the smallest normal number, where a scale or an element is cut off."""


def round_float(t: Any, kind: str) -> Any:
    """The nearest numbers of a kind of float for float32 or float64 t, in place; halfway to the
    even one, saturating.

    Steps are 2^(e − m) at exponent e for m bits of mantissa. Adding and taking off 2^p of them, p
    the mantissa of t's dtype, rounds to whole steps.
    """
    xp = functions(t)
    mantissa, least, top = _FLOATS[kind]
    xp.clip(t, -top, top, out=t)
    power = xp.clip(xp.abs(t), 2.0**least, None)
    word, field, p = (xp.int32, 0x7F800000, 23) if t.dtype == xp.float32 else (xp.int64, 0x7FF << 52, 52)
    bits = power.view(word)
    bits &= field
    power *= 1.5 * 2.0 ** (p - mantissa)
    t += power
    t -= power
    return t


def power_of_two(exponent: Any) -> Any:
    """2^e for whole numbers e of normal floats, float64."""
    xp = functions(exponent)
    return ((xp.cast(exponent, xp.int64) + 1023) << 52).view(xp.float64)


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

        where = functions(mask).where

        def pick(a: F64 | None, b: F64 | None) -> F64 | None:
            return None if a is None or b is None else where(mask, a, b)

        return Params(where(mask, self.scale, other.scale), pick(self.zero, other.zero), pick(self.bias, other.bias))

    @cached_property
    def divisor(self) -> F64:
        """The scale; infinity where it is 0, so that all comes out 0."""
        out: F64 = functions(self.scale).where(self.scale == 0, math.inf, self.scale)
        return out

    def on_host(self) -> Params:
        """The same numbers as arrays."""
        zero, bias = (None if a is None else host(a) for a in (self.zero, self.bias))
        return Params(host(self.scale), zero, bias)

    def beside(self, x: Any) -> Params:
        """The same numbers on the device of x."""
        array = functions(x).array
        zero, bias = (None if a is None else array(a) for a in (self.zero, self.bias))
        return Params(array(self.scale), zero, bias)

    def at(self, index: Any) -> Params:
        """The parameters under an index."""
        return Params(
            self.scale[index], None if self.zero is None else self.zero[index], None if self.bias is None else self.bias[index]
        )


@dataclass(frozen=True)
class Grid:
    """The values that a format can represent.

    fmt      the format
    factor   tensor scale, which multiplies every stored scale
    """

    fmt: Format
    factor: float = 1.0

    def __post_init__(self) -> None:
        f = self.fmt
        simple = f.grouping == "row" and not f.super_size and not f.minimum and not f.inverse and f.zero != "float"
        if not simple or f.scale not in _LEVELS or (f.divisor != 1.0 and not f.global_op):
            raise FormatError(
                f"[quantize] {f} has no grid of one scale a group; allowed for mse and gptq: int, uint, affine, q4_0 to q8_0, "
                "q2_K to q6_K, iq4_nl, iq4_xs, mxfp, nvfp4, fp4, fp8, nf4. Use rtn"
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

    @property
    def on_tensors(self) -> bool:
        """True where numbers may be torch tensors."""
        return self.fmt.element in ("int", "uint", "e2m1")

    def check(self, x: Any) -> None:
        """FormatError for a torch tensor x and a format whose codes are looked up."""
        if not self.on_tensors and not isinstance(x, np.ndarray):
            raise FormatError(
                f"[quantize] {self.fmt} of a {type(x).__name__}; allowed: int, uint, affine, E2M1. Give a NumPy array"
            )

    def stored(self, scale: F64) -> F64:
        """The nearest scale that the format stores, times the tensor scale."""
        xp, kind = functions(scale), self.fmt.scale
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            if kind == "e8m0":
                two: F64 = power_of_two(xp.clip(xp.rint(xp.log2(xp.where(scale > 0, scale, 1.0))), -127, 127))
                return two
            if kind in ("e4m3", "ue4m3"):
                nearest: F64 = round_float(xp.clip(xp.abs(scale) / self.factor, 2.0**-9, None), "e4m3") * self.factor
                return nearest
            out: F64 = round_float(scale + 0.0, kind)
            return out

    def stored_bias(self, bias: F64) -> F64:
        """The nearest bias that the format stores."""
        out: F64 = round_float(bias + 0.0, self.fmt.scale)
        return out

    def _zero(self, params: Params) -> Any:
        """The zero point; the implicit one of a format that stores none."""
        return params.zero if params.zero is not None else float(1 << (self.fmt.bits - 1)) if self.fmt.element == "int" else 0.0

    def codes(self, x: F64, params: Params) -> NDArray[np.uint8]:
        """The nearest code of each x, saturating; parameters broadcast against x."""
        if self.on_tensors:
            return self.codes_of(self.nearest(x, params)[0], params)
        f = self.fmt
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            t = x if params.bias is None else x - params.bias
            t = np.where(params.scale == 0, 0.0, t / np.where(params.scale == 0, 1.0, params.scale))
        if f.element in MINIFLOATS:
            minifloat: NDArray[np.uint8] = round_to_element(t, f.element)
            return minifloat
        values = element_table(f.element, f.bits)
        order = np.argsort(values, kind="stable").astype(np.uint8)
        middle = (values[order][1:] + values[order][:-1]) / 2
        looked_up: NDArray[np.uint8] = order[np.searchsorted(middle, t)]
        return looked_up

    def nearest(self, x: F64, params: Params) -> tuple[F64, F64]:
        """(input of `codes_of`, values) of the nearest codes; a zero keeps the sign of x for
        elements with a signed zero.
        """
        if not self.on_tensors:
            codes = self.codes(x, params)
            return codes.astype(np.float64), self.values(codes, params)
        t = self.steps(x, params)
        if self.fmt.element == "e2m1":
            t = functions(x).copysign(t, x * params.scale)
        value = t * params.scale
        return t, value if params.bias is None else value + params.bias

    def codes_of(self, nearest: F64, params: Params) -> NDArray[np.uint8]:
        """Codes of the first result of `nearest`; parameters broadcast against it."""
        xp = functions(nearest)
        if self.fmt.element == "e2m1":
            # Codes count halves up to 2, ones up to 4, twos up to 6.
            v = xp.abs(nearest)
            nearest = xp.minimum(xp.minimum(2 * v, v + 2), v / 2 + 4) + 8 * xp.signbit(nearest)
        elif self.on_tensors:
            nearest = nearest + self._zero(params)
        out: NDArray[np.uint8] = xp.cast(nearest, xp.uint8)
        return out

    def values(self, codes: NDArray[np.uint8], params: Params) -> F64:
        """The values of codes."""
        f, xp = self.fmt, functions(codes)
        if f.element in ("int", "uint"):
            out: F64 = (xp.cast(codes, xp.float64) - self._zero(params)) * params.scale
        else:
            out = xp.array(element_table(f.element, f.bits).copy())[xp.cast(codes, xp.int64)] * params.scale
        return out if params.bias is None else out + params.bias

    def rounded(self, x: F64, params: Params) -> F64:
        """The value of the nearest code. It dominates a search, so integers and E2M1 are rounded
        without a table.
        """
        if not self.on_tensors:
            return self.values(self.codes(x, params), params)
        t = self.steps(x, params)
        t *= params.scale
        if params.bias is not None:
            t += params.bias
        return t

    def steps(self, x: F64, params: Params) -> F64:
        """The element of the nearest code, less its zero point: integers and E2M1 only."""
        f, xp = self.fmt, functions(x)
        with np.errstate(over="ignore", invalid="ignore"):
            t: F64 = (x if params.bias is None else x - params.bias) / params.divisor
        if f.element == "e2m1":
            out: F64 = round_float(t, "e2m1")
            return out
        xp.rint(t, out=t)
        zero = self._zero(params)
        xp.clip(t, -zero, (1 << f.bits) - 1 - zero, out=t)
        return t

    def tensor(self, codes: NDArray[np.uint8], params: Params, shape: tuple[int, ...]) -> QTensor:
        """The packed weight [n, k] of codes [n, k] and parameters [n, G]."""
        f, codes, params = self.fmt, host(codes), params.on_host()
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


def has_grid(fmt: Format) -> bool:
    """True for a format of one scale a group."""
    try:
        Grid(fmt)
    except FormatError:
        return False
    return True


def on_tensors(fmt: Format) -> bool:
    """True for a format for which they accept torch tensors."""
    return has_grid(fmt) and Grid(fmt).on_tensors
