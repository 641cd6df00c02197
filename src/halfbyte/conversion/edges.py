"""Decide how one weight reaches a target: exactly, equal in the target's arithmetic, or only with
loss.

outcome = convert_weight(q, goal_named("mlx:affine4:g64"))
outcome.kind, outcome.why              "exact-if", "biases are float16 numbers"
outcome.weight                         the QTensor whose pack() the layout writes

`convert_weight` tries the formats that the target may mean (`targets.candidates`), best first. For
each it tries the rewrite rules that keep every real value (`codebook_edges`, `affine_edges`), then
those that are equal in the target's own decoder (`producer_equality`). If none applies it
requantizes, which the caller must allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, HalfbyteError, LayoutError, ShapeError
from ..layouts import LAYOUTS
from ..numerics.error_stats import ErrorStats
from ..numerics.row_slices import row_slices
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .affine_edges import holds_affine, to_affine
from .codebook_edges import holds_codebook, to_codebook
from .outcome import Checks, LossyError, MisfitError, Outcome, spelled
from .producer_equality import check_equal, equal_tensor_scale
from .source_values import affine_values_of
from .targets import Goal, candidates, goal_named

BLOCK = 1 << 22
"""Values requantized at a time."""
STEP = 1 << 20
"""Values compared at a time."""


def convert_tensor(q: QTensor, to: str | Goal, *, lossy: bool = False, scale_dtype: str | None = None, name: str = "") -> QTensor:
    """`q` in a format that layout `to` (`layout[:codec[:gN]]`) holds, with the same values.

    lossy        allow the least-error requantization where no exact edge exists
    scale_dtype  dtype of float scales; otherwise the source's where it holds them exactly, else the
                 narrowest that does
    name         the weight's name, for messages

    Raises LossyError, with the reason and the error it would cost, when values would change and
    `lossy` is not set; LayoutError or FormatError when the target is unknown or cannot hold the
    weight at all.

    >>> q = quantize(np.eye(8, 32, dtype=np.float32), "int4:g32")
    >>> convert_tensor(q, "mlx").format.name
    'affine4'
    """
    goal = goal_named(to, scale_dtype) if isinstance(to, str) else to
    outcome = convert_weight(q, goal, name)
    if outcome.kind == "lossy" and not lossy:
        raise refusal(goal, [(name or "the weight", outcome)])
    return outcome.weight


def refusal(goal: Goal, lost: Sequence[tuple[str, Outcome]], counts: Mapping[str, int] | None = None) -> LossyError:
    """The error that gives each cause once, with its weights, errors and what would be exact.

    counts  weights that each key stands for, where one was tried for all of its format; None when
            every weight was
    """
    losses = [(key, o.why, o.error.relative_rms if o.error else 0.0) for key, o in lost]
    causes: dict[str, list[tuple[str, float]]] = {}
    for key, why, rms in losses:
        causes.setdefault(why, []).append((key, rms))
    total = sum(counts.values()) if counts else len(lost)
    clauses = []
    for why, found in causes.items():
        number = sum(counts[key] for key, _ in found) if counts else len(found)
        (worst, most), least = max(found, key=lambda item: item[1]), min(rms for _, rms in found)
        if total == 1:
            clauses.append(f"{worst}: {why}, a relative RMS error of {most:.3g}")
            continue
        named = "" if len(causes) == 1 else f"{number:,} of them: "
        error = (
            f"a relative RMS error of {most:.3g} in"
            if least == most
            else f"relative RMS errors of {least:.3g} to {most:.3g}, the largest in"
        )
        clauses.append(f"{named}{why}, {error} {worst}")
    tried = " (the first rows of one weight of each format were tried; --plan tries all)" if counts else ""
    instead = sorted({i for _, o in lost for i in o.instead})
    exact = f"Exact instead: {', '.join(instead[:4])}. " if instead else ""
    mixed = goal.layout if len(instead) > 1 else "".join(instead)  # the layout alone lets each weight take its own codec
    return LossyError(
        f"[convert] {total:,} weight{'s' if total != 1 else ''} cannot go to {goal} exactly: {'; '.join(clauses)}{tried}. "
        f"{exact}Allow the error with --lossy (lossy=True)",
        losses,
        mixed if all(o.instead for _, o in lost) else "",
    )


def convert_weight(q: QTensor, goal: Goal, name: str = "", suggest: bool = True) -> Outcome:
    """The best outcome for `q`: the first exact candidate, else one equal in the target's
    arithmetic, else a lossy one.

    suggest  for a lossy outcome, look for other codecs of the layout that are exact
    Raises LayoutError when the layout holds no candidate.
    """
    reasons: dict[Format, str] = {}
    fitting: list[Format] = []
    # All edges of one codec are tried before a wider codec: an equal edge is preferred to a wider
    # exact one.
    for _, formats in groupby(candidates(q, goal), key=lambda fmt: fmt.name):
        tried: list[Format] = []
        for fmt in formats:
            for rewrite in _rewrites(q, fmt, goal):
                checks = Checks()
                try:
                    return _packed_outcome(q, fmt, rewrite(checks), goal, checks)
                except _UnsupportedFormatError as misfit:
                    reasons.setdefault(fmt, str(misfit))
                except MisfitError as misfit:
                    reasons[fmt] = str(misfit)
                    tried.append(fmt)
        for fmt in tried:
            checks = Checks()
            try:
                return replace(_equal(q, fmt, goal, checks), kind="equal", why=checks.why)
            except MisfitError as misfit:
                if fmt.global_op and q.format.global_op:
                    reasons[fmt] = str(misfit)
        fitting += tried
    return _requantized(q, goal, {fmt: reasons[fmt] for fmt in fitting}, next(iter(reasons.values()), ""), name, suggest)


class _UnsupportedFormatError(MisfitError):
    """The layout cannot store the format, whatever the values."""


Rewrite = Callable[[Checks], Mapping[str, NDArray[Any]]]


def _rewrites(q: QTensor, fmt: Format, goal: Goal) -> Iterator[Rewrite]:
    """Functions that give parts of `fmt` with the values of `q`, to be tried in this order: the
    parts of `q` themselves, then rewritten ones.
    """
    if fmt == q.format:
        yield lambda checks: q.parts
    if fmt != q.format or (holds_affine(fmt) and ("group_index" in q.parts or fmt.zero == "int")):
        yield lambda checks: _exact(q, fmt, goal, checks)


def _exact(q: QTensor, fmt: Format, goal: Goal, checks: Checks) -> dict[str, NDArray[Any]]:
    """Parts of `fmt` with the values of `q`. MisfitError when no rule applies."""
    if q.format.composite:
        raise MisfitError(f"a value of {q.format} is more than one code under its scales")
    try:
        if holds_codebook(fmt, q.format.element):
            return to_codebook(q, fmt, checks)
        if holds_affine(fmt):
            return to_affine(affine_values_of(q), fmt, checks, least_zero=_least_zero(goal))
    except (ShapeError, FormatError) as error:
        raise _UnsupportedFormatError(str(error)) from None
    raise MisfitError(f"{q.format} and {fmt} have no element in common")


def _least_zero(goal: Goal) -> int:
    """The smallest zero point the target stores: GPTQ v1 has no code for 0."""
    return 1 if goal.params.get("checkpoint_format") == "gptq" else 0


def _packed_outcome(q: QTensor, fmt: Format, parts: Mapping[str, NDArray[Any]], goal: Goal, checks: Checks) -> Outcome:
    """The outcome for these parts, packed by their layout. MisfitError when the layout cannot store
    them.
    """
    layout = LAYOUTS[goal.layout]
    if parts is q.parts:
        weight = q
    else:
        origin = layout.producers[0] if layout.producers else q.origin
        weight = QTensor(fmt, q.shape, parts, origin=origin)
    try:
        config = layout.config(weight) | dict(goal.params)
        return Outcome(weight, layout.pack(weight, config), config, checks.kind, checks.why)
    except LayoutError as error:
        # Other zero points, or groups in order, may be stored: a requantization is possible.
        by_value = weight.format.zero == "int" or "group_index" in weight.parts
        raise (MisfitError if by_value else _UnsupportedFormatError)(_clause(error)) from None


def packed_as_is(q: QTensor, goal: Goal) -> Outcome:
    """The outcome of a weight that already has a format of the target. MisfitError when the layout
    cannot store it.
    """
    return _packed_outcome(q, q.format, q.parts, goal, Checks())


def _clause(error: Exception) -> str:
    text = str(error)
    return text.partition("cannot be written: ")[2] or text


def _equal(q: QTensor, fmt: Format, goal: Goal, checks: Checks) -> Outcome:
    """A weight of `fmt` that the target's producer decodes to the exact values of `q` rounded once.
    MisfitError when there is none.
    """
    if q.format.composite:
        raise MisfitError(f"a value of {q.format} is more than one code under its scales")
    origin = next(iter(LAYOUTS[goal.layout].producers), "")
    if fmt.global_op:
        outcome = _packed_outcome(q, fmt, equal_tensor_scale(q, fmt, origin, checks), goal, checks)
        checks.add("every code under every block scale decodes to the same number")
        return outcome
    if not (fmt.bias and holds_affine(fmt)) or fmt == q.format:
        raise MisfitError("the target's arithmetic does not hide the rounding")
    outcome = _packed_outcome(q, fmt, to_affine(affine_values_of(q), fmt, checks, round_biases=True), goal, checks)
    check_equal(q, outcome.weight, checks)
    return outcome


def _requantized(q: QTensor, goal: Goal, fitting: Mapping[Format, str], failed: str, name: str, suggest: bool) -> Outcome:
    """The requantization to the first of `fitting` that the layout can store.

    fitting  format -> why it is not exact
    failed   why no format can be stored, for the message
    """
    for fmt, why in fitting.items():
        try:
            requantized = requantize(q, fmt)
            outcome = _packed_outcome(q, requantized.format, dict(requantized.parts), goal, Checks())
        except (HalfbyteError, MisfitError) as error:
            failed = str(error)
            continue
        lost = difference(q, outcome.weight)
        if lost.identical:
            return replace(outcome, kind="exact-if", why=f"every value is on the grid of {spelled(fmt)}")
        instead = _exact_elsewhere(q, goal) if suggest and goal.target.codec else ()
        return replace(outcome, kind="lossy", why=f"{why} ({spelled(fmt)})", error=lost, instead=instead)
    where = f"{name}: " if name else ""
    raise LayoutError(
        f"[convert] {where}{q.format} of shape {q.shape} cannot be stored as {goal}: {failed or 'the layout has no codec for it'}"
    )


def _exact_elsewhere(q: QTensor, goal: Goal) -> tuple[str, ...]:
    """The best target of the same layout that holds `q` exactly, of any codec; () for none."""
    free = replace(goal, target=replace(goal.target, codec=None, group_size=None), scale_dtype=None)
    for fmt in candidates(q, free):
        for rewrite in _rewrites(q, fmt, free):
            try:
                _packed_outcome(q, fmt, rewrite(Checks()), free, Checks())
            except MisfitError:
                continue
            plain = not fmt.float_scale or fmt.family.startswith("ggml")
            group = "" if plain else ":channel" if fmt.group_size == -1 else f":g{fmt.group_size}"
            return (f"{goal.layout}:{fmt.name}{group}",)
    return ()


def requantize(q: QTensor, fmt: Format) -> QTensor:
    """The values of `q`, as float32, rounded to `fmt` by the default policy, the one of least
    error.

    Rows are processed in blocks, except where a tensor scale depends on all of them.
    """
    if q.ndim > 2:
        pieces = [requantize(q[e], fmt) for e in range(q.shape[0])]
        if not pieces:
            return quantize(q.dequantize("float32"), fmt)
        return QTensor(fmt, q.shape, {p: np.stack([i.parts[p] for i in pieces]) for p in pieces[0].parts})
    blocks = list(row_slices(q.shape, BLOCK))
    if fmt.global_op or fmt.grouping != "row" or len(blocks) < 2 or q.window is not None:
        return quantize(q.dequantize("float32"), fmt)
    pieces = [quantize(q.rows(rows.start, rows.stop).dequantize("float32"), fmt) for rows in blocks]
    return QTensor(fmt, q.shape, {p: np.concatenate([i.parts[p] for i in pieces]) for p in pieces[0].parts})


def difference(a: QTensor, b: QTensor) -> ErrorStats:
    """Statistics of b against a, exact values compared a block of rows at a time."""
    out = ErrorStats()
    pairs = [(a, b)] if a.ndim == 2 else [(a[e], b[e]) for e in range(a.shape[0])]
    for x, y in pairs:
        for rows in row_slices(x.shape, STEP):
            out.add(*(weight.rows(rows.start, rows.stop).dequantize("float64") for weight in (x, y)))
    return out


__all__ = ["convert_tensor", "convert_weight", "difference", "refusal", "requantize"]
