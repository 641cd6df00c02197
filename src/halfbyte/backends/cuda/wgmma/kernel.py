"""m from 32 up on Hopper for weights in fragment order: outᵀ = W xᵀ, W the register operand of wgmma (docs/design/cuda-gemm.md).

A program is one producer warp and one to four consumer warpgroups. Per unit of 64 inputs the producer has the copy engine bring x
(BT rows of 128 bytes, swizzled), words, scales and addends into a stage of shared memory. A consumer warpgroup owns 64 R rows of
W and all BT tokens of a tile: it finishes its words in registers (`register_operand`), multiplies them with the x that all
warpgroups share, and (AHEAD) reads the next words while the products run. The warpgroups do not wait for each other, so one
decodes while the other's products run. There is no dense tile. WGS warpgroups lie along the rows; WGK share the rows and take
turns along the inputs, and their sums meet in shared memory at a tile's end.

Programs stay: as many as fit the machine. The tiles that make no whole round come first, their units shared out evenly; a tile
cut in parts is summed in order by the program that finishes last, so results do not change from run to run. Then each program
takes every num_programs-th tile. Copies run up to STAGES units ahead, across tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..portable.decode_tile import NONE
from .epilogue import finished, gated_rows, give, meet, take
from .gluon_compat import block_barrier, copy_in, copy_out
from .operand import operand, places, terms_layout, unit, words_layout


@gluon.constexpr_function
def workers(warpgroups):
    """Warps of the partitions beside the first: the other consumers, and the producer."""
    return [4] * (warpgroups - 1) + [1]


@gluon.constexpr_function
def registers(warpgroups):
    """Registers a thread of the same."""
    return [[240, 240, 152, 112][warpgroups - 1]] * (warpgroups - 1) + [24]


@gluon.jit
def _piece(seg, p, programs, whole, sharing, units, KS):
    """Piece `seg` of a program: tile and its units k0 to k1. Pieces 0 and 1 are its share of the tiles beyond whole rounds."""
    tile = (seg - 2) * programs + p
    k0 = 0 * p
    k1 = KS + 0 * p
    if seg < 2:
        lo = gl.minimum(p * units // sharing, units)
        hi = gl.minimum((p + 1) * units // sharing, units)
        j = lo // KS + seg
        k0 = gl.maximum(lo - j * KS, 0)
        k1 = gl.maximum(gl.minimum(hi - j * KS, KS), k0)
        tile = whole * programs + j
    return tile, k0, k1


@gluon.jit
def _place(tile, rows, tokens, TOGETHER: gl.constexpr):
    """Row block and token block of a tile: TOGETHER token blocks side by side, then down the rows."""
    each = TOGETHER * rows
    first = tile // each * TOGETHER
    wide = gl.minimum(tokens - first, TOGETHER)
    inside = tile % each
    return inside // wide, first + inside % wide


@gluon.jit
def _work(tiles, sharing, rows, tokens, BLOCKS, KS, ROUTED: gl.constexpr):
    """Tiles, token blocks, whole rounds, programs that share the rest, units of the rest."""
    if ROUTED:
        tokens = gl.load(BLOCKS).to(gl.int32)
        tiles = rows * tokens
        sharing = gl.maximum(tiles % gl.num_programs(0), 1)
    whole = tiles // gl.num_programs(0)
    return tokens, whole, sharing, (tiles - whole * gl.num_programs(0)) * KS


@gluon.jit
def _copy_weight(
    w_desc, s_desc, a_desc, ws, ss, zs, bar, stage, row, k, live, BITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
    SW: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Words, scales and addends of unit k into a stage; `row` counts tiles of 16 rows."""
    group = k * 64 // GROUP
    copy_in(w_desc, [row, k * BITS, 0], bar, ws.index(stage), pred=live)
    copy_in(s_desc, [row, group * (SW // GROUPS)], bar, ss.index(stage), pred=live)
    if ADD != NONE:
        copy_in(a_desc, [row, group * 16], bar, zs.index(stage), pred=live)


@gluon.jit
def _produce(
    x_desc, w_desc, s_desc, a_desc, BLOCKS, EXPERT, xs, ws, ss, zs, full, empty, tiles, sharing, rows, tokens, KS, R16,
    BN: gl.constexpr, BT: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, SW: gl.constexpr,
    ADD: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr, ROUTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: every unit of the program's pieces, a stage as soon as all warpgroups have left it."""
    BYTES: gl.constexpr = BT * 128 + BN * 8 * BITS + max(BN // 16, 8) * (SW + (0 if ADD == NONE else 16 * GROUPS)) * 2
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    tokens, whole, sharing, units = _work(tiles, sharing, rows, tokens, BLOCKS, KS, ROUTED)
    early = 0 * p
    if not ROUTED:  # the first weights do not depend on the kernel before, x does
        tile, k0, k1 = _piece(0 * p, p, programs, whole, sharing, units, KS)
        if k1 == k0:
            tile = p + 0
            k0 = 0 * p
            k1 = gl.where(whole > 0, KS, 0)
        early = gl.minimum(k1 - k0, STAGES)
        row, token = _place(tile, rows, tokens, TOGETHER)
        for i in gl.static_range(STAGES):
            mbarrier.expect(full.index(i), BYTES, pred=i < early)
            _copy_weight(
                w_desc, s_desc, a_desc, ws, ss, zs, full.index(i), i, row * (BN // 16), k0 + i, i < early, BITS, GROUPS,
                GROUP, SW, ADD,
            )  # fmt: skip
        if PDL:
            gdc_wait()
    stage = 0 * p
    phase = 1 + 0 * p
    for seg in range(whole + 2):
        tile, k0, k1 = _piece(seg, p, programs, whole, sharing, units, KS)
        if k1 > k0:
            row, token = _place(tile, rows, tokens, TOGETHER)
            row *= BN // 16
            if ROUTED:
                row += gl.load(EXPERT + token).to(gl.int32) * R16
            for k in range(k0, k1):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, BYTES, pred=early <= 0)
                _copy_weight(w_desc, s_desc, a_desc, ws, ss, zs, bar, stage, row, k, early <= 0, BITS, GROUPS, GROUP, SW, ADD)
                copy_in(x_desc, [token * BT, k * 64], bar, xs.index(stage))
                early -= 1
                stage += 1
                if stage == STAGES:
                    stage = 0 * p
                    phase ^= 1


@gluon.jit
def _mine(v, WG: gl.constexpr, ROWS: gl.constexpr):
    """Terms of the ROWS tiles of warpgroup WG in what a stage holds for all; the loads of the others are dead."""
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
def _words(
    ws, ss, zs, full, stage, phase, more, shift, LW: gl.constexpr, LS: gl.constexpr, LA: gl.constexpr, WG: gl.constexpr,
    WGS: gl.constexpr, R: gl.constexpr, GROUPS: gl.constexpr, BY_16: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr,
    WAY: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's words and terms of a stage, its two halves apart. What follows the last unit is never multiplied."""
    mbarrier.wait(full.index(stage), phase, pred=more)
    if ADD == NONE:
        z = 0
    else:
        z = _mine(zs.index(stage).load(LA), WG, 4 * R)
    return unit(
        ws.index(stage).slice(WG * 4 * R, 4 * R).load(LW), _mine(ss.index(stage).load(LS), WG, 4 * R), z, shift, R, 4, GROUPS,
        BY_16, SCALE, ADD, WAY, BITS,
    )  # fmt: skip


@gluon.jit
def _joined(low, high, A: gl.constexpr):
    """Two operands of 32 inputs as one of 64."""
    ROWS: gl.constexpr = low.shape[0]
    v = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [ROWS, 64])
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def _consume(
    y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, ys, full, empty, sums,
    given, taken, m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    WGS: gl.constexpr, WGK: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, BY_16: gl.constexpr,
    GROUPS: gl.constexpr, SW: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr,
    WAY: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    TOGETHER: gl.constexpr, STORE: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr, AHEAD: gl.constexpr,
    NUMBER: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG of the WGS along the rows, turn WK of the WGK along the inputs: rows WG · 64 R and on of every tile."""
    WG: gl.constexpr = NUMBER % WGS
    WK: gl.constexpr = NUMBER // WGS
    MINE: gl.constexpr = 64 * R
    BN: gl.constexpr = MINE * WGS
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    LW: gl.constexpr = words_layout(R, 4, BY_16, BITS)
    LS: gl.constexpr = terms_layout(max(R * WGS, 2), 4, GROUPS, SW // GROUPS // 8)
    LA: gl.constexpr = terms_layout(max(R * WGS, 2), 4, GROUPS, 2)
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    place, times = places(R, 4, GROUPS, KIND, WAY, BITS)
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    tokens, whole, sharing, units = _work(tiles, sharing, rows, tokens, BLOCKS, KS, ROUTED)
    low = gl.minimum(p * units // sharing, units)
    share = gl.minimum((p + 1) * units // sharing, units) - low
    left = (whole * KS + share + (WGK - 1 - WK)) // WGK
    stage = WK + 0 * p
    phase = 0 * p
    turn = 0 * p
    if AHEAD:
        first, second = _words(
            ws, ss, zs, full, stage, phase, left > 0, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, BITS
        )
    for seg in range(whole + 2):
        tile, k0, k1 = _piece(seg, p, programs, whole, sharing, units, KS)
        acc = gl.zeros([MINE, BT], gl.float32, layout=C)
        # Unit i of all that a program does is this warpgroup's where i mod WGK is WK.
        before = gl.where(seg < 2, gl.maximum((low // KS + seg) * KS - low, 0), share + (seg - 2) * KS) + (WGK - 1 - WK)
        for k in range(before // WGK, (before + k1 - k0) // WGK):  # noqa: B007
            if not AHEAD:
                first, second = _words(
                    ws, ss, zs, full, stage, phase, True, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, BITS
                )
            a = _joined(
                operand(first, place, times, R, 4, GROUPS, KIND, SCALE, ADD, WAY, HALF, BITS, A),
                operand(second, place, times, R, 4, GROUPS, KIND, SCALE, ADD, WAY, HALF, BITS, A),
                A,
            )
            acc = warpgroup_mma(a, xs.index(stage).permute((1, 0)), acc, is_async=True)
            done = empty.index(stage)
            stage += WGK
            if stage >= STAGES:
                stage -= STAGES
                phase ^= 1
            left -= 1
            if AHEAD:
                first, second = _words(
                    ws, ss, zs, full, stage, phase, left > 0, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, BITS
                )
            acc, a = warpgroup_mma_wait(0, deps=[acc, a])
            mbarrier.arrive(done)
        if k1 > k0:
            if WK > 0:
                give(sums, given, taken, (WK - 1) * WGS + WG, turn, acc, R)
            else:
                acc = take(sums, given, taken, WG, turn, acc, R, WGS, WGK)
                row, token = _place(tile, rows, tokens, TOGETHER)
                first_row = row * BN + WG * MINE
                last = p >= 0
                if k1 - k0 < KS:
                    acc, last = meet(PARTIAL, COUNT, acc, tile - whole * programs, sharing, units, p, KS, R, WG, WGS)
                if last:
                    last_token = m
                    expert = 0 * p
                    if ROUTED:
                        expert = gl.load(EXPERT + token).to(gl.int32)
                        last_token = token * BT + gl.load(LAST + token).to(gl.int32) - gl.load(FIRST + token).to(gl.int32)
                    y = finished(
                        acc, BIAS_PTR + expert.to(gl.int64) * n, GLOBAL + expert, first_row, n, out_unit, divisor, C, GLOBAL_OP,
                        DIVIDE, HAS_BIAS,
                    )  # fmt: skip
                    if GATE:
                        y = gated_rows(y, GATE, 4)
                    HALVES: gl.constexpr = 2 if GATE else 1
                    if STORE == 2:
                        tma.store_wait(0)
                        block_barrier()
                        ys.index(WG).permute((1, 0)).store(y.to(dtype))
                        fence_async_shared()
                        block_barrier()
                        copy_out(y_desc, [token * BT, first_row // HALVES], ys.index(WG))
                    else:
                        L: gl.constexpr = y.type.layout
                        width = n // HALVES
                        r = first_row // HALVES + gl.arange(0, MINE // HALVES, layout=gl.SliceLayout(1, L))[:, None]
                        t = token * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, L))[None, :]
                        gl.store(Y + t.to(gl.int64) * width + r, y.to(Y.dtype.element_ty), mask=(r < width) & (t < last_token))
            turn ^= 1
    if STORE == 2 and WK == 0:
        tma.store_wait(0)


@gluon.jit
def _partition(
    y_desc, Y, x_desc, w_desc, s_desc, a_desc, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, ys,
    full, empty, sums, given, taken, m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    BT: gl.constexpr, R: gl.constexpr, WGS: gl.constexpr, WGK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, SW: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr,
    WAY: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    TOGETHER: gl.constexpr, STORE: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Consumer NUMBER of WGS · WGK, or after them the producer."""
    if NUMBER < WGS * WGK:
        _consume(
            y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, ys, full, empty, sums,
            given, taken, m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor, WGS, WGK, BT, R, STAGES,
            GROUP == 16, GROUPS, SW, KIND, BITS, SCALE, ADD, WAY, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, TOGETHER, STORE, ROUTED,
            GATE, AHEAD, NUMBER,
        )  # fmt: skip
    else:
        _produce(
            x_desc, w_desc, s_desc, a_desc, BLOCKS, EXPERT, xs, ws, ss, zs, full, empty, tiles, sharing, rows, tokens, KS,
            (n + 15) // 16, 64 * R * WGS, BT, BITS, GROUPS, GROUP, SW, ADD, STAGES, TOGETHER, ROUTED, PDL,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["m", "n", "tiles", "sharing", "rows", "tokens", "KS", "shift"],
    do_not_specialize_on_alignment=["BIAS_PTR", "GLOBAL", "BLOCKS", "EXPERT", "FIRST", "LAST", "COUNT"],
)
def wgmma_kernel(
    y_desc, Y, x_desc, w_desc, s_desc, a_desc, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT,
    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    BT: gl.constexpr, R: gl.constexpr, WGS: gl.constexpr, WGK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, SW: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr,
    WAY: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    TOGETHER: gl.constexpr, STORE: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x wᵀ + bias, one tile being 64 R WGS rows of w by BT tokens.

    tiles   rows · tokens blocks; `sharing` programs take those beyond whole rounds
    KS      units of 64 inputs in a row               R       blocks of 64 rows a warpgroup
    WGS     warpgroups along the rows                 WGK     warpgroups that take turns along the inputs
    GROUPS  scale groups in a unit (1 when larger)    SW      16-bit words of a unit's scales in 16 rows
    STORE   2: the copy engine writes y               1: every lane writes what it has
    AHEAD   the next words are read while products run
    ROUTED  a stack of weights: BLOCKS[0] token blocks, block b of expert EXPERT[b] with LAST[b] − FIRST[b] tokens; x and y
            have BT rows a block
    GATE    rows 2 j and 2 j + 1 are gate and up of output j: 0 as they are, else the activation (experts.ACTIVATIONS)
    """
    BN: gl.constexpr = 64 * R * WGS
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    xs = gl.allocate_shared_memory(dtype, [STAGES, BT, 64], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 16, BITS, 32], w_desc.layout)
    ss = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), SW], s_desc.layout)
    zs = ss
    if ADD != NONE:
        zs = gl.allocate_shared_memory(gl.int16, [STAGES, max(BN // 16, 8), 16 * GROUPS], a_desc.layout)
    ys = ss
    if STORE == 2:
        ys = gl.allocate_shared_memory(dtype, [WGS, BT, 32 * R if GATE else 64 * R], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    sums = ss
    given = full
    taken = empty
    if WGK > 1:
        LANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [WGS * (WGK - 1), R * (BT // 8), 128, 4], LANES)
        given = gl.allocate_shared_memory(gl.int64, [WGS * (WGK - 1), 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [WGS * (WGK - 1), 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(WGS * (WGK - 1)):
            mbarrier.init(given.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    block_barrier()
    if PDL:
        gdc_launch_dependents()
        if ROUTED:
            gdc_wait()  # which expert's words to read is known only now
    gl.warp_specialize(
        [
            (_partition, (
                y_desc, Y, x_desc, w_desc, s_desc, a_desc, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws,
                ss, zs, ys, full, empty, sums, given, taken, m, n, tiles, sharing, rows, tokens, KS, shift, out_unit,
                divisor, BT, R, WGS, WGK, STAGES, GROUP, GROUPS, SW, KIND, BITS, SCALE, ADD, WAY, GLOBAL_OP, DIVIDE, HAS_BIAS,
                HALF, TOGETHER, STORE, ROUTED, GATE, AHEAD, PDL, number,
            ))
            for number in (0, 1, 2, 3, 4)[: WGS * WGK + 1]
        ],
        workers(WGS * WGK), registers(WGS * WGK),
    )  # fmt: skip
