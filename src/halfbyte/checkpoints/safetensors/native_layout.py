"""halfbyte's own files: the canonical parts under their names, and one small tensor beside each
weight that says what they are.

    NAME.codes, NAME.scales, ...   the parts of docs/design/layering.md (layouts/native.py)
    NAME.halfbyte                  uint8: JSON of format, shape, origin, details, window
    NAME                           a dense tensor

The file's metadata has format = "halfbyte". Nothing is packed or permuted, so a weight is read
without a copy. The description is a tensor beside its weight and not in the metadata, so that a
header of many weights stays small and the description of one weight can be read without the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ...errors import LayoutError
from ...formats import FAMILIES
from ...layouts import Described
from ...layouts.base import Array, Config, HasHeader, Tensors
from ...layouts.native import PARTS, Native
from ...spec import EXTRAS, GROUPINGS, SCALE_KINDS, ZERO_KINDS, Format
from ...tensor.qtensor import QTensor
from ..io.bounded_json import parse_object

_WORDS: dict[str, tuple[str, ...]] = {
    "scale": SCALE_KINDS,
    "zero": ZERO_KINDS,
    "grouping": GROUPINGS,
    "minimum": ("", *SCALE_KINDS),
    "global_op": ("", "multiply", "divide"),
    "extra": EXTRAS,
}
"""Fields of a Format that take one of a few words."""


class OwnLayout(Native):
    """`Native` with the description read from, and written to, a tensor."""

    required: ClassVar[tuple[str, ...]] = ("halfbyte",)
    optional: ClassVar[tuple[str, ...]] = PARTS
    peek = ("halfbyte",)

    def matches(self, suffixes: Collection[str]) -> bool:
        return "halfbyte" in suffixes

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        parts = {p: t for p, t in tensors.items() if p != "halfbyte"}
        description = _description(tensors, name)
        described = super().describe(parts, description, name)
        _check(described.format, name)
        _window(description, described, name)
        return described

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        description = _description(tensors, name)
        described = self.describe(tensors, config, name)
        q = QTensor(
            *described,
            {p: tensors[p] for p in PARTS if p in tensors},
            origin=str(description.get("origin") or ""),
            details=description.get("details") or {},
            window=_window(description, described, name),
            name=name,
        )
        q.validate(name)
        return q

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        try:
            text = json.dumps(self.config(q), ensure_ascii=False).encode()
        except TypeError as error:
            raise LayoutError(f"[halfbyte] details {dict(q.details)!r:.200} cannot be written as JSON: {error}") from error
        # Whole words, so that the parts that follow stay aligned.
        text += b" " * (-len(text) % 8)
        return {**super().pack(q, config), "halfbyte": np.frombuffer(text, np.uint8)}


def _description(tensors: Mapping[str, HasHeader], name: str) -> dict[str, Any]:
    """What the `halfbyte` tensor says."""
    raw = tensors["halfbyte"]
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.ndim != 1:
        raise LayoutError(f"[halfbyte] {name}.halfbyte is {raw.dtype} {list(raw.shape)}; wanted a vector of uint8")
    description = parse_object(raw.tobytes(), f"tensor {name}.halfbyte")
    shape, details = description.get("shape"), description.get("details", {})
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 1 << 48 for d in shape):
        raise LayoutError(f"[halfbyte] {name}.halfbyte: shape {shape!r:.80}; wanted a list of whole numbers")
    if not isinstance(details, dict):
        raise LayoutError(f"[halfbyte] {name}.halfbyte: details {details!r:.80}; wanted an object")
    return description


def _window(description: Mapping[str, Any], described: Described, name: str) -> tuple[int, int] | None:
    """(first row, rows of the whole) of a slice, None for a whole tensor."""
    window = description.get("window")
    if window is None:
        return None
    rows = described.shape[-2] if described.format.grouping == "block" else math.prod(described.shape[:-1])
    if isinstance(window, list) and len(window) == 2 and all(type(v) is int for v in window):
        first, total = window
        if 0 <= first <= first + rows <= total < 1 << 48:
            return first, total
    raise LayoutError(
        f"[halfbyte] {name}.halfbyte: window {window!r:.80}; wanted the first of {rows} rows and the rows of the whole"
    )


def _check(fmt: Format, name: str) -> None:
    """Fields that no format word has would fail later, in decoding: refuse them here."""
    family = FAMILIES[fmt.family]
    known = fmt.name in (*family.codecs, *family.decoded)
    usual = family.format(fmt.name) if known else fmt
    right = {
        "name": known,
        "bits": fmt.bits == usual.bits,
        "element": fmt.element == usual.element,
        "super_size": fmt.super_size in (0, usual.super_size),
        "divisor": 0 < fmt.divisor < 1e30,
        **{field: getattr(fmt, field) in words for field, words in _WORDS.items()},
    }
    for field, fine in right.items():
        if not fine:
            raise LayoutError(
                f"[halfbyte] {name}: format field {field} is {getattr(fmt, field)!r:.80}; {fmt.name} does not have that"
            )
