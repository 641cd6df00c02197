"""Encoding of minifloats with float group scales: FP4 and FP8.

scale = amax / M, rounded to its dtype; code = nearest(x / scale), saturating at M, the element's
largest value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack
from ...numerics.minifloat import TIES, ZEROS, element_table, round_to_element, sign_zeros
from ...spec import Format
from ..base import require_finite
from .grouping import grouped, ungrouped
from .policy import COMPUTE, one_of, policy_from, ratio, replace_zero, to_compute_dtype, to_scale_dtype


@dataclass(frozen=True)
class FloatPolicy:
    """How a group of minifloats is rounded.

    compute     arithmetic of amax / M and of x / scale, one of `policy.COMPUTE`
    zero_scale  replacement of a scale of 0: a number, or "eps" for the machine epsilon of the scale
                dtype
    ties, zeros rounding of the elements, see `minifloat`
    """

    compute: str = "exact"
    zero_scale: float | str = 0.0
    ties: str = "even"
    zeros: str = "keep"

    def __post_init__(self) -> None:
        one_of("compute", self.compute, COMPUTE)
        one_of("ties", self.ties, TIES)
        one_of("zeros", self.zeros, ZEROS)


def encode_float_scaled(x: NDArray[np.floating], fmt: Format, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Codes and scales of a minifloat format under float scales."""
    rule = policy_from(FloatPolicy, fmt, options)
    groups = grouped(require_finite(x, fmt.name), fmt)
    values = to_compute_dtype(groups, rule.compute)
    table = element_table(fmt.element, fmt.bits)
    amax = np.abs(values).max(axis=-1)
    scales = to_scale_dtype(amax / amax.dtype.type(table[np.isfinite(table)].max()), fmt)
    scales = replace_zero(scales, rule.zero_scale)
    scaled = ratio(values, scales.astype(values.dtype)[..., None])
    codes = sign_zeros(round_to_element(scaled, fmt.element, rule.ties), groups, fmt.element, rule.zeros)
    return {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits), "scales": scales}
