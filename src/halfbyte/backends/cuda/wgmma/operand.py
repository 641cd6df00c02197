"""Words of fragment order to the register operand (A) of wgmma: finished 16-bit values.

One word a lane is one 16 × 16 block of a warp's rows (of 8-bit codes, half of one), in the order in
which wgmma reads it, so no value moves between lanes. The assembly is a row of `decoders.PAIRS`:
one to four operations a pair of weights turn codes into element values, one more multiplies by the
scale or adds the bias. Every value is (q − zero) · scale or q · scale + bias, rounded once to x's
dtype, by one of these arithmetics:

    HALF            float16 pairs; scales float16, E8M0 (times 2^(14 − shift), which completes raw
                    E2M1 patterns), E4M3 (times 2^6)
    BFLOAT          bfloat16 pairs; scales bfloat16, E8M0, E4M3, all of them exact there
    FLOAT32         float32 one by one and a conversion a pair: scales of the 16-bit type that x does
                    not have, 8 bits and x bfloat16
    FLOAT32_BFLOAT  the same, scales bfloat16
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E2M1, E4M3S, E8M0, E8M0_NORMAL, UE4M3
from ..mma.operands import axis
from ..portable.decode_tile import BIAS, NONE

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
def terms_layout(r, warps, groups, pair):
    """[R · warps tiles, groups · 8 rows · pair]: what rows g and g + 8 need, in each of the four
    lanes of a row.
    """
    w = 8 * pair
    regs = ([[0, 1]] if pair == 2 else []) + [[0, w * v] for v in _bits(groups)] + [[warps * v, 0] for v in _bits(r)]
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
def pair_positions(C: gl.constexpr):
    """Where a lane's pairs lie in its words (decoders.PairDecoder.positions), of every lane and
    row: shifts or masks, and multipliers. Of 2 bits, a lane's shift.
    """
    L: gl.constexpr = operand_layout(C.row_blocks, 4, max(1, C.groups // 2))
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
        "=r,=r,r", [v], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


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
def scales(
    v, shift, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr, ARITHMETIC: gl.constexpr
):  # fmt: skip
    """Stored scales to what the decoder multiplies with, [R, W, 8, GROUPS, 2 rows] of int32. E8M0
    in float16: byte b is 2^(b − 127 + 14 − shift); bytes below 98 + shift are scales of zeros
    (`launch.LARGEST`).
    """
    if SCALE == 0:
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
        if ARITHMETIC == BFLOAT:
            s = gl.join(_pair_of(byte_f32(low, SCALE), True), _pair_of(byte_f32(high, SCALE), True))
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
def addends(
    v, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr, ADD: gl.constexpr, ARITHMETIC: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Stored zero points or biases to what the decoder subtracts or adds, [R, W, 8, GROUPS, 2 rows]
    of int32.
    """
    b = gl.reshape(v, [R, W, GROUPS, 8, 2])
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
    return gl.permute(a, [0, 1, 3, 2, 4])


@gluon.jit
def _in_halves(v, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr):
    """Terms [R, W, 8, GROUPS, 2 rows] of a unit to those of its two halves of 32 inputs."""
    if GROUPS == 1:
        return v, v
    else:
        v = gl.permute(gl.reshape(v, [R, W, 8, 2, GROUPS // 2, 2]), [0, 1, 2, 4, 5, 3])
        return gl.split(v)


@gluon.jit
def unit(w, s, a, shift, C: gl.constexpr):
    """Words [4 R tiles, bits, 32], stored scales and addends of a unit -> (words, scales, addends)
    of its first half, of its second; R blocks of 64 rows. Scale kind 0 is a 16-bit float. Without
    an addend, `a` is unused.
    """
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
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
    w0, w1 = gl.split(w)
    s0, s1 = _in_halves(scales(s, shift, R, W, C.groups, C.scale, C.arithmetic), R, W, C.groups)
    if C.addend == NONE:
        return (w0, s0, s0), (w1, s1, s1)
    else:
        a0, a1 = _in_halves(addends(a, R, W, C.groups, C.addend, C.arithmetic, C.bits), R, W, C.groups)
        return (w0, s0, a0), (w1, s1, a1)


@gluon.jit
def _spread(v, like, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr):
    """Terms of a group over its blocks, lanes and pairs."""
    v = gl.convert_layout(gl.reshape(v, [R, W, 8, 1, 1, GROUPS, 1, 1, 2, 1]), like.type.layout)
    v, _ = gl.broadcast(v, like)
    return v


@gluon.jit
def operand(half, positions, A: gl.constexpr, C: gl.constexpr):
    """Half a unit, as `unit` returns it, to the finished A operand [64 R, 32] in layout A."""
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
    position, times = positions
    EACH: gl.constexpr = max(1, C.groups // 2)
    L: gl.constexpr = operand_layout(R, W, EACH)
    like = gl.zeros([R, W, 8, 2, 2, EACH, 2 // EACH, 2, 2, 2], gl.int32, layout=L)
    if C.bits == 2:
        w = gl.convert_layout(gl.reshape(half[0], [R, W, 8, 1, 1, EACH, 2 // EACH, 1, 2, 1]), L)
    else:
        w = gl.convert_layout(gl.reshape(half[0], [R, W, 8, 2, 2 if C.bits == 8 else 1, EACH, 2 // EACH, 2, 1, 1]), L)
    w, _ = gl.broadcast(w, like)
    arguments = [w]
    if C.bits < 8:
        position, _ = gl.broadcast(position, like)
        arguments = arguments + [position]
    if C.kind == E2M1:
        times, _ = gl.broadcast(times, like)
        arguments = arguments + [times]
    arguments = arguments + [_spread(half[1], like, R, W, EACH)]
    if C.addend != NONE:
        arguments = arguments + [_spread(half[2], like, R, W, EACH)]
    PACK: gl.constexpr = 8 if C.bits == 2 else 4
    if C.half:
        v = gl.inline_asm_elementwise(C.decoder, C.registers, arguments, dtype=gl.float16, is_pure=True, pack=PACK)
    else:
        v = gl.inline_asm_elementwise(C.decoder, C.registers, arguments, dtype=gl.bfloat16, is_pure=True, pack=PACK)
    v = gl.reshape(gl.permute(v, [0, 1, 8, 2, 5, 6, 7, 3, 4, 9]), [16 * W * R, 32])
    return gl.convert_layout(v, A, assert_trivial=True)
