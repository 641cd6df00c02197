"""An independent slow definition of every format: exact rational arithmetic, one element at a time,
and its own rounding.

Nothing here comes from the library but the `Format` description: element values come from
ml_dtypes, from the tables written by the producers, or from the definition, and the formula is
docs/design/layering.md's.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
NAN, INF = float("nan"), float("inf")

MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
SMALLEST_EXPONENT = {"float32": -126, "float16": -14, "bfloat16": -126}
LARGEST_EXPONENT = {"float32": 127, "float16": 15, "bfloat16": 127}
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def exponent_of(x: Fraction) -> int:
    """floor(log2 x) of a positive rational."""
    n, d = x.numerator, x.denominator
    e = n.bit_length() - d.bit_length()
    return e if (n >= d << e if e >= 0 else n << -e >= d) else e - 1


def rounded(x: Fraction, dtype: str) -> float:
    """`x` rounded once to the nearest value of `dtype`, ties to even, as a Python float (which
    holds all three exactly).
    """
    if x == 0:
        return 0.0
    magnitude = abs(x)
    e = max(exponent_of(magnitude), SMALLEST_EXPONENT[dtype])
    shift = MANTISSA_BITS[dtype] - e
    n, d = magnitude.numerator << max(shift, 0), magnitude.denominator << max(-shift, 0)
    whole, rest = divmod(n, d)  # in units of the last place, 2^-shift
    if 2 * rest > d or (2 * rest == d and whole % 2):
        whole += 1
    if whole.bit_length() - shift > LARGEST_EXPONENT[dtype] + 1:
        return math.copysign(INF, x)
    return math.copysign(math.ldexp(whole, -shift), x)


def number(x) -> Fraction | float:
    """A stored number as a Fraction, or the float NaN or infinity."""
    f = float(x)
    return Fraction(f) if math.isfinite(f) else f


@cache
def table(element: str, bits: int) -> tuple[Fraction | float, ...]:
    """Values of all codes."""
    ml = {
        "e2m1": ml_dtypes.float4_e2m1fn,
        "e2m3": ml_dtypes.float6_e2m3fn,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e8m0": ml_dtypes.float8_e8m0fnu,
    }
    codes = range(1 << bits)
    if element in ml:
        return tuple(number(v) for v in np.arange(1 << bits, dtype=np.uint8).view(ml[element]).astype(np.float64))
    if element == "ue4m3":
        signed = table("e4m3", 8)
        return tuple(Fraction(0) if b == 0x7F else Fraction(480) if b == 0xFF else abs(signed[b]) for b in codes)
    if element == "int":
        return tuple(Fraction(c - (1 << bits) // 2) for c in codes)
    if element == "uint":
        return tuple(Fraction(c) for c in codes)
    if element == "mxint":
        return tuple(Fraction(c - (1 << bits) * (c >= (1 << bits) // 2), (1 << bits) // 4) for c in codes)
    if element in ("nf4", "bnb_fp4"):
        name = {"nf4": "nf4", "bnb_fp4": "fp4"}[element]
        stored = load_file(GOLDEN / "bitsandbytes" / f"{name}_codes.safetensors")
        return tuple(number(v) for v in stored["model.layers.0.mlp.down_proj.weight.quant_map"])
    if element == "nf4_modelopt":
        digits = [round(float(v), 4) for v in table("nf4", 4)]
        digits[1] = -0.6962
        return tuple(number(v) for v in np.array(digits, np.float32).astype(ml_dtypes.bfloat16))
    if element == "iq4_nl":
        return tuple(map(Fraction, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
    raise KeyError(element)


def code_at(row, bits: int, j: int) -> int:
    """Code j of a little-endian bit stream."""
    stream = int.from_bytes(bytes(row), "little")
    return stream >> (j * bits) & ((1 << bits) - 1)


def times(*factors):
    """Product; NaN and infinity as floats do."""
    out = Fraction(1)
    for f in factors:
        if isinstance(out, Fraction) and isinstance(f, Fraction):
            out = out * f
        else:
            out = (float(out > 0) - float(out < 0) if isinstance(out, Fraction) else out) * (
                float(f > 0) - float(f < 0) if isinstance(f, Fraction) else f
            )
    return out


def plus(a, b):
    """Sum; NaN and infinity as floats do."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    return (0.0 if isinstance(a, Fraction) else a) + (0.0 if isinstance(b, Fraction) else b)


def over(a, b):
    """Quotient; NaN, infinity and a zero denominator as floats do."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if b == 0:
            return NAN if a == 0 else math.copysign(INF, a)
        return a / b
    if isinstance(a, Fraction):
        return Fraction(0) if math.isinf(b) else NAN
    if isinstance(b, Fraction):
        return a if b >= 0 or math.isnan(a) else -a
    return NAN


def group_at(fmt, shape, lead, i: int, j: int, index) -> tuple[int, ...]:
    """Where the group of element (*lead, i, j) lies in `scales`."""
    *_, n, k = shape
    flat = (sum(d * math.prod(shape[a + 1 : -2]) for a, d in enumerate(lead)) * n + i) * k + j
    if fmt.grouping == "flat":
        return (flat // fmt.group_size,)
    if fmt.grouping == "strided":
        return (flat % -(-math.prod(shape) // fmt.group_size),)
    g = int(index[j]) if index is not None else 0 if fmt.group_size == -1 else j // fmt.group_size
    if fmt.grouping == "block":
        return (*lead, 0 if fmt.group_rows == -1 else i // fmt.group_rows, g)
    return (*lead, i, g)


def scale_at(fmt, parts, at) -> tuple[Fraction | float, Fraction | float]:
    """(factor, divisor) of a group's scale."""
    raw = parts["scales"][at]
    if fmt.scale in ("e8m0", "e4m3", "ue4m3"):
        return table(fmt.scale, 8)[int(raw)], Fraction(1)
    if fmt.scale == "nested":
        block = int(np.ravel_multi_index(at, parts["scales"].shape))
        mapped, offset = number(parts["nested_map"][int(raw)]), number(parts["nested_offset"])
        absmax = number(parts["nested_absmax"][block // 256])
        return plus(over(mapped, absmax) if fmt.inverse else times(mapped, absmax), offset), Fraction(1)
    return (Fraction(1), number(raw)) if fmt.inverse else (number(raw), Fraction(1))


def value_at(fmt, shape, parts, position) -> Fraction | float:
    """The exact value of one element."""
    *lead_list, i, j = position
    lead = tuple(lead_list)
    at = group_at(fmt, shape, lead, i, j, parts.get("group_index"))
    value = table(fmt.element, fmt.bits)[code_at(parts["codes"][(*lead, i)], fmt.bits, j)]
    if fmt.zero != "none":
        value = plus(value, times(Fraction(-1), number(parts["zeros"][at])))
    factor, divisor = scale_at(fmt, parts, at) if fmt.scale != "none" else (Fraction(1), Fraction(1))
    value = times(value, factor)
    if fmt.super_size:
        upper = (*lead, i, j // fmt.super_size)
        value = times(value, number(parts["super_scales"][upper]))
    if fmt.global_op:
        g = number(parts["global_scale"][lead])
        value, divisor = (times(value, g), divisor) if fmt.global_op == "multiply" else (value, times(divisor, g))
    value = over(value, times(divisor, Fraction(fmt.divisor)))
    if fmt.bias:
        value = plus(value, number(parts["biases"][at]))
    if fmt.minimum:
        value = plus(value, times(Fraction(-1), Fraction(int(parts["mins"][at])), number(parts["super_mins"][upper])))
    return value


def dequantized(fmt, shape, parts, dtype: str) -> np.ndarray:
    """Every element by `value_at`, rounded once to `dtype`."""
    out = np.empty(shape, np.float64)
    for position in np.ndindex(*shape):
        value = value_at(fmt, shape, parts, position)
        out[position] = rounded(value, dtype) if isinstance(value, Fraction) else value
    return out.astype(NUMPY[dtype])
