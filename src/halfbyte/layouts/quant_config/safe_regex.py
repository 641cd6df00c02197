"""Regular expressions that came with a file, matched in bounded time.

Python's `re` tries one way after another, and a hostile pattern makes it try without end: `(a|a)*b` doubles with every letter of
the name. So the ways are bounded beforehand, from the parsed pattern: alternatives multiply, and every repeat multiplies by the
length of the name. Where they are few, as in every pattern a producer writes, `re` is asked. Where they may be many, all are
followed at once (Thompson 1968): the places a match can have reached are the bits of one integer, each piece of the pattern
moves them, and a place reached twice is still one bit.

    "mlp.*e"  on  "mlp.gate"      {0} -m-> {1} -l-> {2} -p-> {3} -.*-> {3, 4, ..., 8} -e-> {8}

Back-references, conditionals, atomic groups and possessive repeats depend on which way was taken and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any

from ...errors import CheckpointError

try:  # the parser that `re` itself uses
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as sre
    import sre_parse as parser

MAX_PATTERN = 4096
"""Longest pattern, in characters."""
MAX_DEPTH = 64
"""Most groups within groups."""
FEW_WAYS = 1 << 14
"""Ways that `re` may have to try: near 0.1 ms."""
MAX_STEPS = 1 << 14
"""Most pieces of a pattern that are gone through for one name, near 20 ms; only long groups repeated within repeats need more."""

Node = tuple[Any, Any]
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
ONE_CHARACTER = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
STARTS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
ENDS = (sre.AT_END, sre.AT_END_STRING)


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> Pattern:
    """The pattern, parsed; CheckpointError when it is none, or of a kind that is not read."""
    shown = f"[config] pattern {pattern[:60]!r}"
    if len(pattern) > MAX_PATTERN:
        raise CheckpointError(f"{shown} has {len(pattern):,} characters; read up to {MAX_PATTERN:,}")
    try:
        regex, tree = re.compile(pattern), parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{shown} is not a regular expression: {error}") from error
    _check(tree, shown)
    return Pattern(pattern, regex, tree)


class Pattern:
    """A compiled pattern: `match(name)` is whether it matches from the start of `name`."""

    def __init__(self, pattern: str, regex: re.Pattern[str], tree: Iterable[Node]) -> None:
        self.pattern = pattern
        self._regex = regex
        self._nodes = tuple(tree)

    @cached_property
    def _ways(self) -> tuple[int, int]:
        # A repeat at the very end never has to give anything back.
        rest = self._nodes[:-1] if self._nodes and _is_any_number(*self._nodes[-1]) else self._nodes
        return _ways(rest)

    def match(self, name: str) -> bool:
        """True when the pattern matches from the start of `name`; CheckpointError when that takes too many steps."""
        alternatives, repeats = self._ways
        if not name or alternatives * max(len(name), 2) ** min(repeats, 16) <= FEW_WAYS:
            return self._regex.match(name) is not None
        return _Walk(self, name).ends(self._nodes, 1, bool(self._regex.flags & re.IGNORECASE)) != 0


class _Walk:
    """One match of one name. Sets of positions are integers: bit p is the place before character p."""

    def __init__(self, pattern: Pattern, name: str) -> None:
        self.pattern = pattern
        self.size = len(name)
        self.steps = 0
        self.places: dict[str, int] = {}
        for at, c in enumerate(name):
            self.places[c] = self.places.get(c, 0) | 1 << at

    def ends(self, nodes: Iterable[Node], starts: int, fold: bool) -> int:
        """Where a match of `nodes` in a row can end that begins at one of `starts`. `fold`: letters match in either case."""
        for op, value in nodes:
            if not starts:
                break
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise CheckpointError(
                    f"[config] pattern {self.pattern.pattern[:60]!r} could take for ever to match; "
                    "patterns without long groups repeated within repeats are read"
                )
            starts = self._step(op, value, starts, fold)
        return starts

    def _step(self, op: Any, value: Any, starts: int, fold: bool) -> int:
        if op in ONE_CHARACTER:
            return (starts & self._where(op, value, fold)) << 1
        if op in REPEATS:
            least, most, nodes = value
            return self._repeat(least, most, nodes, starts, fold)
        if op is sre.BRANCH:
            out = 0
            for nodes in value[1]:
                out |= self.ends(nodes, starts, fold)
            return out
        if op is sre.SUBPATTERN:
            _, added, removed, nodes = value
            return self.ends(nodes, starts, (fold or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE)
        if op is sre.AT:
            return starts & self._anchored(value)
        direction, nodes = value  # ASSERT, ASSERT_NOT
        wanted = op is sre.ASSERT
        return sum(bit for bit in _bits(starts) if self._looks(direction, nodes, bit, fold) is wanted)

    def _where(self, op: Any, value: Any, fold: bool) -> int:
        """The positions whose character a one-character piece takes."""
        if op is sre.LITERAL and not fold:
            return self.places.get(chr(value), 0)
        return sum(places for c, places in self.places.items() if _takes(op, value, c, fold))

    def _repeat(self, least: int, most: Any, nodes: Any, starts: int, fold: bool) -> int:
        for _ in range(least):
            after = self.ends(nodes, starts, fold)
            if after == starts:  # so would every further one be
                break
            starts = after
        if most is sre.MAXREPEAT and _is_one_character(nodes):
            # Adding a start to a run of ones carries to the end of the run: all of it is reached at once.
            op, value = nodes[0]
            run = self._where(op, value, fold)
            return starts | (((starts & run) + run) ^ run)
        reached = new = starts
        # A place reached by fewer repeats has more of them left, so only new places go on.
        for _ in range(min(int(most), self.size + 1 + least) - least):
            new = self.ends(nodes, new, fold) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _anchored(self, value: Any) -> int:
        """The positions where an anchor holds."""
        if value in STARTS:
            return 1
        if value in ENDS:
            return 1 << self.size
        word = sum(p for c, p in self.places.items() if _word(c))
        edges = word ^ word << 1
        return edges if value is sre.AT_BOUNDARY else ~edges & ((2 << self.size) - 1)

    def _looks(self, direction: int, nodes: Any, start: int, fold: bool) -> bool:
        """Whether `nodes` match right after the position `start`, or right before it."""
        if direction > 0:
            return self.ends(nodes, start, fold) != 0
        back = start >> nodes.getwidth()[0]
        return back != 0 and bool(self.ends(nodes, back, fold) & start)


def _bits(positions: int) -> Iterable[int]:
    while positions:
        low = positions & -positions
        yield low
        positions ^= low


def _word(c: str) -> bool:
    return c.isalnum() or c == "_"


CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal, sre.CATEGORY_SPACE: str.isspace, sre.CATEGORY_WORD: _word,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(), sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_NOT_WORD: lambda c: not _word(c),
}  # fmt: skip


def _takes(op: Any, value: Any, c: str, fold: bool) -> bool:
    """Whether a one-character piece takes the character `c`."""
    forms = {c, c.lower(), c.upper()} if fold else {c}
    if op is sre.ANY:
        return c != "\n"
    if op is not sre.IN:
        same = any(len(f) == 1 and ord(f) == value for f in forms) or (fold and chr(value).lower() == c.lower())
        return same is (op is sre.LITERAL)
    negated = value[0][0] is sre.NEGATE
    return negated is not any(_item(kind, item, f) for kind, item in value[negated:] for f in forms if len(f) == 1)


def _item(kind: Any, item: Any, c: str) -> bool:
    """Whether one entry of a [set] holds `c`."""
    if kind is sre.LITERAL:
        return ord(c) == int(item)
    if kind is sre.RANGE:
        return int(item[0]) <= ord(c) <= int(item[1])
    return CATEGORIES[item](c)


def _is_one_character(nodes: Any) -> bool:
    return len(nodes) == 1 and nodes[0][0] in ONE_CHARACTER


def _is_any_number(op: Any, value: Any) -> bool:
    """Whether a piece is one character any number of times, none included."""
    return op in REPEATS and value[0] == 0 and value[1] is sre.MAXREPEAT and _is_one_character(value[2])


def _check(nodes: Iterable[Node], shown: str, depth: int = 0) -> None:
    """CheckpointError for what a set of positions cannot follow."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{shown} has groups more than {MAX_DEPTH} deep")
    for op, value in nodes:
        if op in REPEATS:
            _check(value[2], shown, depth + 1)
        elif op is sre.BRANCH:
            for branch in value[1]:
                _check(branch, shown, depth + 1)
        elif op is sre.SUBPATTERN:
            _check(value[3], shown, depth + 1)
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            _check(value[1], shown, depth + 1)
        elif op not in (*ONE_CHARACTER, sre.AT):
            raise CheckpointError(f"{shown} has {str(op).lower().replace('_', ' ')}; patterns without it are read")


def _ways(nodes: Iterable[Node]) -> tuple[int, int]:
    """(alternatives, repeats): `re` tries at most alternatives · length^repeats ways."""
    alternatives, repeats = 1, 0
    for op, value in nodes:
        a, r = 1, 0
        if op in REPEATS:
            _, most, inner = value
            a, r = _ways(inner)
            if _is_one_character(inner) and most != 1:
                r = 1
            elif most == 1:
                a += 1
            else:
                a, r = 1, 16  # every repeat has a choice of its own
        elif op is sre.BRANCH:
            inside = [_ways(branch) for branch in value[1]]
            a, r = sum(i[0] for i in inside), max(i[1] for i in inside)
        elif op is sre.SUBPATTERN:
            a, r = _ways(value[3])
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            a, r = _ways(value[1])
        alternatives, repeats = min(alternatives * a, 1 << 62), repeats + r
    return alternatives, repeats
