"""Regular expressions that came with a file, matched in time bounded by pattern times name.

A backtracking matcher can be made to run without end: `(a|a)*b` doubles its work with every letter
of the name. Here the pattern becomes instructions (Thompson 1968), and each instruction has the set
of positions in the name at which it is reached, the bits of one integer. An instruction is executed
for the positions that are new to it, all at once, so no position is executed twice by one
instruction.

    "mlp.*e"  on  "mlp.gate"      {0} -m-> {1} -l-> {2} -p-> {3} -.*-> {3, 4, ..., 8} -e-> {8}

A look-ahead is computed for all positions by one run of its reversed instructions from the end.

The subset that is read, with the meaning Python's `re` gives it:

| | |
|---|---|
| characters | `a`, `.`, `[a-c_]`, `[^a]`, `\\.` and all escaped punctuation, `\\d \\w \\s \\D \\W \\S`, `\\n \\t \\xHH \\uHHHH` |
| anchors | `^ $ \\A \\Z \\b \\B` |
| groups | `(a)`, `(?:a)`, `(?P<name>a)`, `a|b`, `(?i:a)`, and `(?i)` in front of the whole pattern |
| repeats | `* + ? {2} {2,} {,3} {2,3}`, each also lazy (`*?`): laziness does not change whether a name matches |
| assertions | `(?=a) (?!a)`, and `(?<=a) (?<!a)` of a fixed width |

Back-references, conditionals, atomic groups, possessive repeats and other flags are refused by
name. `$` is the end of the name: names have no line ends. Shell patterns (`*`, `?`, `[a-c]`,
`[!a]`) become patterns of the subset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple, NoReturn

from ...errors import CheckpointError, plural

MAX_PATTERN = 1 << 14
"""Longest pattern, in characters."""
MAX_DEPTH = 64
"""Most groups within groups."""
MAX_REPEAT = 1000
"""Largest count of a repeat."""
MAX_INSTRUCTIONS = 1 << 15
"""Most instructions of a pattern; a counted repeat takes those of its group so many times."""
MAX_STEPS = 1 << 17
"""Most executions of an instruction for one name, near 0.1 s. Positions times instructions bound
them; names of up to 256 letters do not come near it.
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
        raise CheckpointError(f"[config] pattern {pattern[:60]!r} has {plural(len(pattern), 'character')}; up to {MAX_PATTERN:,}")
    return Pattern(pattern, _Parser(pattern).parse())


@lru_cache(maxsize=4096)
def compiled_glob(glob: str) -> Pattern:
    """The shell pattern, as `fnmatch` reads it; CheckpointError for a longer one than is read, or a
    range whose ends are exchanged.
    """
    out, at = [], 0
    while at < len(glob):
        c, end = glob[at], glob.find("]", at + 2 + glob.startswith("!", at + 1)) if glob[at] == "[" else -1
        if end > 0:
            inner, negated = glob[at + 1 : end], glob[at + 1] == "!"
            escaped = "".join(f"\\{x}" if x in "\\[]^" else x for x in inner[negated:])
            out.append(f"[{'^' * negated}{escaped}]")
            at = end
        else:
            out.append({"*": r"[\w\W]*", "?": r"[\w\W]"}.get(c) or (c if c.isalnum() or c == "_" else f"\\{c}"))
        at += 1
    try:
        return compiled("".join(out))
    except CheckpointError as error:
        raise CheckpointError(f"[config] shell pattern {glob[:60]!r}: {str(error).removeprefix('[config] ')}") from error


class Pattern:
    """A compiled pattern, with `re`'s `match`, `fullmatch` and `search` for one name. Each raises
    CheckpointError when that takes too many steps.
    """

    def __init__(self, pattern: str, sequence: Sequence) -> None:
        self.pattern = pattern
        self._program = _compile(pattern, sequence, backward=False)
        anchored = sequence[1:] if sequence and sequence[0] == Anchor("start") else sequence
        self._prefix = "".join(node.literal for node in _leading_literals(anchored))

    def match(self, name: str) -> bool:
        """True when the pattern matches from the start of `name`."""
        return name.startswith(self._prefix) and _Walk(self.pattern, name).run(self._program, 1) != 0

    def fullmatch(self, name: str) -> bool:
        """True when the pattern matches the whole of `name`."""
        ends = _Walk(self.pattern, name).run(self._program, 1) if name.startswith(self._prefix) else 0
        return bool(ends >> len(name))

    def search(self, name: str) -> bool:
        """True when the pattern matches from some position of `name`."""
        return self._prefix in name and _Walk(self.pattern, name).run(self._program, (2 << len(name)) - 1) != 0


def _leading_literals(sequence: Sequence) -> Iterator[Characters]:
    for node in sequence:
        if not isinstance(node, Characters) or not node.literal:
            return
        yield node


# ----------------------------------------------------------------------------------------------------------------
# parsing


def is_word(c: str) -> bool:
    """True for what `\\w` matches."""
    return c.isalnum() or c == "_"


CLASSES: dict[str, Test] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": is_word,
    "D": lambda c: not c.isdecimal(),
    "S": lambda c: not c.isspace(),
    "W": lambda c: not is_word(c),
}
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
        raise CheckpointError(
            f"[config] pattern {self.pattern[:60]!r} is not a regular expression: {why} at {self.at}; wanted one of `re`"
        )

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
            raise CheckpointError(
                f"[config] pattern {self.pattern[:60]!r} has groups more than {MAX_DEPTH} deep; read up to that"
            )
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
            fewest, longest = _width(node.sequence)
            low = fewest * node.least
            high = 0 if longest == 0 or node.most == 0 else None if longest is None or node.most is None else longest * node.most
        else:
            low, high = 0, 0
        least += low
        if high is None:
            return least, None
        most += high
    return least, most


# -----------------------------------------------------------------------------------------------------------
# instructions


@dataclass
class Instruction:
    """One step. kind:

    "char"   a character that passes `node`, then the next instruction
    "run"    any number of them, then the next instruction
    "anchor" the condition `node` holds at the position
    "look"   the assertion `node` holds there; `program` is its sequence
    "split"  each of `targets`
    "match"  the end
    """

    kind: str
    node: Node | None = None
    targets: list[int] = field(default_factory=list)
    program: Program | None = None


@dataclass
class Program:
    """Instructions, executed from the first on. backward: from the end of the name to its start."""

    code: list[Instruction]
    backward: bool


def _compile(pattern: str, sequence: Sequence, backward: bool) -> Program:
    code: list[Instruction] = []

    def add(kind: str, node: Node | None = None, program: Program | None = None) -> Instruction:
        if len(code) >= MAX_INSTRUCTIONS:
            raise CheckpointError(
                f"[config] pattern {pattern[:60]!r} needs more than {MAX_INSTRUCTIONS:,} instructions; patterns without counted "
                "repeats within repeats are read"
            )
        code.append(Instruction(kind, node, [], program))
        return code[-1]

    def split(*targets: int) -> Instruction:
        made = add("split")
        made.targets.extend(targets)
        return made

    def emit_all(nodes: Sequence) -> None:
        for node in reversed(nodes) if backward else nodes:
            emit(node)

    def emit(node: Node) -> None:
        if isinstance(node, Characters):
            add("char", node)
        elif isinstance(node, Anchor):
            add("anchor", node)
        elif isinstance(node, Look):
            add("look", node, _compile(pattern, node.sequence, backward=node.behind is None))
        elif isinstance(node, Branch):
            emit_branch(node)
        else:
            emit_repeat(node)

    def emit_branch(node: Branch) -> None:
        sequences = _factored(node.sequences, backward)
        if len(sequences) == 1:
            return emit_all(sequences[0])
        fork, ends = split(), []
        for sequence in sequences:
            fork.targets.append(len(code))
            emit_all(sequence)
            ends.append(split())
        for end in ends:
            end.targets.append(len(code))
        return None

    def emit_repeat(node: Repeat) -> None:
        for _ in range(node.least):
            emit_all(node.sequence)
        if node.most is None:
            if len(node.sequence) == 1 and isinstance(node.sequence[0], Characters):
                add("run", node.sequence[0])
                return
            start = len(code)
            fork = split(start + 1)
            emit_all(node.sequence)
            split(start)
            fork.targets.append(len(code))
            return
        forks = []
        for _ in range(node.most - node.least):
            forks.append(split(len(code) + 1))
            emit_all(node.sequence)
        for fork in forks:
            fork.targets.append(len(code))

    emit_all(sequence)
    add("match")
    return Program(code, backward)


def _factored(sequences: tuple[Sequence, ...], backward: bool) -> tuple[Sequence, ...]:
    """Alternatives of which no two begin with the same letter: what follows it becomes a group."""
    at = -1 if backward else 0
    groups: dict[object, list[Sequence]] = {}
    for sequence in dict.fromkeys(sequences):
        first = sequence[at] if sequence else None
        letter = first.literal if isinstance(first, Characters) else ""
        groups.setdefault(letter or sequence, []).append(sequence)
    out: list[Sequence] = []
    for same in groups.values():
        if len(same) == 1:
            out.append(same[0])
        else:
            rest = Branch(tuple(s[:-1] if backward else s[1:] for s in same))
            out.append((rest, same[0][-1]) if backward else (same[0][0], rest))
    return tuple(out)


# ---------------------------------------------------------------------------------------------------------------
# matching


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
        self._passing: dict[Test, int] = {}
        self._looks: dict[int, int] = {}

    def run(self, program: Program, starts: int) -> int:
        """The positions that the end of a program is reached at from `starts`."""
        code = program.code
        reached, pending, waiting = [0] * len(code), [0] * len(code), [0]
        reached[0] = pending[0] = starts
        last = len(code) - 1
        while waiting:
            at = heappop(waiting)  # in the order of the pattern, so that positions come together
            new, pending[at] = pending[at], 0
            if at == last:  # comes after all others: nothing waits any more
                return new
            self._count(1)
            step = code[at]
            targets: list[int] | tuple[int] = (at + 1,)
            if step.kind == "char":
                new = self._advance(new, self._where(step.node), program.backward)
            elif step.kind == "split":
                targets = step.targets
            elif step.kind == "run":
                new = self._span(new, self._where(step.node), program.backward)
            else:
                new &= self._holding(step)
            if new:
                for target in targets:
                    fresh = new & ~reached[target]
                    if fresh:
                        reached[target] |= fresh
                        if not pending[target]:
                            heappush(waiting, target)
                        pending[target] |= fresh
        return 0

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise CheckpointError(
                f"[config] pattern {self.pattern[:60]!r} takes more than {MAX_STEPS:,} steps for a name of {self.size:,} "
                "letters; patterns without long groups repeated within repeats are read"
            )

    def _where(self, node: Node | None) -> int:
        """The positions whose character passes."""
        assert isinstance(node, Characters)
        if node.literal:
            return self.positions.get(node.literal, 0)
        if node.test not in self._passing:
            self._count(len(self.positions) // 16)
            self._passing[node.test] = sum(positions for c, positions in self.positions.items() if node.test(c))
        return self._passing[node.test]

    @staticmethod
    def _advance(starts: int, where: int, backward: bool) -> int:
        return (starts >> 1) & where if backward else (starts & where) << 1

    @staticmethod
    def _span(starts: int, run: int, backward: bool) -> int:
        """The positions reached by any number of characters of `run`."""
        if not backward:
            # Adding a start to a run of ones carries to the end of the run: all of it is reached at
            # once.
            return starts | (((starts & run) + run) ^ run)
        step = 1
        while run:
            starts |= (starts >> step) & run
            run &= run >> step
            step *= 2
        return starts

    def _holding(self, step: Instruction) -> int:
        """The positions where an anchor or an assertion holds."""
        everywhere = (2 << self.size) - 1
        if isinstance(step.node, Anchor):
            return self._anchored(step.node.kind) & everywhere
        assert isinstance(step.node, Look)
        assert step.program is not None
        if id(step) not in self._looks:
            self._looks[id(step)] = self.run(step.program, everywhere)
        found = self._looks[id(step)]
        return found if step.node.wanted else everywhere & ~found

    def _anchored(self, kind: str) -> int:
        """The positions where an anchor holds."""
        if kind == "start":
            return 1
        if kind == "end":
            return 1 << self.size
        word = sum(p for c, p in self.positions.items() if is_word(c))
        edges = word ^ word << 1
        return edges if kind == "edge" else ~edges & ((2 << self.size) - 1)
