"""Weights for tests of conversions, and how their outcomes are compared."""

from __future__ import annotations

import numpy as np

from halfbyte import QTensor, format_named
from halfbyte.conversion import convert_weight
from halfbyte.errors import FormatError, LayoutError
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import pack


def same(a: QTensor, b: QTensor) -> bool:
    """Equal real values everywhere, NaN equal to NaN."""
    return bool(np.array_equal(a.dequantize("float64"), b.dequantize("float64"), equal_nan=True))


def attempt(q: QTensor, goal):
    """The outcome, or the text of the refusal."""
    try:
        return convert_weight(q, goal, "w")
    except (LayoutError, FormatError) as error:
        return str(error)


def integers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, bits: int = 4, group: int = 32) -> QTensor:
    """An int or uint tensor of given codes [n, k], scales [n, G] and zero points."""
    word = f"int{bits}" if zeros is None else f"uint{bits}"
    fmt = format_named(word, group, scale_dtype=scales.dtype.name)
    parts = {"codes": pack(codes.astype(np.uint8), bits), "scales": scales}
    if zeros is not None:
        parts["zeros"] = zeros.astype(np.int16)
    return QTensor(fmt, codes.shape, parts)


def all_codes(n: int, k: int) -> np.ndarray:
    return np.resize(np.arange(16, dtype=np.uint8), (n, k))


def reread(outcome, goal) -> QTensor:
    """What the layout's own reader makes of the written tensors."""
    return LAYOUTS[goal.layout].unpack(dict(outcome.tensors), outcome.config | {"shape": list(outcome.weight.shape)}, "w")


def two_levels(levels: str, factor: float, byte: int) -> QTensor:
    fmt = format_named("nvfp4", global_scale=levels)
    parts = {"codes": pack(all_codes(8, 64), 4), "scales": np.full((8, 4), byte, np.uint8), "global_scale": np.float32(factor)}
    return QTensor(fmt, (8, 64), {k: np.asarray(v) for k, v in parts.items()})
