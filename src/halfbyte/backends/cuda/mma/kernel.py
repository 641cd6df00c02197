"""The product for 1 to 64 tokens on every NVIDIA GPU, Hopper included: codes are decoded in
registers into the operand of `mma` (docs/design/cuda.md). From 17 tokens on Hopper takes
`wgmma/kernel.py` where that is faster.

    acc[row, token] += scale[row, g] · Σ_{j in g} element[row, j] · x[token, j]

The weight is in *fragment order* (`order.to_fragments`): one 32-bit word of a lane is its part of
the A operand of one mma.m16n8k16, eight codes of rows g and g + 8, and the words of 64 inputs are
contiguous, 16 bytes a lane. One load gives four operands, a few logic operations make the four
half2 registers of each, and one instruction multiplies them with eight tokens. The inputs of a lane
are 16 contiguous bytes of x. There is no shared memory, no barrier before the end and no dense
tile.

    a program                    one warp                       one product (mma.m16n8k16)
    rows ↓   inputs →            row_tiles tiles of 16 rows     lane 4 g + t: rows g and g + 8,
    ┌────┬────┬─ ─┬────┐         columns blocks of 8 tokens     inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    │w 0 │w 1 │   │    │ row     step units of 64 inputs
    ├────┼────┼─ ─┼────┤ warps   a load                         columns: `set` groups of `tokens` tokens
    └────┴────┴─ ─┴────┘
      input warps

With fewer than eight tokens a column holds the x of one group and zeros elsewhere, so `set` groups
share an accumulator without a scale between them, and each lane scales the groups of its own
columns only. At m = 1 groups 2 j and 2 j + 1 share the registers of x: the product with the words
of group 2 j is valid in the even columns alone, that with group 2 j + 1 in the odd ones, so each
group has its own accumulators and contributes its columns.

When one step covers the inputs of a warp, their x stays in registers for all tiles of the program.
The next words are loaded while the current ones are multiplied, and the first words before the
previous kernel has ended (programmatic dependent launch: x depends on that kernel, weights do not).
The partial sums of a tile are added at its end, in order. Products are exact and sums float32:
scales multiply float32 sums, so E8M0 scales outside float16's range cost nothing. Zero points and
biases multiply Σ x of their group, one more product with an operand of ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .accumulate import (
    activations,
    add_scaled,
    initial_sum,
    product,
    second_chain,
    stored,
    sums_of_x,
    terms,
    terms_half,
    x_index,
    x_register,
)
from .epilogue import biases, output_rows, store, token_scales
from .operands import axis, decode_bytes, decode_lanes, decode_scaled, decode_word, own_words, pieces, table_entry
from .plan import Fetched, Span, Weight


class WeightIndex(NamedTuple):
    """Indices of a lane's words (`w_`, of a second plane `v_`) and scales (`s_`), and masks
    (`_live`). `w_far` differs between lanes, `w_near` between the registers of a lane only; an
    address is the sum of both.
    """

    w_far: Any
    w_near: Any
    w_live: Any
    v_far: Any
    v_near: Any
    w_unit: Any
    w_tile: Any
    s_unit: Any
    s_slot: Any
    s_group: Any
    s_tile: Any
    s_lane: Any
    s_down: Any
    s_live: Any


class InputIndex(NamedTuple):
    """Where a lane's activations are: pointer, unit, group within it, mask, and the slot of its
    column: which of the `set` groups that share an accumulator.
    """

    pointer: Any
    unit: Any
    group: Any
    live: Any
    slot: Any


class Inputs(NamedTuple):
    """The B operands of a step, two registers a block of 16 inputs, Σ x of each accumulator (the
    operands again where P.sums is not set), and the lane's entry of a table, if there is one.
    """

    x: Any
    sums: Any
    entry: Any


@gluon.jit
def word_index(W: gl.constexpr, QUADS: gl.constexpr, WIDTH: gl.constexpr, P: gl.constexpr):
    """Of words [input warps, row warps, 32, row tiles, step · QUADS, WIDTH]: far, near, live, unit
    and tile.
    """
    w_tile = axis(1, P.row_warps, W, 6) * P.row_tiles + axis(3, P.row_tiles, W, 6)
    w_unit = axis(0, P.input_warps, W, 6) * P.warp_units + axis(4, P.step * QUADS, W, 6) // QUADS
    w_far = axis(1, P.row_warps, W, 6) * P.row_tiles * P.units + axis(0, P.input_warps, W, 6) * P.warp_units
    w_far = w_far * (32 * WIDTH * QUADS) + axis(2, 32, W, 6) * WIDTH
    w_near = axis(3, P.row_tiles, W, 6) * P.units * QUADS + axis(4, P.step * QUADS, W, 6)
    w_near = w_near * (32 * WIDTH) + axis(5, WIDTH, W, 6)
    # The first term is always true: it gives the mask an axis of lanes.
    w_live = (axis(2, 32, W, 6) < 32) & (w_unit < P.units)
    return w_far, w_near, w_live, w_unit, w_tile


@gluon.jit
def weight_index(P: gl.constexpr):
    """Of words (`word_index`), and of scales [input
    warps, row warps, 32, row tiles, groups of a step · parities of a column, rows g and g + 8], the
    last axis missing where P.paired.
    """
    w_far, w_near, w_live, w_unit, w_tile = word_index(P.w_layout, P.quads, P.width, P)
    v_far, v_near = w_far, w_near
    if P.more:
        v_far, v_near, _, _, _ = word_index(P.v_layout, 1, P.more, P)
    S: gl.constexpr = gl.SliceLayout(5, P.s_layout) if P.paired else P.s_layout
    RANK: gl.constexpr = 5 if P.paired else 6
    s_down = axis(4, P.flushes * P.parities, S, 5) * 0 if P.paired else axis(5, 2, S, 6)
    s_lane = axis(2, 32, S, RANK)
    s_set = axis(4, P.flushes * P.parities, S, RANK)
    s_slot = s_lane % 4 * 2 // P.tokens
    s_group = s_set // P.parities * P.set + s_set % P.parities
    s_unit = axis(0, P.input_warps, S, RANK) * P.warp_units
    s_tile = axis(1, P.row_warps, S, RANK) * P.row_tiles + axis(3, P.row_tiles, S, RANK)
    s_live = s_slot + s_set % P.parities < P.set
    return WeightIndex(
        w_far, w_near, w_live, v_far, v_near, w_unit, w_tile, s_unit, s_slot, s_group, s_tile, s_lane, s_down, s_live
    )


@gluon.jit
def input_index(x, blocks, span, ldx, P: gl.constexpr):
    """Activations [input warps, row warps, 32, columns, 4 words, 2 halves] of a unit."""
    L: gl.constexpr = P.x_layout
    column = axis(2, 32, L, 6) // 4
    token = span.first_token + axis(3, P.columns, L, 6) * 8 + column % P.tokens
    at, far, group = x_index(column, axis(2, 32, L, 6) % 4, axis(4, 4, L, 6), axis(5, 2, L, 6), P.group, P.pair, P.plane > 0)
    unit = axis(0, P.input_warps, L, 6) * P.warp_units + far
    row = token
    if P.routed:
        row = gl.load(blocks.x_row + token, mask=token < span.end_token, other=0)
    pointer = x + (row.to(gl.int64) * ldx + unit * 32 + at)
    # The second term is always true: it gives the mask an axis of row warps.
    live = (token < span.end_token) & (axis(1, P.row_warps, L, 6) < P.row_warps)
    return InputIndex(pointer, unit, group, live, column // P.tokens)


@gluon.jit
def fetch(weight, at, tile, base, end, top, P: gl.constexpr):
    """Words and stored scales of a step: units from `base` on of the row tiles from `tile` on."""
    live = at.w_live & (at.w_tile + tile < end)
    if not P.exact:
        live = live & (at.w_unit + base < P.units)
    far = tile.to(gl.int64) * P.units + base
    words = gl.load(weight.words + far * (32 * P.width * P.quads) + at.w_far + at.w_near, mask=live, other=0)
    more = words
    if P.more:
        more = fetch_more(weight, at, far, tile, base, end, P)
    scales, supers, addends, lows = stored(weight, at, tile, end, at.s_unit + base, top, P)
    return Fetched(words, more, scales, supers, addends, lows)


@gluon.jit
def fetch_more(weight, at, far, tile, base, end, P: gl.constexpr):
    """Words of the second plane of a step."""
    _, _, live, unit, row = word_index(P.v_layout, 1, P.more, P)
    live = live & (row + tile < end)
    if not P.exact:
        live = live & (unit + base < P.units)
    return gl.load(weight.more + far * (32 * P.more) + at.v_far + at.v_near, mask=live, other=0)


@gluon.jit
def load_inputs(at, base, zeros, entry, P: gl.constexpr):
    """The activations of a step, and Σ x where the format needs it."""
    x = activations(at, base, P)
    if P.sums:
        return Inputs(x, sums_of_x(x, zeros, P), entry)
    else:
        return Inputs(x, x, entry)


@gluon.jit
def multiply(step, inputs, y, zeros, top, P: gl.constexpr):
    """y plus a step's products: codes decoded, multiplied with x, sums scaled. `zeros` are sums of
    0, of y's shape.
    """
    if P.scaled and P.plane:
        return multiply_table(step, inputs, y, P)
    elif P.scaled:
        return multiply_finished(step, inputs.x, y, top, P)
    else:
        return multiply_codes(step, inputs, y, zeros, P)


@gluon.jit
def multiply_finished(step, x, y, top, P: gl.constexpr):
    """Codes are decoded and scaled in x's type before the product, so one accumulator takes every
    group.
    """
    L: gl.constexpr = gl.SliceLayout(4, P.layout)
    N: gl.constexpr = P.step * P.bits  # words a lane
    words = pieces(gl.reshape(step.words, step.words.shape[:4] + [N]), N)
    scale, addend = terms_half(step.scales, step.addends, top, P)
    for i in gl.static_range(4 * P.step):
        s0 = gl.convert_layout(scale[i // P.span * 2], L)
        s1 = gl.convert_layout(scale[i // P.span * 2 + 1], L)
        z0 = gl.convert_layout(addend[i // P.span * 2], L)
        z1 = gl.convert_layout(addend[i // P.span * 2 + 1], L)
        a = decode_scaled(gl.convert_layout(words[i], L), s0, s1, z0, z1, P)
        y = product(a, x[2 * i], x[2 * i + 1], y, P)
    return y


@gluon.jit
def multiply_table(step, inputs, y, P: gl.constexpr):
    """`multiply_finished` of tables whose entries only float32 holds."""
    L: gl.constexpr = gl.SliceLayout(4, P.layout)
    N: gl.constexpr = P.step * P.plane  # words a lane
    words = pieces(gl.reshape(step.words, step.words.shape[:4] + [N]), N)
    scale, _ = terms(step, P)
    for i in gl.static_range(4 * P.step):
        s0 = gl.convert_layout(scale[i // P.span * 2], L)
        s1 = gl.convert_layout(scale[i // P.span * 2 + 1], L)
        a = decode_lanes(own_words(words, i, P.plane, P) + inputs.entry + (s0, s1), i % 4, P)
        y = product(a, inputs.x[2 * i], inputs.x[2 * i + 1], y, P)
    return y


@gluon.jit
def multiply_codes(step, inputs, y, zeros, P: gl.constexpr):
    """Codes are decoded and multiplied; every `span` blocks the sums are scaled and added to y. `d`
    is the accumulator of the second of two groups that share registers of x: only its odd columns
    are valid, and of `c` then only the even ones.
    """
    ZERO: gl.constexpr = 2.0 ** (P.bits - 1)  # the implicit zero of `int` codes
    HIGH: gl.constexpr = P.unit_high / P.unit_low
    N: gl.constexpr = P.step * (P.plane if P.plane else P.bits)  # words a lane
    x = inputs.x
    more = ()
    if P.more:
        more = pieces(gl.reshape(step.more, step.more.shape[:4] + [P.step * P.more]), P.step * P.more)
    words = pieces(gl.reshape(step.words, step.words.shape[:4] + [N]), N)
    scale, addend = terms(step, P)
    t0 = zeros
    t1 = zeros
    for i in gl.static_range(4 * P.step):
        if i % P.span == 0:
            c = (zeros, zeros, zeros, zeros)
            d = (zeros, zeros, zeros, zeros)
            if P.sums:
                t0 = inputs.sums[i // P.span * 2]
                t1 = inputs.sums[i // P.span * 2 + 1]
                c = (initial_sum(t0, zeros, ZERO, P.offset), initial_sum(t1, zeros, ZERO, P.offset),
                     initial_sum(t0, zeros, ZERO * HIGH, P.offset), initial_sum(t1, zeros, ZERO * HIGH, P.offset))  # fmt: skip
            if P.pair:
                d = (zeros, c[1], zeros, c[3])
        if P.plane:
            a = decode_lanes(own_words(words, i, P.plane, P) + own_words(more, i, P.more, P) + inputs.entry, i % 4, P)
        elif P.bits == 8:
            a = decode_bytes(words[2 * i], P.decoder) + decode_bytes(words[2 * i + 1], P.decoder)
        else:
            a = decode_word(words[i], P.decoder)
        if second_chain(i, P.pair):
            d = product(a, x[x_register(i, P.pair)], x[x_register(i, P.pair) + 1], d, P)
        else:
            c = product(a, x[x_register(i, P.pair)], x[x_register(i, P.pair) + 1], c, P)
        if ((i + 1) % P.span == 0) or (i + 1 == 4 * P.step):
            if P.pair:
                c = (c[0], d[1], c[2], d[3])
            y = add_scaled(y, c, t0, t1, scale, addend, i // P.span, P)
    return y


@gluon.jit
def walk(y, x, weight, blocks, span, n, ldx, factors, top, P: gl.constexpr, WAIT: gl.constexpr):
    """The row tiles of `span` for its tokens."""
    at = weight_index(P)
    now = fetch(weight, at, span.first, 0, span.end, top, P)
    if P.ahead == 2:
        tile = span.first + (span.stride if P.steps == 1 else 0)
        second = fetch(weight, at, tile, 0 if P.steps == 1 else P.step, span.end, top, P)
    x_at = input_index(x, blocks, span, ldx, P)
    zeros = gl.zeros([P.input_warps, P.row_warps, 32, P.row_tiles, P.columns], gl.float32, layout=P.layout)
    zero_sum = gl.zeros([P.input_warps, P.row_warps, 32, 1, P.columns], gl.float32, layout=P.layout)
    factor = gl.load(weight.global_scale) if P.global_op else factors.unit
    entry = table_entry(weight.table, P)
    if WAIT:
        gdc_wait()
    rows, keep = output_rows(y, blocks, span, n, P)
    x_scale = token_scales(weight.x_scales, span, P) if P.x_scaled else factor
    if P.steps == 1:  # the inputs of a warp, and their sums, stay in its registers
        inputs = load_inputs(x_at, 0, zero_sum, entry, P)
    u0 = factors.unit * (1.0 / P.unit_low)
    u1 = factors.unit * (1.0 / P.unit_high)
    for tile in range(span.first, span.end, span.stride * P.unroll):
        bias = biases(weight.bias, tile, n, P) if P.has_bias else factor
        acc = (zeros, zeros, zeros, zeros)
        for step in range(0, P.steps, P.buffers // P.unroll):
            if P.ahead == 1:
                later = fetch(
                    weight, at, tile + (step + 1) // P.steps * span.stride, (step + 1) % P.steps * P.step, span.end, top, P
                )
            if P.steps > 1:
                inputs = load_inputs(x_at, step * P.step, zero_sum, entry, P)
            acc = multiply(now, inputs, acc, zeros, top, P)
            if P.ahead != 1:
                then = step + P.buffers
                later = fetch(weight, at, tile + then // P.steps * span.stride, then % P.steps * P.step, span.end, top, P)
            now = later
            if (P.ahead == 2) and (P.steps > 1):  # the other buffer
                inputs = load_inputs(x_at, (step + 1) * P.step, zero_sum, entry, P)
                acc = multiply(second, inputs, acc, zeros, top, P)
                then = step + 3
                second = fetch(weight, at, tile + then // P.steps * span.stride, then % P.steps * P.step, span.end, top, P)
        store(rows, keep, acc, u0, u1, bias, factor, x_scale, tile, n, factors.divisor, P)
        if P.unroll == 2:  # the next tile from the other buffer
            tile2 = tile + span.stride
            if tile2 < span.end:
                bias = biases(weight.bias, tile2, n, P) if P.has_bias else factor
                acc = multiply(second, inputs, (zeros, zeros, zeros, zeros), zeros, top, P)
                second = fetch(weight, at, tile2 + 2 * span.stride, 0, span.end, top, P)
                store(rows, keep, acc, u0, u1, bias, factor, x_scale, tile2, n, factors.divisor, P)


@gluon.jit
def weight_of(weight, expert, n, tiles, P: gl.constexpr):
    """The matrix of one expert in a stack."""
    scales = expert * tiles * (P.groups * 8 if P.paired else P.groups * 16)
    supers = expert * tiles * (P.groups // P.per_super * 16)
    units = expert * tiles * (P.units * 32)
    return Weight(
        weight.bias + expert * n,
        weight.words + units * (P.plane if P.plane else P.bits),
        weight.more + units * P.more,
        weight.table,
        weight.scales + scales,
        weight.super_scales + supers,
        weight.addends + scales,
        weight.super_minimums + supers,
        weight.global_scale + expert,
        weight.x_scales,
    )


@gluon.jit(do_not_specialize=["m", "top", "tiles"])
def fragment_kernel(y, x, weight, blocks, m, n, ldx, factors, top, tiles, plan: gl.constexpr):
    """y (m, n) = x · wᵀ + bias, `row_warps · row_tiles` tiles of 16 rows by `columns` blocks of 8
    columns an iteration.

    x       pairs of activations (int32), rows of ldx pairs, at least 32 · units of them, the tail
            zero
    weight  plan.Weight, of `tiles` tiles of 16 rows          factors  plan.Factors
    top     the largest E8M0 byte
    blocks  plan.TokenBlocks where plan.routed, else None. All iterations of all blocks are divided
            evenly, in order, among the programs
    plan    plan.Plan
    """
    P: gl.constexpr = plan.constants()
    if P.pdl:
        gdc_launch_dependents()
    EACH: gl.constexpr = P.row_warps * P.row_tiles
    if P.routed:
        if P.pdl:
            gdc_wait()  # which expert's words to read is known only now
        iterations = (tiles + (EACH - 1)) // EACH
        total = gl.load(blocks.count).to(gl.int64) * iterations
        low = (total * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
        high = (total * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
        for block in range(low // iterations, (high + iterations - 1) // iterations):
            one = weight_of(weight, gl.load(blocks.expert + block).to(gl.int64), n, tiles, P)
            first = gl.maximum(low - block * iterations, 0) * EACH
            end = gl.minimum(gl.minimum(high - block * iterations, iterations) * EACH, tiles)
            first_token = gl.load(blocks.first + block).to(gl.int32)
            end_token = gl.load(blocks.last + block).to(gl.int32)
            walk(y, x, one, blocks, Span(first, end, EACH, first_token, end_token), n, ldx, factors, top, P, False)
    else:
        span = Span(gl.program_id(0) * EACH, tiles, gl.num_programs(0) * EACH, gl.program_id(1) * (P.tokens * P.columns), m)
        walk(y, x, weight, blocks, span, n, ldx, factors, top, P, P.pdl)
