"""Parse and check the header of a safetensors file, under limits.

    8 bytes: n, little-endian
    n bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}
    the data

The tensors, sorted by offset, must cover the data without gap or overlap. Entries are scanned one
at a time instead of building the JSON tree, so a header of the largest size costs memory for its
tensors only; no pattern here can backtrack over more than one entry.

Source: the format description of the safetensors project,
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

from ...errors import CheckpointError

MAX_HEADER = 100_000_000
"""The format's own limit on header bytes."""
MAX_TENSORS = 100_000
"""Most tensors in one file: 18,432 expert matrices of five tensors each are 92,160. It bounds
memory and time.
"""
MAX_NAME = 1 << 8
MAX_ENTRY = 1 << 12
"""Most bytes of a tensor's name, and of the rest of its entry (which is near 80)."""
MAX_METADATA = 16 << 20
MAX_PAIRS = 1 << 16
"""Most bytes and most keys of `__metadata__`."""
MAX_RANK = 32

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element of each dtype word."""
_DTYPES = {word.encode(): word for word in DTYPE_BITS}
_W = rb"[ \t\r\n]{0,256}"
"""White space between tokens; the padding after the last brace has no such limit."""
_ENTRY = re.compile(
    rb'%(w)s"([^"\\\x00-\x1f\x7f]{1,%(name)d})"%(w)s:%(w)s\{%(w)s"dtype"%(w)s:%(w)s"(\w{1,16})"%(w)s,'
    rb'%(w)s"shape"%(w)s:%(w)s\[([0-9, ]{0,512})\]%(w)s,'
    rb'%(w)s"data_offsets"%(w)s:%(w)s\[%(w)s(0|[1-9]\d{0,19})%(w)s,%(w)s(0|[1-9]\d{0,19})%(w)s\]%(w)s\}%(w)s([,}])'
    % {b"w": _W, b"name": MAX_NAME}
)
"""An entry as the common writers spell it, without control characters in its name; others are
parsed by `_slow_entry`.
"""
_VALUE = re.compile(_W + rb":" + _W + rb"(\{[^{}]{0,%d}\})" % MAX_ENTRY + _W + rb"([,}])")
_PAIR = re.compile(_W + rb'"([^"]*)"' + _W + rb":" + _W + rb'"([^"]*)"' + _W + rb"([,}])")
_METADATA = re.compile(_W + rb":" + _W + rb"\{" + _W + rb"(?:\}" + _W + rb"([,}]))?")
_NEXT = re.compile(_W + rb"([,}])")
_SPACE = re.compile(_W)
_TEXT = re.compile(rb"[^ \t\r\n]")
_FIELDS = ("dtype", "shape", "data_offsets")


class Entry(NamedTuple):
    """One tensor: dtype word, shape, and its bytes data[start:stop], counted from the end of the
    header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FileHeader(NamedTuple):
    """All tensors of a file in header order, its metadata, and where the data begins."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def _is_text(first: bytes) -> bool:
    """Whether all of the first bytes are printable ASCII or white space: 8 of them would be a
    header of more than 2^59 bytes.
    """
    return bool(first) and all(b in b"\t\n\r" or 32 <= b < 127 for b in first)


def header_length(first: bytes, file_size: int, where: str) -> int:
    """n, from the first 8 bytes of a file of `file_size` bytes; CheckpointError when it cannot be a
    header's length.
    """
    if file_size == 0:
        raise CheckpointError(f"[open] {where}: the file is empty; fetch it again")
    if _is_text(first):
        shown = first.decode("ascii").strip()
        raise CheckpointError(
            f"[open] {where} begins with the text {shown!r}; a safetensors file begins with the length of its header. A web page "
            "or a message may have been saved in its place: fetch it again, or name the file that holds the weights"
        )
    if len(first) < 8:
        raise CheckpointError(f"[open] {where}: {file_size} bytes; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"[open] {where}: header length {length:,}; the format allows {MAX_HEADER:,}. Is it a safetensors file?"
        )
    if length > file_size - 8:
        raise CheckpointError(
            f"[open] {where}: header length {length:,}, but {file_size - 8:,} bytes follow; the file is cut short or damaged"
        )
    if length < 2:
        raise CheckpointError(f"[open] {where}: header length {length}; the shortest header is {{}}")
    return length


def parse_header(data: bytes, data_size: int, where: str) -> FileHeader:
    """Entries of the JSON header `data`, checked against `data_size` bytes of tensor data; `where`
    is the file's name for messages.

    Raises CheckpointError naming file and tensor when anything does not fit.
    """
    count = data.count(b'"data_offsets"')
    if count > MAX_TENSORS:
        raise CheckpointError(f"[open] {where}: {count:,} tensors in the header; read up to {MAX_TENSORS:,}")
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] | None = None
    position = _opening(data, where)
    closed = data[position - 1 : position] == b"}"
    while not closed:
        match = _ENTRY.match(data, position)
        kind = None
        if match:
            raw_name, dtype, shape, start, stop, after = match.groups()
            kind = _kind(dtype, shape)
        if match and kind:
            position, closed = match.end(), after == b"}"
            entry = Entry(kind[0], kind[1], int(start), int(stop))
            name, printable = _text(raw_name, where, "a tensor's name"), raw_name.isascii()
        else:
            quoted, position = _name(data, position, where)
            name = _unquote(quoted, where, "a tensor's name")
            if name == "__metadata__":
                if metadata is not None:
                    raise CheckpointError(f"[open] {where}: __metadata__ is given twice in the header; allowed: once")
                metadata, position, closed = _metadata(data, position, where)
                continue
            value = _VALUE.match(data, position)
            if not value:
                raise CheckpointError(
                    f"[open] {where}: tensor {name!r}: its entry is not an object of dtype, shape and data_offsets"
                )
            entry, printable = _slow_entry(value[1], where, name), False
            position, closed = value.end(), value[2] == b"}"
        if name in entries:
            raise CheckpointError(f"[open] {where}: tensor {name!r} is given twice in the header; allowed: each name once")
        if not printable and not name.isprintable():
            raise CheckpointError(
                f"[open] {where}: tensor {name!r}: its name holds control characters; allowed: names of printable characters"
            )
        if kind is None or kind[2] != entry.stop - entry.start:
            _check_size(name, entry, where)
        entries[name] = entry
    if _TEXT.search(data, position):
        raise CheckpointError(
            f"[open] {where}: header has more text after its closing brace, at byte {position}; allowed: spaces"
        )
    _check_cover(entries, data_size, where)
    return FileHeader(entries, metadata or {}, len(data) + 8)


def _opening(data: bytes, where: str) -> int:
    """Position after the opening brace, or after the closing one when nothing is between."""
    match = re.match(rb"\{" + _W + rb"(\})?", data)
    if not match:
        raise CheckpointError(f"[open] {where}: header begins with {data[:12]!r}; a safetensors header is a JSON object")
    return match.end()


@lru_cache(maxsize=1024)
def _kind(dtype: bytes, shape: bytes) -> tuple[str, tuple[int, ...], int] | None:
    """(dtype word, axes, bytes, −1 where `_check_size` must look) of these texts; None for texts
    that `_slow_entry` must explain.

    Cached: a model has few shapes and many tensors of each.
    """
    word = _DTYPES.get(dtype)
    try:
        axes = tuple(map(int, shape.split(b","))) if shape.strip() else ()
    except ValueError:
        return None
    if word is None or any(len(text.strip()) != len(str(n)) for n, text in zip(axes, shape.split(b","), strict=False)):
        return None  # JSON has no leading zeros
    bits = math.prod(axes) * DTYPE_BITS[word]
    plain = len(axes) <= 4 and bits % 8 == 0 and (0 < bits < 1 << 66 or max(axes, default=0) < 1 << 15)
    return word, axes, bits // 8 if plain else -1


def _slow_entry(text: bytes, where: str, name: str) -> Entry:
    """The entry whose JSON object is `text`, fields in any order."""
    about = f"[open] {where}: tensor {name!r}"
    try:
        items: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{about}: its entry is not JSON: {error}") from error
    fields = dict(items)
    if len(items) != 3 or set(fields) != set(_FIELDS):
        raise CheckpointError(
            f"{about}: its entry has {', '.join(k for k, _ in items) or 'nothing'}; wanted dtype, shape, data_offsets once each"
        )
    dtype, shape, offsets = (fields[f] for f in _FIELDS)
    if not isinstance(dtype, str):
        raise CheckpointError(f"{about}: dtype {dtype!r}; a dtype is a word such as F16")
    for label, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(v) is int and v >= 0 for v in numbers):
            raise CheckpointError(f"{about}: {label} {_short(numbers)}; wanted a list of whole numbers of at least 0")
    if len(offsets) != 2:
        raise CheckpointError(f"{about}: data_offsets {_short(offsets)}; wanted [start, stop]")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _check_size(name: str, entry: Entry, where: str) -> None:
    """Shape times dtype is what the offsets span."""
    bits = DTYPE_BITS.get(entry.dtype, 0)
    total = math.prod(entry.shape) * bits
    shape = f"shape {_short(list(entry.shape))} of {entry.dtype}"
    if not bits:
        problem = f"dtype {_short(entry.dtype)}; known: {', '.join(DTYPE_BITS)}"
    elif len(entry.shape) > MAX_RANK:
        problem = f"rank {len(entry.shape)}; read up to {MAX_RANK}"
    elif entry.stop < entry.start:
        problem = f"data_offsets {_short([entry.start, entry.stop])} run backwards"
    elif math.prod(d for d in entry.shape if d) * bits >> 66:
        # An empty tensor too: no array can have axes that no address spans.
        problem = f"{shape} is over 2^63 bytes"
    elif total % 8:
        problem = f"{shape} is {total} bits, not whole bytes"
    elif total // 8 != entry.stop - entry.start:
        span = f"data_offsets {_short([entry.start, entry.stop])} span {entry.stop - entry.start:,}"
        problem = f"{shape} takes {total // 8:,} bytes; {span}"
    else:
        return
    raise CheckpointError(f"[open] {where}: tensor {name!r}: {problem}")


def _check_cover(entries: dict[str, Entry], data_size: int, where: str) -> None:
    """The tensors cover the data exactly."""
    if max((e.stop for e in entries.values()), default=0) > data_size:
        past = min((n for n, e in entries.items() if e.stop > data_size), key=lambda name: entries[name][2:])
        e = entries[past]
        raise CheckpointError(
            f"[open] {where}: tensor {past!r} lies at bytes {e.start:,} to {e.stop:,} of the data, "
            f"but the file holds {data_size:,}; the file is cut short or damaged"
        )
    end, before = 0, ""
    for name in sorted(entries, key=lambda name: entries[name][2:]):
        start = entries[name].start
        if start != end:
            kind = "overlaps" if start < end else f"leaves {start - end:,} bytes unused after"
            raise CheckpointError(
                f"[open] {where}: tensor {name!r} begins at byte {start:,} and {kind} {before or 'the header'!r}, "
                f"which ends at {end:,}; "
                f"tensors must follow each other"
            )
        end, before = entries[name].stop, name
    if end != data_size:
        raise CheckpointError(
            f"[open] {where}: the tensors end at byte {end:,} of the data (the last is {before!r}), "
            f"but the file holds {data_size:,}"
        )


def _name(data: bytes, position: int, where: str) -> tuple[bytes, int]:
    """The quoted string at `position`, and the position after it."""
    start = _SPACE.match(data, position).end()  # type: ignore[union-attr]
    if data[start : start + 1] != b'"':
        raise CheckpointError(
            f"[open] {where}: header is not JSON at byte {start}: {data[start : start + 16]!r} where a name in quotes belongs"
        )
    window = _without_escapes(data[start + 1 : start + 2 + MAX_NAME])
    end = window.find(b'"')
    if end < 0:
        raise CheckpointError(
            f"[open] {where}: a name in the header is over {MAX_NAME} bytes or has no closing quote, at byte {start}; "
            "allowed: JSON strings up to that length"
        )
    return data[start : start + end + 2], start + end + 2


def _metadata(data: bytes, position: int, where: str) -> tuple[dict[str, str], int, bool]:
    """The string pairs of `__metadata__`, the position after it, and whether the header ends there."""
    about = f"[open] {where}: __metadata__"
    opened = _METADATA.match(data, position)
    if not opened:
        raise CheckpointError(f"{about} is not an object of strings")
    if opened[1]:
        return {}, opened.end(), opened[1] == b"}"
    base = opened.end()
    window = data[base : base + MAX_METADATA]
    clean = _without_escapes(window)
    pairs: dict[str, str] = {}
    at, done = 0, False
    while not done:
        match = _PAIR.match(clean, at)
        if not match:
            raise CheckpointError(
                f"{about} is not an object of strings of at most {MAX_METADATA:,} bytes, at byte {base + at} of the header"
            )
        key, value = (_unquote(window[match.start(i) - 1 : match.end(i) + 1], where, "__metadata__") for i in (1, 2))
        if key in pairs:
            raise CheckpointError(f"{about}: key {key!r} is given twice; allowed: each key once")
        if len(pairs) == MAX_PAIRS:
            raise CheckpointError(f"{about}: it has too many keys; allowed: {MAX_PAIRS:,}")
        pairs[key] = value
        at, done = match.end(), match[3] == b"}"
    after = _NEXT.match(data, base + at)
    if not after:
        raise CheckpointError(f"[open] {where}: header is not JSON after __metadata__, at byte {base + at}")
    return pairs, after.end(), after[1] == b"}"


def _without_escapes(text: bytes) -> bytes:
    r"""`text` with `\\` and `\"` blanked out byte for byte, so that every quote left ends a string.

    Runs of backslashes pair up from their left end, which is the order `replace` works in.
    """
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text


def _text(raw: bytes, where: str, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"[open] {where}: {what} is not UTF-8: {raw[:40]!r} ({error.reason})") from error


def _unquote(quoted: bytes, where: str, what: str) -> str:
    """The string of a JSON string literal."""
    text = _text(quoted, where, what)
    if "\\" not in text:
        return text[1:-1]
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise CheckpointError(f"[open] {where}: {what} is not a JSON string: {quoted[:40]!r} ({error})") from error
    assert isinstance(value, str)  # it is in quotes
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
