"""The end of a tile of the fused schedule: parts that several programs summed meet, and sums become outputs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..mma.epilogue import gated
from ..mma.operands import axis
from .gluon_compat import block_barrier


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
def _from_lanes(v, like, R: gl.constexpr, W: gl.constexpr):
    """The inverse of `_by_lanes`."""
    v = gl.permute(gl.reshape(v, [R, like.shape[1] // 8, W, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(gl.reshape(v, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def give(sums, given, taken, slot: gl.constexpr, turn, acc, R: gl.constexpr):
    """Sums of a warpgroup that shares its rows with another, left in shared memory once the last ones have been taken."""
    mbarrier.wait(taken.index(slot), turn ^ 1)
    sums.index(slot).store(_by_lanes(acc, R, 4))
    block_barrier()
    mbarrier.arrive(given.index(slot))


@gluon.jit
def take(sums, given, taken, WG: gl.constexpr, turn, acc, R: gl.constexpr, WGS: gl.constexpr, WGK: gl.constexpr):
    """The sums of all warpgroups that share the rows of warpgroup WG, in order."""
    if WGK == 1:
        return acc
    else:
        v = _by_lanes(acc, R, 4)
        L: gl.constexpr = v.type.layout
        for i in gl.static_range(WGK - 1):
            mbarrier.wait(given.index(i * WGS + WG), turn)
            v += sums.index(i * WGS + WG).load(L)
            block_barrier()
            mbarrier.arrive(taken.index(i * WGS + WG))
        return _from_lanes(v, acc, R, 4)


@gluon.jit
def meet(PARTIAL, COUNT, acc, j, sharing, units, p, KS, R: gl.constexpr, WG: gl.constexpr, WGS: gl.constexpr):
    """A part of a tile's sums: left in PARTIAL, and taken together in order by whoever comes last."""
    BN: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = BN * BT
    first = _owner(j * KS, sharing, units)
    last = _owner(j * KS + KS - 1, sharing, units)
    W: gl.constexpr = 4
    v = _by_lanes(acc, R, W)
    L: gl.constexpr = v.type.layout
    at = axis(0, R * (BT // 8), L, 3) * (128 * W) + axis(1, 32 * W, L, 3) * 4 + axis(2, 4, L, 3)
    count = COUNT + j * WGS + WG
    slot = (p * 2 + (j - (p * units // sharing) // KS)) * WGS + WG
    if last - first == 1:  # two parts: the second waits for what the first is writing; a + b is b + a
        done = gl.atomic_add(count, 1) > 0
        if done:
            while gl.atomic_add(count, 0) < 3:
                pass
            q = first + last - p
            theirs = (q * 2 + (j - (q * units // sharing) // KS)) * WGS + WG
            v += gl.load(PARTIAL + theirs.to(gl.int64) * SIZE + at)
            gl.store(count, 0)
        else:
            gl.store(PARTIAL + slot.to(gl.int64) * SIZE + at, v)
            block_barrier()
            gl.atomic_add(count, 1)
    else:
        gl.store(PARTIAL + slot.to(gl.int64) * SIZE + at, v)
        block_barrier()
        done = gl.atomic_add(count, 1) == last - first
        if done:
            v = gl.zeros_like(v)
            for q in range(first, last + 1):
                theirs = (q * 2 + (j - (q * units // sharing) // KS)) * WGS + WG
                v += gl.load(PARTIAL + theirs.to(gl.int64) * SIZE + at)
            gl.store(count, 0)
    return _from_lanes(v, acc, R, W), done


@gluon.jit
def finished(
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
def gated_rows(y, GATE: gl.constexpr, W: gl.constexpr):
    """Rows 2 j (gate) and 2 j + 1 (up) of float32 sums (rows, tokens) to output j."""
    ROWS: gl.constexpr = y.shape[0]
    BT: gl.constexpr = y.shape[1]
    y = gl.convert_layout(y, _pairs_layout(ROWS, BT, W))
    g, u = gl.split(gl.permute(gl.reshape(y, [ROWS // 2, 2, BT]), [0, 2, 1]))
    return gated(g, u, GATE)
