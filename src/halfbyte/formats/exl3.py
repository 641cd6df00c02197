"""EXL3, ExLlamaV3's trellis-coded weights: exact values from the tensors of a file.

    Wᵀ[i, j] = input_scale[i] · output_scale[j] / 128 · Σ_a Σ_b  s(i, a) · s(j, b) · codebook[state(a, b)]

a and b run over the block of 128 inputs and of 128 outputs that i and j are in; s(i, a) =
(−1)^popcount(i & a) is the 128 × 128 Sylvester-Hadamard matrix, whose two factors 1/√128 give the
1/128.

| tensor | dtype | shape | meaning |
|---|---|---|---|
| `trellis` | int16 | [k/16, n/16, 16 · bits] | tiles of 16 inputs by 16 outputs, 256 codes of 1 to 8 bits each |
| `suh`, `svh` | float16 | [k], [n] | input and output scales, signs included |
| `su`, `sv` | int16 | [k/16], [n/16] | older files: signs alone, bit i of word w set where element 16w + i is −1 |
| `mcg`, `mul1` | int32 | [] | present when the codebook is that one; without either it is the first |

A tile is a stream of 256 · bits bits, the words of 32 bits in order and each from its highest bit.
The state of code t is the 16 bits that end with the code, (t + 1) · bits − 16 to (t + 1) · bits,
and wraps around: the trellis is tail-biting. Code t is the element (input r, output c) with, for
lane = t / 8 and j = t mod 8,

    r = 2 · (lane mod 4) + (j mod 2) + 8 · (j / 2 mod 2),    c = lane / 4 + 8 · (j / 4)

The codebooks are procedural. With x = the state times a constant, modulo 2^32, and float16
arithmetic rounded once:

| codebook | x | value |
|---|---|---|
| `3inst` | state · 89226354 + 64248484 | h(low half of y) + h(high half of y), y = (x & 0x8FFF8FFF) ^ 0x3B603B60 |
| `mcg` | state · 0xCBAC1FED | the same |
| `mul1` | state · 0x83DCD12D | fma(1024 + sum of the 4 bytes of x, h(0x1EEE), h(0xC931)) |

h reads 16 bits as a float16. The codebook's own rounding is part of its definition; everything
after it is exact here: a sum of 16384 float16 numbers fits 53 bits, and the product with the two
scales is rounded once. ExLlamaV3's own reconstruction rounds to float16 four times (after each
transform and after each scale) and sums in float32, so its float16 result differs from this one.

Source: the sources of ExLlamaV3 (MIT): `exl3_dq.cuh`, `codebook.cuh`, `exl3_lib/quantize.py`. The
trellis is QTIP's (Tseng et al. 2024), the incoherence transform QuIP#'s (Tseng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError, UnsupportedError
from ..numerics.exact import F64, Exact, two_product
from ..spec import Format
from .base import Family, PartSpec
from .decode import Parts

CODEBOOKS = ("3inst", "mcg", "mul1")
TILE, BLOCK = 16, 128
"""Sides of a tile of codes, and of a block of the Hadamard transform."""


MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Codebook -> the factor of its state, which files keep in a marker tensor."""


@cache
def codebook_values(codebook: str) -> F64:
    """Value of each of the 65536 states, float64 [65536], read-only; each is a float16 number."""
    if codebook not in CODEBOOKS:
        raise FormatError(f"[exl3] codebook {codebook!r}; allowed: {', '.join(CODEBOOKS)}")
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        x = state * np.uint32(MULTIPLIERS["mul1"])
        total = x.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.float64)
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        value = ((1024 + total) * factor + offset).astype(np.float16)
    else:
        x = state * np.uint32(89226354) + np.uint32(64248484) if codebook == "3inst" else state * np.uint32(MULTIPLIERS["mcg"])
        y = (x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        low, high = (y & np.uint32(0xFFFF)).astype(np.uint16), (y >> np.uint32(16)).astype(np.uint16)
        value = low.view(np.float16) + high.view(np.float16)
    out: F64 = value.astype(np.float64)
    out.setflags(write=False)
    return out


@cache
def _tile_order() -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(input, output) within a tile of each of its 256 codes."""
    lane, j = np.divmod(np.arange(256), 8)
    return 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2), lane // 4 + 8 * (j // 4)


def states(trellis: NDArray[np.int16]) -> NDArray[np.uint16]:
    """Trellis [k/16, n/16, 16 · bits] -> states [k, n]."""
    if trellis.ndim != 3 or trellis.dtype != np.int16 or trellis.shape[2] % TILE or not 1 <= trellis.shape[2] // TILE <= 8:
        raise ShapeError(
            f"[exl3] trellis is {trellis.dtype} {list(trellis.shape)}; allowed: int16 [k/16, n/16, 16 · bits], 1 to 8 bits"
        )
    rows, columns, words = trellis.shape
    bits = words // TILE
    # Bits in stream order: halves of a 32-bit word swapped, then each from its highest bit; the
    # last 16 are put in front again.
    halves = trellis.astype("<i2", copy=False).view(np.uint8).reshape(rows, columns, words // 2, 2, 2)[..., ::-1, ::-1]
    stream = np.unpackbits(np.ascontiguousarray(halves).reshape(rows, columns, 2 * words), axis=-1)
    stream = np.concatenate([stream[..., -16:], stream], axis=-1)
    windows = np.lib.stride_tricks.sliding_window_view(stream, 16, axis=-1)[..., bits : 256 * bits + 1 : bits, :]
    packed = np.packbits(windows, axis=-1).astype(np.uint16)
    state = packed[..., 0] << np.uint16(8) | packed[..., 1]
    out = np.empty((rows, TILE, columns, TILE), np.uint16)
    r, c = _tile_order()
    out[:, r, :, c] = np.moveaxis(state, -1, 0)
    return out.reshape(rows * TILE, columns * TILE)


def unpack_signs(words: NDArray[np.int16]) -> NDArray[np.float16]:
    """Signs of older files, int16 [size/16] -> float16 [size] of ±1: a set bit is −1."""
    bits = np.unpackbits(words.astype("<i2", copy=False).view(np.uint8), bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.float16)


def _hadamard(x: F64) -> F64:
    """The unnormalised Sylvester-Hadamard transform of every 128 elements of the last axis. Exact
    while sums fit 53 bits.
    """
    shape = x.shape
    step = 1
    while step < BLOCK:
        pairs = x.reshape(-1, 2, step)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        step *= 2
    return x.reshape(shape)


def decode(
    trellis: NDArray[np.int16],
    input_scales: NDArray[np.float16],
    output_scales: NDArray[np.float16],
    codebook: str,
    dtype: Any,
) -> NDArray[Any]:
    """The weight (n, k), each exact value rounded once to `dtype`.

    Raises ShapeError unless k and n are multiples of 128 and the scales are float16 [k] and [n].
    """
    inner = codebook_values(codebook)[states(trellis)]
    k, n = inner.shape
    if k % BLOCK or n % BLOCK:
        raise ShapeError(f"[exl3] {k} inputs by {n} outputs; allowed: multiples of {BLOCK}, the block of the Hadamard transform")
    for label, scales, size in (("input", input_scales, k), ("output", output_scales, n)):
        if scales.shape != (size,) or scales.dtype != np.float16:
            raise ShapeError(f"[exl3] {label} scales are {scales.dtype} {list(scales.shape)}; allowed: float16 [{size}]")
    weight = _hadamard(np.ascontiguousarray(_hadamard(inner).T)) / BLOCK
    scale = output_scales.astype(np.float64)[:, None] * input_scales.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return Exact(list(two_product(weight, scale))).round(dtype)


class EXL3(Family):
    """`exl3_4`, `exl3_4_mcg`, `exl3_4_mul1` …: bits and codebook. Files have them; no user asks for
    one by name, since nothing here encodes.
    """

    name = "exl3"
    codecs = ()
    decoded = tuple(f"exl3_{bits}{suffix}" for bits in range(1, 9) for suffix in ("", "_mcg", "_mul1"))

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        if codec not in self.decoded or group_size not in (None, BLOCK) or options:
            raise FormatError(f"[exl3] {codec!r}; allowed: {', '.join(self.decoded)}, without options")
        _, bits, *codebook = codec.split("_")
        element = f"exl3_{codebook[0] if codebook else CODEBOOKS[0]}"
        return Format("exl3", codec, int(bits), element, BLOCK, "none", grouping="block", group_rows=BLOCK, extra="trellis")

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        *lead, n, k = shape
        if lead or n % BLOCK or k % BLOCK:
            raise ShapeError(f"[exl3] shape {list(shape)}; allowed: a matrix (n, k) of multiples of {BLOCK}")
        return {
            "trellis": PartSpec((k // TILE, n // TILE, TILE * fmt.bits), np.dtype(np.int16)),
            "input_scales": PartSpec((k,), np.dtype(np.float16)),
            "output_scales": PartSpec((n,), np.dtype(np.float16)),
        }

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def decode(
        self, fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Exact values rounded once to `dtype`; of a window, whole blocks of 128 rows are computed."""
        first = 0 if window is None else window[0]
        start, stop = first // BLOCK * BLOCK, -(-(first + shape[0]) // BLOCK) * BLOCK
        trellis = parts["trellis"][:, start // TILE : stop // TILE]
        scales = parts["output_scales"][start:stop]
        out = decode(trellis, parts["input_scales"], scales, fmt.element.removeprefix("exl3_"), dtype)
        return out[first - start : first - start + shape[0]]

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise UnsupportedError("[quantize] exl3 is decoded only: its encoder is a Viterbi search; use ExLlamaV3")
