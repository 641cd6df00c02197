"""Words of fragment order to operands of mma.m16n8k16: the register decode, the product, and stored
scales as float32.

A word is the A operand of one product for one lane: a0 and a2 belong to row g of the tile, a1 and
a3 to row g + 8. Names say what comes out:

    *_RAW_F16   a bit pattern that is the value times a power of two (`units` says which); the
                caller multiplies it back, once
    an output
    others      the finished value

u4 in float16 needs four `lop3` and a shift and nothing else: a nibble alone in the low mantissa
bits is the subnormal q · 2^−24, the next one 16 q · 2^−24, and the matrix unit multiplies
subnormals exactly. The implicit zero of `int` is then taken from the sums, through Σ x. E2M1 codes
lie in the word so that most reach their places by one product with a constant, which runs beside
the logic unit (`order.spread_e2m1`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E2M1, E4M3, E4M3S, E5M2, E8M0, INT, UE4M3, UINT
from ..portable.decode_tile import BIAS, ZERO

_U4_RAW_F16 = gl.constexpr("""{
    .reg .b32 t; shr.u32 t, $4, 8;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }""")
_U4B8_RAW_F16 = gl.constexpr("""{
    .reg .b32 t, k; shr.u32 t, $4, 8;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0;
    mov.b32 k, 0x00080008; sub.f16x2 $0, $0, k; sub.f16x2 $2, $2, k;
    mov.b32 k, 0x00800080; sub.f16x2 $1, $1, k; sub.f16x2 $3, $3, k; }""")
_E2M1_RAW_F16 = gl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $4, 0x8e008e00; shl.b32 t, $4, 3; and.b32 $1, t, 0x8e008e00;
    and.b32 t, $4, 0x40384038; mul.lo.u32 t, t, 66; and.b32 $2, t, 0x8e008e00;
    and.b32 t, $4, 0x20072007; mul.lo.u32 t, t, 516; and.b32 $3, t, 0x8e008e00; }""")
_U4_F16 = gl.constexpr("""{
    .reg .b32 t, one, k, c; mov.b32 one, 0x64006400; shr.u32 t, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, one, 0xea; lop3.b32 $1, $4, 0x00f000f0, one, 0xea;
    lop3.b32 $2, t, 0x000f000f, one, 0xea; lop3.b32 $3, t, 0x00f000f0, one, 0xea;
    sub.f16x2 $0, $0, one; sub.f16x2 $2, $2, one;
    mov.b32 k, 0x2c002c00; mov.b32 c, 0xd400d400; fma.rn.f16x2 $1, $1, k, c; fma.rn.f16x2 $3, $3, k, c; }""")
_U4B8_F16 = gl.constexpr("""{
    .reg .b32 t, one, k, c; mov.b32 one, 0x64006400; shr.u32 t, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, one, 0xea; lop3.b32 $1, $4, 0x00f000f0, one, 0xea;
    lop3.b32 $2, t, 0x000f000f, one, 0xea; lop3.b32 $3, t, 0x00f000f0, one, 0xea;
    mov.b32 k, 0x64086408; sub.f16x2 $0, $0, k; sub.f16x2 $2, $2, k;
    mov.b32 k, 0x2c002c00; mov.b32 c, 0xd480d480; fma.rn.f16x2 $1, $1, k, c; fma.rn.f16x2 $3, $3, k, c; }""")
_E2M1_F16 = gl.constexpr("""{
    .reg .b32 t, k; mov.b32 k, 0x74007400;
    and.b32 $0, $4, 0x8e008e00; shl.b32 t, $4, 3; and.b32 $1, t, 0x8e008e00;
    and.b32 t, $4, 0x40384038; mul.lo.u32 t, t, 66; and.b32 $2, t, 0x8e008e00;
    and.b32 t, $4, 0x20072007; mul.lo.u32 t, t, 516; and.b32 $3, t, 0x8e008e00;
    mul.rn.f16x2 $0, $0, k; mul.rn.f16x2 $1, $1, k; mul.rn.f16x2 $2, $2, k; mul.rn.f16x2 $3, $3, k; }""")
_U4_BF16 = gl.constexpr("""{
    .reg .b32 t, one, k, c; mov.b32 one, 0x43004300; mov.b32 k, 0x3f803f80; mov.b32 c, 0xc300c300;
    lop3.b32 $0, $4, 0x000f000f, one, 0xea; shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, one, 0xea;
    shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, one, 0xea; shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, one, 0xea;
    fma.rn.bf16x2 $0, $0, k, c; fma.rn.bf16x2 $1, $1, k, c; fma.rn.bf16x2 $2, $2, k, c; fma.rn.bf16x2 $3, $3, k, c; }""")
_U4B8_BF16 = gl.constexpr("""{
    .reg .b32 t, one, k, c; mov.b32 one, 0x43004300; mov.b32 k, 0x3f803f80; mov.b32 c, 0xc308c308;
    lop3.b32 $0, $4, 0x000f000f, one, 0xea; shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, one, 0xea;
    shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, one, 0xea; shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, one, 0xea;
    fma.rn.bf16x2 $0, $0, k, c; fma.rn.bf16x2 $1, $1, k, c; fma.rn.bf16x2 $2, $2, k, c; fma.rn.bf16x2 $3, $3, k, c; }""")
# bfloat16's exponent reaches 2^-126, so the power is multiplied back at once: float32 sums of raw
# values would be subnormal.
_E2M1_BF16 = gl.constexpr("""{
    .reg .b32 t, u, k, z; mov.b32 k, 0x7e807e80; mov.b32 z, 0x80008000;
    shr.u32 t, $4, 3; and.b32 t, t, 0x01c001c0; lop3.b32 $0, $4, 0x80008000, t, 0xea;
    shl.b32 u, $4, 3; and.b32 t, $4, 0x01c001c0; lop3.b32 $1, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 1; shl.b32 t, $4, 3; and.b32 t, t, 0x01c001c0; lop3.b32 $2, u, 0x80008000, t, 0xea;
    and.b32 t, $4, 0x20072007; mul.lo.u32 t, t, 68; and.b32 $3, t, 0x81c081c0;
    fma.rn.bf16x2 $0, $0, k, z; fma.rn.bf16x2 $1, $1, k, z; fma.rn.bf16x2 $2, $2, k, z; fma.rn.bf16x2 $3, $3, k, z; }""")
# The same with a scale in place of 2^126, rows g ($5) and g + 8 ($6): as many operations, and
# nothing is left for the sums.
_E2M1_SCALED_BF16 = gl.constexpr("""{
    .reg .b32 t, u, z; mov.b32 z, 0x80008000;
    shr.u32 t, $4, 3; and.b32 t, t, 0x01c001c0; lop3.b32 $0, $4, 0x80008000, t, 0xea;
    shl.b32 u, $4, 3; and.b32 t, $4, 0x01c001c0; lop3.b32 $1, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 1; shl.b32 t, $4, 3; and.b32 t, t, 0x01c001c0; lop3.b32 $2, u, 0x80008000, t, 0xea;
    and.b32 t, $4, 0x20072007; mul.lo.u32 t, t, 68; and.b32 $3, t, 0x81c081c0;
    fma.rn.bf16x2 $0, $0, $5, z; fma.rn.bf16x2 $1, $1, $6, z; fma.rn.bf16x2 $2, $2, $5, z; fma.rn.bf16x2 $3, $3, $6, z; }""")
_MMA_F16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_MMA_BF16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@gluon.constexpr_function
def decoder(kind, half, offset):
    """The decoder's assembly. `offset`: int codes come out unsigned, and the caller takes 8 Σ x
    away.
    """
    if kind == E2M1:
        return _E2M1_RAW_F16 if half else _E2M1_BF16
    unsigned = kind == UINT or offset
    if half:
        return _U4_RAW_F16 if unsigned else _U4B8_RAW_F16
    return _U4_BF16 if unsigned else _U4B8_BF16


# Two registers of the operand from a word of four bytes, rows g and g + 8. Bytes in the low bits
# are subnormals, as nibbles are.
_U8_RAW_F16 = gl.constexpr("prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;")
_E5M2_F16 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
_E4M3_F16 = gl.constexpr("{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }")


@gluon.constexpr_function
def _e4m3_by_moves():
    """Without the instruction: fields one place down, times 2^8; 0x7F is NaN (0x7F00 + 0x100
    carries into the sign's place).
    """
    lines = [
        f"prmt.b32 t, $2, 0, {pick}; and.b32 u, t, 0x7f007f00; add.u32 n, u, 0x01000100; and.b32 n, n, 0x80008000;"
        f" shr.u32 m, n, 6; sub.u32 n, n, m; shr.u32 u, u, 1; lop3.b32 u, t, 0x80008000, u, 0xea; mul.rn.f16x2 u, u, k;"
        f" or.b32 ${i}, u, n;"
        for i, pick in enumerate(("0x1404", "0x3424"))
    ]
    return "{ .reg .b32 t, u, n, m, k; mov.b32 k, 0x5c005c00; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _u8_bf16(zero):
    """Integers by the mantissa of 2^23, two to a register."""
    lines = [
        f"prmt.b32 t, $2, k, {0x7540 | 2 * i}; prmt.b32 u, $2, k, {0x7540 | 2 * i + 1}; mov.b32 a, t; mov.b32 b, u;"
        f" sub.f32 a, a, {8388608.0 + zero:f}; sub.f32 b, b, {8388608.0 + zero:f}; cvt.rn.bf16x2.f32 ${i}, b, a;"
        for i in range(2)
    ]
    return "{ .reg .b32 t, u, k; .reg .f32 a, b; mov.b32 k, 0x4b000000; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _byte_decoder(kind, half, fp8):
    if kind == E4M3:
        return _E4M3_F16 if fp8 else _e4m3_by_moves()
    if kind == E5M2:
        return _E5M2_F16
    if half:
        return _U8_RAW_F16
    return _u8_bf16(128.0 if kind == INT else 0.0)


@gluon.jit
def decode_bytes(w, KIND: gl.constexpr, HALF: gl.constexpr, FP8: gl.constexpr):
    """One word of four 8-bit codes to two registers of the A operand, rows g and g + 8. Float16
    integers are raw and unsigned.
    """
    a, b = gl.inline_asm_elementwise(
        _byte_decoder(KIND, HALF, FP8), "=&r,=&r,r", [w], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    if (KIND >= E4M3) and (not HALF):
        return _to_bf16(a), _to_bf16(b)
    else:
        return a, b


@gluon.jit
def _to_bf16(pair):
    """Two float16 to two bfloat16; 8-bit floats have few enough bits."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
        cvt.rn.bf16x2.f32 $0, b, a; }""",
        "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_word(w, KIND: gl.constexpr, HALF: gl.constexpr, OFFSET: gl.constexpr):
    """One word a lane to the four registers of the A operand."""
    return gl.inline_asm_elementwise(
        decoder(KIND, HALF, OFFSET),
        "=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _finished(kind, raw):
    if kind == E2M1:
        return _E2M1_RAW_F16 if raw else _E2M1_F16
    return _U4_F16 if kind == UINT else _U4B8_F16


@gluon.jit
def twice_f16(v):
    """A float32 as float16 in both halves of a register."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def two_f16(low, high):
    """Two float32 as the two float16 of a register."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def twice_low(pair):
    """The low half of a register in both halves; as moves, which the assembler folds into the
    operand of a product.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l}; }", "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def twice_high(pair):
    """The high half of a register in both halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h}; }", "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _pair_f16(fp8):
    """One instruction from compute capability 8.9 on; else bytes to the upper halves, fields one
    place down, times 2^8.
    """
    if fp8:
        return "cvt.rn.f16x2.e4m3x2 $0, $1;"
    return """{ .reg .b32 t, u, k; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x1404; and.b32 u, t, 0x7f007f00; shr.u32 u, u, 1;
        lop3.b32 u, t, 0x80008000, u, 0xea; mov.b32 k, 0x5c005c00; mul.rn.f16x2 $0, u, k; }"""


@gluon.jit
def pair_f16(raw, FP8: gl.constexpr):
    """Two E4M3 bytes (int16, no NaN) to two float16."""
    return gl.inline_asm_elementwise(_pair_f16(FP8), "=r,h", [raw], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def spread_bytes(raw):
    """The two bytes of an int16 as the two halves of a register."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 $0, t, 0, 0x4140; }", "=r,h", [raw], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def halves_f32(pair):
    """The two float16 of a register as float32, low half first."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
        "=f,=f,r", [pair], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_scaled(w, s0, s1, z0, z1, KIND: gl.constexpr, ADD: gl.constexpr, RAW: gl.constexpr, HALF: gl.constexpr):
    """One word to (q − zero) · scale or q · scale + bias in float16, rounded once: rows g (s0, z0)
    and g + 8 (s1, z1).

    RAW leaves E2M1's 2^−14 in the operand, where scales are powers of two, or few bits, that make
    up for it. bfloat16 takes E2M1 under powers of two only.
    """
    if not HALF:
        return gl.inline_asm_elementwise(
            _E2M1_SCALED_BF16, "=&r,=&r,=&r,=&r,r,r,r", [w, s0, s1], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _scaled_f16(w, s0, s1, z0, z1, KIND, ADD, RAW)


@gluon.jit
def _scaled_f16(w, s0, s1, z0, z1, KIND: gl.constexpr, ADD: gl.constexpr, RAW: gl.constexpr):
    """decode_scaled in float16."""
    a0, a1, a2, a3 = gl.inline_asm_elementwise(
        _finished(KIND, RAW), "=&r,=&r,=&r,=&r,r", [w], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    if ADD == BIAS:
        return _fma_f16(a0, s0, z0), _fma_f16(a1, s1, z1), _fma_f16(a2, s0, z0), _fma_f16(a3, s1, z1)
    else:
        if ADD == ZERO:
            a0 = _sub_f16(a0, z0)
            a1 = _sub_f16(a1, z1)
            a2 = _sub_f16(a2, z0)
            a3 = _sub_f16(a3, z1)
        return mul_f16(a0, s0), mul_f16(a1, s1), mul_f16(a2, s0), mul_f16(a3, s1)


@gluon.jit
def mul_f16(a, b):
    """Two float16 products."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _sub_f16(a, b):
    return gl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _fma_f16(a, b, c):
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def mma(a, b0, b1, c, HALF: gl.constexpr):
    """c + a · b for one 16 × 8 × 16 tile a warp; a and c are four registers a lane (and token
    block).
    """
    asm: gl.constexpr = _MMA_F16 if HALF else _MMA_BF16
    return gl.inline_asm_elementwise(
        asm, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_f32(raw, KIND: gl.constexpr):
    """A stored scale to float32; the twin of decode.scale_f32 in Gluon."""
    if KIND == E8M0:
        b = raw.to(gl.int32)
        bits = gl.where(b == 0, 0x00400000, b << 23)
        bits = gl.where(b == 255, 0x7FC00000, bits)
        return bits.to(gl.float32, bitcast=True)
    elif (KIND == E4M3S) or (KIND == UE4M3):
        b = raw.to(gl.int32)
        sign = 0 if KIND == UE4M3 else (b & 0x80) << 8
        v = (sign | ((b & 0x7F) << 7)).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) * 256.0
        if KIND == UE4M3:
            return gl.where(b == 0x7F, 0.0, v)
        else:
            return gl.where((b & 0x7F) == 0x7F, float("nan"), v)
    else:
        return raw.to(gl.float32)


@gluon.constexpr_function
def vector_of(axis, layout, rank):
    """Layout of a vector along one axis of a `rank`-dimensional layout."""
    for d in reversed(range(rank)):
        if d != axis:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def axis(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr, RANK: gl.constexpr):
    """0 … SIZE − 1 along one axis of a RANK-dimensional layout, the other axes 1."""
    v = gl.arange(0, SIZE, layout=vector_of(AXIS, LAYOUT, RANK))
    for d in gl.static_range(RANK):
        if d != AXIS:
            v = gl.expand_dims(v, d)
    return v


@gluon.constexpr_function
def _halves(shape):
    """Shape with the last axis cut into two halves, and the permutation that puts which half last."""
    cut = [*shape[:-1], 2, shape[-1] // 2]
    order = [*range(len(cut) - 2), len(cut) - 1, len(cut) - 2]
    return cut, order


@gluon.jit
def pieces(t, N: gl.constexpr):
    """[..., N] held by one lane along the last axis -> its N members, in order. N a power of two."""
    if N == 1:
        return (gl.reshape(t, t.shape[:-1]),)
    elif N == 2:
        a, b = gl.split(t)
        return (a, b)
    else:
        cut: gl.constexpr = _halves(t.shape)
        low, high = gl.split(gl.permute(gl.reshape(t, cut[0]), cut[1]))
        return pieces(low, N // 2) + pieces(high, N // 2)
