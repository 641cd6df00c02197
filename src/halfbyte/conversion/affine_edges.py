"""Exact edges from affine values to integers with zero points, or to codes with a scale and a bias.

    source   (c − z) · s        or   c · s + o
    integer  (c' − z') · s'     z' stored in `uint`, the middle code in `int`
    affine   c' · s' + o'       MLX; Q4_1 and Q5_1 of GGUF

Codes are unchanged where the target can store their zero point or bias. Otherwise all codes of a
group are shifted, c' = c + d, when every code that occurs stays in the target's range; a group that
exceeds the range by one at the top gets the negated codes and a negative scale. In a group with
scale 0 every value is the offset o: its codes become z' + 1 and its scale o, or z' − 1 and −o where
z' is the largest code.

An edge is exact when these functions return parts; they raise MisfitError, with the reason, when
the target has no parts with the same values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import family_of
from ..formats.base import SCALE_DTYPES
from ..numerics.bits import pack
from ..numerics.exact import two_sum
from ..spec import Format
from .outcome import Checks, MisfitError
from .regroup import Regrouping
from .source_values import F64, AffineValues

Parts = dict[str, NDArray[Any]]


def holds_affine(fmt: Format) -> bool:
    """True for the target formats of this module."""
    plain = fmt.float_scale and not fmt.super_size and not fmt.global_op and not fmt.inverse and fmt.divisor == 1.0
    return fmt.element in ("int", "uint") and plain and fmt.zero != "float" and fmt.grouping == "row"


def to_affine(values: AffineValues, fmt: Format, checks: Checks, round_biases: bool = False, least_zero: int = 0) -> Parts:
    """The parts of `fmt` that have exactly these values. Raises MisfitError when there are none.

    least_zero    the smallest zero point the layout can store
    round_biases  round biases to their dtype; the caller then compares the values that the
                  target's decoder gives
    """
    q, groups = values.q, Regrouping(values.q, fmt)
    family_of(fmt).geometry(fmt, q.shape)
    scale = groups.take(values.scale, "scales", checks)
    if scale.ndim == 0:
        scale = np.broadcast_to(scale, (*q.shape[:-1], fmt.groups(q.shape[-1])))
    offset = None if values.offset is None else groups.take(values.offset, "offsets", checks)
    zero = None if values.zero is None else groups.take(values.zero, "zero points", checks)
    if fmt.bias:
        return _affine(values, fmt, groups, scale, zero, offset, checks, round_biases)
    return _integers(values, fmt, groups, scale, zero, offset, checks, least_zero)


_FIT_FLOAT32 = ("float16", "e8m0", "e4m3", "ue4m3", "u4", "u6", "i6", "i8")
"""Kinds of scale whose products with a small integer or a float16 are always exact in float32."""


def cast(values: F64, fmt: Format, what: str, checks: Checks, from_kind: str = "") -> NDArray[Any]:
    """float64 numbers in the scale dtype of `fmt`, exactly. MisfitError otherwise.

    from_kind  kind of scale that they were computed from, when this kind alone proves that they fit
    """
    dtype = SCALE_DTYPES[fmt.scale]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out = values.astype(dtype)
        off = ~((out.astype(np.float64) == values) & np.isfinite(values))
    if off.any():
        worst = values[off].reshape(-1)[0]
        raise MisfitError(f"{int(off.sum())} {what} are no {fmt.scale} numbers (the first is {worst:.9g})")
    if from_kind != fmt.scale and not (fmt.scale == "float32" and from_kind in _FIT_FLOAT32):
        checks.add(f"{what} are {fmt.scale} numbers")
    return out


def _kept(values: AffineValues, fmt: Format) -> bool:
    """True when the stored bytes of the codes can be used unchanged."""
    return values.numbers is None and values.q.format.bits == fmt.bits


def _codes(values: AffineValues, fmt: Format, groups: Regrouping, shift: NDArray[np.int64], checks: Checks) -> NDArray[np.uint8]:
    """Packed c + shift (one shift per group, or 0-d). MisfitError when a code leaves the range."""
    if _kept(values, fmt) and not shift.any():
        return values.q.parts["codes"]
    top = (1 << fmt.bits) - 1
    out = values.present().astype(np.int32) + groups.spread(shift).astype(np.int32)
    outside = int(((out < 0) | (out > top)).sum())
    if outside:
        raise MisfitError(f"{outside} codes would leave the range of {fmt.name}")
    if not _always_fits(values, shift, top):
        checks.add(f"the codes that occur fit {fmt.name}")
    return pack(out.astype(np.uint8), fmt.bits)


def _affine(
    values: AffineValues,
    fmt: Format,
    groups: Regrouping,
    scale: F64,
    zero: NDArray[np.int64] | None,
    offset: F64 | None,
    checks: Checks,
    round_biases: bool,
) -> Parts:
    shift = np.asarray(-values.low, np.int64)
    # c' = c + d, so o' = o − d·s: the product of a code and a scale, exact in float64.
    bias = -(zero if zero is not None else np.int64(0)) * scale - shift * scale
    if offset is not None:
        bias, lost = two_sum(offset, bias)
        if (np.isfinite(offset) & (lost != 0)).any():
            raise MisfitError("biases need more than 53 bits")
    own = values.q.format
    if round_biases:
        with np.errstate(over="ignore"):
            bias = bias.astype(SCALE_DTYPES[fmt.scale]).astype(np.float64)
    small = own.scale in _FIT_FLOAT32 and own.zero != "float" and not own.global_op
    scales = cast(scale, fmt, "scales", checks, _kind(values))
    biases = cast(bias, fmt, "biases", checks, own.scale if own.bias else "i8" if small else "")
    return {"codes": _codes(values, fmt, groups, shift, checks), "scales": scales, "biases": biases}


def _kind(values: AffineValues) -> str:
    """Kind of scale that `values.scale` was read from, "" for products of two float scales."""
    fmt = values.q.format
    return (
        "" if fmt.global_op else "i8" if fmt.super_size or (values.numbers is not None and fmt.scale != "float32") else fmt.scale
    )


def _integers(
    values: AffineValues,
    fmt: Format,
    groups: Regrouping,
    scale: F64,
    zero: NDArray[np.int64] | None,
    offset: F64 | None,
    checks: Checks,
    least_zero: int,
) -> Parts:
    top, middle = (1 << fmt.bits) - 1, 1 << (fmt.bits - 1)
    constant = None
    if offset is not None:
        zero, constant = _whole_zero(scale, offset, checks)
    assert zero is not None
    if fmt.zero == "int":
        # The zero point is kept where possible; else codes and zero point are shifted together.
        new = np.clip(zero - values.low, least_zero, top)
        if not np.array_equal(new, zero) and values.numbers is None:
            checks.add("zero points and codes are shifted into range together")
    else:
        new = np.asarray(middle, np.int64)
        if values.q.format.zero == "int" or offset is not None:
            checks.add("zero points are the middle code" if np.all(zero == middle) else "codes less their zero points fit")
    shift = np.asarray(new - zero)
    kind = _kind(values) if constant is None else ""
    if constant is not None and offset is not None:
        codes, scale = _with_constants(values, fmt, groups, shift, new, scale, offset, constant)
    else:
        cast(scale, fmt, "scales", Checks(), kind)  # fails sooner than the codes would
        if fmt.zero == "none" and not _fits(values, groups, shift, top):
            codes, scale = _flipped(values, fmt, groups, zero, scale, checks)
        else:
            codes = _codes(values, fmt, groups, shift, checks)
    parts = {"codes": codes, "scales": cast(scale, fmt, "scales", checks, kind)}
    if fmt.zero == "int":
        parts["zeros"] = np.array(np.broadcast_to(new, scale.shape), np.int16)
    return parts


def _whole_zero(scale: F64, offset: F64, checks: Checks) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """(z with −z · s = o, 0 in constant groups; which groups are constant, None where no constant
    is other than 0). MisfitError unless every z is an integer.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zero = np.rint(-offset / scale)
        wrong = ~((-zero * scale == offset) & (np.abs(zero) < 1 << 15))
    constant = np.isfinite(offset) & (scale == 0)
    bad = wrong & ~constant
    if bad.any():
        raise MisfitError(f"{int(bad.sum())} offsets are no whole number of scales")
    checks.add("offsets are whole numbers of scales")
    return np.where(constant, 0, zero).astype(np.int64), constant if (constant & (offset != 0)).any() else None


def _always_fits(values: AffineValues, shift: NDArray[np.int64], top: int) -> bool:
    """True when any code of the source's range stays within 0 … top."""
    return not shift.size or (values.low + int(shift.min()) >= 0 and values.high + int(shift.max()) <= top)


def _fits(values: AffineValues, groups: Regrouping, shift: NDArray[np.int64], top: int) -> bool:
    """True when every code stays within 0 … top."""
    if _always_fits(values, shift, top):
        return True
    moved = values.present().astype(np.int32) + groups.spread(shift).astype(np.int32)
    return bool(((moved >= 0) & (moved <= top)).all())


def _flipped(
    values: AffineValues, fmt: Format, groups: Regrouping, zero: NDArray[np.int64], scale: F64, checks: Checks
) -> tuple[NDArray[np.uint8], F64]:
    """Codes around the middle; a group that fits only with the opposite sign gets a negative scale.
    MisfitError when it fits under neither sign.
    """
    middle, top = 1 << (fmt.bits - 1), (1 << fmt.bits) - 1
    steps = values.present().astype(np.int32) - groups.spread(zero).astype(np.int32)
    starts = np.flatnonzero(np.diff(groups.target, prepend=-1))
    least = np.minimum.reduceat(steps, starts, axis=-1)
    most = np.maximum.reduceat(steps, starts, axis=-1)
    over = (least < -middle) | (most > top - middle)
    flip = over & (most <= middle) & (least >= middle - top)
    if (over & ~flip).any():
        raise MisfitError(
            f"{int((over & ~flip).sum())} groups reach from {int(least.min())} to {int(most.max())} steps; "
            f"{fmt.name} holds {-middle} to {top - middle}"
        )
    checks.add("groups that exceed the range by one step have negative scales")
    sign = np.where(flip, -1, 1)
    codes = steps * sign[..., groups.target] + middle
    return pack(codes.astype(np.uint8), fmt.bits), scale * sign


def _with_constants(
    values: AffineValues,
    fmt: Format,
    groups: Regrouping,
    shift: NDArray[np.int64],
    new: NDArray[np.int64],
    scale: F64,
    offset: F64,
    constant: NDArray[np.bool_],
) -> tuple[NDArray[np.uint8], F64]:
    """Codes and scales where some groups are constant, equal to their offset."""
    top = (1 << fmt.bits) - 1
    codes = values.present().astype(np.int32) + groups.spread(shift).astype(np.int32)
    zero = np.broadcast_to(new, scale.shape)
    up = zero < top
    is_constant = constant[..., groups.target]
    one = np.where(up, zero + 1, zero - 1)
    codes = np.where(is_constant, one[..., groups.target], codes)
    if ((codes < 0) | (codes > top)).any():
        raise MisfitError(f"codes would leave the range of {fmt.name}")
    return pack(codes.astype(np.uint8), fmt.bits), np.where(constant, np.where(up, offset, -offset), scale)
