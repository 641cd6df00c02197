"""Decoders: packed codes to floating-point values in registers, one table row for each kind of
code.

A row is PTX over named operands, which `assembly` and `pair_assembly` replace by the numbers of
Triton's inline assembly:

    w0 w1   words of codes; w1 belongs to row g + 8 where a decoder takes both rows
    y0 …    results; in `PAIRS` y0 is the pair of row g, y1 of row g + 8, and of 2-bit codes q0 and
            q1 are the pairs eight inputs further
    s0 s1   scales of rows g and g + 8                 z0 z1   their zero points or biases
    p0 p1   shift or mask that selects a pair in w0    f0 f1   the multiplier that goes with a mask
    v0 v1   words of the second bit plane (`LANES`, where p0 is c of order.py's lane order)
    e0      the lane's entry, lane mod 16, of a table of 16 float32

Four tables, by what reads the result:

    WORDS      a word of eight 4-bit codes -> eight float32, for the portable kernels
    OPERANDS   a word -> registers of the A operand of mma.m16n8k16
    PAIRS      a word -> finished pairs of the register operand of wgmma
    LANES      the same from planes in lane order

Every row is executed over all codes by tests/backends/cuda/test_decoders.py;
docs/adding-a-kernel.md adds one. The bits of E2M1 words in fragment order are spread as
`order.spread_e2m1` describes.

Integers become floats without a conversion: q in the low mantissa bits of 1024.0 in float16 (of
128.0 in bfloat16) is 1024 + q, and one subtraction leaves q. A nibble four bits higher is 16 q.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from . import order


class Decoder(NamedTuple):
    """A row of `WORDS` or `OPERANDS`.

    code        the assembly
    low, high   what the value 1 decodes to in rows g, and in rows g + 8: powers of two that the
                caller divides by
    """

    code: str
    low: float = 1.0
    high: float = 1.0


class PairDecoder(NamedTuple):
    """A row of `PAIRS`. The parts are joined by `pair_assembly`, with a product by the scale last.

    codes      codes to values, as far as zero points do not matter
    constant   takes away what `codes` has added
    zeros      the same with zero points (of `uint`); "" where they are subtracted later
    power      multiplies by a power of two that 8-bit scales bring along
    positions  of a pair in its word: [t odd][row g + 8] -> (shift or mask, multiplier)
    """

    codes: str
    constant: str = ""
    zeros: str = ""
    power: str = ""
    positions: tuple[tuple[tuple[int, int], ...], ...] = (((0, 0), (0, 0)), ((0, 0), (0, 0)))


def _rows(text: str) -> str:
    """`text` for row g and for row g + 8: # is the row's number."""
    return text.replace("#", "0") + text.replace("#", "1")


# ---- WORDS: (bits, element, order of the word) ----


def _eight(pairs: str) -> str:
    """`pairs` leaves float16 pairs in a, b, c, d, elements i and i + 4 each; they become eight
    float32.
    """
    ends = "".join(f"mov.b32 {{l, h}}, {pair}; cvt.f32.f16 y{i}, l; cvt.f32.f16 y{i + 4}, h; " for i, pair in enumerate("abcd"))
    return "{ .reg .b32 t, u, a, b, c, d, one, k; .reg .b16 l, h; " + pairs + " " + ends + "}"


def _nibbles(ones: str, sixteens: str) -> str:
    """Pairs 1024 + q less `ones`, and (1024 + 16 q) / 16 plus `sixteens`."""
    return (
        "mov.b32 one, 0x64006400; shr.u32 t, w0, 8;"
        " lop3.b32 a, w0, 0x000f000f, one, 0xea; lop3.b32 b, w0, 0x00f000f0, one, 0xea;"
        " lop3.b32 c, t, 0x000f000f, one, 0xea; lop3.b32 d, t, 0x00f000f0, one, 0xea;"
        f" mov.b32 k, {ones}; sub.f16x2 a, a, k; sub.f16x2 c, c, k; mov.b32 k, 0x2c002c00; mov.b32 t, {sixteens};"
        " fma.rn.f16x2 b, b, k, t; fma.rn.f16x2 d, d, k, t;"
    )


PLANES, FRAGMENTS = "planes", "fragments"
"""Orders of a word (`order`)."""
_E2M1 = """and.b32 y0, w0, 0x8e008e00; shl.b32 t, w0, 3; and.b32 y1, t, 0x8e008e00;
    and.b32 t, w0, 0x40384038; mul.lo.u32 t, t, 66; and.b32 y2, t, 0x8e008e00;
    and.b32 t, w0, 0x20072007; mul.lo.u32 t, t, 516; and.b32 y3, t, 0x8e008e00;"""
"""Eight E2M1 codes in fragment order as float16 times 2^-14, four registers y0 to y3; register t.
"""


def _into_abcd(code: str) -> str:
    """`code` with the registers of `_eight`, a to d, for y0 to y3."""
    for result, register in zip(("y0", "y1", "y2", "y3"), "abcd", strict=True):
        code = code.replace(result, register)
    return code


WORDS: dict[tuple[int, str, str], Decoder] = {
    (4, "uint", PLANES): Decoder(_eight(_nibbles("0x64006400", "0xd400d400"))),
    (4, "uint", FRAGMENTS): Decoder(_eight(_nibbles("0x64006400", "0xd400d400"))),
    (4, "int", PLANES): Decoder(_eight(_nibbles("0x64086408", "0xd480d480"))),
    (4, "int", FRAGMENTS): Decoder(_eight(_nibbles("0x64086408", "0xd480d480"))),
    (4, "e2m1", PLANES): Decoder(_eight(
        "shr.u32 t, w0, 3; and.b32 t, t, 0x0e000e00; lop3.b32 d, w0, 0x80008000, t, 0xea;"
        " shl.b32 u, w0, 4; shr.u32 t, u, 3; and.b32 t, t, 0x0e000e00; lop3.b32 c, u, 0x80008000, t, 0xea;"
        " shl.b32 u, w0, 8; shr.u32 t, u, 3; and.b32 t, t, 0x0e000e00; lop3.b32 b, u, 0x80008000, t, 0xea;"
        " shl.b32 u, w0, 12; shr.u32 t, u, 3; and.b32 t, t, 0x0e000e00; lop3.b32 a, u, 0x80008000, t, 0xea;"
    ), 2.0**-14),
    (4, "e2m1", FRAGMENTS): Decoder(_eight(_into_abcd(_E2M1)), 2.0**-14),
}  # fmt: skip
"""Results y0 to y7 are elements 0 to 7 of a word in plane order, nibbles 0 to 7 in fragment
order.
"""


# ---- OPERANDS: (bits, element, output) ----

SCALABLE = "float16 times a power of two"
"""For sums that are multiplied back: the cheapest pattern of each element."""
FLOAT16, BFLOAT16 = "float16", "bfloat16"
SCALED_BFLOAT16 = "bfloat16 times the scales s0 and s1"

_BITS = """{ .reg .b32 t; shr.u32 t, w0, 8;
    and.b32 y0, w0, 0x000f000f; and.b32 y1, w0, 0x00f000f0; and.b32 y2, t, 0x000f000f; and.b32 y3, t, 0x00f000f0; }"""
_ONES = """lop3.b32 y0, w0, 0x000f000f, one, 0xea; lop3.b32 y1, w0, 0x00f000f0, one, 0xea;
    lop3.b32 y2, t, 0x000f000f, one, 0xea; lop3.b32 y3, t, 0x00f000f0, one, 0xea;"""
_E2M1_BFLOAT16 = """shr.u32 t, w0, 3; and.b32 t, t, 0x01c001c0; lop3.b32 y0, w0, 0x80008000, t, 0xea;
    shl.b32 u, w0, 3; and.b32 t, w0, 0x01c001c0; lop3.b32 y1, u, 0x80008000, t, 0xea;
    shl.b32 u, w0, 1; shl.b32 t, w0, 3; and.b32 t, t, 0x01c001c0; lop3.b32 y2, u, 0x80008000, t, 0xea;
    and.b32 t, w0, 0x20072007; mul.lo.u32 t, t, 68; and.b32 y3, t, 0x81c081c0;"""


def _nibbles_bfloat16(offset: str) -> str:
    """128 + q less `offset`, four registers."""
    return (
        "{ .reg .b32 t, one, k, c; mov.b32 one, 0x43004300; mov.b32 k, 0x3f803f80; mov.b32 c, " + offset + ";"
        " lop3.b32 y0, w0, 0x000f000f, one, 0xea; shr.u32 t, w0, 4; lop3.b32 y1, t, 0x000f000f, one, 0xea;"
        " shr.u32 t, w0, 8; lop3.b32 y2, t, 0x000f000f, one, 0xea; shr.u32 t, w0, 12; lop3.b32 y3, t, 0x000f000f, one, 0xea;"
        " fma.rn.bf16x2 y0, y0, k, c; fma.rn.bf16x2 y1, y1, k, c; fma.rn.bf16x2 y2, y2, k, c; fma.rn.bf16x2 y3, y3, k, c; }"
    )


def _bytes_bfloat16(zero: int) -> str:
    """Four bytes less `zero`: each is the mantissa of 2^23 + q in float32, two make a register."""
    moves = "".join(
        f"prmt.b32 t, w0, k, {0x7540 | 2 * i}; prmt.b32 u, w0, k, {0x7540 | 2 * i + 1}; mov.b32 a, t; mov.b32 b, u;"
        f" sub.f32 a, a, {8388608.0 + zero:f}; sub.f32 b, b, {8388608.0 + zero:f}; cvt.rn.bf16x2.f32 y{i}, b, a; "
        for i in range(2)
    )
    return "{ .reg .b32 t, u, k; .reg .f32 a, b; mov.b32 k, 0x4b000000; " + moves + "}"


def _e4m3_by_integers() -> str:
    """E4M3 without its conversion instruction: fields one bit lower, times 2^8. 0x7F is NaN: 0x7F00
    + 0x100 carries into the sign bit.
    """
    moves = "".join(
        f"prmt.b32 t, w0, 0, {pick}; and.b32 u, t, 0x7f007f00; add.u32 n, u, 0x01000100; and.b32 n, n, 0x80008000;"
        f" shr.u32 m, n, 6; sub.u32 n, n, m; shr.u32 u, u, 1; lop3.b32 u, t, 0x80008000, u, 0xea; mul.rn.f16x2 u, u, k;"
        f" or.b32 y{i}, u, n; "
        for i, pick in enumerate(("0x1404", "0x3424"))
    )
    return "{ .reg .b32 t, u, n, m, k; mov.b32 k, 0x5c005c00; " + moves + "}"


def _to_bfloat16(code: str) -> str:
    """`code`, whose results are pairs of float16 with at most four significant bits, in bfloat16."""
    moves = "".join(
        f"mov.b32 {{i, j}}, y{r}; cvt.f32.f16 v, i; cvt.f32.f16 w, j; cvt.rn.bf16x2.f32 y{r}, w, v; " for r in range(2)
    )
    return "{ .reg .b16 i, j; .reg .f32 v, w; " + code + " " + moves + "}"


_E4M3 = "{ .reg .b16 l, h; mov.b32 {l, h}, w0; cvt.rn.f16x2.e4m3x2 y0, l; cvt.rn.f16x2.e4m3x2 y1, h; }"
_E5M2 = "prmt.b32 y0, w0, 0, 0x1404; prmt.b32 y1, w0, 0, 0x3424;"

OPERANDS: dict[tuple[int, str, str], Decoder] = {
    # A nibble alone in the low bits of a float16 is the subnormal q · 2^-24, the next one 16 q ·
    # 2^-24; the matrix unit multiplies subnormals exactly.
    (4, "uint", SCALABLE): Decoder(_BITS, 2.0**-24, 2.0**-20),
    (4, "int", SCALABLE): Decoder("""{ .reg .b32 t, k; shr.u32 t, w0, 8;
        and.b32 y0, w0, 0x000f000f; and.b32 y1, w0, 0x00f000f0; and.b32 y2, t, 0x000f000f; and.b32 y3, t, 0x00f000f0;
        mov.b32 k, 0x00080008; sub.f16x2 y0, y0, k; sub.f16x2 y2, y2, k;
        mov.b32 k, 0x00800080; sub.f16x2 y1, y1, k; sub.f16x2 y3, y3, k; }""", 2.0**-24, 2.0**-20),
    (4, "e2m1", SCALABLE): Decoder("{ .reg .b32 t; " + _E2M1 + " }", 2.0**-14, 2.0**-14),
    (4, "uint", FLOAT16): Decoder("{ .reg .b32 t, one, k, c; mov.b32 one, 0x64006400; shr.u32 t, w0, 8; " + _ONES + """
        sub.f16x2 y0, y0, one; sub.f16x2 y2, y2, one;
        mov.b32 k, 0x2c002c00; mov.b32 c, 0xd400d400; fma.rn.f16x2 y1, y1, k, c; fma.rn.f16x2 y3, y3, k, c; }"""),
    (4, "int", FLOAT16): Decoder("{ .reg .b32 t, one, k, c; mov.b32 one, 0x64006400; shr.u32 t, w0, 8; " + _ONES + """
        mov.b32 k, 0x64086408; sub.f16x2 y0, y0, k; sub.f16x2 y2, y2, k;
        mov.b32 k, 0x2c002c00; mov.b32 c, 0xd480d480; fma.rn.f16x2 y1, y1, k, c; fma.rn.f16x2 y3, y3, k, c; }"""),
    (4, "e2m1", FLOAT16): Decoder("{ .reg .b32 t, k; mov.b32 k, 0x74007400; " + _E2M1 + """
        mul.rn.f16x2 y0, y0, k; mul.rn.f16x2 y1, y1, k; mul.rn.f16x2 y2, y2, k; mul.rn.f16x2 y3, y3, k; }"""),
    (4, "uint", BFLOAT16): Decoder(_nibbles_bfloat16("0xc300c300")),
    (4, "int", BFLOAT16): Decoder(_nibbles_bfloat16("0xc308c308")),
    # The exponent field starts at 2^-126, and float32 sums of such values would be subnormal: the
    # power is multiplied back at once, or the scale brings it.
    (4, "e2m1", BFLOAT16): Decoder("{ .reg .b32 t, u, k, z; mov.b32 k, 0x7e807e80; mov.b32 z, 0x80008000; " + _E2M1_BFLOAT16 + """
        fma.rn.bf16x2 y0, y0, k, z; fma.rn.bf16x2 y1, y1, k, z; fma.rn.bf16x2 y2, y2, k, z; fma.rn.bf16x2 y3, y3, k, z; }"""),
    (4, "e2m1", SCALED_BFLOAT16): Decoder("{ .reg .b32 t, u, z; mov.b32 z, 0x80008000; " + _E2M1_BFLOAT16 + """
        fma.rn.bf16x2 y0, y0, s0, z; fma.rn.bf16x2 y1, y1, s1, z;
        fma.rn.bf16x2 y2, y2, s0, z; fma.rn.bf16x2 y3, y3, s1, z; }""", 2.0**-126, 2.0**-126),
    (8, "uint", SCALABLE): Decoder("prmt.b32 y0, w0, 0, 0x4140; prmt.b32 y1, w0, 0, 0x4342;", 2.0**-24, 2.0**-24),
    (8, "e4m3", SCALABLE): Decoder(_E4M3),
    (8, "e5m2", SCALABLE): Decoder(_E5M2),
    (8, "uint", BFLOAT16): Decoder(_bytes_bfloat16(0)),
    (8, "int", BFLOAT16): Decoder(_bytes_bfloat16(128)),
    (8, "e4m3", BFLOAT16): Decoder(_to_bfloat16(_E4M3)),
    (8, "e5m2", BFLOAT16): Decoder(_to_bfloat16(_E5M2)),
}  # fmt: skip
"""Of 4 bits y0 to y3 are the four registers of the operand, rows g, g + 8, g, g + 8; of 8 bits y0
and y1 are two of them, rows g and g + 8.
"""

WITHOUT_E4M3: dict[tuple[int, str, str], Decoder] = {
    (8, "e4m3", SCALABLE): Decoder(_e4m3_by_integers()),
    (8, "e4m3", BFLOAT16): Decoder(_to_bfloat16(_e4m3_by_integers())),
}
"""Rows of `OPERANDS` for GPUs without the conversion of E4M3 (compute capability below 8.9)."""


# ---- PAIRS: (bits, element, arithmetic) ----

HALF, BFLOAT, FLOAT32 = "float16 pairs", "bfloat16 pairs", "float32"
"""Arithmetic between codes and results."""
SUBNORMAL = "float32 of subnormals"
"""FLOAT32 where codes are left as the float16 subnormals q · 2^-24 (or 2^-20), and scales make up
for it: no operation for 1024, and the implicit zero of `int` is an addend.
"""
SUBNORMAL_UNITS = {True: (2.0**-24, 2.0**-24), False: (2.0**-24, 2.0**-20)}
"""What the value 1 is in rows g and g + 8 under SUBNORMAL, in lane order (True) and in fragment
order.
"""

NO_ADDEND, ZERO_POINTS, BIASES = 0, 1, 2
"""Kinds of addend, as portable/decode_tile.py numbers them."""

_ZERO16 = _rows("sub.rn.f16x2 y#, y#, z#; ")
_TIMES_2_14 = "mov.b32 k, 0x74007400; " + _rows("mul.rn.f16x2 y#, y#, k; ")
_E2M1_PAIR = _rows("and.b32 t, w0, p#; mul.lo.u32 y#, t, f#; ")
_E2M1_POSITIONS = (((-0x71FF7200, 1), (0x11C011C0, 8)), ((0x40384038, 66), (0x20072007, 516)))


def _pairs_of_2_bits(low: str, high: str) -> str:
    """1024 + q and 1024 + 4 q of each row's word, less 1024 (+ 2 of `int`), eight inputs apart;
    then put beside each other.
    """
    return ".reg .b32 u, v; " + _rows(
        "shr.u32 t, w#, p0; mov.b32 k, 0x64006400;"
        " lop3.b32 u, t, 0x00030003, k, 0xea; lop3.b32 v, t, 0x000c000c, k, 0xea;"
        f" mov.b32 k, {low}; sub.rn.f16x2 u, u, k; mov.b32 k, 0x34003400; mov.b32 c, {high}; fma.rn.f16x2 v, v, k, c;"
        " prmt.b32 y#, u, v, 0x5410; prmt.b32 q#, u, v, 0x7632; "
    )


def _bfloat_constant(offset: str, terms: tuple[str, ...], results: tuple[str, ...]) -> str:
    """Takes 128 and a zero point off each result; c is −0 afterwards."""
    lines = "".join(f"fma.rn.bf16x2 {y}, {y}, k, {z}; " for y, z in zip(results, terms, strict=True))
    return f"mov.b32 k, 0x3f803f80; mov.b32 c, {offset}; {lines}mov.b32 c, 0x80008000; "


def _pairs() -> dict[tuple[int, str, str], PairDecoder]:
    """The rows of `PAIRS`."""
    out: dict[tuple[int, str, str], PairDecoder] = {}
    four = ("y0", "y1", "q0", "q1")
    shift = (((0, 0), (0, 0)), ((8, 0), (8, 0)))
    shift_by_row = (((0, 0), (4, 0)), ((8, 0), (12, 0)))
    for element, off in (("uint", 0), ("int", 1)):
        low, high = (("0x64006400", "0xdc00dc00"), ("0x64026402", "0xdc08dc08"))[off]
        zeros = _ZERO16 + _rows("sub.rn.f16x2 q#, q#, z#; ")
        out[2, element, HALF] = PairDecoder(_pairs_of_2_bits(low, high), zeros="" if off else zeros)
        out[2, element, FLOAT32] = PairDecoder(_pairs_of_2_bits(low, high))
        offset = ("0xc300c300", "0xc302c302")[off]
        out[2, element, BFLOAT] = PairDecoder(
            ".reg .b32 u, v; "
            + _rows(  # 128 + q
                "shr.u32 t, w#, p0; mov.b32 k, 0x43004300; lop3.b32 u, t, 0x00030003, k, 0xea; shr.u32 t, t, 2;"
                " lop3.b32 v, t, 0x00030003, k, 0xea; prmt.b32 y#, u, v, 0x5410; prmt.b32 q#, u, v, 0x7632; "
            ),
            _bfloat_constant(offset, ("c",) * 4, four),
            "" if off else _bfloat_constant(offset, ("z0", "z1", "z0", "z1"), four),
        )
        # 1024 + q in row g, 1024 + 16 q in row g + 8; a zero point comes with the same offsets.
        low, high = (("0x64006400", "0xd400d400"), ("0x64086408", "0xd480d480"))[off]
        codes = (
            "mov.b32 k, 0x64006400; shr.u32 t, w0, p0; lop3.b32 y0, t, 0x000f000f, k, 0xea;"
            " lop3.b32 y1, t, 0x00f000f0, k, 0xea; mov.b32 t, 0x2c002c00; "
        )
        constant = f"mov.b32 k, {low}; mov.b32 c, {high}; sub.rn.f16x2 y0, y0, k; fma.rn.f16x2 y1, y1, t, c; "
        zeros = "" if off else "sub.rn.f16x2 y0, y0, z0; fma.rn.f16x2 y1, y1, t, z1; "
        out[4, element, HALF] = PairDecoder(codes, constant, zeros, positions=shift)
        out[4, element, FLOAT32] = PairDecoder(codes, constant, positions=shift)
        bits_alone = "shr.u32 t, w0, p0; and.b32 y0, t, 0x000f000f; and.b32 y1, t, 0x00f000f0; "
        if not off:
            out[4, element, SUBNORMAL] = PairDecoder(bits_alone, positions=shift)
        offset = ("0xc300c300", "0xc308c308")[off]
        out[4, element, BFLOAT] = PairDecoder(
            "mov.b32 k, 0x43004300; " + _rows("shr.u32 t, w0, p#; lop3.b32 y#, t, 0x000f000f, k, 0xea; "),
            _bfloat_constant(offset, ("c", "c"), four[:2]),
            "" if off else _bfloat_constant(offset, ("z0", "z1"), four[:2]),
            positions=shift_by_row,
        )
        codes = "mov.b32 k, 0x64646464; prmt.b32 y0, w0, k, 0x4140; prmt.b32 y1, w0, k, 0x4342; "  # 1024 + q
        constant = f"mov.b32 k, {('0x64006400', '0x64806480')[off]}; " + _rows("sub.rn.f16x2 y#, y#, k; ")
        out[8, element, HALF] = PairDecoder(codes, constant, "" if off else _ZERO16)
        out[8, element, FLOAT32] = PairDecoder(codes, constant)
    raw = _E2M1_PAIR + _rows("and.b32 y#, y#, 0x8e008e00; ")  # times 2^-14
    out[4, "e2m1", HALF] = PairDecoder(raw, power=_TIMES_2_14, positions=_E2M1_POSITIONS)
    out[4, "e2m1", FLOAT32] = PairDecoder(raw + _TIMES_2_14, positions=_E2M1_POSITIONS)
    (even, even_high), (odd, odd_high) = _E2M1_POSITIONS
    out[4, "e2m1", BFLOAT] = PairDecoder(  # times 2^-126; of row g + 8 one multiplication moves a pair into place
        _E2M1_PAIR + "shr.u32 t, y0, 3; and.b32 t, t, 0x01c001c0; lop3.b32 y0, y0, 0x80008000, t, 0xea;"
        " and.b32 y1, y1, 0x81c081c0; mov.b32 c, 0x80008000; ",
        power="mov.b32 k, 0x7e807e80; " + _rows("fma.rn.bf16x2 y#, y#, k, c; "),
        positions=((even, (even_high[0], 9)), (odd, (odd_high[0], 68))),
    )
    for arithmetic in (HALF, FLOAT32):
        out[8, "e4m3", arithmetic] = PairDecoder(
            ".reg .b16 l, h; mov.b32 {l, h}, w0; cvt.rn.f16x2.e4m3x2 y0, l; cvt.rn.f16x2.e4m3x2 y1, h; "
        )
        out[8, "e5m2", arithmetic] = PairDecoder(  # the upper byte of a float16
            "mov.b32 k, 0; prmt.b32 y0, w0, k, 0x1404; prmt.b32 y1, w0, k, 0x3424; "
        )
    return out


PAIRS: dict[tuple[int, str, str], PairDecoder] = _pairs()

TABLE = "float32 of a table"
"""The arithmetic of codes that stand for 16 float32 values, which shuffles fetch from the lanes."""


def _rotated(y: str, word: str, at: str, bits: int, place: int) -> str:
    """The `bits` of a plane that lie in `word` from bit t, which `at` computes, into `y` at
    `place`: a rotation moves both codes of a pair alike.
    """
    mask = ((1 << bits) - 1 << place) * 0x10001
    return f"{at} sub.u32 t, t, {place}; shf.r.wrap.b32 t, {word}, {word}, t; lop3.b32 {y}, t, {mask:#010x}, {y}, 0xea; "


def joined_planes(bits: int, magic: str, c: int | None = None) -> str:
    """A pair's code, from its planes, over the bits of `magic`: y0 of row g, y1 of row g + 8; of
    pair c of a lane, or of the one that p0 names.
    """
    low, *rest = order.PLANES[bits]
    nibble = "shl.b32 t, p0, 2; and.b32 t, t, 12;" if c is None else f"mov.b32 t, {4 * (c % 4)};"
    pair = "shl.b32 t, p0, 1;" if c is None else f"mov.b32 t, {2 * c};"
    code = f"mov.b32 k, {magic}; "
    for h in (0, 1):
        y, bit = f"y{h}", f"add.u32 t, p0, {8 * h};" if c is None else f"mov.b32 t, {8 * h + c};"
        if low == 1:
            code += f"mov.b32 {y}, k; " + _rotated(y, "w0", bit, 1, 0)
        else:
            at = nibble if low == 4 else pair
            code += f"{at} shr.u32 t, w{h}, t; lop3.b32 {y}, t, {((1 << low) - 1) * 0x10001:#010x}, k, 0xea; "
        if rest:
            code += _rotated(y, *(("v0", bit) if rest[0] == 1 else (f"v{h}", pair)), rest[0], low)
    return code


FIELDS_OF_6_BITS = {"e2m3": (7, "0x0f800f80", 14), "e3m2": (8, "0x1f001f00", 12)}
"""Floats of 6 bits as fields of float16: places up, mask of exponent and mantissa, and the power of
two that the result lacks.
"""


def lane_operand(bits: int, element: str, output: str, block: int) -> Decoder:
    """`OPERANDS` of lane order: the planes of a lane's unit to the four registers of a block of 16
    inputs, its pairs 2 · block and the next. w1 and v1 are of rows g + 8; e0 is the lane's entry of
    a table, in both halves.
    """
    codes, low = "", 2.0**-24  # q alone in the low bits of a float16 is the subnormal q · 2^-24
    for i in (0, 1):
        one, c = "", 2 * block + i
        if element in TABLE_ELEMENTS:
            low = 1.0
            for h in (0, 1):
                one += (
                    f"shr.u32 t, w{h}, {4 * (c % 4)}; shfl.sync.idx.b32 m, e0, t, 31, 0xffffffff; shr.u32 t, t, 16;"
                    f" shfl.sync.idx.b32 n, e0, t, 31, 0xffffffff; prmt.b32 y{h}, m, n, 0x5410; "
                )
        elif element in FIELDS_OF_6_BITS:
            up, mask, power = FIELDS_OF_6_BITS[element]
            one, low = joined_planes(6, "0", c), 2.0**-power
            if output == BFLOAT16:  # three places lower, and finished: sums of 2^-126 would be subnormal
                up, mask, low = up - 3, f"{int(mask, 0) >> 3:#010x}", 1.0
            one += _rows(f"shl.b32 t, y#, {up}; and.b32 t, t, {mask}; shl.b32 y#, y#, 10; lop3.b32 y#, y#, 0x80008000, t, 0xea; ")
            if output == BFLOAT16:
                k = (127 + 112 + power) << 7
                one += f"mov.b32 k, {k * 0x10001:#010x}; mov.b32 z, 0x80008000; " + _rows("fma.rn.bf16x2 y#, y#, k, z; ")
        elif output == SCALABLE:
            one = joined_planes(bits, "0", c)
        else:
            low, off = 1.0, 1 << bits - 1 if element == "int" else 0
            one = joined_planes(bits, "0x43004300", c) + f"mov.b32 k, 0x3f803f80; mov.b32 z, {0xC300C300 + off * 0x10001:#010x}; "
            one += _rows("fma.rn.bf16x2 y#, y#, k, z; ")
        codes += one.replace("y1", "y3").replace("y0", "y2") if i else one
    return Decoder("{ .reg .b32 t, k, z, m, n; " + codes + "}", low, low)


def lane_finished(block: int, half: bool) -> Decoder:
    """`lane_operand` of tables of float32: entry · scale, s0 of row g and s1 of row g + 8 in
    float32, rounded to float32 and then to float16 (`half`) or bfloat16, as `dequantize` does.
    """
    codes = ""
    for i in (0, 1):
        c = 2 * block + i
        for h in (0, 1):
            codes += (
                f"shr.u32 t, w{h}, {4 * (c % 4)}; shfl.sync.idx.b32 m, e0, t, 31, 0xffffffff; shr.u32 t, t, 16;"
                " shfl.sync.idx.b32 n, e0, t, 31, 0xffffffff; mov.b32 v, m; mov.b32 u, n;"
                f" mul.rn.f32 v, v, s{h}; mul.rn.f32 u, u, s{h}; cvt.rn.{'f16x2' if half else 'bf16x2'}.f32 y{2 * i + h}, u, v; "
            )
    return Decoder("{ .reg .b32 t, m, n; .reg .f32 u, v; " + codes + "}")


def _lanes() -> dict[tuple[int, str, str], PairDecoder]:
    """The rows of `LANES`."""
    out: dict[tuple[int, str, str], PairDecoder] = {}
    for bits in (1, 2, 3, 5, 6):
        for element in ("uint", "int"):
            off = (1 << bits - 1) if element == "int" else 0
            codes = joined_planes(bits, "0x64006400")  # 1024 + q
            constant = f"mov.b32 k, {0x64006400 + off * 0x10001:#010x}; " + _rows("sub.rn.f16x2 y#, y#, k; ")
            out[bits, element, HALF] = PairDecoder(codes, constant, "" if off else _ZERO16)
            out[bits, element, FLOAT32] = PairDecoder(codes, constant)
            out[bits, element, SUBNORMAL] = PairDecoder(joined_planes(bits, "0"))
            offset, results = f"{0xC300C300 + off * 0x10001:#010x}", ("y0", "y1")
            out[bits, element, BFLOAT] = PairDecoder(
                joined_planes(bits, "0x43004300"),
                _bfloat_constant(offset, ("c", "c"), results),
                "" if off else _bfloat_constant(offset, ("z0", "z1"), results),
            )
    for element, (up, mask, lacks) in FIELDS_OF_6_BITS.items():
        power = f"{(15 + lacks << 10) * 0x10001:#010x}"
        fields = f"shl.b32 t, y#, {up}; and.b32 t, t, {mask}; shl.b32 y#, y#, 10; lop3.b32 y#, y#, 0x80008000, t, 0xea; "
        out[6, element, FLOAT32] = PairDecoder(
            joined_planes(6, "0") + _rows(fields) + f"mov.b32 k, {power}; " + _rows("mul.rn.f16x2 y#, y#, k; ")
        )
    look_up = _rows(
        "shr.u32 t, w#, k; shfl.sync.idx.b32 m#, e0, t, 31, 0xffffffff;"
        " shr.u32 t, t, 16; shfl.sync.idx.b32 n#, e0, t, 31, 0xffffffff; "
    )
    for element in TABLE_ELEMENTS:
        out[4, element, TABLE] = PairDecoder(".reg .b32 m0, m1, n0, n1; shl.b32 k, p0, 2; and.b32 k, k, 12; " + look_up)
    return out


TABLE_ELEMENTS = ("nf4", "bnb_fp4", "nf4_modelopt", "iq4_nl")
"""Elements of 4 bits that are tables of float32."""
LANES: dict[tuple[int, str, str], PairDecoder] = _lanes()
"""The same from planes in lane order (order.py), without `positions`."""

_LONG = (
    "{{ .reg .b16 l, h; .reg .f32 v, w, s, a; mov.b32 {{l, h}}, y; cvt.f32.f16 v, l; cvt.f32.f16 w, h; mov.b32 s, s#; {}"
    " cvt.rn.TO.f32 y, w, v; }} "
)
FINISH: dict[tuple[str, int], str] = {
    (BFLOAT, NO_ADDEND): "fma.rn.bf16x2 y, y, s#, c; ",  # c is −0
    (BFLOAT, ZERO_POINTS): "fma.rn.bf16x2 y, y, s#, c; ",
    (BFLOAT, BIASES): "fma.rn.bf16x2 y, y, s#, z#; ",
    (HALF, NO_ADDEND): "mul.rn.f16x2 y, y, s#; ",
    (HALF, ZERO_POINTS): "mul.rn.f16x2 y, y, s#; ",
    (HALF, BIASES): "fma.rn.f16x2 y, y, s#, z#; ",
    (FLOAT32, NO_ADDEND): _LONG.format("mul.rn.f32 v, v, s; mul.rn.f32 w, w, s;"),
    (FLOAT32, ZERO_POINTS): _LONG.format(
        "mov.b32 a, z#; sub.rn.f32 v, v, a; sub.rn.f32 w, w, a; mul.rn.f32 v, v, s; mul.rn.f32 w, w, s;"
    ),
    (FLOAT32, BIASES): _LONG.format("mov.b32 a, z#; fma.rn.f32 v, v, s, a; fma.rn.f32 w, w, s, a;"),
    (TABLE, NO_ADDEND): (
        "{ .reg .f32 v, w, s; mov.b32 s, s#; mov.b32 v, m#; mov.b32 w, n#; mul.rn.f32 v, v, s; mul.rn.f32 w, w, s;"
        " cvt.rn.TO.f32 y, w, v; } "
    ),
}
"""(arithmetic, kind of addend) -> the last product, for each result y of row #; TO is f16x2 or
bf16x2.
"""


def _numbered(code: str, operands: dict[str, str]) -> str:
    """`code` with the names of operands replaced by their numbers."""
    return re.sub(r"\b[yqwvpfesz][0-9]\b", lambda name: operands[name[0]], code)


@functools.cache  # launches ask for it on every call
def assembly(decoder: Decoder, results: int, *inputs: str) -> str:
    """A row of `WORDS` or `OPERANDS` as Triton takes it: the results, then the named inputs."""
    names = [*(f"y{i}" for i in range(results)), *inputs]
    return _numbered(decoder.code, {name: f"${i}" for i, name in enumerate(names)})


def pair_inputs(bits: int, element: str, addend: int, lanes: bool = False) -> str:
    """Inputs of a row of `PAIRS`, or of `LANES`, in order, a letter each."""
    if lanes:
        more = "v" if len(order.PLANES[bits]) == 2 else ""
        return "w" + more + "p" + ("e" if element in TABLE_ELEMENTS else "") + "s" + ("z" if addend else "")
    return "w" + ("p" if bits < 8 else "") + ("f" if element == "e2m1" else "") + "s" + ("z" if addend else "")


def pair_assembly(
    bits: int, element: str, arithmetic: str, addend: int, brings_power: bool, half: bool, lanes: bool = False
) -> str:
    """A row of `PAIRS`, or of `LANES`, with its zero points and scales, as Triton takes it: two
    results (four of 2 bits in fragment order), then each input in twice as many registers, the
    third of them of row g + 8.

    brings_power   scales bring the power of two that the codes lack
    half           results are float16, else bfloat16
    lanes          a row of `LANES`
    """
    if addend == ZERO_POINTS and element != "uint":
        raise ValueError(f"[cuda] {element} codes with zero points have no decoder; allowed: uint")
    row, results = (LANES if lanes else PAIRS)[bits, element, arithmetic], ("y0", "y1", "q0", "q1")[: _results(bits, lanes)]
    operands = {name: f"${i}" for i, name in enumerate(results)}
    for i, letter in enumerate(pair_inputs(bits, element, addend, lanes)):
        first = len(results) + 2 * len(results) * i
        operands |= {f"{letter}0": f"${first}", f"{letter}1": f"${first + 2}"}
    code = row.codes + (row.zeros if row.zeros and addend == ZERO_POINTS else row.constant) + ("" if brings_power else row.power)
    last = FINISH[FLOAT32 if arithmetic == SUBNORMAL else arithmetic, min(addend, BIASES)].replace(
        "TO", "f16x2" if half else "bf16x2"
    )
    ends = "".join(re.sub(r"\by\b", y, last).replace("#", y[1]) for y in results)
    return _numbered("{ .reg .b32 t, k, c; " + code + ends + "}", operands)


def _results(bits: int, lanes: bool) -> int:
    """Registers that a row makes: words of 2 bits give both pairs of a block."""
    return 4 if bits == 2 and not lanes else 2


def pair_constraints(bits: int, element: str, addend: int, lanes: bool = False) -> str:
    """Constraints of `pair_assembly`."""
    results = _results(bits, lanes)
    return ",".join(["=&r"] * results + ["r"] * (2 * results * len(pair_inputs(bits, element, addend, lanes))))


# ---- BYTES: (bits, element, mode of the activations) ----


class ByteDecoder(NamedTuple):
    """Words of fragment order to two registers of four bytes, $0 of row g and $1 of row g + 8, as
    products of 8 bits take them; `unit`: what the bytes are multiples of; `e5m2`: they are E5M2,
    the upper bytes of float16 values, else E4M3 or whole numbers.

    Of 4 bits the word is $2. Of 8 bits $2 and $3 are the words of i = 0 and 1.
    """

    code: str
    unit: float = 1.0
    inputs: int = 1
    e5m2: bool = False

    @property
    def registers(self) -> str:
        """Constraints."""
        return ",".join(["=&r"] * 2 + ["r"] * self.inputs)


FOLDED = "fp8, scales folded"
"""The mode whose decoder takes the group's power of two too."""
FOLDED_SPREAD = 16
"""Largest difference of E8M0 bytes for which E2M1 · scale · 2^d is an E5M2 value for one d."""


def _signs(down: int) -> str:
    """Signs of the E2M1 codes of row g (down 0) or g + 8 (1) in bits 7, 15, 23 and 31 of s."""
    if down:
        return "shl.b32 s, $2, 3; and.b32 s, s, 0x80008000; shr.u32 t, $2, 6; lop3.b32 s, t, 0x00800080, s, 0xea; "
    return "and.b32 s, $2, 0x80008000; shr.u32 t, $2, 7; lop3.b32 s, t, 0x00800080, s, 0xea; "


def _index(down: int) -> str:
    """Magnitudes of the E2M1 codes of row g (down 0) or g + 8 (1) as the four selectors of i."""
    fields = (
        "and.b32 i, $2, 0x00070007; shr.u32 t, $2, 2; "
        if down
        else "shr.u32 i, $2, 3; and.b32 i, i, 0x00070007; shr.u32 t, $2, 5; "
    )
    return fields + "lop3.b32 i, t, 0x00700070, i, 0xea; shr.u32 t, i, 8; or.b32 i, i, t; "


def _e2m1_whole(down: int) -> str:
    """E2M1 codes as whole numbers of 1/2, by two tables of eight bytes: 0 1 2 3 4 6 8 12, and their
    negatives.
    """
    return (
        _index(down) + "mov.b32 v, 0x03020100; mov.b32 n, 0x0c080604; prmt.b32 v, v, n, i;"
        " mov.b32 n, 0xfdfeff00; mov.b32 t, 0xf4f8fafc; prmt.b32 n, n, t, i; "
        + _signs(down)
        + f"prmt.b32 s, s, 0, 0xba98; lop3.b32 ${down}, s, n, v, 0xca; "
    )


def _upper_bytes(halves: str) -> str:
    """`halves` leaves float16 pairs in a (row g, i = 0), b (g + 8, 0), c (g, 1) and d (g + 8, 1)."""
    return "{ .reg .b32 t, k, a, b, c, d; " + halves + " prmt.b32 $0, a, c, 0x7531; prmt.b32 $1, b, d, 0x7531; }"


def _bytes_decoders() -> dict[tuple[int, str, str], ByteDecoder]:
    """The rows of `BYTES`."""
    both = "{{ .reg .b32 s, t, i, v, n; {} }}".format
    e2m1 = _into_abcd(_E2M1).replace("w0", "$2")  # times 2^-14
    scaled = e2m1 + " mul.rn.f16x2 a, a, $3; mul.rn.f16x2 b, b, $4; mul.rn.f16x2 c, c, $3; mul.rn.f16x2 d, d, $4;"
    int4 = (  # 1024 + q less 1032, and (1024 + 16 q) / 16 less 72
        "mov.b32 k, 0x64006400; shr.u32 t, $2, 8; lop3.b32 a, $2, 0x000f000f, k, 0xea; lop3.b32 b, $2, 0x00f000f0, k, 0xea;"
        " lop3.b32 c, t, 0x000f000f, k, 0xea; lop3.b32 d, t, 0x00f000f0, k, 0xea; mov.b32 k, 0x64086408; sub.rn.f16x2 a, a, k;"
        " sub.rn.f16x2 c, c, k; mov.b32 k, 0x2c002c00; mov.b32 t, 0xd480d480; fma.rn.f16x2 b, b, k, t; fma.rn.f16x2 d, d, k, t;"
    )
    nibbles = "{ .reg .b32 t; and.b32 $0, $2, 0x0f0f0f0f; shr.u32 t, $2, 4; and.b32 $1, t, 0x0f0f0f0f; }"
    plain = "{ prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632; }"
    signed = (
        "{ prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632; xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080; }"
    )
    return {
        (4, "uint", "int8"): ByteDecoder(nibbles),
        (4, "int", "int8"): ByteDecoder(  # 16 times the value
            "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xf0f0f0f0, 0x80808080, 0x6a;"
            " lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a; }", 1 / 16),
        (4, "e2m1", "int8"): ByteDecoder(both(_e2m1_whole(0) + _e2m1_whole(1)), 0.5),
        (8, "int", "int8"): ByteDecoder(signed, inputs=2),
        (8, "uint", "int8"): ByteDecoder(signed, inputs=2),  # less 128
        (4, "uint", "fp8"): ByteDecoder(nibbles, 512.0),  # the bytes 0 to 15 are E4M3's multiples of 2^-9
        (4, "int", "fp8"): ByteDecoder(_upper_bytes(int4), e5m2=True),
        (4, "e2m1", "fp8"): ByteDecoder(_upper_bytes(e2m1), 2.0**14, e5m2=True),
        (4, "e2m1", FOLDED): ByteDecoder(_upper_bytes(scaled), inputs=3, e5m2=True),
        (8, "e4m3", "fp8"): ByteDecoder(plain, inputs=2),
    }  # fmt: skip


BYTES: dict[tuple[int, str, str], ByteDecoder] = _bytes_decoders()
