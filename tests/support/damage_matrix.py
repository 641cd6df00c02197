"""The whole damage matrix on several cores: `pytest -m slow tests/checkpoints/test_mutations.py`
with a line of JSON for each change as it is known.

    python -m support.damage_matrix --workers 14 --log matrix.jsonl [--rows gpt-oss quark-int4]

Each line: architecture, producer, the change, how many commands gave right values, refused or gave
wrong ones, and the faults. Changes that the log has are not run again, so that a run that was
stopped goes on. `--summary FILE ...` prints the table of benchmarks/trust.md of the logs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from support import damage_cases
from support.mutations import Mutation, mutations, outcome, write

Task = tuple[str, str, Mutation]


@cache
def _whole(process: int, arch: str, producer: str) -> Path:
    """The row's checkpoint, once a process: workers inherit what their parent has cached."""
    folder = Path(tempfile.mkdtemp(prefix=f"damage-{process}-"))
    return damage_cases.checkpoint(folder, arch, producer)


def answer(task: Task) -> dict[str, object]:
    """What one change came to."""
    arch, producer, mutation = task
    whole, began = _whole(os.getpid(), arch, producer), time.perf_counter()
    row: dict[str, object] = {"arch": arch, "producer": producer, "change": str(mutation)}
    try:
        write(whole, mutation, whole.parent / "damaged")
        result = outcome(whole.parent / "damaged", whole, whole.parent / "work", True)
    except Exception as error:  # an exception of another kind is a fault of the library
        return row | {"right": 0, "refused": 0, "wrong": 0, "faults": [f"{mutation}: {type(error).__name__}: {error}"[:400]]}
    counts = {"right": len(result.right), "refused": len(result.refused), "wrong": len(result.wrong)}
    return row | counts | {"faults": result.faults(mutation), "seconds": round(time.perf_counter() - began, 2)}


def lines(logs: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The lines of the logs, the last one of each change; a line that was cut off is none."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for log in logs:
        for text in log.read_text("utf-8").splitlines() if log.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            found[line["arch"], line["producer"], line["change"]] = line
    yield from found.values()


def tasks(rows: list[str], done: set[tuple[str, str, str]]) -> list[Task]:
    """The changes of the rows named, all for none, without those that are done. Row by row, so that
    a process makes what it compares with once; a row in random order: if stopped, a sample.
    """
    out: list[Task] = []
    for arch, producer in damage_cases.ROWS:
        if rows and producer not in rows and f"{arch}-{producer}" not in rows:
            continue
        row = [m for m in mutations(_whole(os.getpid(), arch, producer)) if not damage_cases.exempt(producer, m)]
        random.Random(0).shuffle(row)
        out += [(arch, producer, m) for m in row if (arch, producer, str(m)) not in done]
    return out


def summary(logs: Iterable[Path]) -> str:
    """The table of the logs."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for line in lines(logs):
        counts = rows.setdefault((line["arch"], line["producer"]), Counter())
        counts.update({"changes": 1, "faults": len(line["faults"])} | {k: line[k] for k in ("right", "refused", "wrong")})
    words = ("changes", "right", "refused", "wrong", "faults")
    total: Counter[str] = sum(rows.values(), Counter())
    out = ["| checkpoint | changes | answers right | refused | wrong | faults |", "|---|---:|---:|---:|---:|---:|"]
    out += [f"| {', '.join(key)} | {' | '.join(str(c[w]) for w in words)} |" for key, c in sorted(rows.items())]
    return "\n".join([*out, f"| **all** | {' | '.join(str(total[w]) for w in words)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--log", type=Path)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--summary", nargs="*", type=Path, default=[])
    given = parser.parse_args()
    if given.summary:
        print(summary(given.summary))
        return
    done = {(line["arch"], line["producer"], line["change"]) for line in lines([given.log])}
    todo = tasks(given.rows, done)
    with open(given.log, "a", encoding="utf-8") as out, multiprocessing.get_context("fork").Pool(given.workers) as pool:
        for row in pool.imap_unordered(answer, todo):
            out.write(json.dumps(row) + "\n")
            out.flush()
    print(f"{len(todo)} changes\n{summary([given.log])}")


if __name__ == "__main__":
    main()
