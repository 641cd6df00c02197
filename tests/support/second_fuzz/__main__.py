"""`python -m support.second_fuzz --seconds S --seed N`: disturbed commands until the time is up.

A case depends on its seed only: `--seed N --cases 1` runs the case that a log names again.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from . import cases, readers, sandbox


def run(
    seconds: float, seed: int, most: int, log: Path | None = None, kinds: tuple[cases.Case, ...] = (*cases.CASES, readers.reading)
) -> int:
    """Run cases from `seed` on; the number of those that broke a promise. Problems are JSON lines."""
    sandbox.import_library()
    work = Path(tempfile.mkdtemp(prefix="second-fuzz-"))
    work.chmod(0o755)  # some cases run as another user
    out = open(log, "a") if log else sys.stdout  # noqa: SIM115  until the end
    writers = cases.writers()
    for i, writer in enumerate(writers):
        writer.prepare(work / f"writer{i}")
    begin, counts, failures, done = time.monotonic(), collections.Counter[str](), 0, 0
    while done < most and time.monotonic() - begin < seconds:
        rng = np.random.default_rng(seed + done)
        case, writer = kinds[int(rng.integers(len(kinds)))], writers[int(rng.integers(len(writers)))]
        folder = work / "case"
        folder.mkdir()
        what, problems = case(rng, writer, folder)
        if problems:
            failures += 1
            command = " ".join((*writer.arguments, writer.out))
            record = {"seed": seed + done, "case": f"{case.__name__}: {command}: {what}", "problems": problems}
            print(json.dumps(record), file=out, flush=True)
        shutil.rmtree(folder)
        counts[case.__name__] += 1
        done += 1
    read = counts["reading"] * readers.BATCH
    summary = {
        "cases": done,
        "checkpoints read": read,
        "seconds": round(time.monotonic() - begin),
        "failures": failures,
        **counts,
    }
    print(json.dumps(summary), file=out, flush=True)
    shutil.rmtree(work)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="most cases")
    parser.add_argument("--log", type=Path, help="where problems and the summary are appended")
    chosen = parser.parse_args()
    return bool(run(chosen.seconds, chosen.seed, chosen.cases, chosen.log))


if __name__ == "__main__":
    sys.exit(main())
