"""The end of a tile of the fused schedule: parts that several programs summed are added, and sums
become outputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..mma.epilogue import gated
from ..mma.operands import axis
from .gluon_compat import block_barrier


@gluon.jit
def owner(step, sharing, units):
    """The program whose part of the remainder holds a step."""
    return ((step + 1) * sharing + units - 1) // units - 1


@gluon.jit
def by_lanes(acc, R: gl.constexpr, W: gl.constexpr):
    """An accumulator [16 R W, BT] as [blocks of 8 columns, lanes, 4]: what a lane has of a block is
    16 bytes.
    """
    BT: gl.constexpr = acc.shape[1]
    v = gl.permute(gl.reshape(acc, [R, W, 2, 8, BT // 8, 4, 2]), [0, 4, 1, 3, 5, 2, 6])
    return gl.reshape(v, [R * (BT // 8), 32 * W, 4])


@gluon.jit
def from_lanes(v, like, R: gl.constexpr, W: gl.constexpr):
    """The inverse of `by_lanes`."""
    v = gl.permute(gl.reshape(v, [R, like.shape[1] // 8, W, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(gl.reshape(v, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def hand_over(shared, slot: gl.constexpr, parity, acc, C: gl.constexpr):
    """Sums of a warpgroup that shares its rows with another, left in shared memory once the last
    ones have been read.
    """
    mbarrier.wait(shared.read.index(slot), parity ^ 1)
    shared.sums.index(slot).store(by_lanes(acc, C.row_blocks, 4))
    block_barrier()
    mbarrier.arrive(shared.written.index(slot))


@gluon.jit
def take_over(shared, WG: gl.constexpr, parity, acc, C: gl.constexpr):
    """The sums of all warpgroups that share the rows of warpgroup WG, in order."""
    if C.input_groups == 1:
        return acc
    else:
        OTHERS: gl.constexpr = C.input_groups - 1
        v = by_lanes(acc, C.row_blocks, 4)
        L: gl.constexpr = v.type.layout
        for i in gl.static_range(OTHERS):
            mbarrier.wait(shared.written.index(i * C.row_groups + WG), parity)
            v += shared.sums.index(i * C.row_groups + WG).load(L)
            block_barrier()
            mbarrier.arrive(shared.read.index(i * C.row_groups + WG))
        return from_lanes(v, acc, C.row_blocks, 4)


@gluon.jit
def add_parts(scratch, acc, j, split, p, units, WG: gl.constexpr, C: gl.constexpr):
    """A part of the sums of tile j of the remainder: left in memory, and added in order by the
    program that comes last.
    """
    BN: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = BN * BT
    R: gl.constexpr = C.row_blocks
    WGS: gl.constexpr = C.row_groups
    first = owner(j * units, split.sharing, split.units)
    last = owner(j * units + units - 1, split.sharing, split.units)
    W: gl.constexpr = 4
    v = by_lanes(acc, R, W)
    L: gl.constexpr = v.type.layout
    at = axis(0, R * (BT // 8), L, 3) * (128 * W) + axis(1, 32 * W, L, 3) * 4 + axis(2, 4, L, 3)
    count = scratch.arrivals + j * WGS + WG
    slot = (p * 2 + (j - (p * split.units // split.sharing) // units)) * WGS + WG
    if last - first == 1:  # two parts: the second waits for what the first is writing; a + b is b + a
        done = gl.atomic_add(count, 1) > 0
        if done:
            while gl.atomic_add(count, 0) < 3:
                pass
            q = first + last - p
            theirs = (q * 2 + (j - (q * split.units // split.sharing) // units)) * WGS + WG
            v += gl.load(scratch.partial + theirs.to(gl.int64) * SIZE + at)
            gl.store(count, 0)
        else:
            gl.store(scratch.partial + slot.to(gl.int64) * SIZE + at, v)
            block_barrier()
            gl.atomic_add(count, 1)
    else:
        gl.store(scratch.partial + slot.to(gl.int64) * SIZE + at, v)
        block_barrier()
        done = gl.atomic_add(count, 1) == last - first
        if done:
            v = gl.zeros_like(v)
            for q in range(first, last + 1):
                theirs = (q * 2 + (j - (q * split.units // split.sharing) // units)) * WGS + WG
                v += gl.load(scratch.partial + theirs.to(gl.int64) * SIZE + at)
            gl.store(count, 0)
    return from_lanes(v, acc, R, W), done


@gluon.jit
def finished(acc, values, expert, row, n, factors, L: gl.constexpr, C: gl.constexpr):
    """Sums to outputs in float32: the decoder's power of two, the tensor's factor, the bias.
    mma/epilogue.py says why float64.
    """
    acc = acc * factors.unit
    if (C.global_op == 1) and (not C.divide):
        acc = acc * gl.load(values.global_scale + expert)
    elif C.global_op:
        g = gl.load(values.global_scale + expert).to(gl.float64)
        d = acc.to(gl.float64)
        if C.global_op == 1:
            d = d * g
        else:
            d = d / g
        acc = (d / factors.divisor).to(gl.float32)
    if C.has_bias:
        bias = values.bias + expert.to(gl.int64) * n
        r = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, L))
        acc = acc + gl.expand_dims(gl.load(bias + r, mask=r < n, other=0).to(gl.float32), 1)
    return acc


@gluon.constexpr_function
def _pairs_layout(rows, tokens, warps):
    """Layout of an accumulator (rows, tokens) with rows 2 j and 2 j + 1 in one lane: lane and
    register trade a bit.
    """
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
