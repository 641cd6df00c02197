"""HQQ: unsigned codes with a float zero point and a float scale (Badri and Shaji 2023).

    value = (code − zero) · scale

HQQ groups the flattened matrix. With axis 1, g consecutive elements share a scale: that is `row`
grouping when k is whole groups and `flat` otherwise. With axis 0 the matrix is reshaped to (g,
n·k/g) and a column shares a scale: element f of the flattened matrix is in group f mod (n·k/g), the
`strided` grouping (HQQ itself wants whole groups; here the quotient rounds up).

The `range` rule takes the range of a group over 2^N − 1 steps for its scale, and −min / scale for
its zero point; the scale is no smaller than keeps the zero point's units digit in its dtype, so
that a nearly constant group far from 0 stays right. The `edge` rule ties the end farther from zero,
and zero, to codes, as MLX does. Codes are found with the stored scale and zero point. HQQ's own
rule multiplies by the reciprocal in float32, before either is stored; its optimizer of zero points
is not round-to-nearest and not here.

Codecs: `hqq1` … `hqq8`. Any group size, −1 for the whole row (axis 1); 64 unless given. Format
options: `axis` (1), `scale_dtype` (float16; the zero points have it too), `grouping` (`row` or
`flat` for axis 1; `Family.fit` picks from the shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..numerics.bits import pack
from ..spec import Format
from .base import SCALE_DTYPES, Family, check_group, require_finite
from .options import fit_flat, grouping_option, only_options, scale_dtype_option
from .rounding.grouping import grouped, ungrouped
from .rounding.policy import float_info, one_of, policy_from, ratio, to_compute_dtype, to_scale_dtype
from .rounding.ranges import edge_scale


@dataclass(frozen=True)
class HQQPolicy:
    """How a group is rounded: `rule` "range", "edge" (the default to 3 bits), or "hqq" for HQQ's
    own arithmetic.
    """

    rule: str = "range"

    def __post_init__(self) -> None:
        one_of("rule", self.rule, ("range", "edge", "hqq"))


class HQQ(Family):
    """HQQ, 1 to 8 bits, both axes."""

    name = "hqq"
    codecs = tuple(f"hqq{b}" for b in range(1, 9))
    format_options = ("axis", "scale_dtype", "grouping")
    policies: ClassVar[dict[str, dict[str, Any]]] = {"hqq": {"scale_dtype": "input", "rule": "hqq"}}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        axis = options.get("axis", 1)
        if axis not in (0, 1):
            raise FormatError(f"[format] {codec} with axis {axis!r}; allowed: 0, 1")
        grouping = grouping_option(codec, options, ("row", "flat") if axis == 1 else ("strided",))
        group = check_group(codec, 64 if group_size is None else group_size)
        if group == -1 and grouping != "row":
            raise FormatError(f"[format] {codec} with group size -1 in {grouping} groups; give the number of elements a group")
        scale = scale_dtype_option(codec, options, "float16")
        return Format("hqq", codec, int(codec[3:]), "uint", group, scale, zero="float", grouping=grouping)

    def fit(self, fmt: Format, shape: Sequence[int]) -> Format:
        return fit_flat(fmt, shape)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        rule = policy_from(HQQPolicy, fmt, {"rule": "edge" if fmt.bits <= 3 else "range"} | policy).rule
        values = to_compute_dtype(grouped(require_finite(x, fmt.name), fmt), "float32" if rule == "hqq" else "exact")
        steps = values.dtype.type((1 << fmt.bits) - 1)
        scale, zero, whole = {"range": _range, "edge": _edge, "hqq": _hqq}[rule](values, steps, fmt)
        codes = np.clip(np.rint(whole), 0, steps).astype(np.uint8)
        return {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits), "scales": scale, "zeros": zero}


Rounded = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Stored scale, stored zero point, codes before rounding."""


def _range(values: NDArray[Any], steps: Any, fmt: Format) -> Rounded:
    low, high = values.min(axis=-1), values.max(axis=-1)
    digits = 2.0 ** (float_info(SCALE_DTYPES[fmt.scale]).nmant + 1)
    scale = to_scale_dtype(np.maximum((high - low) / steps, np.maximum(np.abs(low), np.abs(high)) / digits), fmt)
    stored = scale.astype(values.dtype)
    zero = to_scale_dtype(-ratio(low, stored), fmt, "zero point")
    return scale, zero, ratio(values, stored[..., None]) + zero.astype(values.dtype)[..., None]


def _edge(values: NDArray[Any], steps: Any, fmt: Format) -> Rounded:
    scale, edge, count = edge_scale(values.min(axis=-1), values.max(axis=-1), int(steps))
    # A constant group: one step from 0 to it.
    flat = scale == 0
    scale, count = to_scale_dtype(np.where(flat, edge, scale), fmt), np.where(flat, (edge != 0).astype(values.dtype), count)
    zero = to_scale_dtype(-count, fmt, "zero point")
    return scale, zero, ratio(values, scale.astype(values.dtype)[..., None]) + zero.astype(values.dtype)[..., None]


def _hqq(values: NDArray[Any], steps: Any, fmt: Format) -> Rounded:
    of = values.dtype.type
    low, span = values.min(axis=-1), values.max(axis=-1) - values.min(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(span <= of(1e-4), of(1), np.minimum(of(1) / span * steps, of(2e4)))
    zero = -low * inverse
    whole = values * inverse[..., None] + zero[..., None]
    return to_scale_dtype(of(1) / inverse, fmt), to_scale_dtype(zero, fmt, "zero point"), whole
