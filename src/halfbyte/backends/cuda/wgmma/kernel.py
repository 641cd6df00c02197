"""The product on Hopper for 17 tokens and more: yᵀ = W xᵀ, weights in fragment order as the
register operand of wgmma (docs/design/cuda-gemm.md). Fewer tokens are multiplied by
`mma/kernel.py`, on Hopper too; `CUDABackend.schedule_of` chooses.

    a tile of y                                   a program
    rows ↓    tokens →                            ┌ producer warp ─────────────────────────────────────┐
    ┌──────────────┐  ┐                           │ unit by unit: x, words, scales, addends → a stage  │
    │ warpgroup 0  │  │ 64 · row_blocks rows      └───────────────┬────────────────────────────────────┘
    ├──────────────┤  ┘                              full ↓       │       ↑ empty        (stages of shared memory)
    │ warpgroup 1  │                              ┌ consumer warpgroups ────────────┴──────────────────┐
    └──────────────┘                              │ words → registers, decoded; wgmma with the x of all │
    row_groups warpgroups along the rows,         └─────────────────────────────────────────────────────┘
    input_groups warpgroups on the same rows, each every input_groups-th unit of 64 inputs

For each unit of 64 inputs the producer warp copies x (`tokens` rows of 128 bytes, swizzled), words,
scales and addends to a stage of shared memory by TMA. A consumer warpgroup decodes its words in
registers (operand.py), multiplies them with the x that all warpgroups share and, with `ahead`,
reads the next words during the products. Warpgroups do not wait for each other, so one decodes
while the products of another run. There is no dense tile. The sums of warpgroups on the same rows
are added in shared memory at the end of a tile.

A launch has as many programs as are resident at once. The tiles of an incomplete last round are
computed first, their units divided evenly among `sharing` programs; a divided tile is summed in
order by the program that finishes last, so results are the same in every run. Then each program
computes every num_programs-th tile. Copies run up to `stages` units ahead, across tiles.

Index names follow mma/plan.py. A *piece* is the units of one tile that one program does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..portable.decode_tile import MIN, NONE
from .epilogue import add_parts, finished, gated_rows, hand_over, take_over
from .gluon_compat import aggregate, block_barrier, copy_in, copy_out
from .operand import lanes_layout, operand, pair_positions, terms_layout, unit, words_layout


class Values(NamedTuple):
    """Pointers to the bias, the tensor's factor, the table of its elements and the factors of
    tokens.
    """

    bias: Any
    global_scale: Any
    table: Any
    x_scales: Any


class Blocks(NamedTuple):
    """Pointers to a stack's token blocks: how many, and each one's expert and half-open range of
    pairs.
    """

    count: Any
    expert: Any
    first: Any
    last: Any


class Scratch(NamedTuple):
    """Pointers to the partial sums of cut tiles and to their arrival counters."""

    partial: Any
    arrivals: Any


class Pointers(NamedTuple):
    """What a launch reads and writes other than by tensor maps, one level of names: the fields of
    Values, Blocks and Scratch. None: not read. (Triton 3.6 loses the names of a record in a
    record.)
    """

    y: Any
    bias: Any
    global_scale: Any
    table: Any
    x_scales: Any
    count: Any
    expert: Any
    first: Any
    last: Any
    partial: Any
    arrivals: Any


class Work(NamedTuple):
    """Numbers of a launch: tokens m, outputs n, tiles of y, programs that share those beyond whole
    rounds, blocks of rows and of tokens, and units of 64 inputs in a row.
    """

    m: Any
    n: Any
    tiles: Any
    sharing: Any
    rows: Any
    tokens: Any
    units: Any


class Factors(NamedTuple):
    """The shift of E8M0 scales, the power of two that the sums lack, and the format's divisor."""

    shift: Any
    unit: Any
    divisor: Any


class Numbers(NamedTuple):
    """What a call passes by value: those of Work, and Factors. Integers travel as float32, which
    holds them up to 2^24, since Triton would compile a kernel for each integer of a record.
    """

    m: Any
    n: Any
    sharing: Any
    units: Any
    shift: Any
    unit: Any
    divisor: Any


class Maps(NamedTuple):
    """Tensor maps."""

    y: Any
    x: Any
    words: Any
    more: Any
    scales: Any
    addends: Any
    ups: Any
    lows: Any


class Shared(NamedTuple):
    """Shared memory: a stage's x, the x of its second part, words, those of a second plane, scales,
    addends, super scales and super minimums; outputs; barriers of full and empty stages; sums of
    warpgroups that share rows, and the barriers that say they were written and read.
    """

    x: Any
    x_second: Any
    words: Any
    more: Any
    scales: Any
    addends: Any
    ups: Any
    lows: Any
    y: Any
    full: Any
    empty: Any
    sums: Any
    written: Any
    read: Any


@aggregate
class Arguments:
    """Everything that the partitions of a kernel share. An aggregate, because Triton loses the
    names of a record in a record where it is passed on.
    """

    maps: gl.tuple
    y: gl.tensor
    values: gl.tuple
    blocks: gl.tuple
    scratch: gl.tuple
    shared: gl.tuple
    work: gl.tuple
    factors: gl.tuple


class Split(NamedTuple):
    """A program's part of a launch: blocks of tokens, whole rounds, programs that share the rest,
    units of that rest.
    """

    tokens: Any
    whole: Any
    sharing: Any
    units: Any


class Config(NamedTuple):
    """What a kernel is compiled for.

    tokens, second, row_blocks tokens of a tile, and how many of them a second product takes (0: one
                               product takes all); blocks of 64 rows of a warpgroup
    row_groups, input_groups   warpgroups along the rows; warpgroups on the same rows
    stages                     stages of shared memory
    group, groups              inputs that share a scale; scale groups in a unit (1 when larger)
    scale_words, addend_words  16-bit words of a unit's scales, of its addends, in 16 rows
    plane, more                widths of the first and second bit plane in lane order; 0: none
    super_units, signed        units that share a super scale (0 without one); small scales have signs
    kind, bits, scale, addend  element, width of a code, kinds of scale and addend (decode.py)
    unit_low, unit_high        what the value 1 decodes to in rows g and g + 8 (1, or SUBNORMAL_UNITS)
    zero                       the implicit zero in that unit, where it is an addend; else 0
    arithmetic                 operand.HALF, BFLOAT, FLOAT32 or FLOAT32_BFLOAT
    power                      8-bit scales carry the power of two that codes lack
    decoder, registers, positions    a row of decoders.PAIRS: assembly, its constraints, and where
                               pairs lie in a word
    global_op, divide          the tensor's factor: 0 none, 1 multiplies, 2 divides; whether the
                               format's divisor applies
    has_bias, has_table, half  a bias is added; elements are a table's; activations are float16 (else bfloat16)
    x_scaled                   the sums of a token are multiplied by its factor
    adjacent                   token blocks that neighbouring programs take for the same rows
    store                      2: the copy engine writes y; 1: every lane writes what it has
    routed, gate               a stack of experts; the activation that joins rows 2 j and 2 j + 1
                               (moe.GATES), 0 none
    ahead                      the next words are read while products run
    pdl                        the launch overlaps with the previous kernel
    """

    tokens: int
    second: int
    row_blocks: int
    row_groups: int
    input_groups: int
    stages: int
    group: int
    groups: int
    scale_words: int
    addend_words: int
    plane: int
    more: int
    super_units: int
    signed: bool
    kind: int
    bits: int
    scale: int
    addend: int
    unit_low: float
    unit_high: float
    zero: float
    arithmetic: int
    power: bool
    decoder: str
    registers: str
    positions: Any
    global_op: int
    divide: bool
    has_bias: bool
    has_table: bool
    half: bool
    x_scaled: bool
    adjacent: int
    store: int
    routed: bool
    gate: int
    ahead: bool
    pdl: bool

    def constants(self) -> Config:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@gluon.constexpr_function
def warps_of(warpgroups):
    """Warps of the partitions beside the first: the other consumers, and the producer."""
    return [4] * (warpgroups - 1) + [1]


@gluon.constexpr_function
def registers_of(warpgroups):
    """Registers a thread of the same."""
    return [[240, 240, 152, 112][warpgroups - 1]] * (warpgroups - 1) + [24]


@gluon.jit
def piece(index, p, programs, split, units):
    """Piece `index` of program p: its tile and its units k0 to k1. Pieces 0 and 1 are its part of
    the tiles beyond whole rounds.
    """
    tile = (index - 2) * programs + p
    k0 = 0 * p
    k1 = units + 0 * p
    if index < 2:
        lo = gl.minimum(p * split.units // split.sharing, split.units)
        hi = gl.minimum((p + 1) * split.units // split.sharing, split.units)
        j = lo // units + index
        k0 = gl.maximum(lo - j * units, 0)
        k1 = gl.maximum(gl.minimum(hi - j * units, units), k0)
        tile = split.whole * programs + j
    return tile, k0, k1


@gluon.jit
def tile_position(tile, rows, tokens, ADJACENT: gl.constexpr):
    """Row block and token block of a tile: ADJACENT token blocks side by side, then down the rows."""
    each = ADJACENT * rows
    first = tile // each * ADJACENT
    adjacent = gl.minimum(tokens - first, ADJACENT)
    inside = tile % each
    return inside // adjacent, first + inside % adjacent


@gluon.jit
def split_of(work, blocks, C: gl.constexpr):
    """How the tiles are divided; a routed launch learns the number of its token blocks from the
    device.
    """
    tiles = work.tiles
    sharing = work.sharing
    tokens = work.tokens
    if C.routed:
        tokens = gl.load(blocks.count).to(gl.int32)
        tiles = work.rows * tokens
        sharing = gl.maximum(tiles % gl.num_programs(0), 1)
    whole = tiles // gl.num_programs(0)
    return Split(tokens, whole, sharing, (tiles - whole * gl.num_programs(0)) * work.units)


@gluon.constexpr_function
def first_plane(config):
    """Width of the plane that `words` holds."""
    return config.plane if config.plane else config.bits


@gluon.constexpr_function
def plane_tiles(tiles, width):
    """Tiles of 16 rows of a plane in a stage: the eight lines of a swizzle at least."""
    return max(tiles, 8) if width == 1 else tiles


@gluon.constexpr_function
def word_bytes(config):
    """Bytes of words in a stage."""
    tiles = 4 * config.row_blocks * config.row_groups
    first = config.plane or config.bits
    return 128 * first * plane_tiles(tiles, first) + 128 * config.more * plane_tiles(tiles, config.more)


@gluon.constexpr_function
def term_words(config):
    """16-bit words of a unit's terms in 16 rows: scales, addends and their super scales."""
    supers = 0 if not config.super_units else 32 if config.addend == 3 else 16
    return config.scale_words + config.addend_words + supers


@gluon.jit
def copy_weight(maps, shared, bar, stage, row, k, live, C: gl.constexpr):
    """Words, scales and addends of unit k into a stage; `row` counts tiles of 16 rows."""
    group = k * 64 // C.group
    WIDTH: gl.constexpr = first_plane(C)
    copy_in(maps.words, [row, k * WIDTH, 0], bar, shared.words.index(stage), pred=live)
    if C.more:
        copy_in(maps.more, [row, k * C.more, 0], bar, shared.more.index(stage), pred=live)
    if C.super_units:
        copy_in(maps.ups, [row, k // C.super_units * 16], bar, shared.ups.index(stage), pred=live)
        if C.addend == MIN:
            copy_in(maps.lows, [row, k // C.super_units * 16], bar, shared.lows.index(stage), pred=live)
    copy_in(maps.scales, [row, group * (C.scale_words // C.groups)], bar, shared.scales.index(stage), pred=live)
    if C.addend != NONE:
        copy_in(maps.addends, [row, group * (C.addend_words // C.groups)], bar, shared.addends.index(stage), pred=live)


@gluon.jit
def copy_x(maps, shared, bar, stage, token, k, C: gl.constexpr):
    """The x of unit k of a block of tokens into a stage: in boxes of `second` tokens where a second
    product has its own.
    """
    if C.second == 0:
        copy_in(maps.x, [token * C.tokens, k * 64], bar, shared.x.index(stage))
    else:
        FIRST: gl.constexpr = C.tokens - C.second
        for i in gl.static_range(FIRST // C.second):
            box = shared.x.index(stage).slice(i * C.second, C.second)
            copy_in(maps.x, [token * C.tokens + i * C.second, k * 64], bar, box)
        copy_in(maps.x, [token * C.tokens + FIRST, k * 64], bar, shared.x_second.index(stage))


@gluon.jit
def produce(args, C: gl.constexpr):
    """The producer warp: every unit of the program's pieces, a stage as soon as all warpgroups have
    left it.
    """
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    TERMS: gl.constexpr = term_words(C)
    BYTES: gl.constexpr = C.tokens * 128 + word_bytes(C) + max(BN // 16, 8) * TERMS * 2
    STAGES: gl.constexpr = C.stages
    maps = args.maps
    shared = args.shared
    work = args.work
    blocks = args.blocks
    tiles16 = (work.n + 15) // 16
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    split = split_of(work, blocks, C)
    early = 0 * p
    if not C.routed:  # the first weights do not depend on the kernel before, x does
        tile, k0, k1 = piece(0 * p, p, programs, split, work.units)
        if k1 == k0:
            tile = p + 0
            k0 = 0 * p
            k1 = gl.where(split.whole > 0, work.units, 0)
        early = gl.minimum(k1 - k0, STAGES)
        row, token = tile_position(tile, work.rows, split.tokens, C.adjacent)
        for i in gl.static_range(STAGES):
            mbarrier.expect(shared.full.index(i), BYTES, pred=i < early)
            copy_weight(maps, shared, shared.full.index(i), i, row * (BN // 16), k0 + i, i < early, C)
        if C.pdl:
            gdc_wait()
    stage = 0 * p
    phase = 1 + 0 * p
    for index in range(split.whole + 2):
        tile, k0, k1 = piece(index, p, programs, split, work.units)
        if k1 > k0:
            row, token = tile_position(tile, work.rows, split.tokens, C.adjacent)
            row *= BN // 16
            if C.routed:
                row += gl.load(blocks.expert + token).to(gl.int32) * tiles16
            for k in range(k0, k1):
                bar = shared.full.index(stage)
                mbarrier.wait(shared.empty.index(stage), phase)
                mbarrier.expect(bar, BYTES, pred=early <= 0)
                copy_weight(maps, shared, bar, stage, row, k, early <= 0, C)
                copy_x(maps, shared, bar, stage, token, k, C)
                early -= 1
                stage += 1
                if stage == STAGES:
                    stage = 0 * p
                    phase ^= 1


@gluon.jit
def own_rows(v, WG: gl.constexpr, ROWS: gl.constexpr):
    """Terms of the ROWS tiles of warpgroup WG in what a stage holds for all; the loads of the
    others are dead.
    """
    if v.shape[0] == ROWS:
        return v
    else:
        WIDTH: gl.constexpr = v.shape[1]
        low, high = gl.split(gl.permute(gl.reshape(v, [2, ROWS, WIDTH]), [1, 2, 0]))
        if WG == 0:
            return low
        else:
            return high


@gluon.jit
def single_bits(plane, WG: gl.constexpr, C: gl.constexpr):
    """A warpgroup's words of a plane of single bits: four tiles are less than the eight lines of a
    swizzle, so the words of all are loaded, and those of the others are dead.
    """
    TILES: gl.constexpr = max(C.row_blocks * C.row_groups, 2)
    words = plane.load(lanes_layout(TILES, 4, 1))
    return own_rows(gl.reshape(words, [4 * TILES, 32]), WG, 4 * C.row_blocks)


@gluon.jit
def read_stage(shared, stage, phase, more, shift, WG: gl.constexpr, C: gl.constexpr):
    """A warpgroup's words and terms of a stage, as two halves. Words after the last unit are never
    multiplied.
    """
    R: gl.constexpr = C.row_blocks
    TILES: gl.constexpr = max(R * C.row_groups, 2)
    LW: gl.constexpr = lanes_layout(R, 4, C.plane) if C.plane else words_layout(R, 4, C.group == 16, C.bits)
    LS: gl.constexpr = terms_layout(TILES, 4, C.groups, C.scale_words // C.groups // 8)
    LA: gl.constexpr = terms_layout(TILES, 4, C.groups, max(1, C.addend_words // C.groups // 8))
    LU: gl.constexpr = terms_layout(TILES, 4, 1, 2)
    mbarrier.wait(shared.full.index(stage), phase, pred=more)
    if C.addend == NONE:
        z = 0
    else:
        z = own_rows(shared.addends.index(stage).load(LA), WG, 4 * R)
    up = 0
    low = 0
    if C.super_units:
        up = own_rows(shared.ups.index(stage).load(LU), WG, 4 * R)
        if C.addend == MIN:
            low = own_rows(shared.lows.index(stage).load(LU), WG, 4 * R)
    if C.plane == 1:
        words = single_bits(shared.words.index(stage), WG, C)
    else:
        words = shared.words.index(stage).slice(WG * 4 * R, 4 * R).load(LW)
    if C.more == 1:
        second = single_bits(shared.more.index(stage), WG, C)
    elif C.more:
        second = shared.more.index(stage).slice(WG * 4 * R, 4 * R).load(lanes_layout(R, 4, C.more))
    else:
        second = words
    return unit(words, second, (own_rows(shared.scales.index(stage).load(LS), WG, 4 * R), z, up, low), shift, C)


@gluon.jit
def join_halves(low, high, A: gl.constexpr):
    """Two operands of 32 inputs as one of 64."""
    ROWS: gl.constexpr = low.shape[0]
    v = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [ROWS, 64])
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def units_before(index, low, own, units):
    """Units that a program does before piece `index`: `own` in pieces 0 and 1, which begin at unit
    `low` of the remainder.
    """
    return gl.where(index < 2, gl.maximum((low // units + index) * units - low, 0), own + (index - 2) * units)


@gluon.jit
def consume(args, C: gl.constexpr, NUMBER: gl.constexpr):
    """Consumer NUMBER: warpgroup WG of those along the rows, number WK of those on the same rows."""
    WG: gl.constexpr = NUMBER % C.row_groups
    WK: gl.constexpr = NUMBER // C.row_groups
    WGK: gl.constexpr = C.input_groups
    FIRST: gl.constexpr = C.tokens - C.second
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ACC_SECOND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.second if C.second else FIRST, 16])
    A_SECOND: gl.constexpr = gl.DotOperandLayout(0, ACC_SECOND, 2)
    shared = args.shared
    work = args.work
    shift = args.factors.shift
    positions = pair_positions(args.values, C)
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    split = split_of(work, args.blocks, C)
    low = gl.minimum(p * split.units // split.sharing, split.units)
    own = gl.minimum((p + 1) * split.units // split.sharing, split.units) - low
    left = (split.whole * work.units + own + (WGK - 1 - WK)) // WGK
    stage = WK + 0 * p
    phase = 0 * p
    parity = 0 * p
    if C.ahead:
        first, second = read_stage(shared, stage, phase, left > 0, shift, WG, C)
    for index in range(split.whole + 2):
        tile, k0, k1 = piece(index, p, programs, split, work.units)
        acc = gl.zeros([64 * C.row_blocks, FIRST], gl.float32, layout=ACC)
        if C.second:
            acc_second = gl.zeros([64 * C.row_blocks, C.second], gl.float32, layout=ACC_SECOND)
        # Unit i of all that a program does is this warpgroup's where i mod WGK is WK.
        before = units_before(index, low, own, work.units) + (WGK - 1 - WK)
        for k in range(before // WGK, (before + k1 - k0) // WGK):  # noqa: B007
            if not C.ahead:
                first, second = read_stage(shared, stage, phase, True, shift, WG, C)
            a = join_halves(operand(first, positions, 0, A, C), operand(second, positions, 1, A, C), A)
            acc = warpgroup_mma(a, shared.x.index(stage).permute((1, 0)), acc, is_async=True)
            if C.second:
                a_second = gl.convert_layout(a, A_SECOND, assert_trivial=True)
                acc_second = warpgroup_mma(a_second, shared.x_second.index(stage).permute((1, 0)), acc_second, is_async=True)
            done = shared.empty.index(stage)
            stage += WGK
            if stage >= C.stages:
                stage -= C.stages
                phase ^= 1
            left -= 1
            if C.ahead:
                first, second = read_stage(shared, stage, phase, left > 0, shift, WG, C)
            if C.second:
                acc, acc_second, a, a_second = warpgroup_mma_wait(0, deps=[acc, acc_second, a, a_second])
            else:
                acc, a = warpgroup_mma_wait(0, deps=[acc, a])
            mbarrier.arrive(done)
        if k1 > k0:
            if WK > 0:
                hand_over(shared, (WK - 1) * C.row_groups + WG, parity, acc, C)
            else:
                acc = take_over(shared, WG, parity, acc, C)
                end_tile(args, split, acc, tile, k1 - k0, 0, WG, ACC, C)
                if C.second:
                    end_tile(args, split, acc_second, tile, k1 - k0, FIRST, WG, ACC_SECOND, C)
            parity ^= 1
    if C.store == 2 and WK == 0:
        tma.store_wait(0)


@gluon.jit
def end_tile(args, split, acc, tile, units, FROM: gl.constexpr, WG: gl.constexpr, ACC: gl.constexpr, C: gl.constexpr):
    """The sums of `units` units of a tile, tokens from FROM on, to y, or to the program that
    completes a cut tile.
    """
    work = args.work
    p = gl.program_id(0)
    last = p >= 0
    row, token = tile_position(tile, work.rows, split.tokens, C.adjacent)
    if units < work.units:
        cut_tile = tile - split.whole * gl.num_programs(0)
        scratch = args.scratch
        if FROM:  # behind what the first tokens left there
            cut = split.units // work.units * C.row_groups
            before = split.sharing.to(gl.int64) * (2 * C.row_groups * 64 * C.row_blocks * FROM)
            scratch = Scratch(scratch.partial + before, scratch.arrivals + cut)
        acc, last = add_parts(scratch, acc, cut_tile, split, p, work.units, WG, C)
    if last:
        write_tile(args, acc, row, token, FROM, WG, ACC, C)


@gluon.jit
def write_tile(args, acc, row, token, FROM: gl.constexpr, WG: gl.constexpr, ACC: gl.constexpr, C: gl.constexpr):
    """The sums of a warpgroup's rows of a tile, tokens from FROM on, to y."""
    TOKENS: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = 64 * C.row_blocks
    HALVES: gl.constexpr = 2 if C.gate else 1
    blocks = args.blocks
    y = args.y
    n = args.work.n
    tile_y = args.shared.y.index(WG)
    first_row = row * (ROWS * C.row_groups) + WG * ROWS
    end_token = args.work.m
    expert = 0 * row
    if C.routed:
        expert = gl.load(blocks.expert + token).to(gl.int32)
        end_token = token * C.tokens + gl.load(blocks.last + token).to(gl.int32) - gl.load(blocks.first + token).to(gl.int32)
    if C.x_scaled:
        t = token * C.tokens + FROM + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))
        acc = acc * gl.expand_dims(gl.load(args.values.x_scales + t, mask=t < args.work.m, other=0), 0)
    out = finished(acc, args.values, expert, first_row, n, args.factors, ACC, C)
    if C.gate:
        out = gated_rows(out, C.gate, 4)
    if C.store == 2:
        tma.store_wait(0)
        block_barrier()
        if FROM:
            tile_y = tile_y.slice(0, TOKENS)
        tile_y.permute((1, 0)).store(out.to(gl.float16 if C.half else gl.bfloat16))
        fence_async_shared()
        block_barrier()
        first_token = token * C.tokens + FROM
        if C.second == 0 or FROM:
            copy_out(args.maps.y, [first_token, first_row // HALVES], tile_y)
        else:
            for i in gl.static_range(TOKENS // C.second):
                box = tile_y.slice(i * C.second, C.second)
                copy_out(args.maps.y, [first_token + i * C.second, first_row // HALVES], box)
    else:
        L: gl.constexpr = out.type.layout
        width = n // HALVES
        r = first_row // HALVES + gl.arange(0, ROWS // HALVES, layout=gl.SliceLayout(1, L))[:, None]
        t = token * C.tokens + FROM + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, L))[None, :]
        gl.store(y + t.to(gl.int64) * width + r, out.to(y.dtype.element_ty), mask=(r < width) & (t < end_token))


@gluon.jit
def partition(args, C: gl.constexpr, NUMBER: gl.constexpr):
    """Consumer NUMBER of row_groups · input_groups, or after them the producer."""
    if NUMBER < C.row_groups * C.input_groups:
        consume(args, C, NUMBER)
    else:
        produce(args, C)


@gluon.jit
def allocate(maps, C: gl.constexpr):
    """The shared memory of a program, barriers initialized. Buffers that a kernel does not need are
    another name for one that it has.
    """
    WGS: gl.constexpr = C.row_groups
    WGK: gl.constexpr = C.input_groups
    BN: gl.constexpr = 64 * C.row_blocks * WGS
    STAGES: gl.constexpr = C.stages
    dtype: gl.constexpr = gl.float16 if C.half else gl.bfloat16
    FIRST: gl.constexpr = C.tokens - C.second
    x = gl.allocate_shared_memory(dtype, [STAGES, FIRST, 64], maps.x.layout)
    x_second = x
    if C.second:
        x_second = gl.allocate_shared_memory(dtype, [STAGES, C.second, 64], maps.x.layout)
    WIDTH: gl.constexpr = first_plane(C)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, plane_tiles(BN // 16, WIDTH), WIDTH, 32], maps.words.layout)
    more = words
    if C.more:
        more = gl.allocate_shared_memory(gl.int32, [STAGES, plane_tiles(BN // 16, C.more), C.more, 32], maps.more.layout)
    scales = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), C.scale_words], maps.scales.layout)
    addends = scales
    if C.addend != NONE:
        addends = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), C.addend_words], maps.addends.layout)
    ups = scales
    lows = scales
    if C.super_units:
        ups = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), 16], maps.ups.layout)
        if C.addend == MIN:
            lows = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), 16], maps.lows.layout)
    y = scales
    if C.store == 2:
        y = gl.allocate_shared_memory(dtype, [WGS, FIRST, (32 if C.gate else 64) * C.row_blocks], maps.y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    sums = scales
    written = full
    read = empty
    if WGK > 1:
        LANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [WGS * (WGK - 1), C.row_blocks * (C.tokens // 8), 128, 4], LANES)
        written = gl.allocate_shared_memory(gl.int64, [WGS * (WGK - 1), 1], mbarrier.MBarrierLayout())
        read = gl.allocate_shared_memory(gl.int64, [WGS * (WGK - 1), 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(WGS * (WGK - 1)):
            mbarrier.init(written.index(i), count=1)
            mbarrier.init(read.index(i), count=1)
    return Shared(x, x_second, words, more, scales, addends, ups, lows, y, full, empty, sums, written, read)


@gluon.jit
def wgmma_kernel(y_map, x_map, w_map, v_map, s_map, a_map, u_map, l_map, pointers, numbers, config: gl.constexpr):
    """y (m, n) = x wᵀ + bias, one tile being 64 · row_blocks · row_groups rows of w by
    `config.tokens` tokens.

    y_map … l_map   tensor maps of y, x, words, a second plane's words, scales, addends, super
                    scales and super minimums: Triton 3.6 takes none in a record
    pointers        Pointers
    numbers         Numbers
    config          Config

    In a stack of experts (config.routed) block b of tokens belongs to expert[b] and has last[b] −
    first[b] tokens; x and y have `config.tokens` rows a block.
    """
    C: gl.constexpr = config.constants()
    WARPGROUPS: gl.constexpr = C.row_groups * C.input_groups
    BN: gl.constexpr = 64 * C.row_blocks * C.row_groups
    maps = Maps(y_map, x_map, w_map, v_map, s_map, a_map, u_map, l_map)
    m = numbers.m.to(gl.int32)
    n = numbers.n.to(gl.int32)
    units = numbers.units.to(gl.int32)
    rows = (n + (BN - 1)) // BN
    tokens = (m + (C.tokens - 1)) // C.tokens
    work = Work(m, n, rows * tokens, numbers.sharing.to(gl.int32), rows, tokens, units)
    shared = allocate(maps, C)
    factors = Factors(numbers.shift.to(gl.int32), numbers.unit, numbers.divisor)
    y = pointers.y
    values = Values(
        pointers.bias if C.has_bias else y,
        pointers.global_scale if C.global_op else y,
        pointers.table if C.has_table else y,
        pointers.x_scales if C.x_scaled else y,
    )
    blocks = Blocks(y, y, y, y)  # never read
    if C.routed:
        blocks = Blocks(pointers.count, pointers.expert, pointers.first, pointers.last)
    scratch = Scratch(pointers.partial, pointers.arrivals)
    args = Arguments(maps, y, values, blocks, scratch, shared, work, factors)  # type: ignore[call-arg] # made by `aggregate`
    fence_async_shared()
    block_barrier()
    if C.pdl:
        gdc_launch_dependents()
        if C.routed:
            gdc_wait()  # which expert's words to read is known only now
    gl.warp_specialize(
        [(partition, (args, C, number)) for number in (0, 1, 2, 3, 4)[: WARPGROUPS + 1]],
        warps_of(WARPGROUPS),
        registers_of(WARPGROUPS),
    )
