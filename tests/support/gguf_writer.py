"""GGUF files written by hand, right ones and ones that lie: nothing here comes from the library."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SCALARS = {
    "uint8": (0, "B"), "int8": (1, "b"), "uint16": (2, "H"), "int16": (3, "h"), "uint32": (4, "I"), "int32": (5, "i"),
    "float32": (6, "f"), "bool": (7, "B"), "uint64": (10, "Q"), "int64": (11, "q"), "float64": (12, "d"),
}  # fmt: skip
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, I32, BF16, MXFP4, NVFP4 = 0, 1, 2, 8, 12, 14, 26, 30, 39, 40


@dataclass
class Tensor:
    """A tensor's entry and bytes. `offset` None lays it after the one before it."""

    name: str
    dims: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class GGUF:
    """A file; every count can be made to lie."""

    pairs: list[tuple[str, str, Any]] = field(default_factory=lambda: [("general.architecture", "string", "llama")])
    tensors: list[Tensor] = field(default_factory=list)
    alignment: int = 32
    order: str = "<"
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    pair_count: int | None = None
    raw_pairs: bytes = b""
    pad_last: bool = True
    tail: bytes = b""

    def number(self, code: str, value: Any) -> bytes:
        return struct.pack(self.order + code, value)

    def string(self, text: str | bytes) -> bytes:
        raw = text if isinstance(text, bytes) else text.encode()
        return self.number("Q", len(raw)) + raw

    def value(self, kind: str, value: Any) -> bytes:
        """Type word and payload; "array[float32]" and "array[array[...]]" nest."""
        return self.number("I", type_id(kind)) + self.payload(kind, value)

    def payload(self, kind: str, value: Any) -> bytes:
        if kind == "string":
            return self.string(value)
        if kind.startswith("array["):
            inner = kind[6:-1]
            return (
                self.number("I", type_id(inner)) + self.number("Q", len(value)) + b"".join(self.payload(inner, v) for v in value)
            )
        return self.number(SCALARS[kind][1], value)

    def head(self) -> bytes:
        """Everything before the tensor data, without padding."""
        pairs = list(self.pairs)
        if self.alignment != 32 and all(k != "general.alignment" for k, _, _ in pairs):
            pairs.append(("general.alignment", "uint32", self.alignment))
        out = self.magic + self.number("I", self.version)
        out += self.number("Q", len(self.tensors) if self.tensor_count is None else self.tensor_count)
        out += self.number("Q", len(pairs) if self.pair_count is None else self.pair_count)
        out += b"".join(self.string(k) + self.value(kind, v) for k, kind, v in pairs) + self.raw_pairs
        for t, offset in zip(self.tensors, self.offsets(), strict=True):
            out += self.string(t.name) + self.number("I", len(t.dims) if t.n_dims is None else t.n_dims)
            out += b"".join(self.number("Q", d) for d in t.dims) + self.number("I", t.type) + self.number("Q", offset)
        return out

    def offsets(self) -> list[int]:
        at, out = 0, []
        for t in self.tensors:
            out.append(at if t.offset is None else t.offset)
            at = up(at + len(t.data), max(self.alignment, 1))
        return out

    def bytes(self) -> bytes:
        out = bytearray(self.head())
        step = max(self.alignment, 1)
        for i, t in enumerate(self.tensors):
            out += bytes(up(len(out), step) - len(out)) + t.data
            if self.pad_last and i == len(self.tensors) - 1:
                out += bytes(up(len(out), step) - len(out))
        return bytes(out) + self.tail


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def type_id(kind: str) -> int:
    return 8 if kind == "string" else 9 if kind.startswith("array[") else SCALARS[kind][0]


def f32(name: str, array: np.ndarray, order: str = "<") -> Tensor:
    """A float32 tensor of a NumPy array."""
    return Tensor(name, tuple(reversed(array.shape)), F32, array.astype(f"{order}f4").tobytes())


def blocks(name: str, shape: tuple[int, ...], kind: int, rng: np.random.Generator) -> Tensor:
    """A quantized tensor of random bytes, the float16 scales among them finite."""
    size, nbytes = {Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210), MXFP4: (32, 17), NVFP4: (64, 36)}[kind]
    count = int(np.prod(shape)) // size
    raw = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in {Q4_0: (0,), Q8_0: (0,), Q4_K: (0, 2), Q6_K: (208,)}.get(kind, ()):
        raw[:, at : at + 2] = rng.normal(0, 0.01, (count, 1)).astype("<f2").view(np.uint8)
    if kind == MXFP4:
        raw[:, 0] = rng.integers(110, 130, count)
    return Tensor(name, tuple(reversed(shape)), kind, raw.tobytes())
