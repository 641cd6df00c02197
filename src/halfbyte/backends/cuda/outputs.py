"""The end of a tile: partial sums of warps and slots meet, and one value an output is written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .operands import axis


@gluon.constexpr_function
def meeting(wk, wn, pairs, nb, right):
    """Layout in which one thread holds all WK sums of an output: one conflict-free pass through shared memory and additions in
    order.

    (A reduction across warps left to the compiler writes with a stride of WK words and cost 16 µs of 30 at m = 16.)
    """
    p = min(pairs, wk)
    b = min(nb, wk // p)
    lanes = [1, 1, 8, 2 // right, 1, 1, 2, right]
    return gl.BlockedLayout([wk, 1, 1, 1, 1, 1, 1, 1], lanes, [1, wn, 1, p, wk // (p * b), b, 1, 1], [0, 2, 6, 7, 3, 5, 4, 1])


@gluon.constexpr_function
def side_by_side(wk, wn, pairs, rt, nb):
    """Layout of [WN, 4, pairs, RT, NB, down, right, 2] in which a thread holds a gate and its up."""
    r = min(rt, wk)
    b = min(nb, wk // r)
    lanes = [1, 4, pairs, 1, 1, 2, 4 // pairs, 1]
    return gl.BlockedLayout([1] * 7 + [2], lanes, [wn, 1, wk // (r * b), r, b, 1, 1, 1], [7, 1, 2, 5, 6, 4, 3, 0])


@gluon.jit
def gated(g, u, KIND: gl.constexpr):
    """swiglu (1), gpt-oss' clamped form (2) or geglu (3) in float32, as experts.gate_kernel."""
    if KIND == 1:
        return g / (1 + gl.exp(-g)) * u
    elif KIND == 2:
        g = gl.where(g > 7.0, 7.0, g)
        u = gl.where(u > 7.0, 7.0, gl.where(u < -7.0, -7.0, u))
        return g / (1 + gl.exp(-1.702 * g)) * (u + 1)
    else:  # gelu by tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        return 0.5 * g * (2 - 2 / (gl.exp(2 * z) + 1)) * u


@gluon.jit
def store(
    Y, BIAS_PTR, GLOBAL, YROW, y, first, tokens, m, n, divisor,
    GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, TOKENS: gl.constexpr, ROUTED: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """Sums [WK, WN, 32, RT, NB, 2 down, 2 right] to y: row 16 · tile + lane / 4 + 8 · down, column 2 · (lane % 4) + right, over
    WK and slots. With GATE, rows 2 j and 2 j + 1 become output j."""
    SLOTS: gl.constexpr = 4 if TOKENS <= 2 else 8 // TOKENS  # lanes that hold the same token
    PAIRS: gl.constexpr = 4 // SLOTS
    if TOKENS == 1:
        even, odd = gl.split(y)
        y = gl.expand_dims(even + odd, 6)
    RIGHT: gl.constexpr = 1 if TOKENS == 1 else 2
    y = gl.reshape(y, [WK, WN, 8, SLOTS, PAIRS, RT, NB, 2, RIGHT])
    y = gl.sum(y, 3)  # [WK, WN, 8, PAIRS, RT, NB, down, right]
    if WK > 1:
        y = gl.convert_layout(y, meeting(WK, WN, PAIRS, NB, RIGHT))
    y = gl.sum(y, 0)
    R: gl.constexpr = y.type.layout
    row = (first + axis(0, WN, R, 7) * RT + axis(3, RT, R, 7)) * 16 + axis(1, 8, R, 7) + axis(5, 2, R, 7) * 8
    token = tokens + axis(4, NB, R, 7) * 8 + axis(2, PAIRS, R, 7) * 2 + axis(6, RIGHT, R, 7)
    if (GLOBAL_OP == 1) and (not DIVIDE):
        y = y * gl.load(GLOBAL)
    elif GLOBAL_OP:  # float64 keeps the quotient clear of float32's midpoints (docs/cuda.md)
        g = gl.load(GLOBAL).to(gl.float64)
        wide = y.to(gl.float64)
        if GLOBAL_OP == 1:
            wide = wide * g
        else:
            wide = wide / g
        y = (wide / divisor).to(gl.float32)
    keep = (row < n) & (token < m)
    if HAS_BIAS:
        y = y + gl.load(BIAS_PTR + row + token * 0, mask=keep, other=0).to(gl.float32)
    if GATE:
        G: gl.constexpr = side_by_side(WK, WN, PAIRS, RT, NB)
        y = gl.permute(gl.reshape(y, [WN, 4, 2, PAIRS, RT, NB, 2, RIGHT]), (0, 1, 3, 4, 5, 6, 7, 2))
        gate, up = gl.split(gl.convert_layout(y, G))
        y = gated(gate, up, GATE)
        Q: gl.constexpr = y.type.layout
        row = (first + axis(0, WN, Q, 7) * RT + axis(3, RT, Q, 7)) * 8 + axis(1, 4, Q, 7) + axis(5, 2, Q, 7) * 4
        token = tokens + axis(4, NB, Q, 7) * 8 + axis(2, PAIRS, Q, 7) * 2 + axis(6, RIGHT, Q, 7)
        n = n // 2
        keep = (row < n) & (token < m)
    if ROUTED:
        token = gl.load(YROW + token, mask=token < m, other=0)
    gl.store(Y + token.to(gl.int64) * n + row, y.to(Y.dtype.element_ty), mask=keep)
