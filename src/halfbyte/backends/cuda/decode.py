"""Codes to floats in registers: the device functions of every kernel.

A weight lies in bit planes (see `order`): eight elements are one 32-bit word of nibbles, one 16-bit
word of bit pairs, one byte of single bits, or two 32-bit words of bytes. `code` puts element j of
eight together, `element` turns codes into float32 by bit moves, and `scale_f32` reads a group's
scale. Names say what comes out: `..._f32` is the finished value; `..._raw` is a bit pattern whose
power of two the caller folds in.

Words of 4-bit integers and E2M1 have a faster form, two values at a time in inline assembly:
`word_f32` with a row of `decoders.WORDS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Element kinds, as kernels know them.
UINT = tl.constexpr(0)  # code
INT = tl.constexpr(1)  # code − 2^(bits−1)
E2M1 = tl.constexpr(2)
E2M3 = tl.constexpr(3)
E3M2 = tl.constexpr(4)
E4M3 = tl.constexpr(5)
E5M2 = tl.constexpr(6)
MXINT = tl.constexpr(7)  # two's complement / 2^(bits−2)
TABLE = tl.constexpr(8)  # 16 float32 values in memory: nf4, bnb_fp4, iq4_nl
ELEMENTS = {"uint": 0, "int": 1, "e2m1": 2, "e2m3": 3, "e3m2": 4, "e4m3": 5, "e5m2": 6, "mxint": 7, "nf4": 8, "bnb_fp4": 8,
            "nf4_modelopt": 8, "iq4_nl": 8}  # fmt: skip

# Scale kinds.
FLOAT = tl.constexpr(0)  # float16, bfloat16 or float32 in memory
E8M0 = tl.constexpr(1)
E4M3S = tl.constexpr(2)
UE4M3 = tl.constexpr(3)
SMALL = tl.constexpr(4)  # small integer times a super scale
E8M0_NORMAL = tl.constexpr(5)  # E8M0 without the bytes 0 and 255, known from the data: the byte is the exponent field, no select
E4M3_NORMAL = tl.constexpr(6)  # (U)E4M3 without NaN (0x7F, 0xFF) and, for UE4M3, without sign bits: pairs decode together
F16_PAIR = tl.constexpr(13)  # float16 scales, and addends of 16 bits, rows g and g + 8 in one word
BF16_PAIR = tl.constexpr(14)
SCALES = {"float16": 0, "bfloat16": 0, "float32": 0, "e8m0": 1, "e4m3": 2, "ue4m3": 3, "u4": 4, "u6": 4, "i6": 4, "i8": 4}


@triton.jit
def int_f32(q):
    """0 ≤ q < 2^23 as float32: the mantissa of 2^23 + q, less 2^23. Exact, two operations."""
    return (q | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def e2m1_f32(c):
    """E2M1 code -> float32, by way of the float16 whose exponent and mantissa fields hold the
    code's (times 2^14).
    """
    h = ((c & 8) << 12) | ((c & 7) << 9)
    return h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e2m3_f32(c):
    """E2M3 code -> float32 (float16 fields, times 2^14)."""
    h = ((c & 32) << 10) | ((c & 31) << 7)
    return h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e3m2_f32(c):
    """E3M2 code -> float32 (float16 fields, times 2^12)."""
    h = ((c & 32) << 10) | ((c & 31) << 8)
    return h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 4096.0


@triton.jit
def e4m3_f32(c):
    """E4M3 byte -> float32 (float16 fields, times 2^8); 0x7F and 0xFF are NaN."""
    h = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
    v = h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((c & 0x7F) == 0x7F, float("nan"), v)


@triton.jit
def ue4m3_f32(c):
    """GGUF's unsigned reading of an E4M3 byte: sign ignored, 0x7F is 0, 0xFF is 480."""
    v = ((c & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(c == 0x7F, 0.0, v)


@triton.jit
def e5m2_f32(c):
    """E5M2 byte -> float32: the upper byte of a float16."""
    return (c << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e8m0_f32(b):
    """E8M0 byte -> float32: 2^(b − 127), the byte as exponent field; 0 is the subnormal 2^−127, 255
    is NaN.
    """
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def element(c, table, KIND: tl.constexpr, BITS: tl.constexpr):
    """Code -> float32 value of the element, exactly. `table` points at 16 float32 values when KIND
    is TABLE.
    """
    if KIND == UINT:
        return int_f32(c)
    elif KIND == INT:
        return int_f32(c) - float(1 << (BITS - 1))
    elif KIND == E2M1:
        return e2m1_f32(c)
    elif KIND == E2M3:
        return e2m3_f32(c)
    elif KIND == E3M2:
        return e3m2_f32(c)
    elif KIND == E4M3:
        return e4m3_f32(c)
    elif KIND == E5M2:
        return e5m2_f32(c)
    elif KIND == MXINT:
        return (int_f32(c ^ (1 << (BITS - 1))) - float(1 << (BITS - 1))) * (1.0 / (1 << (BITS - 2)))
    else:
        return tl.load(table + c)


@triton.jit
def code(j, p8, p4, p2, p1, BITS: tl.constexpr):
    """Element j of eight from its planes: low bits in the widest plane. `p8` is the byte itself."""
    if BITS == 8:
        return p8
    elif BITS == 7:
        return ((p4 >> (4 * j)) & 15) | (((p2 >> (2 * j)) & 3) << 4) | (((p1 >> j) & 1) << 6)
    elif BITS == 6:
        return ((p4 >> (4 * j)) & 15) | (((p2 >> (2 * j)) & 3) << 4)
    elif BITS == 5:
        return ((p4 >> (4 * j)) & 15) | (((p1 >> j) & 1) << 4)
    elif BITS == 4:
        return (p4 >> (4 * j)) & 15
    elif BITS == 3:
        return ((p2 >> (2 * j)) & 3) | (((p1 >> j) & 1) << 2)
    elif BITS == 2:
        return (p2 >> (2 * j)) & 3
    else:
        return (p1 >> j) & 1


@triton.jit
def word_f32(w, DECODER: tl.constexpr):
    """A word of eight codes of 4 bits -> eight float32, by a row of `decoders.WORDS`."""
    return tl.inline_asm_elementwise(
        DECODER,
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
        [w],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_f32(raw, KIND: tl.constexpr):
    """A stored group scale -> float32."""
    if (KIND == E8M0) or (KIND == E8M0_NORMAL):
        return e8m0_f32(raw.to(tl.int32))
    elif KIND == E4M3S:
        return e4m3_f32(raw.to(tl.int32))
    elif KIND == UE4M3:
        return ue4m3_f32(raw.to(tl.int32))
    else:
        return raw.to(tl.float32)
