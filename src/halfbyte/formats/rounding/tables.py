"""Encoding of table codes scaled by an absolute maximum: NF4, bitsandbytes' fp4, ModelOpt's NF4.

absmax = max |x| of a block; code = nearest table entry to x / absmax, ties to the smaller value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack
from ...numerics.minifloat import element_table
from ...spec import Format
from ..nested import GRIDS, nest, nest_modelopt, nested_values
from .grouping import grouped, row_blocks, ungrouped
from .policy import COMPUTE, one_of, policy_from, ratio, to_compute_dtype, to_scale_dtype

NEAREST = ("midpoint", "sorted", "difference")


@dataclass(frozen=True)
class TablePolicy:
    """How a block is rounded.

    compute       arithmetic, one of `policy.COMPUTE`
    order         "divide": x / absmax. "reciprocal": x · (1 / max(absmax, 1e-38)), but the short
                  last block of a tensor divides
    nearest       "midpoint": by comparison with the midpoints of neighbours. "sorted": the same,
                  but of two equal entries (fp4's zeros) the second takes the values above.
                  "difference": the first entry of least |x − entry|, each difference rounded to the
                  dtype of the arithmetic
    absmax        what x is divided by: "stored", as it decodes, or "unrounded"
    nested_codes  how the second level finds its codes, one of `nested.GRIDS`
    """

    compute: str = "exact"
    order: str = "divide"
    nearest: str = "midpoint"
    absmax: str = "stored"
    nested_codes: str = "exact"

    def __post_init__(self) -> None:
        one_of("compute", self.compute, COMPUTE)
        one_of("order", self.order, ("divide", "reciprocal"))
        one_of("nearest", self.nearest, NEAREST)
        one_of("absmax", self.absmax, ("stored", "unrounded"))
        one_of("nested_codes", self.nested_codes, GRIDS)


def encode_table(x: NDArray[np.floating], fmt: Format, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Codes and absolute maxima, plain or nested, of a table format."""
    rule = policy_from(TablePolicy, fmt, options)
    groups = grouped(x, fmt)
    absmax = to_compute_dtype(np.abs(groups).max(axis=-1), rule.compute)
    short = rule.order == "reciprocal" and fmt.grouping == "flat" and x.size % fmt.group_size != 0
    if short:
        absmax[-1] = np.maximum(absmax[-1], absmax.dtype.type(1e-38))
    if fmt.scale != "nested":
        parts = {"scales": to_scale_dtype(absmax, fmt, "absmax")}
        stored = parts["scales"]
    else:
        parts = nest_modelopt(absmax) if fmt.inverse else nest(absmax, rule.nested_codes)
        stored = nested_values(parts, inverse=fmt.inverse)
    divisor = (stored if rule.absmax == "stored" else absmax).astype(absmax.dtype)
    codes = np.empty(groups.shape, np.uint8)
    for rows in row_blocks(len(groups), groups[0].size):
        values, by = to_compute_dtype(groups[rows], rule.compute), divisor[rows, ..., None]
        scaled = ratio(values, by)
        if rule.order == "reciprocal":
            one, floor = values.dtype.type(1), values.dtype.type(1e-38)
            multiplied = np.clip(values * (one / np.maximum(by, floor)), -one, one)
            scaled = np.concatenate([multiplied[:-1], scaled[-1:]]) if short and rows.stop >= len(groups) else multiplied
        codes[rows] = _nearest(scaled, element_table(fmt.element, fmt.bits), rule.nearest)
        if rule.nearest == "difference":
            codes[rows][absmax[rows] == 0] = 0  # NaN from 0 / 0: the producer keeps the first code
    return {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits)} | parts


def _nearest(scaled: NDArray[Any], table: NDArray[np.float64], rule: str) -> NDArray[np.uint8]:
    """Codes by a rule of `NEAREST`."""
    if rule == "difference":
        return nearest_difference(scaled, table)
    return nearest_midpoint(scaled, table, split_equal=rule == "sorted")


def nearest_midpoint(scaled: NDArray[Any], table: NDArray[np.float64], split_equal: bool = False) -> NDArray[np.uint8]:
    """Codes of the nearest entries, midpoints to the smaller value; equal entries use their first
    code unless `split_equal`.
    """
    if split_equal:
        order = np.argsort(table, kind="stable")
        values = table[order]
    else:
        values, order = np.unique(table, return_index=True)
    midpoints = ((values[1:].astype(scaled.dtype) + values[:-1].astype(scaled.dtype)) / 2).astype(scaled.dtype)
    codes: NDArray[np.uint8] = order.astype(np.uint8)[np.searchsorted(midpoints, scaled)]
    return codes


def nearest_difference(scaled: NDArray[Any], table: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Codes of the first entries at the least distance, distances in the dtype of `scaled`."""
    codes = np.zeros(scaled.shape, np.uint8)
    least = np.abs(scaled - scaled.dtype.type(table[0]))
    for code, entry in enumerate(table[1:], start=1):
        distance = np.abs(scaled - scaled.dtype.type(entry))
        closer = distance < least
        codes[closer], least = code, np.minimum(distance, least)
    return codes
