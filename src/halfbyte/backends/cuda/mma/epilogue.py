"""The end of a tile: partial sums of warps and slots are added, and one value an output is written.

What the end needs from memory (the tensor's factor, biases, the rows of y) is loaded before the
sums are made, so that no tile waits for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .operands import axis


@gluon.constexpr_function
def lane_pairs(tokens):
    """Lanes of a row that hold different tokens: the others hold other groups of the same ones."""
    return 1 if tokens <= 2 else tokens // 2


@gluon.constexpr_function
def exchange_layout(wk, wn, tokens, nb):
    """Layout of [WK, WN, 8 rows, pairs, RT, NB, down, right] in which one thread holds all WK sums
    of an output: one conflict-free pass through shared memory and additions in order.

    (A reduction across warps left to the compiler writes with a stride of WK words and cost 16 µs
    of 30 at m = 16.)
    """
    right = 1 if tokens == 1 else 2
    p = min(lane_pairs(tokens), wk)
    b = min(nb, wk // p)
    lanes = [1, 1, 8, 2 // right, 1, 1, 2, right]
    return gl.BlockedLayout([wk, 1, 1, 1, 1, 1, 1, 1], lanes, [1, wn, 1, p, wk // (p * b), b, 1, 1], [0, 2, 6, 7, 3, 5, 4, 1])


@gluon.constexpr_function
def gate_layout(wk, wn, tokens, rt, nb):
    """Layout of [WN, 4, pairs, RT, NB, down, right, 2] in which a thread holds a gate and its up."""
    pairs = lane_pairs(tokens)
    r = min(rt, wk)
    b = min(nb, wk // r)
    lanes = [1, 4, pairs, 1, 1, 2, 4 // pairs, 1]
    return gl.BlockedLayout([1] * 7 + [2], lanes, [wn, 1, wk // (r * b), r, b, 1, 1, 1], [7, 1, 2, 5, 6, 4, 3, 0])


@gluon.constexpr_function
def sum_layout(wk, wn, tokens, nb):
    """Layout of the sums."""
    return gl.SliceLayout(0, exchange_layout(wk, wn, tokens, nb))


@gluon.constexpr_function
def output_layout(wk, wn, tokens, rt, nb, gate):
    """Layout of what is written: sums, or outputs of gate and up."""
    return gl.SliceLayout(7, gate_layout(wk, wn, tokens, rt, nb)) if gate else sum_layout(wk, wn, tokens, nb)


@gluon.jit
def gated(g, u, KIND: gl.constexpr):
    """swiglu (1), gpt-oss' clamped form (2) or geglu (3) in float32, as in `moe/activation.py`."""
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
def biases(bias, first, n, P: gl.constexpr):
    """The biases of a tile's rows, in the layout of the sums."""
    R: gl.constexpr = sum_layout(P.input_warps, P.row_warps, P.tokens, P.columns)
    tile = first + axis(0, P.row_warps, R, 7) * P.row_tiles + axis(3, P.row_tiles, R, 7)
    row = tile * 16 + axis(1, 8, R, 7) + axis(5, 2, R, 7) * 8
    return gl.load(bias + row, mask=row < n, other=0).to(gl.float32)


@gluon.jit
def token_scales(x_scales, span, P: gl.constexpr):
    """The factors of the tokens of a tile, in the layout of the sums."""
    R: gl.constexpr = sum_layout(P.input_warps, P.row_warps, P.tokens, P.columns)
    RIGHT: gl.constexpr = 1 if P.tokens == 1 else 2
    token = span.first_token + axis(4, P.columns, R, 7) * 8 + axis(2, lane_pairs(P.tokens), R, 7) * 2 + axis(6, RIGHT, R, 7)
    return gl.load(x_scales + token, mask=token < span.end_token, other=0)


@gluon.jit
def output_rows(y, blocks, span, n, P: gl.constexpr):
    """Pointers to the rows of y that a thread writes, and which of them exist."""
    Q: gl.constexpr = output_layout(P.input_warps, P.row_warps, P.tokens, P.row_tiles, P.columns, P.gate)
    RIGHT: gl.constexpr = 1 if P.tokens == 1 else 2
    token = span.first_token + axis(4, P.columns, Q, 7) * 8 + axis(2, lane_pairs(P.tokens), Q, 7) * 2 + axis(6, RIGHT, Q, 7)
    keep = token < span.end_token
    if P.routed:
        token = gl.load(blocks.y_row + token, mask=keep, other=0)
    return y + token.to(gl.int64) * (n // 2 if P.gate else n), keep


@gluon.jit
def store(rows, keep, acc, u0, u1, bias, factor, x_scale, first, n, divisor, P: gl.constexpr):
    """Sums of rows g (acc 0, 1, in units of 1 / u0) and g + 8 (2, 3, 1 / u1), even and odd columns,
    to y: over input warps and slots, row 16 · tile + lane / 4 + 8 · down, column 2 · (lane % 4) +
    right. With a gate, rows 2 j and 2 j + 1 become output j.
    """
    y = gl.join(gl.join(acc[0] * u0, acc[2] * u1), gl.join(acc[1] * u0, acc[3] * u1))  # [..., row + 8, column + 1]
    PAIRS: gl.constexpr = lane_pairs(P.tokens)
    if P.tokens == 1:
        even, odd = gl.split(y)
        y = gl.expand_dims(even + odd, 6)
    RIGHT: gl.constexpr = 1 if P.tokens == 1 else 2
    y = gl.reshape(y, [P.input_warps, P.row_warps, 8, 4 // PAIRS, PAIRS, P.row_tiles, P.columns, 2, RIGHT])
    # [input warps, row warps, 8, PAIRS, row tiles, columns, down, right]
    y = gl.convert_layout(gl.sum(y, 3), exchange_layout(P.input_warps, P.row_warps, P.tokens, P.columns))
    y = gl.sum(y, 0)
    if P.x_scaled:
        y = y * x_scale
    if (P.global_op == 1) and (not P.divide):
        y = y * factor
    elif P.global_op:  # float64 keeps the quotient clear of float32's midpoints (docs/design/cuda.md)
        d = y.to(gl.float64)
        if P.global_op == 1:
            d = d * factor.to(gl.float64)
        else:
            d = d / factor.to(gl.float64)
        y = (d / divisor).to(gl.float32)
    if P.has_bias:
        y = y + bias
    Q: gl.constexpr = output_layout(P.input_warps, P.row_warps, P.tokens, P.row_tiles, P.columns, P.gate)
    if P.gate:
        y = gl.reshape(y, [P.row_warps, 4, 2, PAIRS, P.row_tiles, P.columns, 2, RIGHT])
        y = gl.permute(y, (0, 1, 3, 4, 5, 6, 7, 2))
        gate, up = gl.split(gl.convert_layout(y, gate_layout(P.input_warps, P.row_warps, P.tokens, P.row_tiles, P.columns)))
        y = gated(gate, up, P.gate)
        tile = first + axis(0, P.row_warps, Q, 7) * P.row_tiles + axis(3, P.row_tiles, Q, 7)
        row = tile * 8 + axis(1, 4, Q, 7) + axis(5, 2, Q, 7) * 4
        n = n // 2
    else:
        tile = first + axis(0, P.row_warps, Q, 7) * P.row_tiles + axis(3, P.row_tiles, Q, 7)
        row = tile * 16 + axis(1, 8, Q, 7) + axis(5, 2, Q, 7) * 8
    gl.store(rows + row, y.to(rows.dtype.element_ty), mask=(row < n) & keep)
