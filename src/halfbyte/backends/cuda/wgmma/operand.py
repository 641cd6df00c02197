"""Words of fragment order to the register operand (A) of wgmma: finished 16-bit values.

One word a lane is one 16 × 16 block of a warp's rows (of 8-bit codes, half of one), in the order in
which wgmma reads it, so no value moves between lanes. The assembly is a row of `decoders.PAIRS`:
one to four operations a pair of weights turn codes into element values, one more multiplies by the
scale or adds the bias. Every value is (q − zero) · scale or q · scale + bias, rounded once to x's
dtype, by one of these arithmetics:

    HALF            float16 pairs; scales float16, E8M0 (times 2^(14 − shift), which completes raw
                    E2M1 patterns), E4M3 (times 2^6)
    BFLOAT          bfloat16 pairs; scales bfloat16, E8M0, E4M3, all of them exact there
    FLOAT32         float32 one by one and a conversion a pair: scales of the 16-bit type that x
                    does not have, scales in float32 or of two levels, tables, 8 bits and x bfloat16
    FLOAT32_BFLOAT  the same, scales bfloat16

Planes in lane order (order.py) give each lane its words whole; the assembly, a row of
`decoders.LANES`, joins the planes of a pair.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E2M1, E4M3S, E8M0, E8M0_NORMAL, SMALL, TABLE, UE4M3
from ..mma.operands import axis
from ..portable.decode_tile import BIAS, MIN, NONE

HALF = gl.constexpr(0)
BFLOAT = gl.constexpr(1)
FLOAT32 = gl.constexpr(2)
FLOAT32_BFLOAT = gl.constexpr(3)


@gluon.constexpr_function
def _bits(values):
    """1, 2, 4, ... below `values`."""
    return [1 << i for i in range(values.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(r, warps, by_16, bits=4):
    """[R · warps tiles, bits rows of 128 bytes, 32 words]: the words that hold what lane t of
    wgmma's A operand wants.

    A lane t' of fragment order has inputs 8 t' + 4 b + 2 i' + p of 32 (4 t' + 2 i' + p of 16).
    wgmma wants, of block q of 16 and half i, the pair 16 q + 8 i + 2 t + p: that is half i' = t mod
    2 of word b = t / 2 of lane t' = 2 q + i (of word q of lane t / 2 + 2 i). The words that two
    lanes share come by one broadcast.

    8 bits: half a unit is 512 bytes, and the pair is the whole of word 2 b + i', so lane t has word
    t of lane 2 q + i (word 2 q + t mod 2 of lane t / 2 + 2 i).

    2 bits: word q of a row, the same for its four lanes; rows g + 8 are the second 128 bytes.
    """
    if bits == 2:
        regs = [[0, 0, 1], [0, 0, 2], [0, 1, 0]] + [[warps * v, 0, 0] for v in _bits(r)]
        lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
        return gl.DistributedLinearLayout(regs, lanes, [[v, 0, 0] for v in _bits(warps)], [], [r * warps, 2, 32])
    if bits == 8:
        i, q, second = ([0, 0, 8], [0, 0, 2], [0, 0, 4]) if by_16 else ([0, 0, 4], [0, 0, 8], [0, 0, 2])
        regs = [i, q, [0, 4, 0]] + [[warps * v, 0, 0] for v in _bits(r)]
        lanes = [[0, 0, 1], second, [0, 0, 16], [0, 1, 0], [0, 2, 0]]
        return gl.DistributedLinearLayout(regs, lanes, [[v, 0, 0] for v in _bits(warps)], [], [r * warps, 8, 32])
    own, i, q = ([0, 0, 4], [0, 0, 8], [0, 0, 1]) if by_16 else ([0, 0, 1], [0, 0, 4], [0, 0, 8])
    regs = [i, q, [0, 0, 2]] + [[warps * v, 0, 0] for v in _bits(r)]
    lanes = [[0, 0, 0], own, [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[v, 0, 0] for v in _bits(warps)], [], [r * warps, 4, 32])


@gluon.constexpr_function
def lanes_layout(r, warps, width):
    """[R · warps tiles, width rows of 128 bytes, 32 words]: a lane's own words of a plane in lane
    order, `width` of them side by side.
    """
    regs = [[0, 0, v] for v in _bits(width)] + [[warps * v, 0, 0] for v in _bits(r)]
    lanes = [[0, width * v // 32, width * v % 32] for v in _bits(32)]
    return gl.DistributedLinearLayout(regs, lanes, [[v, 0, 0] for v in _bits(warps)], [], [r * warps, width, 32])


@gluon.constexpr_function
def terms_layout(r, warps, groups, pair):
    """[R · warps tiles, groups · 8 rows · pair]: what rows g and g + 8 need, in each of the four
    lanes of a row. `pair` counts 16-bit words: 1 for two bytes, 4 for two float32.
    """
    w = 8 * pair
    regs = [[0, v] for v in _bits(pair)] + [[0, w * v] for v in _bits(groups)] + [[warps * v, 0] for v in _bits(r)]
    lanes = [[0, 0], [0, 0], [0, pair], [0, 2 * pair], [0, 4 * pair]]
    return gl.DistributedLinearLayout(regs, lanes, [[v, 0] for v in _bits(warps)], [], [r * warps, w * groups])


@gluon.constexpr_function
def operand_layout(r, warps, groups):
    """[R, warp, g, t / 2, t mod 2, group, block of the group, i, row + 8, p] of 32 inputs:
    registers in wgmma's order, then further rows.
    """
    return gl.BlockedLayout(
        [r, 1, 1, 1, 1, groups, 2 // groups, 2, 2, 2], [1, 1, 8, 2, 2, 1, 1, 1, 1, 1], [1, warps, 1, 1, 1, 1, 1, 1, 1, 1],
        [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
    )  # fmt: skip


@gluon.constexpr_function
def position_of(config, odd, down):
    """(shift or mask, multiplier) of a pair: of lanes with odd t, of row g + 8."""
    return config.positions[odd][down]


@gluon.jit
def pair_positions(values, C: gl.constexpr):
    """Where a lane's pairs lie in its words (decoders.PairDecoder.positions), of every lane and
    row: shifts or masks, and multipliers. Of 2 bits, a lane's shift. In lane order c of a pair in
    the first half, and the lane's entry of the table.
    """
    L: gl.constexpr = operand_layout(C.row_blocks, 4, max(1, C.groups // 2))
    if C.plane:
        EACH: gl.constexpr = max(1, C.groups // 2)
        c = axis(5, EACH, L, 10) * (2 * (2 // EACH)) + axis(6, 2 // EACH, L, 10) * 2 + axis(7, 2, L, 10)
        entry = 0
        if C.kind == TABLE:
            entry = gl.load(values.table + (_lane() & 15)).to(gl.int32, bitcast=True)
        return c, entry
    else:
        return _word_positions(L, C)


@gluon.jit
def _lane():
    """The lane's number: a scalar to Triton, another in each thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _word_positions(L: gl.constexpr, C: gl.constexpr):
    """`pair_positions` in fragment order."""
    odd = axis(4, 2, L, 10) == 1
    down = axis(8, 2, L, 10) == 1
    EVEN: gl.constexpr = position_of(C, 0, 0)
    EVEN_HIGH: gl.constexpr = position_of(C, 0, 1)
    ODD: gl.constexpr = position_of(C, 1, 0)
    ODD_HIGH: gl.constexpr = position_of(C, 1, 1)
    position = gl.where(down, gl.where(odd, ODD_HIGH[0], EVEN_HIGH[0]), gl.where(odd, ODD[0], EVEN[0]))
    times = gl.where(down, gl.where(odd, ODD_HIGH[1], EVEN_HIGH[1]), gl.where(odd, ODD[1], EVEN[1]))
    if C.bits == 2:
        position = 8 * axis(3, 2, L, 10) + 4 * axis(4, 2, L, 10)
    return position, times


@gluon.jit
def _twice(v):
    """The low 16 bits in both halves of a register."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _pair_of(v, BF: gl.constexpr):
    """A float32 rounded to float16 or bfloat16, in both halves of a register."""
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $1;" if BF else "cvt.rn.f16x2.f32 $0, $1, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _e4m3_halves(v):
    """Two E4M3 bytes to float16 values times 2^6, each in both halves of a register. NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 l; .reg .b32 h, k; cvt.u16.u32 l, $2; cvt.rn.f16x2.e4m3x2 h, l; mov.b32 k, 0x54005400;
        mul.rn.f16x2 h, h, k; prmt.b32 $0, h, h, 0x1010; prmt.b32 $1, h, h, 0x3232; }""",
        "=r,=r,r",
        [v],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def byte_f32(b, SCALE: gl.constexpr):
    """A scale byte (in an int32) as float32."""
    if SCALE == E8M0:
        bits = gl.where(b == 0, 0x00400000, b << 23)
        return gl.where(b == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    elif SCALE == E8M0_NORMAL:
        return (b << 23).to(gl.float32, bitcast=True)
    else:
        v = ((b & 0x7F) << 7).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) * 256.0
        if SCALE == UE4M3:
            return gl.where(b == 0x7F, 0.0, v)
        else:
            v = gl.where((b & 0x7F) == 0x7F, float("nan"), v)
            return gl.where(b > 127, -v, v)


@gluon.jit
def small_f32(b, SIGNED: gl.constexpr):
    """A byte (in an int32) that is a small integer as float32: the mantissa of 2^23."""
    if SIGNED:
        return ((b ^ 128) | 0x4B000000).to(gl.float32, bitcast=True) - 8388736.0
    else:
        return (b | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def small_terms(
    v, up, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr, SIGNED: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr
):
    """Small integers times the float16 of their super-block, both exact, to float32 [R, W, GROUPS,
    8, 2 rows]; of rows g over the power of two LOW, of rows g + 8 over HIGH.
    """
    b = gl.reshape(v, [R, W, GROUPS, 8]).to(gl.int32)
    s = gl.join(small_f32(b & 255, SIGNED), small_f32((b >> 8) & 255, SIGNED))
    of_super = gl.reshape(up, [R, W, 1, 8, 2]).to(gl.float16, bitcast=True).to(gl.float32)
    if LOW == HIGH:
        if LOW != 1.0:
            of_super = of_super * (1.0 / LOW)
    else:
        low, high = gl.split(of_super)
        of_super = gl.join(low * (1.0 / LOW), high * (1.0 / HIGH))
    of_super, _ = gl.broadcast(gl.convert_layout(of_super, s.type.layout), s)
    return s * of_super


@gluon.jit
def scales(v, up, shift, C: gl.constexpr):
    """Stored scales to what the decoder multiplies with, [R, W, 8, GROUPS, 2 rows] of int32. E8M0
    in float16: byte b is 2^(b − 127 + 14 − shift); bytes below 98 + shift are scales of zeros
    (`launch.LARGEST`). In bfloat16 with POWER, the power of two that E2M1 patterns lack: byte b is
    2^(b − 127 + 126 − shift), and E4M3 scales carry 2^118. WIDE: of 32 bits.
    """
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
    GROUPS: gl.constexpr = C.groups
    SCALE: gl.constexpr = C.scale
    ARITHMETIC: gl.constexpr = C.arithmetic
    POWER: gl.constexpr = C.power
    WIDE: gl.constexpr = C.scale_words // C.groups == 32
    SIGNED: gl.constexpr = C.signed
    LOW: gl.constexpr = C.unit_low
    HIGH: gl.constexpr = C.unit_high
    if SCALE == SMALL:
        s = small_terms(v, up, R, W, GROUPS, SIGNED, LOW, HIGH).to(gl.int32, bitcast=True)
    elif WIDE:
        low, high = gl.split(gl.reshape(v, [R, W, GROUPS, 8, 2, 2]).to(gl.int32))
        s = (low & 0xFFFF) | (high << 16)
    elif SCALE == 0:
        b = gl.reshape(v, [R, W, GROUPS, 8, 2])
        if ARITHMETIC == FLOAT32_BFLOAT:
            s = (b.to(gl.int32) << 16).to(gl.int32)
        elif ARITHMETIC == FLOAT32:
            s = b.to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
        else:
            s = _twice(b.to(gl.int32))
    else:
        b = gl.reshape(v, [R, W, GROUPS, 8]).to(gl.int32)
        low = b & 255
        high = (b >> 8) & 255
        if ARITHMETIC == BFLOAT and POWER and SCALE == E8M0_NORMAL:
            base = shift - 126
            s = gl.join((gl.maximum(low, base + 1) - base) * 0x00800080, (gl.maximum(high, base + 1) - base) * 0x00800080)
        elif ARITHMETIC == BFLOAT:
            CARRIED: gl.constexpr = 2.0**118 if POWER else 1.0
            s = gl.join(_pair_of(byte_f32(low, SCALE) * CARRIED, True), _pair_of(byte_f32(high, SCALE) * CARRIED, True))
        elif ARITHMETIC >= FLOAT32:
            s = gl.join(byte_f32(low, SCALE), byte_f32(high, SCALE)).to(gl.int32, bitcast=True)
        elif SCALE == E4M3S:
            low, high = _e4m3_halves(b)
            s = gl.join(low, high)
        elif SCALE == UE4M3:
            s = gl.join(_pair_of(byte_f32(low, SCALE) * 64.0, False), _pair_of(byte_f32(high, SCALE) * 64.0, False))
        else:
            base = 98 + shift
            s = gl.join((gl.maximum(low, base + 1) - base) * 0x04000400, (gl.maximum(high, base + 1) - base) * 0x04000400)
    return gl.permute(s, [0, 1, 3, 2, 4])


@gluon.jit
def addends(v, low, R: gl.constexpr, W: gl.constexpr, C: gl.constexpr):
    """Stored zero points, biases or minimums to what the decoder subtracts or adds, [R, W, 8,
    GROUPS, 2 rows] of int32.
    """
    GROUPS: gl.constexpr = C.groups
    if C.addend == MIN:
        a = (-small_terms(v, low, R, W, GROUPS, False, 1.0, 1.0)).to(gl.int32, bitcast=True)
    else:
        a = _addends(gl.reshape(v, [R, W, GROUPS, 8, 2]), C.addend, C.arithmetic, 8 if C.plane else C.bits)
    return gl.permute(a, [0, 1, 3, 2, 4])


@gluon.jit
def _addends(b, ADD: gl.constexpr, ARITHMETIC: gl.constexpr, BITS: gl.constexpr):
    """`addends` of 16 bits."""
    if ADD == BIAS:
        if ARITHMETIC < FLOAT32:
            a = _twice(b.to(gl.int32))
        elif ARITHMETIC == FLOAT32_BFLOAT:
            a = b.to(gl.int32) << 16
        else:
            a = b.to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
    else:
        z = b.to(gl.float32)
        if ARITHMETIC >= FLOAT32:
            a = z.to(gl.int32, bitcast=True)
        elif ARITHMETIC == BFLOAT:
            a = _pair_of(-128.0 - z, True)
        elif BITS == 8:
            a = _pair_of(1024.0 + z, False)
        elif BITS == 2:
            a = _pair_of(z, False)
        else:
            low, high = gl.split(z)
            a = gl.join(_pair_of(1024.0 + low, False), _pair_of(-64.0 - high, False))
    return a


@gluon.jit
def _in_halves(v, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr):
    """Terms [R, W, 8, GROUPS, 2 rows] of a unit to those of its two halves of 32 inputs."""
    if GROUPS == 1:
        return v, v
    else:
        v = gl.permute(gl.reshape(v, [R, W, 8, 2, GROUPS // 2, 2]), [0, 1, 2, 4, 5, 3])
        return gl.split(v)


@gluon.jit
def lane_words(w, WIDTH: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """A plane of a unit in lane order as words [R, W, g, t / 2, t mod 2, 1, 1, 1, row + 8, 1] of
    each half; a lane has one word of single bits for both rows.
    """
    if WIDTH == 4:
        low, high = gl.split(gl.reshape(w, [R, W, 8, 2, 2, 2, 2]))
        low = gl.reshape(low, [R, W, 8, 2, 2, 1, 1, 1, 2, 1])
        return low, gl.reshape(high, [R, W, 8, 2, 2, 1, 1, 1, 2, 1])
    else:
        w = gl.reshape(w, [R, W, 8, 2, 2, 1, 1, 1, WIDTH, 1])
        return w, w


@gluon.jit
def unit(w, v, terms, shift, C: gl.constexpr):
    """Words [4 R tiles, bits, 32], those of the second plane, and the stored scales, addends, super
    scales and super minimums of a unit -> (words, of the second plane, scales, addends) of its
    first half, of its second; R blocks of 64 rows. Scale kind 0 is a float. What a format lacks is
    unused.
    """
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
    s, a, up, low = terms
    if C.plane:
        w0, w1 = lane_words(w, C.plane, R, W)
        v0, v1 = w0, w1
        if C.more:
            v0, v1 = lane_words(v, C.more, R, W)
    else:
        w0, w1 = _unit_words(w, R, W, C)
        v0, v1 = w0, w1
    s = scales(s, up, shift, C)
    s0, s1 = _in_halves(s, R, W, C.groups)
    if C.zero != 0.0:  # the implicit zero times the scale, in the unit of the sums
        a0, a1 = _in_halves((s.to(gl.float32, bitcast=True) * -C.zero).to(gl.int32, bitcast=True), R, W, C.groups)
        return (w0, v0, s0, a0), (w1, v1, s1, a1)
    elif C.addend == NONE:
        return (w0, v0, s0, s0), (w1, v1, s1, s1)
    else:
        a0, a1 = _in_halves(addends(a, low, R, W, C), R, W, C.groups)
        return (w0, v0, s0, a0), (w1, v1, s1, a1)


@gluon.jit
def _unit_words(w, R: gl.constexpr, W: gl.constexpr, C: gl.constexpr):
    """The words of a unit in fragment order, of both halves."""
    BY_16: gl.constexpr = C.group == 16
    if C.bits == 2:  # row + 8, g, half, block
        w = gl.permute(gl.reshape(w, [R, W, 2, 8, 2, 2]), [0, 1, 3, 5, 2, 4])
    elif C.bits == 8 and BY_16:  # half, g, i, t / 2, block, t mod 2
        w = gl.permute(gl.reshape(w, [R, W, 2, 8, 2, 2, 2, 2]), [0, 1, 3, 5, 7, 6, 4, 2])
    elif C.bits == 8:  # half, g, block, i, t / 2, t mod 2
        w = gl.permute(gl.reshape(w, [R, W, 2, 8, 2, 2, 2, 2]), [0, 1, 3, 6, 7, 4, 5, 2])
    elif BY_16:  # g, i, t / 2, half, block
        w = gl.permute(gl.reshape(w, [R, W, 8, 2, 2, 2, 2]), [0, 1, 2, 4, 6, 3, 5])
    else:  # g, block, i, half, t / 2
        w = gl.permute(gl.reshape(w, [R, W, 8, 2, 2, 2, 2]), [0, 1, 2, 6, 3, 4, 5])
    return gl.split(w)


@gluon.jit
def _spread(v, like, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr):
    """Terms of a group over its blocks, lanes and pairs."""
    v = gl.convert_layout(gl.reshape(v, [R, W, 8, 1, 1, GROUPS, 1, 1, 2, 1]), like.type.layout)
    v, _ = gl.broadcast(v, like)
    return v


@gluon.jit
def operand(half, positions, SECOND: gl.constexpr, A: gl.constexpr, C: gl.constexpr):
    """Half a unit, as `unit` returns it, to the finished A operand [64 R, 32] in layout A; SECOND:
    1 for the second half, 0 for the first.
    """
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
    position, times = positions
    EACH: gl.constexpr = max(1, C.groups // 2)
    L: gl.constexpr = operand_layout(R, W, EACH)
    like = gl.zeros([R, W, 8, 2, 2, EACH, 2 // EACH, 2, 2, 2], gl.int32, layout=L)
    if C.plane:
        w = gl.convert_layout(half[0], L)
    elif C.bits == 2:
        w = gl.convert_layout(gl.reshape(half[0], [R, W, 8, 1, 1, EACH, 2 // EACH, 1, 2, 1]), L)
    else:
        w = gl.convert_layout(gl.reshape(half[0], [R, W, 8, 2, 2 if C.bits == 8 else 1, EACH, 2 // EACH, 2, 1, 1]), L)
    w, _ = gl.broadcast(w, like)
    arguments = [w]
    if C.more:
        v, _ = gl.broadcast(gl.convert_layout(half[1], L), like)
        arguments = arguments + [v]
    if C.plane:
        position, _ = gl.broadcast(position + 4 * SECOND, like)
        arguments = arguments + [position]
    elif C.bits < 8:
        position, _ = gl.broadcast(position, like)
        arguments = arguments + [position]
    if C.kind == TABLE:
        arguments = arguments + [like + times]
    if C.kind == E2M1:
        times, _ = gl.broadcast(times, like)
        arguments = arguments + [times]
    arguments = arguments + [_spread(half[2], like, R, W, EACH)]
    if (C.addend != NONE) or (C.zero != 0.0):
        arguments = arguments + [_spread(half[3], like, R, W, EACH)]
    PACK: gl.constexpr = 8 if C.bits == 2 and not C.plane else 4
    if C.half:
        v = gl.inline_asm_elementwise(C.decoder, C.registers, arguments, dtype=gl.float16, is_pure=True, pack=PACK)
    else:
        v = gl.inline_asm_elementwise(C.decoder, C.registers, arguments, dtype=gl.bfloat16, is_pure=True, pack=PACK)
    v = gl.reshape(gl.permute(v, [0, 1, 8, 2, 5, 6, 7, 3, 4, 9]), [16 * W * R, 32])
    return gl.convert_layout(v, A, assert_trivial=True)
