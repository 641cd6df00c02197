"""Exact edges between formats with the same codebook (E2M1, E4M3, NF4, …) under different kinds of
scale.

    source  element · scale · global          target  element · scale' · global'

Codes are unchanged, with two exceptions: where the target's scales have no sign (E8M0, GGUF's
UE4M3), a negative scale flips the signs of its codes, and where they have no zero (E8M0), a group
of scale 0 gets the codes of zero.

| target scale | holds |
|---|---|
| `float16`, `bfloat16`, `float32` | the product scale · global, where it is such a number |
| `e8m0` | powers of two from 2^−127 to 2^127 |
| `e4m3`, `ue4m3`, one level | 4 significant bits from 2^−9 to 448 |
| `e4m3`, `ue4m3`, two levels | the same times a power of two of this tensor: for powers of two a window of 18 exponents |

A two-level target keeps block scales and tensor scale; where the tensor scale divides
(compressed-tensors) or is an amax (MLX), its reciprocal or multiple must be an exact float32, else
a neighbouring float32 may be equal in the target's arithmetic (`producer_equality.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import family_of
from ..formats.base import SCALE_DTYPES
from ..formats.decode import scale_values
from ..numerics.bits import pack, unpack
from ..numerics.minifloat import round_to_element, scale_table
from ..spec import Format
from ..tensor.qtensor import QTensor
from .outcome import Checks, MisfitError
from .regroup import Regrouping

F64 = NDArray[np.float64]
Parts = dict[str, NDArray[Any]]

E4M3_TOP = 448.0
PLAIN_SCALES = ("e8m0", "e4m3", "ue4m3", "float16", "bfloat16", "float32")
HELD = {"float16": ("e4m3", "ue4m3"), "bfloat16": ("e8m0", "e4m3", "ue4m3"), "float32": PLAIN_SCALES}
"""Kinds of scale all of whose finite numbers a float type has, besides its own."""


def holds_codebook(fmt: Format, element: str) -> bool:
    """True for the target formats of this module whose elements are those of codebook `element`."""
    whole = fmt.element == element and element not in ("int", "uint", "mxint", "blocks") and fmt.scale in PLAIN_SCALES
    return whole and not (fmt.bias or fmt.minimum or fmt.super_size or fmt.inverse) and fmt.grouping == "row"


def to_codebook(q: QTensor, fmt: Format, checks: Checks) -> Parts:
    """The parts of `fmt` with the values of `q`. MisfitError when there are none."""
    source = q.format
    if source.element != fmt.element or source.scale not in PLAIN_SCALES:
        raise MisfitError(f"its elements are {source.element} under {source.scale} scales, not {fmt.element}")
    groups = Regrouping(q, fmt)
    family_of(fmt).geometry(fmt, q.shape)
    stored = groups.take(q.parts["scales"], "scales", checks)
    scale = scale_values(source.scale, stored)
    unsigned = fmt.scale in ("e8m0", "ue4m3")
    codes = q.parts["codes"]
    signs, zeros = unsigned & np.signbit(scale), (scale == 0) & (fmt.scale == "e8m0")
    if signs.any() or zeros.any():
        codes = _with_signs(q, groups, signs, zeros)
        checks.rewritten.append("signs of scales are moved into the codes")
        scale, stored = np.abs(scale), _unsigned(stored, source.scale)
    out: Parts = {"codes": codes}
    if fmt.scale not in ("e4m3", "ue4m3"):
        out["scales"] = _one_level(q, fmt, scale, checks)
        return out
    if source.scale in ("e4m3", "ue4m3"):
        _two_to_two(q, fmt, stored, scale, out, checks)
    else:
        _window(q, fmt, scale, out, checks)
    return out


def factor_of(q: QTensor) -> tuple[F64, F64]:
    """(numerator, divisor) of what multiplies the block scales of each matrix, float64 [*lead]."""
    fmt, lead = q.format, q.shape[:-2]
    one, constant = np.ones(lead), np.full(lead, fmt.divisor)
    if not fmt.global_op:
        return one, constant
    g = q.parts["global_scale"].astype(np.float64)
    return (one, g * constant) if fmt.global_op == "divide" else (g, constant)


def each(factors: F64) -> F64:
    """[*lead] -> [*lead, 1, 1], for broadcasting over block scales."""
    out: F64 = factors[..., None, None]
    return out


def _with_signs(q: QTensor, groups: Regrouping, signs: NDArray[np.bool_], zeros: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Codes with the sign of their group's scale, and 0 in groups of scale 0."""
    bits, k = q.format.bits, q.shape[-1]
    codes = unpack(q.parts["codes"], bits, k) ^ (groups.spread(signs).astype(np.uint8) << np.uint8(bits - 1))
    return pack(np.where(groups.spread(zeros), np.uint8(0), codes), bits)


def _unsigned(stored: NDArray[Any], kind: str) -> NDArray[Any]:
    """Stored scales without their sign."""
    return stored & np.uint8(0x7F) if kind in ("e4m3", "ue4m3") else np.abs(stored)


def _one_level(q: QTensor, fmt: Format, scale: F64, checks: Checks) -> NDArray[Any]:
    """scale · factor as numbers of `fmt.scale`."""
    up, down = map(each, factor_of(q))
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        product = scale * up
        if fmt.scale == "e8m0":
            mantissa, power = np.frexp(product / down)
            fits = (mantissa == 0.5) & (power >= -126) & (power <= 128) & (np.ldexp(0.5, power) * down == product)
            fits |= product == 0
            out: NDArray[Any] = np.where(product == 0, 0, power + 126).astype(np.uint8)
        else:
            out = (product / down).astype(SCALE_DTYPES[fmt.scale])
            # 24 bits times 24 bits at most: the product is exact in float64.
            fits = (out.astype(np.float64) * down == product) & np.isfinite(product)
    if not fits.all():
        what = "powers of two from 2^-127 to 2^127" if fmt.scale == "e8m0" else f"{fmt.scale} numbers"
        raise MisfitError(f"{int((~fits).sum())} block scales are no {what}")
    if q.format.global_op or q.format.scale not in (fmt.scale, *HELD.get(fmt.scale, ())):
        checks.add(f"block scales are {'powers of two' if fmt.scale == 'e8m0' else fmt.scale + ' numbers'}")
    return out


def _two_to_two(q: QTensor, fmt: Format, stored: NDArray[Any], scale: F64, out: Parts, checks: Checks) -> None:
    """E4M3 block scales to E4M3 block scales; the tensor scale is kept, or multiplied into them."""
    up, down = factor_of(q)
    if fmt.global_op:
        out["scales"] = scale_bytes(stored, q.format.scale, fmt.scale, checks)
        out["global_scale"] = _tensor_scale(q, fmt, up, down, checks)
        return
    if (up == 1).all() and (down == 1).all():
        if q.format.global_op:
            checks.add("the tensor scale is multiplied into the block scales")
        out["scales"] = scale_bytes(stored, q.format.scale, fmt.scale, Checks() if checks.met else checks)
        return
    product = scale * each(up)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        byte = round_to_element(product / each(down), "e4m3")
    if not np.array_equal(scale_table("e4m3")[byte] * each(down), product):
        raise MisfitError("its tensor scale cannot be multiplied into the block scales exactly")
    checks.add("the tensor scale is multiplied into the block scales")
    out["scales"] = byte


def scale_bytes(stored: NDArray[np.uint8], source: str, target: str, checks: Checks) -> NDArray[np.uint8]:
    """Block scale bytes read the same by both kinds. MisfitError for NaN and for 480, which only
    one of them has.
    """
    if source == target:
        return stored
    odd = stored & 0x7F == 0x7F
    if odd.any():
        byte = int(stored[odd].reshape(-1)[0])
        raise MisfitError(f"{int(odd.sum())} block scale bytes are {byte:#04x}, which E4M3 reads as NaN and GGUF as 0 or 480")
    if source == "ue4m3":
        checks.add("no block scale byte is 0x7f")
        return stored & np.uint8(0x7F)
    return stored


def _tensor_scale(q: QTensor, fmt: Format, up: F64, down: F64, checks: Checks) -> NDArray[Any]:
    """The stored tensor scale [*lead] of `fmt` that means up / down: the source's own where both
    mean the same by it. MisfitError when it is no float32.
    """
    if (q.format.global_op, q.format.divisor) == (fmt.global_op, fmt.divisor):
        return q.parts["global_scale"]
    want, over = (down, up) if fmt.global_op == "divide" else (up * fmt.divisor, down)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        g = np.asarray(want / over, np.float32)
        exact = (g.astype(np.float64) * over == want) & np.isfinite(g)
    if not exact.all():
        what = "reciprocal" if fmt.global_op == "divide" or (over != 1).any() else f"multiple by {fmt.divisor:g}"
        raise MisfitError(f"the {what} of its tensor scale is no float32 number")
    if q.format.global_op:
        checks.add("the tensor scale has an exact counterpart")
    return g


def _window(q: QTensor, fmt: Format, scale: F64, out: Parts, checks: Checks) -> None:
    """Any block scales to E4M3 times one power of two of each matrix."""
    if not np.isfinite(scale).all():
        raise MisfitError("block scales are NaN or infinite")
    up, down = factor_of(q)
    product = scale * each(up)
    size = np.abs(product / each(down))
    unit = np.ones_like(up)
    if fmt.global_op:
        # The largest block scale is mapped to the top of E4M3, which leaves the most range for the
        # smallest.
        peak = size.max(axis=(-2, -1), initial=0)
        mantissa, exponent = np.frexp(peak / E4M3_TOP)
        unit = np.ldexp(1.0, exponent - (mantissa == 0.5))
    whole = each(down * unit)
    byte = round_to_element(product / whole, "e4m3")
    if not np.array_equal(scale_table("e4m3")[byte] * whole, product):
        where = " under one tensor scale" if fmt.global_op else ""
        raise MisfitError(f"block scales {_reach(size)} do not fit E4M3's window{where}")
    checks.add("block scales lie in E4M3's window")
    out["scales"] = byte
    if fmt.global_op:
        g = 1 / unit if fmt.global_op == "divide" else unit * fmt.divisor
        with np.errstate(over="ignore"):
            out["global_scale"] = np.asarray(g, np.float32)
        if not np.array_equal(out["global_scale"].astype(np.float64), g):
            raise MisfitError("the tensor scale is beyond float32")


def _reach(size: F64) -> str:
    """The range of the values above 0, as text."""
    some = size[size > 0]
    return f"from {some.min():.3g} to {some.max():.3g}" if some.size else "of 0"
