"""Operands of mma.m16n8k16 for the `mma` kernel: words decoded in registers, the product, and
stored scales as float32.

A word is the A operand of one product for one lane: registers a0 and a2 belong to row g of the
tile, a1 and a3 to row g + 8. The assembly that decodes it is a row of `decoders.OPERANDS`, chosen
on the host (`plan.make_plan`). Where a row gives the value times a power of two, the power is
multiplied back once an output; where `int` codes come out unsigned, their implicit zero is taken
from the sums, through Σ x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E4M3S, E8M0, UE4M3
from ..portable.decode_tile import BIAS, ZERO

_MMA_F16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_MMA_BF16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@gluon.jit
def decode_bytes(w, DECODER: gl.constexpr):
    """One word a lane of four 8-bit codes to two registers of the A operand, rows g and g + 8."""
    return gl.inline_asm_elementwise(DECODER, "=&r,=&r,r", [w], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def decode_word(w, DECODER: gl.constexpr):
    """One word a lane of eight 4-bit codes to the four registers of the A operand."""
    return gl.inline_asm_elementwise(
        DECODER,
        "=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _lane_decoder(plan, block):
    """Assembly of a block of a unit in lane order."""
    return plan.lane_decoders[block]


@gluon.constexpr_function
def _lane_constraints(plan):
    return plan.inputs


@gluon.jit
def own_words(words, BLOCK: gl.constexpr, WIDTH: gl.constexpr, P: gl.constexpr):
    """The words of a plane in lane order that block BLOCK of a step is in: of rows g and g + 8, or
    one of both.
    """
    L: gl.constexpr = gl.SliceLayout(4, P.layout)
    UNIT: gl.constexpr = BLOCK // 4 * WIDTH
    FIRST: gl.constexpr = UNIT + (BLOCK % 4 // 2 if WIDTH == 4 else 0)
    if WIDTH > 1:
        return (gl.convert_layout(words[FIRST], L), gl.convert_layout(words[FIRST + WIDTH // 2], L))
    elif WIDTH == 1:
        return (gl.convert_layout(words[FIRST], L),)
    else:
        return ()


@gluon.jit
def decode_lanes(words, BLOCK: gl.constexpr, P: gl.constexpr):
    """A lane's words of block BLOCK of a unit to the four registers of the A operand."""
    asm: gl.constexpr = _lane_decoder(P, BLOCK)
    constraints: gl.constexpr = _lane_constraints(P)
    return gl.inline_asm_elementwise(
        asm, constraints, words, dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def table_entry(table, P: gl.constexpr):
    """The lane's entry of a table in a tuple: x's type in both halves, or float32 where weights are
    finished; () without a table.
    """
    if P.table:
        lane = gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
        v = gl.load(table + (lane & 15))
        if P.scaled:
            return (v.to(gl.int32, bitcast=True),)
        elif P.half:
            return (twice_f16(v),)
        else:
            return (_twice_bf16(v),)
    else:
        return ()


@gluon.jit
def _twice_bf16(v):
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1)


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
        "=f,=f,r",
        [pair],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_scaled(w, s0, s1, z0, z1, P: gl.constexpr):
    """One word to (q − zero) · scale or q · scale + bias in x's type, rounded once: rows g (s0, z0)
    and g + 8 (s1, z1). bfloat16 takes E2M1 under powers of two only.
    """
    if not P.half:
        return gl.inline_asm_elementwise(
            P.decoder,
            "=&r,=&r,=&r,=&r,r,r,r",
            [w, s0, s1],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return _scaled_f16(decode_word(w, P.decoder), s0, s1, z0, z1, P.addend)


@gluon.jit
def _scaled_f16(a, s0, s1, z0, z1, ADD: gl.constexpr):
    """Four registers of decoded float16 pairs with their zero points or biases and scales."""
    a0, a1, a2, a3 = a
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
