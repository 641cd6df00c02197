"""The product of rounded activations on Hopper: yᵀ = W xᵀ by wgmma of 8 bits, weights in fragment
order as its register operand.

One word a lane of fragment order becomes two registers of operand A: the codes of row g, of row
g + 8, four inputs each. Which four is a matter of x alone, whose codes `quantize.py` stores in the
order in which the words meet them. A producer warp copies x, words and scales of 128 inputs, a
unit, to a stage of shared memory; consumer warpgroups decode, multiply, and apply scales to the
sums of a segment, 32 to 128 inputs, while other products run: those of the other warpgroups, and
of the next `product` tokens of the same one. Every sum is made as in `product.py`, so int8 results
have the same bits. Tiles are never cut in parts. More than 800 lines, so that the kernel reads in
one piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..decode import FLOAT
from ..mma.operands import pieces
from ..portable.decode_tile import BIAS, NONE, ZERO
from ..wgmma.epilogue import by_lanes, from_lanes, hand_over, take_over
from ..wgmma.gluon_compat import aggregate, block_barrier, copy_in, copy_out
from ..wgmma.kernel import own_rows, registers_of, tile_position, warps_of
from ..wgmma.operand import byte_f32, terms_layout
from .quantize import INT8

UNIT = gl.constexpr(128)
"""Inputs of a stage."""


class Pointers(NamedTuple):
    """What a launch reads and writes other than by tensor maps: y, the weight's scales and addends,
    bias, tensor's factor, scales of x (spans, m) or (m,), sums of its codes (segments, m).
    """

    y: Any
    scales: Any
    addends: Any
    bias: Any
    global_scale: Any
    x_scales: Any
    x_sums: Any


class Work(NamedTuple):
    """Tokens m and outputs n, blocks of rows and tokens, units and groups of a row, stride of x's
    scales and sums, which have whole tiles of tokens; what is added to folded E8M0 bytes, and the
    power of two that sums of FP8 lack.
    """

    m: Any
    n: Any
    rows: Any
    tokens: Any
    units: Any
    groups: Any
    stride: Any
    shift: Any
    power: Any


class Shared(NamedTuple):
    """Shared memory: a stage's x, words and scales; outputs; barriers of full and empty stages;
    sums of warpgroups that share rows, and the barriers that say they were written and read.
    """

    x: Any
    words: Any
    scales: Any
    y: Any
    full: Any
    empty: Any
    sums: Any
    written: Any
    read: Any


class Maps(NamedTuple):
    """Tensor maps."""

    y: Any
    x: Any
    words: Any
    scales: Any


class Folded(NamedTuple):
    """What is added to folded E8M0 bytes (a float: Triton specializes the integers of a record),
    and the power of two that sums of FP8 lack.
    """

    shift: Any
    power: Any


@aggregate
class Arguments:
    """Everything that the partitions of a kernel share."""

    maps: gl.tuple
    pointers: gl.tuple
    shared: gl.tuple
    work: gl.tuple


class Config(NamedTuple):
    """What a kernel is compiled for.

    mode              INT8 or FP8
    tokens, row_blocks, row_groups    of a tile; blocks of 64 rows of a warpgroup; warpgroups
    input_groups      warpgroups on the same rows, each every input_groups-th unit. Sums of FP8 are
                      added at the end of a tile; those of int8, whose order is defined, go from
                      warpgroup to warpgroup, unit by unit
    product           tokens of one product: the same operand is multiplied with the others of a
                      tile after them
    stages            stages of shared memory
    segment, group    inputs of a sum; inputs that share a scale
    spans             segments share a scale of x (int8)
    fold              E8M0 scales of groups of 32 are part of the operand's values
    e5m2              the operand's bytes are E5M2, else E4M3 (or whole numbers)
    bits              of a code
    scale, addend     kinds of scale and addend (decode.py)
    scale_words       16-bit words of a unit's scales in 16 rows, copied to its stage; 0: lanes load
                      scales themselves
    scale_bfloat      scales of 16 bits are bfloat16
    unit              what the integers of the operand are multiples of
    plus, less        what is added to a sum for each unit of x's sum, and what zero points are
                      lessened by (`launch.around_zero`)
    decoder, registers    assembly and its constraints
    global_op, divide, divisor    the tensor's factor
    has_bias, half    a bias is added; y is float16 (else bfloat16)
    adjacent          token blocks that neighbouring programs take for the same rows
    store             2: the copy engine writes y; 1: every lane writes what it has
    ahead             the words of the next unit are decoded while products run
    pdl               the launch overlaps with the kernel before
    """

    mode: int
    tokens: int
    row_blocks: int
    row_groups: int
    input_groups: int
    product: int
    stages: int
    segment: int
    group: int
    spans: bool
    fold: bool
    e5m2: bool
    bits: int
    scale: int
    addend: int
    scale_words: int
    scale_bfloat: bool
    unit: float
    plus: float
    less: float
    decoder: str
    registers: str
    global_op: int
    divide: bool
    divisor: float
    has_bias: bool
    half: bool
    adjacent: int
    store: int
    ahead: bool
    pdl: bool

    def constants(self) -> Config:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@gluon.constexpr_function
def _bits(values):
    """1, 2, 4, ... below `values`."""
    return [1 << i for i in range(values.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(r, bits):
    """[4 R tiles, 2 · bits rows of 128 bytes, 32 words]: the sixteen bytes that a lane has of each
    unit of fragment order (of 8 bits, of each half of one).
    """
    regs = [[0, 0, 1], [0, 0, 2], [0, 4, 0]] + ([[0, 8, 0]] if bits == 8 else []) + [[4 * v, 0, 0] for v in _bits(r)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[1, 0, 0], [2, 0, 0]], [], [r * 4, 2 * bits, 32])


@gluon.constexpr_function
def registers_layout(r):
    """[R, warp, g, half of 64 inputs, b, t]: a lane's words of a unit."""
    return gl.BlockedLayout([r, 1, 1, 4, 2, 1], [1, 1, 8, 1, 1, 4], [1, 4, 1, 1, 1, 1], [4, 3, 0, 5, 2, 1])


@gluon.constexpr_function
def bytes_layout(r, each):
    """[R, warp, g, `each` 32 inputs, b, t, row + 8, byte]: operand A in wgmma's order."""
    return gl.BlockedLayout(
        [r, 1, 1, each, 2, 1, 2, 4], [1, 1, 8, 1, 1, 4, 1, 1], [1, 4, 1, 1, 1, 1, 1, 1], [7, 6, 4, 3, 0, 5, 2, 1]
    )  # fmt: skip


@gluon.constexpr_function
def groups_of(config):
    """Scale groups of a unit, 1 where they are larger."""
    return max(1, 128 // config.group)


@gluon.jit
def stored_scales(shared, stage, WG: gl.constexpr, C: gl.constexpr):
    """The 16-bit words of a unit's scales of warpgroup WG, from its stage: [4 R tiles, words]."""
    R: gl.constexpr = C.row_blocks
    GROUPS: gl.constexpr = groups_of(C)
    L: gl.constexpr = terms_layout(max(R * C.row_groups, 2), 4, GROUPS, C.scale_words // GROUPS // 8)
    return own_rows(shared.scales.index(stage).load(L), WG, 4 * R)


@gluon.jit
def factors(stored, shift, C: gl.constexpr):
    """Stored E8M0 bytes of groups of 32 as pairs of float16, 2^15 for the largest one, as `decoded`
    takes them: rows g and g + 8, each [R, 4, 8, 4, 1, 1]. Bytes of the padding are below the
    smallest.
    """
    L: gl.constexpr = registers_layout(C.row_blocks)
    v = gl.permute(gl.reshape(stored, [C.row_blocks, 4, 4, 8]), [0, 1, 3, 2]).to(gl.int32)
    low = gl.maximum((v & 255) + shift, 1) * 0x04000400
    high = gl.maximum(((v >> 8) & 255) + shift, 1) * 0x04000400
    low = gl.convert_layout(gl.reshape(low, [C.row_blocks, 4, 8, 4, 1, 1]), L, assert_trivial=True)
    high = gl.convert_layout(gl.reshape(high, [C.row_blocks, 4, 8, 4, 1, 1]), L, assert_trivial=True)
    return low, high


@gluon.jit
def decoded(words, scales, C: gl.constexpr):
    """Words of a unit to registers of four bytes, int32 [R, 4, 8, 4 halves, b, t, row + 8];
    `scales` is read where they are folded into the bytes.
    """
    R: gl.constexpr = C.row_blocks
    L: gl.constexpr = registers_layout(R)
    if C.bits == 8:  # u s, g's high bits; g's low bit, t, b, i
        w = gl.permute(gl.reshape(words, [R, 4, 4, 4, 2, 4, 2, 2]), [0, 1, 3, 4, 2, 6, 5, 7])
        first, second = gl.split(gl.reshape(w, [R, 4, 8, 4, 2, 4, 2]))
        arguments = [gl.convert_layout(first, L), gl.convert_layout(second, L)]
    else:  # u, g's high bits; g's low bit, t, s, b
        w = gl.permute(gl.reshape(words, [R, 4, 2, 4, 2, 4, 2, 2]), [0, 1, 3, 4, 2, 6, 7, 5])
        arguments = [gl.convert_layout(gl.reshape(w, [R, 4, 8, 4, 2, 4]), L)]
    if C.fold:
        low, _ = gl.broadcast(scales[0], arguments[0])
        high, _ = gl.broadcast(scales[1], arguments[0])
        arguments = arguments + [low, high]
    low, high = gl.inline_asm_elementwise(C.decoder, C.registers, arguments, dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.join(low, high)


@gluon.jit
def _as_operand(v, SIZE: gl.constexpr, A: gl.constexpr, C: gl.constexpr):
    """Registers [R, 4, g, ..., b, t, row + 8] of SIZE inputs as operand A."""
    EACH: gl.constexpr = SIZE // 32
    L: gl.constexpr = bytes_layout(C.row_blocks, EACH)
    like = gl.zeros([C.row_blocks, 4, 8, EACH, 2, 4, 2, 4], gl.int32, layout=L)
    v = gl.convert_layout(gl.reshape(v, [C.row_blocks, 4, 8, EACH, 2, 4, 2, 1]), L)
    v, _ = gl.broadcast(v, like)
    v = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [v], dtype=gl.int8, is_pure=True, pack=4)
    v = gl.reshape(gl.permute(v, [0, 1, 6, 2, 3, 4, 5, 7]), [64 * C.row_blocks, SIZE])
    v = gl.convert_layout(v, A, assert_trivial=True)
    if C.mode == INT8:
        return v
    elif C.e5m2:
        return v.to(gl.float8e5, bitcast=True)
    else:
        return v.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _halves(v, R: gl.constexpr, EACH: gl.constexpr):
    """Registers [R, 4, g, EACH, b, t, row + 8] as those of the first half of the inputs and those
    of the second.
    """
    v = gl.reshape(v, [R, 4, 8, 2, EACH // 2, 2, 4, 2])
    return gl.split(gl.permute(v, [0, 1, 2, 4, 5, 6, 7, 3]))


@gluon.jit
def _alone(v, R: gl.constexpr):
    """Registers of 32 inputs [R, 4, g, 1, b, t, row + 8] with the second group of 16 zero, and with
    the first.
    """
    first, second = gl.split(gl.permute(v, [0, 1, 2, 3, 5, 6, 4]))
    none = gl.zeros_like(first)
    low = gl.permute(gl.join(first, none), [0, 1, 2, 3, 6, 4, 5])
    high = gl.permute(gl.join(none, second), [0, 1, 2, 3, 6, 4, 5])
    return low, high


@gluon.jit
def segments(v, A: gl.constexpr, C: gl.constexpr):
    """Registers of a unit to the operand of each segment."""
    R: gl.constexpr = C.row_blocks
    if C.segment == 128:
        return (_as_operand(v, 128, A, C),)
    else:
        first, second = _halves(v, R, 4)
        if C.segment == 64:
            return (_as_operand(first, 64, A, C), _as_operand(second, 64, A, C))
        else:
            a, b = _halves(first, R, 2)
            c, d = _halves(second, R, 2)
            if C.segment == 16:
                a0, a1 = _alone(a, R)
                b0, b1 = _alone(b, R)
                c0, c1 = _alone(c, R)
                d0, d1 = _alone(d, R)
                return (
                    _as_operand(a0, 32, A, C), _as_operand(a1, 32, A, C), _as_operand(b0, 32, A, C), _as_operand(b1, 32, A, C),
                    _as_operand(c0, 32, A, C), _as_operand(c1, 32, A, C), _as_operand(d0, 32, A, C), _as_operand(d1, 32, A, C),
                )  # fmt: skip
            else:
                return (_as_operand(a, 32, A, C), _as_operand(b, 32, A, C), _as_operand(c, 32, A, C), _as_operand(d, 32, A, C))


@gluon.jit
def staged_terms(stored, ACC: gl.constexpr, C: gl.constexpr):
    """Stored scales of a unit to those of each group, float32, for the rows of a warpgroup."""
    R: gl.constexpr = C.row_blocks
    GROUPS: gl.constexpr = groups_of(C)
    if C.scale == FLOAT:
        v = gl.permute(gl.reshape(stored, [R, 4, GROUPS, 8, 2]), [0, 1, 4, 3, 2])
        s = v.to(gl.bfloat16 if C.scale_bfloat else gl.float16, bitcast=True).to(gl.float32)
    else:
        v = gl.permute(gl.reshape(stored, [R, 4, GROUPS, 8]), [0, 1, 3, 2]).to(gl.int32)
        s = gl.join(byte_f32(v & 255, C.scale), byte_f32((v >> 8) & 255, C.scale))
        s = gl.permute(s, [0, 1, 4, 2, 3])
    terms = ()
    each = pieces(s * C.unit, GROUPS)
    for i in gl.static_range(GROUPS):
        one = gl.convert_layout(gl.reshape(each[i], [64 * R]), gl.SliceLayout(1, ACC), assert_trivial=True)
        terms = terms + (one,)  # type: ignore[assignment] # Triton unrolls the loop
    return terms


@gluon.jit
def addend_of(pointers, s, r, n, at, groups, C: gl.constexpr):
    """The addend of the group of input `at` for rows r, float32; without one anything, here s."""
    if C.addend == NONE:
        return s
    else:
        g = at // C.group
        line = ((r // 16) * groups + gl.minimum(g, groups - 1)) * 16 + r % 8 * 2 + r % 16 // 8
        return gl.load(pointers.addends + line, mask=(r < n) & (g < groups), other=0).to(gl.float32)


@gluon.jit
def row_terms(pointers, r, n, at, groups, C: gl.constexpr):
    """Scale and addend of the group of input `at` for rows r, float32."""
    g = at // C.group
    line = ((r // 16) * groups + gl.minimum(g, groups - 1)) * 16 + r % 8 * 2 + r % 16 // 8
    raw = gl.load(pointers.scales + line, mask=(r < n) & (g < groups), other=0)
    if C.scale == FLOAT:
        s = raw.to(gl.float32)
    else:
        s = byte_f32(raw.to(gl.int32), C.scale)
    return s * C.unit, addend_of(pointers, s, r, n, at, groups, C)


@gluon.jit
def copy_weight(maps, shared, bar, stage, row, k, live, C: gl.constexpr):
    """Words and scales of unit k into a stage; `row` counts tiles of 16 rows."""
    copy_in(maps.words, [row, k * (2 * C.bits), 0], bar, shared.words.index(stage), pred=live)
    if C.scale_words:
        group = k * UNIT // C.group
        copy_in(maps.scales, [row, group * (C.scale_words // groups_of(C))], bar, shared.scales.index(stage), pred=live)


@gluon.jit
def produce(args, C: gl.constexpr):
    """The producer warp: every unit of the program's tiles, a stage as soon as all warpgroups have
    left it.
    """
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    WIDTH: gl.constexpr = max(C.segment, 32)
    COUNT: gl.constexpr = UNIT // WIDTH
    P: gl.constexpr = C.tokens // C.product
    BYTES: gl.constexpr = C.tokens * UNIT + BN * 16 * C.bits + max(BN // 16, 8) * C.scale_words * 2
    maps = args.maps
    shared = args.shared
    work = args.work
    p = gl.program_id(0)
    stage = 0 * p
    phase = 1 + 0 * p
    first, _ = tile_position(p, work.rows, work.tokens, C.adjacent)
    early = gl.minimum(work.units, C.stages)
    for i in gl.static_range(C.stages):  # the first weights do not depend on the kernel before, x does
        mbarrier.expect(shared.full.index(i), BYTES, pred=i < early)
        copy_weight(maps, shared, shared.full.index(i), i, first * (BN // 16), i, i < early, C)
    if C.pdl:
        gdc_wait()
    for tile in range(p, work.rows * work.tokens, gl.num_programs(0)):
        row, token = tile_position(tile, work.rows, work.tokens, C.adjacent)
        for k in range(work.units):
            bar = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase)
            mbarrier.expect(bar, BYTES, pred=early <= 0)
            copy_weight(maps, shared, bar, stage, row * (BN // 16), k, early <= 0, C)
            for i in gl.static_range(COUNT):
                for j in gl.static_range(P):
                    box = shared.x.index((stage * COUNT + i) * P + j)
                    copy_in(maps.x, [token * C.tokens + j * C.product, k * UNIT + i * WIDTH], bar, box)
            early -= 1
            stage += 1
            if stage == C.stages:
                stage = 0 * p
                phase ^= 1


@gluon.jit
def column_terms(pointers, t, s, span, stride, C: gl.constexpr):
    """Scale of x of a span, and sum of its codes of segment s, for tokens t."""
    scale = 0.0
    sum = 0.0
    if C.mode == INT8:
        scale = gl.load(pointers.x_scales + span * stride + t)
    if (C.addend != NONE) or (C.plus != 0):
        sum = gl.load(pointers.x_sums + s * stride + t)
    return scale, sum


@gluon.jit
def add_segment(total, part, acc, row, column, C: gl.constexpr):
    """Sums of a segment under its scales, added to those of the span (`part`) or to all: the order
    of product.py.
    """
    if C.fold:
        return total + acc, part
    else:
        scale, added = row
        x_scale, x_sum = column
        sum = acc
        if C.mode == INT8:
            sum = acc.to(gl.float32)
        if (C.addend != NONE) or (C.plus != 0):
            x_sum = gl.expand_dims(x_sum, 0)
            if C.plus != 0:
                sum = sum + C.plus * x_sum
        if (C.mode == INT8) and not C.spans:
            x_scale = gl.expand_dims(x_scale, 0)
            sum = sum * x_scale
            if C.addend != NONE:
                x_sum = x_sum * x_scale
        if C.addend == ZERO:
            x_sum = x_sum * (1.0 / C.unit)
            z, _ = gl.broadcast(gl.expand_dims(C.less - added, 1), sum)
            y, _ = gl.broadcast(x_sum, sum)
            sum = gl.fma(z, y, sum)
        if C.spans:
            s, _ = gl.broadcast(gl.expand_dims(scale * 0.0078125, 1), sum)
            part = gl.fma(sum, s, part)
        else:
            if C.addend == BIAS:
                b, _ = gl.broadcast(gl.expand_dims(added, 1), sum)
                y, _ = gl.broadcast(x_sum, sum)
                total = gl.fma(b, y, total)
            s, _ = gl.broadcast(gl.expand_dims(scale, 1), sum)
            total = gl.fma(sum, s, total)
        return total, part


@gluon.jit
def start(ROWS: gl.constexpr, ACC: gl.constexpr, C: gl.constexpr):
    """Sums of nothing."""
    if C.mode == INT8:
        return gl.zeros([ROWS, C.product], gl.int32, layout=ACC)
    else:
        return gl.zeros([ROWS, C.product], gl.float32, layout=ACC)


@gluon.jit
def unit_rows(args, stored, r, k, ACC: gl.constexpr, C: gl.constexpr):
    """Scale and addend of every segment of unit k for rows r."""
    COUNT: gl.constexpr = UNIT // C.segment
    GROUPS: gl.constexpr = groups_of(C)
    rows = ()
    if C.fold:
        rows = ((1.0, 0.0),)  # type: ignore[assignment] # a constant: the branch is taken by Triton
    elif C.scale_words:
        scales = staged_terms(stored, ACC, C)
        for i in gl.static_range(COUNT):
            s = scales[i * GROUPS // COUNT]
            rows = rows + ((s, addend_of(args.pointers, s, r, args.work.n, (k * COUNT + i) * C.segment, args.work.groups, C)),)  # type: ignore[assignment] # Triton unrolls the loop
    else:
        for i in gl.static_range(COUNT):
            rows = rows + (row_terms(args.pointers, r, args.work.n, (k * COUNT + i) * C.segment, args.work.groups, C),)  # type: ignore[assignment] # Triton unrolls the loop
    return rows


@gluon.jit
def unit_columns(pointers, first, k, work, ACC: gl.constexpr, C: gl.constexpr):
    """`column_terms` of every segment of unit k and every product of a tile whose tokens begin at
    `first`: loaded before its products begin.
    """
    COUNT: gl.constexpr = UNIT // C.segment
    columns = ()
    for j in gl.static_range(C.tokens // C.product):
        t = first + j * C.product + gl.arange(0, C.product, layout=gl.SliceLayout(0, ACC))
        for i in gl.static_range(COUNT):
            s = k * COUNT + i
            columns = columns + (column_terms(pointers, t, s, k if C.spans else s, work.stride, C),)  # type: ignore[assignment] # Triton unrolls the loop
    return columns


@gluon.jit
def next_registers(args, stage, phase, more, C: gl.constexpr, WG: gl.constexpr):
    """The decoded registers of a unit and its stored scales, from its stage. Past a tile's last
    unit, `more` false, they are never used.
    """
    R: gl.constexpr = C.row_blocks
    mbarrier.wait(args.shared.full.index(stage), phase, pred=more)
    words = args.shared.words.index(stage).slice(WG * 4 * R, 4 * R).load(words_layout(R, C.bits))
    stored = stage
    scales = stage
    if C.scale_words:
        stored = stored_scales(args.shared, stage, WG, C)
    if C.fold:
        scales = factors(stored, args.work.shift, C)
        stored = stage
    return decoded(words, scales, C), stored


@gluon.jit
def unit_products(args, a, rows, columns, held, following, at, ACC: gl.constexpr, NUMBER: gl.constexpr, C: gl.constexpr):
    """Sums `held` and the products of a unit with operands `a` of its segments, its stage returned;
    and the decoded registers and scales of the next unit where C.ahead, else `following`. `at`: the
    stage and phase of this unit, of the next, units that are left, the unit's number in its tile,
    and the warpgroup's turn.
    """
    WG: gl.constexpr = NUMBER % C.row_groups
    WK: gl.constexpr = NUMBER // C.row_groups
    RING: gl.constexpr = C.mode == INT8 and C.input_groups > 1
    ROWS: gl.constexpr = 64 * C.row_blocks
    COUNT: gl.constexpr = UNIT // C.segment
    BOXES: gl.constexpr = UNIT // max(C.segment, 32)
    P: gl.constexpr = C.tokens // C.product
    shared = args.shared
    stage, phase, ahead, ahead_phase, left, k, turn = at
    next_words, next_scales = following
    zeros = gl.zeros([ROWS, C.product], gl.float32, layout=ACC)
    parts = (zeros,) * P
    for i in gl.static_range(COUNT):
        running = start(ROWS, ACC, C)
        for j in gl.static_range(P):
            x = shared.x.index((stage * BOXES + i * BOXES // COUNT) * P + j).permute((1, 0))
            acc = warpgroup_mma(a[i], x, start(ROWS, ACC, C), use_acc=False, is_async=True)
            if C.ahead and i == 0 and j == min(1, P - 1):  # the next words are decoded while these products run
                next_words, next_scales = next_registers(args, ahead, ahead_phase, left > 0, C, WG)
                # A barrier that was passed before: without a branch here ptxas decodes
                # after the products.
                mbarrier.wait(shared.full.index(stage), phase)
            if RING and not C.spans and i == 0 and j == min(1, P - 1):
                held = take_turn(shared, zeros, k, turn, WG, WK, C)
            if j > 0:
                if i == 0 and j == 1:
                    done, next_words = warpgroup_mma_wait(1, deps=[running, next_words])
                else:
                    done = warpgroup_mma_wait(1, deps=[running])
                held, parts = add_product(held, parts, done, rows[i], columns[(j - 1) * COUNT + i], j - 1, C)
            running = acc
        if i == 0:
            done, next_words = warpgroup_mma_wait(0, deps=[running, next_words])
        else:
            done = warpgroup_mma_wait(0, deps=[running])
        if i == COUNT - 1:
            mbarrier.arrive(shared.empty.index(stage))
        held, parts = add_product(held, parts, done, rows[i], columns[(P - 1) * COUNT + i], P - 1, C)
    if C.spans:
        if RING:
            held = take_turn(shared, zeros, k, turn, WG, WK, C)
        held = add_spans(held, parts, columns, COUNT)
    return held, (next_words, next_scales)


@gluon.jit
def consume(args, C: gl.constexpr, NUMBER: gl.constexpr):
    """Consumer NUMBER: warpgroup WG of those along the rows, number WK of those on the same rows.
    Unit i of all that a program does is this warpgroup's where i mod WGK is WK.
    """
    WG: gl.constexpr = NUMBER % C.row_groups
    WK: gl.constexpr = NUMBER // C.row_groups
    WGK: gl.constexpr = C.input_groups
    RING: gl.constexpr = C.mode == INT8 and WGK > 1
    R: gl.constexpr = C.row_blocks
    ROWS: gl.constexpr = 64 * R
    P: gl.constexpr = C.tokens // C.product
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.product, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    shared = args.shared
    work = args.work
    pointers = args.pointers
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = work.rows * work.tokens
    stage = WK + 0 * p
    phase = 0 * p
    left = ((tiles - p + programs - 1) // programs * work.units + (WGK - 1 - WK)) // WGK
    zeros = gl.zeros([ROWS, C.product], gl.float32, layout=ACC)
    if C.pdl:
        gdc_wait()
    if C.ahead:
        registers, stored = next_registers(args, stage, phase, left > 0, C, WG)
    for tile in range(p, tiles, programs):
        row, token = tile_position(tile, work.rows, work.tokens, C.adjacent)
        r = row * (ROWS * C.row_groups) + WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        totals = (zeros,) * P
        # ptxas multiplies one after another where an operand's registers are written during a
        # product; these are written after it, by an operation that it cannot leave out.
        nothing = work.m >> 31
        before = tile // programs * work.units
        for turn in range((before + (WGK - 1 - WK)) // WGK, (before + work.units + (WGK - 1 - WK)) // WGK):
            k = turn * WGK + WK - before
            columns = unit_columns(pointers, token * C.tokens, k, work, ACC, C)
            if not C.ahead:
                registers, stored = next_registers(args, stage, phase, True, C, WG)
            rows = unit_rows(args, stored, r, k, ACC, C)
            last = stage + WGK >= C.stages
            ahead = gl.where(last, stage + (WGK - C.stages), stage + WGK)
            ahead_phase = gl.where(last, phase ^ 1, phase)
            left -= 1
            a = segments(registers ^ nothing if C.ahead else registers, A, C)
            at = (stage, phase, ahead, ahead_phase, left, k, turn)
            held, following = unit_products(args, a, rows, columns, totals, (registers, stored), at, ACC, NUMBER, C)
            if RING:
                pass_on(shared, held, WG, WK, C)
                if k + 1 == work.units:
                    write_products(args, held, r, row, token, WG, NUMBER, ACC, C)
            else:
                totals = held
            registers, stored = following
            stage = ahead
            phase = ahead_phase
        if not RING:
            parity = tile // programs & 1
            for j in gl.static_range(P):
                if WK > 0:
                    hand_over(shared, (WK - 1 + j * (WGK - 1)) * C.row_groups + WG, parity, totals[j], C)
            if WK == 0:
                sums = ()
                for j in gl.static_range(P):
                    sums = sums + (take_over(shared, j * (WGK - 1) * C.row_groups + WG, parity, totals[j], C),)  # type: ignore[assignment] # Triton unrolls the loop
                write_products(args, sums, r, row, token, WG, NUMBER, ACC, C)
    if C.store == 2:
        tma.store_wait(0)


@gluon.jit
def take_turn(shared, zeros, k, turn, WG: gl.constexpr, WK: gl.constexpr, C: gl.constexpr):
    """The sums of all units before unit k of a tile, from the warpgroup that had the last one."""
    WGK: gl.constexpr = C.input_groups
    if WK == 0:
        mbarrier.wait(shared.written.index(WG * WGK + WGK - 1), (turn & 1) ^ 1)
    else:
        mbarrier.wait(shared.written.index(WG * WGK + WK - 1), turn & 1)
    LANES: gl.constexpr = by_lanes(zeros, C.row_blocks, 4).type.layout
    P: gl.constexpr = C.tokens // C.product
    out = ()
    for j in gl.static_range(P):
        v = from_lanes(shared.sums.index(WG * P + j).load(LANES), zeros, C.row_blocks, 4)
        out = out + (gl.where(k == 0, 0.0, v),)  # type: ignore[assignment] # Triton unrolls the loop
    return out


@gluon.jit
def pass_on(shared, totals, WG: gl.constexpr, WK: gl.constexpr, C: gl.constexpr):
    """Sums to the warpgroup that has the next unit."""
    P: gl.constexpr = C.tokens // C.product
    for j in gl.static_range(P):
        shared.sums.index(WG * P + j).store(by_lanes(totals[j], C.row_blocks, 4))
    block_barrier()
    mbarrier.arrive(shared.written.index(WG * C.input_groups + WK))


@gluon.jit
def write_products(args, totals, r, row, token, WG: gl.constexpr, NUMBER: gl.constexpr, ACC: gl.constexpr, C: gl.constexpr):
    """The sums of a tile's products to y."""
    for j in gl.static_range(C.tokens // C.product):
        first = token * C.tokens + j * C.product
        t = first + gl.arange(0, C.product, layout=gl.SliceLayout(0, ACC))
        write_tile(args, totals[j], r, t, row, first, WG, NUMBER, C)


@gluon.jit
def add_product(totals, parts, acc, row, column, J: gl.constexpr, C: gl.constexpr):
    """`add_segment` for product J of a tile."""
    total, part = add_segment(totals[J], parts[J], acc, row, column, C)
    return totals[:J] + (total,) + totals[J + 1 :], parts[:J] + (part,) + parts[J + 1 :]


@gluon.jit
def add_spans(totals, parts, columns, COUNT: gl.constexpr):
    """Sums of a span under its scale, added to all."""
    out = ()
    for j in gl.static_range(len(totals)):
        y, _ = gl.broadcast(gl.expand_dims(columns[j * COUNT][0] * 128.0, 0), totals[j])
        out = out + (gl.fma(parts[j], y, totals[j]),)  # type: ignore[assignment] # Triton unrolls the loop
    return out


@gluon.jit
def write_tile(args, total, r, t, row, first, WG: gl.constexpr, NUMBER: gl.constexpr, C: gl.constexpr):
    """Sums of a warpgroup's rows of a tile, `product` tokens t from `first` on, to y."""
    ROWS: gl.constexpr = 64 * C.row_blocks
    pointers = args.pointers
    work = args.work
    if C.mode != INT8:
        total = total * (gl.expand_dims(gl.load(pointers.x_scales + t), 0) * work.power)
    if C.global_op:
        g = gl.load(pointers.global_scale).to(gl.float64)
        d = total.to(gl.float64)
        if C.global_op == 1:
            d = d * g
        else:
            d = d / g
        if C.divide:
            d = d / C.divisor
        total = d.to(gl.float32)
    if C.has_bias:
        total = total + gl.expand_dims(gl.load(pointers.bias + r, mask=r < work.n, other=0).to(gl.float32), 1)
    if C.store == 2:
        tile_y = args.shared.y.index(NUMBER)
        tma.store_wait(0)
        block_barrier()
        tile_y.permute((1, 0)).store(total.to(gl.float16 if C.half else gl.bfloat16))
        fence_async_shared()
        block_barrier()
        copy_out(args.maps.y, [first, row * (ROWS * C.row_groups) + WG * ROWS], tile_y)
    else:
        at = gl.expand_dims(t, 0).to(gl.int64) * work.n + gl.expand_dims(r, 1)
        keep = gl.expand_dims(t < work.m, 0) & gl.expand_dims(r < work.n, 1)
        gl.store(pointers.y + at, total.to(pointers.y.dtype.element_ty), mask=keep)


@gluon.jit
def partition(args, C: gl.constexpr, NUMBER: gl.constexpr):
    """Consumer NUMBER, or after them the producer."""
    if NUMBER < C.row_groups * C.input_groups:
        consume(args, C, NUMBER)
    else:
        produce(args, C)


@gluon.jit(do_not_specialize=["m", "n", "units", "groups"])
def rounded_wgmma_kernel(y_map, x_map, w_map, s_map, pointers, m, n, units, groups, stride, folded, config: gl.constexpr):
    """y (m, n), one tile being 64 · row_blocks · row_groups rows of w by `config.tokens` tokens."""
    C: gl.constexpr = config.constants()
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    WIDTH: gl.constexpr = max(C.segment, 32)
    maps = Maps(y_map, x_map, w_map, s_map)
    work = Work(
        m,
        n,
        (n + (BN - 1)) // BN,
        (m + (C.tokens - 1)) // C.tokens,
        units,
        groups,
        stride,
        folded.shift.to(gl.int32),
        folded.power,
    )
    x_type: gl.constexpr = gl.int8 if C.mode == INT8 else gl.float8e4nv
    dtype: gl.constexpr = gl.float16 if C.half else gl.bfloat16
    BOXES: gl.constexpr = C.stages * (UNIT // WIDTH) * (C.tokens // C.product)
    x = gl.allocate_shared_memory(x_type, [BOXES, C.product, WIDTH], maps.x.layout)
    words = gl.allocate_shared_memory(gl.int32, [C.stages, BN // 16, 2 * C.bits, 32], maps.words.layout)
    scales = words
    if C.scale_words:
        scales = gl.allocate_shared_memory(gl.int16, [C.stages, max(BN // 16, 8), C.scale_words], maps.scales.layout)
    y = words
    if C.store == 2:
        y = gl.allocate_shared_memory(dtype, [C.row_groups * C.input_groups, C.product, 64 * C.row_blocks], maps.y.layout)
    full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(C.stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C.row_groups)
    sums = words
    written = full
    read = empty
    RING: gl.constexpr = C.mode == INT8 and C.input_groups > 1
    SLOTS: gl.constexpr = C.row_groups * (1 if RING else C.input_groups - 1) * (C.tokens // C.product)
    if C.input_groups > 1:
        LANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [SLOTS, C.row_blocks * (C.product // 8), 128, 4], LANES)
        BARRIERS: gl.constexpr = C.row_groups * C.input_groups if RING else SLOTS
        written = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
        read = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BARRIERS):
            mbarrier.init(written.index(i), count=1)
            mbarrier.init(read.index(i), count=1)
    shared = Shared(x, words, scales, y, full, empty, sums, written, read)
    args = Arguments(maps, pointers, shared, work)  # type: ignore[call-arg] # made by `aggregate`
    fence_async_shared()
    block_barrier()
    if C.pdl:
        gdc_launch_dependents()
    gl.warp_specialize(
        [(partition, (args, C, number)) for number in (0, 1, 2, 3, 4)[: C.row_groups * C.input_groups + 1]],
        warps_of(C.row_groups * C.input_groups),
        registers_of(C.row_groups * C.input_groups),
    )
