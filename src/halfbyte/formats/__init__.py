"""The registry of format families: from a codec name to its `Format`, and from a `Format` to the
code that handles it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

from ..errors import FormatError
from ..spec import Format
from .affine import Affine
from .base import Family, PartSpec
from .composite import EXTRA_PARTS, Composite
from .exl3 import EXL3
from .fp4 import FP4
from .fp8 import FP8
from .ggml.fp4 import GGMLFP4
from .ggml.iq4 import GGMLIQ4
from .ggml.k_quants import GGMLK
from .ggml.legacy import GGMLLegacy
from .ggml.raw_blocks import GGMLRaw
from .hqq import HQQ
from .integer import Integer
from .mx import MX
from .nf4 import NF4
from .nvfp4 import NVFP4

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        MX(),
        NVFP4(),
        FP4(),
        Integer(),
        Affine(),
        FP8(),
        NF4(),
        HQQ(),
        GGMLLegacy(),
        GGMLK(),
        GGMLIQ4(),
        GGMLFP4(),
        GGMLRaw(),
        EXL3(),
    )
}
"""Families by name, in the order in which users see them."""


_COMPOSITES: dict[str, Composite] = {name: Composite(family) for name, family in FAMILIES.items()}


def family_of(fmt: Format) -> Family:
    """The family that encodes and decodes `fmt`."""
    return (_COMPOSITES if fmt.extra in EXTRA_PARTS else FAMILIES)[fmt.family]


def takes(fmt: Format, option: str) -> bool:
    """Whether the codec of `fmt` is spelled with this option."""
    return option in FAMILIES[fmt.family].options_of(fmt.name)


def packed_nbytes(fmt: Format, shape: Sequence[int], rows: int = 1) -> int:
    """Bytes of the canonical parts of a weight, its rows padded to a multiple of `rows`."""
    padded = (*shape[:-2], -(-shape[-2] // rows) * rows, shape[-1])
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in family_of(fmt).geometry(fmt, padded).values())


def codec_names() -> list[str]:
    """Every codec name, in registry order."""
    return [w for f in FAMILIES.values() for w in f.codecs]


def format_named(text: str | Format, group_size: int | None = None, **options: Any) -> Format:
    """The `Format` for `codec[:gN]` ("mxfp4", "int4:g128", "uint4:channel"); a Format passes
    through.

    Raises FormatError naming the nearest words when the codec is unknown.
    """
    if isinstance(text, Format):
        return text
    if not isinstance(text, str):
        raise FormatError(f"[format] {text!r}; a codec is a name such as 'mxfp4' or 'int4:g128', or a Format")
    name, _, tail = text.partition(":")
    if tail:
        match = re.fullmatch(r"g(\d+)|channel|g-1", tail)
        if not match:
            raise FormatError(f"[format] {text!r}; a codec is spelled codec[:gN] or codec:channel")
        given = int(match[1]) if match[1] else -1
        if group_size not in (None, given):
            raise FormatError(f"[format] {text!r} with group_size={group_size!r}; give one of the two")
        group_size = given
    folded = name.casefold()  # ggml writes q4_K, users also q4_k
    for family in FAMILIES.values():
        for known in family.codecs:
            if known is name or known.casefold() == folded:
                return family.format(known, group_size, **options)
    near = difflib.get_close_matches(name, codec_names(), n=3)
    known_names = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(codec_names())}"
    raise FormatError(f"[format] {name!r} is not a codec; {known_names}")


__all__ = ["EXTRA_PARTS", "FAMILIES", "Composite", "Family", "Format", "PartSpec", "codec_names", "family_of", "format_named"]
