"""The second level of scales: bitsandbytes' and ModelOpt's double quantization of absolute maxima.

    bitsandbytes: absmax = map[byte] · absmax2 + offset, map the signed dynamic map, offset the mean
    ModelOpt:     absmax = (byte − 128) / scale2 + offset, scale2 = 127 / max |absmax − offset|

The dynamic map (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization") has 2^i
evenly spaced fractions in the decade 10^(i−7) … 10^(i−6), i = 0 … 6, of either sign, and 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .decode import NESTED_BLOCK

Parts = Mapping[str, NDArray[Any]]
GRIDS = ("exact", "grid")
"""Rule of a byte: the nearest entry of the map to x, or to x rounded to one of 65536 even steps of
−1 … 1 (bitsandbytes on a CPU).
"""
_F32 = np.float32


@cache
def dynamic_map() -> NDArray[np.float32]:
    """The 256 entries in ascending order, float32, read-only; every float32 step as PyTorch takes
    it.
    """
    entries: list[float] = [0.0, 1.0]
    for i in range(7):
        n = 1 << i
        step = np.float64(_F32(_F32(1) - _F32(0.1)) / _F32(n))
        j = np.arange(n + 1)
        # Each boundary is one fused multiply-add from the nearer end.
        ends = np.where(j < (n + 1) // 2, np.float64(_F32(0.1)) + step * j, 1.0 - step * (n - j)).astype(_F32)
        fractions = (ends[:-1] + ends[1:]) / _F32(2) * _F32(10.0 ** (i - 6))
        entries += [*fractions.tolist(), *(-fractions).tolist()]
    out: NDArray[np.float32] = np.sort(np.array(entries, _F32))
    out.setflags(write=False)
    return out


def _by_256(values: NDArray[Any]) -> NDArray[Any]:
    """Flattened values [blocks] -> [ceil(blocks/256), 256], filled with zeros."""
    out = np.zeros(-(-values.size // NESTED_BLOCK) * NESTED_BLOCK, values.dtype)
    out[: values.size] = values.reshape(-1)
    return out.reshape(-1, NESTED_BLOCK)


def lane_sum(x: NDArray[np.float32]) -> np.float32:
    """Sum of float32 numbers in the order in which PyTorch adds them on x86 with one thread.

    Eight lanes take every eighth number, four rows of lanes every fourth group of eight; each of
    these 32 sums cascades through four levels whose steps are a power of two of at least 16. Then
    the levels, the rows, the remaining numbers and the lanes are added. From 32,768 numbers on
    PyTorch splits the work among its threads, and the last bit may differ from this.
    """
    lanes = 8 if x.size >= 8 else 1
    rows = x[: x.size // lanes * lanes].reshape(-1, lanes)
    count = len(rows) // 4
    table = rows[: count * 4].reshape(count, 4, lanes)
    power = max(4, (count - 1).bit_length() // 4)
    levels = np.zeros((4, 4, lanes), _F32)
    for i in range(count):
        levels[0] += table[i]
        if (i + 1) % (1 << power) == 0:
            for j in range(1, 4):
                levels[j] += levels[j - 1]
                levels[j - 1] = 0
                if (i + 1) & (((1 << power) - 1) << (j * power)):
                    break
    sums = levels[0]
    for level in levels[1:]:
        sums = sums + level
    for row in rows[count * 4 :]:
        sums[0] += row
    total = _F32(0)
    for one in (*x[rows.size :], *(((sums[0] + sums[1]) + sums[2]) + sums[3])):
        total = total + one
    return total


def nest(absmax: NDArray[Any], codes: str) -> dict[str, NDArray[Any]]:
    """Parts of bitsandbytes' double quantization of absolute maxima (of any shape, row-major), in
    float32.
    """
    table = dynamic_map()
    values = absmax.astype(_F32)
    offset = lane_sum(values.reshape(-1)) / _F32(values.size)
    blocks = _by_256(values - offset)
    largest = np.abs(blocks).max(axis=-1)
    inverse = np.divide(_F32(1), largest, out=np.zeros_like(largest), where=largest != 0)
    scaled = blocks * inverse[:, None]
    if codes == "grid":
        scaled = np.floor((scaled + _F32(1)) * _F32(32767.5) + _F32(0.5)).astype(np.float64) / 65535 * 2 - 1
    exact = table.astype(np.float64)
    index = np.searchsorted((exact[1:] + exact[:-1]) / 2, scaled.astype(np.float64)).astype(np.uint8)
    if codes == "grid":
        index[largest == 0] = 0  # the producer's 0 / 0 gives byte 0; every byte decodes to the offset
    return {
        "scales": index.reshape(-1)[: absmax.size].reshape(absmax.shape),
        "nested_map": table,
        "nested_absmax": largest,
        "nested_offset": np.asarray(offset),
    }


def nest_modelopt(absmax: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Parts of ModelOpt's double quantization, in bfloat16, the dtype of its scales; the mean
    includes the zeros that pad the last 256.
    """
    bf16 = ml_dtypes.bfloat16
    blocks = _by_256(absmax.astype(bf16))
    offset = blocks.astype(_F32).mean(dtype=_F32).astype(bf16)
    blocks = blocks - offset
    largest = np.abs(blocks).max(axis=-1)
    one = bf16(1)
    with np.errstate(divide="ignore"):
        scale2 = np.where(largest == 0, one, one / largest * bf16(127))
    signed = np.clip(np.rint((blocks * scale2[:, None]).astype(_F32)), -127, 127)
    return {
        "scales": (signed + 128).astype(np.uint8).reshape(-1)[: absmax.size].reshape(absmax.shape),
        "nested_map": np.arange(-128, 128).astype(_F32),
        "nested_absmax": scale2.astype(_F32),
        "nested_offset": np.asarray(offset).astype(_F32),
    }


def nested_values(parts: Parts, *, inverse: bool) -> NDArray[np.float64]:
    """Absolute maxima as the parts decode, float64, in the shape of `scales`."""
    scales = parts["scales"]
    second = parts["nested_absmax"].astype(np.float64)[np.arange(scales.size).reshape(scales.shape) // NESTED_BLOCK]
    mapped = parts["nested_map"].astype(np.float64)[scales]
    out: NDArray[np.float64] = (mapped / second if inverse else mapped * second) + float(parts["nested_offset"])
    return out
