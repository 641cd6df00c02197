"""A table of outcomes in tests/data: a line for each subject of each of its labels, with the number
of cases and a checksum of what comes of them.

    python -m support.MODULE              # in tests/: write data/MODULE.txt anew
    python -m support.MODULE LABEL ...    # print each case of a label and its outcome

Where a line differs, print the cases of that label before and after, and see that each new outcome
is right.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

Case = tuple[str, str, str] | tuple[str, str, bool, str]
"""(subject, what it is or what is changed, outcome), or with whether it was read before the
outcome.
"""


@dataclass(frozen=True)
class OutcomeTable:
    """name      of the file and of the module that makes it
    labels    what has cases
    outcomes  label -> its cases
    unit      what the lines call cases; of cases that are read or refused they count these
    """

    name: str
    labels: Collection[str]
    outcomes: Callable[[str], Iterable[Case]]
    unit: str = "cases"

    @property
    def path(self) -> Path:
        """The file."""
        return Path(__file__).parents[1] / "data" / f"{self.name}.txt"

    def recorded(self) -> list[str]:
        """The lines of the file."""
        return self.path.read_text(encoding="utf-8").splitlines()

    def lines(self, label: str, cases: Iterable[Case]) -> list[str]:
        """A line for each subject of a label."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        crc: dict[str, int] = {}
        for subject, case, *read, outcome in cases:
            counts[subject][self.unit if not read else "read" if read[0] else "refused"] += 1
            crc[subject] = zlib.crc32(f"{case} -> {outcome}\n".encode(), crc.get(subject, 0))
        out = []
        for subject, number in counts.items():
            words = (self.unit,) if self.unit in number else ("read", "refused")
            out.append(f"{label} | {subject} | {', '.join(f'{number[w]} {w}' for w in words)} | {crc[subject]:08x}")
        return out

    def assert_as_recorded(self, label: str) -> None:
        """Each case of a label has the outcome that it had."""
        expected = [line for line in self.recorded() if line.split(" | ")[0] == label]
        cases = list(self.outcomes(label))
        found = self.lines(label, cases)
        other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
        now = [_text(case) for case in cases if case[0] in other]
        assert found == expected, "\n".join([f"[{label}] is now (before: run support.{self.name} there):", *now])

    def main(self) -> None:
        """Print the cases of the labels given, or write the file."""
        for label in sys.argv[1:]:
            for case in self.outcomes(label):
                print(_text(case))
        if not sys.argv[1:]:
            lines = [line for label in self.labels for line in self.lines(label, self.outcomes(label))]
            self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(case: Case) -> str:
    return f"{case[0]} | {case[1]} -> {case[-1]}"
