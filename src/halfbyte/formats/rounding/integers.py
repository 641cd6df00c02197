"""Encoding of integers with float group scales.

Symmetric (`intN`), a the largest magnitude of a group and h = 2^(N−1):

| `scale` | scale | codes reach |
|---|---|---|
| `max` | a / (h − 1) | −(h − 1) … h − 1 |
| `half` | a / (h − ½) | −h … h − 1, ±a half a step away from its code |
| `edge` | (the element of largest magnitude) / −h, so negative for a positive one | −h … h − 1, a exact |
| `no_clip` | max(−min / h, max / (h − 1)) | −h … h − 1, nothing clipped |

Asymmetric (`uintN`), over the group's range extended to hold 0 and n = 2^N − 1 steps:

| `zero` | scale | zero point |
|---|---|---|
| `range` | (max − min) / n | nearest code of 0 |
| `edge` | such that the end farther from 0 and 0 are codes; negative for a positive end | exact code of 0 |

Codes are round(x / scale) + zero, half to even, clipped. `order` says how a producer's rounded
arithmetic does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...numerics.bits import pack
from ...spec import Format
from .grouping import grouped, ungrouped
from .policy import COMPUTE, clip_in_dtype, float_info, one_of, policy_from, ratio, replace_zero, to_compute_dtype, to_scale_dtype
from .ranges import edge_scale

SCALE_RULES = ("max", "half", "edge", "no_clip")
ZERO_RULES = ("range", "edge")
ORDERS = ("divide", "reciprocal")


@dataclass(frozen=True)
class IntegerPolicy:
    """How a group of integers is rounded.

    scale       rule of the symmetric scale, one of `SCALE_RULES`
    zero        rule of scale and zero point of `uintN`, one of `ZERO_RULES`; "edge" to 3 bits and
                "range" beyond unless given
    compute     arithmetic, one of `policy.COMPUTE`
    order       "divide": round(x / s + zero), zero = round(low − min / s). "reciprocal": round(x ·
                (1 / s)) + zero, zero = low − round(min / s). low is the lowest signed code,
                −2^(N−1)
    zero_scale  replacement of a scale of 0: a number, "eps" for the machine epsilon of the dtype,
                or "tiny" for its smallest normal number, which is then the least magnitude of
                a scale
    """

    scale: str = "edge"
    zero: str = "range"
    compute: str = "exact"
    order: str = "divide"
    zero_scale: float | str = 0.0

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALE_RULES)
        one_of("zero", self.zero, ZERO_RULES)
        one_of("compute", self.compute, COMPUTE)
        one_of("order", self.order, ORDERS)


def encode_integers(x: NDArray[np.floating], fmt: Format, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Codes, scales and, for `uintN`, zero points of an integer format."""
    rule = policy_from(IntegerPolicy, fmt, {"zero": "edge" if fmt.bits <= 3 else "range"} | options)
    values = to_compute_dtype(grouped(x, fmt), rule.compute)
    half = 1 << (fmt.bits - 1)
    if fmt.inverse:
        return _inverse(values, fmt, x.shape, half)
    scale = asymmetric_scale(values, 2 * half - 1, rule.zero) if fmt.zero == "int" else symmetric_scale(values, fmt, rule.scale)
    empty = (scale == 0) & (rule.zero_scale != "tiny")
    if rule.zero_scale == "tiny":
        tiny = float_info(scale.dtype).smallest_normal
        scale = np.where(scale < 0, np.minimum(scale, -tiny), np.maximum(scale, tiny))
    else:
        scale = replace_zero(scale, rule.zero_scale)
    stored = to_scale_dtype(scale, fmt)
    # Codes are computed with the stored, rounded scale.
    of = values.dtype.type
    used, divisor, low, high = stored.astype(values.dtype)[..., None], of(fmt.divisor), -half, half - 1
    # Signed codes, −half … half − 1, as the producers have them: rounding a half depends on it.
    zero = np.zeros(stored.shape, values.dtype)
    if fmt.zero == "int":
        # Steps from the lowest code to 0: from the low end of the range, or with a negative scale
        # from the high one.
        start = np.where(used[..., 0] < 0, np.maximum(values.max(axis=-1), of(0)), np.minimum(values.min(axis=-1), of(0)))
        steps = ratio(start, used[..., 0])
        steps = steps if rule.order == "divide" else np.rint(steps)
        # A group of zeros has zero point 0 of the signed codes, the middle one, unless a least
        # scale makes the steps defined.
        zero = np.where(empty, of(0), np.rint(clip_in_dtype(of(low) - steps, low, high)))
    if rule.order == "divide":
        whole = np.rint(clip_in_dtype(ratio(values, used / divisor) + zero[..., None], low, high))
    else:
        inverse = ratio(np.ones((), values.dtype), used) * divisor
        whole = clip_in_dtype(np.rint(values * inverse) + zero[..., None], low, high)
    codes = (whole.astype(np.float64) + half).astype(np.uint8)
    parts = {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits), "scales": stored}
    return parts | ({"zeros": zero.astype(np.int16) + np.int16(half)} if fmt.zero == "int" else {})


def symmetric_scale(values: NDArray[Any], fmt: Format, rule: str) -> NDArray[Any]:
    """Scales of groups [*groups, g] by a rule of `SCALE_RULES`, times the format's divisor, in the
    dtype of the values.
    """
    half = 1 << (fmt.bits - 1)
    of = values.dtype.type
    largest, lowest = values.max(axis=-1), values.min(axis=-1)
    amax = np.maximum(np.abs(largest), np.abs(lowest))
    if half == 1 and rule in ("max", "no_clip"):
        raise FormatError(f"[quantize] {fmt.name} has no positive code, so scale={rule!r} has no steps; allowed: 'edge', 'half'")
    out: NDArray[Any]
    if rule == "max":
        out = amax / of((half - 1) / fmt.divisor)
    elif rule == "half":
        out = amax / of((half - 0.5) / fmt.divisor)
    elif rule == "edge":
        out = np.where(largest > -lowest, largest, lowest) / of(-half / fmt.divisor)
    else:
        below, above = np.maximum(-lowest, of(0)), np.maximum(largest, of(0))
        out = np.maximum(below / of(half / fmt.divisor), above / of((half - 1) / fmt.divisor))
    return out


def asymmetric_scale(values: NDArray[Any], steps: int, rule: str) -> NDArray[Any]:
    """Scales of groups [*groups, g] by a rule of `ZERO_RULES`, the range extended to hold 0, in the
    dtype of the values.
    """
    zero = values.dtype.type(0)
    high, low = np.maximum(values.max(axis=-1), zero), np.minimum(values.min(axis=-1), zero)
    return edge_scale(low, high, steps)[0] if rule == "edge" else (high - low) / values.dtype.type(steps)


def _inverse(values: NDArray[Any], fmt: Format, shape: tuple[int, ...], half: int) -> dict[str, NDArray[Any]]:
    """Encoding with a stored scale that divides: (1 / amax) · (half − 1); codes round(x · scale). 1
    for a group of zeros.
    """
    amax = np.abs(values).max(axis=-1)
    one = values.dtype.type(1)
    with np.errstate(over="ignore"):
        inverse = one / np.where(amax == 0, one, amax) * values.dtype.type(half - 1)
    stored = to_scale_dtype(np.where(amax == 0, one, inverse), fmt)
    whole = np.clip(np.rint(values * stored.astype(values.dtype)[..., None]), -half, half - 1)
    codes = (whole.astype(np.float64) + half).astype(np.uint8)
    return {"codes": pack(ungrouped(codes, fmt, shape), fmt.bits), "scales": stored}
