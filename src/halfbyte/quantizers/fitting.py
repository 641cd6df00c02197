"""Parameters of groups with the least weighted squared error: a few scales are tried, each is refined, the best one stays.

    error of a group = Σ_j h_j · (x_j − value(code_j))²          h the importance of input j (1, or the diagonal of a Hessian)

| scale | tried |
|---|---|
| float, no zero point | the extreme on either end of the grid, times 0.5 to 1.1; then s = Σ h x v / Σ h v² for its codes |
| float, zero point | the range from its middle and from its ends inwards; scale from the codes, zero point to a whole code |
| float, bias | the same ranges; scale and bias are the weighted line through (code, x) |
| E8M0 | the exponents around log2(amax / M): −2 to 1 |
| E4M3 | the scale byte of amax / M and 8 on either side, an octave each way; under 8 tensor scales within an octave |

Small floats are sparse near their end, so their extreme may do better on an inner value (E2M1's 4 instead of 6): for them
scales up to 1.6 times as large are tried.
Scales are stored before their error is measured, so what is compared is what is written. The round-to-nearest parameters of the
format's own encoder are among those tried: the result is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..formats.encode import quantize
from ..minifloat import MINIFLOATS, element_table, round_to_element
from .grid import F64, Grid, Params, factor_of
from .groups import cut, weights

SHRINK = np.linspace(0.5, 1.1, 13)
SHRINK_FLOAT = np.linspace(0.5, 1.6, 23)
REFINEMENTS = 2
OCTAVE = 8
CHUNK = 1 << 15
"""Values searched at a time: the arrays of a try stay in a 1 MB cache, which halves the time."""


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
    best: Params | None = None
    least: F64 | None = None
    for params in _tried(grid, x, h):
        e = error(grid, x, h, params)
        if best is None or least is None:
            best, least = params, e
            continue
        better = e < least
        best, least = params.where(better, best), np.where(better, e, least)
    assert best is not None
    return best


def fit_weight(grid: Grid, x: F64, importance: F64 | None = None) -> tuple[Grid, Params]:
    """(grid, parameters [n, G]) for a weight [n, k]: the tensor scale too, where the format has one."""
    size = grid.fmt.group_size
    groups, h = cut(x, size), weights(x.shape[1], size, importance)
    plain = quantize(x, grid.fmt)
    grids = [grid.with_factor(factor_of(plain))]
    if grid.fmt.global_op and x.size and np.abs(x).max() > 0:
        steps = 2.0 ** (-np.arange(OCTAVE) / OCTAVE)
        grids += [grid.with_factor(_float32_factor(grid, grids[0].factor * s)) for s in steps[1:]]
    best: tuple[float, Grid, Params] | None = None
    for number, g in enumerate(grids):
        params = fit(g, groups, h)
        if number == 0:
            own = g.params_of(plain)
            params = params.where(error(g, groups, h, params) < error(g, groups, h, own), own)
        total = float(error(g, groups, h, params).sum())
        if best is None or total < best[0]:
            best = (total, g, params)
    assert best is not None
    return best[1], best[2]


def _float32_factor(grid: Grid, factor: float) -> float:
    """The nearest factor whose stored form is a float32."""
    f = grid.fmt
    stored = float(np.float32(1 / factor if f.global_op == "divide" else factor * f.divisor))
    return 1 / stored if f.global_op == "divide" else stored / f.divisor


def _fields(params: Params) -> tuple[F64 | None, ...]:
    return params.scale, params.zero, params.bias


def _each(params: Params) -> Params:
    return params.at((..., None))


def _tried(grid: Grid, x: F64, h: F64) -> Iterator[Params]:
    f = grid.fmt
    inside = np.broadcast_to(h > 0, x.shape)
    amax = np.abs(np.where(inside, x, 0)).max(axis=-1, initial=0)
    if f.scale == "e8m0":
        power = np.ceil(np.log2(np.where(amax > 0, amax / grid.top, 1)))
        for step in (0, -1, 1, -2):
            yield Params(np.ldexp(1.0, np.clip(np.where(amax > 0, power + step, -127), -127, 127).astype(int)))
        return
    if f.scale in ("e4m3", "ue4m3"):
        table = element_table("e4m3", 8)
        byte = round_to_element(np.maximum(amax / grid.top / grid.factor, 2.0**-9), "e4m3").astype(int)
        for step in sorted(range(-8, 9), key=abs):
            yield Params(table[np.clip(byte + step, 1, 0x7E)] * grid.factor)
        return
    if f.zero == "int" or f.bias:
        yield from _ranges(grid, x, h, inside)
        return
    yield from _extremes(grid, x, h, inside)


def _extremes(grid: Grid, x: F64, h: F64, inside: NDArray[np.bool_]) -> Iterator[Params]:
    """The largest magnitude on an end of the grid, nearer and farther; then the best scale for its codes."""
    seen = np.where(inside, x, 0)
    at = np.abs(seen).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(seen, at, axis=-1)[..., 0]
    for end in {float(grid.table[0]), float(grid.table[-1])} - {0.0}:
        for shrink in SHRINK_FLOAT if grid.fmt.element in MINIFLOATS else SHRINK:
            params = Params(grid.stored(extreme / end * shrink))
            for _ in range(REFINEMENTS):
                v = _elements(grid, x, params)
                hv = h * v
                params = Params(grid.stored(_over((hv * x).sum(-1), (hv * v).sum(-1), params.scale)))
            yield params


def _ranges(grid: Grid, x: F64, h: F64, inside: NDArray[np.bool_]) -> Iterator[Params]:
    """Ranges within the group's own, end to end; then the best line, or the best scale with its zero point, for its codes."""
    f, steps = grid.fmt, (1 << grid.fmt.bits) - 1
    low, high = np.where(inside, x, np.inf).min(axis=-1), np.where(inside, x, -np.inf).max(axis=-1)
    low, high = np.where(np.isfinite(low), low, 0), np.where(np.isfinite(high), high, 0)
    if not f.bias:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    for shrink in SHRINK:
        for a, b in ((low * shrink, high * shrink), (low, low + (high - low) * shrink), (high - (high - low) * shrink, high)):
            params = _line(grid, a, (b - a) / steps)
            for _ in range(REFINEMENTS):
                codes = grid.steps(x, _each(params))
                if f.bias:
                    total = h.sum(-1)
                    mq, mx = (h * codes).sum(-1) / total, (h * x).sum(-1) / total
                    dq, dx = codes - mq[..., None], x - mx[..., None]
                    scale = _over((h * dq * dx).sum(-1), (h * dq * dq).sum(-1), params.scale)
                    params = _line(grid, mx - mq * scale, scale)
                else:
                    assert params.zero is not None
                    hv = h * codes
                    params = Params(grid.stored(_over((hv * x).sum(-1), (hv * codes).sum(-1), params.scale)), params.zero)
            yield params


def _line(grid: Grid, low: F64, scale: F64) -> Params:
    """Parameters whose code 0 is near `low`."""
    stored = grid.stored(scale)
    if grid.fmt.bias:
        return Params(stored, None, grid.stored_bias(low))
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(stored == 0, 1 << (grid.fmt.bits - 1), np.rint(-low / np.where(stored == 0, 1, stored)))
    return Params(stored, np.clip(zero, 0, (1 << grid.fmt.bits) - 1))


def _elements(grid: Grid, x: F64, params: Params) -> F64:
    """The elements of the nearest codes."""
    if grid.fmt.element in ("int", "uint", "e2m1"):
        return grid.steps(x, _each(params))
    return grid.values(grid.codes(x, _each(params)), Params(np.ones_like(params.scale)[..., None]))


def _over(a: F64, b: F64, otherwise: F64) -> F64:
    """a / b, and `otherwise` where b is 0."""
    return np.where(b == 0, otherwise, a / np.where(b == 0, 1, b))
