"""Products of a block of inputs, stored scales to numbers, and sums scaled into a tile's
accumulators (mma/kernel.py).

A block is 16 inputs, one operand. Sums count in a power of two that the decoder leaves in the
operand (`Plan.unit_low` in rows g, `unit_high` in rows g + 8), and so does Σ x, so that scales and
addends need only multiply-adds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E2M1, E4M3_NORMAL, E8M0_NORMAL, F16_PAIR, SMALL
from ..portable.decode_tile import MIN, NONE, ZERO
from .operands import halves_f32, mma, pair_f16, pieces, scale_f32, spread_bytes, twice_f16, twice_high, twice_low, two_f16


@gluon.jit
def product(a, b0, b1, c, P: gl.constexpr):
    """c + a · b for one block of 16 inputs, all row tiles by all column blocks; a and c are four
    registers.
    """
    LW: gl.constexpr = gl.SliceLayout(4, P.layout)
    LX: gl.constexpr = gl.SliceLayout(3, P.layout)
    like = c[0]
    b0 = gl.expand_dims(gl.convert_layout(b0, LX), 3)
    b1 = gl.expand_dims(gl.convert_layout(b1, LX), 3)
    a0, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a[0], LW), 4), like)
    a1, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a[1], LW), 4), like)
    a2, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a[2], LW), 4), like)
    a3, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(a[3], LW), 4), like)
    b0, _ = gl.broadcast(b0, like)
    b1, _ = gl.broadcast(b1, like)
    return mma((a0, a1, a2, a3), b0, b1, c, P.half)


@gluon.jit
def sums_of_x(x, zeros, P: gl.constexpr):
    """Σ x · unit_low of each accumulator of a step, for a lane's even and odd column: products with
    an operand of ones.
    """
    LX: gl.constexpr = gl.SliceLayout(3, P.layout)
    BLOCKS: gl.constexpr = 2 * P.step if P.pair else 4 * P.step
    EACH: gl.constexpr = P.span // 2 if P.pair else P.span
    out = ()
    t = (zeros, zeros, zeros, zeros)
    for i in gl.static_range(BLOCKS):
        b0 = gl.expand_dims(gl.convert_layout(x[2 * i], LX), 3)
        b1 = gl.expand_dims(gl.convert_layout(x[2 * i + 1], LX), 3)
        o = gl.full_like(b0, 0x3C003C00 if P.half else 0x3F803F80)
        t = mma((o, o, o, o), b0, b1, t, P.half)
        if ((i + 1) % EACH == 0) or (i + 1 == BLOCKS):
            out = out + (t[0] * P.unit_low, t[1] * P.unit_low)  # type: ignore[assignment] # Triton unrolls the loop
            t = (zeros, zeros, zeros, zeros)
    return out


@gluon.jit
def stored(weight, at, tile, end, unit, top, P: gl.constexpr):
    """What memory holds of a lane's groups: scale, super scale, addend, super minimum. What a
    format lacks is the scale again, never used. Where P.paired, rows g and g + 8 come in one
    number; `top` is the E8M0 byte past the end.

    The group is (unit · 4 // span) · set + slot + group, its tile is tile + s_tile; `s_group` and
    `s_down` are constants a register, and added last.
    """
    WIDTH: gl.constexpr = 8 if P.paired else 16  # a group's elements of the scales
    far = unit * 4 // P.span * P.set + at.s_slot
    live = at.s_live & (at.s_tile + tile < end)
    if not P.full:
        live = live & (far + at.s_group < P.groups)
    rows = tile.to(gl.int64) * (P.groups * WIDTH)
    base = rows + ((at.s_tile // P.row_tiles * P.row_tiles * P.groups + far) * WIDTH + at.s_lane // 4 * (WIDTH // 8))
    near = (at.s_tile % P.row_tiles * P.groups + at.s_group) * WIDTH + at.s_down
    if P.scale == E8M0_NORMAL:
        s = gl.load(weight.scales + base + near, mask=live, other=(top * 0x0101).to(gl.int16))
    else:
        s = gl.load(weight.scales + base + near, mask=live, other=0)
    if (P.scale == SMALL) or (P.addend == MIN):
        up_at = (tile + at.s_tile) * (P.groups // P.per_super) + (far + at.s_group) // P.per_super
        up_at = up_at * 16 + at.s_lane // 4 * 2 + at.s_down
        up = gl.load(weight.super_scales + up_at, mask=live, other=0) if P.scale == SMALL else s
        low = gl.load(weight.super_minimums + up_at, mask=live, other=0) if P.addend == MIN else s
    else:
        up = s
        low = s
    a = gl.load(weight.addends + base + near, mask=live, other=0) if P.addend != NONE else s
    return s, up, a, low


@gluon.jit
def _pair_f32(pair, SCALE: gl.constexpr, FP8: gl.constexpr):
    """Two stored scales of a number as float32, row g first."""
    if SCALE == F16_PAIR:
        return halves_f32(pair)
    elif SCALE == E4M3_NORMAL:
        return halves_f32(pair_f16(pair, FP8))
    elif SCALE == E8M0_NORMAL:  # a byte is the exponent field
        both = spread_bytes(pair) << 7
        return (both << 16).to(gl.float32, bitcast=True), (both & -65536).to(gl.float32, bitcast=True)
    else:
        return (pair << 16).to(gl.float32, bitcast=True), (pair & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _addends_f32(pair, SCALE: gl.constexpr, ADD: gl.constexpr, FP8: gl.constexpr):
    """Two zero points (int16) or biases (as the scales) of a register as float32."""
    if ADD == ZERO:
        return ((pair << 16) >> 16).to(gl.float32), (pair >> 16).to(gl.float32)
    else:
        return _pair_f32(pair, SCALE, FP8)


@gluon.jit
def terms(step, P: gl.constexpr):
    """Stored scales, super scales, addends and super minimums of a step to float32 scales and
    addends, row g before row g + 8.
    """
    N: gl.constexpr = P.flushes * P.parities * 2
    if P.paired:
        s0, s1 = _pair_f32(step.scales, P.scale, P.fp8)
        both = _zip(pieces(s0, N // 2), pieces(s1, N // 2), N // 2)
        if P.addend == NONE:
            return both, both
        else:
            a0, a1 = _addends_f32(step.addends, P.scale, P.addend, P.fp8)
            return both, _zip(pieces(a0, N // 2), pieces(a1, N // 2), N // 2)
    else:
        s = scale_f32(step.scales, P.scale)
        if P.scale == SMALL:
            s = s * step.supers.to(gl.float32)
        if P.addend == NONE:
            a = s
        elif P.addend == MIN:
            a = -step.addends.to(gl.float32) * step.lows.to(gl.float32)
        else:
            a = step.addends.to(gl.float32)
        shape: gl.constexpr = s.shape[:-2] + [N]
        return pieces(gl.reshape(s, shape), N), pieces(gl.reshape(a, shape), N)


@gluon.jit
def terms_half(s, a, top, P: gl.constexpr):
    """The same as x's own type in both halves of a register, for weights that are finished before
    the product.

    E8M0 under an E2M1 operand that counts 2^-14, bfloat16 2^-126: 2^(b − top + 15), 2^(b − top +
    127), one multiply-add from two bytes to two halves (top is the largest byte). E4M3, float16
    only: as it is; under E2M1 the products count 2^-14, and all of them are whole multiples of
    float16's least number.
    """
    N: gl.constexpr = P.flushes * 2
    if P.paired:
        if P.scale == E4M3_NORMAL:
            pair = pair_f16(s, P.fp8)
        elif (P.scale == E8M0_NORMAL) and (P.kind == E2M1):
            if P.half:
                pair = spread_bytes(s) * 0x0400 + (30 - top) * 0x04000400
            else:
                pair = spread_bytes(s) * 0x0080 + (254 - top) * 0x00800080
        elif P.scale == E8M0_NORMAL:
            s0, s1 = _pair_f32(s, P.scale, P.fp8)
            pair = two_f16(s0, s1)
        else:
            pair = s
        both = _zip(pieces(twice_low(pair), N // 2), pieces(twice_high(pair), N // 2), N // 2)
        if P.addend == NONE:
            return both, both
        elif P.addend == ZERO:
            a0, a1 = _addends_f32(a, P.scale, P.addend, P.fp8)
            return both, _zip(pieces(twice_f16(a0), N // 2), pieces(twice_f16(a1), N // 2), N // 2)
        else:
            return both, _zip(pieces(twice_low(a), N // 2), pieces(twice_high(a), N // 2), N // 2)
    else:
        shape: gl.constexpr = s.shape[:-2] + [N]
        both = pieces(gl.reshape(twice_f16(scale_f32(s, P.scale)), shape), N)
        if P.addend == NONE:
            return both, both
        else:
            return both, pieces(gl.reshape(twice_f16(a.to(gl.float32)), shape), N)


@gluon.jit
def _zip(a, b, N: gl.constexpr):
    """a0, b0, a1, b1, …"""
    out = ()
    for i in gl.static_range(N):
        out = out + (a[i], b[i])  # type: ignore[assignment] # Triton unrolls the loop
    return out


@gluon.jit
def _spread(v, like, LW: gl.constexpr):
    """A value a lane and row tile, over the column blocks of `like`."""
    v, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(v, LW), 4), like)
    return v


@gluon.jit
def initial_sum(t, like, ZEROES: gl.constexpr, OFFSET: gl.constexpr):
    """What an accumulator begins with: −ZEROES · Σ x where the operand lacks the implicit zero of
    `int` codes, else 0.
    """
    if OFFSET:
        c, _ = gl.broadcast(t * -ZEROES, like)
        return c
    else:
        return like


@gluon.jit
def _scaled(y, c, t, s, a, ADD: gl.constexpr):
    """y + c · s and the addend's part, t = Σ x in the same unit as c."""
    if ADD == NONE:
        return gl.fma(c, s, y)
    else:
        t, _ = gl.broadcast(t, c)
        if ADD == ZERO:
            return gl.fma(gl.fma(-a, t, c), s, y)
        else:
            return gl.fma(c, s, gl.fma(a, t, y))


@gluon.jit
def add_scaled(y, c, t0, t1, scale, addend, FLUSH: gl.constexpr, P: gl.constexpr):
    """y plus the sums c of the step's accumulator FLUSH, scaled: rows g (0, 1) and g + 8 (2, 3),
    even and odd columns.
    """
    L: gl.constexpr = gl.SliceLayout(4, P.layout)
    HIGH: gl.constexpr = P.unit_high / P.unit_low
    E: gl.constexpr = FLUSH * P.parities * 2
    O: gl.constexpr = E + P.parities * 2 - 2  # the odd column's group
    return (
        _scaled(y[0], c[0], t0, _spread(scale[E], c[0], L), _spread(addend[E], c[0], L), P.addend),
        _scaled(y[1], c[1], t1, _spread(scale[O], c[0], L), _spread(addend[O], c[0], L), P.addend),
        _scaled(y[2], c[2], t0, _spread(scale[E + 1], c[0], L), _spread(addend[E + 1] * HIGH, c[0], L), P.addend),
        _scaled(y[3], c[3], t1, _spread(scale[O + 1], c[0], L), _spread(addend[O + 1] * HIGH, c[0], L), P.addend),
    )


@gluon.constexpr_function
def second_chain(block, pair):
    """Whether a block belongs to the second of two groups that share x and so goes into the second
    accumulator; a group is `pair` blocks, 0: none share.
    """
    return pair > 0 and block // pair % 2 == 1


@gluon.constexpr_function
def x_register(block, pair):
    """The first of the two registers of x that a block of weights meets; groups of `pair` blocks
    share them two by two.
    """
    return 2 * (block // (2 * pair) * pair + block % pair if pair else block)


@gluon.jit
def x_index(column, t, word, half, GROUP: gl.constexpr, PAIR: gl.constexpr, LANES: gl.constexpr):
    """Of a lane's 4 words and 2 halves a unit: where in x (in pairs of inputs), how many units
    further on, and the group within the unit (the pair of groups within two units).

    Words 2 b and 2 b + 1 of a half meet block b: pairs 2 t and 2 t + 1 of its eight for groups of
    16, else pairs 4 t to 4 t + 3 of sixteen serve two blocks; in lane order pairs t and t + 4.
    Where groups share x, a lane reads what its own column has, from two units.
    """
    own = column % 2
    if LANES:
        return t + half * 16 + (word // 2) * 8 + word % 2 * 4, half * 0, half * 2 + word // 2
    elif PAIR == 0:
        if GROUP == 16:
            return t * 2 + half * 16 + (word // 2) * 8 + word % 2, half * 0, half * 2 + word // 2
        else:
            return t * 4 + half * 16 + word, half * 0, half * 2
    elif GROUP == 16:
        return t * 2 + (word // 2) * 16 + own * 8 + word % 2, half, half * 2 + word // 2
    elif GROUP == 32:
        return t * 4 + own * 16 + word, half, half
    else:
        return t * 4 + half * 16 + word, own * (GROUP // 64), half * 0


@gluon.constexpr_function
def x_unit(v, group, pair):
    """The unit of a step that begins the v-th unit of x in registers."""
    if not pair:
        return v
    if group < 64:
        return 2 * v
    whole = group // 64
    return v // whole * 2 * whole + v % whole


@gluon.jit
def activations(at, base, P: gl.constexpr):
    """The B operands of a step, two registers a block of 16 inputs: x where the column holds the
    block's group, else 0.
    """
    b = ()
    for v in gl.static_range(P.step // 2 if P.pair else P.step):
        live = at.live
        if P.pair:
            live = live & ((at.group + v * 64 // P.group) % (P.set // 2) == at.slot // 2)
        elif (P.set > 1) or (P.group < 64 * P.step):
            live = live & (((at.group + 4 * v) * 16 // P.group) % P.set == at.slot)
        else:
            live = live & (at.slot == 0)
        if not P.exact:
            live = live & (at.unit + (base + x_unit(v, P.group, P.pair)) < P.units)
        low, high = gl.split(gl.load(at.pointer + (base + x_unit(v, P.group, P.pair)) * 32, mask=live, other=0))
        b = b + pieces(low, 4) + pieces(high, 4)
    return b
