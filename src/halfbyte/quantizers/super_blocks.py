"""The parameters of least weighted squared error for ggml's super-blocks: Q2_K to Q6_K and IQ4_XS.

    value = element(code) · sc · d − mn · dmin        sc, mn small integers of a group, d and dmin float16 of a super-block
    error = Σ_j h_j · (x_j − value_j)²                h the importance of input j

The start is the better one of two, for each super-block: the parameters of the format's own
encoder, and those of the weighted best line (or scale) of each group. It is refined by coordinate
descent, `ROUNDS` times, codes always being the nearest ones:

1. d and dmin of a super-block by weighted least squares, rounded to float16;
2. sc and mn of each group: in the first round scales from a quarter to five quarters, since a large
   value that counts little may be cut off, each with the best mn for its codes; then the integers
   next to them.

A change is kept only where the error falls, so the result is never worse than the encoder's.
llama.cpp's quantizers weight an error by the value's magnitude, too; their bytes are not
reproduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..formats.ggml.scale_search import SMALLEST, nearest
from ..numerics.bits import pack
from ..numerics.minifloat import element_table
from ..spec import SMALL_SCALES, Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .grid import Grid, Params

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

ROUNDS = 4
POSITIONS = np.linspace(-0.9, 0.9, 13)
"""Positions of a group's extreme value that are tried, in steps of the codes around the end."""
FACTORS = np.linspace(0.25, 1.25, 33)
"""Of a group's sc that are tried in the first round, without a minimum."""
SPANS = np.linspace(0.25, 1.2, 12)
"""The same with a minimum, where each span may begin lower or higher."""
NEXT = tuple((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b)
"""Differences of (sc, mn) that are tried in the others; without a minimum those of `NEXT_SCALE`."""
NEXT_SCALE = tuple((a, 0) for a in (-2, -1, 1, 2))
CHUNK = 1 << 16
"""Values per block: a candidate's arrays stay in the second-level cache."""
_HALF_TOP = 65504.0


@dataclass(frozen=True)
class Blocks:
    """Parameters of super-blocks, float64 whose values are as stored.

    d, dmin  [s, 1, 1]  float16 values
    sc, mn   [s, G, 1]  whole numbers; dmin and mn are 0 in formats without a minimum
    """

    d: F64
    sc: F64
    dmin: F64
    mn: F64

    def where(self, mask: NDArray[np.bool_], other: Blocks) -> Blocks:
        """These where `mask` [s, 1, 1] or [s, G, 1], else the other's."""
        whole = mask.shape[1] == 1
        return Blocks(
            np.where(mask, self.d, other.d) if whole else self.d,
            np.where(mask, self.sc, other.sc),
            np.where(mask, self.dmin, other.dmin) if whole else self.dmin,
            np.where(mask, self.mn, other.mn),
        )


def has_super_blocks(fmt: Format) -> bool:
    """True for q2_K, q3_K, q4_K, q5_K, q6_K and iq4_xs."""
    return fmt.family in ("ggml_k", "ggml_iq4") and fmt.super_size > 0


def check_array(x: Any, fmt: Format, op: str) -> None:
    """FormatError for a torch tensor: the search is NumPy's."""
    if not isinstance(x, np.ndarray):
        raise FormatError(f"[{op}] {fmt} of a {type(x).__name__}; allowed: int, uint, affine, E2M1. Give a NumPy array")


def mse_of_super_blocks(x: NDArray[Any], fmt: Format, importance: NDArray[Any] | None) -> QTensor:
    """`x` [n, k] in `fmt`, whose `has_super_blocks` is true; `importance` [k] weights the squared
    error of each input. Raises what `quantize` raises.
    """
    n, k = x.shape
    plain = quantize(x, fmt)
    h = np.ones(k) if importance is None else np.asarray(importance, np.float64)
    rows = max(1, CHUNK // max(1, k))
    pieces = []
    for i in range(0, n if k else 0, rows):
        search = _Search(fmt, x[i : i + rows], h)
        best = search.best(plain.rows(i, min(i + rows, n)).parts)
        pieces.append({"codes": search.codes(best), **_parts(fmt, best, len(x[i : i + rows]))})
    if not pieces:
        return plain
    return QTensor(fmt, (n, k), {part: np.concatenate([piece[part] for piece in pieces]) for part in plain.parts})


class SuperBlockColumns:
    """Super-blocks fitted one column of them after another, for `gptq`.

    grid  of one scale (and bias) a group, on which values are rounded
    span  inputs of a super-block
    """

    def __init__(self, fmt: Format) -> None:
        self.fmt, self.span = fmt, fmt.super_size
        one_level = replace(fmt, name="", scale="float32", minimum="", super_size=0, bias=bool(fmt.minimum))
        self.grid = Grid(one_level)
        self._columns: list[Blocks] = []

    def before(self, x: F64, ready: Any) -> list[Params]:
        """What is fitted to the weights x [n, k] before the walk: with act_order all groups'
        parameters.
        """
        columns = range(0, x.shape[1] if ready.act_order else 0, self.span)
        return [p for i in columns for p in self.fit(x[:, i : i + self.span], ready.importance[i : i + self.span])]

    def fit(self, x: F64, importance: F64) -> list[Params]:
        """The parameters [n] of each group in the next column, for weights x [n, span]."""
        search = _Search(self.fmt, x, importance)
        best = search.best(quantize(x, self.fmt).parts)
        self._columns.append(best)
        scale, low = (best.d * best.sc)[..., 0], (best.dmin * best.mn)[..., 0]
        return [Params(scale[:, g], None, -low[:, g] if self.grid.fmt.bias else None) for g in range(scale.shape[1])]

    def tensor(self, codes: NDArray[np.uint8], shape: tuple[int, int]) -> QTensor:
        """The packed weight of codes [n, k] under the fitted parameters."""
        columns = [_parts(self.fmt, blocks, shape[0]) for blocks in self._columns]
        parts = {part: np.concatenate([column[part] for column in columns], axis=1) for part in columns[0]}
        return QTensor(self.fmt, shape, {"codes": pack(codes, self.fmt.bits), **parts})


def _parts(fmt: Format, blocks: Blocks, rows: int) -> dict[str, NDArray[Any]]:
    """The parts of `rows` rows, without the codes."""
    small = np.int8 if SMALL_SCALES[fmt.scale][0] else np.uint8
    parts: dict[str, NDArray[Any]] = {
        "scales": blocks.sc.astype(small).reshape(rows, -1),
        "super_scales": blocks.d.astype(np.float16).reshape(rows, -1),
    }
    if fmt.minimum:
        parts["mins"] = blocks.mn.astype(np.uint8).reshape(rows, -1)
        parts["super_mins"] = blocks.dmin.astype(np.float16).reshape(rows, -1)
    return parts


class _Search:
    """The search for some rows x [n, k] under importances h [k]: super-blocks [s, G, g], all n · k
    / 256 of them at once, in float32 and in units of a super-block's largest magnitude.
    """

    def __init__(self, fmt: Format, x: NDArray[Any], h: F64) -> None:
        shape = (-1, fmt.super_size // fmt.group_size, fmt.group_size)
        self.fmt, self.rows = fmt, len(x)
        self.exact = np.asarray(x, np.float64).reshape(shape)
        peak = np.abs(self.exact).max((1, 2), keepdims=True)
        self.unit = np.where(peak < SMALLEST, 1, peak)
        self.x: F32 = (self.exact / self.unit).astype(np.float32)
        self.h: F32 = np.broadcast_to((h / (h.max() or 1.0)).astype(np.float32), x.shape).reshape(shape)
        self.weight: F32 = self.h.sum(-1, keepdims=True)
        self.low, self.top = SMALL_SCALES[fmt.scale]
        self.lowest, self.highest = SMALL_SCALES[fmt.minimum] if fmt.minimum else (0, 0)
        self.table: F32 = element_table(fmt.element, fmt.bits).astype(np.float32)

    def best(self, plain: Mapping[str, NDArray[Any]]) -> Blocks:
        """The best parameters found, not worse than those of the encoder's parts `plain`."""
        stored, fitted = self._stored(plain), self._fitted()
        before, error = self._error(stored), self._error(fitted)
        better = _of_blocks(error) < _of_blocks(before)
        best = self._refined(fitted.where(better, stored), np.where(better, error, before))
        # float32 sums decide within 1e-6: the last word is float64's.
        return best.where(_of_blocks(self._exact_error(best)) < _of_blocks(self._exact_error(stored)), stored)

    def codes(self, at: Blocks) -> NDArray[np.uint8]:
        """The nearest codes of the rows, packed."""
        codes = self._exact_codes(at).reshape(self.rows, -1)
        packed: NDArray[np.uint8] = pack(codes, self.fmt.bits)
        return packed

    def _exact_codes(self, at: Blocks) -> NDArray[np.uint8]:
        return nearest(_over(self.exact + at.dmin * at.mn, at.d * at.sc), self.fmt.element, self.fmt.bits)

    def _exact_error(self, at: Blocks) -> F64:
        values = element_table(self.fmt.element, self.fmt.bits)[self._exact_codes(at)] * (at.d * at.sc) - at.dmin * at.mn
        out: F64 = (self.h * np.square(self.exact - values)).sum(-1, keepdims=True)
        return out

    def _stored(self, parts: Mapping[str, NDArray[Any]]) -> Blocks:
        """The parameters of encoded rows."""
        d = parts["super_scales"].astype(np.float64).reshape(-1, 1, 1)
        sc = parts["scales"].astype(np.float64).reshape(len(d), -1, 1)
        if not self.fmt.minimum:
            return Blocks(d, sc, np.zeros_like(d), np.zeros_like(sc))
        dmin, mn = parts["super_mins"].astype(np.float64), parts["mins"].astype(np.float64)
        return Blocks(d, sc, dmin.reshape(d.shape), mn.reshape(sc.shape))

    def _fitted(self) -> Blocks:
        """Parameters from the weighted best line of each group."""
        s, o = self._lines() if self.fmt.minimum else (self._scales(), None)
        d, sc = self._second_level(s * self.unit, self.low, self.top)
        if o is None:
            return Blocks(d, sc, np.zeros_like(d), np.zeros_like(sc))
        return Blocks(d, sc, *self._second_level(-o * self.unit, self.lowest, self.highest))

    def _lines(self) -> tuple[F32, F32]:
        """(slope, offset of at most 0) of the least weighted error for each group: two of [s, G,
        1].
        """
        x, h, levels = self.x, self.h, (1 << self.fmt.bits) - 1
        seen = np.where(h > 0, x, 0)
        low = np.minimum(seen.min(-1, keepdims=True), 0)
        span = seen.max(-1, keepdims=True) - low
        unit, highest = _over(x - low, span), _over(-low, span)
        total, sum_x = self.weight, (h * unit).sum(-1, keepdims=True)
        slope, offset, least = np.full_like(low, 1 / levels), np.zeros_like(low), np.full_like(low, np.inf)
        for position in POSITIONS:
            q = np.clip(np.rint(unit * (levels + position)), 0, levels)
            hq = h * q
            sum_q, sum_qq, sum_qx = (a.sum(-1, keepdims=True) for a in (hq, hq * q, hq * unit))
            s = _over(total * sum_qx - sum_q * sum_x, total * sum_qq - sum_q * sum_q)
            o = _over(sum_x - s * sum_q, total)
            s = np.where(o > highest, _over(sum_qx - highest * sum_q, sum_qq), s)
            o = np.minimum(o, highest)
            error = (h * np.square(unit - s * q - o)).sum(-1, keepdims=True)
            won = (error < least) & (s > 0)
            least, slope, offset = np.where(won, error, least), np.where(won, s, slope), np.where(won, o, offset)
        return slope * span, offset * span + low

    def _scales(self) -> F32:
        """The scale of the least weighted error for each group, without a minimum: [s, G, 1]."""
        x, h, table = self.x, self.h, self.table
        seen = np.where(h > 0, x, 0)
        peak = np.take_along_axis(seen, np.abs(seen).argmax(-1)[..., None], -1)
        unit = _over(x, peak)
        best: F32 = peak / table[0]
        gain = np.full_like(peak, -1)
        for position in POSITIONS:
            v = self._elements(unit * (table[0] + position * (table[1] - table[0])))
            hv = h * v
            product, square = (hv * unit).sum(-1, keepdims=True), (hv * v).sum(-1, keepdims=True)
            won = product * product > gain * square
            gain = np.where(won, _over(product * product, square), gain)
            best = np.where(won, _over(product, square) * peak, best)
        return best

    def _second_level(self, s: Any, low: int, top: int) -> tuple[F64, F64]:
        """(d, small integers) of scales s [s, G, 1]: the largest takes the end of the range."""
        largest = np.take_along_axis(s, np.abs(s).argmax(1)[:, None], 1)
        d = _half(largest / (low or top))
        return d, np.clip(np.rint(_over(s, d)), low, top)

    def _refined(self, best: Blocks, least: F32) -> Blocks:
        """Coordinate descent from parameters of the errors `least` [s, G, 1]."""
        for number in range(ROUNDS):
            before = _of_blocks(least)
            tried = self._least_squares(best)
            error = self._error(tried)
            better = _of_blocks(error) < before
            best, least = tried.where(better, best), np.where(better, error, least)
            for tried in self._wide(best) if number == 0 else self._neighbours(best):
                error = self._error(tried)
                won = error < least
                best, least = tried.where(won, best), np.where(won, error, least)
            if number and not (_of_blocks(least) < before).any():
                break
        return best

    def _wide(self, at: Blocks) -> Iterator[Blocks]:
        """Scales well below and above those of `at`: of either sign without a minimum; with one,
        spans that begin at the lowest level, end at the highest, or lie between, under the best
        minimum for their codes.
        """
        if not self.fmt.minimum:
            for factor in (*FACTORS, *-FACTORS):
                yield Blocks(at.d, np.clip(np.rint(at.sc * factor), self.low, self.top), at.dmin, at.mn)
            return
        lowest, span = -at.dmin * at.mn, at.d * at.sc * ((1 << self.fmt.bits) - 1)
        for factor in SPANS:
            sc = np.clip(np.rint(at.sc * factor), self.low, self.top)
            for share in (0.0, 0.5, 1.0):
                mn = self._nearest_minimum(-(lowest + share * (1 - factor) * span), at)
                yield (tried := Blocks(at.d, sc, at.dmin, mn))
                step, floor = self._step(tried)
                over = self._elements(_over(self.x + floor, step))
                over *= step
                over -= self.x
                over *= self.h
                mean = _over(over.sum(-1, keepdims=True), self.weight) * self.unit
                yield Blocks(at.d, sc, at.dmin, self._nearest_minimum(mean, at))

    def _nearest_minimum(self, wanted: F64, at: Blocks) -> F64:
        out: F64 = np.clip(np.rint(_over(wanted, at.dmin)), self.lowest, self.highest)
        return out

    def _neighbours(self, at: Blocks) -> Iterator[Blocks]:
        for a, b in NEXT if self.fmt.minimum else NEXT_SCALE:
            sc, mn = np.clip(at.sc + a, self.low, self.top), np.clip(at.mn + b, self.lowest, self.highest)
            yield Blocks(at.d, sc, at.dmin, mn)

    def _least_squares(self, at: Blocks) -> Blocks:
        """d and dmin of the least error for the codes that x has under `at`.

        With u = sc · element, m = mn: Σ h (x − d u + dmin m)² is least where
        d Σhu² − dmin Σhum = Σhxu and d Σhum − dmin Σhm² = Σhxm.
        """
        step, floor = self._step(at)
        v = self._elements(_over(self.x + floor, step))
        hv = self.h * v
        # Σ over a group in float32, over a super-block in float64, as the small integers are exact.
        squares, products = ((a.sum(-1, keepdims=True, dtype=np.float64)) for a in (hv * v, hv * self.x))
        a, p = _of_blocks(squares * at.sc * at.sc), _of_blocks(products * at.sc)
        d, dmin = _over(p, a), np.zeros_like(at.dmin)
        if self.fmt.minimum:
            sums, seen = hv.sum(-1, keepdims=True, dtype=np.float64), (self.h * self.x).sum(-1, keepdims=True, dtype=np.float64)
            b = _of_blocks(sums * at.sc * at.mn)
            c, r = _of_blocks(self.weight * at.mn * at.mn), _of_blocks(seen * at.mn)
            determinant = a * c - b * b
            whole = np.where(determinant > 1e-9 * a * c, determinant, 0)
            both, own = _over(p * b - r * a, whole), _over(p * c - r * b, whole)
            use = (whole > 0) & (both >= 0)
            d, dmin = np.where(use, own, d), np.where(use, both, 0)
            d, dmin = np.where(d > 0, d, at.d / self.unit), np.where(d > 0, dmin, at.dmin / self.unit)
        d = np.where(a > 0, d, at.d / self.unit)
        return Blocks(_half(d * self.unit), at.sc, _half(dmin * self.unit), at.mn)

    def _step(self, at: Blocks) -> tuple[F32, F32]:
        """(step, what is taken off) of each group, [s, G, 1]."""
        step, floor = at.d * at.sc / self.unit, at.dmin * at.mn / self.unit
        return step.astype(np.float32), floor.astype(np.float32)

    def _elements(self, t: F32) -> F32:
        """The nearest elements of t."""
        if self.fmt.element == "iq4_nl":
            looked_up: F32 = self.table[nearest(t, "iq4_nl", 4)]
            return looked_up
        out: F32 = np.clip(np.rint(t), self.table[0], self.table[-1])
        return out

    def _error(self, at: Blocks) -> F32:
        """Σ h (x − value)² of each group, [s, G, 1]."""
        step, floor = self._step(at)
        e = self._elements(_over(self.x + floor, step))
        e *= step
        e -= floor
        e -= self.x
        e *= e
        e *= self.h
        out: F32 = e.sum(-1, keepdims=True)
        return out


def _of_blocks(error: Any) -> F64:
    """Numbers of groups [s, G, 1] -> sums of super-blocks [s, 1, 1]."""
    out: F64 = error.sum(1, keepdims=True, dtype=np.float64)
    return out


def _over(a: Any, b: Any) -> Any:
    """a / b, and 0 where |b| is too small to divide by."""
    small = np.abs(b) < SMALLEST
    return np.where(small, 0, a / np.where(small, 1, b))


def _half(a: F64) -> F64:
    """The nearest float16, its largest for what is beyond."""
    return np.clip(a, -_HALF_TOP, _HALF_TOP).astype(np.float16).astype(np.float64)
