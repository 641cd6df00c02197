"""The arithmetic most integer producers share: the scale in the compute dtype, times the shifted code, one rounding.

    w = round_d( round_d(scale) · (code − zero) ),   d the compute dtype

code − zero is an integer of at most 9 bits, exact in float16; in bfloat16 it stays below 256, exact too. The product of two
numbers of d is exact in float32 where d is float16 or bfloat16, so float32 arithmetic and one cast give d's own product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import element_values, placement
from ..numerics.bits import unpack
from ..numerics.exact import dtype_named

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def scaled(q: QTensor, dtype: Any, zeros: NDArray[np.integer] | None = None) -> NDArray[Any]:
    """What a decoder computing in `dtype` returns for an integer weight in rows of groups.

    zeros  zero points [*lead, n, G] to use in place of the stored ones
    """
    fmt, k, out = q.format, q.shape[-1], dtype_named(dtype)
    place = placement(fmt, q.shape, q.window, q.parts.get("group_index"))
    value = element_values(fmt, unpack(q.parts["codes"], fmt.bits, k), np.float32)
    if zeros is None and fmt.zero == "int":
        zeros = q.parts["zeros"]
    if zeros is not None:
        value -= place(zeros.astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        value *= place(q.parts["scales"].astype(out).astype(np.float32))
        return value.astype(out)
