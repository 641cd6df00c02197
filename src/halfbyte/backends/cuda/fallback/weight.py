"""Formats that no packed product takes: one kernel decodes them, codes in their canonical order,
and cuBLAS multiplies.

Float zero points (HQQ), doubly quantized scales (bitsandbytes), groups over the flattened tensor,
strided or in blocks of rows (128 x 128 float8), scales that divide, a divisor, act-order with
groups of odd sizes. Arithmetic is float64, which holds (element − zero) · scale of float16 scales
exactly; float32 ones round at its 53 bits, far below what a float32 shows.

    value = ((element(code) − zero) · scale · global) / divisor + bias
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....numerics.minifloat import element_table
from ....spec import Format
from ....tensor.qtensor import QTensor
from ...base import Prepared
from ..weight import Launches, synchronize, tensor_of

GROUPINGS = {"row": 0, "flat": 1, "strided": 2, "block": 3}


def refusal(fmt: Format) -> str | None:
    """The sentence why this format is not decoded here either, or None."""
    if fmt.opaque:
        return f"{fmt.name} is kept as {fmt.kept_as} and has no CUDA kernel; dequantize it on the CPU"
    if fmt.minimum or fmt.super_size:
        return f"{fmt.name} has two levels of scales and an unusual part beside them, which no CUDA kernel decodes"
    return None


@dataclass
class CanonicalWeight:
    """Canonical parts on the device, the element table, and for a slice of a stack its place in it.

    parts   name -> tensor (bfloat16 as such)      table  2^bits float32
    lead    matrices of the whole tensor           at     which of them this is
    """

    format: Format
    shape: tuple[int, ...]
    parts: dict[str, Any]
    table: Any
    lead: int = 1
    at: int = 0
    units: int = 0
    fragments: int = 0
    launches: Launches = field(default_factory=Launches, init=False, repr=False, compare=False)

    @property
    def device(self) -> Any:
        return self.table.device


def to_device(q: QTensor, device: Any) -> CanonicalWeight:
    """The weight on `device`, parts as they are."""
    if q.format.element in ("int", "uint"):
        table = np.arange(1 << q.format.bits, dtype=np.float32) - (1 << (q.format.bits - 1)) * (q.format.element == "int")
    else:
        table = element_table(q.format.element, q.format.bits).astype(np.float32)
    packed = CanonicalWeight(
        q.format,
        q.shape,
        {name: tensor_of(part, device) for name, part in q.parts.items()},
        tensor_of(table.astype(np.float32), device),
        int(np.prod(q.shape[:-2])),
    )
    synchronize(device)
    return packed


def nbytes(w: CanonicalWeight) -> int:
    """Bytes on the device."""
    return sum(t.numel() * t.element_size() for t in (*w.parts.values(), w.table))


def canonical_parts(w: CanonicalWeight) -> dict[str, Any]:
    """The parts as they were given."""
    from ..canonical import to_numpy

    return {name: to_numpy(t) for name, t in w.parts.items()}


def expert(p: Prepared, index: int) -> Prepared:
    """One matrix of a stack: the same tensors, and its offset in them."""
    w = p.data
    packed = CanonicalWeight(w.format, w.shape[1:], w.parts, w.table, w.lead, index)
    return Prepared(p.backend, p.format, p.shape[1:], packed, p.nbytes // w.shape[0], invariant=p.invariant)
