"""Words of fragment order to finished 16-bit values in the registers that wgmma takes as its A
operand.

One word a lane is one 16 × 16 block of a warp's rows (of 8-bit codes, half of one), in the order in
which wgmma wants it, so nothing moves between lanes: one to four operations a pair of weights turn
codes into element values, one more multiplies by the scale or adds the bias. Every value is (q −
zero) · scale or q · scale + bias rounded once to x's dtype, by one of three arithmetics:

    half    float16 pairs; scales float16, E8M0 (times 2^(14 − shift): raw E2M1 patterns come out
            finished), E4M3 (times 2^6)
    bfloat  bfloat16 pairs; scales bfloat16, E8M0, E4M3, all of them exact there
    wide    float32 one by one and a conversion a pair; scales of the 16-bit type that x does not
            have, 8 bits and x bfloat16
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode import E2M1, E4M3, E4M3S, E5M2, E8M0, E8M0_NORMAL, UE4M3, UINT
from ..mma.operands import axis
from ..portable.decode_tile import BIAS, NONE, ZERO

HALF = gl.constexpr(0)
BFLOAT = gl.constexpr(1)
WIDE = gl.constexpr(2)
WIDE_BFLOAT = gl.constexpr(3)  # the same, scales bfloat16


@gluon.constexpr_function
def assembly(kind, add, scale, way, half, bits=4):
    """The decoder of two pairs of a word as PTX: $0 is the pair of row g, $1 that of row g + 8; of
    2 bits a word for each row, and $2 and $3 the pairs eight inputs further. Inputs, as many
    registers each as there are results, the third belonging to row g + 8: the word; of 2 and 4
    bits, where in it the pairs are (`pair_positions`) and for E2M1 a multiplier; scales; addends.
    """
    names = ["word"] + (["place"] if bits < 8 else []) + (["times"] if kind == E2M1 else []) + ["scale", "addend"]
    results = 4 if bits == 2 else 2
    r = {name: [f"${results + 2 * results * i}", f"${results + 2 * results * i + 2}"] for i, name in enumerate(names)}
    word, place, scales, addend = r["word"][0], r.get("place", []), r["scale"], r["addend"]
    rows = (0, 1)
    body = ".reg .b32 t, k, c;"
    if bits == 2:  # pairs are made eight inputs apart, then put beside each other
        body += ".reg .b32 u, v;"
        for i in rows:
            body += f"shr.u32 t, {r['word'][i]}, {place[0]};"
            if way == BFLOAT:  # 128 + q
                body += "mov.b32 k, 0x43004300; lop3.b32 u, t, 0x00030003, k, 0xea; shr.u32 t, t, 2;"
                body += "lop3.b32 v, t, 0x00030003, k, 0xea;"
            else:  # 1024 + q, 1024 + 4 q
                body += "mov.b32 k, 0x64006400; lop3.b32 u, t, 0x00030003, k, 0xea; lop3.b32 v, t, 0x000c000c, k, 0xea;"
                low, high = ("0x64006400", "0xdc00dc00") if kind == UINT else ("0x64026402", "0xdc08dc08")
                body += f"mov.b32 k, {low}; sub.rn.f16x2 u, u, k; mov.b32 k, 0x34003400; mov.b32 c, {high};"
                body += "fma.rn.f16x2 v, v, k, c;"
            body += f"prmt.b32 ${i}, u, v, 0x5410; prmt.b32 ${i + 2}, u, v, 0x7632;"
        if way == BFLOAT:
            body += f"mov.b32 k, 0x3f803f80; mov.b32 c, {'0xc300c300' if kind == UINT else '0xc302c302'};"
            body += "".join(f"fma.rn.bf16x2 ${i}, ${i}, k, {addend[i % 2] if add == ZERO else 'c'};" for i in range(4))
            body += "mov.b32 c, 0x80008000;"
        elif way == HALF and add == ZERO:
            body += "".join(f"sub.rn.f16x2 ${i}, ${i}, {addend[i % 2]};" for i in range(4))
    elif bits == 8 and kind == E4M3:
        body += f".reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;"
    elif bits == 8 and kind == E5M2:  # the upper byte of a float16
        body += f"mov.b32 k, 0; prmt.b32 $0, {word}, k, 0x1404; prmt.b32 $1, {word}, k, 0x3424;"
    elif bits == 8:  # 1024 + q, less 1024 + zero
        body += f"mov.b32 k, 0x64646464; prmt.b32 $0, {word}, k, 0x4140; prmt.b32 $1, {word}, k, 0x4342;"
        if add == ZERO and way == HALF:
            body += "".join(f"sub.rn.f16x2 ${i}, ${i}, {addend[i]};" for i in rows)
        else:
            body += f"mov.b32 k, {'0x64006400' if kind == UINT else '0x64806480'};"
            body += "".join(f"sub.rn.f16x2 ${i}, ${i}, k;" for i in rows)
    elif kind == E2M1:
        body += "".join(f"and.b32 t, {word}, {place[i]}; mul.lo.u32 ${i}, t, {r['times'][i]};" for i in rows)
        if way == BFLOAT:  # times 2^-126, which one product takes back
            body += "mov.b32 k, 0x7e807e80; mov.b32 c, 0x80008000;"
            fields = "shr.u32 t, {0}, 3; and.b32 t, t, 0x01c001c0; lop3.b32 {0}, {0}, 0x80008000, t, 0xea;"
            body += "".join(fields.format(f"${i}") for i in rows)
            body += "".join(f"fma.rn.bf16x2 ${i}, ${i}, k, c;" for i in rows)
        else:  # times 2^-14
            body += "".join(f"and.b32 ${i}, ${i}, 0x8e008e00;" for i in rows)
            if way >= WIDE or scale == 0:  # else the scale brings 2^14 along
                body += "mov.b32 k, 0x74007400;" + "".join(f"mul.rn.f16x2 ${i}, ${i}, k;" for i in rows)
    elif way == BFLOAT:  # 128 + q, less 128 + zero
        body += "mov.b32 k, 0x43004300;"
        body += "".join(f"shr.u32 t, {word}, {place[i]}; lop3.b32 ${i}, t, 0x000f000f, k, 0xea;" for i in rows)
        body += f"mov.b32 k, 0x3f803f80; mov.b32 c, {'0xc300c300' if kind == UINT else '0xc308c308'};"
        body += "".join(f"fma.rn.bf16x2 ${i}, ${i}, k, {addend[i] if add == ZERO else 'c'};" for i in rows)
        body += "mov.b32 c, 0x80008000;"
    else:  # 1024 + q in row g, 1024 + 16 q in row g + 8, less 1024 + zero, 64 + zero
        body += f"mov.b32 k, 0x64006400; shr.u32 t, {word}, {place[0]};"
        body += "lop3.b32 $0, t, 0x000f000f, k, 0xea; lop3.b32 $1, t, 0x00f000f0, k, 0xea; mov.b32 t, 0x2c002c00;"
        if add == ZERO and way == HALF:
            body += f"sub.rn.f16x2 $0, $0, {addend[0]}; fma.rn.f16x2 $1, $1, t, {addend[1]};"
        else:
            low, high = ("0x64006400", "0xd400d400") if kind == UINT else ("0x64086408", "0xd480d480")
            body += f"mov.b32 k, {low}; mov.b32 c, {high}; sub.rn.f16x2 $0, $0, k; fma.rn.f16x2 $1, $1, t, c;"
    for i in range(results):
        s, a = scales[i % 2], addend[i % 2]
        if way == BFLOAT:
            body += f"fma.rn.bf16x2 ${i}, ${i}, {s}, {a if add == BIAS else 'c'};"  # c is −0
        elif way == HALF and add == BIAS:
            body += f"fma.rn.f16x2 ${i}, ${i}, {s}, {a};"
        elif way == HALF:
            body += f"mul.rn.f16x2 ${i}, ${i}, {s};"
        else:
            body += f"{{ .reg .b16 l, h; .reg .f32 v, w, s, a; mov.b32 {{l, h}}, ${i}; cvt.f32.f16 v, l; cvt.f32.f16 w, h;"
            body += f"mov.b32 s, {s};" + (f"mov.b32 a, {a};" if add != NONE else "")
            if add == ZERO:
                body += "sub.rn.f32 v, v, a; sub.rn.f32 w, w, a;"
            if add == BIAS:
                body += "fma.rn.f32 v, v, s, a; fma.rn.f32 w, w, s, a;"
            else:
                body += "mul.rn.f32 v, v, s; mul.rn.f32 w, w, s;"
            body += f"cvt.rn.{'f16x2' if half else 'bf16x2'}.f32 ${i}, w, v; }}"
    return "{" + body + "}"


@gluon.constexpr_function
def constraints(kind, add, bits=4):
    """Two results (four of 2 bits); twice as many copies of each input."""
    inputs, results = 2 + (bits < 8) + (kind == E2M1) + (add != NONE), 4 if bits == 2 else 2
    return ",".join(["=&r"] * results + ["r"] * (2 * results * inputs))


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
def pair_position(kind, way, odd, down):
    """(mask, multiplier) of an E2M1 pair in its word, or (shift, 0) of an integer pair: of lanes
    with odd t, of row g + 8.
    """
    if kind == E2M1:  # order.spread_e2m1: sign and magnitude to bits 15 and 9 to 11
        return [[(-0x71FF7200, 1), (0x11C011C0, 8)], [(0x40384038, 66), (0x20072007, 516)]][odd][down]
    return (8 * odd + 4 * down if way == BFLOAT else 8 * odd, 0)


@gluon.jit
def pair_positions(C: gl.constexpr):
    """`pair_position` of every lane and row of 4-bit codes: two tensors. Of 2 bits, a lane's shift."""
    L: gl.constexpr = operand_layout(C.row_blocks, 4, max(1, C.groups // 2))
    odd = axis(4, 2, L, 10) == 1
    down = axis(8, 2, L, 10) == 1
    EVEN: gl.constexpr = pair_position(C.kind, C.arithmetic, 0, 0)
    EVEN_HIGH: gl.constexpr = pair_position(C.kind, C.arithmetic, 0, 1)
    ODD: gl.constexpr = pair_position(C.kind, C.arithmetic, 1, 0)
    ODD_HIGH: gl.constexpr = pair_position(C.kind, C.arithmetic, 1, 1)
    place = gl.where(down, gl.where(odd, ODD_HIGH[0], EVEN_HIGH[0]), gl.where(odd, ODD[0], EVEN[0]))
    times = gl.where(down, gl.where(odd, ODD_HIGH[1], EVEN_HIGH[1]), gl.where(odd, ODD[1], EVEN[1]))
    if C.bits == 2:
        place = 8 * axis(3, 2, L, 10) + 4 * axis(4, 2, L, 10)
    return place, times


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
def _byte_f32(b, SCALE: gl.constexpr):
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
    v, shift, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr, WAY: gl.constexpr
):  # fmt: skip
    """Stored scales to what `assembly` multiplies with, [R, W, 8, GROUPS, 2 rows] of int32. E8M0 in
    float16: byte b is 2^(b − 127 + 14 − shift); bytes below 98 + shift are scales of zeros
    (`fused_launch.LARGEST`).
    """
    if SCALE == 0:
        b = gl.reshape(v, [R, W, GROUPS, 8, 2])
        if WAY == WIDE_BFLOAT:
            s = (b.to(gl.int32) << 16).to(gl.int32)
        elif WAY == WIDE:
            s = b.to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
        else:
            s = _twice(b.to(gl.int32))
    else:
        b = gl.reshape(v, [R, W, GROUPS, 8]).to(gl.int32)
        low = b & 255
        high = (b >> 8) & 255
        if WAY == BFLOAT:
            s = gl.join(_pair_of(_byte_f32(low, SCALE), True), _pair_of(_byte_f32(high, SCALE), True))
        elif WAY >= WIDE:
            s = gl.join(_byte_f32(low, SCALE), _byte_f32(high, SCALE)).to(gl.int32, bitcast=True)
        elif SCALE == E4M3S:
            low, high = _e4m3_halves(b)
            s = gl.join(low, high)
        elif SCALE == UE4M3:
            s = gl.join(_pair_of(_byte_f32(low, SCALE) * 64.0, False), _pair_of(_byte_f32(high, SCALE) * 64.0, False))
        else:
            base = 98 + shift
            s = gl.join((gl.maximum(low, base + 1) - base) * 0x04000400, (gl.maximum(high, base + 1) - base) * 0x04000400)
    return gl.permute(s, [0, 1, 3, 2, 4])


@gluon.jit
def addends(
    v, R: gl.constexpr, W: gl.constexpr, GROUPS: gl.constexpr, ADD: gl.constexpr, WAY: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Stored zero points or biases to what `assembly` takes away or adds, [R, W, 8, GROUPS, 2 rows]
    of int32.
    """
    b = gl.reshape(v, [R, W, GROUPS, 8, 2])
    if ADD == BIAS:
        if WAY < WIDE:
            a = _twice(b.to(gl.int32))
        elif WAY == WIDE_BFLOAT:
            a = b.to(gl.int32) << 16
        else:
            a = b.to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
    else:
        z = b.to(gl.float32)
        if WAY >= WIDE:
            a = z.to(gl.int32, bitcast=True)
        elif WAY == BFLOAT:
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
    """Half a unit, as `unit` gives it, to the finished A operand [64 R, 32] in layout A."""
    R: gl.constexpr = C.row_blocks
    W: gl.constexpr = 4
    place, times = positions
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
        place, _ = gl.broadcast(place, like)
        arguments = arguments + [place]
    if C.kind == E2M1:
        times, _ = gl.broadcast(times, like)
        arguments = arguments + [times]
    arguments = arguments + [_spread(half[1], like, R, W, EACH)]
    if C.addend != NONE:
        arguments = arguments + [_spread(half[2], like, R, W, EACH)]
    asm: gl.constexpr = assembly(C.kind, C.addend, C.scale, C.arithmetic, C.half, C.bits)
    registers: gl.constexpr = constraints(C.kind, C.addend, C.bits)
    PACK: gl.constexpr = 8 if C.bits == 2 else 4
    if C.half:
        v = gl.inline_asm_elementwise(asm, registers, arguments, dtype=gl.float16, is_pure=True, pack=PACK)
    else:
        v = gl.inline_asm_elementwise(asm, registers, arguments, dtype=gl.bfloat16, is_pure=True, pack=PACK)
    v = gl.reshape(gl.permute(v, [0, 1, 8, 2, 5, 6, 7, 3, 4, 9]), [16 * W * R, 32])
    return gl.convert_layout(v, A, assert_trivial=True)
