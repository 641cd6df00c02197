"""Compare two checkpoints tensor by tensor: equal values, or error statistics.

    for every pair of tensors: value of A == value of B, else the statistics of
    `numerics/error_stats.py`

Both sides are read a block of rows at a time and compared by exact value, so packed and dense,
fused and split, GGUF and safetensors may be mixed. The dtype of the comparison depends on both
sides:

| A | B | compared as |
|---|---|---|
| packed | packed | float64, the exact values |
| packed | dense float16, bfloat16, float32 | that dtype: the exact value rounded once to it, as `dequantize` writes it |
| dense | dense | their own values |

Exact values that need more than 53 bits are rounded to odd in float64 (`exact`): two that differ
there only, by less than 2^-52 of themselves, count as equal.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints import Checkpoint, expert_names
from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.ledger import ACTIVATION_SCALES, UNREADABLE
from ..checkpoints.views.usual import usual
from ..errors import CheckpointError, UnsupportedError
from ..gguf_models.names import unsupported
from ..gguf_models.to_gguf import GGUFView
from ..gguf_models.view import ModelView, as_model
from ..numerics.error_stats import ErrorStats
from ..numerics.exact import dtype_named
from ..tensor.qtensor import QTensor
from ..tensor.row_view import RowView, Source
from .match import Match, Piece, Side, pair
from .names import Rules, dialect_of

STATUSES = ("unaccounted", "unpaired", "missing", "extra", "shape", "different", "close", "auxiliary", "identical")
"""Worst first. unaccounted: a tensor or config key that nobody reads, or a tensor that is missing
(`checkpoints/ledger.py`), so that the comparison is incomplete. unpaired: related tensors that
could not be aligned. missing: in A only. extra: in B only. shape: the sizes differ. close: not
equal, but within the given tolerance. auxiliary: on one side only, and not a weight (`AUXILIARY`).
"""

AUXILIARY = re.compile(
    rf"(.*\.)?({'|'.join(ACTIVATION_SCALES)}|rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_\w+\.weight)"
)
"""Tensors that need no counterpart: scales of activations, and rotary frequencies, which the
configuration determines.
"""

_ROUNDED = ("float16", "bfloat16", "float32")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """The result for one match: a pair of tensors, or of groups of tensors that hold the same
    weights.

    shape, format        of A's side, `other_…` of B's; formats are a codec with its group size, or
                         a dense dtype
    compared_as          dtype both sides were rounded to
    difference           statistics, None where nothing could be compared
    """

    status: str
    keys: tuple[str, ...]
    other_keys: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    other_shape: tuple[int, ...] | None = None
    format: str = ""
    other_format: str = ""
    compared_as: str = ""
    note: str = ""
    difference: ErrorStats | None = None

    @property
    def key(self) -> str:
        """One name for a table: A's key, or B's when A has none."""
        return label(self.keys or self.other_keys)

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts the worst first."""
        rms = self.difference.relative_rms if self.difference else 0.0
        return STATUSES.index(self.status), -math.inf if math.isnan(rms) else -rms

    def record(self) -> dict[str, Any]:
        """The comparison as plain values, keys as `docs/reference/cli.md` lists them."""
        out: dict[str, Any] = {
            "record": "tensor", "key": self.key, "other_key": label(self.other_keys), "status": self.status,
            "shape": self.shape, "other_shape": self.other_shape, "format": self.format, "other_format": self.other_format,
        }  # fmt: skip
        if len(self.keys) > 1 or len(self.other_keys) > 1:
            out |= {"keys": self.keys, "other_keys": self.other_keys}
        if self.difference is not None:
            d = self.difference
            out |= {
                "compared_as": self.compared_as, "count": d.count, "differing": d.differing, "max_abs_error": d.max_abs_error,
                "max_relative_error": d.max_relative_error, "relative_rms": d.relative_rms, "cosine": d.cosine, "worst": d.worst,
            }  # fmt: skip
        if self.note:
            out["note"] = self.note
        return out


@dataclass
class Report:
    """Every comparison, worst first."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Comparisons of each status, zeros included."""
        found = Counter(c.status for c in self.comparisons)
        return {s: found[s] for s in STATUSES}

    @property
    def verdict(self) -> str:
        """identical, close (all within the tolerance) or different. Nothing compared is different:
        it proves nothing.
        """
        found = {c.status for c in self.comparisons} - {"auxiliary"}
        if found == {"identical"}:
            return "identical"
        return "close" if found and found <= {"identical", "close"} else "different"

    def record(self) -> dict[str, Any]:
        """The summary as plain values."""
        return {"record": "summary", "verdict": self.verdict, **self.counts}


def label(keys: Sequence[str]) -> str:
    """One to three keys joined by +, more of them by the first and the number."""
    return " + ".join(keys) if len(keys) <= 3 else f"{keys[0]} + {len(keys) - 1} more"


def verify(
    a: Checkpoint | str | Path,
    b: Checkpoint | str | Path,
    *,
    rules: Rules | None = None,
    rtol: float = 0.0,
    dtype: str | None = None,
    arithmetic: str = "exact",
    progress: Progress | None = None,
) -> Report:
    """Compare every tensor of `a` with its counterpart in `b`.

    a, b        checkpoints, or their paths
    rules       rename keys of `a` that no convention covers (`names.read_rules`)
    rtol        most relative RMS, and most largest relative error, of a tensor that counts as close
    dtype       round both sides once to this dtype before comparing, instead of the table above
    arithmetic  "exact", or "producer": what each producer's own decoder gives
    progress    called as progress(done, total, key) before each comparison
    Raises CheckpointError or LayoutError when a tensor cannot be read.
    """
    if isinstance(a, str | Path) or isinstance(b, str | Path):
        with ExitStack() as stack:
            first, second = (stack.enter_context(open_checkpoint(x)) if isinstance(x, str | Path) else x for x in (a, b))
            return verify(first, second, rules=rules, rtol=rtol, dtype=dtype, arithmetic=arithmetic, progress=progress)
    if dtype is not None:
        dtype = dtype_named(dtype).name
    a, b = usual(a), usual(b)
    if not rules:
        a, b = _in_one_convention(a, b, arithmetic)
    unaccounted = [*_unaccounted(a, left=True), *_unaccounted(b, left=False)]
    left_dialect = dialect_of(a.keys(), a.config, a.metadata)
    right_dialect = dialect_of(b.keys(), b.config, b.metadata)
    left = Side.of(list(a.infos()), left_dialect, rules, right_dialect)
    right = Side.of(list(b.infos()), right_dialect)
    matches = pair(left, right)
    out = Report(unaccounted)
    for done, match in enumerate(matches):
        if progress is not None:
            progress(done, len(matches), label(match.left_keys or match.right_keys))
        out.comparisons.append(_compare(a, b, match, rtol, dtype, arithmetic))
    if progress is not None:
        progress(len(matches), len(matches), "")
    out.comparisons.sort(key=lambda c: c.rank)
    return out


def _in_one_convention(a: Checkpoint, b: Checkpoint, arithmetic: str) -> tuple[Checkpoint, Checkpoint]:
    """A GGUF and a folder under names and in the order of rows of one side: transformers' where all
    of the file's tensors have them, else llama.cpp's.
    """
    if isinstance(a, GGUFCheckpoint) == isinstance(b, GGUFCheckpoint):
        return a, b
    file, other = (a, b) if isinstance(a, GGUFCheckpoint) else (b, a)
    if dialect_of(other.keys(), other.config, other.metadata).gguf:
        return a, b
    packed, keys = any(info.quantized for info in other.infos()), {_module(key) for key in other}
    named = False
    # Engines have other names than published checkpoints, as mlx-lm has for Granite's experts.
    for published in (False, True):
        try:
            model = as_model(file, "", dense=not packed, arithmetic=arithmetic, published=published)
        except CheckpointError:  # a header that contradicts its tensors
            return a, b
        named = isinstance(model, ModelView) and keys <= {_module(key) for key in model}
        if named:
            break
    if isinstance(model, ModelView) and not unsupported(model.architecture):
        # Other names are those of other checkpoints of the model.
        return ((model, other) if file is a else (other, model)) if named else (a, b)
    try:
        view = GGUFView(other, names_only=True)
    except (UnsupportedError, CheckpointError):
        return (model, other) if file is a else (other, model)
    # A logarithm and a power are not each other's inverse to the last bit: values are compared in
    # the form that one side was made into.
    changed = view.changed_keys()
    same = all(key in file and np.array_equal(np.asarray(file[key]), np.asarray(view[key])) for key in changed)
    if named and not (changed and same):
        return (model, other) if file is a else (other, model)
    return (file, view) if file is a else (view, file)


def _module(key: str) -> str:
    """The module of a tensor; all experts of a layer are one."""
    found = expert_names.parse(key)
    module = found.path if found else key.removesuffix(".weight")
    return module.replace(".block_sparse_moe", ".mlp").replace(".router.layer", ".router")


def _unaccounted(checkpoint: Checkpoint, left: bool) -> list[Comparison]:
    """The problems of a side's ledger, but for those that its `allowed` names."""
    problems = [e for e in checkpoint.ledger().problems if not any(fnmatchcase(e.name, p) for p in checkpoint.allowed)]
    side = "A" if left else "B"
    unreadable = {e.owner: e for e in checkpoint.ledger().entries if e.status == UNREADABLE}
    rows = [(e.name, e) for e in problems] + list(unreadable.items())
    return [
        Comparison("unaccounted", (name,) if left else (), () if left else (name,), note=f"{e.status} in {side}: {e.why}")
        for name, e in rows
    ]


def _compare(a: Checkpoint, b: Checkpoint, match: Match, rtol: float, dtype: str | None, arithmetic: str) -> Comparison:
    match = _transposed_where_needed(a, b, match)
    facts: dict[str, Any] = {
        "keys": match.left_keys, "format": _format(a, match.left_keys), "shape": _shape(a, match.left_keys), "note": match.note,
        "other_keys": match.right_keys, "other_format": _format(b, match.right_keys), "other_shape": _shape(b, match.right_keys),
    }  # fmt: skip
    if not match.left or not match.right:
        if all(AUXILIARY.fullmatch(key) for key in (*match.left_keys, *match.right_keys)):
            return Comparison("auxiliary", **facts)
        return Comparison("missing" if match.left else "extra", **facts)
    if not match.aligned:
        return Comparison("unpaired", **facts)
    several = len(match.left) > 1 or len(match.right) > 1
    flipped = any(p.transposed for p in (*match.left, *match.right))
    if not several and not flipped and facts["shape"] != facts["other_shape"]:
        return Comparison("shape", **facts)
    x, y = _view(a, match.left, several), _view(b, match.right, several)
    facts["shape"], facts["other_shape"] = facts["shape"] or x.shape, facts["other_shape"] or y.shape
    if x.shape != y.shape:
        return Comparison("shape", **facts)
    as_dtype = dtype or _common_dtype(x, y, arithmetic)
    difference = ErrorStats()
    for start, stop in x.blocks():
        difference.add(x.read(start, stop, as_dtype, arithmetic), y.read(start, stop, as_dtype, arithmetic))
    status = "identical" if difference.identical else "close" if difference.within(rtol) else "different"
    return Comparison(status, **facts, compared_as=as_dtype, difference=difference)


def _view(checkpoint: Checkpoint, pieces: Sequence[Piece], several: bool) -> RowView:
    tensors = {p.key: checkpoint[p.key] for p in pieces}
    sources = []
    for p in pieces:
        t = tensors[p.key]
        if not isinstance(t, QTensor) and (p.vector or (several and t.ndim == 1)):
            t = t[..., None]
        sources.append(Source(t, p.expert, p.rows, p.heads, p.transposed, p.add_one))
    return RowView(sources)


def _transposed_where_needed(a: Checkpoint, b: Checkpoint, match: Match) -> Match:
    """Transpose dense stacks [e, k, n] against (e, n, k), recognised by their sizes where no
    configuration says so.
    """
    if len(match.left) != 1 or len(match.right) != 1:
        return match
    (p,), (q,) = match.left, match.right
    s, t = a.info(p.key), b.info(q.key)
    if p.transposed or q.transposed or s.shape == t.shape or len(s.shape) != 3 or s.shape != (t.shape[0], *t.shape[:0:-1]):
        return match
    if t.kind == "dense":
        return Match((p,), (Piece(q.key, transposed=True),), match.note)
    return Match((Piece(p.key, transposed=True),), (q,), match.note) if s.kind == "dense" else match


def _common_dtype(x: RowView, y: RowView, arithmetic: str) -> str:
    packed = [all(isinstance(s.matrix, QTensor) for s in view.sources) for view in (x, y)]
    dense = [{s.matrix.dtype.name for s in view.sources if not isinstance(s.matrix, QTensor)} for view in (x, y)]
    if packed[0] != packed[1]:
        names = dense[0] | dense[1]
        if len(names) == 1 and (name := names.pop()) in _ROUNDED:
            return name
    return "float32" if arithmetic == "producer" and any(packed) else "float64"


def _format(checkpoint: Checkpoint, keys: Sequence[str]) -> str:
    infos = [checkpoint.info(k) for k in keys]
    return " + ".join(dict.fromkeys(str(i.format) if i.format is not None else i.dtype for i in infos))


def _shape(checkpoint: Checkpoint, keys: Sequence[str]) -> tuple[int, ...] | None:
    """The shape of a single tensor; None for several, whose shape is that of their view."""
    return tuple(checkpoint.info(keys[0]).shape) if len(keys) == 1 else None
