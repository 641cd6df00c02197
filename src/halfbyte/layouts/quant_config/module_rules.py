"""Which entry of a quantization config a module's name falls under.

Names are compared a path segment at a time, never letter by letter: `mlp.gate` is not
`mlp.gate_proj`, `layers.1` is not `layers.10`.

| rule | spelled | used by |
|---|---|---|
| path | `lm_head`, `mlp.gate`, `model.layers.*.self_attn` | AWQ, gpt-oss, bitsandbytes, HQQ: whole segments anywhere in a name |
| glob | `*lm_head*`, `model.layers.0.*` | ModelOpt: the whole name, shell wildcards |
| `re:` | `re:.*mlp.gate$` | compressed-tensors: a regular expression matched from the name's start; torchao: the whole name |
| `+:` `-:` | `+:.*\\.18\\..*gate.*` | GPTQModel `dynamic`: the first that matches decides; `-:` leaves the module dense |

A name is looked up unchanged, then under the prefixes that exporters add or drop, then as the parts
it was fused from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

from ...errors import CheckpointError
from .safe_regex import compiled, compiled_glob

T = TypeVar("T")
Matcher = Callable[[str, str], bool]
"""(rule, module name) -> whether the rule covers the module."""

PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "transformer.",
    "backbone.",
    "model.text_model.",
    "text_model.",
)
"""What exporters put before or take from module paths, longest match first."""
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
}
"""Last segment of a fused module -> the modules it was made of."""


def aliases(name: str) -> Iterator[str]:
    """`name`, then the names the same module may have in a config: prefixes dropped, added or
    exchanged.

    >>> list(aliases("model.layers.0.mlp"))[:2]
    ['model.layers.0.mlp', 'layers.0.mlp']
    """
    yield name
    stem = name
    for prefix in PREFIXES:
        if name.startswith(prefix):
            stem = name[len(prefix) :]
            yield stem
            break
    for prefix in PREFIXES:
        if prefix + stem != name:
            yield prefix + stem


def fused_from(name: str) -> tuple[str, ...]:
    """Names of the modules that `name` was fused from; () when it is not a fused module.

    A stack of experts (`mlp.switch_mlp.gate_proj`, `mlp.experts.gate_proj`) was made of
    `mlp.experts.0.gate_proj` and its siblings.
    """
    path, _, last = name.rpartition(".")
    parts = tuple(f"{path}.{p}" if path else p for p in FUSED.get(last, ()))
    if parts:
        return parts
    for stack in (".switch_mlp", ".experts"):
        if path.endswith(stack):
            return (f"{path.removesuffix(stack)}.experts.0.{last}",)
    return ()


def lookup(table: Mapping[str, T], name: str) -> T | None:
    """The entry of `table` under the name of module `name`; None without one. Aliases and fused
    modules as for `first_entry`.
    """
    return _agreed(name, lambda module: next((table[a] for a in aliases(module) if a in table), None))


def first_entry(table: Mapping[str, T], name: str, matches: Matcher) -> T | None:
    """The entry of the first rule of `table` that matches `name`; None without one.

    The rules are tried in turn on the name, then on each alias. Where none matches a fused module,
    the entry is the one that all modules it was fused from have. Raises CheckpointError when those
    differ.
    """

    def own(module: str) -> T | None:
        return next((entry for alias in aliases(module) for rule, entry in table.items() if matches(rule, alias)), None)

    return _agreed(name, own) if table else None


def covered(rules: Iterable[str], name: str, plain: Matcher | None = None) -> bool:
    """True when one of `rules`, `re:` patterns or `plain` entries (`path_matches`), covers `name`,
    or covers each module it was fused from.
    """
    found, match = _sorted_rules(tuple(rules)), plain or path_matches

    def own(module: str) -> bool | None:
        return any(found.cover(alias, match) for alias in aliases(module)) or None

    return bool(_agreed(name, own))


class _Rules(NamedTuple):
    """Rules sorted by how they are looked up: entries without wildcards by their segments, a hash
    away, since exporters list hundreds of modules; the others one after another.
    """

    paths: frozenset[tuple[str, ...]]
    lengths: tuple[int, ...]
    others: tuple[str, ...]

    def cover(self, name: str, plain: Matcher) -> bool:
        segments = tuple(name.split("."))
        spans = ((i, i + n) for n in self.lengths for i in range(len(segments) - n + 1))
        return any(segments[i:j] in self.paths for i, j in spans) or any(rule_matches(r, name, plain) for r in self.others)


@lru_cache(maxsize=64)
def _sorted_rules(rules: tuple[str, ...]) -> _Rules:
    literal = [r for r in rules if not r.startswith("re:") and not any(c in r for c in "*?[")]
    paths = frozenset(tuple(r.strip(".").split(".")) for r in literal)
    kept = set(literal)
    return _Rules(paths, tuple(sorted({len(p) for p in paths})), tuple(r for r in rules if r not in kept))


def _agreed(name: str, own: Callable[[str], T | None]) -> T | None:
    """own(name), or what own() is for all modules that `name` was fused from."""
    entry = own(name)
    if entry is not None:
        return entry
    parts = fused_from(name)
    found = [own(p) for p in parts]
    if any(f != found[0] for f in found):
        entries = ", ".join(f"{p.rpartition('.')[2]}: {f}" for p, f in zip(parts, found, strict=True))
        raise CheckpointError(
            f"[config] {name} is fused from modules with different entries ({entries}); its own cannot be known"
        )
    return next(iter(found), None)


def path_matches(entry: str, name: str) -> bool:
    """True when `entry` is a run of whole segments of `name`, `*` standing for anything within one
    segment.

    >>> path_matches("mlp.gate", "model.layers.0.mlp.gate"), path_matches("mlp.gate", "model.layers.0.mlp.gate_proj")
    (True, False)
    """
    wanted, segments = entry.strip(".").split("."), name.split(".")
    spans = range(len(segments) - len(wanted) + 1)
    return any(all(map(_segment_matches, wanted, segments[i:])) for i in spans)


def _segment_matches(wanted: str, segment: str) -> bool:
    return wanted == segment or (any(c in wanted for c in "*?[") and compiled_glob(wanted).fullmatch(segment))


def glob_matches(pattern: str, name: str) -> bool:
    """True when the shell pattern covers `name` or a module above it. Without a wildcard it is
    compared by whole segments.
    """
    if not any(c in pattern for c in "*?["):
        return path_matches(pattern, name)
    modules = accumulate(name.split("."), "{}.{}".format)
    return any(map(compiled_glob(pattern).fullmatch, modules))


def regex_matches(pattern: str, name: str) -> bool:
    """True when the regular expression matches from the start of `name`. Raises CheckpointError for
    one that is not read, here and below.
    """
    return compiled(pattern).match(name)


def regex_found(pattern: str, name: str) -> bool:
    """True when the regular expression matches a part of `name`."""
    return compiled(pattern).search(name)


def check_rule(rule: str, where: str) -> str:
    """`rule`, after its pattern has been compiled; CheckpointError naming `where` when it cannot
    be.
    """
    pattern = re.sub(r"^(?:re:|[+-]:)", "", rule)
    try:
        if pattern != rule:
            compiled(pattern)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("[config] ", f"[config] {where}: ", 1)) from error
    return rule


def rule_matches(rule: str, name: str, plain: Matcher = path_matches) -> bool:
    """True when a rule, `re:` and a regular expression or a `plain` entry, covers `name`."""
    if rule.startswith("re:"):
        return regex_matches(rule[3:], name)
    return plain(rule, name)
