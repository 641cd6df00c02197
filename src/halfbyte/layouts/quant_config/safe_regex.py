"""Regular expressions that came with a file, matched in bounded time.

A backtracking matcher can be made to run without end: `(a|a)*b` doubles its work with every letter
of the name. Here all alternatives are followed at once (Thompson 1968): the positions a match can
have reached are the bits of one integer, each piece of the pattern maps them to the next ones, and
a position reached twice is still one bit.

    "mlp.*e"  on  "mlp.gate"      {0} -m-> {1} -l-> {2} -p-> {3} -.*-> {3, 4, ..., 8} -e-> {8}

The subset that is read, with the meaning Python's `re` gives it:

| | |
|---|---|
| characters | `a`, `.`, `[a-c_]`, `[^a]`, `\\.` and all escaped punctuation, `\\d \\w \\s \\D \\W \\S`, `\\n \\t \\xHH \\uHHHH` |
| anchors | `^ $ \\A \\Z \\b \\B` |
| groups | `(a)`, `(?:a)`, `(?P<name>a)`, `a|b`, `(?i:a)`, and `(?i)` in front of the whole pattern |
| repeats | `* + ? {2} {2,} {,3} {2,3}`, each also lazy (`*?`): laziness does not change whether a name matches |
| assertions | `(?=a) (?!a)`, and `(?<=a) (?<!a)` of a fixed width |

Back-references, conditionals, atomic groups, possessive repeats and other flags are refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, NoReturn

from ...errors import CheckpointError

MAX_PATTERN = 4096
"""Longest pattern, in characters."""
MAX_DEPTH = 64
"""Most groups within groups."""
MAX_REPEAT = 1000
"""Largest count of a repeat."""
MAX_STEPS = 1 << 14
"""Most pieces of a pattern that are gone through for one name, near 20 ms; only long groups
repeated within repeats need more.
"""

Test = Callable[[str], bool]


class Characters(NamedTuple):
    """One character that passes a test; `literal` is the character where there is only one."""

    test: Test
    literal: str = ""


class Repeat(NamedTuple):
    """A sequence `least` to `most` times in a row; None: without end."""

    least: int
    most: int | None
    sequence: Sequence


class Branch(NamedTuple):
    """One of several sequences; a group is a branch of one."""

    sequences: tuple[Sequence, ...]


class Anchor(NamedTuple):
    """A condition on the position: "start", "end", "edge" of a word, or "inside" (no edge)."""

    kind: str


class Look(NamedTuple):
    """A sequence that must (`wanted`), or must not, match after the position, or before it
    (`behind`: its width).
    """

    sequence: Sequence
    wanted: bool
    behind: int | None


Node = Characters | Repeat | Branch | Anchor | Look
Sequence = tuple[Node, ...]


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> Pattern:
    """The pattern, parsed; CheckpointError when it is none, or outside the subset that is read."""
    if len(pattern) > MAX_PATTERN:
        raise CheckpointError(f"[config] pattern {pattern[:60]!r} has {len(pattern):,} characters; read up to {MAX_PATTERN:,}")
    return Pattern(pattern, _Parser(pattern).parse())


class Pattern:
    """A compiled pattern: `match(name)` is whether it matches from the start of `name`."""

    def __init__(self, pattern: str, sequence: Sequence) -> None:
        self.pattern = pattern
        self.sequence = sequence
        anchored = sequence[1:] if sequence and sequence[0] == Anchor("start") else sequence
        self._prefix = "".join(node.literal for node in _leading_literals(anchored))

    def match(self, name: str) -> bool:
        """True when the pattern matches from the start of `name`; CheckpointError when that takes
        too many steps.
        """
        return name.startswith(self._prefix) and _Walk(self.pattern, name).ends(self.sequence, 1) != 0


def _leading_literals(sequence: Sequence) -> Iterator[Characters]:
    for node in sequence:
        if not isinstance(node, Characters) or not node.literal:
            return
        yield node


# ---------------------------------------------------------------------------------------------------------------- parsing


def is_word(c: str) -> bool:
    """True for what `\\w` matches."""
    return c.isalnum() or c == "_"


CLASSES: dict[str, Test] = {
    "d": str.isdecimal, "s": str.isspace, "w": is_word,
    "D": lambda c: not c.isdecimal(), "S": lambda c: not c.isspace(), "W": lambda c: not is_word(c),
}  # fmt: skip
ANCHORS = {"A": "start", "Z": "end", "b": "edge", "B": "inside"}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Parser:
    """Recursive descent over one pattern. `fold`: letters match in either case."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def parse(self) -> Sequence:
        fold = self._take("(?i)")
        branch = self._alternatives(fold, 0)
        if self.at < len(self.pattern):
            self._malformed("unbalanced parenthesis")
        return branch.sequences[0] if len(branch.sequences) == 1 else (branch,)

    def _malformed(self, why: str) -> NoReturn:
        raise CheckpointError(f"[config] pattern {self.pattern[:60]!r} is not a regular expression: {why} at {self.at}")

    def _unread(self, what: str) -> NoReturn:
        raise CheckpointError(f"[config] pattern {self.pattern[:60]!r} has {what}; patterns without one are read")

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _next(self) -> str:
        c = self._peek()
        if not c:
            self._malformed("it ends early")
        self.at += 1
        return c

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _alternatives(self, fold: bool, depth: int) -> Branch:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"[config] pattern {self.pattern[:60]!r} has groups more than {MAX_DEPTH} deep")
        sequences = [self._sequence(fold, depth)]
        while self._take("|"):
            sequences.append(self._sequence(fold, depth))
        return Branch(tuple(sequences))

    def _sequence(self, fold: bool, depth: int) -> Sequence:
        nodes: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            node = self._atom(fold, depth)
            counts = self._counts()
            if counts is not None:
                if isinstance(node, Anchor):
                    self._malformed("nothing to repeat")
                if self._take("+"):
                    self._unread("a possessive repeat")
                self._take("?")
                node = Repeat(*counts, (node,) if not isinstance(node, Branch) or len(node.sequences) > 1 else node.sequences[0])
                if self._counts() is not None:
                    self._malformed("multiple repeat")
            nodes.append(node)
        return tuple(nodes)

    def _counts(self) -> tuple[int, int | None] | None:
        """The counts of a repeat that begins here; None, and nothing taken, when there is none."""
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._peek() in simple:
            return simple[self._next()]
        end = self.pattern.find("}", self.at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        if not (low or comma) or not all(n == "" or (n.isascii() and n.isdecimal()) for n in (low, high)):
            return None  # a brace that stands for itself
        self.at = end + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            self._malformed("min repeat greater than max repeat")
        if max(least, most or 0) > MAX_REPEAT:
            raise CheckpointError(f"[config] pattern {self.pattern[:60]!r} repeats more than {MAX_REPEAT} times; fewer are read")
        return least, most

    def _atom(self, fold: bool, depth: int) -> Node:
        c = self._next()
        if c == "(":
            return self._group(fold, depth)
        if c == "[":
            return self._set(fold)
        if c == "\\":
            return self._escape(fold)
        if c == ".":
            return Characters(lambda x: x != "\n")
        if c in "^$":
            return Anchor("start" if c == "^" else "end")
        if c in "*+?":
            self._malformed("nothing to repeat")
        return _literal(c, fold)

    def _group(self, fold: bool, depth: int) -> Node:
        looks = {"?=": (True, False), "?!": (False, False), "?<=": (True, True), "?<!": (False, True)}
        mark = next((m for m in looks if self._take(m)), None)
        if mark is None:
            fold = self._group_flags(fold)
        inner = self._alternatives(fold, depth + 1)
        if not self._take(")"):
            self._malformed("missing ), unterminated subpattern")
        if mark is None:
            return inner
        wanted, behind = looks[mark]
        least, most = _width((inner,))
        if behind and least != most:
            self._malformed("look-behind requires fixed-width pattern")
        return Look((inner,), wanted, least if behind else None)

    def _group_flags(self, fold: bool) -> bool:
        """What a group's `?...` makes of the letters' case; refuses the kinds of groups that are
        not read.
        """
        if not self._take("?") or self._take(":"):
            return fold
        if self._take("P<"):
            end = self.pattern.find(">", self.at)
            if not self.pattern[self.at : max(end, self.at)].isidentifier():
                self._malformed("bad name of a group")
            self.at = end + 1
            return fold
        if self._take("i:"):
            return True
        if self._take("-i:"):
            return False
        kinds = {"P=": "a back-reference", "(": "a conditional", ">": "an atomic group", "#": "a comment"}
        return self._unread(next((what for mark, what in kinds.items() if self._take(mark)), "a group with other flags"))

    def _escape(self, fold: bool) -> Node:
        c = self._next()
        if c in ANCHORS:
            return Anchor(ANCHORS[c])
        if c in CLASSES:
            return Characters(CLASSES[c])
        if c in "123456789":
            self._unread("a back-reference")
        return _literal(self._escaped(c), fold)

    def _escaped(self, c: str) -> str:
        """The character that a backslash and `c` stand for."""
        if c in CONTROLS:
            return CONTROLS[c]
        if c in HEX_DIGITS:
            digits = self.pattern[self.at : self.at + HEX_DIGITS[c]]
            try:
                value = chr(int(digits, 16)) if len(digits) == HEX_DIGITS[c] else ""
            except (ValueError, OverflowError):
                value = ""
            if not value:
                self._malformed(f"incomplete escape \\{c}")
            self.at += HEX_DIGITS[c]
            return value
        if c == "0":
            return "\0"
        if c.isascii() and c.isalnum():
            self._malformed(f"bad escape \\{c}")
        return c

    def _set(self, fold: bool) -> Characters:
        """A [set], its opening bracket already taken."""
        negated = self._take("^")
        tests: list[Test] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low, test = self._set_item()
            # A hyphen is a range unless the set ends with it.
            if test is None and self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high, other = self._set_item()
                if other is not None or high < low:
                    self._malformed("bad character range")
                test = _range_test(low, high)
            tests.append(test or _equals(low))
        self.at += 1
        either = _folded(tests) if fold else (lambda c: any(t(c) for t in tests))
        return Characters((lambda c: not either(c)) if negated else either)

    def _set_item(self) -> tuple[str, Test | None]:
        """(character, None), or ("", the test of a class like `\\d`)."""
        c = self._next()
        if c != "\\":
            return c, None
        c = self._next()
        if c in CLASSES:
            return "", CLASSES[c]
        return ("\b" if c == "b" else self._escaped(c)), None


def _literal(c: str, fold: bool) -> Characters:
    return Characters(_folded([_equals(c)]) if fold else _equals(c), "" if fold else c)


def _equals(wanted: str) -> Test:
    return lambda c: c == wanted


def _range_test(low: str, high: str) -> Test:
    return lambda c: low <= c <= high


def _folded(tests: list[Test]) -> Test:
    """Letters in either case: a character passes when one of its forms does."""
    return lambda c: any(t(form) for form in {c, c.lower(), c.upper()} if len(form) == 1 for t in tests)


def _width(sequence: Sequence) -> tuple[int, int | None]:
    """(fewest, most) characters that a sequence takes."""
    least, most = 0, 0
    for node in sequence:
        low: int
        high: int | None
        if isinstance(node, Characters):
            low, high = 1, 1
        elif isinstance(node, Branch):
            widths = [_width(s) for s in node.sequences]
            low = min(w[0] for w in widths)
            high = None if any(w[1] is None for w in widths) else max(w[1] or 0 for w in widths)
        elif isinstance(node, Repeat):
            inner = _width(node.sequence)
            low = inner[0] * node.least
            high = 0 if inner[1] == 0 else None if inner[1] is None or node.most is None else inner[1] * node.most
        else:
            low, high = 0, 0
        least += low
        if high is None:
            return least, None
        most += high
    return least, most


# --------------------------------------------------------------------------------------------------------------- matching


class _Walk:
    """One match of one name. Sets of positions are integers: bit p is the position before character
    p.
    """

    def __init__(self, pattern: str, name: str) -> None:
        self.pattern = pattern
        self.size = len(name)
        self.steps = 0
        self.positions: dict[str, int] = {}
        for at, c in enumerate(name):
            self.positions[c] = self.positions.get(c, 0) | 1 << at

    def ends(self, sequence: Sequence, starts: int) -> int:
        """Where matches of a sequence can end that begin at one of `starts`."""
        for node in sequence:
            if not starts:
                break
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise CheckpointError(
                    f"[config] pattern {self.pattern[:60]!r} could take for ever to match; "
                    "patterns without long groups repeated within repeats are read"
                )
            starts = self._step(node, starts)
        return starts

    def _step(self, node: Node, starts: int) -> int:
        if isinstance(node, Characters):
            return (starts & self._where(node)) << 1
        if isinstance(node, Repeat):
            return self._repeat(node, starts)
        if isinstance(node, Branch):
            out = 0
            for sequence in node.sequences:
                out |= self.ends(sequence, starts)
            return out
        if isinstance(node, Anchor):
            return starts & self._anchored(node.kind)
        return sum(bit for bit in _bits(starts) if self._looks(node, bit) is node.wanted)

    def _where(self, node: Characters) -> int:
        """The positions whose character passes."""
        if node.literal:
            return self.positions.get(node.literal, 0)
        return sum(positions for c, positions in self.positions.items() if node.test(c))

    def _repeat(self, node: Repeat, starts: int) -> int:
        for _ in range(node.least):
            after = self.ends(node.sequence, starts)
            if after == starts:  # so would every further one be
                break
            starts = after
        if node.most is None and len(node.sequence) == 1 and isinstance(node.sequence[0], Characters):
            # Adding a start to a run of ones carries to the end of the run: all of it is reached at
            # once.
            run = self._where(node.sequence[0])
            return starts | (((starts & run) + run) ^ run)
        reached = new = starts
        # A position reached by fewer repeats has more of them left, so only new positions go on.
        most = self.size + 1 if node.most is None else min(node.most - node.least, self.size + 1)
        for _ in range(most):
            new = self.ends(node.sequence, new) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _anchored(self, kind: str) -> int:
        """The positions where an anchor holds."""
        if kind == "start":
            return 1
        if kind == "end":
            return 1 << self.size
        word = sum(p for c, p in self.positions.items() if is_word(c))
        edges = word ^ word << 1
        return edges if kind == "edge" else ~edges & ((2 << self.size) - 1)

    def _looks(self, node: Look, start: int) -> bool:
        """Whether the sequence matches right after the position `start`, or right before it."""
        if node.behind is None:
            return self.ends(node.sequence, start) != 0
        back = start >> node.behind
        return back != 0 and bool(self.ends(node.sequence, back) & start)


def _bits(positions: int) -> Iterator[int]:
    while positions:
        low = positions & -positions
        yield low
        positions ^= low
