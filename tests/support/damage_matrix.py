"""The whole damage matrix on several cores: `pytest -m slow tests/checkpoints/test_mutations.py`
with a line of JSON for each change as it is known.

    python -m support.damage_matrix --workers 14 --log matrix.jsonl [--rows gpt-oss quark-int4]

Each line: architecture, producer, the change, how many commands gave right values, refused or gave
wrong ones, and the faults. `--summary FILE` prints the table of benchmarks/trust.md of a log.
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
from functools import cache
from pathlib import Path

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


def tasks(rows: list[str]) -> list[Task]:
    """The changes of the rows named, all for none, in random order: a stopped run is a sample."""
    out: list[Task] = []
    for arch, producer in damage_cases.ROWS:
        if rows and producer not in rows and f"{arch}-{producer}" not in rows:
            continue
        whole = _whole(os.getpid(), arch, producer)
        out += [(arch, producer, m) for m in mutations(whole) if not damage_cases.exempt(producer, m)]
    random.Random(0).shuffle(out)
    return out


def summary(log: Path) -> str:
    """The table of a log."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for line in map(json.loads, log.read_text("utf-8").splitlines()):
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
    parser.add_argument("--summary", type=Path)
    given = parser.parse_args()
    if given.summary:
        print(summary(given.summary))
        return
    todo = tasks(given.rows)
    with open(given.log, "a", encoding="utf-8") as out, multiprocessing.get_context("fork").Pool(given.workers) as pool:
        for row in pool.imap_unordered(answer, todo):
            out.write(json.dumps(row) + "\n")
            out.flush()
    print(f"{len(todo)} changes\n{summary(given.log)}")


if __name__ == "__main__":
    main()
