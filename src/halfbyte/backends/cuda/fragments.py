"""m = 1 to 64 for 4-bit weights: codes decoded in registers straight into the matrix unit's operand.

The weight lies in *fragment order* (`order.to_fragments`): one 32-bit word a lane is exactly the A operand of one mma.m16n8k16, eight codes of rows
g and g + 8 at the inputs this lane owns, and the words of 64 inputs lie together, 16 bytes a lane. So one load brings four operands; for each,
four `lop3` (and a subtraction each, for integers) make its four half2 registers, and one instruction multiplies them with eight tokens. The inputs of
a lane are 16 contiguous bytes of x, read as they are. No shared memory, no barrier until the end, no dense tile anywhere.

    acc[row, token] += scale[row, g] · Σ_{j in g} element[row, j] · x[token, j]

A program's warps split the inputs WK ways and the rows WN ways; each warp holds RT tiles of 16 rows by NB blocks of 8 tokens, and the WK partial
sums meet once at the end, in order. Products are exact, sums float32: the scale multiplies the float32 sum of a group, so E8M0 scales
outside float16's range cost nothing. Zero points and biases meet Σ x of their group, which one more mma with an operand of ones gives.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode import E2M1, E4M3S, E8M0, INT, SMALL, UE4M3, UINT
from .tiles import BIAS, MIN, NONE, ZERO

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
# Values times 2^-14; the power comes back once, on the output.
_E2M1_RAW_F16 = gl.constexpr("""{
    .reg .b32 t, u;
    shr.u32 t, $4, 3; and.b32 t, t, 0x0e000e00; lop3.b32 $3, $4, 0x80008000, t, 0xea;
    shl.b32 u, $4, 4; shl.b32 t, $4, 1; and.b32 t, t, 0x0e000e00; lop3.b32 $2, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 8; shl.b32 t, $4, 5; and.b32 t, t, 0x0e000e00; lop3.b32 $1, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 12; shl.b32 t, $4, 9; and.b32 t, t, 0x0e000e00; lop3.b32 $0, u, 0x80008000, t, 0xea; }""")
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
# bfloat16's exponent reaches 2^-126, so the power is multiplied back at once: float32 sums of raw values would be subnormal.
_E2M1_BF16 = gl.constexpr("""{
    .reg .b32 t, u, k, z; mov.b32 k, 0x7e807e80; mov.b32 z, 0x80008000;
    shr.u32 t, $4, 6; and.b32 t, t, 0x01c001c0; lop3.b32 $3, $4, 0x80008000, t, 0xea;
    shl.b32 u, $4, 4; shr.u32 t, $4, 2; and.b32 t, t, 0x01c001c0; lop3.b32 $2, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 8; shl.b32 t, $4, 2; and.b32 t, t, 0x01c001c0; lop3.b32 $1, u, 0x80008000, t, 0xea;
    shl.b32 u, $4, 12; shl.b32 t, $4, 6; and.b32 t, t, 0x01c001c0; lop3.b32 $0, u, 0x80008000, t, 0xea;
    fma.rn.bf16x2 $0, $0, k, z; fma.rn.bf16x2 $1, $1, k, z; fma.rn.bf16x2 $2, $2, k, z; fma.rn.bf16x2 $3, $3, k, z; }""")
_MMA_F16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_MMA_BF16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@gluon.jit
def _decode(w, ASM: gl.constexpr):
    """One word to the four registers of the A operand."""
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [w], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, HALF: gl.constexpr):
    """c + a · b for one 16 × 8 × 16 tile a warp; every argument is one register a lane (and token block)."""
    asm: gl.constexpr = _MMA_F16 if HALF else _MMA_BF16
    return gl.inline_asm_elementwise(
        asm, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _scale(raw, KIND: gl.constexpr):
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
def _vector_of(axis, layout, rank):
    """Layout of a vector along one axis of a `rank`-dimensional layout."""
    for d in reversed(range(rank)):
        if d != axis:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def _axis(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0 … SIZE − 1 along one axis of a 4-dimensional layout, the other axes 1."""
    v = gl.arange(0, SIZE, layout=_vector_of(AXIS, LAYOUT, 4))
    for d in gl.static_range(4):
        if d != AXIS:
            v = gl.expand_dims(v, d)
    return v


@gluon.jit
def _split4(t):
    """[..., 4] held by one lane -> its four members, in order."""
    shape: gl.constexpr = t.shape[:-1] + [2, 2]
    even, odd = gl.split(gl.reshape(t, shape))
    t0, t2 = gl.split(even)
    t1, t3 = gl.split(odd)
    return t0, t1, t2, t3


@gluon.jit
def _operand(word, LW: gl.constexpr, b0, KIND: gl.constexpr, HALF: gl.constexpr):
    """A word a lane and row tile -> the A operand, spread over the token blocks of b0."""
    if HALF:
        a0, a1, a2, a3 = _decode(word, _U4_F16 if KIND == UINT else (_U4B8_F16 if KIND == INT else _E2M1_RAW_F16))
    else:
        a0, a1, a2, a3 = _decode(word, _U4_BF16 if KIND == UINT else (_U4B8_BF16 if KIND == INT else _E2M1_BF16))
    return (
        gl.expand_dims(gl.convert_layout(a0, LW), 4),
        gl.expand_dims(gl.convert_layout(a1, LW), 4),
        gl.expand_dims(gl.convert_layout(a2, LW), 4),
        gl.expand_dims(gl.convert_layout(a3, LW), 4),
    )


@gluon.jit
def _step(word, b0, b1, c0, c1, c2, c3, LW: gl.constexpr, LX: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr):
    """c += a · b for one block of 16 inputs, all row tiles by all token blocks."""
    a0, a1, a2, a3 = _operand(word, LW, b0, KIND, HALF)
    b0 = gl.expand_dims(gl.convert_layout(b0, LX), 3)
    b1 = gl.expand_dims(gl.convert_layout(b1, LX), 3)
    a0, _ = gl.broadcast(a0, c0)
    a1, _ = gl.broadcast(a1, c0)
    a2, _ = gl.broadcast(a2, c0)
    a3, _ = gl.broadcast(a3, c0)
    b0, _ = gl.broadcast(b0, c0)
    b1, _ = gl.broadcast(b1, c0)
    return _mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, HALF)


@gluon.jit
def _sums(b0, b1, t0, t1, t2, t3, LX: gl.constexpr, HALF: gl.constexpr):
    """t += Σ x over the block, the same for every row: an A operand of ones."""
    b0 = gl.expand_dims(gl.convert_layout(b0, LX), 3)
    b1 = gl.expand_dims(gl.convert_layout(b1, LX), 3)
    o = gl.full_like(b0, 0x3C003C00 if HALF else 0x3F803F80)
    return _mma(o, o, o, o, b0, b1, t0, t1, t2, t3, HALF)


@gluon.jit
def _group(
    y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, group, live, g8,
    GROUPS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """y += scale · c and the group's addend; rows g8 and g8 + 8 of each tile. `live` says the group exists."""
    at = (tile * GROUPS + group) * 16 + g8
    lo = _scale(gl.load(S + at, mask=live, other=0), SCALE)
    hi = _scale(gl.load(S + at + 8, mask=live, other=0), SCALE)
    if SCALE == SMALL:
        up = (tile * (GROUPS // PER) + group // PER) * 16 + g8
        lo = lo * gl.load(SUPER + up, mask=live, other=0).to(gl.float32)
        hi = hi * gl.load(SUPER + up + 8, mask=live, other=0).to(gl.float32)
    if ADD != NONE:
        al = gl.load(A + at, mask=live, other=0).to(gl.float32)
        ah = gl.load(A + at + 8, mask=live, other=0).to(gl.float32)
        if ADD == MIN:
            al = -al * gl.load(SMIN + up, mask=live, other=0).to(gl.float32)
            ah = -ah * gl.load(SMIN + up + 8, mask=live, other=0).to(gl.float32)
        al, _ = gl.broadcast(gl.expand_dims(al, 4), c0)
        ah, _ = gl.broadcast(gl.expand_dims(ah, 4), c0)
    lo, _ = gl.broadcast(gl.expand_dims(lo, 4), c0)
    hi, _ = gl.broadcast(gl.expand_dims(hi, 4), c0)
    if ADD == NONE:
        return gl.fma(c0, lo, y0), gl.fma(c1, lo, y1), gl.fma(c2, hi, y2), gl.fma(c3, hi, y3)
    elif ADD == ZERO:
        t0, _ = gl.broadcast(t0, c0)
        t1, _ = gl.broadcast(t1, c0)
        return (
            gl.fma(gl.fma(-al, t0, c0), lo, y0),
            gl.fma(gl.fma(-al, t1, c1), lo, y1),
            gl.fma(gl.fma(-ah, t0, c2), hi, y2),
            gl.fma(gl.fma(-ah, t1, c3), hi, y3),
        )
    else:
        t0, _ = gl.broadcast(t0, c0)
        t1, _ = gl.broadcast(t1, c0)
        return (
            y0 + gl.fma(c0, lo, al * t0),
            y1 + gl.fma(c1, lo, al * t1),
            y2 + gl.fma(c2, hi, ah * t0),
            y3 + gl.fma(c3, hi, ah * t1),
        )


@gluon.jit(do_not_specialize=["m"])
def fragment_kernel(
    Y, X, BIAS_PTR, W, S, SUPER, A, SMIN, GLOBAL,
    m, n, ldx, divisor, TILES,
    UNITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr,
    ADD: gl.constexpr, PER: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x · wᵀ + bias for WN · RT tiles of 16 rows and NB blocks of 8 tokens.

    UNITS   units of 64 inputs in a row            TILES  tiles of 16 rows in the weight
    GROUPS  scale groups in a row                  GROUP  inputs that share a scale: 16, 32 or a multiple of 64
    X       pairs of activations (int32), rows of ldx pairs, at least 32 · UNITS of them, the tail zero
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, RT, NB], [1, 1, 32, 1, 1], [WK, WN, 1, 1, 1], [4, 3, 2, 1, 0])
    LW: gl.constexpr = gl.SliceLayout(4, L)  # [WK, WN, 32, RT]
    LX: gl.constexpr = gl.SliceLayout(3, L)  # [WK, WN, 32, NB]
    LW4: gl.constexpr = gl.BlockedLayout([1, 1, 1, RT, 4], [1, 1, 32, 1, 1], [WK, WN, 1, 1, 1], [4, 3, 2, 1, 0])
    LX8: gl.constexpr = gl.BlockedLayout([1, 1, 1, NB, 4, 2], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [4, 5, 3, 2, 1, 0])
    LX4: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, LX8))  # [WK, WN, 32, NB]
    LW3: gl.constexpr = gl.SliceLayout(4, LW4)

    EACH: gl.constexpr = (UNITS + WK - 1) // WK
    first = gl.program_id(0) * (WN * RT)
    tokens = gl.program_id(1) * (8 * NB)

    # Where each lane's words, scales and activations lie.
    wk = _axis(0, WK, LW)
    tile = first + _axis(1, WN, LW) * RT + _axis(3, RT, LW)
    g8 = _axis(2, 32, LW) // 4 + tile * 0
    unit0 = wk * EACH + tile * 0
    wk4 = _axis(0, WK, LW3)
    tile4 = first + _axis(1, WN, LW3) * RT + _axis(3, RT, LW3)
    lane4 = _axis(2, 32, LW3)
    w_at = gl.expand_dims((tile4.to(gl.int64) * UNITS + wk4 * EACH) * 128 + lane4 * 4, 4)
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LW4)))))
    w_ptr = W + w_at + quad[None, None, None, None, :]
    w_live = gl.expand_dims((tile4 < TILES) & (lane4 < 32), 4)
    w_unit = gl.expand_dims(wk4 * EACH + tile4 * 0, 4)

    xk = _axis(0, WK, LX4)
    token = tokens + _axis(3, NB, LX4) * 8 + _axis(2, 32, LX4) // 4
    t = _axis(2, 32, LX4) % 4
    x_row = token.to(gl.int64) * ldx + xk * (EACH * 32)
    if GROUP == 16:
        x_row += t * 2
    else:
        x_row += t * 4
    word = gl.arange(0, 4, layout=_vector_of(4, LX8, 6))[None, None, None, None, :, None]
    half = gl.arange(0, 2, layout=_vector_of(5, LX8, 6))[None, None, None, None, None, :]
    if GROUP == 16:  # a block's pairs: 2 t and 2 t + 1
        offset = half * 16 + (word // 2) * 8 + word % 2
    else:  # two blocks' pairs side by side: 4 t to 4 t + 3
        offset = half * 16 + word
    x_ptr = X + gl.expand_dims(gl.expand_dims(x_row, 4), 5) + offset
    x_live = gl.expand_dims(gl.expand_dims(token < m, 4), 5)
    x_unit = gl.expand_dims(gl.expand_dims(xk * EACH + token * 0, 4), 5)

    y0 = gl.zeros([WK, WN, 32, RT, NB], gl.float32, layout=L)
    y1 = y0
    y2 = y0
    y3 = y0
    none = gl.zeros([WK, WN, 32, RT, NB], gl.float32, layout=L)
    no_sum = gl.zeros([WK, WN, 32, 1, NB], gl.float32, layout=L)
    for many in range(0, (EACH + UNROLL - 1) // UNROLL):
        for u in gl.static_range(UNROLL):
            step = many * UNROLL + u
            inside = step < EACH
            words = gl.load(w_ptr + step * 128, mask=w_live & (w_unit + step < UNITS) & inside, other=0)
            xs = gl.load(x_ptr + step * 32, mask=x_live & (x_unit + step < UNITS) & inside, other=0)
            w0, w1, w2, w3 = _split4(words)
            low, high = gl.split(xs)
            b00, b01, b10, b11 = _split4(low)
            b20, b21, b30, b31 = _split4(high)
            unit = unit0 + step
            live = (unit < UNITS) & (tile < TILES) & inside
            c0, c1, c2, c3 = _step(w0, b00, b01, none, none, none, none, LW, LX, KIND, HALF)
            t0 = no_sum
            t1 = no_sum
            t2 = no_sum
            t3 = no_sum
            if ADD != NONE:
                t0, t1, t2, t3 = _sums(b00, b01, t0, t1, t2, t3, LX, HALF)
            if GROUP == 16:
                y0, y1, y2, y3 = _group(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, unit * 4,
                                        live & (unit * 4 < GROUPS), g8, GROUPS, SCALE, ADD, PER)  # fmt: skip
                c0 = none
                c1 = none
                c2 = none
                c3 = none
                t0 = no_sum
                t1 = no_sum
                t2 = no_sum
                t3 = no_sum
            c0, c1, c2, c3 = _step(w1, b10, b11, c0, c1, c2, c3, LW, LX, KIND, HALF)
            if ADD != NONE:
                t0, t1, t2, t3 = _sums(b10, b11, t0, t1, t2, t3, LX, HALF)
            if GROUP <= 32:
                last = unit * (64 // GROUP) + 32 // GROUP - 1
                y0, y1, y2, y3 = _group(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, last,
                                        live & (last < GROUPS), g8, GROUPS, SCALE, ADD, PER)  # fmt: skip
                c0 = none
                c1 = none
                c2 = none
                c3 = none
                t0 = no_sum
                t1 = no_sum
                t2 = no_sum
                t3 = no_sum
            c0, c1, c2, c3 = _step(w2, b20, b21, c0, c1, c2, c3, LW, LX, KIND, HALF)
            if ADD != NONE:
                t0, t1, t2, t3 = _sums(b20, b21, t0, t1, t2, t3, LX, HALF)
            if GROUP == 16:
                y0, y1, y2, y3 = _group(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, unit * 4 + 2,
                                        live & (unit * 4 + 2 < GROUPS), g8, GROUPS, SCALE, ADD, PER)  # fmt: skip
                c0 = none
                c1 = none
                c2 = none
                c3 = none
                t0 = no_sum
                t1 = no_sum
                t2 = no_sum
                t3 = no_sum
            c0, c1, c2, c3 = _step(w3, b30, b31, c0, c1, c2, c3, LW, LX, KIND, HALF)
            if ADD != NONE:
                t0, t1, t2, t3 = _sums(b30, b31, t0, t1, t2, t3, LX, HALF)
            if GROUP <= 32:
                last = unit * (64 // GROUP) + 64 // GROUP - 1
                y0, y1, y2, y3 = _group(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, last,
                                        live & (last < GROUPS), g8, GROUPS, SCALE, ADD, PER)  # fmt: skip
            else:
                last = unit // (GROUP // 64)
                y0, y1, y2, y3 = _group(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, t2, t3, S, SUPER, A, SMIN, tile, last,
                                        live, g8, GROUPS, SCALE, ADD, PER)  # fmt: skip

    _store(Y, BIAS_PTR, GLOBAL, gl.sum(y0, 0), first, tokens, 0, 0, m, n, divisor, KIND, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WN, L)
    _store(Y, BIAS_PTR, GLOBAL, gl.sum(y1, 0), first, tokens, 0, 1, m, n, divisor, KIND, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WN, L)
    _store(Y, BIAS_PTR, GLOBAL, gl.sum(y2, 0), first, tokens, 8, 0, m, n, divisor, KIND, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WN, L)
    _store(Y, BIAS_PTR, GLOBAL, gl.sum(y3, 0), first, tokens, 8, 1, m, n, divisor, KIND, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WN, L)


@gluon.jit
def _store(
    Y, BIAS_PTR, GLOBAL, y, first, tokens, down, right, m, n, divisor,
    KIND: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """One of the four accumulators [WN, 32, RT, NB] to y: row 16 · tile + lane / 4 + down, token 2 · (lane % 4) + right of each block."""
    R: gl.constexpr = gl.SliceLayout(0, L)
    lane = _axis(1, 32, R)
    row = (first + _axis(0, WN, R) * RT + _axis(2, RT, R)) * 16 + lane // 4 + down
    token = tokens + _axis(3, NB, R) * 8 + (lane % 4) * 2 + right
    if HALF and (KIND == E2M1):
        y = y * 16384.0
    if (GLOBAL_OP == 1) and (not DIVIDE):
        y = y * gl.load(GLOBAL)
    elif GLOBAL_OP:  # float64 keeps the quotient clear of float32's midpoints (docs/cuda.md)
        g = gl.load(GLOBAL).to(gl.float64)
        wide = y.to(gl.float64)
        if GLOBAL_OP == 1:
            wide = wide * g
        else:
            wide = wide / g
        y = (wide / divisor).to(gl.float32)
    keep = (row < n) & (token < m)
    if HAS_BIAS:
        y = y + gl.load(BIAS_PTR + row + token * 0, mask=keep, other=0).to(gl.float32)
    gl.store(Y + token.to(gl.int64) * n + row, y.to(Y.dtype.element_ty), mask=keep)
