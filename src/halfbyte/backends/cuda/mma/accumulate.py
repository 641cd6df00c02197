"""Products of a block of inputs, stored scales to numbers, and sums scaled into a tile's accumulators: what fragments.py does.

A block is 16 inputs, one operand. Sums count in a power of two, UNIT, that the decoder leaves in the operand (rows g + 8: DOWN
times UNIT), and so does Σ x, so that nothing but multiply-adds is left for scales and addends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import BF16_PAIR, E2M1, E4M3_NORMAL, E8M0_NORMAL, F16_PAIR, SMALL
from ..portable.decode_tile import MIN, NONE, ZERO
from .operands import halves_f32, mma, pair_f16, pieces, scale_of, spread_bytes, twice_f16, twice_high, twice_low, two_f16


@gluon.jit
def product(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, LW: gl.constexpr, LX: gl.constexpr, HALF: gl.constexpr):
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
def sums_of_x(
    x, none, UNIT: gl.constexpr, SPAN: gl.constexpr, STEP: gl.constexpr, PAIR: gl.constexpr, LX: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Σ x · UNIT of each accumulator of a step, for a lane's even and odd column: products with an operand of ones."""
    BLOCKS: gl.constexpr = 2 * STEP if PAIR else 4 * STEP
    EACH: gl.constexpr = SPAN // 2 if PAIR else SPAN
    out = ()
    t0 = none
    t1 = none
    t2 = none
    t3 = none
    for i in gl.static_range(BLOCKS):
        b0 = gl.expand_dims(gl.convert_layout(x[2 * i], LX), 3)
        b1 = gl.expand_dims(gl.convert_layout(x[2 * i + 1], LX), 3)
        o = gl.full_like(b0, 0x3C003C00 if HALF else 0x3F803F80)
        t0, t1, t2, t3 = mma(o, o, o, o, b0, b1, t0, t1, t2, t3, HALF)
        if ((i + 1) % EACH == 0) or (i + 1 == BLOCKS):
            out = out + (t0 * UNIT, t1 * UNIT)  # type: ignore[assignment] # Triton unrolls the loop
            t0 = none
            t1 = none
            t2 = none
            t3 = none
    return out


@gluon.constexpr_function
def paired(scale):
    """True where rows g and g + 8 are read as one number."""
    return scale in (E4M3_NORMAL, E8M0_NORMAL, F16_PAIR, BF16_PAIR)


@gluon.jit
def stored(S, SUPER, A, SMIN, tile, end, unit, slot, group, over, lane, down, live, missing, PLACE: gl.constexpr):
    """What memory holds of a lane's groups: scale, super scale, addend, super minimum. What a format lacks is the scale again,
    never used. Where `paired`, rows g and g + 8 come in one number; `missing` is the E8M0 byte past the end.

    The group is (unit · 4 // SPAN) · SET + slot + group, its tile is tile + over; `group` and `down` are constants a register,
    and added last.
    """
    SPAN: gl.constexpr = PLACE[0][0]
    SET: gl.constexpr = PLACE[0][1]
    RT: gl.constexpr = PLACE[1][0]
    GROUPS: gl.constexpr = PLACE[1][1]
    SCALE: gl.constexpr = PLACE[1][2]
    ADD: gl.constexpr = PLACE[1][3]
    PER: gl.constexpr = PLACE[1][4]
    FULL: gl.constexpr = PLACE[1][5]
    WIDTH: gl.constexpr = 8 if paired(SCALE) else 16  # a group's elements of S
    far = unit * 4 // SPAN * SET + slot
    live = live & (over + tile < end)
    if not FULL:
        live = live & (far + group < GROUPS)
    at = tile.to(gl.int64) * (GROUPS * WIDTH) + ((over // RT * RT * GROUPS + far) * WIDTH + lane // 4 * (WIDTH // 8))
    near = (over % RT * GROUPS + group) * WIDTH + down
    if SCALE == E8M0_NORMAL:
        s = gl.load(S + at + near, mask=live, other=(missing * 0x0101).to(gl.int16))
    else:
        s = gl.load(S + at + near, mask=live, other=0)
    if (SCALE == SMALL) or (ADD == MIN):
        up_at = ((tile + over) * (GROUPS // PER) + (far + group) // PER) * 16 + lane // 4 * 2 + down
        up = gl.load(SUPER + up_at, mask=live, other=0) if SCALE == SMALL else s
        low = gl.load(SMIN + up_at, mask=live, other=0) if ADD == MIN else s
    else:
        up = s
        low = s
    a = gl.load(A + at + near, mask=live, other=0) if ADD != NONE else s
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
def terms(s, up, a, low, SCALE: gl.constexpr, ADD: gl.constexpr, FP8: gl.constexpr, N: gl.constexpr):
    """Stored scales, super scales, addends and super minimums to float32 scales and addends: tuples of N, row g before g + 8."""
    if paired(SCALE):
        s0, s1 = _pair_f32(s, SCALE, FP8)
        both = _zip(pieces(s0, N // 2), pieces(s1, N // 2), N // 2)
        if ADD == NONE:
            return both, both
        else:
            a0, a1 = _addends_f32(a, SCALE, ADD, FP8)
            return both, _zip(pieces(a0, N // 2), pieces(a1, N // 2), N // 2)
    else:
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
def terms_half(
    s, a, missing, SCALE: gl.constexpr, ADD: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr, FP8: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """The same as x's own type in both halves of a register, for weights that are finished before the product.

    E8M0 under an E2M1 operand that counts 2^-14, bfloat16 2^-126: 2^(b − top + 15), 2^(b − top + 127), one multiply-add from two
    bytes to two halves (top, the largest byte, is `missing`). E4M3, float16 only: as it is; under E2M1 the products count 2^-14,
    and all of them are whole multiples of float16's least number.
    """
    if paired(SCALE):
        if SCALE == E4M3_NORMAL:
            pair = pair_f16(s, FP8)
        elif (SCALE == E8M0_NORMAL) and (KIND == E2M1):
            if HALF:
                pair = spread_bytes(s) * 0x0400 + (30 - missing) * 0x04000400
            else:
                pair = spread_bytes(s) * 0x0080 + (254 - missing) * 0x00800080
        elif SCALE == E8M0_NORMAL:
            s0, s1 = _pair_f32(s, SCALE, FP8)
            pair = two_f16(s0, s1)
        else:
            pair = s
        both = _zip(pieces(twice_low(pair), N // 2), pieces(twice_high(pair), N // 2), N // 2)
        if ADD == NONE:
            return both, both
        elif ADD == ZERO:
            a0, a1 = _addends_f32(a, SCALE, ADD, FP8)
            return both, _zip(pieces(twice_f16(a0), N // 2), pieces(twice_f16(a1), N // 2), N // 2)
        else:
            return both, _zip(pieces(twice_low(a), N // 2), pieces(twice_high(a), N // 2), N // 2)
    else:
        shape: gl.constexpr = s.shape[:-2] + [N]
        both = pieces(gl.reshape(twice_f16(scale_of(s, SCALE)), shape), N)
        if ADD == NONE:
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
def start_of(t, like, ZEROES: gl.constexpr, OFFSET: gl.constexpr):
    """What an accumulator begins with: −ZEROES · Σ x where the operand lacks the implicit zero of `int` codes, else 0."""
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
def gather(
    y0, y1, y2, y3, c0, c1, c2, c3, t0, t1, factor, addend, FLUSH: gl.constexpr, PARITIES: gl.constexpr, LW: gl.constexpr,
    DOWN: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The sums c of the step's accumulator FLUSH, scaled, into y: rows g (y0, y1) and g + 8 (y2, y3), even and odd columns."""
    E: gl.constexpr = FLUSH * PARITIES * 2
    O: gl.constexpr = E + PARITIES * 2 - 2  # the odd column's group
    return (
        _scaled(y0, c0, t0, _spread(factor[E], c0, LW), _spread(addend[E], c0, LW), ADD),
        _scaled(y1, c1, t1, _spread(factor[O], c0, LW), _spread(addend[O], c0, LW), ADD),
        _scaled(y2, c2, t0, _spread(factor[E + 1], c0, LW), _spread(addend[E + 1] * DOWN, c0, LW), ADD),
        _scaled(y3, c3, t1, _spread(factor[O + 1], c0, LW), _spread(addend[O + 1] * DOWN, c0, LW), ADD),
    )


@gluon.constexpr_function
def second_chain(block, pair):
    """Whether a block belongs to the second of two groups that share x and so goes into the second accumulator; a group is `pair`
    blocks, 0: none share."""
    return pair > 0 and block // pair % 2 == 1


@gluon.constexpr_function
def of_x(block, pair):
    """The first of the two registers of x that a block of weights meets; groups of `pair` blocks share them two by two."""
    return 2 * (block // (2 * pair) * pair + block % pair if pair else block)


@gluon.jit
def places_of_x(column, t, word, half, GROUP: gl.constexpr, PAIR: gl.constexpr):
    """Of a lane's 4 words and 2 halves a unit: where in x (in pairs of inputs), how many units further on, and the group within
    the unit (the pair of groups within two units).

    Words 2 b and 2 b + 1 of a half meet block b: pairs 2 t and 2 t + 1 of its eight for groups of 16, else pairs 4 t to 4 t + 3
    of sixteen serve two blocks. Where groups share x, a lane reads what its own column has, from two units.
    """
    own = column % 2
    if PAIR == 0:
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
def unit_of_x(v, group, pair):
    """The unit of a step that begins the v-th unit of x in registers."""
    if not pair:
        return v
    if group < 64:
        return 2 * v
    whole = group // 64
    return v // whole * 2 * whole + v % whole


@gluon.jit
def activations(
    x_ptr, x_unit, x_group, x_slot, x_live, base, STEP: gl.constexpr, SET: gl.constexpr, GROUP: gl.constexpr, PAIR: gl.constexpr,
    UNITS: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """The B operands of a step, two registers a block of 16 inputs: x where the column holds the block's group, else 0."""
    b = ()
    for v in gl.static_range(STEP // 2 if PAIR else STEP):
        mine = x_live
        if PAIR:
            mine = mine & ((x_group + v * 64 // GROUP) % (SET // 2) == x_slot // 2)
        elif (SET > 1) or (GROUP < 64 * STEP):
            mine = mine & (((x_group + 4 * v) * 16 // GROUP) % SET == x_slot)
        else:
            mine = mine & (x_slot == 0)
        if not EXACT:
            mine = mine & (x_unit + (base + unit_of_x(v, GROUP, PAIR)) < UNITS)
        low, high = gl.split(gl.load(x_ptr + (base + unit_of_x(v, GROUP, PAIR)) * 32, mask=mine, other=0))
        b = b + pieces(low, 4) + pieces(high, 4)
    return b
