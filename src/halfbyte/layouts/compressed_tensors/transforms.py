"""compressed-tensors' `transform_config`: matrices that layers are multiplied by.

    {"config_groups": {GROUP: {"type", "head_dim", "randomize",
                               "apply": [{"targets", "ignore", "location", "inverse"}]}}}

| location | meaning |
|---|---|
| `weight_input`, `weight_output` | the stored weight has been multiplied already |
| `input`, `output` | y = ((x · V) · Wᵀ) · U when the model runs; V and U are stored |
| `q_attn`, `k_cache` | queries and keys; one orthogonal matrix on both cancels in attention |

| type | matrix |
|---|---|
| `hadamard`, `random-hadamard` | ±1, divided by the square root of its size; `inverse` is its transpose |
| `random-matrix` | as it is; with `inverse` the inverse is what is stored |

With `head_dim` a square of that size is repeated along the diagonal; with `randomize` a Hadamard
matrix has its rows and columns in the order of tensor `perm`. Source: the transforms of
compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ..quant_config.module_rules import check_rule, rule_matches
from ..quant_config.reader import Transform
from ..quant_config.writer import EMBEDDINGS

HADAMARD, MATRIX = ("hadamard", "random-hadamard"), ("random-matrix",)
OFFLINE = ("weight_input", "weight_output")
ATTENTION = ("q_attn", "k_cache")


@dataclass(frozen=True)
class Entry:
    """One transform of modules, and which modules these are: names, `re:` patterns or classes."""

    transform: Transform
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """True for a linear layer that the transform applies to."""
        return _any(self.targets, module) and not _any(self.ignore, module)


def _any(rules: tuple[str, ...], module: str) -> bool:
    # A file does not say what class a module had: what is no embedding by its name is a Linear.
    linear = module.rpartition(".")[2] not in EMBEDDINGS
    return any((rule == "Linear" and linear) or rule_matches(rule, module) for rule in rules)


def transforms_of(groups: Any, where: str) -> tuple[Entry, ...]:
    """The transforms that are applied when the model runs. CheckpointError for a group of another
    shape; UnsupportedError for a kind or a location that is not read.
    """
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"[config] {where}: transform_config.config_groups is {groups!r:.80}; wanted an object")
    out = []
    for name, group in groups.items():
        what = f"transform_config.config_groups {name!r}"
        uses = group.get("apply", []) if isinstance(group, Mapping) else None
        if not isinstance(group, Mapping) or not isinstance(uses, list) or not all(isinstance(u, Mapping) for u in uses):
            raise CheckpointError(f"[config] {where}: {what} is {group!r:.80}; wanted an object with a list `apply` of objects")
        kind, size = group.get("type"), group.get("head_dim")
        if kind not in (*HADAMARD, *MATRIX):
            raise UnsupportedError(f"[config] {where}: {what} is of type {kind!r}; read: {', '.join((*HADAMARD, *MATRIX))}")
        if size is not None and (type(size) is not int or size < 1):
            raise CheckpointError(f"[config] {where}: {what} has head_dim {size!r:.40}; wanted a whole number of at least 1")
        _check_attention(kind, uses, f"{where}: {what}")
        for use in uses:
            location, inverse = use.get("location"), use.get("inverse", False)
            if location in (*OFFLINE, *ATTENTION):
                continue
            if location not in ("input", "output"):
                known = ", ".join(("input", "output", *OFFLINE, *ATTENTION))
                raise UnsupportedError(f"[config] {where}: {what} applies at {location!r}; read: {known}")
            hadamard = kind in HADAMARD
            transform = Transform(
                str(name),
                location,
                hadamard and bool(inverse),
                hadamard,
                size,
                bool(group.get("randomize")) and hadamard,
                bool(inverse) and not hadamard,
            )
            out.append(Entry(transform, _names(use, "targets", where), _names(use, "ignore", where)))
    return tuple(out)


def _names(use: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = use.get(key) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"[config] {where}: {key} of a transform is {value!r:.80}; wanted a list of names")
    return tuple(check_rule(v, where) for v in value)


def _check_attention(kind: str, uses: list[Any], where: str) -> None:
    """UnsupportedError where queries and keys are not multiplied by one orthogonal matrix."""
    sides = [(u.get("location"), bool(u.get("inverse")), u.get("targets"), u.get("ignore")) for u in uses]
    at = [side for side in sides if side[0] in ATTENTION]
    if not at:
        return
    pairs = {location: rest for location, *rest in at}
    if kind not in HADAMARD or set(pairs) != set(ATTENTION) or len(at) != 2 or pairs["q_attn"] != pairs["k_cache"]:
        raise UnsupportedError(
            f"[config] {where} multiplies queries or keys by matrices that do not cancel; read: one Hadamard matrix on both "
            "q_attn and k_cache of the same modules"
        )
