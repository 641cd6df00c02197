"""A packed weight in the order the Metal kernels read, as NumPy arrays and then as a framework's.

Rows as in the canonical order, padded to whole eights of codes so that eight are `bits` whole bytes; one factor a matrix. The
bits are the canonical ones: nothing is computed here but the permutation that undoes act-order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bits import pack, unpack
from ...errors import BackendError
from ...qtensor import QTensor
from ...spec import Format
from .kernels import ELEMENTS, FUSED_ELEMENTS, SCALES
from .widen import one_level, one_level_format, widens

FEWEST_ELEMENTS = 8
"""MLX passes arrays of fewer elements in another address space; buffers are padded to this many."""


def refusal(fmt: Format) -> str | None:
    """The sentence why this format has no Metal kernel, or None."""
    if fmt.opaque:
        return f"{fmt.name} is kept as raw ggml blocks and has no Metal kernel; dequantize it on the CPU"
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


@dataclass(frozen=True)
class MetalWeight:
    """Arrays of one weight (a stack has a leading expert axis), of NumPy or of a framework.

    codes    uint8 [*lead, n, units · bits]     scales  [*lead, n, groups]      addends  zero points (int16) or biases, or None
    factors  float32 [experts or 1, padded]     order   permutation that makes act-order groups contiguous, or None
    zeros    largest magnitude of a zero point, which decides whether the fused kernels can stage code − zero exactly
    kept     group parts that `widen` rewrote, as they were, on the host
    """

    format: Format
    shape: tuple[int, ...]
    codes: Any
    scales: Any
    addends: Any
    factors: Any
    order: Any
    zeros: int
    kept: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Eights of codes in a row, the last padded."""
        return -(-self.shape[-1] // 8)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return max(1, self.format.groups(self.shape[-1]))

    def expert(self, index: int) -> MetalWeight:
        """One matrix of a stack, as views."""
        return replace(
            self, shape=self.shape[1:], codes=self.codes[index], scales=self.scales[index],
            addends=None if self.addends is None else self.addends[index], factors=self.factors[index:],
            kept={name: a[index] for name, a in self.kept.items()},
        )  # fmt: skip

    def fused_refusal(self, dtype: str) -> str | None:
        """Why the fused schedule cannot hold this weight's numbers exactly in x's dtype, or None."""
        f = self.format
        if f.bits != 4 or f.element not in FUSED_ELEMENTS:
            return f"the fused schedule stages 4-bit integers and E2M1, not {f.name}"
        most = {"float16": 2048, "bfloat16": 256, "float32": 1 << 24}[dtype]
        if self.zeros + 15 > most:
            return f"a zero point of {self.zeros} leaves differences that {dtype} does not hold"
        return None


def _contiguous_groups(q: QTensor) -> tuple[NDArray[np.uint8], NDArray[np.int32] | None]:
    """Codes with act-order undone, and the order their inputs were taken in."""
    index = q.parts.get("group_index")
    if index is None:
        return q.parts["codes"], None
    k = q.shape[-1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=q.format.groups(k))
    size = k if q.format.group_size == -1 else q.format.group_size
    if (counts[:-1] != size).any():
        raise BackendError(f"[metal] act-order groups hold {counts.min()} to {counts.max()} inputs; kernels take {size} each")
    return pack(unpack(q.parts["codes"], q.format.bits, k)[..., order], q.format.bits), order.astype(np.int32)


def _padded(a: NDArray[Any], count: int) -> NDArray[Any]:
    """The last axis padded with zeros to `count`."""
    missing = count - a.shape[-1]
    return a if missing <= 0 else np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])


def metal_weight(q: QTensor, array: Callable[[NDArray[Any]], Any] = np.asarray) -> MetalWeight:
    """`q` in kernel order, each array through `array` (NumPy to a framework). Raises BackendError with the reason it cannot."""
    why = refusal(q.format)
    if why:
        raise BackendError(f"[metal] {why}")
    fmt, shape = q.format, q.shape
    codes, order = _contiguous_groups(q)
    scales, addends = q.parts["scales"], q.parts.get("zeros", q.parts.get("biases"))
    kept: dict[str, NDArray[Any]] = {}
    if widens(fmt):
        fmt, (scales, addends) = one_level_format(fmt), one_level(q)
        kept = {p: a for p, a in q.parts.items() if p not in ("codes", "group_index", "global_scale")}
    zeros = int(np.abs(q.parts["zeros"].astype(np.int32)).max(initial=0)) if fmt.zero == "int" else 0
    factors = np.asarray(q.parts.get("global_scale", np.float32(1)), np.float32).reshape(-1)
    if len(shape) > 2 and factors.size != shape[0]:
        factors = np.ones(shape[0], np.float32)
    units = -(-shape[-1] // 8)
    return MetalWeight(
        fmt, shape, array(np.ascontiguousarray(_padded(codes, units * fmt.bits))), array(np.ascontiguousarray(scales)),
        None if addends is None else array(np.ascontiguousarray(addends)),
        array(np.ascontiguousarray(_padded(factors, factors.size + FEWEST_ELEMENTS))), None if order is None else array(order),
        zeros, kept,
    )  # fmt: skip


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
        size = k if fmt.group_size == -1 else fmt.group_size
        index = np.empty(k, np.int32)
        index[order] = np.arange(k) // size
        parts["group_index"] = index
        codes = pack(unpack(codes, fmt.bits, k)[..., np.argsort(order)], fmt.bits)
    return {"codes": codes, **parts}


def size_of(shape: tuple[int, ...]) -> int:
    """Product of a shape."""
    return math.prod(shape)
