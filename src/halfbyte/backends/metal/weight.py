"""A packed weight in the order the Metal kernels read, as NumPy arrays and then as a framework's.

Rows as in the canonical order, padded to whole eights of codes so that eight are `bits` whole
bytes; one factor a matrix. The bits are the canonical ones: nothing is computed here but the
permutation that undoes act-order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError
from ...spec import Format
from ...tensor.act_order import group_index, restore_order, sort_by_group
from ...tensor.qtensor import QTensor
from .kernels import ELEMENTS, SCALES
from .widen import one_level, one_level_format, widens

FEWEST_ELEMENTS = 8
"""MLX passes arrays of fewer elements in another address space; buffers are padded to this many."""


def refusal(fmt: Format) -> str | None:
    """The sentence why this format has no Metal kernel, or None."""
    if fmt.opaque:
        return f"{fmt.name} is kept as {fmt.kept_as} and has no Metal kernel; dequantize it on the CPU"
    if fmt.element not in (*ELEMENTS, "uint", "int", "mxint"):
        return f"{fmt.name} has {fmt.element} elements, which have no Metal kernel"
    if fmt.zero == "float" and fmt.scale == "float32":
        return f"{fmt.name} has float32 zero points, whose products with the scales no float32 holds"
    if fmt.scale not in SCALES and not fmt.super_size:
        return f"{fmt.name} has {fmt.scale} scales, which have no Metal kernel"
    if fmt.grouping != "row":
        return f"{fmt.name} has {fmt.grouping} groups; Metal kernels take groups along a row"
    if fmt.inverse:
        return f"{fmt.name} stores reciprocal scales, which have no Metal kernel"
    if fmt.divisor != 1.0 and not fmt.global_op:
        return f"{fmt.name} divides every value by {fmt.divisor:g}, which the product kernels would round twice"
    if fmt.group_size != -1 and fmt.group_size % 8:
        return f"{fmt.name} has groups of {fmt.group_size}; Metal kernels take multiples of 8"
    return None


def fused_refusal(fmt: Format) -> str | None:
    """Why the fused schedule has no kernel for this format, or None."""
    return None if fmt.bits == 4 else f"the fused schedule reads words of eight 4-bit codes, not {fmt.name}"


@dataclass(frozen=True)
class MetalWeight:
    """Arrays of one weight (a stack has a leading expert axis), of NumPy or of a framework.

    codes    uint8 [*lead, n, units · bits]     scales  [*lead, n, groups]      addends  zero points (int16) or biases, or None
    factors  float32 [experts or 1, padded]     order   permutation that makes act-order groups contiguous, or None
    kept     group parts that `widen` rewrote, as they were, on the host
    """

    format: Format
    shape: tuple[int, ...]
    codes: Any
    scales: Any
    addends: Any
    factors: Any
    order: Any
    kept: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Eights of codes in a row, the last padded."""
        return -(-self.shape[-1] // 8)

    @property
    def word_bytes(self) -> int:
        """Bytes of the word kernels read codes in; the codes must begin at a multiple of it, and
        their rows then do.
        """
        return {8: 8, 4: 4, 2: 2, 6: 2}.get(self.format.bits, 1)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return max(1, self.format.groups(self.shape[-1]))

    def expert(self, index: int) -> MetalWeight:
        """One matrix of a stack, as views."""
        return replace(
            self,
            shape=self.shape[1:],
            codes=self.codes[index],
            scales=self.scales[index],
            addends=None if self.addends is None else self.addends[index],
            factors=self.factors[index:],
            kept={name: a[index] for name, a in self.kept.items()},
        )


def _padded(a: NDArray[Any], count: int) -> NDArray[Any]:
    """The last axis padded with zeros to `count`."""
    missing = count - a.shape[-1]
    return a if missing <= 0 else np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])


def metal_weight(q: QTensor, array: Callable[[NDArray[Any]], Any] = np.asarray) -> MetalWeight:
    """`q` in kernel order, each array through `array` (NumPy to a framework). Raises BackendError
    with the reason it cannot.
    """
    why = refusal(q.format)
    if why:
        raise BackendError(f"[metal] {why}")
    fmt, shape = q.format, q.shape
    codes, order = sort_by_group(q, "metal")
    scales, addends = q.parts["scales"], q.parts.get("zeros", q.parts.get("biases"))
    kept: dict[str, NDArray[Any]] = {}
    if widens(fmt):
        fmt, (scales, addends) = one_level_format(fmt), one_level(q)
        kept = {p: a for p, a in q.parts.items() if p not in ("codes", "group_index", "global_scale")}
    factors = np.asarray(q.parts.get("global_scale", np.float32(1)), np.float32).reshape(-1)
    if len(shape) > 2 and factors.size != shape[0]:
        factors = np.ones(shape[0], np.float32)
    units = -(-shape[-1] // 8)
    return MetalWeight(
        fmt,
        shape,
        array(np.ascontiguousarray(_padded(codes, units * fmt.bits))),
        array(np.ascontiguousarray(scales)),
        None if addends is None else array(np.ascontiguousarray(addends)),
        array(np.ascontiguousarray(_padded(factors, factors.size + FEWEST_ELEMENTS))),
        None if order is None else array(order.astype(np.int32)),
        kept,
    )


def canonical_parts(w: MetalWeight, fmt: Format, to_numpy: Callable[[Any], NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The canonical parts `metal_weight` was given, byte for byte.

    fmt       the weight's own format, before `widen`
    to_numpy  brings a framework's array to the host
    """
    *lead, _, k = w.shape
    codes = np.ascontiguousarray(to_numpy(w.codes)[..., : fmt.row_bytes(k)])
    parts: dict[str, NDArray[Any]] = dict(w.kept) or {"scales": to_numpy(w.scales)}
    if w.addends is not None and not w.kept:
        parts["zeros" if fmt.zero == "int" else "biases"] = to_numpy(w.addends)
    if fmt.global_op:
        count = math.prod(lead)
        parts["global_scale"] = to_numpy(w.factors)[:count].reshape(lead)
    if w.order is not None:
        order = to_numpy(w.order)
        parts["group_index"] = group_index(order, fmt.group_size)
        codes = restore_order(codes, fmt.bits, order)
    return {"codes": codes, **parts}


def size_of(shape: tuple[int, ...]) -> int:
    """Product of a shape."""
    return math.prod(shape)
