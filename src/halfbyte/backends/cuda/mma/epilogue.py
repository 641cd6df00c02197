"""The end of a tile: partial sums of warps and slots meet, and one value an output is written.

What the end needs from memory (the tensor's factor, biases, the rows of y) is asked for before the sums are made, so that no tile
waits for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .operands import axis


@gluon.constexpr_function
def pairs_of(tokens):
    """Lanes of a row that hold different tokens: the others hold other groups of the same ones."""
    return 1 if tokens <= 2 else tokens // 2


@gluon.constexpr_function
def meeting(wk, wn, tokens, nb):
    """Layout of [WK, WN, 8 rows, pairs, RT, NB, down, right] in which one thread holds all WK sums of an output: one
    conflict-free pass through shared memory and additions in order.

    (A reduction across warps left to the compiler writes with a stride of WK words and cost 16 µs of 30 at m = 16.)
    """
    right = 1 if tokens == 1 else 2
    p = min(pairs_of(tokens), wk)
    b = min(nb, wk // p)
    lanes = [1, 1, 8, 2 // right, 1, 1, 2, right]
    return gl.BlockedLayout([wk, 1, 1, 1, 1, 1, 1, 1], lanes, [1, wn, 1, p, wk // (p * b), b, 1, 1], [0, 2, 6, 7, 3, 5, 4, 1])


@gluon.constexpr_function
def side_by_side(wk, wn, tokens, rt, nb):
    """Layout of [WN, 4, pairs, RT, NB, down, right, 2] in which a thread holds a gate and its up."""
    pairs = pairs_of(tokens)
    r = min(rt, wk)
    b = min(nb, wk // r)
    lanes = [1, 4, pairs, 1, 1, 2, 4 // pairs, 1]
    return gl.BlockedLayout([1] * 7 + [2], lanes, [wn, 1, wk // (r * b), r, b, 1, 1, 1], [7, 1, 2, 5, 6, 4, 3, 0])


@gluon.constexpr_function
def summed(wk, wn, tokens, nb):
    """Layout of the sums."""
    return gl.SliceLayout(0, meeting(wk, wn, tokens, nb))


@gluon.constexpr_function
def written(wk, wn, tokens, rt, nb, gate):
    """Layout of what is written: sums, or outputs of gate and up."""
    return gl.SliceLayout(7, side_by_side(wk, wn, tokens, rt, nb)) if gate else summed(wk, wn, tokens, nb)


@gluon.jit
def gated(g, u, KIND: gl.constexpr):
    """swiglu (1), gpt-oss' clamped form (2) or geglu (3) in float32, as gates.gate_kernel."""
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
def biases(BIAS_PTR, first, n, RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, TOKENS: gl.constexpr):
    """The biases of a tile's rows, as the sums lie."""
    R: gl.constexpr = summed(WK, WN, TOKENS, NB)
    row = (first + axis(0, WN, R, 7) * RT + axis(3, RT, R, 7)) * 16 + axis(1, 8, R, 7) + axis(5, 2, R, 7) * 8
    return gl.load(BIAS_PTR + row, mask=row < n, other=0).to(gl.float32)


@gluon.jit
def places(
    Y, YROW, tokens, m, n, NB: gl.constexpr, RT: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, TOKENS: gl.constexpr,
    ROUTED: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Where the rows of y begin that a thread writes, and which of them exist."""
    Q: gl.constexpr = written(WK, WN, TOKENS, RT, NB, GATE)
    RIGHT: gl.constexpr = 1 if TOKENS == 1 else 2
    token = tokens + axis(4, NB, Q, 7) * 8 + axis(2, pairs_of(TOKENS), Q, 7) * 2 + axis(6, RIGHT, Q, 7)
    keep = token < m
    if ROUTED:
        token = gl.load(YROW + token, mask=keep, other=0)
    return Y + token.to(gl.int64) * (n // 2 if GATE else n), keep


@gluon.jit
def store(
    place, keep, y, bias, factor, first, n, divisor,
    GLOBAL_OP: gl.constexpr, DIVIDE: gl.constexpr, HAS_BIAS: gl.constexpr,
    RT: gl.constexpr, NB: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, TOKENS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Sums [WK, WN, 32, RT, NB, 2 down, 2 right] to y: row 16 · tile + lane / 4 + 8 · down, column 2 · (lane % 4) + right, over
    WK and slots. With GATE, rows 2 j and 2 j + 1 become output j."""
    PAIRS: gl.constexpr = pairs_of(TOKENS)
    if TOKENS == 1:
        even, odd = gl.split(y)
        y = gl.expand_dims(even + odd, 6)
    RIGHT: gl.constexpr = 1 if TOKENS == 1 else 2
    y = gl.reshape(y, [WK, WN, 8, 4 // PAIRS, PAIRS, RT, NB, 2, RIGHT])
    y = gl.convert_layout(gl.sum(y, 3), meeting(WK, WN, TOKENS, NB))  # [WK, WN, 8, PAIRS, RT, NB, down, right]
    y = gl.sum(y, 0)
    if (GLOBAL_OP == 1) and (not DIVIDE):
        y = y * factor
    elif GLOBAL_OP:  # float64 keeps the quotient clear of float32's midpoints (docs/design/cuda.md)
        wide = y.to(gl.float64)
        if GLOBAL_OP == 1:
            wide = wide * factor.to(gl.float64)
        else:
            wide = wide / factor.to(gl.float64)
        y = (wide / divisor).to(gl.float32)
    if HAS_BIAS:
        y = y + bias
    Q: gl.constexpr = written(WK, WN, TOKENS, RT, NB, GATE)
    if GATE:
        y = gl.permute(gl.reshape(y, [WN, 4, 2, PAIRS, RT, NB, 2, RIGHT]), (0, 1, 3, 4, 5, 6, 7, 2))
        gate, up = gl.split(gl.convert_layout(y, side_by_side(WK, WN, TOKENS, RT, NB)))
        y = gated(gate, up, GATE)
        row = (first + axis(0, WN, Q, 7) * RT + axis(3, RT, Q, 7)) * 8 + axis(1, 4, Q, 7) + axis(5, 2, Q, 7) * 4
        n = n // 2
    else:
        row = (first + axis(0, WN, Q, 7) * RT + axis(3, RT, Q, 7)) * 16 + axis(1, 8, Q, 7) + axis(5, 2, Q, 7) * 8
    gl.store(place + row, y.to(place.dtype.element_ty), mask=(row < n) & keep)
