"""A packed weight as affine values: value = (number − zero) · scale + offset, exactly, with integer
numbers.

| format | codes | zero | scale | offset |
|---|---|---|---|---|
| int, Q4_0, Q5_0, Q8_0 | as stored | 2^(bits−1) | scales | – |
| uint | as stored | zeros | scales | – |
| affine, Q4_1, Q5_1 | as stored | 0 | scales | biases |
| Q2_K … Q6_K, IQ4_XS | as stored or by table | | scales · super_scales | −mins · super_mins |
| HQQ | as stored | zeros, where whole | scales | −zeros · scales otherwise |
| E2M1, IQ4_NL, MXINT, … | a table of whole numbers, the element times a power of two | 0 | scale over that power | – |

Products of two stored scales need 11 + 11 bits, offsets at most 48: all are exact in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import scale_values
from ..numerics.bits import unpack
from ..numerics.minifloat import element_table
from ..spec import Format
from ..tensor.qtensor import QTensor
from .outcome import MisfitError

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class AffineValues:
    """Integers under scales; arrays per group are [*groups of the source], or 0-d where all groups
    share one value.

    numbers  the integer of each code, int16 [2^bits]; None where it is the code itself
    zero     int64, None when `offset` is there instead
    scale    float64
    offset   float64 or None
    """

    q: QTensor
    numbers: NDArray[np.int16] | None
    zero: NDArray[np.int64] | None
    scale: F64
    offset: F64 | None

    @property
    def low(self) -> int:
        """Least number a code can stand for."""
        return 0 if self.numbers is None else int(self.numbers.min())

    @property
    def high(self) -> int:
        """Greatest number a code can stand for."""
        return (1 << self.q.format.bits) - 1 if self.numbers is None else int(self.numbers.max())

    def present(self) -> NDArray[np.int16]:
        """The number of every element, int16 [*lead, n, k]."""
        codes = unpack(self.q.parts["codes"], self.q.format.bits, self.q.shape[-1])
        return codes.astype(np.int16) if self.numbers is None else self.numbers[codes]


def affine_values_of(q: QTensor) -> AffineValues:
    """The affine values of `q`. MisfitError when its elements are not integers or a scale is not a
    product.
    """
    fmt = q.format
    if fmt.opaque or fmt.scale in ("nested", "none") or fmt.inverse or fmt.divisor != 1.0 or fmt.global_op == "divide":
        raise MisfitError(f"{fmt.name} is no whole number times a stored scale")
    numbers, power = _numbers(fmt)
    scale = np.ldexp(scale_values(fmt.scale, q.parts["scales"]), -power)
    if fmt.super_size:
        scale = scale * np.repeat(q.parts["super_scales"].astype(np.float64), fmt.super_size // fmt.group_size, axis=-1)
    if fmt.global_op:
        scale = scale * q.parts["global_scale"].astype(np.float64)[..., None, None]
    zero: NDArray[Any] | None = np.asarray(1 << (fmt.bits - 1) if fmt.element == "int" else 0, np.int64)
    offset: F64 | None = None
    if fmt.zero == "int":
        zero = q.parts["zeros"].astype(np.int64)
    elif fmt.zero == "float":
        stored = q.parts["zeros"].astype(np.float64)
        with np.errstate(invalid="ignore"):
            whole = bool((np.isfinite(stored) & (stored == np.rint(stored)) & (np.abs(stored) < 1 << 15)).all())
        if whole:
            zero = stored.astype(np.int64)
        else:
            zero, offset = None, -stored * scale
    if fmt.bias:
        zero, offset = None, q.parts["biases"].astype(np.float64)
    if fmt.minimum:
        minimum = np.repeat(q.parts["super_mins"].astype(np.float64), fmt.super_size // fmt.group_size, axis=-1)
        zero, offset = None, -q.parts["mins"].astype(np.float64) * minimum
    return AffineValues(q, numbers, zero, scale, offset)


def _numbers(fmt: Format) -> tuple[NDArray[np.int16] | None, int]:
    """(whole number of each code, power): element = number / 2^power."""
    if fmt.element in ("int", "uint"):
        return None, 0
    table = element_table(fmt.element, fmt.bits)
    if not np.isfinite(table).all():
        raise MisfitError(f"{fmt.element} has codes that are no numbers")
    for power in range(8):
        scaled = table * 2.0**power
        if (scaled == np.rint(scaled)).all():
            return scaled.astype(np.int16), power
    raise MisfitError(f"elements of {fmt.element} are no whole numbers of one step")
