"""Act-order: sort the inputs of a weight by their group, so that each group's inputs are adjacent,
and restore their order.

    order = argsort(group_index), stable        sorted code j is the code of input order[j], in
                                                group j // group_size

`group_index` is `g_idx` of GPTQ checkpoints. Backends keep the sorted codes and gather their
activations in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError
from ..numerics.bits import pack, unpack
from .qtensor import QTensor

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


def sort_by_group(q: QTensor, backend: str) -> tuple[U8, I64 | None]:
    """Codes sorted by group, and the order of inputs they were taken in; unchanged codes and None
    without act-order.

    backend  name of the backend, for the error message. Raises BackendError when a group but the
             last does not have exactly `group_size` inputs.
    """
    index = q.parts.get("group_index")
    if index is None:
        return q.parts["codes"], None
    k = q.shape[-1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=q.format.groups(k))
    size = k if q.format.group_size == -1 else q.format.group_size
    if (counts[:-1] != size).any():
        found = f"act-order groups hold {counts.min()} to {counts.max()} inputs"
        raise BackendError(f"[{backend}] {found}; kernels take {size} each, another backend takes any")
    return pack(unpack(q.parts["codes"], q.format.bits, k)[..., order], q.format.bits), order


def restore_order(codes: U8, bits: int, order: NDArray[np.integer]) -> U8:
    """Sorted codes back in the order of the inputs: the inverse of `sort_by_group`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size, dtype=order.dtype)
    return pack(unpack(codes, bits, order.size)[..., inverse], bits)


def group_index(order: NDArray[np.integer], group_size: int) -> NDArray[np.int32]:
    """Group of each input, from the order that sorts them; group_size −1 is one group."""
    k = order.size
    index = np.empty(k, np.int32)
    index[order] = np.arange(k) // (k if group_size == -1 else group_size)
    return index
