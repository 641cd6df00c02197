"""The product of rounded activations on Hopper: yᵀ = W xᵀ by wgmma of 8 bits, weights in fragment
order as its register operand.

One word a lane of fragment order becomes two registers of operand A: the codes of row g, of row
g + 8, four inputs each. Which four is a matter of x alone, whose codes `quantize.py` stores in the
order in which the words meet them. A producer warp copies x and words of 128 inputs, a unit, to a
stage of shared memory; consumer warpgroups decode, multiply, and apply scales to the sums of a
segment, 32 to 128 inputs, while products of the other warpgroups run. Every sum is made as in
`product.py`, so int8 results have the same bits. Tiles are never cut in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..decode import FLOAT
from ..mma.operands import axis
from ..portable.decode_tile import BIAS, NONE, ZERO
from ..wgmma.gluon_compat import aggregate, block_barrier, copy_in, copy_out
from ..wgmma.kernel import registers_of, tile_position, warps_of
from ..wgmma.operand import byte_f32
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
    scales and sums, which have whole tiles of tokens; the E8M0 byte that is 1 where scales are
    folded, and the power of two that sums of FP8 lack.
    """

    m: Any
    n: Any
    rows: Any
    tokens: Any
    units: Any
    groups: Any
    stride: Any
    lowest: Any
    power: Any


class Shared(NamedTuple):
    """Shared memory: a stage's x and words; outputs; barriers of full and empty stages."""

    x: Any
    words: Any
    y: Any
    full: Any
    empty: Any


class Maps(NamedTuple):
    """Tensor maps."""

    y: Any
    x: Any
    words: Any


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
    stages            stages of shared memory
    segment, group    inputs of a sum; inputs that share a scale
    spans             segments share a scale of x (int8)
    fold              E8M0 scales of groups of 32 are part of the operand's E4M3 values
    bits              of a code
    scale, addend     kinds of scale and addend (decode.py)
    unit              what the integers of the operand are multiples of
    plus              what a byte was lessened by: 128 for UINT, else 0
    decoder, registers    assembly and its constraints
    global_op, divide, divisor    the tensor's factor
    has_bias, half    a bias is added; y is float16 (else bfloat16)
    adjacent          token blocks that neighbouring programs take for the same rows
    store             2: the copy engine writes y; 1: every lane writes what it has
    """

    mode: int
    tokens: int
    row_blocks: int
    row_groups: int
    stages: int
    segment: int
    group: int
    spans: bool
    fold: bool
    bits: int
    scale: int
    addend: int
    unit: float
    plus: float
    decoder: str
    registers: str
    global_op: int
    divide: bool
    divisor: float
    has_bias: bool
    half: bool
    adjacent: int
    store: int

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


@gluon.jit
def exponents(pointers, tile, k, tiles, work, C: gl.constexpr):
    """E8M0 bytes of groups of 32 of unit k, less `work.lowest`, of the row tiles from `tile` on, as
    `decoded` takes them: rows g and g + 8, each [R, 4, 8, 4, 1, 1].
    """
    R: gl.constexpr = C.row_blocks
    L: gl.constexpr = registers_layout(R)
    at = tile + 4 * axis(0, R, L, 6) + axis(1, 4, L, 6)
    group = 4 * k + axis(3, 4, L, 6)
    line = (at * work.groups + group) * 16 + 2 * axis(2, 8, L, 6)
    live = (at < tiles) & (group < work.groups)
    low = gl.load(pointers.scales + line, mask=live, other=0)
    high = gl.load(pointers.scales + (line + 1), mask=live, other=0)
    return low.to(gl.int32) - work.lowest, high.to(gl.int32) - work.lowest


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
    low, high = gl.inline_asm_elementwise(
        C.decoder, C.registers, arguments, dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip
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
def row_terms(pointers, r, n, at, groups, C: gl.constexpr):
    """Scale and addend of the group of input `at` for rows r, float32."""
    if C.fold:
        return 1.0, 0.0
    else:
        g = at // C.group
        line = ((r // 16) * groups + gl.minimum(g, groups - 1)) * 16 + r % 8 * 2 + r % 16 // 8
        live = (r < n) & (g < groups)
        raw = gl.load(pointers.scales + line, mask=live, other=0)
        if C.scale == FLOAT:
            s = raw.to(gl.float32)
        else:
            s = byte_f32(raw.to(gl.int32), C.scale)
        a = s
        if C.addend != NONE:
            a = gl.load(pointers.addends + line, mask=live, other=0).to(gl.float32)
        return s * C.unit, a


@gluon.jit
def produce(args, C: gl.constexpr):
    """The producer warp: every unit of the program's tiles, a stage as soon as all warpgroups have
    left it.
    """
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    WIDTH: gl.constexpr = max(C.segment, 32)
    COUNT: gl.constexpr = UNIT // WIDTH
    BYTES: gl.constexpr = C.tokens * UNIT + BN * 16 * C.bits
    maps = args.maps
    shared = args.shared
    work = args.work
    p = gl.program_id(0)
    stage = 0 * p
    phase = 1 + 0 * p
    for tile in range(p, work.rows * work.tokens, gl.num_programs(0)):
        row, token = tile_position(tile, work.rows, work.tokens, C.adjacent)
        for k in range(work.units):
            bar = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            copy_in(maps.words, [row * (BN // 16), k * (2 * C.bits), 0], bar, shared.words.index(stage))
            for i in gl.static_range(COUNT):
                copy_in(maps.x, [token * C.tokens, k * UNIT + i * WIDTH], bar, shared.x.index(stage * COUNT + i))
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
            sum = acc.to(gl.float32, bitcast=True) - 12582912.0
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
            z, _ = gl.broadcast(-gl.expand_dims(added, 1), sum)
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
    """Where sums begin: integers as the mantissa of 1.5 · 2^23, so that no conversion is needed."""
    if C.mode == INT8:
        return gl.full([ROWS, C.tokens], 0x4B400000, gl.int32, layout=ACC)
    else:
        return gl.zeros([ROWS, C.tokens], gl.float32, layout=ACC)


@gluon.jit
def unit_terms(pointers, r, t, k, work, C: gl.constexpr):
    """`row_terms` and `column_terms` of every segment of unit k, loaded before its words are waited
    for.
    """
    COUNT: gl.constexpr = UNIT // C.segment
    terms = ()
    columns = ()
    for i in gl.static_range(COUNT):
        s = k * COUNT + i
        terms = terms + (row_terms(pointers, r, work.n, s * C.segment, work.groups, C),)  # type: ignore[assignment] # Triton unrolls the loop
        columns = columns + (column_terms(pointers, t, s, k if C.spans else s, work.stride, C),)  # type: ignore[assignment] # Triton unrolls the loop
    return terms, columns


@gluon.jit
def next_registers(args, row, k, stage, phase, more, C: gl.constexpr, WG: gl.constexpr):
    """The decoded registers of unit k, from its stage. Past a tile's last unit, `more` false, they
    are never multiplied.
    """
    R: gl.constexpr = C.row_blocks
    work = args.work
    scales = k
    if C.fold:
        scales = exponents(args.pointers, row * (4 * R * C.row_groups) + WG * 4 * R, k, (work.n + 15) // 16, work, C)
    mbarrier.wait(args.shared.full.index(stage), phase, pred=more)
    words = args.shared.words.index(stage).slice(WG * 4 * R, 4 * R).load(words_layout(R, C.bits))
    return decoded(words, scales, C)


@gluon.jit
def consume(args, C: gl.constexpr, WG: gl.constexpr):
    """Consumer WG: its rows of every tile of the program."""
    R: gl.constexpr = C.row_blocks
    ROWS: gl.constexpr = 64 * R
    COUNT: gl.constexpr = UNIT // C.segment
    BOXES: gl.constexpr = UNIT // max(C.segment, 32)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.tokens, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    shared = args.shared
    work = args.work
    pointers = args.pointers
    p = gl.program_id(0)
    stage = 0 * p
    phase = 0 * p
    for tile in range(p, work.rows * work.tokens, gl.num_programs(0)):
        row, token = tile_position(tile, work.rows, work.tokens, C.adjacent)
        r = row * (ROWS * C.row_groups) + WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        t = token * C.tokens + gl.arange(0, C.tokens, layout=gl.SliceLayout(0, ACC))
        total = gl.zeros([ROWS, C.tokens], gl.float32, layout=ACC)
        # ptxas multiplies one after another where an operand's registers are written during a
        # product; these are written after it, by an operation that it cannot leave out.
        nothing = work.m >> 31
        registers = next_registers(args, row, 0, stage, phase, True, C, WG)
        for k in range(work.units):
            terms, columns = unit_terms(pointers, r, t, k, work, C)
            part = gl.zeros([ROWS, C.tokens], gl.float32, layout=ACC)
            ahead = gl.where(stage + 1 == C.stages, 0, stage + 1)
            ahead_phase = gl.where(stage + 1 == C.stages, phase ^ 1, phase)
            following = registers
            a = segments(registers ^ nothing, A, C)
            for i in gl.static_range(COUNT):
                x = shared.x.index(stage * BOXES + i * BOXES // COUNT).permute((1, 0))
                acc = warpgroup_mma(a[i], x, start(ROWS, ACC, C), use_acc=C.mode == INT8, is_async=True)
                if i == 0:  # the next words are decoded while this product runs
                    following = next_registers(args, row, k + 1, ahead, ahead_phase, k + 1 < work.units, C, WG)
                acc = warpgroup_mma_wait(0, deps=[acc])
                if i == COUNT - 1:
                    mbarrier.arrive(shared.empty.index(stage))
                total, part = add_segment(total, part, acc, terms[i], columns[i], C)
            if C.spans:
                y, _ = gl.broadcast(gl.expand_dims(columns[0][0] * 128.0, 0), total)
                total = gl.fma(part, y, total)
            registers = following
            stage = ahead
            phase = ahead_phase
        write_tile(args, total, r, t, row, token, WG, C)
    if C.store == 2:
        tma.store_wait(0)


@gluon.jit
def write_tile(args, total, r, t, row, token, WG: gl.constexpr, C: gl.constexpr):
    """Sums of a warpgroup's rows of a tile to y."""
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
        tile_y = args.shared.y.index(WG)
        tma.store_wait(0)
        block_barrier()
        tile_y.permute((1, 0)).store(total.to(gl.float16 if C.half else gl.bfloat16))
        fence_async_shared()
        block_barrier()
        copy_out(args.maps.y, [token * C.tokens, row * (ROWS * C.row_groups) + WG * ROWS], tile_y)
    else:
        at = gl.expand_dims(t, 0).to(gl.int64) * work.n + gl.expand_dims(r, 1)
        keep = gl.expand_dims(t < work.m, 0) & gl.expand_dims(r < work.n, 1)
        gl.store(pointers.y + at, total.to(pointers.y.dtype.element_ty), mask=keep)


@gluon.jit
def partition(args, C: gl.constexpr, NUMBER: gl.constexpr):
    """Consumer NUMBER, or after them the producer."""
    if NUMBER < C.row_groups:
        consume(args, C, NUMBER)
    else:
        produce(args, C)


@gluon.jit(do_not_specialize=["m", "n", "units", "groups", "lowest"])
def rounded_wgmma_kernel(y_map, x_map, w_map, pointers, m, n, units, groups, stride, lowest, power, config: gl.constexpr):
    """y (m, n), one tile being 64 · row_blocks · row_groups rows of w by `config.tokens` tokens."""
    C: gl.constexpr = config.constants()
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    WIDTH: gl.constexpr = max(C.segment, 32)
    maps = Maps(y_map, x_map, w_map)
    work = Work(m, n, (n + (BN - 1)) // BN, (m + (C.tokens - 1)) // C.tokens, units, groups, stride, lowest, power)
    x_type: gl.constexpr = gl.int8 if C.mode == INT8 else gl.float8e4nv
    dtype: gl.constexpr = gl.float16 if C.half else gl.bfloat16
    x = gl.allocate_shared_memory(x_type, [C.stages * (UNIT // WIDTH), C.tokens, WIDTH], maps.x.layout)
    words = gl.allocate_shared_memory(gl.int32, [C.stages, BN // 16, 2 * C.bits, 32], maps.words.layout)
    y = words
    if C.store == 2:
        y = gl.allocate_shared_memory(dtype, [C.row_groups, C.tokens, 64 * C.row_blocks], maps.y.layout)
    full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(C.stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C.row_groups)
    args = Arguments(maps, pointers, Shared(x, words, y, full, empty), work)  # type: ignore[call-arg] # made by `aggregate`
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [(partition, (args, C, number)) for number in (0, 1, 2, 3, 4)[: C.row_groups + 1]],
        warps_of(C.row_groups),
        registers_of(C.row_groups),
    )
