"""The header of one GGUF file: key-values, decoded on access, and the position of each tensor.

    "GGUF"  version u32  tensors u64  pairs u64
    pairs:   key, type u32, value
    tensors: name, n_dims u32, dims u64[n_dims], type u32, offset u64
    zeros to a multiple of general.alignment
    data:    each tensor on a multiple of general.alignment

Versions 2 and 3, of either byte order, after the GGUF specification. One pass checks every length
against the file, so a header with wrong lengths costs no more than its own bytes; strings are
skipped, not decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...formats.ggml.types import GGML_BY_ID, GGMLType
from ...numerics.exact import bfloat16
from .metadata import Cursor, Metadata, Order

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
"""ggml's GGML_MAX_DIMS."""
MAX_NAME = 65535
"""Longest key or tensor name in bytes; the specification's limit for keys."""
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Type ids that ggml has removed: old experiments, and CPU-specific orders that programs now make
at load.
"""


@dataclass(frozen=True)
class TensorHeader:
    """Position of a tensor: `shape` in NumPy's order, `offset` from the start of its file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def quantized(self) -> bool:
        return not self.type.plain

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of plain numbers."""
        return bfloat16 if self.type.plain == "bfloat16" else np.dtype(self.type.plain)

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.type.name} {list(self.shape)})"


@dataclass(frozen=True)
class Header:
    """One file's header.

    order  byte order, "<" or ">"
    gaps   bytes between tensors that belong to none
    slack  bytes after the last tensor and its padding
    """

    version: int
    order: Order
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorHeader]
    data_start: int
    gaps: int
    slack: int


def read_header(data: Any, path: str, size: int | None = None) -> Header:
    """The header of a file's bytes (any buffer). Touches header bytes only.

    size  bytes of the file where `data` is only its beginning; ShortHeaderError when the header is not
          complete in it

    Raises CheckpointError, naming the file and the key or tensor, for whatever does not fit
    together; UnsupportedError for a version or tensor type that is known and not read.
    """
    cursor = Cursor(data, path, size=size)
    if bytes(data[:4]) == MAGIC[::-1]:
        raise UnsupportedError(
            f"[gguf] {path}: starts with {MAGIC[::-1]!r}: its writer swapped the bytes of the magic too; write it again"
        )
    if bytes(data[:4]) != MAGIC:
        raise cursor.error(f"starts with {bytes(data[:4])!r}; a GGUF file starts with {MAGIC!r}")
    cursor.step(4, "the magic")
    version: int = cursor.number("I", "the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS and swapped in VERSIONS:
        cursor.order, version = ">", swapped
    if version == 1:
        raise UnsupportedError(
            f"[gguf] {path}: version 1, whose counts have 32 bits; 2 and 3 are read, convert it with llama.cpp"
        )
    if version not in VERSIONS:
        raise cursor.error(f"version {version}; versions 2 and 3 are read")
    tensor_count = cursor.count(24, "the tensor count")
    pair_count = cursor.count(13, "the key-value count")
    metadata = _pairs(cursor, pair_count)
    alignment: int = metadata.typed("general.alignment", "uint32", DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment}; a power of two is allowed")
    metadata.typed("general.architecture", "string")
    raw: dict[str, tuple[GGMLType, tuple[int, ...], int]] = {}
    last = ""
    for i in range(tensor_count):
        after = f" (after {last!r})" if last else ""
        name = cursor.string(f"the name of tensor {i + 1} of {tensor_count}{after}", MAX_NAME)
        if name in raw:
            raise cursor.error(f"tensor {name!r} is given twice; allowed: each name once")
        raw[name] = _tensor(cursor, name)
        last = name
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorHeader(name, kind, shape, data_start + offset, math.prod(shape) // kind.block * kind.nbytes)
        for name, (kind, shape, offset) in raw.items()
    }
    gaps, slack = _extents(tensors, data_start, alignment, cursor, len(data) if size is None else size)
    return Header(version, cursor.order, alignment, metadata, tensors, data_start, gaps, slack)


def _pairs(cursor: Cursor, count: int) -> Metadata:
    """Skips the key-values and records the position of each."""
    positions: dict[str, tuple[int, int]] = {}
    for i in range(count):
        key = cursor.string(f"key {i + 1} of {count}", MAX_NAME)
        if key in positions:
            raise cursor.error(f"key {key!r} is given twice; allowed: each key once")
        kind: int = cursor.number("I", f"the type of key {key!r}")
        positions[key] = kind, cursor.position
        cursor.step_value(kind, f"key {key!r}")
    return Metadata(cursor, positions)


def _tensor(cursor: Cursor, name: str) -> tuple[GGMLType, tuple[int, ...], int]:
    """Type, NumPy shape and offset within the data of one tensor."""
    what = f"tensor {name!r}"
    n_dims: int = cursor.number("I", f"the dimension count of {what}")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions; at most {MAX_DIMS} are allowed")
    dims = [int(cursor.number("Q", f"dimension {i} of {what}")) for i in range(n_dims)]
    type_id: int = cursor.number("I", f"the type of {what}")
    offset: int = cursor.number("Q", f"the offset of {what}")
    if any(d == 0 or d >= 1 << 63 for d in dims):
        raise cursor.error(f"{what} has dimensions {dims}; each is 1 or more and below 2^63")
    if type_id in REMOVED:
        raise UnsupportedError(
            f"[gguf] {cursor.path}: {what} has type {type_id} ({REMOVED[type_id]}), which ggml has removed; "
            "make the file again with a current llama.cpp"
        )
    if type_id not in GGML_BY_ID:
        raise cursor.error(
            f"{what} has type {type_id}; ggml's types end at {max(GGML_BY_ID)}, ids above 100 belong to forks of llama.cpp. "
            "Write a file of a standard type with the program that made it: llama-quantize --allow-requantize IN OUT Q8_0"
        )
    kind = GGML_BY_ID[type_id]
    row = dims[0] if dims else 1
    if row % kind.block:
        raise cursor.error(f"{what} has rows of {row} in {kind.name}; a row is whole blocks of {kind.block}")
    return kind, tuple(reversed(dims)), offset


def _extents(tensors: dict[str, TensorHeader], data_start: int, alignment: int, cursor: Cursor, end: int) -> tuple[int, int]:
    """Checks that tensors are aligned, do not overlap and are inside the file, which ends at `end`.
    Returns (gaps, slack).
    """
    gaps, position, previous = 0, data_start, None
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        within = t.offset - data_start
        if within % alignment:
            raise cursor.error(f"{t} has offset {within}, which is no multiple of the alignment {alignment}")
        if t.end > end:
            raise cursor.error(
                f"{t} takes {t.nbytes} bytes from byte {t.offset}, the file ends at {end}; "
                "it is cut short or its header is damaged"
            )
        if previous is not None and t.offset < previous.end:
            raise cursor.error(f"{t} overlaps {previous}: it starts at byte {t.offset}, the other ends at {previous.end}")
        gaps += max(0, t.offset - position)
        position = -(-t.end // alignment) * alignment
        previous = t
    if previous is not None and previous.end < end < position:
        # Some writers pad the last tensor, others do not; a file that ends within the padding is
        # truncated.
        raise cursor.error(f"the file ends at {end}, within the padding of {previous} that runs to {position}; it is cut short")
    return gaps, max(0, end - position)
