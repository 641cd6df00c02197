"""`python -m support.guided_fuzz [KIND ...] [-libFuzzer options]`: the readers under libFuzzer's
engine (atheris), which keeps an input that reaches a new branch of the library.

An input names a seed of `targets.py` by its first two bytes; each further four bytes are the number
from which a mutation of `mutators.py` is drawn, one after the other. So every input is a whole
case, and the engine's own mutations change, add and leave out mutations of a checkpoint. Oracle as
for `make fuzz`; the first fault ends the run with the input and the case's files in
build/crashers.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["halfbyte"]):
    from halfbyte.checkpoints.meta_model import required_by_transformers
    from support.fuzz import ADDRESS_SPACE, MEGABYTES, SECONDS, prepare, write_case
    from support.fuzz.mutators import MODEL_TYPES, Folder, mutate, written
    from support.fuzz.targets import Seed, run_one

CRASHERS = Path("build/crashers")
KINDS = ("checkpoint", "config", "gguf", "journal", "vocabulary", "template")


def case_of(data: bytes, cases: list[Seed]) -> tuple[Seed, Folder]:
    """The seed that an input names, and its files after the input's mutations."""
    seed = cases[int.from_bytes(data[:2], "little") % len(cases)]
    files = seed.files
    for at in range(2, len(data) - 3, 4):
        files = mutate(files, random.Random(int.from_bytes(data[at : at + 4], "little")))
    return seed, files


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("-") or Path(a).is_dir()]
    kinds = tuple(a for a in sys.argv[1:] if a not in options) or KINDS
    work = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    with atheris.instrument_imports(include=["halfbyte"]):
        prepared = prepare(work, kinds)  # runs the seeds, which imports the rest
        for model_type in MODEL_TYPES:
            required_by_transformers({"model_type": model_type}, [])
    prepared.coverage.close()
    cases = prepared.seeds
    CRASHERS.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))

    def one(data: bytes) -> None:
        seed, files = case_of(data, cases)
        contents = {name: written(content) for name, content in files.items()}
        if any(content is None for content in contents.values()):
            return
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        result = run_one(seed, contents, work / "case", prepared.home)
        took, grown = time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        if result.outcome == "fault" or took > SECONDS or grown > MEGABYTES:
            write_case(CRASHERS / f"{seed.kind}-{data.hex()}", contents)
            raise AssertionError(f"{seed.kind} {seed.producer}: {result.detail} ({took:.1f} s, {grown} MB)")

    atheris.Setup([sys.argv[0], "-max_len=34", "-timeout=60", "-rss_limit_mb=0", f"-artifact_prefix={CRASHERS}/", *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
