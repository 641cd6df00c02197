"""How far float32 kernels may be from the exact product, per element, from k, the dtype and the
weight's own parts.
"""

from __future__ import annotations

import numpy as np

from halfbyte.tensor.qtensor import QTensor

EPS = 2.0**-24
"""Half a unit in the last place of float32, relative."""
ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
SLOPE = 1.13
"""Largest derivative of the gates' curves: silu 1.0999, its scaled form the same, gelu by tanh
1.1290.
"""


def product(x: np.ndarray, q: QTensor, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Exact x · wᵀ + bias in float64, and the bound of a float32 sum of it: (k + 8) 2^−24 Σ|x w|,
    |x| (|w| + 2 |b|) for biases.

    A bias is added to code · scale, and the two may cancel: their sizes count, not their sum's.
    """
    w = q.dequantize("float32").astype(np.float64)
    exact, size = x @ w.T, np.abs(x) @ np.abs(w.T)
    if q.format.bias:
        group = -(-q.shape[1] // q.parts["biases"].shape[1])
        b = np.abs(np.repeat(q.parts["biases"].astype(np.float64), group, 1)[:, : q.shape[1]])
        size = np.abs(x) @ (np.abs(w) + 2 * b).T
    if bias is not None:
        exact, size = exact + bias, size + np.abs(bias)
    return exact, (q.shape[1] + 8) * EPS * size


def apply_gate(kind: str, h: np.ndarray, error: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """The gated activation of (m, 2f) exact sums in float64 -> (m, f), and the bound of its error
    when theirs is `error`.
    """
    if kind == "none":
        return h, error
    half = h.shape[-1] // 2
    (g, u), (dg, du) = ((a[..., ::2], a[..., 1::2]) if interleaved else (a[..., :half], a[..., half:]) for a in (h, error))
    if kind == "swiglu_clamped":
        dg, du = np.where(g > 7 + dg, 0, dg), np.where(np.abs(u) > 7 + du, 0, du)  # cut off, error and all
        g, u = np.minimum(g, 7.0), np.clip(u, -7.0, 7.0) + 1
        curve = g / (1 + np.exp(-1.702 * g))
    elif kind == "swiglu":
        curve = g / (1 + np.exp(-g))
    else:
        curve = 0.5 * g * (1 + np.tanh(0.7978845608028654 * (g + 0.044715 * g**3)))
    # Its own arithmetic: a dozen roundings, one of them of 1 + tanh, which may be small beside what
    # it is a difference of; and exp(-g) of a rounded product of g.
    own = 16 * EPS * np.abs(g) * (1 + np.abs(g)) * np.minimum(1, np.exp(np.minimum(g, 0) * (kind != "geglu")))
    dcurve = SLOPE * dg + own
    return curve * u, dcurve * np.abs(u) + np.abs(curve) * du + dcurve * du + 4 * EPS * np.abs(curve * u)


def experts(
    x: np.ndarray,
    up: QTensor,
    down: QTensor,
    index: np.ndarray,
    share: np.ndarray,
    *,
    gate: str = "swiglu",
    interleaved: bool = False,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Exact Σ_t share · down_e(act(up_e x)) in float64, and the bound of an element's error but for
    its last rounding.
    """
    total, bound, size = (np.zeros((x.shape[0], down.shape[1])) for _ in range(3))
    for e in range(up.shape[0]):
        h, dh = apply_gate(gate, *product(x, up[e], None if gate_up_bias is None else gate_up_bias[e]), interleaved)
        y, dy = product(h, down[e], None if down_bias is None else down_bias[e])
        dy = dy + dh @ (np.abs(down[e].dequantize("float32").astype(np.float64)).T * (1 + (down.shape[2] + 8) * EPS))
        for t in range(index.shape[1]):
            s = np.where(index[:, t] == e, share[:, t], 0.0)[:, None]
            total, bound, size = total + s * y, bound + np.abs(s) * dy, size + np.abs(s * y)
    return total, bound + (index.shape[1] + 1) * EPS * size


def assert_within(y: np.ndarray, exact: np.ndarray, bound: np.ndarray, dtype: str, terms: int) -> None:
    """|y − exact| per element within `bound` and one rounding to `dtype`; and their root mean
    square, which is less.

    terms  how many roundings the bound adds up as if they all went one way: over random numbers
           they add up as their root
    """
    last = ULP[dtype] * np.abs(exact) + SMALLEST[dtype]
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= last + bound).all(), (error / (last + bound)).max()
    if error.size >= 256:  # a rounding is uniform: 1 / √3 of its bound, over many
        rms = [float(np.sqrt((a**2).mean())) for a in (error, last, bound)]
        assert rms[0] <= 0.6 * rms[1] + rms[2] / np.sqrt(terms), rms
