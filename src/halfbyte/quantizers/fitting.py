"""Group parameters of least weighted squared error: candidate scales are tried and the best one is
refined.

    error of a group = Σ_j h_j · (x_j − value(code_j))²          h the importance of input j (1, or the diagonal of a Hessian)

| scale | tried |
|---|---|
| float, no zero point | the extreme on either end of the grid, times 0.5 to 1.1 |
| float, zero point | the range times 0.5 to 1.1, from its middle and from its ends inwards; the zero point to a whole code |
| float, bias | the same ranges |
| E8M0 | the exponents around log2(amax / M): −2 to 1 |
| E4M3 | the scale byte of amax / M and 8 on either side, an octave each way; under 8 tensor scales within an octave |

For codes v the best float scale is s = Σ h x v / Σ h v², which reduces the error by s · Σ h x v;
with a bias it is the weighted regression line through (v, x). The best candidate of a group is
refined twice: codes for its stored scale, then the best scale for those codes. Minifloats are
sparse near their maximum, so the extreme may fit an inner value better (E2M1's 4 instead of 6):
scales up to 1.6 times as large are tried for them. A tensor scale is chosen on a part of the rows.

Weights and importance may be torch tensors (`arrays`): the search runs on their device.

Candidates are compared in float32 on groups scaled to 1 (from 6 bits on in float64), the refinement
and the choice against the round-to-nearest parameters of the format's own encoder in float64 with
scales as they are stored: the result is never worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.minifloat import MINIFLOATS, element_table
from ..tensor.quantize import quantize
from .arrays import functions, host
from .grid import F64, Grid, Params, factor_of, power_of_two, round_float
from .groups import group_weights, split_groups

Array = NDArray[Any]

SHRINK = tuple(np.linspace(0.5, 1.1, 13).tolist())
SHRINK_FLOAT = tuple(np.linspace(0.5, 1.6, 23).tolist())
REFINEMENTS = 2
OCTAVE = 8
CHUNK = 1 << 15
"""Values per block on the CPU: a candidate's arrays fit a 1 MB cache, which halves the time."""
CHUNK_ELSEWHERE = 1 << 21
"""On a GPU, where all 39 candidates are evaluated at once: 330 MB an array."""
SAMPLE = 1 << 17
"""Values on which a tensor scale is chosen."""


def error(grid: Grid, x: F64, h: F64, params: Params) -> F64:
    """Σ h (x − x̂)² of groups x [..., g] under parameters [...]."""
    d = grid.rounded(x, _each(params))
    d -= x
    d *= d
    d *= h
    out: F64 = d.sum(axis=-1)
    return out


def fit(grid: Grid, x: F64, h: F64) -> Params:
    """The best parameters found for groups x [n, …, g], importance h broadcasting against it."""
    each = math.prod(x.shape[1:])
    rows = max(1, (CHUNK if isinstance(x, np.ndarray) else CHUNK_ELSEWHERE) // max(1, each))
    if len(x) > rows:
        pieces = [fit(grid, x[i : i + rows], h if len(h) == 1 else h[i : i + rows]) for i in range(0, len(x), rows)]
        return Params(*(None if a[0] is None else functions(x).concatenate(a) for a in zip(*map(_fields, pieces), strict=True)))  # type: ignore[arg-type]
    if grid.fmt.scale in ("e8m0", "e4m3", "ue4m3"):
        return _best_byte(grid, x, h)
    best = _best_range(grid, x, h) if grid.fmt.zero == "int" or grid.fmt.bias else _best_extreme(grid, x, h)
    least, params = error(grid, x, h, best), best
    for _ in range(REFINEMENTS):
        params = _refined(grid, x, h, params)
        e = error(grid, x, h, params)
        better = e < least
        best, least = params.where(better, best), functions(x).where(better, e, least)
    return best


def fit_weight(grid: Grid, x: F64, importance: F64 | None = None) -> tuple[Grid, Params]:
    """(grid, parameters [n, G]) for a weight [n, k]: the tensor scale too, where the format has
    one.
    """
    size = grid.fmt.group_size
    plain = quantize(host(x), grid.fmt)
    own = grid.with_factor(factor_of(plain))
    grid = fit_factor(own, x, importance)
    groups, h = split_groups(x, size), group_weights(x, size, importance)
    params, before = fit(grid, groups, h), own.params_of(plain).beside(x)
    fitted, default = error(grid, groups, h, params), error(own, groups, h, before)
    if grid.factor == own.factor:
        return grid, params.where(fitted < default, before)
    if fitted.sum() < default.sum():
        return grid, params
    params = fit(own, groups, h)
    return own, params.where(error(own, groups, h, params) < default, before)


def fit_factor(grid: Grid, x: F64, importance: F64 | None = None) -> Grid:
    """`grid` under the tensor scale of least error, where the format has one; else as it is.

    The error of a weight [n, k] is estimated: that of the rows with the largest elements, whose
    block scales may meet the end of E4M3's range, and that of rows taken evenly, times how many
    they stand for.
    """
    if not grid.fmt.global_op or not math.prod(x.shape):
        return grid
    xp = functions(x)
    largest = host(xp.amax(xp.abs(x), axis=1))
    if not largest.max() > 0:
        return grid
    size, count = grid.fmt.group_size, max(1, SAMPLE // x.shape[1])
    order = np.argsort(-largest, kind="stable")
    top, rest = order[: count // 4 + 1], np.sort(order[count // 4 + 1 :])
    even = rest[np.linspace(0, len(rest) - 1, min(len(rest), count)).astype(int)] if len(rest) else rest
    groups, h = split_groups(x[xp.array(np.concatenate([top, even]))], size), group_weights(x, size, importance)
    share = xp.array(np.concatenate([np.ones(len(top)), np.full(len(even), len(rest) / max(len(even), 1))])[:, None])
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
    """Scales that are bytes: the neighbours of the one under which the largest element meets the
    end of the grid.
    """
    xp = functions(x)
    inside = xp.broadcast_to(h > 0, x.shape)
    amax = xp.amax(xp.abs(xp.where(inside, x, 0.0)), axis=-1)
    one = xp.where(amax > 0, amax, 1.0)
    t, w = _in_units(x, one, grid), _relative(h, grid)
    best, most = xp.zeros(amax.shape), xp.full(amax.shape, -math.inf)
    for scale in _together(x, list(_bytes(grid, amax))):
        unit = xp.cast(scale / one, t.dtype)[..., None]
        d = _elements(grid, t / unit)
        d *= unit
        d -= t
        gain, scale = _first(-xp.weighted_dot(d, d, w), scale)
        better = gain > most
        best, most = xp.where(better, scale, best), xp.where(better, xp.cast(gain, xp.float64), most)
    return Params(best)


def _bytes(grid: Grid, amax: F64) -> Iterator[F64]:
    xp = functions(amax)
    if grid.fmt.scale == "e8m0":
        power = xp.ceil(xp.log2(xp.where(amax > 0, amax / grid.top, 1.0)))
        for step in (0, -1, 1, -2):
            yield power_of_two(xp.clip(xp.where(amax > 0, power + step, -127.0), -127, 127))
        return
    table = xp.array(element_table("e4m3", 8)[:0x7F].copy())
    byte = xp.searchsorted(table, round_float(xp.clip(amax / grid.top / grid.factor, 2.0**-9, None), "e4m3"))
    for step in sorted(range(-8, 9), key=abs):
        yield table[xp.clip(byte + step, 1, 0x7E)] * grid.factor


def _best_extreme(grid: Grid, x: F64, h: F64) -> Params:
    """The largest magnitude on an end of the grid, nearer and farther: the scale that gains most."""
    xp = functions(x)
    seen = xp.where(h > 0, x, 0.0)
    at = xp.abs(seen).argmax(axis=-1)[..., None]
    extreme = xp.take_along_axis(seen, at, axis=-1)[..., 0]
    empty = extreme == 0
    t, w = _in_units(x, xp.where(empty, 1.0, extreme), grid), _relative(h, grid)
    best, most = xp.zeros(extreme.shape), xp.full(extreme.shape, -math.inf)
    shrinks = SHRINK_FLOAT if grid.fmt.element in MINIFLOATS else SHRINK
    ends = {float(grid.table[0]), float(grid.table[-1])} - {0.0}
    for per in _numbers(t, [end / shrink for end in ends for shrink in shrinks]):
        scale, gain = _line_through_0(t, w, _elements(grid, t * per))
        gain, scale = _first(gain, scale)
        better = gain > most
        best, most = xp.where(better, scale, best), xp.where(better, gain, most)
    return Params(grid.stored(xp.where(empty, 0.0, best * extreme)))


def _best_range(grid: Grid, x: F64, h: F64) -> Params:
    """Ranges within the group's own, end to end: the line, or the scale about a zero point, that
    gains most.
    """
    f, steps, xp = grid.fmt, (1 << grid.fmt.bits) - 1, functions(x)
    inside = xp.broadcast_to(h > 0, x.shape)
    low, high = xp.amin(xp.where(inside, x, math.inf), axis=-1), xp.amax(xp.where(inside, x, -math.inf), axis=-1)
    low, high = xp.where(xp.isfinite(low), low, 0.0), xp.where(xp.isfinite(high), high, 0.0)
    if not f.bias:
        low, high = xp.clip(low, None, 0.0), xp.clip(high, 0.0, None)
    width = high - low
    flat = width == 0
    unit = xp.where(flat, 1.0, width)
    t, w = _in_units(x - low[..., None], unit, grid), _relative(h, grid)
    origin = xp.cast(-low / unit, t.dtype)
    if not f.bias:
        t -= origin[..., None]
    best, about, most = xp.zeros(width.shape), xp.zeros(width.shape), xp.full(width.shape, -math.inf)
    total = xp.broadcast_to(w.sum(-1), width.shape)
    mean = (t * w).sum(-1) / total if f.bias else total
    tries = [(steps / shrink, a) for shrink in SHRINK for a in (0.0, 1 - shrink, (1 - shrink) / 2)]
    pers, starts = ([number for number, _ in tries], [number for _, number in tries])
    for per, a in zip(_numbers(t, pers), _numbers(t, starts), strict=True):
        if f.bias:
            v = xp.clip(xp.rint((t - a) * per), 0, steps)
            mv = (v * w).sum(-1) / total
            scale, gain = _line_through_0(t - mean[..., None], w, v - mv[..., None])
            other = mean - scale * mv
        else:
            other = xp.clip(xp.rint((origin[..., None] - a) * per), 0, steps)
            v = xp.clip(xp.rint(t * per), -other, steps - other)
            scale, gain = _line_through_0(t, w, v)
            other = other[..., 0]
        gain, scale, other = _first(gain, scale, other)
        better = gain > most
        best, about, most = xp.where(better, scale, best), xp.where(better, other, about), xp.where(better, gain, most)
    scale = grid.stored(xp.where(flat, 0.0 if f.bias else 1.0, best * width))
    if f.bias:
        return Params(scale, None, grid.stored_bias(low + xp.where(flat, 0.0, about * width)))
    return Params(scale, xp.where(flat, float(1 << (f.bits - 1)), xp.cast(about, xp.float64)))


def _together(x: Any, tries: list[F64]) -> Iterable[F64]:
    """Tries [...] on a leading axis: one after another on the CPU, where each stays in cache; all
    at once where each costs launches.
    """
    return [one[None] for one in tries] if isinstance(x, np.ndarray) else [functions(x).stack(tries)]


def _numbers(t: Any, tries: list[float]) -> Iterable[Any]:
    """The same for numbers to be tried on t, in its dtype."""
    numbers = functions(t).array(tries, t.dtype).reshape(-1, *(1,) * t.ndim)
    return [one[None] for one in numbers] if isinstance(t, np.ndarray) else [numbers]


def _first(gain: Any, *others: Any) -> tuple[Any, ...]:
    """The try [n, G] of the largest gain, the first of equal ones, of tries on a leading axis; and
    what belongs to it.
    """
    if len(gain) == 1:
        return tuple(a[0] for a in (gain, *others))
    xp, at = functions(gain), gain.argmax(axis=0)[None]
    return tuple(xp.take_along_axis(a, at, 0)[0] for a in (gain, *others))


def _line_through_0(t: Array, w: Array, v: Array) -> tuple[F64, F64]:
    """(s, what it takes off Σ w t²) for the s with the least Σ w (t − s v)²."""
    xp = functions(t)
    both, square = xp.weighted_dot(t, v, w), xp.weighted_dot(v, v, w)
    scale = xp.cast(_over(both, square, 0.0 * both), xp.float64)
    return scale, scale * both


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
    xp = functions(x)
    out: Array = xp.cast(x / unit[..., None], xp.float32 if grid.fmt.bits < 6 else xp.float64)
    return out


def _relative(h: F64, grid: Grid) -> Array:
    """Importance over its largest in the group."""
    xp = functions(h)
    most = xp.amax(h, axis=-1, keepdims=True)
    out: Array = xp.cast(h / xp.where(most > 0, most, 1.0), xp.float32 if grid.fmt.bits < 6 else xp.float64)
    return out


def _elements(grid: Grid, t: Array) -> Array:
    """The nearest elements of t, which is overwritten."""
    return _rounded(grid, t) if grid.on_tensors else _looked_up(grid, t)


def _rounded(grid: Grid, t: Array) -> Array:
    f, xp = grid.fmt, functions(t)
    if f.element == "e2m1":
        out: Array = round_float(t, "e2m1")
        return out
    xp.rint(t, out=t)
    xp.clip(t, float(grid.table[0]), float(grid.table[-1]), out=t)
    return t


def _looked_up(grid: Grid, t: Array) -> Array:
    one = Params(np.ones((1,) * t.ndim))
    return grid.values(grid.codes(t.astype(np.float64), one), one).astype(t.dtype)


def _elements_of(grid: Grid, x: F64, params: Params) -> F64:
    """The elements of the nearest codes."""
    if grid.on_tensors:
        return grid.steps(x, _each(params))
    return grid.values(grid.codes(x, _each(params)), Params(np.ones_like(params.scale)[..., None]))


def _over(a: F64, b: F64, otherwise: F64) -> F64:
    """a / b, and `otherwise` where b is 0."""
    xp = functions(a)
    out: F64 = xp.where(b == 0, otherwise, a / xp.where(b == 0, 1.0, b))
    return out
