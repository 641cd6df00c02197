"""`python -m support.fuzz`: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from support.fuzz import fuzz, fuzz_in_processes, lines_of, replay, summary, unpacked_case, write_case


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of targets.py; all when left out")
    parser.add_argument("--crashers", type=Path, help="a folder for the files of faults")
    parser.add_argument("--log", type=Path, help="JSON lines of all workers")
    parser.add_argument("--summary", type=Path, help="print the figures of a log, write its faults' files to --crashers, and end")
    parser.add_argument("--replay", type=Path, help="run the cases of a log's faults again, and end")
    given = parser.parse_args()
    if given.replay:
        found = replay(given.replay)
        print(json.dumps(found, indent=1))
        return any(f["outcome"] == "fault" for f in found)
    if given.summary:
        found = summary(given.summary)
        if given.crashers:
            for i, line in enumerate(v for v in lines_of(given.summary) if "case" in v):
                folder = given.crashers / f"{i:03d}-{line['kind']}-{line['producer'] or 'none'}"
                write_case(folder, unpacked_case(line["case"]))
    elif given.workers > 1 or given.log:
        log = given.log or Path("fuzz.jsonl")
        fuzz_in_processes(given.seconds, given.seed, given.workers, log, tuple(given.kinds))
        found = summary(log)
    else:
        found = fuzz(given.seconds, given.seed, given.crashers, lambda x: print(x) if "fault" in x else None, tuple(given.kinds))
    print(json.dumps(found, indent=1))
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main())
