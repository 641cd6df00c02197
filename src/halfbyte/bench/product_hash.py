"""SHA-256 of products that have the same bits on every CPU: `halfbyte selftest --hash`.

A product of the native core is integer sums and float32 operations in a fixed order, so its bits do
not depend on the instruction set, the threads, the compiler or the batch. Weights, activations and
prompts are bytes of SHAKE-256, which no library's random generator can change.

    product_hash("int8")       of one weight of every structure of format, for up to 33 tokens;
                               int8_token of those with one scale a row, which others take as int8
    logits_hash(model, path)   of a model's logits after 64 prompts, without torch
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import backend_named
from ..errors import FormatError
from ..formats import family_of, format_named
from ..generation.native_model import DenseTable, NativeModel
from ..generation.rotary import Rotation
from ..numerics.bits import pack
from ..numerics.minifloat import element_table
from ..spec import Format
from ..tensor.qtensor import QTensor

EXPECTED = {
    "int8": "19d8b8e9df59d263d7fc9b460f1b64d8300aec45c809f5765f02ee095c42dc38",
    "int8_token": "39bb0dc8a1c27e56a4124d1b2694c4745b4b2c4452202f7dd09d0294df8948b6",
    "exact": "325d5b66097cd8729d7043fdf190db2a5f66ffff5760f831c60837de7c12a2be",
}
"""Class of activations -> the hash of a right CPU backend."""
ACT_ORDER = "uint4:g32 act-order"
FORMATS = (
    "uint1:g64", "int2:g32", "uint2:g64", "int3:g32", "uint3:g128", "int4:g32", "int4:g128", "uint4:g16", "uint4:g40",
    "int4:channel", "uint5:g32", "int6:g32", "int7:g64", "int8:g64", "uint8:g32", "affine2:g32", "affine3:g64", "affine4:g64",
    "affine5:g32", "affine6:g32", "affine8:g64", "fp4:g32", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2",
    "mxint8", "nvfp4", "nf4:g64", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl",
    "iq4_xs", ACT_ORDER,
)  # fmt: skip
"""Every structure of codes and scales that the core knows."""
ROW_FORMATS = ("int4:channel", "int8:channel", "uint8:channel", "uint3:channel")
SHAPE = (70, 512)
"""n of no whole panel, k of two blocks of the formats with 256."""
TOKENS = (1, 2, 15, 33)
"""Every tile of every instruction set: 15 is 8 + 4 + 2 + 1, 33 two tiles of AMX or i8mm and one
token.
"""
PROMPTS, PROMPT_TOKENS = 64, 4


def product_hash(activations: str) -> str:
    """Of x · wᵀ for each format and each number of tokens of `TOKENS`, float32, in hexadecimal."""
    formats = ROW_FORMATS if activations == "int8_token" else FORMATS
    cpu, whole = backend_named("cpu"), hashlib.sha256()
    for word in formats:
        weight = weight_of(format_named(word.split()[0]), SHAPE, word)
        x, prepared = activations_of(max(TOKENS), SHAPE[1], word), cpu.prepare(weight)
        for m in TOKENS:
            whole.update(f"{word} {m}\n".encode())
            whole.update(cpu.linear(x[-m:], prepared, None, activations=activations).astype("<f4").tobytes())
    return whole.hexdigest()


def _drawn(label: str, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_256(label.encode()).digest(count), np.uint8)


def _numbers(label: str, shape: tuple[int, ...], largest: float) -> NDArray[np.float32]:
    """Multiples of largest / 2^15 of both signs."""
    words = _drawn(label, 2 * int(np.prod(shape, dtype=np.int64))).view("<i2").astype(np.float32)
    return (words.reshape(shape) * np.float32(largest / 32768)).astype(np.float32)


def activations_of(m: int, k: int, label: str) -> NDArray[np.float32]:
    """(m, k), the first row with one large value and the second with zeros in its first half."""
    x = _numbers(f"x {label}", (m, k), 4.0)
    x[0, k // 2] = 900.0
    x[1, : k // 2] = 0.0
    return x


def weight_of(fmt: Format, shape: tuple[int, int], label: str) -> QTensor:
    """A weight whose codes and scales are drawn, all of them numbers."""
    family = family_of(fmt)
    fmt = family.fit(fmt, shape)
    parts: dict[str, NDArray[Any]] = {}
    for name, spec in family.geometry(fmt, shape).items():
        count, of = int(np.prod(spec.shape, dtype=np.int64)), f"{name} {label}"
        kind = {"scales": fmt.scale, "mins": fmt.minimum}.get(name)
        if name == "codes":
            codes = _drawn(of, int(np.prod(shape))).reshape(shape) & ((1 << fmt.bits) - 1)
            finite = np.isfinite(element_table(fmt.element, fmt.bits))
            parts[name] = pack(np.where(finite[codes], codes, 1).astype(np.uint8), fmt.bits)
        elif name == "zeros" and fmt.zero == "int":
            parts[name] = (_drawn(of, count).reshape(spec.shape) & ((1 << fmt.bits) - 1)).astype(np.int16)
        elif kind in ("e8m0", "e4m3", "ue4m3"):
            drawn = _drawn(of, count).reshape(spec.shape)
            parts[name] = (115 + drawn % 16 if kind == "e8m0" else drawn % 0x7E | (drawn & 0x80)).astype(np.uint8)
        elif kind in ("u4", "u6", "i6", "i8"):
            half = 1 << (int(kind[1:]) - 1)
            small = _drawn(of, count).reshape(spec.shape).astype(np.int16) % (2 * half)
            parts[name] = (small - (half if kind[0] == "i" else 0)).astype(spec.dtype)
        elif name == "global_scale":
            parts[name] = np.full(spec.shape, 0.37, spec.dtype)
        else:
            parts[name] = _numbers(of, spec.shape, 0.125).astype(spec.dtype)
    if label == ACT_ORDER:
        parts["group_index"] = (_drawn(f"index {label}", shape[1]) % fmt.groups(shape[1])).astype(np.int32)
    return QTensor(fmt, shape, parts)


def logits_hash(model: NativeModel, path: str | Path) -> str:
    """Of the last logits of `PROMPTS` prompts, by the core's operations from the first token on.
    FormatError for a model whose head is not packed.

    model  of `generation.native_model.native_model(checkpoint, "int8")`
    path   of the checkpoint, for the message
    """
    if isinstance(model.head, DenseTable):
        raise FormatError(
            f"[selftest] {path}: the head, lm_head or the table of tokens, is not packed: NumPy multiplies it, whose bits "
            "differ between machines. Take a model that has it packed"
        )
    model = replace(model, rotations=tuple(_ExactRotation(r.frequencies, r.factor) for r in model.rotations))
    vocabulary, width = model.embedding.shape
    tokens = _drawn("prompts", 4 * PROMPTS * PROMPT_TOKENS).view("<u4").astype(np.int64) % vocabulary
    hidden = np.empty((PROMPTS, width), np.float32)
    for prompt, row in zip(tokens.reshape(PROMPTS, PROMPT_TOKENS), hidden, strict=True):
        session = model.session()
        for token in prompt:
            row[:] = session.step(int(token))[0]
    return hashlib.sha256(model.logits(hidden).astype("<f4").tobytes()).hexdigest()


class _ExactRotation(Rotation):
    """Cosines and sines rounded from float64: NumPy's float32 functions differ from one instruction
    set to another.
    """

    def table(self, start: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        angles = [[position * f for f in self.frequencies.tolist() * 2] for position in range(start, start + count)]
        cosines, sines = ([[self.factor * function(a) for a in row] for row in angles] for function in (math.cos, math.sin))
        return np.array(cosines, np.float32), np.array(sines, np.float32)
