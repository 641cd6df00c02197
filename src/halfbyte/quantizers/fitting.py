"""Parameters of groups with the least weighted squared error: a few scales are tried, the best one is refined.

    error of a group = Σ_j h_j · (x_j − value(code_j))²          h the importance of input j (1, or the diagonal of a Hessian)

| scale | tried |
|---|---|
| float, no zero point | the extreme on either end of the grid, times 0.5 to 1.1 |
| float, zero point | the range times 0.5 to 1.1, from its middle and from its ends inwards; the zero point to a whole code |
| float, bias | the same ranges |
| E8M0 | the exponents around log2(amax / M): −2 to 1 |
| E4M3 | the scale byte of amax / M and 8 on either side, an octave each way; under 8 tensor scales within an octave |

What a float scale gains is known without trying it: for codes v the best one is s = Σ h x v / Σ h v², and takes s · Σ h x v
off the error; with a bias it is the weighted line through (v, x). The best try of a group is then refined: codes for its stored
scale, the best scale for them, twice. Small floats are sparse near their end, so their extreme may do better on an inner value
(E2M1's 4 instead of 6): for them scales up to 1.6 times as large are tried. A tensor scale is chosen on a part of the rows.

Tries are compared in float32 on groups scaled to 1 (from 6 bits on in float64), the refinement and the choice against the
round-to-nearest parameters of the format's own encoder in float64 with scales as they are stored: the result is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.encode import quantize
from ..minifloat import MINIFLOATS, element_table, round_to_element
from .grid import F64, Grid, Params, factor_of, round_e2m1
from .groups import cut, weights

Array = NDArray[Any]

SHRINK = np.linspace(0.5, 1.1, 13)
SHRINK_FLOAT = np.linspace(0.5, 1.6, 23)
REFINEMENTS = 2
OCTAVE = 8
CHUNK = 1 << 15
"""Values searched at a time: the arrays of a try stay in a 1 MB cache, which halves the time."""
SAMPLE = 1 << 17
"""Values on which a tensor scale is chosen."""


def error(grid: Grid, x: F64, h: F64, params: Params) -> F64:
    """Σ h (x − x̂)² of groups x [..., g] under parameters [...]."""
    d = grid.rounded(x, _each(params))
    np.subtract(x, d, out=d)
    np.multiply(d, d, out=d)
    d *= h
    out: F64 = d.sum(axis=-1)
    return out


def fit(grid: Grid, x: F64, h: F64) -> Params:
    """The best parameters found for groups x [n, …, g], importance h broadcasting against it."""
    rows = max(1, CHUNK // max(1, x[0].size)) if len(x) else 1
    if len(x) > rows:
        pieces = [fit(grid, x[i : i + rows], h if len(h) == 1 else h[i : i + rows]) for i in range(0, len(x), rows)]
        return Params(*(None if a[0] is None else np.concatenate(a) for a in zip(*map(_fields, pieces), strict=True)))  # type: ignore[arg-type]
    if grid.fmt.scale in ("e8m0", "e4m3", "ue4m3"):
        return _best_byte(grid, x, h)
    best = _best_range(grid, x, h) if grid.fmt.zero == "int" or grid.fmt.bias else _best_extreme(grid, x, h)
    least, params = error(grid, x, h, best), best
    for _ in range(REFINEMENTS):
        params = _refined(grid, x, h, params)
        e = error(grid, x, h, params)
        better = e < least
        best, least = params.where(better, best), np.where(better, e, least)
    return best


def fit_weight(grid: Grid, x: F64, importance: F64 | None = None) -> tuple[Grid, Params]:
    """(grid, parameters [n, G]) for a weight [n, k]: the tensor scale too, where the format has one."""
    size = grid.fmt.group_size
    plain = quantize(x, grid.fmt)
    own = grid.with_factor(factor_of(plain))
    grid = fit_factor(own, x, importance)
    groups, h = cut(x, size), weights(x.shape[1], size, importance)
    params, before = fit(grid, groups, h), own.params_of(plain)
    found, held = error(grid, groups, h, params), error(own, groups, h, before)
    if grid.factor == own.factor:
        return grid, params.where(found < held, before)
    if found.sum() < held.sum():
        return grid, params
    params = fit(own, groups, h)
    return own, params.where(error(own, groups, h, params) < held, before)


def fit_factor(grid: Grid, x: F64, importance: F64 | None = None) -> Grid:
    """`grid` under the tensor scale of least error, where the format has one; else as it is.

    The error of a weight [n, k] is estimated: that of the rows with the largest elements, whose block scales may meet the end of
    E4M3's range, and that of rows taken evenly, times how many they stand for.
    """
    if not grid.fmt.global_op or not x.size or not np.abs(x).max() > 0:
        return grid
    size, count = grid.fmt.group_size, max(1, SAMPLE // x.shape[1])
    order = np.argsort(-np.abs(x).max(axis=1), kind="stable")
    top, rest = order[: count // 4 + 1], np.sort(order[count // 4 + 1 :])
    even = rest[np.linspace(0, len(rest) - 1, min(len(rest), count)).astype(int)] if len(rest) else rest
    groups, h = cut(x[np.concatenate([top, even])], size), weights(x.shape[1], size, importance)
    share = np.concatenate([np.ones(len(top)), np.full(len(even), len(rest) / max(len(even), 1))])[:, None]
    steps = 2.0 ** (-np.arange(OCTAVE) / OCTAVE)
    grids = [grid, *(grid.with_factor(_float32_factor(grid, grid.factor * s)) for s in steps[1:])]
    return min(grids, key=lambda g: float((share * error(g, groups, h, fit(g, groups, h))).sum()))


def _float32_factor(grid: Grid, factor: float) -> float:
    """The nearest factor whose stored form is a float32."""
    f = grid.fmt
    stored = float(np.float32(1 / factor if f.global_op == "divide" else factor * f.divisor))
    return 1 / stored if f.global_op == "divide" else stored / f.divisor


def _fields(params: Params) -> tuple[F64 | None, ...]:
    return params.scale, params.zero, params.bias


def _each(params: Params) -> Params:
    return params.at((..., None))


def _best_byte(grid: Grid, x: F64, h: F64) -> Params:
    """Scales that are bytes: the neighbours of the one under which the largest element meets the end of the grid."""
    inside = np.broadcast_to(h > 0, x.shape)
    amax = np.abs(np.where(inside, x, 0)).max(axis=-1, initial=0)
    t, w = _in_units(x, np.where(amax > 0, amax, 1), grid), _relative(h, grid)
    best, least = np.zeros_like(amax), np.full(amax.shape, np.inf)
    for scale in _bytes(grid, amax):
        unit = (scale / np.where(amax > 0, amax, 1)).astype(t.dtype)[..., None]
        d = _elements(grid, t / unit)
        d *= unit
        d -= t
        e = np.einsum("...g,...g,...g->...", d, d, w)
        better = e < least
        best, least = np.where(better, scale, best), np.where(better, e, least)
    return Params(best)


def _bytes(grid: Grid, amax: F64) -> Iterator[F64]:
    if grid.fmt.scale == "e8m0":
        power = np.ceil(np.log2(np.where(amax > 0, amax / grid.top, 1)))
        for step in (0, -1, 1, -2):
            yield np.ldexp(1.0, np.clip(np.where(amax > 0, power + step, -127), -127, 127).astype(int))
        return
    table = element_table("e4m3", 8)
    byte = round_to_element(np.maximum(amax / grid.top / grid.factor, 2.0**-9), "e4m3").astype(int)
    for step in sorted(range(-8, 9), key=abs):
        yield table[np.clip(byte + step, 1, 0x7E)] * grid.factor


def _best_extreme(grid: Grid, x: F64, h: F64) -> Params:
    """The largest magnitude on an end of the grid, nearer and farther: the scale that gains most."""
    seen = np.where(h > 0, x, 0)
    at = np.abs(seen).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(seen, at, axis=-1)[..., 0]
    empty = extreme == 0
    t, w = _in_units(x, np.where(empty, 1, extreme), grid), _relative(h, grid)
    best, most = np.zeros(extreme.shape), np.full(extreme.shape, -np.inf)
    for end in {float(grid.table[0]), float(grid.table[-1])} - {0.0}:
        for shrink in SHRINK_FLOAT if grid.fmt.element in MINIFLOATS else SHRINK:
            scale, gain = _line_through_0(t, w, _elements(grid, t * t.dtype.type(end / shrink)))
            better = gain > most
            best, most = np.where(better, scale, best), np.where(better, gain, most)
    return Params(grid.stored(np.where(empty, 0, best * extreme)))


def _best_range(grid: Grid, x: F64, h: F64) -> Params:
    """Ranges within the group's own, end to end: the line, or the scale about a zero point, that gains most."""
    f, steps = grid.fmt, (1 << grid.fmt.bits) - 1
    inside = np.broadcast_to(h > 0, x.shape)
    low, high = np.where(inside, x, np.inf).min(axis=-1), np.where(inside, x, -np.inf).max(axis=-1)
    low, high = np.where(np.isfinite(low), low, 0), np.where(np.isfinite(high), high, 0)
    if not f.bias:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    width = high - low
    flat = width == 0
    t, w = _in_units(x - low[..., None], np.where(flat, 1, width), grid), _relative(h, grid)
    number = t.dtype.type
    origin = (-low / np.where(flat, 1, width)).astype(number)
    if not f.bias:
        t -= origin[..., None]
    best, about, most = np.zeros(width.shape), np.zeros(width.shape), np.full(width.shape, -np.inf)
    total = np.broadcast_to(w.sum(-1), width.shape)
    mean = np.einsum("...g,...g->...", t, w) / total if f.bias else total
    for shrink in SHRINK:
        for a in (0.0, 1 - shrink, (1 - shrink) / 2):
            per = steps / shrink
            if f.bias:
                v = np.clip(np.rint((t - number(a)) * number(per)), 0, steps)
                mv = np.einsum("...g,...g->...", v, w) / total
                scale, gain = _line_through_0(t - mean[..., None], w, v - mv[..., None])
                other = mean - scale * mv
            else:
                other = np.clip(np.rint((origin - number(a)) * number(per)), 0, steps)
                v = np.clip(np.rint(t * number(per)), -other[..., None], steps - other[..., None])
                scale, gain = _line_through_0(t, w, v)
            better = gain > most
            best, about, most = np.where(better, scale, best), np.where(better, other, about), np.where(better, gain, most)
    scale = grid.stored(np.where(flat, 0 if f.bias else 1, best * width))
    if f.bias:
        return Params(scale, None, grid.stored_bias(low + np.where(flat, 0, about * width)))
    return Params(scale, np.where(flat, 1 << (f.bits - 1), about).astype(np.float64))


def _line_through_0(t: Array, w: Array, v: Array) -> tuple[F64, F64]:
    """(s, what it takes off Σ w t²) for the s with the least Σ w (t − s v)²."""
    both, square = np.einsum("...g,...g,...g->...", t, v, w), np.einsum("...g,...g,...g->...", v, v, w)
    scale = _over(both, square, np.zeros_like(both))
    return scale.astype(np.float64), scale.astype(np.float64) * both


def _refined(grid: Grid, x: F64, h: F64, params: Params) -> Params:
    """The best stored parameters for the codes that x has under `params`."""
    v = _elements_of(grid, x, params)
    if grid.fmt.bias:
        total = h.sum(-1)
        mv, mx = (h * v).sum(-1) / total, (h * x).sum(-1) / total
        dv, dx = v - mv[..., None], x - mx[..., None]
        scale = grid.stored(_over((h * dv * dx).sum(-1), (h * dv * dv).sum(-1), params.scale))
        return Params(scale, None, grid.stored_bias(mx - mv * scale))
    hv = h * v
    return Params(grid.stored(_over((hv * x).sum(-1), (hv * v).sum(-1), params.scale)), params.zero)


def _in_units(x: F64, unit: F64, grid: Grid) -> Array:
    """x over its group's unit, in the dtype that tries are compared in."""
    return (x / unit[..., None]).astype(np.float32 if grid.fmt.bits < 6 else np.float64)


def _relative(h: F64, grid: Grid) -> Array:
    """Importance over its largest in the group."""
    most = h.max(axis=-1, keepdims=True, initial=0)
    return (h / np.where(most > 0, most, 1)).astype(np.float32 if grid.fmt.bits < 6 else np.float64)


def _elements(grid: Grid, t: Array) -> Array:
    """The nearest elements of t, which is overwritten."""
    return _rounded(grid, t) if grid.fmt.element in ("e2m1", "int", "uint") else _looked_up(grid, t)


def _rounded(grid: Grid, t: Array) -> Array:
    f = grid.fmt
    if f.element == "e2m1":
        return round_e2m1(t)
    np.rint(t, out=t)
    return np.clip(t, grid.table[0], grid.table[-1], out=t)


def _looked_up(grid: Grid, t: Array) -> Array:
    one = Params(np.ones((1,) * t.ndim))
    return grid.values(grid.codes(t.astype(np.float64), one), one).astype(t.dtype)


def _elements_of(grid: Grid, x: F64, params: Params) -> F64:
    """The elements of the nearest codes."""
    if grid.fmt.element in ("int", "uint", "e2m1"):
        return grid.steps(x, _each(params))
    return grid.values(grid.codes(x, _each(params)), Params(np.ones_like(params.scale)[..., None]))


def _over(a: F64, b: F64, otherwise: F64) -> F64:
    """a / b, and `otherwise` where b is 0."""
    return np.where(b == 0, otherwise, a / np.where(b == 0, 1, b))
