"""m = 1 to 64 for 4-bit weights: codes decoded in registers straight into the matrix unit's operand (docs/design/cuda.md has the
picture).

The weight lies in *fragment order* (`order.to_fragments`): one 32-bit word a lane is exactly the A operand of one mma.m16n8k16,
eight codes of rows g and g + 8 at the inputs this lane owns, and the words of 64 inputs lie together, 16 bytes a lane. So one
load brings four operands, a few logic operations make the four half2 registers of each, and one instruction multiplies them
with eight tokens. The inputs of a lane are 16 contiguous bytes of x, read as they are. No shared memory, no barrier until the
end, no dense tile anywhere.

    acc[row, token] += scale[row, g] · Σ_{j in g} element[row, j] · x[token, j]

The eight columns of a product are SET slots of TOKENS tokens: with fewer than eight tokens, a column holds the x of one group
and zeros elsewhere, so SET groups gather in one accumulator without a scale between them, and each lane then scales the groups
of its own columns only. At m = 1 that is one scale and one multiply-add where eight were, and groups 2 j and 2 j + 1 share the
registers of x: a product with the one's words is right in the even columns and meaningless in the odd ones, the other's the
other way round, and each has accumulators of its own, of which it gives its columns.

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

from ..decode import E2M1, E4M3_NORMAL, E8M0_NORMAL, INT
from ..portable.decode_tile import NONE
from .accumulate import (
    activations,
    gather,
    of_x,
    paired,
    places_of_x,
    product,
    second_chain,
    start_of,
    stored,
    sums_of_x,
    terms,
    terms_half,
)
from .epilogue import biases, places, store
from .operands import axis, decode_octets, decode_scaled, decode_word, pieces, unit_of


@gluon.constexpr_function
def each(units, warps, step, buffers):
    """Units a warp takes: one step, or as many whole rounds of `buffers` steps as it needs."""
    need = -(-units // warps)
    return step if need <= step else -(-need // (step * buffers)) * step * buffers


@gluon.jit
def fetch(
    W, S, SUPER, A, SMIN, tile, base, end, w_far, w_near, w_live, w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down,
    s_live, top, W_PLACE: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Words and stored scales of a step: units from `base` on of the row tiles from `tile` on."""
    UNITS: gl.constexpr = W_PLACE[0]
    Q: gl.constexpr = W_PLACE[1]
    live = w_live & (w_tile + tile < end)
    if not W_PLACE[2]:
        live = live & (w_unit + base < UNITS)
    words = gl.load(W + (tile.to(gl.int64) * UNITS + base) * (128 * Q) + w_far + w_near, mask=live, other=0)
    scales, supers, addends, lows = stored(
        S, SUPER, A, SMIN, tile, end, s_unit + base, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, PLACE
    )
    return words, scales, supers, addends, lows


@gluon.jit
def multiply(
    words, scales, supers, addends, lows, x, xt, y0, y1, y2, y3, none, top, LW: gl.constexpr, LX: gl.constexpr,
    STEP: gl.constexpr, SPAN: gl.constexpr, PAIR: gl.constexpr, FLUSHES: gl.constexpr, PARITIES: gl.constexpr,
    KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, HALF: gl.constexpr, FP8: gl.constexpr,
    SCALED: gl.constexpr, RAW: gl.constexpr, SUMS: gl.constexpr, OFFSET: gl.constexpr, U0: gl.constexpr, U1: gl.constexpr,
):  # fmt: skip
    """y plus a step's products: codes decoded, multiplied with x, sums scaled."""
    ZEROES: gl.constexpr = 2.0 ** (BITS - 1)  # the implicit zero of `int` codes
    N: gl.constexpr = STEP * BITS  # words a lane
    a = pieces(gl.reshape(words, words.shape[:4] + [N]), N)
    if SCALED:
        scale, addend = terms_half(scales, addends, top, SCALE, ADD, KIND, HALF, FP8, FLUSHES * 2)
    else:
        scale, addend = terms(scales, supers, addends, lows, SCALE, ADD, FP8, FLUSHES * PARITIES * 2)
    t0 = none
    t1 = none
    for i in gl.static_range(4 * STEP):
        if SCALED:
            s0 = gl.convert_layout(scale[i // SPAN * 2], LW)
            s1 = gl.convert_layout(scale[i // SPAN * 2 + 1], LW)
            z0 = gl.convert_layout(addend[i // SPAN * 2], LW)
            z1 = gl.convert_layout(addend[i // SPAN * 2 + 1], LW)
            w0, w1, w2, w3 = decode_scaled(gl.convert_layout(a[i], LW), s0, s1, z0, z1, KIND, ADD, RAW, HALF)
            y0, y1, y2, y3 = product(w0, w1, w2, w3, x[2 * i], x[2 * i + 1], y0, y1, y2, y3, LW, LX, HALF)
        else:
            if i % SPAN == 0:
                c0 = none
                c1 = none
                c2 = none
                c3 = none
                d0 = none
                d1 = none
                d2 = none
                d3 = none
                if SUMS:
                    t0 = xt[i // SPAN * 2]
                    t1 = xt[i // SPAN * 2 + 1]
                    c0 = start_of(t0, none, ZEROES, OFFSET)
                    c1 = start_of(t1, none, ZEROES, OFFSET)
                    c2 = start_of(t0, none, ZEROES * U1 / U0, OFFSET)
                    c3 = start_of(t1, none, ZEROES * U1 / U0, OFFSET)
                if PAIR:
                    d1 = c1
                    d3 = c3
            if BITS == 8:
                w0, w1 = decode_octets(a[2 * i], KIND, HALF, FP8)
                w2, w3 = decode_octets(a[2 * i + 1], KIND, HALF, FP8)
            else:
                w0, w1, w2, w3 = decode_word(a[i], KIND, HALF, OFFSET)
            if second_chain(i, PAIR):
                d0, d1, d2, d3 = product(w0, w1, w2, w3, x[of_x(i, PAIR)], x[of_x(i, PAIR) + 1], d0, d1, d2, d3, LW, LX, HALF)
            else:
                c0, c1, c2, c3 = product(w0, w1, w2, w3, x[of_x(i, PAIR)], x[of_x(i, PAIR) + 1], c0, c1, c2, c3, LW, LX, HALF)
            if ((i + 1) % SPAN == 0) or (i + 1 == 4 * STEP):
                if PAIR:
                    c1 = d1
                    c3 = d3
                y0, y1, y2, y3 = gather(
                    y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, scale, addend, i // SPAN, PARITIES, LW, U1 / U0, ADD
                )
    return y0, y1, y2, y3


@gluon.jit
def walk(
    Y, X, BIAS_PTR, W, S, SUPER, A, SMIN, GLOBAL, XROW, YROW,
    first, end, stride, tokens, m, n, ldx, divisor, unit, top,
    UNITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr,
    ADD: gl.constexpr, PER: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HALF: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, STEP: gl.constexpr, SET: gl.constexpr,
    TOKENS: gl.constexpr, AHEAD: gl.constexpr, SCALED: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr,
    FP8: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Row tiles first, first + stride, … below end, for the tokens from `tokens` on and below m."""
    EACH: gl.constexpr = each(UNITS, WK, STEP, 2 if AHEAD == 2 else 1)
    STEPS: gl.constexpr = EACH // STEP
    EXACT: gl.constexpr = EACH * WK == UNITS
    Q: gl.constexpr = BITS // 4  # blocks of 128 words a unit
    OFFSET: gl.constexpr = (KIND == INT) and (HALF and ((not SCALED) and (((NB == 1) or (STEPS == 1)) or (BITS == 8))))
    SUMS: gl.constexpr = (not SCALED) and ((ADD != NONE) or OFFSET)
    FULL: gl.constexpr = EXACT and ((GROUPS == 1) or (GROUPS * GROUP == UNITS * 64))  # no group lies past the end
    SPAN: gl.constexpr = SET * GROUP // 16  # blocks of 16 inputs that gather in one accumulator
    FLUSHES: gl.constexpr = max(1, 4 * STEP // SPAN)  # accumulators that fill in one step
    PARITIES: gl.constexpr = 2 if TOKENS == 1 else 1  # groups among the two columns of a lane
    PAIR: gl.constexpr = GROUP // 16 if (TOKENS == 1) and ((SET >= 2) and (STEP >= 2)) else 0  # blocks of a group that shares x
    RAW: gl.constexpr = SCALED and ((KIND == E2M1) and ((SCALE == E8M0_NORMAL) or (SCALE == E4M3_NORMAL)))
    U0: gl.constexpr = unit_of(KIND, BITS, HALF and not SCALED, 0)
    U1: gl.constexpr = unit_of(KIND, BITS, HALF and not SCALED, 1)
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, RT, NB], [1, 1, 32, 1, 1], [WK, WN, 1, 1, 1], [4, 3, 2, 1, 0])
    LW: gl.constexpr = gl.SliceLayout(4, L)  # [WK, WN, 32, RT]
    LX: gl.constexpr = gl.SliceLayout(3, L)  # [WK, WN, 32, NB]
    LW6: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, RT, STEP * Q, 4], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    LS6: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, RT, FLUSHES * PARITIES, 2], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    LX6: gl.constexpr = gl.BlockedLayout([1, 1, 1, NB, 4, 2], [1, 1, 32, 1, 1, 1], [WK, WN, 1, 1, 1, 1], [4, 5, 3, 2, 1, 0])

    # Words of this lane: [WK, WN, 32, RT, STEP · Q, 4]. What differs between lanes is added first; the rest is constant.
    w_tile = axis(1, WN, LW6, 6) * RT + axis(3, RT, LW6, 6)
    w_unit = axis(0, WK, LW6, 6) * EACH + axis(4, STEP * Q, LW6, 6) // Q
    w_far = (axis(1, WN, LW6, 6) * RT * UNITS + axis(0, WK, LW6, 6) * EACH) * (128 * Q) + axis(2, 32, LW6, 6) * 4
    w_near = (axis(3, RT, LW6, 6) * UNITS * Q + axis(4, STEP * Q, LW6, 6)) * 128 + axis(5, 4, LW6, 6)
    w_live = (axis(2, 32, LW6, 6) < 32) & (w_unit < UNITS)
    # Scales and addends of this lane: [WK, WN, 32, RT, groups a step (times the parity of the column), row or row + 8], or
    # without the last axis where the rows come in pairs.
    LS: gl.constexpr = gl.SliceLayout(5, LS6) if paired(SCALE) else LS6
    RANK: gl.constexpr = 5 if paired(SCALE) else 6
    s_down = axis(4, FLUSHES * PARITIES, LS, 5) * 0 if paired(SCALE) else axis(5, 2, LS, 6)
    s_lane = axis(2, 32, LS, RANK)
    s_set = axis(4, FLUSHES * PARITIES, LS, RANK)
    s_slot = s_lane % 4 * 2 // TOKENS
    s_group = s_set // PARITIES * SET + s_set % PARITIES
    s_unit = axis(0, WK, LS, RANK) * EACH
    s_tile = axis(1, WN, LS, RANK) * RT + axis(3, RT, LS, RANK)
    s_live = s_slot + s_set % PARITIES < SET
    PLACE: gl.constexpr = ((SPAN, SET), (RT, GROUPS, SCALE, ADD, PER, FULL))
    BUFFERS: gl.constexpr = 2 if AHEAD == 2 else 1
    TURNS: gl.constexpr = BUFFERS if STEPS == 1 else 1
    W_PLACE: gl.constexpr = (UNITS, Q, EXACT)
    words, scales, supers, addends, lows = fetch(
        W, S, SUPER, A, SMIN, first, 0, end, w_far, w_near, w_live, w_unit, w_tile,
        s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
    )  # fmt: skip

    if AHEAD == 2:
        words2, scales2, supers2, addends2, lows2 = fetch(
            W, S, SUPER, A, SMIN, first + (stride if STEPS == 1 else 0), 0 if STEPS == 1 else STEP, end, w_far, w_near, w_live,
            w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
        )  # fmt: skip

    # Activations of this lane: [WK, WN, 32, NB, 4 words, 2 halves] a unit.
    column = axis(2, 32, LX6, 6) // 4
    token = tokens + axis(3, NB, LX6, 6) * 8 + column % TOKENS
    x_at, x_far, x_group = places_of_x(column, axis(2, 32, LX6, 6) % 4, axis(4, 4, LX6, 6), axis(5, 2, LX6, 6), GROUP, PAIR)
    x_unit = axis(0, WK, LX6, 6) * EACH + x_far
    x_row = token
    if ROUTED:
        x_row = gl.load(XROW + token, mask=token < m, other=0)
    x_ptr = X + (x_row.to(gl.int64) * ldx + x_unit * 32 + x_at)
    x_live = (token < m) & (axis(1, WN, LX6, 6) < WN)
    x_slot = column // TOKENS

    none = gl.zeros([WK, WN, 32, RT, NB], gl.float32, layout=L)
    no_sum = gl.zeros([WK, WN, 32, 1, NB], gl.float32, layout=L)
    factor = gl.load(GLOBAL) if GLOBAL_OP else unit
    if WAIT:
        gdc_wait()
    place, keep = places(Y, YROW, tokens, m, n, NB, RT, WK, WN, TOKENS, ROUTED, GATE)
    if STEPS == 1:  # the inputs of a warp, and their sums, stay in its registers
        b = activations(x_ptr, x_unit, x_group, x_slot, x_live, 0, STEP, SET, GROUP, PAIR, UNITS, EXACT)
        if SUMS:
            bt = sums_of_x(b, no_sum, U0, SPAN, STEP, PAIR, LX, HALF)
        else:
            bt = b
    u0 = unit * (1.0 / U0)
    u1 = unit * (1.0 / U1)
    for turn in range(first, end, stride * TURNS):
        bias = biases(BIAS_PTR, turn, n, RT, NB, WK, WN, TOKENS) if HAS_BIAS else factor
        y0 = none
        y1 = none
        y2 = none
        y3 = none
        for many in range(0, STEPS, BUFFERS // TURNS):
            if AHEAD == 1:
                later = fetch(
                    W, S, SUPER, A, SMIN, turn + (many + 1) // STEPS * stride, (many + 1) % STEPS * STEP, end, w_far, w_near,
                    w_live, w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
                )  # fmt: skip
            if STEPS > 1:
                x = activations(x_ptr, x_unit, x_group, x_slot, x_live, many * STEP, STEP, SET, GROUP, PAIR, UNITS, EXACT)
                if SUMS:
                    xt = sums_of_x(x, no_sum, U0, SPAN, STEP, PAIR, LX, HALF)
                else:
                    xt = x
            else:
                x = b
                xt = bt
            y0, y1, y2, y3 = multiply(
                words, scales, supers, addends, lows, x, xt, y0, y1, y2, y3, none, top, LW, LX, STEP, SPAN, PAIR, FLUSHES,
                PARITIES, KIND, BITS, SCALE, ADD, HALF, FP8, SCALED, RAW, SUMS, OFFSET, U0, U1,
            )  # fmt: skip
            if AHEAD != 1:
                later = fetch(
                    W, S, SUPER, A, SMIN, turn + (many + BUFFERS) // STEPS * stride, (many + BUFFERS) % STEPS * STEP, end, w_far,
                    w_near, w_live, w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
                )  # fmt: skip
            words, scales, supers, addends, lows = later
            if (AHEAD == 2) and (STEPS > 1):
                x = activations(x_ptr, x_unit, x_group, x_slot, x_live, (many + 1) * STEP, STEP, SET, GROUP, PAIR, UNITS, EXACT)
                if SUMS:
                    xt = sums_of_x(x, no_sum, U0, SPAN, STEP, PAIR, LX, HALF)
                else:
                    xt = x
                y0, y1, y2, y3 = multiply(
                    words2, scales2, supers2, addends2, lows2, x, xt, y0, y1, y2, y3, none, top, LW, LX, STEP, SPAN, PAIR,
                    FLUSHES, PARITIES, KIND, BITS, SCALE, ADD, HALF, FP8, SCALED, RAW, SUMS, OFFSET, U0, U1,
                )  # fmt: skip
                words2, scales2, supers2, addends2, lows2 = fetch(
                    W, S, SUPER, A, SMIN, turn + (many + 3) // STEPS * stride, (many + 3) % STEPS * STEP, end, w_far, w_near,
                    w_live, w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
                )  # fmt: skip
        y = gl.join(gl.join(y0 * u0, y2 * u1), gl.join(y1 * u0, y3 * u1))  # [..., row + 8, column + 1]
        store(place, keep, y, bias, factor, turn, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS, RT, NB, WK, WN, TOKENS, GATE)
        if TURNS == 2:  # the same from the other buffer
            turn2 = turn + stride
            if turn2 < end:
                bias = biases(BIAS_PTR, turn2, n, RT, NB, WK, WN, TOKENS) if HAS_BIAS else factor
                y0, y1, y2, y3 = multiply(
                    words2, scales2, supers2, addends2, lows2, b, bt, none, none, none, none, none, top, LW, LX, STEP, SPAN,
                    PAIR, FLUSHES, PARITIES, KIND, BITS, SCALE, ADD, HALF, FP8, SCALED, RAW, SUMS, OFFSET, U0, U1,
                )  # fmt: skip
                words2, scales2, supers2, addends2, lows2 = fetch(
                    W, S, SUPER, A, SMIN, turn2 + 2 * stride, 0, end, w_far, w_near, w_live, w_unit, w_tile, s_unit, s_slot,
                    s_group, s_tile, s_lane, s_down, s_live, top, W_PLACE, PLACE,
                )  # fmt: skip
                y = gl.join(gl.join(y0 * u0, y2 * u1), gl.join(y1 * u0, y3 * u1))
                store(place, keep, y, bias, factor, turn2, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS, RT, NB, WK, WN, TOKENS, GATE)


@gluon.jit(do_not_specialize=["m", "top", "TILES"])
def fragment_kernel(
    Y, X, BIAS_PTR, W, S, SUPER, A, SMIN, GLOBAL, EXPERT, FIRST, LAST, COUNT, XROW, YROW,
    m, n, ldx, divisor, unit, top, TILES,
    UNITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr,
    ADD: gl.constexpr, PER: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HALF: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, STEP: gl.constexpr, SET: gl.constexpr,
    TOKENS: gl.constexpr, AHEAD: gl.constexpr, SCALED: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr,
    FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x · wᵀ + bias. A turn is WN · RT tiles of 16 rows by NB blocks of 8 columns.

    UNITS   units of 64 inputs in a row            TILES  tiles of 16 rows in the weight
    GROUPS  scale groups in a row                  GROUP  inputs that share a scale: 16, 32 or a multiple of 64
    X       pairs of activations (int32), rows of ldx pairs, at least 32 · UNITS of them, the tail zero
    unit    what multiplies the sums at the end beside the decoder's power of two; top: the largest E8M0 byte
    STEP    units loaded at once: a power of two; whole groups or a whole part of one, and of whole sets when SET > 1
    SCALED  weights are finished before the product (one rounding at most), and one accumulator takes all groups; SET = 1
    AHEAD   when words are asked for: 1 before the products of the step before, 0 behind them (fewer registers), 2 a step earlier:
            two buffers take turns (steps, where a warp's inputs are more than one)
    SET     groups that share an accumulator, each with TOKENS columns: 1, 2, 4 or 8, and so is TOKENS; NB = 1 unless SET = 1,
            TOKENS = 8
    ROUTED  a stack of weights: COUNT blocks of tokens; EXPERT, FIRST, LAST give each its expert and span of pairs, XROW and
            YROW each pair its rows of x and y. All turns of all blocks are dealt out evenly, in order, to the programs
    FP8     the device converts pairs of 8-bit floats in one instruction (capability 8.9)
    GATE    rows 2 j and 2 j + 1 are gate and up of output j: 0 as they are, else the activation (experts.ACTIVATIONS)
    """
    if PDL:
        gdc_launch_dependents()
    if ROUTED:
        if PDL:
            gdc_wait()  # which expert's words to read is known only now
        turns = (TILES + (WN * RT - 1)) // (WN * RT)
        total = gl.load(COUNT).to(gl.int64) * turns
        low = (total * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
        high = (total * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
        for block in range(low // turns, (high + turns - 1) // turns):
            expert = gl.load(EXPERT + block).to(gl.int64)
            walk(
                Y, X, BIAS_PTR + expert * n, W + expert * TILES * (UNITS * 32 * BITS),
                S + expert * TILES * (GROUPS * 8 if paired(SCALE) else GROUPS * 16),
                SUPER + expert * TILES * (GROUPS // PER * 16),
                A + expert * TILES * (GROUPS * 8 if paired(SCALE) else GROUPS * 16),
                SMIN + expert * TILES * (GROUPS // PER * 16), GLOBAL + expert, XROW, YROW,
                gl.maximum(low - block * turns, 0) * (WN * RT),
                gl.minimum(gl.minimum(high - block * turns, turns) * (WN * RT), TILES), WN * RT,
                gl.load(FIRST + block).to(gl.int32), gl.load(LAST + block).to(gl.int32), n, ldx, divisor, unit, top,
                UNITS, GROUPS, GROUP, KIND, BITS, SCALE, ADD, PER, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WK, WN, STEP, SET,
                TOKENS, AHEAD, SCALED, ROUTED, GATE, FP8, False,
            )  # fmt: skip
    else:
        walk(
            Y, X, BIAS_PTR, W, S, SUPER, A, SMIN, GLOBAL, XROW, YROW, gl.program_id(0) * (WN * RT), TILES,
            gl.num_programs(0) * (WN * RT), gl.program_id(1) * (TOKENS * NB), m, n, ldx, divisor, unit, top,
            UNITS, GROUPS, GROUP, KIND, BITS, SCALE, ADD, PER, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, RT, NB, WK, WN, STEP, SET,
            TOKENS, AHEAD, SCALED, ROUTED, GATE, FP8, PDL,
        )  # fmt: skip
