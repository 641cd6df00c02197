"""Key-values of a GGUF header that is made here: encoded, and readable before a file exists.

    pairs = [pair("llama.block_count", "uint32", 16), ...]      Header(path, pairs, shapes)

Types are the specification's: "uint32", "float32", "bool", "string", "array[string]",
"array[float32]", "array[int32]", "array[uint64]", "array[bool]", "array[uint8]".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.gguf.metadata import Cursor, Metadata
from ..checkpoints.gguf.writer import Pair

_CODES = {"uint8": (0, "B"), "uint32": (4, "I"), "int32": (5, "i"), "float32": (6, "f"), "bool": (7, "B"), "uint64": (10, "Q")}
_STRING, _ARRAY = 8, 9


def pair(key: str, kind: str, value: Any) -> Pair:
    """One key-value."""
    if kind == "string":
        return key, _STRING, _string(value)
    if kind.startswith("array["):
        inner = kind[len("array[") : -1]
        if inner == "string":
            return key, _ARRAY, struct.pack("<IQ", _STRING, len(value)) + b"".join(map(_string, value))
        code, _ = _CODES[inner]
        dtype = {"uint8": "u1", "float32": "<f4", "int32": "<i4", "uint32": "<u4", "uint64": "<u8", "bool": "u1"}[inner]
        return key, _ARRAY, struct.pack("<IQ", code, len(value)) + np.asarray(value, dtype).tobytes()
    code, letter = _CODES[kind]
    return key, code, struct.pack(f"<{letter}", value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def metadata_of(pairs: Sequence[Pair], path: Path) -> Metadata:
    """The key-values as a reader sees them."""
    positions, start = {}, 0
    for key, kind, value in pairs:
        positions[key] = (kind, start)
        start += len(value)
    return Metadata(Cursor(b"".join(value for _, _, value in pairs), str(path)), positions)


@dataclass(frozen=True)
class Header:
    """The header of a file that is not written yet, as `settings_of` reads it.

    shapes  tensor name -> shape in NumPy's order
    values  of the tensors that the configuration is read from: factors of a rotation
    """

    path: Path
    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, NDArray[Any]]

    @property
    def file(self) -> Any:
        return SimpleNamespace(headers=self.shapes)

    def __contains__(self, key: object) -> bool:
        return key in self.shapes

    def __getitem__(self, key: str) -> NDArray[Any]:
        return self.values[key]

    def info(self, key: str) -> Any:
        return SimpleNamespace(shape=self.shapes[key])
