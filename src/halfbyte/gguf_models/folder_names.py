"""Which tensors of a GGUF file a tensor of a transformers checkpoint goes into: the tables of
`architectures.py`, read from the model to the file.

    FolderNames(architecture, "qwen35", settings).places(key, info)
        [Place("blk.3.attn_q.weight", ...)]

Names of the hub's checkpoints that transformers renames on loading are renamed by its own rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import TensorInfo, expert_names
from .architecture import DBRX_EXPERTS, EACH, EXPERTS, PARAMETER, PART, Architecture
from .names import SIDES, row_order
from .stated import BARE, KEYED, WHOLE_LATENT, Keyed
from .view import INTERLEAVED, TRANSPOSED

_WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("embed_out.", "lm_head."),
)
_PREFIXES = ("model.", "transformer.", "gpt_neox.")
"""What some checkpoints leave out before the names of a causal language model."""
_MIXTRAL_MODULE = ".block_sparse_moe."
"""The module of Mixtral's checkpoints that its class in transformers calls `mlp`."""
_FUSED = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}
_OTHER_MODALITY = re.compile(r"(.*\.)?(vision_tower|visual|vision_model|multi_modal_projector|audio_tower|embed_vision)\..+")
"""Tensors of an image or sound encoder beside the text model."""
_HEADS = re.compile(r"(?:\w+\.)?(?:pooler|cls|classifier|lm_head|head|decoder)\..+")
"""Tensors of an encoder's own tasks, which its file leaves out."""
_COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|embeddings\.position_ids)")
"""Buffers that older checkpoints have."""
_LAYER = "layer."
"""Before the name of an experts module that is a layer's own."""
_DBRX = {word.partition(".")[2]: projection for projection, word in DBRX_EXPERTS.items()}

Rows = Callable[[int], NDArray[np.int64]]
"""How many rows a matrix has -> which of them, in order."""


@dataclass(frozen=True)
class Piece:
    """What one tensor of the folder gives a tensor of the file.

    rows        which rows of each matrix; None for all
    transposed  each matrix is stored as (inputs, outputs)
    part        what makes several tensors of this one, and which of them it is
    experts     rows of so many experts follow one another
    whole_stack  it has a matrix for each expert
    """

    key: str
    rows: Rows | None = None
    transposed: bool = False
    part: tuple[Callable[[NDArray[Any]], list[NDArray[Any]]], int] | None = None
    experts: int = 0
    whole_stack: bool = False


@dataclass(frozen=True)
class Place:
    """Where a tensor of the folder goes.

    name    of the tensor in the file
    stem    of that tensor
    path    module path that the table has for it
    number  among the tensors that are joined or stacked there; -1 for a whole stack
    stack   the others are stacked, not joined by rows
    """

    name: str
    stem: str
    path: str
    piece: Piece
    number: int = 0
    stack: bool = False


def halves(which: str) -> Rows:
    """The "even", "odd", "first" or "second" rows."""
    start, step = {"even": (0, 2), "odd": (1, 2), "first": (0, 1), "second": (1, 1)}[which]
    if step == 2:
        return lambda n: np.arange(start, n, 2)
    return lambda n: np.arange(start * (n // 2), n // 2 if not start else n)


def _chunk(number: int, count: int) -> Rows:
    return lambda n: np.split(np.arange(n), count)[number]


def _within(outer: Rows, inner: Rows | None) -> Rows:
    """Rows `inner` of rows `outer`."""
    return outer if inner is None else lambda n: outer(n)[inner(len(outer(n)))]


class FolderNames:
    """The names of one model.

    settings  transformers' configuration of the text model
    where     the folder, for messages
    keyed     (key of the file -> layer -> key of the folder) of parameters that a file has as
              key-values, filled by `places`
    """

    def __init__(
        self, architecture: Architecture, arch: str, settings: Any, heads: int, head_dim: int, where: object = ""
    ) -> None:
        self.architecture, self.arch, self.settings, self._where = architecture, arch, settings, where
        self.heads, self.head_dim = heads, head_dim
        self.keyed: dict[Keyed, dict[int, str]] = defaultdict(dict)
        self._stems: dict[str, list[str]] = defaultdict(list)
        self._parts: dict[str, dict[int, str]] = defaultdict(dict)
        self._with_experts = any(
            getattr(settings, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        )
        for stem, path in architecture.names.items():
            whole, part, number = path.partition(PART)
            if part:
                self._parts[whole][int(number)] = stem
                if stem.endswith("_shexp") and not self._with_experts:
                    self._parts[whole][int(number)] = stem.removesuffix("_shexp")
            else:
                self._stems[path].append(stem)
        self._tops = {path: stem for stem, path in architecture.top.items()}

    def left_out(self, key: str) -> str:
        """Why a file has nothing for a key, as a noun of what it belongs to; "" where it has."""
        if _OTHER_MODALITY.fullmatch(key):
            return "its image or sound encoder"
        if _COMPUTED.fullmatch(key):
            return "what is computed"
        if self.architecture.task == "encoder" and self.architecture.model_type != "t5" and _HEADS.fullmatch(key):
            return "the heads of an encoder"
        match = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\..+", key)
        last = getattr(self.settings, "num_hidden_layers", None)
        if key.startswith("mtp.") or (
            match and isinstance(last, int) and int(match[1]) >= last and not self.architecture.repeated
        ):
            return "layers that predict further tokens"
        return ""

    def places(self, key: str, info: TensorInfo) -> list[Place]:
        """Where a key goes; nowhere where the table does not name it, and `keyed` has none of it."""
        for alternative in self._alternatives(key if not info.quantized else f"{key}.weight"):
            found = [place for name, chunk, number in alternative for place in self._named(name, Piece(key, chunk), info, number)]
            if found:
                return found
        return []

    def is_keyed(self, key: str) -> bool:
        """Whether a key is one that the file has as key-values; notes it in `keyed`."""
        for path, keyed in KEYED.get(self.arch, {}).items():
            match = re.fullmatch(rf"(?:model\.)?layers\.(\d+)\.{re.escape(path)}", key)
            if match:
                self.keyed[keyed][int(match[1])] = key
                return True
        return False

    # Names

    def _alternatives(self, name: str) -> Iterator[list[tuple[str, Rows | None, int | None]]]:
        """Lists of (name in transformers' model, rows, number of a part), the likeliest first."""
        for old, new in _WRAPPERS:
            name = new + name[len(old) :] if name.startswith(old) else name
        if not any(path.startswith(_MIXTRAL_MODULE[1:]) for path in self._stems):
            name = name.replace(_MIXTRAL_MODULE, ".mlp.")
        renamed = name
        for rule in self._renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for one in dict.fromkeys((name, renamed)):
            for candidate in self._with_prefixes(one):
                yield [(candidate, None, None)]
        for rule in self._converters:
            target, matched = rule.rename_source_key(renamed)
            if matched is None:
                continue
            targets = rule.target_patterns
            if len(targets) > 1:
                names = [target.replace(targets[0], t, 1) for t in targets]
                for each in zip(*(list(self._with_prefixes(n)) for n in names), strict=True):
                    yield [(n, _chunk(i, len(targets)), None) for i, n in enumerate(each)]
                continue
            numbers = re.findall(r"(\d+)\.weight$", renamed)
            number = rule.source_patterns.index(matched) if len(rule.source_patterns) > 1 else int(numbers[0]) if numbers else 0
            for candidate in self._with_prefixes(target):
                yield [(candidate, None, number)]

    def _with_prefixes(self, name: str) -> Iterator[str]:
        yield name
        for prefix in _PREFIXES:
            yield f"{prefix}{name}"
        if self.architecture.task == "encoder":
            yield name.partition(".")[2]

    @property
    def knows_rules(self) -> bool:
        """Whether transformers' rules for the names of its checkpoints were read; they need torch."""
        return bool(find_spec("torch")) and self._conversions() is not None

    @staticmethod
    def _conversions() -> Callable[[str], Any] | None:
        try:
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        except ImportError:  # without torch, or a version that has its rules elsewhere
            return None
        return get_checkpoint_conversion_mapping  # type: ignore[no-any-return]

    @cached_property
    def _rules(self) -> list[Any]:
        conversions = self._conversions()
        return list(conversions(self.architecture.model_type) or ()) if conversions else []

    @property
    def _renamings(self) -> list[Any]:
        return [rule for rule in self._rules if not getattr(rule, "operations", None)]

    @property
    def _converters(self) -> list[Any]:
        """Rules that divide the rows of a tensor, or join those of several."""
        return [
            rule
            for rule in self._rules
            if [type(o).__name__ for o in getattr(rule, "operations", ())] in (["Chunk"], ["Concatenate"])
        ]

    def _named(self, name: str, piece: Piece, info: TensorInfo, number: int | None) -> Iterator[Place]:
        """The places of a tensor of transformers' model."""
        path, _, leaf = name.rpartition(".")
        if (stem := self._tops.get(path)) is not None and leaf in ("weight", "bias"):
            yield Place(f"{stem}.{leaf}", stem, path, piece, number or 0)
            return
        if (stem := self._tops.get(f"{path}{PARAMETER}{leaf}")) is not None:
            yield Place(stem + self._end(stem, leaf, True), stem, path, piece)
            return
        if (match := re.fullmatch(r"(.+)\.(\d+)", path)) and (stem := self._tops.get(f"{match[1]}.{EACH}")) is not None:
            yield Place(f"{stem}.{leaf}", stem, path, piece, int(match[2]), stack=True)
            return
        for side in ("", *SIDES):
            start = f"{SIDES.get(side, '')}{self.architecture.layers}."
            if not name.startswith(start) or (not side and self.architecture.layers == "block"):
                continue
            layer, _, within = name.removeprefix(start).partition(".")
            if layer.isdigit():
                yield from self._in_layer(side, int(layer), within, piece, info, number)

    def _in_layer(
        self, side: str, layer: int, within: str, piece: Piece, info: TensorInfo, number: int | None
    ) -> Iterator[Place]:
        """The same for a tensor of a layer."""
        path, _, leaf = within.rpartition(".")
        start = f"{side}.blk.{layer}." if side else f"blk.{layer}."

        def place(
            stem: str, piece: Piece, number: int = 0, stack: bool = False, parameter: bool = False, leaf: str = leaf
        ) -> Place:
            short = stem.removeprefix(f"{side}.") if side else stem
            return Place(start + short + self._end(stem, leaf, parameter), stem, path, piece, number, stack)

        if found := expert_names.parse(f"{_LAYER}{within}"):
            alternate = found.expert is None and found.gate_up_alternate(self.architecture.model_type in INTERLEAVED)
            parameter = found.expert is None and not info.quantized and not found.leaf
            transposed = parameter and self.architecture.model_type in TRANSPOSED
            which = -1 if found.expert is None else found.expert
            for stem, rows in self._halves(found.path.removeprefix(_LAYER), found.projection, alternate):
                taken = replace(piece, rows=rows, transposed=transposed, whole_stack=which < 0)
                yield place(stem, taken, which, True, leaf=found.leaf or "weight")
            return
        if leaf in _DBRX and (stem := self._stem(f"{path.removesuffix('.mlp')}{EXPERTS}{_DBRX[leaf]}", side, layer)):
            experts = int(self.settings.ffn_config.moe_num_experts)
            every = replace(piece, experts=experts, transposed=_DBRX[leaf] == "down_proj")
            yield place(stem, every, -1, True, leaf="weight")
            return
        if stem := self._stem(f"{path}{PARAMETER}{leaf}", side, layer):
            yield place(stem, piece, parameter=True)
            return
        if leaf not in ("weight", "bias"):
            return
        for fused, of in self.architecture.splits.items():
            stem = self._stem(path, side, layer)
            if fused in self.architecture.whole and stem in of:
                yield place(fused, replace(piece, rows=self._inverse(stem)), of.index(stem))
                return
        whole = info.quantized and self.arch in WHOLE_LATENT and path in self.architecture.joins
        if path in self._parts and not whole:
            parts, config = self._parts[path], self.layer_settings(layer)
            for i in sorted(parts) if number is None else [number]:
                cut = piece
                if number is None and path in self.architecture.joins:
                    cut = replace(piece, part=(partial(self.architecture.joins[path].write, config), i))
                elif number is None:
                    cut = replace(piece, rows=_within(self._part_rows(path, i, len(parts), config), piece.rows))
                yield place(parts[i], cut)
            return
        if stem := self._stem(path, side, layer):
            yield place(stem, piece)
        for fused, fused_parts in _FUSED.items():
            if fused in self._stems and path in fused_parts:
                yield place(self._stems[fused][-1], piece, fused_parts.index(path))
            elif path in fused_parts and fused in self._parts and (i := fused_parts.index(path)) in self._parts[fused]:
                yield place(self._parts[fused][i], piece)

    def _stem(self, path: str, side: str, layer: int) -> str:
        """The stem of a module path in a layer, "" where the table has none."""
        stems = [s for s in self._stems.get(path, ()) if not side or s.startswith(f"{side}.")]
        if not self._with_experts:
            stems = [s for s in stems if not s.endswith(("_exps", "_shexp"))] or stems
        used = [s for s in stems if not self.architecture.absent(self.settings, layer, s)]
        return (used or stems or [""])[-1]

    def _halves(self, path: str, projection: str, alternate: bool) -> Iterator[tuple[str, Rows | None]]:
        """(stem, rows) of a projection of experts: gate and up where it holds both."""
        if projection != "gate_up_proj":
            yield from ((stem, None) for stem in self._stems.get(f"{path}{EXPERTS}{projection}", ()))
            return
        for half, rows in zip(("gate_proj", "up_proj"), ("even", "odd") if alternate else ("first", "second"), strict=True):
            yield from ((stem, halves(rows)) for stem in self._stems.get(f"{path}{EXPERTS}{half}", ()))

    def _end(self, stem: str, leaf: str, parameter: bool) -> str:
        """What follows a stem in the name of a tensor."""
        if stem in BARE[""] or stem in BARE.get(self.arch, ()):
            return ""
        if not parameter:
            return f".{leaf}"
        return ".bias" if stem in ("exp_probs_b", "ssm_dt") else ".weight"

    # Rows

    def order(self, stem: str, rows: int) -> NDArray[np.int64] | None:
        """Rows of the file in transformers' order, None where both are the same."""
        return row_order(self.architecture, self.settings, stem, rows, self.heads, self.head_dim, self._where)

    def _inverse(self, stem: str) -> Rows:
        def rows(n: int) -> NDArray[np.int64]:
            order = self.order(stem, n)
            return np.arange(n) if order is None else np.argsort(order)

        return rows

    def layer_settings(self, layer: int) -> Any:
        """The configuration of a layer, where layers differ."""
        differing = getattr(self.settings, "per_layer_config", None)
        return differing[layer] if differing else self.settings

    def _part_rows(self, path: str, number: int, count: int, config: Any) -> Rows:
        """Rows of a parameter that are its part of a number, in the file's order."""
        order_of, cuts = self.architecture.orders.get(path), self.architecture.cuts.get(path)

        def rows(n: int) -> NDArray[np.int64]:
            order = None if order_of is None else order_of(config, n)
            index = np.arange(n) if order is None else np.argsort(order)
            ends = [n * i // count for i in range(1, count)] if cuts is None else cuts(config, n)
            return np.split(index, ends)[number]

        return rows
