"""m from 32 up on Hopper for 4-bit weights: codes decoded in registers straight into the register operand of wgmma."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .decode import E2M1, E4M3S, E8M0, E8M0_NORMAL, INT, UE4M3, UINT
from .tiles import BIAS, NONE, ZERO


# Word in $4, two halves of the scale of row g in $12, of row g + 8 in $14; addends in $20 and $22.
_CODES_F16 = gl.constexpr("""
    .reg .b32 t, one, k, c; mov.b32 one, 0x64006400; shr.u32 t, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, one, 0xea; lop3.b32 $1, $4, 0x00f000f0, one, 0xea;
    lop3.b32 $2, t, 0x000f000f, one, 0xea; lop3.b32 $3, t, 0x00f000f0, one, 0xea;
    mov.b32 k, 0x2c002c00; """)
_INT_F16 = gl.constexpr("""
    mov.b32 one, 0x64086408; mov.b32 c, 0xd480d480; sub.f16x2 $0, $0, one; sub.f16x2 $2, $2, one;
    fma.rn.f16x2 $1, $1, k, c; fma.rn.f16x2 $3, $3, k, c; """)
_UINT_F16 = gl.constexpr("""
    mov.b32 c, 0xd400d400; sub.f16x2 $0, $0, one; sub.f16x2 $2, $2, one;
    fma.rn.f16x2 $1, $1, k, c; fma.rn.f16x2 $3, $3, k, c; """)
_E2M1_F16 = gl.constexpr("""
    .reg .b32 t;
    and.b32 $0, $4, 0x8e008e00; shl.b32 t, $4, 3; and.b32 $1, t, 0x8e008e00;
    and.b32 t, $4, 0x40384038; mul.lo.u32 t, t, 66; and.b32 $2, t, 0x8e008e00;
    and.b32 t, $4, 0x20072007; mul.lo.u32 t, t, 516; and.b32 $3, t, 0x8e008e00; """)
_TIMES = gl.constexpr("""
    mul.rn.f16x2 $0, $0, $12; mul.rn.f16x2 $1, $1, $14; mul.rn.f16x2 $2, $2, $12; mul.rn.f16x2 $3, $3, $14; """)
_LESS = gl.constexpr("""
    sub.rn.f16x2 $0, $0, $20; sub.rn.f16x2 $1, $1, $22; sub.rn.f16x2 $2, $2, $20; sub.rn.f16x2 $3, $3, $22; """)
_PLUS = gl.constexpr("""
    fma.rn.f16x2 $0, $0, $12, $20; fma.rn.f16x2 $1, $1, $14, $22; fma.rn.f16x2 $2, $2, $12, $20;
    fma.rn.f16x2 $3, $3, $14, $22; """)


@gluon.constexpr_function
def _assembly(kind, add):
    def text(c):
        return getattr(c, "value", c)

    body = text(_E2M1_F16) if kind == E2M1 else text(_CODES_F16) + text(_UINT_F16 if kind == UINT else _INT_F16)
    if add == ZERO:
        body += text(_LESS)
    return "{" + body + text(_PLUS if add == BIAS else _TIMES) + "}"


@gluon.constexpr_function
def _constraints(add):
    return ",".join(["=&r"] * 4 + ["r"] * (16 if add == NONE else 24))


@gluon.constexpr_function
def _bits(values):
    """[1, 2, 4, ...] below `values`."""
    out = []
    v = 1
    while v < values:
        out.append(v)
        v *= 2
    return out


@gluon.constexpr_function
def words_layout(r, wgs, u):
    """[4 R WGS tiles, 4 U rows of 128 bytes, 32 words]: a warp a tile, 16 bytes a lane, units and then tiles in registers."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[0, 4 * v, 0] for v in _bits(u)] + [[4 * wgs * v, 0, 0] for v in _bits(r)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    warps = [[v, 0, 0] for v in _bits(4 * wgs)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [4 * r * wgs, 4 * u, 32])


@gluon.constexpr_function
def scales_layout(r, wgs, gs, pair):
    """[4 R WGS tiles, GS groups · 8 rows · pair]: what rows g and g + 8 need, in each of the four lanes of a row."""
    w = 8 * pair
    regs = ([[0, 1]] if pair == 2 else []) + [[0, w * v] for v in _bits(gs)] + [[4 * wgs * v, 0] for v in _bits(r)]
    lanes = [[0, 0], [0, 0], [0, pair], [0, 2 * pair], [0, 4 * pair]]
    return gl.DistributedLinearLayout(regs, lanes, [[v, 0] for v in _bits(4 * wgs)], [], [4 * r * wgs, w * gs])


@gluon.constexpr_function
def nine(r, wgs, gs, per):
    """[R, warp, g, t, group, word of the group, i, h, p]: registers in the order of wgmma's A operand."""
    return gl.BlockedLayout(
        [r, 1, 1, 1, gs, per, 2, 2, 2], [1, 1, 8, 4, 1, 1, 1, 1, 1], [1, 4 * wgs, 1, 1, 1, 1, 1, 1, 1], [3, 8, 7, 6, 5, 4, 2, 1, 0]
    )


@gluon.jit
def twice(v):
    """A float16 (bits in the low half) in both halves of a register."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def scale_pairs(v, SCALE: gl.constexpr, FOLD: gl.constexpr, R: gl.constexpr, W: gl.constexpr, GS: gl.constexpr):
    """Stored scales of rows g and g + 8 as float16 in both halves of a register: [R, 4, 8, GS, 2]."""
    if SCALE == E8M0_NORMAL:
        b = gl.reshape(v, [R, W, GS, 8]).to(gl.int32)
        s = gl.join(((b & 255) - (112 - FOLD)) * 0x04000400, (((b >> 8) & 255) - (112 - FOLD)) * 0x04000400)
    else:
        s = twice(gl.reshape(v, [R, W, GS, 8, 2]).to(gl.int32))
    return gl.permute(s, [0, 1, 3, 2, 4])


@gluon.jit
def operand(
    w, s, KIND: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr, FOLD: gl.constexpr, GS: gl.constexpr, R: gl.constexpr,
    W: gl.constexpr, U: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Words [W R, 4 U, 32] and stored scales to the finished A operand [16 W R, 64 U]; W warps."""
    PER: gl.constexpr = 4 * U // GS
    L: gl.constexpr = nine(R, W // 4, GS, PER)
    full: gl.constexpr = [R, W, 8, 4, GS, PER, 2, 2, 2]
    zero = gl.zeros(full, gl.int32, layout=L)
    w = gl.permute(gl.reshape(w, [R, W, U, 8, 4, 4]), [0, 1, 3, 4, 2, 5])
    w = gl.convert_layout(gl.reshape(w, [R, W, 8, 4, GS, PER, 1, 1, 1]), L)
    w, _ = gl.broadcast(w, zero)
    s = gl.reshape(scale_pairs(s, SCALE, FOLD, R, W, GS), [R, W, 8, 1, GS, 1, 1, 2, 1])
    s, _ = gl.broadcast(gl.convert_layout(s, L), zero)
    asm: gl.constexpr = _assembly(KIND, ADD)
    constraints: gl.constexpr = _constraints(ADD)
    v = gl.inline_asm_elementwise(asm, constraints, [w, s], dtype=gl.float16, is_pure=True, pack=8)
    v = gl.reshape(gl.permute(v, [0, 1, 7, 2, 4, 5, 6, 3, 8]), [16 * W * R, 64 * U])
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def _place(tile, rows, tokens, TOGETHER: gl.constexpr):
    """Row block and token block of a tile: TOGETHER token blocks side by side, then down the rows."""
    each = TOGETHER * rows
    first = tile // each * TOGETHER
    wide = gl.minimum(tokens - first, TOGETHER)
    inside = tile % each
    return inside // wide, first + inside % wide


@gluon.jit
def _copy(
    x_desc, w_desc, s_desc, xs, ws, ss, full, stage, row, token, k, more,
    BN: gl.constexpr, BT: gl.constexpr, U: gl.constexpr, GS: gl.constexpr, GROUP: gl.constexpr, SW: gl.constexpr,
):  # fmt: skip
    """x, words and scales of step k of a tile into a stage, by the copy engine."""
    BYTES: gl.constexpr = BT * U * 128 + BN // 16 * (U * 512 + SW * 2)
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES, pred=more)
    tma.async_copy_global_to_shared(x_desc, [token * BT, k * (U * 64)], bar, xs.index(stage), pred=more)
    tma.async_copy_global_to_shared(w_desc, [row * (BN // 16), k * (U * 4), 0], bar, ws.index(stage), pred=more)
    tma.async_copy_global_to_shared(
        s_desc, [row * (BN // 16), k * (U * 64) // GROUP * (SW // GS)], bar, ss.index(stage), pred=more
    )


@gluon.jit
def _next(
    left, turn, ahead, k_ahead, row_ahead, token_ahead, whole, programs, lo, rows, tokens, KS, TOGETHER: gl.constexpr
):  # fmt: skip
    """Where the copies go after a step."""
    left -= 1
    k_ahead += 1
    if k_ahead == KS:
        k_ahead = 0 * ahead
        turn += 1
        ahead += programs
        if turn >= whole:
            ahead = whole * programs + lo // KS + (turn - whole)
            if turn == whole:
                k_ahead = lo % KS
        row_ahead, token_ahead = _place(ahead, rows, tokens, TOGETHER)
    return left, turn, ahead, k_ahead, row_ahead, token_ahead


@gluon.jit
def _owner(v, sharing, units):
    """The program whose range of the remainder holds step v."""
    return ((v + 1) * sharing + units - 1) // units - 1


@gluon.jit
def _meet(PARTIAL, COUNT, acc, j, lo, sharing, units, p, KS, SIZE: gl.constexpr, at):
    """A part of a tile's sums: left in PARTIAL, and taken together in order by whoever comes last."""
    first = _owner(j * KS, sharing, units)
    last = _owner(j * KS + KS - 1, sharing, units)
    gl.store(PARTIAL + (p * 2 + (j - lo // KS)).to(gl.int64) * SIZE + at, acc)
    gl.thread_barrier()
    done = gl.atomic_add(COUNT + j, 1) == last - first
    if done:
        acc = gl.zeros_like(acc)
        for q in range(first, last + 1):
            slot = q * 2 + (j - (q * units // sharing) // KS)
            acc += gl.load(PARTIAL + slot.to(gl.int64) * SIZE + at)
        gl.store(COUNT + j, 0)
    return acc, done


@gluon.jit(do_not_specialize=["m", "n", "tiles", "rows", "tokens", "KS"])
def wgmma_kernel(
    y_desc, Y, x_desc, w_desc, s_desc, PARTIAL, COUNT, m, n, tiles, rows, tokens, KS, unit,
    BT: gl.constexpr, R: gl.constexpr, WGS: gl.constexpr, U: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, GS: gl.constexpr, SW: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, ADD: gl.constexpr,
    FOLD: gl.constexpr, TOGETHER: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """y (m, n) = x wᵀ."""
    BN: gl.constexpr = 64 * R * WGS
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WGS, 1], [16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    LW: gl.constexpr = words_layout(R, WGS, U)
    LS: gl.constexpr = scales_layout(R, WGS, GS, SW // GS // 8)
    xs = gl.allocate_shared_memory(gl.float16, [STAGES, BT, 64 * U], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 16, 4 * U, 32], w_desc.layout)
    ss = gl.allocate_shared_memory(gl.int16, [STAGES, BN // 16, SW], s_desc.layout)
    if STORE == 1:
        ys = gl.allocate_shared_memory(gl.float16, [BT, BN], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    # Whole rounds of tiles, then an even share of the steps of the rest.
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    whole = tiles // programs
    units = (tiles - whole * programs) * KS
    sharing = gl.maximum(gl.minimum(programs, units), 1)
    lo = gl.minimum(p * units // sharing, units)
    hi = gl.minimum((p + 1) * units // sharing, units)
    # Where the copies are: round, tile, step in it, steps left.
    left = whole * KS + hi - lo
    ahead = p + 0
    k_ahead = 0 * p
    if whole == 0:
        ahead = lo // KS
        k_ahead = lo % KS
    turn = 0 * p
    row_ahead, token_ahead = _place(ahead, rows, tokens, TOGETHER)
    LATE: gl.constexpr = (STAGES - 1) % 2  # which half of a step the copies are at when a step begins
    for i in gl.static_range(STAGES - 1):
        _copy(
            x_desc, w_desc, s_desc, xs, ws, ss, full, i, row_ahead, token_ahead, 2 * k_ahead + i % 2, left > 0, BN, BT, U, GS, GROUP, SW
        )  # fmt: skip
        if i % 2 == 1:
            left, turn, ahead, k_ahead, row_ahead, token_ahead = _next(
                left, turn, ahead, k_ahead, row_ahead, token_ahead, whole, programs, lo, rows, tokens, KS, TOGETHER
            )
    stage = 0 * p
    phase = 0 * p
    for seg in range(whole + 2):
        tile = seg * programs + p
        k0 = 0 * p
        k1 = KS + 0 * p
        if seg >= whole:
            j = lo // KS + (seg - whole)
            k0 = gl.maximum(lo - j * KS, 0)
            k1 = gl.maximum(gl.minimum(hi - j * KS, KS), k0)
            tile = whole * programs + j
        acc = gl.zeros([BN, BT], gl.float32, layout=C)
        odd = gl.zeros([BN, 64 * U], gl.float16, layout=A)
        for k in range(k0, k1):
            mbarrier.wait(full.index(stage), phase)
            even = operand(ws.index(stage).load(LW), ss.index(stage).load(LS), KIND, SCALE, ADD, FOLD, GS, R, 4 * WGS, U, A)
            acc = warpgroup_mma(even, xs.index(stage).permute((1, 0)), acc, is_async=True)
            acc, odd = warpgroup_mma_wait(1, deps=[acc, odd])
            gl.thread_barrier()
            free = stage - 1
            if stage == 0:
                free = STAGES - 1 + 0 * p
            _copy(
                x_desc, w_desc, s_desc, xs, ws, ss, full, free, row_ahead, token_ahead, 2 * k_ahead + LATE, left > 0, BN, BT, U,
                GS, GROUP, SW,
            )  # fmt: skip
            if LATE == 1:
                left, turn, ahead, k_ahead, row_ahead, token_ahead = _next(
                    left, turn, ahead, k_ahead, row_ahead, token_ahead, whole, programs, lo, rows, tokens, KS, TOGETHER
                )
            stage += 1
            if stage == STAGES:
                stage = 0 * p
                phase ^= 1
            mbarrier.wait(full.index(stage), phase)
            odd = operand(ws.index(stage).load(LW), ss.index(stage).load(LS), KIND, SCALE, ADD, FOLD, GS, R, 4 * WGS, U, A)
            acc = warpgroup_mma(odd, xs.index(stage).permute((1, 0)), acc, is_async=True)
            acc, even = warpgroup_mma_wait(1, deps=[acc, even])
            gl.thread_barrier()
            free = stage - 1
            if stage == 0:
                free = STAGES - 1 + 0 * p
            _copy(
                x_desc, w_desc, s_desc, xs, ws, ss, full, free, row_ahead, token_ahead, 2 * k_ahead + 1 - LATE, left > 0, BN, BT,
                U, GS, GROUP, SW,
            )  # fmt: skip
            if LATE == 0:
                left, turn, ahead, k_ahead, row_ahead, token_ahead = _next(
                    left, turn, ahead, k_ahead, row_ahead, token_ahead, whole, programs, lo, rows, tokens, KS, TOGETHER
                )
            stage += 1
            if stage == STAGES:
                stage = 0 * p
                phase ^= 1
        acc, odd = warpgroup_mma_wait(0, deps=[acc, odd])
        if k1 > k0:
            row, token = _place(tile, rows, tokens, TOGETHER)
            last = p >= 0
            if k1 - k0 < KS:
                at = gl.arange(0, BN, layout=gl.SliceLayout(1, C))[:, None] * BT
                at = at + gl.arange(0, BT, layout=gl.SliceLayout(0, C))[None, :]
                acc, last = _meet(PARTIAL, COUNT, acc, tile - whole * programs, lo, sharing, units, p, KS, BN * BT, at)
            if last:
                acc = acc * unit
                if STORE == 1:
                    tma.store_wait(0)
                    gl.thread_barrier()
                    ys.permute((1, 0)).store(acc.to(gl.float16))
                    fence_async_shared()
                    gl.thread_barrier()
                    tma.async_copy_shared_to_global(y_desc, [token * BT, row * BN], ys)
                else:
                    r = row * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, C))[:, None]
                    t = token * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, C))[None, :]
                    gl.store(Y + t.to(gl.int64) * n + r, acc.to(gl.float16), mask=(r < n) & (t < m))
    if STORE == 1:
        tma.store_wait(0)
