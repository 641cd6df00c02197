"""A codec for each weight of a model within a budget: candidates of a target, the bytes that each
takes, and the recipe that comes of it.

A `Unit` is what takes one codec: a weight, the experts of one projection of a layer, or matrices
that engines join (`joined_modules`). Its choices have bytes and an estimated divergence;
`allocated` picks one for each (`knapsack.solve`). Divergences of units are added.

A recipe file is JSON: `halfbyte_recipe` (1), `to` and `rules` as `quantize` takes them, and, for
people, a report of the allocation.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoints import Checkpoint, TensorInfo, expert_names
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.writer import ALIGNMENT, pairs_of
from ..checkpoints.io.bounded_json import CONFIG_BYTES
from ..checkpoints.io.home import expanded
from ..checkpoints.io.regular_file import read_given
from ..checkpoints.io.safe_files import replace_text
from ..checkpoints.safetensors.writer import ENTRY_ROOM
from ..errors import CheckpointError, FormatError, LayoutError, ShapeError
from ..formats import format_named
from ..gguf_models.to_gguf import GGUFView
from ..gguf_models.view import ModelView, as_model
from ..layouts import LAYOUTS
from ..layouts.quant_config.writer import EMBEDDINGS
from ..spec import Format
from ..tensor.quantize import quantize
from .edges import packed_as_is
from .knapsack import Solution, solve
from .outcome import MisfitError
from .recipe import EXPERTS, Recipe, format_for, is_kept, module_of, recipe_of
from .targets import Goal, codecs_of, goal_named
from .unit import stored_tensors

KEEP = "keep"
"""The choice of a dense weight."""
HEADS = (*EMBEDDINGS, "lm_head", "output")
WITH_HEADS = tuple(name for name, layout in LAYOUTS.items() if layout.engine or layout.container == "halfbyte")
"""Layouts whose engines read packed embeddings and heads."""
_JOINED = ((r"(?:[qkv]_proj|attn_[qkv])", "qkv"), (r"(?:gate_proj|up_proj|ffn_gate|ffn_up|w1|w3)", "gate_up"))
"""Matrices that engines for the other layouts multiply at once, so that they share a format."""
_HEADER_SLACK = 512
_ENTRY = 128
"""Bytes of a tensor's entry in a header beside its name, at most."""
_PARTS = 6
"""Tensors of a packed weight in safetensors, and a module's entry in the configuration, at most."""
_FILE_HEADER = 2048 * ENTRY_ROOM
"""Bytes that a file of safetensors reserves for its header, at least."""


@dataclass(frozen=True)
class Choice:
    """codec  `codec[:gN]`, or "keep"
    nbytes  in the file
    kl      divergence that it adds, nats a token
    """

    codec: str
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Unit:
    """Modules that take one codec.

    name     for messages
    modules  of the checkpoint
    weights  their number
    choices  candidates
    """

    name: str
    modules: tuple[str, ...]
    weights: int
    choices: tuple[Choice, ...]

    @property
    def pattern(self) -> str:
        """The regular expression of a rule."""
        names = dict.fromkeys(re.sub(r"(experts|switch_mlp)\.\d+\.", r"\1.#.", m) for m in self.modules)
        whole = [re.escape(n).replace(r"\#", r"\d+").replace("#", r"\d+") for n in names]
        return f"^{whole[0]}$" if len(whole) == 1 else f"^({'|'.join(whole)})$"


class Point(NamedTuple):
    """Bytes and estimated divergence of choices with a name."""

    name: str
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Allocation:
    """The choices of an allocation.

    layout, params  the target
    units, choices  one choice a unit
    kept     modules that are left dense because they were not measured
    kl       Σ of the choices' divergences; no allocation of the budget has less than `bound`
    nbytes   of the units, `overhead` of the file's other tensors and headers at most
    facts    how it was made
    """

    layout: str
    units: tuple[Unit, ...]
    choices: tuple[Choice, ...]
    kept: tuple[str, ...]
    kl: float
    bound: float
    nbytes: int
    overhead: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Bits a weight of the units."""
        return 8 * self.nbytes / sum(u.weights for u in self.units)

    @property
    def to(self) -> str:
        """The target with the codec of most weights."""
        counts: Counter[str] = Counter()
        for unit, choice in zip(self.units, self.choices, strict=True):
            if choice.codec != KEEP:
                counts[choice.codec] += unit.weights
        if not counts:
            raise FormatError("[quantize] the budget keeps every weight dense; there is nothing to quantize")
        return f"{self.layout}:{min(counts, key=lambda c: (-counts[c], c))}"

    @property
    def rules(self) -> tuple[str, ...]:
        """A rule for each unit."""
        rules = [f"{u.pattern}={c.codec}" for u, c in zip(self.units, self.choices, strict=True)]
        return (*rules, *(f"^{re.escape(m)}$={KEEP}" for m in self.kept))

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.to, self.rules)

    def frontier(self, shares: Sequence[float]) -> list[Point]:
        """The best choices within other budgets, as shares of the chosen bytes; those that the
        candidates cannot meet are left out.
        """
        found = []
        weights = sum(u.weights for u in self.units)
        for share in shares:
            best = _solved(self.units, int(share * self.nbytes))
            if best is not None:
                found.append(Point(f"{8 * best.cost / weights:.2f} bits", best.cost, best.value))
        return found

    def uniform(self) -> list[Point]:
        """Every codec that fits all weights, in all of them."""
        found = []
        for codec in dict.fromkeys(c.codec for u in self.units for c in u.choices):
            own = [next((c for c in u.choices if c.codec == codec), None) for u in self.units]
            if codec != KEEP and all(own):
                found.append(Point(codec, sum(c.nbytes for c in own if c), sum(c.kl for c in own if c)))
        return found

    def summary(self) -> dict[str, Any]:
        """Budget and result, as plain values."""
        return {
            "to": self.to,
            "bits_per_weight": self.bits,
            "bytes": self.nbytes,
            "estimated_kl": self.kl,
            "bound": self.bound,
            **self.facts,
        }

    def save(self, path: str | Path) -> Path:
        """Write the recipe file."""
        path = expanded(path)
        tensors = [
            {"name": u.name, "codec": c.codec, "weights": u.weights, "bytes": c.nbytes, "kl": c.kl}
            for u, c in zip(self.units, self.choices, strict=True)
        ]
        value = {
            "halfbyte_recipe": 1,
            "to": self.to,
            "rules": list(self.rules),
            "allocation": {**self.summary(), "tensors": tensors},
        }
        replace_text(path, json.dumps(value, indent=1) + "\n")
        return path


def read_recipe(path: str | Path) -> tuple[str, list[str]]:
    """(target, rules) of a recipe file. CheckpointError when it is none."""
    path = expanded(path)
    try:
        value = json.loads(read_given(path, CONFIG_BYTES).decode("utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"[quantize] {path} is no JSON: {error}; a recipe is what --save-recipe wrote") from None
    version = value.get("halfbyte_recipe") if isinstance(value, dict) else None
    if version != 1:
        raise CheckpointError(f"[quantize] {path}: halfbyte_recipe is {version!r}; 1 is allowed. --save-recipe writes a recipe")
    to, rules = value.get("to"), value.get("rules")
    if not isinstance(to, str) or not isinstance(rules, list) or not all(isinstance(r, str) for r in rules):
        raise CheckpointError(f"[quantize] {path}: `to` is a target and `rules` a list of rules, both text; one of them is not")
    return to, rules


def check_recipe_path(path: Path) -> None:
    """CheckpointError, before the work, where no recipe can be written: there is no folder, or the
    file is no recipe.
    """
    path = expanded(path)
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"[quantize] --save-recipe {path}: there is no folder {path.absolute().parent}; make it first")
    if path.exists():
        read_recipe(path)


def allocated(
    layout: str,
    units: Sequence[Unit],
    kept: Iterable[str],
    overhead: int,
    *,
    bits: float | None = None,
    size: int | None = None,
    max_kl: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Allocation:
    """The choices of least divergence within one of three budgets.

    bits    a weight, over all units
    size    bytes of the file, headers and other tensors included
    max_kl  the least bytes whose estimated divergence is no more, by bisection over the budget
    FormatError, with what is possible, when the budget cannot be met.
    """
    weights = sum(u.weights for u in units)
    if not units:
        raise FormatError(f"[quantize] no weight of the checkpoint fits a codec of {layout}; nothing can be allocated")
    least, most = (sum(f(c.nbytes for c in u.choices) for u in units) for f in (min, max))
    if max_kl is not None:
        best = sum(min(c.kl for c in u.choices) for u in units)
        if best > max_kl:
            raise FormatError(f"[quantize] --max-kl {max_kl:g}; the candidates come to an estimated {best:.3g} at least")
        low, high = least - 1, most
        while high - low > max(1, weights // 4000):
            middle = (low + high) // 2
            found = _solved(units, middle)
            low, high = (low, middle) if found is not None and found.value <= max_kl else (middle, high)
        budget = high
    elif size is not None:
        budget = size - overhead
        if budget < least:
            raise FormatError(
                f"[quantize] --size {size:,} bytes; this checkpoint takes {least + overhead:,} at least with the candidates of "
                f"{layout}, of which {overhead:,} are headers and tensors that stay as they are"
            )
    else:
        assert bits is not None
        if not math.isfinite(bits) or bits <= 0:
            raise FormatError(f"[quantize] --bits {bits}; a number above 0, like 4.25")
        budget = math.floor(bits * weights / 8)
        if budget < least:
            raise FormatError(
                f"[quantize] --bits {bits:g}; the candidates of {layout} that fit the rows of this checkpoint take "
                f"{8 * least / weights:.4g} bits a weight at least"
            )
    found = _solved(units, budget)
    assert found is not None
    choices = tuple(u.choices[i] for u, i in zip(units, found.choices, strict=True))
    return Allocation(
        layout,
        tuple(units),
        choices,
        tuple(kept),
        found.value,
        found.bound,
        found.cost,
        overhead,
        {"budget_bytes": budget, **(facts or {})},
    )


def _solved(units: Sequence[Unit], budget: int) -> Solution | None:
    return solve([[c.nbytes for c in u.choices] for u in units], [[c.kl for c in u.choices] for u in units], budget)


def candidate_codecs(layout: str, words: Sequence[str] = ()) -> tuple[str, ...]:
    """What a weight may become: `words`, or every codec of the target with each of its group sizes.

    >>> candidate_codecs("gpt-oss")
    ('mxfp4',)
    """
    if words:
        return tuple(dict.fromkeys(_spelled(layout, w) for w in words))
    if LAYOUTS[layout].container == "halfbyte":
        integers = tuple(f"int{b}:g128" for b in range(2, 9))
        return tuple(dict.fromkeys((*candidate_codecs("gguf"), *candidate_codecs("mlx"), *integers)))
    holds = LAYOUTS[layout].holds
    if holds is None:
        raise LayoutError(f"[quantize] {layout} is no target of quantize")
    found = []
    for word in codecs_of(layout):
        usual = format_named(word)
        grouped = usual.float_scale and not usual.family.startswith("ggml")
        found += [f"{word}:g{g}" for g in sorted(holds.groups)] if grouped and holds.groups else [word]
    return tuple(found)


def _spelled(layout: str, word: str) -> str:
    target = goal_named(f"{layout}:{word}").target
    return str(target).partition(":")[2]


def stored_bytes(fmt: Format, shape: Sequence[int], goal: Goal) -> int:
    """Bytes of a weight's tensors in a file of the target, with their alignment and the entry of a
    second tensor in a GGUF's header. Raises MisfitError where the target cannot hold it.

    Rows are counted on small weights: each 32 rows more take the same bytes, whatever is packed
    along the rows.
    """
    k, n, matrices = shape[-1], shape[-2], math.prod(shape[:-2])
    counts = (n,) if n < 64 else (32 + n % 32, 64 + n % 32)
    rng = np.random.default_rng(0)
    few = []
    for rows in counts:
        outcome = packed_as_is(quantize(rng.standard_normal((rows, k), np.float32), fmt), goal)
        few.append({name: t.nbytes for name, t in stored_tensors(outcome, goal).items()})
    total = 0
    for name, small in few[0].items():
        nbytes = matrices * (small + (few[-1][name] - small) * ((n - counts[0]) // 32))
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT if goal.writer.container == "gguf" else nbytes
    return total + (ALIGNMENT + _ENTRY + 256 if goal.writer.container == "gguf" and len(few[0]) > 1 else 0)


def choices_of(info: TensorInfo, goals: Iterable[Goal]) -> dict[str, tuple[Format, int]]:
    """Codec -> (format, bytes) of those that fit a weight."""
    dtype = "float32" if info.quantized else info.dtype
    found: dict[str, tuple[Format, int]] = {}
    for goal in goals:
        try:
            fmt, other = format_for(goal, dtype, info.shape)
            if not other:
                found[str(goal.target).partition(":")[2]] = fmt, _stored(fmt, info.shape, goal)
        except (ShapeError, FormatError, MisfitError):
            continue
    return found


_SIZES: dict[tuple[Format, tuple[int, ...], str, str], int] = {}


def _stored(fmt: Format, shape: Sequence[int], goal: Goal) -> int:
    key = fmt, tuple(shape), goal.layout, str(dict(goal.params))
    if key not in _SIZES:
        _SIZES[key] = stored_bytes(fmt, shape, goal)
    return _SIZES[key]


def allocatable(info: TensorInfo, layout: str) -> str | None:
    """The module of a weight that an allocation may round; None for others."""
    module = module_of(info)
    if module is None or "norm" in module.rpartition(".")[2]:
        return None
    last, ndim = module.rpartition(".")[2], len(info.shape)
    if last in HEADS:
        return module if layout in WITH_HEADS and ndim == 2 else None
    if is_kept(module):
        return None
    return module if ndim == 2 or (ndim == 3 and EXPERTS.search(module)) else None


def unit_namer(checkpoint: Checkpoint, layout: str) -> Callable[[str], str]:
    """A function: module -> the name of its unit."""
    if LAYOUTS[layout].container == "gguf" and not isinstance(checkpoint, GGUFCheckpoint):
        home = {m: name for m, (name, _) in GGUFView(checkpoint, names_only=True).modules_of_source().items()}
        return lambda module: home.get(module, module)

    def name(module: str) -> str:
        found = expert_names.parse(module)
        if found is not None and found.expert is not None:
            return f"{found.module}.*.{found.word}"
        if layout not in WITH_HEADS:
            parent, dot, last = module.rpartition(".")
            for pattern, joined in _JOINED:
                if re.fullmatch(pattern, last):
                    return f"{parent}{dot}{joined}"
        return module

    return name


def overhead_of(checkpoint: Checkpoint, layout: str, modules: Iterable[str], files: int = 1) -> int:
    """Bytes of files of the target beside the weights of these modules, at most: other tensors,
    headers, alignment.

    files  shards, at most
    """
    wanted, names = set(modules), dict[str, str]()
    if LAYOUTS[layout].container == "gguf":
        gguf = checkpoint if isinstance(checkpoint, GGUFCheckpoint) else GGUFView(checkpoint)
        view: Checkpoint = gguf
        pairs = gguf.pairs if isinstance(gguf, GGUFView) else pairs_of(gguf.file)
        names = gguf.source_names() if isinstance(gguf, GGUFView) else {}
        total = _HEADER_SLACK + sum(16 + len(key.encode()) + len(value) for key, _, value in pairs)
        per_tensor = _ENTRY + ALIGNMENT
    else:
        view = as_model(checkpoint, layout)
        if isinstance(view, ModelView):
            names = {new.removesuffix(".weight"): old.removesuffix(".weight") for old, new in view.names().items()}
        total = files * (_HEADER_SLACK + _FILE_HEADER)
        per_tensor = _PARTS * ENTRY_ROOM
    for info in view.infos():
        module = info.key.removesuffix(".weight")
        total += len(info.key) + per_tensor
        if names.get(module, module) not in wanted:
            total += info.nbytes
    return total
