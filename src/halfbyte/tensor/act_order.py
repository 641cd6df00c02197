"""Act-order undone and done: inputs sorted by their group, so that each group's are neighbours, and back.

    order = argsort(group_index), stable        sorted code j is the code of input order[j], and of group j // size

Source: the `g_idx` of GPTQ checkpoints. Backends keep the sorted codes and take their activations in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError
from ..numerics.bits import pack, unpack
from .qtensor import QTensor

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


def sorted_by_group(q: QTensor, backend: str) -> tuple[U8, I64 | None]:
    """Codes with act-order undone, and the order their inputs were taken in; the codes as they are, and None, without one.

    backend  whose name an error bears. Raises BackendError when a group but the last has not `group_size` inputs.
    """
    index = q.parts.get("group_index")
    if index is None:
        return q.parts["codes"], None
    k = q.shape[-1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=q.format.groups(k))
    size = k if q.format.group_size == -1 else q.format.group_size
    if (counts[:-1] != size).any():
        held = f"act-order groups hold {counts.min()} to {counts.max()} inputs"
        raise BackendError(f"[{backend}] {held}; kernels take {size} each, another backend takes any")
    return pack(unpack(q.parts["codes"], q.format.bits, k)[..., order], q.format.bits), order


def as_given(codes: U8, bits: int, order: NDArray[np.integer]) -> U8:
    """Sorted codes back in the order of the inputs as they were given."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size, dtype=order.dtype)
    return pack(unpack(codes, bits, order.size)[..., inverse], bits)


def group_index(order: NDArray[np.integer], group_size: int) -> NDArray[np.int32]:
    """The group of each input, from the order that sorts them; group_size −1 is one group."""
    k = order.size
    index = np.empty(k, np.int32)
    index[order] = np.arange(k) // (k if group_size == -1 else group_size)
    return index
