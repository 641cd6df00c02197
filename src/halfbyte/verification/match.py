"""Match tensors of two checkpoints that hold the same weights.

    qkv_proj                         | q_proj + k_proj + v_proj
    experts.gate_up_proj [e, 2f, k]  | experts.0.gate_proj + experts.0.up_proj + ...

Every tensor is split into *atoms*, named matrices that no checkpoint splits further (a row range of
one expert). Tensors that share atoms form one match, and their rows are put into one common order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..checkpoints import TensorInfo, expert_names
from ..errors import CheckpointError
from ..layouts import LAYOUTS
from .names import PLUS_ONE_GGUF, ROTARY_GGUF, TRANSPOSED_EXPERTS, Dialect, Rules, canonical_names, module_of

_QKV = re.compile(r"(.*self_attn\.)qkv_proj(\.bias)?")
_GATE_UP = re.compile(r"(.*?mlp\.(?:shared_expert\.|experts\.\d+\.)?)gate_up_proj(\.bias)?")
_STACK = re.compile(r"(.*\.experts\.)(gate_up_proj|gate_proj|up_proj|down_proj)(\.bias)?")


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor, as `row_view.Source` reads them.

    vector  a bias: each value is a row of one column, so that it is joined and split like its
            weight
    """

    key: str
    expert: int | None = None
    rows: str = "all"
    heads: int = 0
    transposed: bool = False
    add_one: bool = False
    vector: bool = False


Atom = tuple[tuple[str, ...], Piece]
"""Names of the atoms that a piece holds, in row order: several where the boundary between them is
not known to its side.
"""


@dataclass(frozen=True)
class Match:
    """Pieces of both sides that hold the same weights, in one order of rows; a side is empty when
    it has no counterpart.

    aligned  False when the pieces could not be brought into one order; the note says why
    """

    left: tuple[Piece, ...]
    right: tuple[Piece, ...]
    note: str = ""
    aligned: bool = True

    @property
    def left_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.key for p in self.left))

    @property
    def right_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.key for p in self.right))


@dataclass(frozen=True)
class Side:
    """One checkpoint as input of the matching: header facts of each tensor, and its naming
    convention.
    """

    infos: Mapping[str, TensorInfo]
    dialect: Dialect
    names: Mapping[str, str]

    @classmethod
    def of(cls, infos: Sequence[TensorInfo], dialect: Dialect, rules: Rules | None = None, other: Dialect | None = None) -> Side:
        """The side of a checkpoint; `rules` rename keys to those of the `other` checkpoint.

        Raises CheckpointError when rules give two tensors one name.
        """
        by_key = {i.key: i for i in infos}
        renamed = {k: rules.rename(k) for k in by_key} if rules else {}
        changed = {k: new for k, new in renamed.items() if new != module_of(k)}
        names = canonical_names([k for k in by_key if k not in changed], dialect)
        foreign = canonical_names(list(dict.fromkeys(changed.values())), other or dialect)
        names |= {k: foreign[new] for k, new in changed.items()}
        owners: dict[str, str] = {}
        for key, name in names.items():
            if owners.setdefault(name, key) != key:
                raise CheckpointError(f"[map] {owners[name]} and {key} both become {name}; each tensor needs a name of its own")
        return cls(by_key, dialect, names)


def pair(left: Side, right: Side) -> list[Match]:
    """Every tensor of both sides in exactly one match, in the order of the left, then what only the
    right has.
    """
    # Row orders differ only between checkpoints of different naming conventions.
    left, right = _fill(left, right), _fill(right, left)
    foreign = left.dialect.gguf != right.dialect.gguf
    matches: list[Match] = []
    by_name = {name: key for key, name in right.names.items()}
    rest_left = []
    used = set()
    for key, name in left.names.items():
        other = by_name.get(name)
        if other is None:
            rest_left.append(key)
            continue
        used.add(other)
        a, b = _whole(left, key, foreign), _whole(right, other, foreign)
        matches.append(Match((a,), (b,)) if a.rows == b.rows == "all" else Match((_as_rows(left, a),), (_as_rows(right, b),)))
    rest_right = [k for k in right.infos if k not in used]
    matches += _components(left, rest_left, right, rest_right, foreign)
    order = {k: i for i, k in enumerate(left.infos)}
    matches.sort(key=lambda m: min((order[p.key] for p in m.left), default=len(order)))
    return _tied(matches, left, right)


def _fill(side: Side, other: Side) -> Side:
    """Give a GGUF-named side without a GGUF header (a dequantized one) the architecture and heads
    of the other.
    """
    d, o = side.dialect, other.dialect
    if d.gguf and not d.architecture:
        filled = replace(d, architecture=o.architecture, heads=o.heads, kv_heads=o.kv_heads)
        return replace(side, dialect=filled)
    return side


def _whole(side: Side, key: str, foreign: bool) -> Piece:
    """The whole tensor, with the row order, transposition or offset of its writer."""
    d, name, info = side.dialect, side.names[key], side.infos[key]
    if foreign and d.gguf and d.architecture in ROTARY_GGUF:
        heads = {"q_proj": d.heads, "k_proj": d.kv_heads}.get(name.removesuffix(".bias").rpartition(".")[2], 0)
        if heads:
            return Piece(key, rows="rotary", heads=heads)
    if foreign and not d.gguf and d.architecture.removesuffix("_text") in PLUS_ONE_GGUF and re.search(r"norm$", name):
        return Piece(key, add_one=True)
    if info.kind == "dense" and len(info.shape) == 3 and _STACK.fullmatch(name) and not key.endswith(("weight", ".w13", ".w2")):
        return Piece(key, transposed=d.architecture in TRANSPOSED_EXPERTS)
    return Piece(key)


def _as_rows(side: Side, piece: Piece) -> Piece:
    return replace(piece, vector=len(side.infos[piece.key].shape) == 1)


def _atoms(side: Side, key: str, foreign: bool) -> list[Atom]:
    """The atoms of one tensor."""
    name, shape = side.names[key], side.infos[key].shape
    stack = _STACK.fullmatch(name)
    bias = bool(name.endswith(".bias"))
    if stack and len(shape) == (2 if bias else 3):
        prefix, projection, tail = stack[1], stack[2], stack[3] or ""
        base = replace(_whole(side, key, foreign), vector=bias)
        layout = LAYOUTS.get(side.infos[key].layout)
        interleaved = layout is not None and layout.alternating
        interleaved |= side.dialect.architecture == "gpt_oss" and not side.dialect.gguf
        found = expert_names.parse(key)
        if found is not None:
            interleaved = found.gate_up_alternate(interleaved)
        halves = ("even", "odd") if interleaved else ("first", "second")
        out: list[Atom] = []
        for e in range(shape[0]):
            if projection == "gate_up_proj":
                for part, rows in zip(("gate_proj", "up_proj"), halves, strict=True):
                    out.append(((f"{prefix}{e}.{part}{tail}",), replace(base, expert=e, rows=rows)))
            else:
                out.append(((f"{prefix}{e}.{projection}{tail}",), replace(base, expert=e)))
        return out
    base = replace(_whole(side, key, foreign), vector=len(shape) == 1 and bias)
    fused = _QKV.fullmatch(name)
    if fused:
        return [(tuple(f"{fused[1]}{p}_proj{fused[2] or ''}" for p in "qkv"), base)]
    fused = _GATE_UP.fullmatch(name)
    if fused:
        return [
            ((f"{fused[1]}{part}{fused[2] or ''}",), replace(base, rows=rows))
            for part, rows in (("gate_proj", "first"), ("up_proj", "second"))
        ]
    return [((name,), base)]


def _components(left: Side, left_keys: list[str], right: Side, right_keys: list[str], foreign: bool) -> list[Match]:
    """Matches among tensors whose names differ: joined through the atoms that they share."""
    pieces: dict[tuple[int, str], list[Atom]] = {}
    members: dict[str, list[tuple[int, str]]] = {}
    for number, (side, keys) in enumerate(((left, left_keys), (right, right_keys))):
        for key in keys:
            pieces[number, key] = _atoms(side, key, foreign)
            for names, _ in pieces[number, key]:
                for name in names:
                    members.setdefault(name, []).append((number, key))
    position = {node: i for i, node in enumerate(pieces)}
    seen: set[tuple[int, str]] = set()
    out = []
    for node in pieces:
        group, todo = [], [node]
        while todo:
            current = todo.pop()
            if current not in seen:
                seen.add(current)
                group.append(current)
                todo += [n for names, _ in pieces[current] for name in names for n in members[name]]
        if group:
            sides = [[p for n in sorted(group, key=position.__getitem__) if n[0] == side for p in pieces[n]] for side in (0, 1)]
            out.append(_align(sides[0], sides[1]))
    return out


def _align(left: list[Atom], right: list[Atom]) -> Match:
    """Both sides' pieces in one order of rows; unaligned, with a note, when they do not cover the
    same atoms.
    """
    if not left or not right:
        return Match(tuple(p for _, p in left), tuple(p for _, p in right))
    have = [{name for names, _ in side for name in names} for side in (left, right)]
    missing = sorted(have[0] ^ have[1])
    runs = [names for names, _ in (*left, *right) if len(names) > 1]
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        return Match(_pieces(left), _pieces(right), f"one side lacks {named}", aligned=False)
    # The longest runs determine the order; single atoms follow.
    longest_first = [*sorted(runs, key=len, reverse=True), *(names for names, _ in left)]
    order = [name for names in longest_first for name in names]
    position: dict[str, int] = {}
    for name in order:
        position.setdefault(name, len(position))
    sides = [sorted(side, key=lambda item: position[item[0][0]]) for side in (left, right)]
    if [n for names, _ in sides[0] for n in names] != [n for names, _ in sides[1] for n in names]:
        return Match(_pieces(left), _pieces(right), "the two sides join these weights differently", aligned=False)
    return Match(_pieces(sides[0]), _pieces(sides[1]))


def _pieces(items: list[Atom]) -> tuple[Piece, ...]:
    return tuple(p for _, p in items)


def _tied(matches: list[Match], left: Side, right: Side) -> list[Match]:
    """A head that only one side stores, against the embedding of the other when that one ties them."""
    out = []
    for m in matches:
        for side, other, pieces, mine in ((left, right, m.left, not m.right), (right, left, m.right, not m.left)):
            if mine and len(pieces) == 1 and side.names[pieces[0].key] == "lm_head" and other.dialect.tied:
                embedding = next((k for k, n in other.names.items() if n == "embed_tokens"), None)
                if embedding is not None:
                    both = (pieces, (Piece(embedding),))
                    m = Match(*(both if side is left else both[::-1]), note="the other checkpoint ties its head to the embedding")
        out.append(m)
    return out
