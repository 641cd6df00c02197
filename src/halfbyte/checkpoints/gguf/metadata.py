"""The values of a GGUF header: a cursor that checks each step, and the key-values as a mapping that
decodes on access.

A string is a u64 length and its UTF-8 bytes; an array is an element type u32, a count u64 and the
elements (GGUF specification). Every length is checked against the file before anything of that size
is read or allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...numerics.transpose import native

Order = Literal["<", ">"]

MAX_NESTING = 8
"""Nested arrays are allowed by the specification and unused in practice; deeper nesting would
exhaust the stack.
"""
MAX_STRINGS = 1 << 23
"""Most strings or arrays in one array: thirty times the largest vocabulary."""

MANY_STRINGS = 1 << 10
"""Strings from which the native core walks over them."""

_SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h"), 4: ("uint32", "I"), 5: ("int32", "i"),
    6: ("float32", "f"), 7: ("bool", "B"), 10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_SMALLEST = {_STRING: 8, _ARRAY: 12} | {t: struct.calcsize("<" + code) for t, (_, code) in _SCALARS.items()}
"""Fewest bytes a value of each type takes: what a count is checked against before the elements are
walked.
"""
_DAMAGED = "it is cut short or its header is damaged"


class ShortHeaderError(CheckpointError):
    """A header that runs past the bytes that are there; it needs at least `needed` of the file's."""

    needed = 0


class Cursor:
    """A position in a file's bytes; every step is checked against the end.

    size  bytes of the whole file, of which `data` may be the beginning
    """

    def __init__(self, data: Any, path: str, order: Order = "<", position: int = 0, size: int | None = None) -> None:
        self.data, self.path, self.order, self.position = data, path, order, position
        self.end = len(data)
        self.size = self.end if size is None else size

    def at(self, position: int) -> Cursor:
        """Another cursor on the same bytes."""
        return Cursor(self.data, self.path, self.order, position, self.size)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[gguf] {self.path}: {message}")

    def short(self, message: str, needed: int) -> ShortHeaderError:
        """The error for what runs past the end; `needed` bytes of the file would hold it, or more."""
        error = ShortHeaderError(f"[gguf] {self.path}: {message}; {_DAMAGED}")
        error.needed = needed
        return error

    def step(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes` and returns where they start."""
        start = self.position
        if nbytes > self.end - start:
            raise self.short(f"{what} needs {nbytes} bytes at byte {start}, the file ends at {self.size}", start + nbytes)
        self.position = start + nbytes
        return start

    def number(self, code: str, what: str) -> Any:
        """One number of a struct code."""
        form = self.order + code
        return struct.unpack_from(form, self.data, self.step(struct.calcsize(form), what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 count of things of at least `smallest` bytes each, which must fit in what is left
        of the file.
        """
        n: int = self.number("Q", what)
        needed = self.position + n * smallest
        if needed > self.end:
            left = self.size - self.position
            raise self.short(f"{what} is {n}, of {smallest} bytes or more each, and {left} bytes are left", needed)
        return n

    def string(self, what: str, longest: int | None = None) -> str:
        length: int = self.number("Q", f"the length of {what}")
        if longest is not None and length > longest:
            raise self.error(f"{what} is {length} bytes long; at most {longest} are allowed")
        start = self.step(length, what)
        return self._text(self.data[start : start + length], start, what)

    def _text(self, raw: bytes, start: int, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"{what} is not UTF-8: byte {raw[e.start]:#04x} at {start + e.start}; allowed: UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings."""
        unpack = struct.Struct(self.order + "Q").unpack_from
        data, at, end, out = self.data, self.position, self.end, []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                if at > end:
                    break
                out.append(str(data[begin:at], "utf-8"))
        except UnicodeDecodeError:
            self._text(data[begin:at], begin, f"{what}[{len(out)}]")
            raise
        except struct.error:
            at = end + 1
        if at > end:
            raise self._past_the_end(what)
        self.position = at
        return out

    def step_strings(self, count: int, what: str) -> None:
        """Moves past `count` strings without building them."""
        core = native()
        if core is not None and count >= MANY_STRINGS:
            end = core.string_end(np.frombuffer(self.data, np.uint8), self.position, count, self.order == ">")
            if end < 0:
                raise self._past_the_end(what)
            self.position = end
            return
        unpack = struct.Struct(self.order + "Q").unpack_from
        data, position = self.data, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):  # past the end, or past what an offset can be
            position = self.end + 1
        if position > self.end:
            raise self._past_the_end(what)
        self.position = position

    def _past_the_end(self, what: str) -> ShortHeaderError:
        return self.short(f"the strings of {what} run past the end of the file at {self.size}", self.end + 1)

    def step_value(self, kind: int, what: str, depth: int = 0) -> None:
        """Moves past a value, checking its structure."""
        if kind in _SCALARS:
            self.step(_SMALLEST[kind], what)
        elif kind == _STRING:
            self.step(self.number("Q", f"the length of {what}"), what)
        elif kind == _ARRAY:
            inner, count = self.array(what, depth)
            if inner in _SCALARS:
                self.step(count * _SMALLEST[inner], what)
            elif inner == _STRING:
                self.step_strings(count, what)
            else:
                for _ in range(count):
                    self.step_value(inner, what, depth + 1)
        else:
            raise self.error(f"{what} has value type {kind}; the types are 0 to 12")

    def array(self, what: str, depth: int = 0) -> tuple[int, int]:
        """Element type and count of an array."""
        if depth >= MAX_NESTING:
            raise self.error(f"{what} nests arrays; allowed: at most {MAX_NESTING} deep")
        inner: int = self.number("I", f"the element type of {what}")
        if inner not in _SMALLEST:
            raise self.error(f"{what} is an array of value type {inner}; the types are 0 to 12")
        count = self.count(_SMALLEST[inner], f"the count of {what}")
        if inner not in _SCALARS and count > MAX_STRINGS:
            raise self.error(f"{what} is an array of {count} strings or arrays; at most {MAX_STRINGS} are allowed")
        return inner, count

    def value(self, kind: int, what: str) -> Any:
        """A value whose structure `step_value` has checked: int, float, bool, str, NumPy array, or
        list of strings or arrays.
        """
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            inner, count = self.array(what)
            if inner == _STRING:
                return self.strings(count, what)
            if inner == _ARRAY:
                return [self.value(inner, f"{what}[{i}]") for i in range(count)]
            return self._numbers(inner, count, what)
        name, code = _SCALARS[kind]
        number = self.number(code, what)
        if name != "bool":
            return number
        if number > 1:
            raise self.error(f"{what} is a bool byte of {number}; 0 and 1 are allowed")
        return bool(number)

    def _numbers(self, kind: int, count: int, what: str) -> Any:
        name, _ = _SCALARS[kind]
        stored = np.dtype("uint8" if name == "bool" else name).newbyteorder(self.order)
        array = np.frombuffer(self.data, stored, count, self.step(count * stored.itemsize, what))
        if name == "bool" and count and int(array.max()) > 1:
            raise self.error(f"{what} holds a bool byte of {array.max()}; 0 and 1 are allowed")
        return array.astype(np.dtype(name))


class Metadata(Mapping[str, Any]):
    """The key-values of a header. Values are decoded on each access; nothing is cached.

    Numbers and bools are Python's, arrays of them NumPy's, arrays of strings lists. Raises
    CheckpointError, naming the key, for bytes that are not UTF-8 and bools that are not 0 or 1.
    """

    def __init__(self, cursor: Cursor, positions: dict[str, tuple[int, int]]) -> None:
        self._file, self._positions = cursor, positions

    def _cursor(self, key: str) -> tuple[Cursor, int]:
        kind, position = self._positions[key]
        return self._file.at(position), kind

    def __getitem__(self, key: str) -> Any:
        cursor, kind = self._cursor(key)
        return cursor.value(kind, f"key {key!r}")

    def type_name(self, key: str) -> str:
        """The type of a value in the file: "uint32", "string", "array[float32]", ..."""
        cursor, kind = self._cursor(key)
        return f"array[{_name(cursor.array(key)[0])}]" if kind == _ARRAY else _name(kind)

    def raw(self, key: str) -> tuple[int, bytes]:
        """(value type, bytes of the value as stored), for a writer that copies it."""
        cursor, kind = self._cursor(key)
        start = cursor.position
        cursor.step_value(kind, f"key {key!r}")
        return kind, bytes(cursor.data[start : cursor.position])

    def strings(self, key: str) -> tuple[Any, NDArray[np.uint8]] | None:
        """The `_native.Strings` of an array of strings, and the header's bytes, which its bounds
        count in; None without a core. Nothing is decoded.
        """
        core, (cursor, kind) = native(), self._cursor(key)
        if core is None or kind != _ARRAY:
            return None
        inner, count = cursor.array(key)
        if inner != _STRING:
            return None
        data = np.frombuffer(cursor.data, np.uint8)
        return core.Strings(data, cursor.position, count, cursor.order == ">"), data

    def length(self, key: str) -> int:
        """Elements of an array, bytes of a string, 1 for a number; nothing is decoded."""
        cursor, kind = self._cursor(key)
        if kind == _ARRAY:
            return cursor.array(key)[1]
        return int(cursor.number("Q", key)) if kind == _STRING else 1

    def typed(self, key: str, kind: str, default: Any = None) -> Any:
        """The value of a key that must be of `kind`, or `default` when it is absent.

        kind  a type name, or "integer" or "float" for any width
        Raises CheckpointError when the file has it as another type.
        """
        if key not in self._positions:
            return default
        have = self.type_name(key)
        widths = {
            "integer": ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
            "float": ("float32", "float64"),
        }
        if have not in widths.get(kind, (kind,)):
            raise self._file.error(f"key {key!r} is {have}; {kind} is needed")
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def _name(kind: int) -> str:
    return {_STRING: "string", _ARRAY: "array"}.get(kind) or _SCALARS[kind][0]
