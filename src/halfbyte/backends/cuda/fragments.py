"""m = 1 to 64 for 4-bit weights: codes decoded in registers straight into the matrix unit's operand (docs/cuda.md has the
picture).

The weight lies in *fragment order* (`order.to_fragments`): one 32-bit word a lane is exactly the A operand of one mma.m16n8k16,
eight codes of rows g and g + 8 at the inputs this lane owns, and the words of 64 inputs lie together, 16 bytes a lane. So one
load brings four operands, a few logic operations make the four half2 registers of each, and one instruction multiplies them
with eight tokens. The inputs of a lane are 16 contiguous bytes of x, read as they are. No shared memory, no barrier until the
end, no dense tile anywhere.

    acc[row, token] += scale[row, g] · Σ_{j in g} element[row, j] · x[token, j]

The eight columns of a product are SET slots of TOKENS tokens: with fewer than eight tokens, a column holds the x of one group
and zeros elsewhere, so SET groups gather in one accumulator without a scale between them, and each lane then scales the groups
of its own columns only. At m = 1 that is one scale and one multiply-add where eight were.

A program's warps split the inputs WK ways and the rows WN ways; each warp holds RT tiles of 16 rows by NB blocks of 8 columns.
Where a warp's inputs are one step, their x stays in registers for all the tiles a program takes. The next words are on their
way while those at hand are multiplied, and the first ones before the previous kernel has ended (PDL: weights do not depend on
it, x does). The partial sums of a tile meet at its end, in order. Products are exact, sums float32: scales multiply float32
sums, so E8M0 scales outside float16's range cost nothing. Zero points and biases meet Σ x of their group, one more product with
an operand of ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import INT, SMALL
from .operands import axis, decode_scaled, decode_word, mma, pieces, scale_of, twice_f16, unit_of
from .outputs import store
from .tiles import MIN, NONE, ZERO


@gluon.jit
def _product(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, LW: gl.constexpr, LX: gl.constexpr, HALF: gl.constexpr):
    """c += a · b for one block of 16 inputs, all row tiles by all column blocks."""
    b0 = gl.expand_dims(gl.convert_layout(b0, LX), 3)
    b1 = gl.expand_dims(gl.convert_layout(b1, LX), 3)
    a0, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a0, LW), 4), c0)
    a1, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a1, LW), 4), c0)
    a2, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a2, LW), 4), c0)
    a3, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a3, LW), 4), c0)
    b0, _ = gl.broadcast(b0, c0)
    b1, _ = gl.broadcast(b1, c0)
    return mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, HALF)


@gluon.jit
def _sums(b0, b1, t0, t1, t2, t3, LX: gl.constexpr, HALF: gl.constexpr):
    """t += Σ x over the block, the same for every row: an A operand of ones."""
    b0 = gl.expand_dims(gl.convert_layout(b0, LX), 3)
    b1 = gl.expand_dims(gl.convert_layout(b1, LX), 3)
    o = gl.full_like(b0, 0x3C003C00 if HALF else 0x3F803F80)
    return mma(o, o, o, o, b0, b1, t0, t1, t2, t3, HALF)


@gluon.jit
def _stored(
    S, SUPER, A, SMIN, tile, group, row, live, GROUPS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, PER: gl.constexpr
):
    """What memory holds of a group: scale, super scale, addend, super minimum. What a format lacks is the scale again, never
    used."""
    live = live & (group < GROUPS)
    at = (tile * GROUPS + group) * 16 + row
    over = (tile * (GROUPS // PER) + group // PER) * 16 + row
    s = gl.load(S + at, mask=live, other=0)
    up = gl.load(SUPER + over, mask=live, other=0) if SCALE == SMALL else s
    a = gl.load(A + at, mask=live, other=0) if ADD != NONE else s
    low = gl.load(SMIN + over, mask=live, other=0) if ADD == MIN else s
    return s, up, a, low


@gluon.jit
def _terms(s, up, a, low, SCALE: gl.constexpr, ADD: gl.constexpr, N: gl.constexpr):
    """Stored scales, super scales, addends and super minimums to finished scales and addends, a tuple of N each."""
    s = scale_of(s, SCALE)
    if SCALE == SMALL:
        s = s * up.to(gl.float32)
    if ADD == NONE:
        a = s
    elif ADD == MIN:
        a = -a.to(gl.float32) * low.to(gl.float32)
    else:
        a = a.to(gl.float32)
    shape: gl.constexpr = s.shape[:-2] + [N]
    return pieces(gl.reshape(s, shape), N), pieces(gl.reshape(a, shape), N)


@gluon.jit
def _spread(v, like, LW: gl.constexpr):
    """A value a lane and row tile, over the column blocks of `like`."""
    v, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(v, LW), 4), like)
    return v


@gluon.jit
def _scaled(y, c, t, s, a, UNIT: gl.constexpr, ADD: gl.constexpr, OFFSET: gl.constexpr):
    """y + (c − offset · t) · s and the addend's part, where c counts in UNIT and t = Σ x."""
    t, _ = gl.broadcast(t, c)
    if ADD == ZERO:
        return gl.fma(gl.fma(-(a + (8.0 if OFFSET else 0.0)) * UNIT, t, c), s, y)
    if OFFSET:
        c = gl.fma(gl.full_like(c, -8.0 * UNIT), t, c)
    if ADD == NONE:
        return gl.fma(c, s, y)
    return y + gl.fma(c, s, (a * UNIT) * t)


@gluon.jit
def _gather(
    y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, factor, addend, FLUSH: gl.constexpr, PARITIES: gl.constexpr, LW: gl.constexpr,
    KIND: gl.constexpr, HALF: gl.constexpr, ADD: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """The sums c of the step's accumulator FLUSH, scaled, into y: rows g (y0, y1) and g + 8 (y2, y3), even and odd columns."""
    E: gl.constexpr = FLUSH * PARITIES * 2
    O: gl.constexpr = E + PARITIES * 2 - 2  # the odd column's group
    U0: gl.constexpr = unit_of(KIND, HALF, 0)
    U1: gl.constexpr = unit_of(KIND, HALF, 1)
    return (
        _scaled(y0, c0, t0, _spread(factor[E], c0, LW), _spread(addend[E], c0, LW), U0, ADD, OFFSET),
        _scaled(y1, c1, t1, _spread(factor[O], c0, LW), _spread(addend[O], c0, LW), U0, ADD, OFFSET),
        _scaled(y2, c2, t0, _spread(factor[E + 1], c0, LW), _spread(addend[E + 1], c0, LW), U1, ADD, OFFSET),
        _scaled(y3, c3, t1, _spread(factor[O + 1], c0, LW), _spread(addend[O + 1], c0, LW), U1, ADD, OFFSET),
    )


@gluon.jit(do_not_specialize=["m"])
def fragment_kernel(
    Y, X, BIAS_PTR, W, S, SUPER, A, SMIN, GLOBAL, EXPERT, FIRST, LAST, XROW, YROW,
    m, n, ldx, divisor, TILES,
    UNITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr,
    ADD: gl.constexpr, PER: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HALF: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, STEP: gl.constexpr, SET: gl.constexpr,
    TOKENS: gl.constexpr, AHEAD: gl.constexpr, SCALED: gl.constexpr, ROUTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x · wᵀ + bias. A program takes WN · RT tiles of 16 rows at a time, every num_programs-th, and NB blocks of 8
    columns.

    UNITS   units of 64 inputs in a row            TILES  tiles of 16 rows in the weight
    GROUPS  scale groups in a row                  GROUP  inputs that share a scale: 16, 32 or a multiple of 64
    X       pairs of activations (int32), rows of ldx pairs, at least 32 · UNITS of them, the tail zero
    STEP    units loaded at once: a power of two; whole groups or a whole part of one, and of whole sets when SET > 1
    ROUTED  a stack of weights: EXPERT, FIRST, LAST give each block its expert and span of pairs, XROW and YROW each pair its
    rows of x and y SCALED  weights are finished in float16 before the product (one rounding), and one accumulator takes all
    groups; SET = 1
    AHEAD   steps whose words are on their way while one is multiplied, 1 or 2
    SET     groups that share an accumulator, each with TOKENS columns: 1, 2, 4 or 8, and so is TOKENS; NB = 1 unless SET = 1,
    TOKENS = 8
    """
    if PDL:
        gdc_launch_dependents()
    EACH: gl.constexpr = ((UNITS + WK - 1) // WK + STEP - 1) // STEP * STEP
    STEPS: gl.constexpr = EACH // STEP
    EXACT: gl.constexpr = EACH * WK == UNITS
    OFFSET: gl.constexpr = (KIND == INT) and (NB == 1)
    SUMS: gl.constexpr = (ADD != NONE) or OFFSET
    SPAN: gl.constexpr = SET * GROUP // 16  # blocks of 16 inputs that gather in one accumulator
    FLUSHES: gl.constexpr = max(1, 4 * STEP // SPAN)  # accumulators that fill in one step
    PARITIES: gl.constexpr = 2 if TOKENS == 1 else 1  # groups among the two columns of a lane
    U0: gl.constexpr = unit_of(KIND, HALF and not SCALED, 0)
    U1: gl.constexpr = unit_of(KIND, HALF and not SCALED, 1)
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, RT, NB], [1, 1, 32, 1, 1], [WK, WN, 1, 1, 1], [4, 3, 2, 1, 0])
    LW: gl.constexpr = gl.SliceLayout(4, L)  # [WK, WN, 32, RT]
    LX: gl.constexpr = gl.SliceLayout(3, L)  # [WK, WN, 32, NB]
    LW6: gl.constexpr = gl.BlockedLayout([1, 1, 1, RT, STEP, 4], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])
    LS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, RT, FLUSHES * PARITIES, 2], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    LX6: gl.constexpr = gl.BlockedLayout([1, 1, 1, NB, 4, 2], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [4, 5, 3, 2, 1, 0])
    first = gl.program_id(0) * (WN * RT)
    stride = gl.num_programs(0) * (WN * RT)
    tokens = gl.program_id(1) * (TOKENS * NB)
    if ROUTED:
        if PDL:
            gdc_wait()  # which expert's words to read is known only now
        expert = gl.load(EXPERT + gl.program_id(1)).to(gl.int64)
        tokens = gl.load(FIRST + gl.program_id(1)).to(gl.int32)
        m = gl.load(LAST + gl.program_id(1)).to(gl.int32)
        W += expert * TILES * (UNITS * 128)
        S += expert * TILES * (GROUPS * 16)
        A += expert * TILES * (GROUPS * 16)
        SUPER += expert * TILES * (GROUPS // PER * 16)
        SMIN += expert * TILES * (GROUPS // PER * 16)
        GLOBAL += expert
        BIAS_PTR += expert * n
        if tokens >= m:  # a block that no expert needed
            TILES = TILES * 0

    # Words of this lane: [WK, WN, 32, RT, STEP, 4].
    w_tile = axis(1, WN, LW6, 6) * RT + axis(3, RT, LW6, 6)
    w_unit = axis(0, WK, LW6, 6) * EACH + axis(4, STEP, LW6, 6)
    w_at = (w_tile * UNITS + w_unit) * 128 + axis(2, 32, LW6, 6) * 4 + axis(5, 4, LW6, 6)
    w_live = (axis(2, 32, LW6, 6) < 32) & (w_unit < UNITS)
    words = gl.load(W + first.to(gl.int64) * (UNITS * 128) + w_at, mask=w_live & (w_tile + first < TILES), other=0)

    # Scales and addends of this lane: [WK, WN, 32, RT, groups a step (times the parity of the column), row or row + 8].
    s_tile = axis(1, WN, LS, 6) * RT + axis(3, RT, LS, 6)
    s_set = axis(4, FLUSHES * PARITIES, LS, 6)
    s_lane = axis(2, 32, LS, 6)
    s_slot = (s_lane % 4 * 2 + s_set % PARITIES) // TOKENS
    s_group = s_set // PARITIES * SET + s_slot
    s_unit = axis(0, WK, LS, 6) * EACH
    s_row = s_lane // 4 * 2 + axis(5, 2, LS, 6)
    s_live = s_slot < SET
    scales, supers, addends, lows = _stored(
        S,
        SUPER,
        A,
        SMIN,
        s_tile + first,
        s_group + s_unit * 4 // SPAN * SET,
        s_row,
        s_live & (s_tile + first < TILES),
        GROUPS,
        SCALE,
        ADD,
        PER,
    )

    if AHEAD == 2:
        tile = first + (stride if STEPS == 1 else 0)
        base = 0 if STEPS == 1 else STEP
        words2 = gl.load(
            W + (tile.to(gl.int64) * UNITS + base) * 128 + w_at,
            mask=w_live & (w_unit + base < UNITS) & (w_tile + tile < TILES),
            other=0,
        )
        scales2, supers2, addends2, lows2 = _stored(
            S, SUPER, A, SMIN, s_tile + tile, s_group + (s_unit + base) * 4 // SPAN * SET, s_row,
            s_live & (s_tile + tile < TILES), GROUPS,
            SCALE, ADD, PER,
        )  # fmt: skip

    # Activations of this lane: [WK, WN, 32, NB, 4 words, 2 halves] a unit.
    column = axis(2, 32, LX6, 6) // 4
    token = tokens + axis(3, NB, LX6, 6) * 8 + column % TOKENS
    t = axis(2, 32, LX6, 6) % 4
    word = axis(4, 4, LX6, 6)
    half = axis(5, 2, LX6, 6)
    x_unit = axis(0, WK, LX6, 6) * EACH
    if GROUP == 16:  # a block's pairs: 2 t and 2 t + 1
        x_at = t * 2 + half * 16 + (word // 2) * 8 + word % 2
        x_group = half * 2 + word // 2
    else:  # two blocks' pairs side by side: 4 t to 4 t + 3
        x_at = t * 4 + half * 16 + word
        x_group = half * 2
    x_row = token
    if ROUTED:
        x_row = gl.load(XROW + token, mask=token < m, other=0)
    x_ptr = X + (x_row.to(gl.int64) * ldx + x_unit * 32 + x_at)
    x_live = (token < m) & (axis(1, WN, LX6, 6) < WN)
    x_slot = column // TOKENS

    none = gl.zeros([WK, WN, 32, RT, NB], gl.float32, layout=L)
    no_sum = gl.zeros([WK, WN, 32, 1, NB], gl.float32, layout=L)
    if PDL and not ROUTED:
        gdc_wait()
    if STEPS == 1:  # the inputs of a warp stay in its registers
        b = _activations(x_ptr, x_unit, x_group, x_slot, x_live, 0, STEP, SET, GROUP, UNITS, EXACT)
    for turn in range(first, TILES, stride):
        y0 = none
        y1 = none
        y2 = none
        y3 = none
        for many in range(STEPS):
            a = pieces(gl.reshape(words, [WK, WN, 32, RT, STEP * 4]), STEP * 4)
            factor, addend = _terms(scales, supers, addends, lows, SCALE, ADD, FLUSHES * PARITIES * 2)
            if AHEAD == 2:
                words = words2
                scales = scales2
                supers = supers2
                addends = addends2
                lows = lows2
            # The words of the step after, of this turn or the next, travel meanwhile.
            tile = turn + (many + AHEAD) // STEPS * stride
            base = (many + AHEAD) % STEPS * STEP
            live = w_live & (w_tile + tile < TILES)
            if not EXACT:
                live = live & (w_unit + base < UNITS)
            later = gl.load(W + (tile.to(gl.int64) * UNITS + base) * 128 + w_at, mask=live, other=0)
            later_s, later_up, later_a, later_low = _stored(
                S, SUPER, A, SMIN, s_tile + tile, s_group + (s_unit + base) * 4 // SPAN * SET, s_row,
                s_live & (s_tile + tile < TILES), GROUPS,
                SCALE, ADD, PER,
            )  # fmt: skip
            if AHEAD == 2:
                words2 = later
                scales2 = later_s
                supers2 = later_up
                addends2 = later_a
                lows2 = later_low
            else:
                words = later
                scales = later_s
                supers = later_up
                addends = later_a
                lows = later_low
            if STEPS > 1:
                x = _activations(x_ptr, x_unit, x_group, x_slot, x_live, many * STEP, STEP, SET, GROUP, UNITS, EXACT)
            else:
                x = b
            c0 = none
            c1 = none
            c2 = none
            c3 = none
            t0 = no_sum
            t1 = no_sum
            t2 = no_sum
            t3 = no_sum
            for i in gl.static_range(4 * STEP):
                if SCALED:
                    s0 = twice_f16(gl.convert_layout(factor[i // SPAN * 2], LW))
                    s1 = twice_f16(gl.convert_layout(factor[i // SPAN * 2 + 1], LW))
                    z0 = s0
                    z1 = s1
                    if ADD != NONE:
                        z0 = twice_f16(gl.convert_layout(addend[i // SPAN * 2], LW))
                        z1 = twice_f16(gl.convert_layout(addend[i // SPAN * 2 + 1], LW))
                    w0, w1, w2, w3 = decode_scaled(gl.convert_layout(a[i], LW), s0, s1, z0, z1, KIND, ADD)
                    y0, y1, y2, y3 = _product(w0, w1, w2, w3, x[2 * i], x[2 * i + 1], y0, y1, y2, y3, LW, LX, HALF)
                else:
                    w0, w1, w2, w3 = decode_word(a[i], KIND, HALF, OFFSET)
                    c0, c1, c2, c3 = _product(w0, w1, w2, w3, x[2 * i], x[2 * i + 1], c0, c1, c2, c3, LW, LX, HALF)
                    if SUMS:
                        t0, t1, t2, t3 = _sums(x[2 * i], x[2 * i + 1], t0, t1, t2, t3, LX, HALF)
                    if ((i + 1) % SPAN == 0) or (i + 1 == 4 * STEP):
                        y0, y1, y2, y3 = _gather(y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, factor, addend, i // SPAN, PARITIES,
                        LW, KIND, HALF,
                                                 ADD, OFFSET)  # fmt: skip
                        c0 = none
                        c1 = none
                        c2 = none
                        c3 = none
                        t0 = no_sum
                        t1 = no_sum
                        t2 = no_sum
                        t3 = no_sum
        y = gl.join(
            gl.join(y0 * (1.0 / U0), y2 * (1.0 / U1)), gl.join(y1 * (1.0 / U0), y3 * (1.0 / U1))
        )  # [..., row + 8, column + 1]
        store(
            Y, BIAS_PTR, GLOBAL, YROW, y, turn, tokens, m, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS, RT, NB, WK, WN, TOKENS, ROUTED
        )


@gluon.jit
def _activations(
    x_ptr, x_unit, x_group, x_slot, x_live, base, STEP: gl.constexpr, SET: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr,
    EXACT: gl.constexpr,
):  # fmt: skip
    """The B operands of a step, two registers a block of 16 inputs: x where the column holds the block's group, else 0."""
    b = ()
    for u in gl.static_range(STEP):
        mine = x_live
        if (SET > 1) or (GROUP < 64 * STEP):
            mine = mine & (((x_group + 4 * u) * 16 // GROUP) % SET == x_slot)
        else:
            mine = mine & (x_slot == 0)
        if not EXACT:
            mine = mine & (x_unit + (base + u) < UNITS)
        low, high = gl.split(gl.load(x_ptr + (base + u) * 32, mask=mine, other=0))
        b = b + pieces(low, 4) + pieces(high, 4)
    return b
