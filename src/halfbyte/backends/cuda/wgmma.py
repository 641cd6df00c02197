"""m from 32 up on Hopper for weights in fragment order: outᵀ = W xᵀ, W the register operand of wgmma (docs/cuda-gemm.md).

A program is one producer warp and one or two consumer warpgroups. Per unit of 64 inputs the producer has the copy engine bring x
(BT rows of 128 bytes, swizzled), words, scales and addends into a stage of shared memory. A consumer warpgroup owns 64 R rows of
W and all BT tokens of a tile: it finishes its words in registers (`register_operand`), multiplies them with the x that all
warpgroups share, and (but for E8M0 scales) reads the next words while the products run. The warpgroups do not wait for each
other, so one decodes while the other's products run. There is no dense tile.

Programs stay: as many as fit the machine. The tiles that make no whole round come first, their units shared out evenly; a tile
cut in parts is summed in order by the program that finishes last, so results do not change from run to run. Then each program
takes every num_programs-th tile. Copies run up to STAGES units ahead, across tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import E8M0, E8M0_NORMAL
from .gluon_names import block_barrier, copy_in, copy_out
from .register_operand import operand, places, terms_layout, unit, words_layout
from .tile_ends import finished, gated_rows, meet
from .tiles import NONE


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
    w_desc, s_desc, a_desc, ws, ss, zs, bar, stage, row, k, live, GROUPS: gl.constexpr, GROUP: gl.constexpr, SW: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Words, scales and addends of unit k into a stage; `row` counts tiles of 16 rows."""
    group = k * 64 // GROUP
    copy_in(w_desc, [row, k * 4, 0], bar, ws.index(stage), pred=live)
    copy_in(s_desc, [row, group * (SW // GROUPS)], bar, ss.index(stage), pred=live)
    if ADD != NONE:
        copy_in(a_desc, [row, group * 16], bar, zs.index(stage), pred=live)


@gluon.jit
def _produce(
    x_desc, w_desc, s_desc, a_desc, BLOCKS, EXPERT, xs, ws, ss, zs, full, empty, tiles, sharing, rows, tokens, KS, R16,
    BN: gl.constexpr, BT: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, SW: gl.constexpr, ADD: gl.constexpr,
    STAGES: gl.constexpr, TOGETHER: gl.constexpr, ROUTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: every unit of the program's pieces, a stage as soon as all warpgroups have left it."""
    BYTES: gl.constexpr = BT * 128 + BN * 32 + BN // 16 * (SW + (0 if ADD == NONE else 16 * GROUPS)) * 2
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
            _copy_weight(w_desc, s_desc, a_desc, ws, ss, zs, full.index(i), i, row * (BN // 16), k0 + i, i < early, GROUPS, GROUP,
                         SW, ADD)  # fmt: skip
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
                _copy_weight(w_desc, s_desc, a_desc, ws, ss, zs, bar, stage, row, k, early <= 0, GROUPS, GROUP, SW, ADD)
                copy_in(x_desc, [token * BT, k * 64], bar, xs.index(stage))
                early -= 1
                stage += 1
                if stage == STAGES:
                    stage = 0 * p
                    phase ^= 1


@gluon.jit
def _mine(v, WG: gl.constexpr, WGS: gl.constexpr):
    """Rows of warpgroup WG in what a stage holds for all; the loads of the others are dead."""
    if WGS == 1:
        return v
    else:
        ROWS: gl.constexpr = v.shape[0] // 2
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
    WAY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup's words and terms of a stage, its two halves apart. What follows the last unit is never multiplied."""
    mbarrier.wait(full.index(stage), phase, pred=more)
    if ADD == NONE:
        z = 0
    else:
        z = _mine(zs.index(stage).load(LA), WG, WGS)
    return unit(
        ws.index(stage).slice(WG * 4 * R, 4 * R).load(LW), _mine(ss.index(stage).load(LS), WG, WGS), z, shift, R, 4, GROUPS,
        BY_16, SCALE, ADD, WAY, HALF,
    )  # fmt: skip


@gluon.jit
def _joined(low, high, A: gl.constexpr):
    """Two operands of 32 inputs as one of 64."""
    ROWS: gl.constexpr = low.shape[0]
    v = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [ROWS, 64])
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def _consume(
    y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, ys, full, empty,
    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    WG: gl.constexpr, WGS: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, BY_16: gl.constexpr,
    GROUPS: gl.constexpr, SW: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, WAY: gl.constexpr,
    GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr, TOGETHER: gl.constexpr,
    STORE: gl.constexpr, ROUTED: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: rows WG · 64 R and on of every tile."""
    MINE: gl.constexpr = 64 * R
    BN: gl.constexpr = MINE * WGS
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    LW: gl.constexpr = words_layout(R, 4, BY_16)
    LS: gl.constexpr = terms_layout(R * WGS, 4, GROUPS, SW // GROUPS // 8)
    LA: gl.constexpr = terms_layout(R * WGS, 4, GROUPS, 2)
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    AHEAD: gl.constexpr = not ((SCALE == E8M0) or (SCALE == E8M0_NORMAL))  # the next words while products run; docs/cuda-gemm.md
    place, times = places(R, 4, GROUPS, KIND, WAY)
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    tokens, whole, sharing, units = _work(tiles, sharing, rows, tokens, BLOCKS, KS, ROUTED)
    left = whole * KS + gl.minimum((p + 1) * units // sharing, units) - gl.minimum(p * units // sharing, units)
    stage = 0 * p
    phase = 0 * p
    if AHEAD:
        first, second = _words(
            ws, ss, zs, full, stage, phase, left > 0, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, HALF
        )
    for seg in range(whole + 2):
        tile, k0, k1 = _piece(seg, p, programs, whole, sharing, units, KS)
        acc = gl.zeros([MINE, BT], gl.float32, layout=C)
        for k in range(k0, k1):  # noqa: B007
            if not AHEAD:
                first, second = _words(
                    ws, ss, zs, full, stage, phase, True, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, HALF
                )
            a = _joined(
                operand(first, place, times, R, 4, GROUPS, KIND, SCALE, ADD, WAY, HALF, A),
                operand(second, place, times, R, 4, GROUPS, KIND, SCALE, ADD, WAY, HALF, A),
                A,
            )
            acc = warpgroup_mma(a, xs.index(stage).permute((1, 0)), acc, is_async=True)
            done = empty.index(stage)
            stage += 1
            if stage == STAGES:
                stage = 0 * p
                phase ^= 1
            left -= 1
            if AHEAD:
                first, second = _words(
                    ws, ss, zs, full, stage, phase, left > 0, shift, LW, LS, LA, WG, WGS, R, GROUPS, BY_16, SCALE, ADD, WAY, HALF
                )
            acc, a = warpgroup_mma_wait(0, deps=[acc, a])
            mbarrier.arrive(done)
        if k1 > k0:
            row, token = _place(tile, rows, tokens, TOGETHER)
            first_row = row * BN + WG * MINE
            last = p >= 0
            if k1 - k0 < KS:
                acc, last = meet(PARTIAL, COUNT, acc, tile - whole * programs, sharing, units, p, KS, R, WG, WGS)
            if last:
                end = m
                expert = 0 * p
                if ROUTED:
                    expert = gl.load(EXPERT + token).to(gl.int32)
                    end = token * BT + gl.load(LAST + token).to(gl.int32) - gl.load(FIRST + token).to(gl.int32)
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
                    ys.permute((1, 0)).store(y.to(dtype))
                    fence_async_shared()
                    block_barrier()
                    copy_out(y_desc, [token * BT, first_row // HALVES], ys)
                else:
                    L: gl.constexpr = y.type.layout
                    width = n // HALVES
                    r = first_row // HALVES + gl.arange(0, MINE // HALVES, layout=gl.SliceLayout(1, L))[:, None]
                    t = token * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, L))[None, :]
                    gl.store(Y + t.to(gl.int64) * width + r, y.to(Y.dtype.element_ty), mask=(r < width) & (t < end))
    if STORE == 2:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["m", "n", "tiles", "sharing", "rows", "tokens", "KS", "shift"],
    do_not_specialize_on_alignment=["BIAS_PTR", "GLOBAL", "BLOCKS", "EXPERT", "FIRST", "LAST", "COUNT"],
)
def wgmma_kernel(
    y_desc, Y, x_desc, w_desc, s_desc, a_desc, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT,
    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    BT: gl.constexpr, R: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    SW: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, WAY: gl.constexpr, GLOBAL_OP: gl.constexpr,
    DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr, TOGETHER: gl.constexpr, STORE: gl.constexpr,
    ROUTED: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x wᵀ + bias, one tile being 64 R WGS rows of w by BT tokens.

    tiles   rows · tokens blocks; `sharing` programs take those beyond whole rounds
    KS      units of 64 inputs in a row               R       blocks of 64 rows a warpgroup
    GROUPS  scale groups in a unit (1 when larger)    SW      16-bit words of a unit's scales in 16 rows
    STORE   2: the copy engine writes y               1: every lane writes what it has
    ROUTED  a stack of weights: BLOCKS[0] token blocks, block b of expert EXPERT[b] with LAST[b] − FIRST[b] tokens; x and y
            have BT rows a block
    GATE    rows 2 j and 2 j + 1 are gate and up of output j: 0 as they are, else the activation (experts.ACTIVATIONS)
    """
    BN: gl.constexpr = 64 * R * WGS
    BY_16: gl.constexpr = GROUP == 16
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    xs = gl.allocate_shared_memory(dtype, [STAGES, BT, 64], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 16, 4, 32], w_desc.layout)
    ss = gl.allocate_shared_memory(gl.int16, [STAGES, BN // 16, SW], s_desc.layout)
    zs = ss
    if ADD != NONE:
        zs = gl.allocate_shared_memory(gl.int16, [STAGES, BN // 16, 16 * GROUPS], a_desc.layout)
    y0 = ss
    y1 = ss
    if STORE == 2:
        y0 = gl.allocate_shared_memory(dtype, [BT, 32 * R if GATE else 64 * R], y_desc.layout)
        if WGS == 2:
            y1 = gl.allocate_shared_memory(dtype, [BT, 32 * R if GATE else 64 * R], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    fence_async_shared()
    block_barrier()
    if PDL:
        gdc_launch_dependents()
        if ROUTED:
            gdc_wait()  # which expert's words to read is known only now
    R16 = (n + 15) // 16  # tiles of 16 rows of an expert
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, y0, full, empty,
                    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor, 0, WGS, BT, R, STAGES, BY_16, GROUPS, SW,
                    KIND, SCALE, ADD, WAY, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, TOGETHER, STORE, ROUTED, GATE,
                )),
                (_consume, (
                    y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, y1, full, empty,
                    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor, 1, WGS, BT, R, STAGES, BY_16, GROUPS, SW,
                    KIND, SCALE, ADD, WAY, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, TOGETHER, STORE, ROUTED, GATE,
                )),
                (_produce, (
                    x_desc, w_desc, s_desc, a_desc, BLOCKS, EXPERT, xs, ws, ss, zs, full, empty, tiles, sharing, rows, tokens, KS,
                    R16, BN, BT, GROUPS, GROUP, SW, ADD, STAGES, TOGETHER, ROUTED, PDL,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    y_desc, Y, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT, xs, ws, ss, zs, y0, full, empty,
                    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor, 0, WGS, BT, R, STAGES, BY_16, GROUPS, SW,
                    KIND, SCALE, ADD, WAY, GLOBAL_OP, DIVIDE, HAS_BIAS, HALF, TOGETHER, STORE, ROUTED, GATE,
                )),
                (_produce, (
                    x_desc, w_desc, s_desc, a_desc, BLOCKS, EXPERT, xs, ws, ss, zs, full, empty, tiles, sharing, rows, tokens, KS,
                    R16, BN, BT, GROUPS, GROUP, SW, ADD, STAGES, TOGETHER, ROUTED, PDL,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
