"""m from 32 up on Hopper for weights in fragment order: outᵀ = W xᵀ, W the register operand of wgmma (docs/cuda.md).

A program's warpgroups hold R · 64 rows of W each and all BT tokens of a tile. Per unit of 64 inputs the copy engine brings x
(in two halves of 32), the words and the scales into a stage of shared memory. Every warp reads its words, finishes half a unit
in registers (`register_operand`) and issues the products that read the matching half of x from shared memory; while they run,
the other half is decoded into a second set of registers, which is not touched again before its own products are done. There
is no dense tile.

Programs stay: as many as fit the machine. The tiles that make no whole round come first, their units shared out evenly; a tile
cut in parts is summed in order by the program that finishes last, so results do not change from run to run. Then each program
takes every num_programs-th tile. Copies run STAGES − 1 units ahead, across tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import block_barrier, copy_in, copy_out
from .operands import axis
from .outputs import gated
from .register_operand import operand, places, terms_layout, unit, words_layout
from .tiles import NONE


@gluon.jit
def _place(tile, rows, tokens, TOGETHER: gl.constexpr):
    """Row block and token block of a tile: TOGETHER token blocks side by side, then down the rows."""
    each = TOGETHER * rows
    first = tile // each * TOGETHER
    wide = gl.minimum(tokens - first, TOGETHER)
    inside = tile % each
    return inside // wide, first + inside % wide


@gluon.jit
def _source(tile, rows, tokens, EXPERT, R16, more, BN: gl.constexpr, TOGETHER: gl.constexpr, ROUTED: gl.constexpr):
    """First tile of 16 rows of a tile's weights, and its token block."""
    row, token = _place(tile, rows, tokens, TOGETHER)
    row *= BN // 16
    if ROUTED:
        row += gl.load(EXPERT + token, mask=more, other=0).to(gl.int32) * R16
    return row, token


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """A barrier a stage, for bytes that one thread announces."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _expect(
    bars, stage, more, BN: gl.constexpr, BT: gl.constexpr, GROUPS: gl.constexpr, SW: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Announce the bytes of a stage. A barrier a source, and announced together: no two operations here touch one allocation, or
    the compiler would put a block-wide barrier between them."""
    mbarrier.expect(bars[0].index(stage), BT * 64, pred=more)
    mbarrier.expect(bars[1].index(stage), BN * 32, pred=more)
    mbarrier.expect(bars[2].index(stage), BN // 16 * SW * 2, pred=more)
    mbarrier.expect(bars[3].index(stage), BT * 64, pred=more)
    if ADD != NONE:
        mbarrier.expect(bars[4].index(stage), BN * GROUPS * 2, pred=more)


@gluon.jit
def _copy_weight(
    w_desc, s_desc, a_desc, ws, ss, zs, bars, stage, row, unit, more, GROUPS: gl.constexpr, GROUP: gl.constexpr, SW: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Words, scales and addends of one unit of a tile into a stage, by the copy engine. `row` counts tiles of 16 rows."""
    group = unit * 64 // GROUP
    copy_in(w_desc, [row, unit * 4, 0], bars[1].index(stage), ws.index(stage), pred=more)
    copy_in(s_desc, [row, group * (SW // GROUPS)], bars[2].index(stage), ss.index(stage), pred=more)
    if ADD != NONE:
        copy_in(a_desc, [row, group * 16], bars[4].index(stage), zs.index(stage), pred=more)


@gluon.jit
def _copy_x(x_desc, x0, x1, bars, stage, token, unit, more):
    """Activations of one unit into a stage, its two halves apart: a product of half a unit reads one block of shared memory."""
    copy_in(x_desc, [token, unit * 64], bars[0].index(stage), x0.index(stage), pred=more)
    copy_in(x_desc, [token, unit * 64 + 32], bars[3].index(stage), x1.index(stage), pred=more)


@gluon.jit
def _next(left, part, ahead, k, coming, programs, KS):
    """Where the copies go after a step: steps left in all and in the shared tiles, tile, step of it, next whole tile; and whether
    the tile is another."""
    left -= 1
    part -= 1
    k += 1
    other = (k == KS) | (part == 0)
    if other:
        k = 0 * k
        ahead += 1
        if part <= 0:
            ahead = coming
            coming += programs
    return left, part, ahead, k, coming, other


@gluon.jit
def _words(
    ws, ss, zs, bars, stage, phase, more, shift, LW: gl.constexpr, LS: gl.constexpr, LA: gl.constexpr, R: gl.constexpr,
    W: gl.constexpr, GROUPS: gl.constexpr, BY_16: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, WAY: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """A stage's words and terms in registers, its two halves apart. What comes after the last unit is never multiplied."""
    mbarrier.wait(bars[1].index(stage), phase, pred=more)
    mbarrier.wait(bars[2].index(stage), phase, pred=more)
    if ADD != NONE:
        mbarrier.wait(bars[4].index(stage), phase, pred=more)
        a = zs.index(stage).load(LA)
    else:
        a = 0
    return unit(ws.index(stage).load(LW), ss.index(stage).load(LS), a, shift, R, W, GROUPS, BY_16, SCALE, ADD, WAY, HALF)


@gluon.jit
def _owner(step, sharing, units):
    """The program whose share of the remainder holds a step."""
    return ((step + 1) * sharing + units - 1) // units - 1


@gluon.jit
def _by_lanes(acc, R: gl.constexpr, W: gl.constexpr):
    """An accumulator [16 R W, BT] as [blocks of 8 columns, lanes, 4]: what a lane has of a block is 16 bytes."""
    BT: gl.constexpr = acc.shape[1]
    v = gl.permute(gl.reshape(acc, [R, W, 2, 8, BT // 8, 4, 2]), [0, 4, 1, 3, 5, 2, 6])
    return gl.reshape(v, [R * (BT // 8), 32 * W, 4])


@gluon.jit
def _meet(PARTIAL, COUNT, acc, j, lo, sharing, units, p, KS, R: gl.constexpr, W: gl.constexpr):
    """A part of a tile's sums: left in PARTIAL, and taken together in order by whoever comes last."""
    BN: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = BN * BT
    first = _owner(j * KS, sharing, units)
    last = _owner(j * KS + KS - 1, sharing, units)
    v = _by_lanes(acc, R, W)
    L: gl.constexpr = v.type.layout
    at = axis(0, R * (BT // 8), L, 3) * (128 * W) + axis(1, 32 * W, L, 3) * 4 + axis(2, 4, L, 3)
    gl.store(PARTIAL + (p * 2 + (j - lo // KS)).to(gl.int64) * SIZE + at, v)
    block_barrier()
    done = gl.atomic_add(COUNT + j, 1) == last - first
    if done:
        total = gl.zeros_like(v)
        for q in range(first, last + 1):
            slot = q * 2 + (j - (q * units // sharing) // KS)
            total += gl.load(PARTIAL + slot.to(gl.int64) * SIZE + at)
        back = gl.permute(gl.reshape(total, [R, BT // 8, W, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
        acc = gl.convert_layout(gl.reshape(back, [BN, BT]), acc.type.layout, assert_trivial=True)
        gl.store(COUNT + j, 0)
    return acc, done


@gluon.jit
def _finished(
    acc, BIAS_PTR, GLOBAL, row, n, out_unit, divisor, C: gl.constexpr, GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Sums to outputs in float32: the decoder's power of two, the tensor's factor, the bias. `outputs.store` says why float64."""
    acc = acc * out_unit
    if (GLOBAL_OP == 1) and (not DIVIDE):
        acc = acc * gl.load(GLOBAL)
    elif GLOBAL_OP:
        g = gl.load(GLOBAL).to(gl.float64)
        wide = acc.to(gl.float64)
        if GLOBAL_OP == 1:
            wide = wide * g
        else:
            wide = wide / g
        acc = (wide / divisor).to(gl.float32)
    if HAS_BIAS:
        r = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, C))
        bias = gl.load(BIAS_PTR + r, mask=r < n, other=0).to(gl.float32)
        acc = acc + gl.expand_dims(bias, 1)
    return acc


@gluon.constexpr_function
def _pairs_layout(rows, tokens, warps):
    """Layout of an accumulator (rows, tokens) with rows 2 j and 2 j + 1 in one lane: lane and register trade a bit."""
    regs = [[1, 0], [8, 0]] + [[0, v] for v in (8, 16, 32, 64, 128) if v < tokens]
    regs += [[16 * warps * v, 0] for v in (1, 2) if 16 * warps * v < rows]
    lanes = [[0, 2], [0, 4], [0, 1], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16 * v, 0] for v in (1, 2, 4) if v < warps], [], [rows, tokens])


@gluon.jit
def _gated(y, GATE: gl.constexpr, W: gl.constexpr):
    """Rows 2 j (gate) and 2 j + 1 (up) of float32 sums (rows, tokens) to output j."""
    ROWS: gl.constexpr = y.shape[0]
    BT: gl.constexpr = y.shape[1]
    y = gl.convert_layout(y, _pairs_layout(ROWS, BT, W))
    g, u = gl.split(gl.permute(gl.reshape(y, [ROWS // 2, 2, BT]), [0, 2, 1]))
    return gated(g, u, GATE)


@gluon.jit(
    do_not_specialize=["m", "n", "tiles", "sharing", "rows", "tokens", "KS", "shift"],
    do_not_specialize_on_alignment=["BIAS_PTR", "GLOBAL", "BLOCKS", "EXPERT", "FIRST", "LAST", "COUNT"],
)
def wgmma_kernel(
    y_desc, Y, x_desc, w_desc, s_desc, a_desc, BIAS_PTR, GLOBAL, BLOCKS, EXPERT, FIRST, LAST, PARTIAL, COUNT,
    m, n, tiles, sharing, rows, tokens, KS, shift, out_unit, divisor,
    BT: gl.constexpr, R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    SW: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, WAY: gl.constexpr, GLOBAL_OP: gl.constexpr,
    DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr, TOGETHER: gl.constexpr, STORE: gl.constexpr,
    ROUTED: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x wᵀ + bias, one tile being 16 R W rows of w by BT tokens.

    tiles   rows · tokens blocks; `sharing` programs take those beyond whole rounds
    KS      steps of two units of 64 inputs in a row
    GROUPS  scale groups in a unit (1 when larger)    SW      16-bit words of a unit's scales in 16 rows
    W       warps, 4 a warpgroup                      R       tiles of 16 rows a warp
    STORE   2: the copy engine writes y               1: every lane writes what it has
    ROUTED  a stack of weights: BLOCKS[0] token blocks, block b of expert EXPERT[b] with LAST[b] − FIRST[b] tokens; x and y
            have BT rows a block
    GATE    rows 2 j and 2 j + 1 are gate and up of output j: 0 as they are, else the activation (experts.ACTIVATIONS)
    """
    BN: gl.constexpr = 16 * R * W
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    BY_16: gl.constexpr = GROUP == 16
    LW: gl.constexpr = words_layout(R, W, BY_16)
    LS: gl.constexpr = terms_layout(R, W, GROUPS, SW // GROUPS // 8)
    LA: gl.constexpr = terms_layout(R, W, GROUPS, 2)
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    x0 = gl.allocate_shared_memory(dtype, [STAGES, BT, 32], x_desc.layout)
    x1 = gl.allocate_shared_memory(dtype, [STAGES, BT, 32], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 16, 4, 32], w_desc.layout)
    ss = gl.allocate_shared_memory(gl.int16, [STAGES, BN // 16, SW], s_desc.layout)
    zs = ss
    if ADD != NONE:
        zs = gl.allocate_shared_memory(gl.int16, [STAGES, BN // 16, 16 * GROUPS], a_desc.layout)
    if STORE == 2:
        ys = gl.allocate_shared_memory(dtype, [BT, BN // 2 if GATE else BN], y_desc.layout)
    # The first half of x, words, scales, the second half of x, addends.
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    place, times = places(R, W, GROUPS, KIND, WAY)
    fence_async_shared()
    block_barrier()
    if PDL:
        gdc_launch_dependents()
    R16 = (n + 15) // 16  # tiles of 16 rows of an expert
    if ROUTED:
        if PDL:
            gdc_wait()  # which expert's words to read is known only now
        tokens = gl.load(BLOCKS).to(gl.int32)
        tiles = rows * tokens
        sharing = gl.maximum(tiles % gl.num_programs(0), 1)

    # An even share of the steps of the tiles that are no whole round, then whole rounds.
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    whole = tiles // programs
    units = (tiles - whole * programs) * KS
    lo = gl.minimum(p * units // sharing, units)
    hi = gl.minimum((p + 1) * units // sharing, units)
    # Where the copies are.
    part = hi - lo
    left = whole * KS + part
    ahead = whole * programs + lo // KS
    k_ahead = lo % KS
    coming = p + 0
    if part == 0:
        ahead = p + 0
        k_ahead = 0 * p
        coming = p + programs
    row_ahead, token_ahead = _source(ahead, rows, tokens, EXPERT, R16, left > 0, BN, TOGETHER, ROUTED)
    todo = left
    for i in gl.static_range(STAGES - 1):
        _expect(bars, i, left > i, BN, BT, GROUPS, SW, ADD)
    block_barrier()
    for i in gl.static_range(STAGES - 1):  # weights do not depend on the previous kernel, x does
        _copy_weight(w_desc, s_desc, a_desc, ws, ss, zs, bars, i, row_ahead, k_ahead, left > 0, GROUPS, GROUP, SW, ADD)
        if i == 0:
            if PDL and not ROUTED:
                gdc_wait()
        _copy_x(x_desc, x0, x1, bars, i, token_ahead * BT, k_ahead, left > 0)
        left, part, ahead, k_ahead, coming, other = _next(left, part, ahead, k_ahead, coming, programs, KS)
        if other:
            row_ahead, token_ahead = _source(ahead, rows, tokens, EXPERT, R16, left > 0, BN, TOGETHER, ROUTED)
    stage = 0 * p
    phase = 0 * p
    first, second = _words(
        ws, ss, zs, bars, stage, phase, todo > 0, shift, LW, LS, LA, R, W, GROUPS, BY_16, SCALE, ADD, WAY, HALF
    )
    even = operand(first, place, times, R, W, GROUPS, KIND, SCALE, ADD, WAY, HALF, A)
    for seg in range(whole + 2):
        tile = (seg - 2) * programs + p
        k0 = 0 * p
        k1 = KS + 0 * p
        if seg < 2:
            j = lo // KS + seg
            k0 = gl.maximum(lo - j * KS, 0)
            k1 = gl.maximum(gl.minimum(hi - j * KS, KS), k0)
            tile = whole * programs + j
        acc = gl.zeros([BN, BT], gl.float32, layout=C)
        odd = gl.zeros([BN, 32], dtype, layout=A)
        for k in range(k0, k1):  # noqa: B007
            mbarrier.wait(bars[0].index(stage), phase)
            acc = warpgroup_mma(even, x0.index(stage).permute((1, 0)), acc, is_async=True)
            acc, odd = warpgroup_mma_wait(1, deps=[acc, odd])
            odd = operand(second, place, times, R, W, GROUPS, KIND, SCALE, ADD, WAY, HALF, A)
            free = stage - 1
            if stage == 0:
                free = STAGES - 1 + 0 * p
            _expect(bars, free, left > 0, BN, BT, GROUPS, SW, ADD)
            block_barrier()  # everybody is done with the unit before
            _copy_weight(w_desc, s_desc, a_desc, ws, ss, zs, bars, free, row_ahead, k_ahead, left > 0, GROUPS, GROUP, SW, ADD)
            _copy_x(x_desc, x0, x1, bars, free, token_ahead * BT, k_ahead, left > 0)
            left, part, ahead, k_ahead, coming, other = _next(left, part, ahead, k_ahead, coming, programs, KS)
            if other:
                row_ahead, token_ahead = _source(ahead, rows, tokens, EXPERT, R16, left > 0, BN, TOGETHER, ROUTED)
            mbarrier.wait(bars[3].index(stage), phase)
            acc = warpgroup_mma(odd, x1.index(stage).permute((1, 0)), acc, is_async=True)
            stage += 1
            if stage == STAGES:
                stage = 0 * p
                phase ^= 1
            todo -= 1
            first, second = _words(
                ws, ss, zs, bars, stage, phase, todo > 0, shift, LW, LS, LA, R, W, GROUPS, BY_16, SCALE, ADD, WAY, HALF
            )
            acc, even = warpgroup_mma_wait(1, deps=[acc, even])
            even = operand(first, place, times, R, W, GROUPS, KIND, SCALE, ADD, WAY, HALF, A)
        acc, odd = warpgroup_mma_wait(0, deps=[acc, odd])
        if k1 > k0:
            row, token = _place(tile, rows, tokens, TOGETHER)
            last = p >= 0
            if k1 - k0 < KS:
                acc, last = _meet(PARTIAL, COUNT, acc, tile - whole * programs, lo, sharing, units, p, KS, R, W)
            if last:
                end = m
                expert = 0 * p
                if ROUTED:
                    expert = gl.load(EXPERT + token).to(gl.int32)
                    end = token * BT + gl.load(LAST + token).to(gl.int32) - gl.load(FIRST + token).to(gl.int32)
                y = _finished(
                    acc, BIAS_PTR + expert.to(gl.int64) * n, GLOBAL + expert, row * BN, n, out_unit, divisor, C, GLOBAL_OP,
                    DIVIDE, HAS_BIAS,
                )  # fmt: skip
                if GATE:
                    y = _gated(y, GATE, W)
                OUT: gl.constexpr = BN // 2 if GATE else BN
                if STORE == 2:
                    tma.store_wait(0)
                    block_barrier()
                    ys.permute((1, 0)).store(y.to(dtype))
                    fence_async_shared()
                    block_barrier()
                    copy_out(y_desc, [token * BT, row * OUT], ys)
                else:
                    L: gl.constexpr = y.type.layout
                    width = n // 2 if GATE else n
                    r = row * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, L))[:, None]
                    t = token * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, L))[None, :]
                    gl.store(Y + t.to(gl.int64) * width + r, y.to(Y.dtype.element_ty), mask=(r < width) & (t < end))
    if STORE == 2:
        tma.store_wait(0)
