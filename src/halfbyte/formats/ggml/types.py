"""ggml's tensor types: name, number in a file, elements and bytes of a block, and the codec that a
block holds.

    bytes of a row = k / block · nbytes

Numbers and sizes are ggml's own (`ggml.h`, enum ggml_type; the GGUF specification repeats them).
They are *tensor* types: the file type in a GGUF's metadata is another enumeration (tensor type 12
is Q4_K, file type 12 is not).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import FormatError, ShapeError
from ...spec import Format


class GGMLType(NamedTuple):
    """One ggml tensor type.

    id       number in the file
    block    elements of a block; every row is whole blocks
    nbytes   bytes of a block
    codec    codec name, "" for plain numbers and for types that hold no weights
    plain    name of the numpy dtype for plain numbers ("bfloat16" by ml_dtypes), "" otherwise
    """

    name: str
    id: int
    block: int
    nbytes: int
    codec: str = ""
    plain: str = ""

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k elements. Raises ShapeError when k is not whole blocks."""
        check_blocks(self.name, k, self.block)
        return k // self.block * self.nbytes

    def elements(self, row_bytes: int) -> int:
        """k of a row of so many bytes. Raises ShapeError when that is not whole blocks."""
        if row_bytes % self.nbytes:
            raise ShapeError(
                f"[gguf] a {self.name} row of {row_bytes} bytes; a block of {self.block} values takes {self.nbytes} bytes"
            )
        return row_bytes // self.nbytes * self.block


_ALL = (
    GGMLType("F32", 0, 1, 4, plain="float32"),
    GGMLType("F16", 1, 1, 2, plain="float16"),
    GGMLType("Q4_0", 2, 32, 18, "q4_0"),
    GGMLType("Q4_1", 3, 32, 20, "q4_1"),
    GGMLType("Q5_0", 6, 32, 22, "q5_0"),
    GGMLType("Q5_1", 7, 32, 24, "q5_1"),
    GGMLType("Q8_0", 8, 32, 34, "q8_0"),
    GGMLType("Q8_1", 9, 32, 36),
    GGMLType("Q2_K", 10, 256, 84, "q2_K"),
    GGMLType("Q3_K", 11, 256, 110, "q3_K"),
    GGMLType("Q4_K", 12, 256, 144, "q4_K"),
    GGMLType("Q5_K", 13, 256, 176, "q5_K"),
    GGMLType("Q6_K", 14, 256, 210, "q6_K"),
    GGMLType("Q8_K", 15, 256, 292),
    GGMLType("IQ2_XXS", 16, 256, 66, "iq2_xxs"),
    GGMLType("IQ2_XS", 17, 256, 74, "iq2_xs"),
    GGMLType("IQ3_XXS", 18, 256, 98, "iq3_xxs"),
    GGMLType("IQ1_S", 19, 256, 50, "iq1_s"),
    GGMLType("IQ4_NL", 20, 32, 18, "iq4_nl"),
    GGMLType("IQ3_S", 21, 256, 110, "iq3_s"),
    GGMLType("IQ2_S", 22, 256, 82, "iq2_s"),
    GGMLType("IQ4_XS", 23, 256, 136, "iq4_xs"),
    GGMLType("I8", 24, 1, 1, plain="int8"),
    GGMLType("I16", 25, 1, 2, plain="int16"),
    GGMLType("I32", 26, 1, 4, plain="int32"),
    GGMLType("I64", 27, 1, 8, plain="int64"),
    GGMLType("F64", 28, 1, 8, plain="float64"),
    GGMLType("IQ1_M", 29, 256, 56, "iq1_m"),
    GGMLType("BF16", 30, 1, 2, plain="bfloat16"),
    GGMLType("TQ1_0", 34, 256, 54, "tq1_0"),
    GGMLType("TQ2_0", 35, 256, 66, "tq2_0"),
    GGMLType("MXFP4", 39, 32, 17, "mxfp4"),
    GGMLType("NVFP4", 40, 64, 36, "nvfp4_ue4m3"),
    GGMLType("Q1_0", 41, 128, 18),
)
GGML_TYPES: dict[str, GGMLType] = {t.name: t for t in _ALL}
"""Types by ggml name, in order of their numbers."""
GGML_BY_ID: dict[int, GGMLType] = {t.id: t for t in _ALL}
"""Types by number in the file."""
GGML_BY_CODEC: dict[str, GGMLType] = {t.codec: t for t in _ALL if t.codec}
"""Types by codec name."""


def ggml_type(which: str | int) -> GGMLType:
    """The type of a name ("Q4_K", any case) or of a number in a file. Raises FormatError for one
    that is not listed.
    """
    found = GGML_BY_ID.get(which) if isinstance(which, int) else GGML_TYPES.get(str(which).upper())
    if found is None:
        raise FormatError(f"[gguf] tensor type {which!r} is not known; known: {', '.join(f'{t.name} ({t.id})' for t in _ALL)}")
    return found


def check_blocks(codec: str, k: int, block: int) -> None:
    """Raise ShapeError unless a row of k values is whole blocks: a ggml row has no tail."""
    if k % block:
        raise ShapeError(
            f"[format] {codec} with rows of {k} values; its blocks hold {block}, so k must be a multiple of {block}"
            + ("; use a type with blocks of 32 (q8_0, q5_0, iq4_nl, q4_0)" if block > 32 and k % 32 == 0 else "")
        )


def require_fixed(fmt: Format, group_size: int | None, options: dict[str, Any]) -> Format:
    """`fmt`; FormatError for an option or another group size, since ggml's blocks are fixed."""
    if options:
        raise FormatError(f"[format] {fmt.name} takes no option {', '.join(options)}")
    if group_size is not None and group_size != fmt.group_size:
        raise FormatError(f"[format] {fmt.name} with group size {group_size}; allowed: {fmt.group_size}, as in every ggml block")
    return fmt
