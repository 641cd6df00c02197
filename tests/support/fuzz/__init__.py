"""Fuzzes the readers: structure-aware mutants of small checkpoints of every producer, guided by
coverage.

    python -m support.fuzz --seconds 60 [--seed 0] [--workers 2] [--crashers FOLDER] [--log FILE]      (make fuzz)
    python -m support.fuzz --summary FILE                                       the figures of a log
    python -m support.fuzz --replay FILE                        runs the cases of a log's faults again

`targets.py` has the kinds of input and their oracles, `mutators.py` the mutations, `decoders.py`
the independent decoders. A mutant that reaches a line of the source where none was before joins the
corpus (from Python 3.12, by sys.monitoring; before, one that is refused at a new line). Oracle for
each mutant: only errors of the library; under 5 s of CPU time; under 300 MB above the base; where
it is accepted, the independent decoder's values.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from halfbyte.checkpoints.meta_model import required_by_transformers
from support.fuzz.mutators import MODEL_TYPES, Folder, encoded, mutate, written
from support.fuzz.targets import ROOT, Result, Seed, run_one, seeds

SECONDS, MEGABYTES = 5.0, 300
HUNG = 60.0
"""Seconds after which a worker that has not ended a case is killed."""
ADDRESS_SPACE = 6 << 30
"""Bytes of a worker's address space: a request beyond it is a MemoryError, a fault."""
SLOW_KINDS = {"resume": 0.1, "tokenizer": 0.2, "template": 0.3, "config": 0.3, "checkpoint": 0.5}
"""How often a seed of a slow kind is drawn, beside 1 for the others."""
SLOT = 4 << 20
"""Bytes that a worker shares with its parent: when its case began, and the case."""


class Coverage:
    """Lines of the library that ran, from Python 3.12 on; each line costs one event."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.grown = False
        self.on = sys.version_info >= (3, 12)
        if self.on:
            tool = sys.monitoring
            tool.use_tool_id(tool.COVERAGE_ID, "fuzz")
            tool.register_callback(tool.COVERAGE_ID, tool.events.LINE, self._line)
            tool.set_events(tool.COVERAGE_ID, tool.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(str(ROOT)):
            self.lines.add((code.co_filename[len(str(ROOT)) + 1 :], line))
            self.grown = True
        return sys.monitoring.DISABLE

    def close(self) -> None:
        if self.on:
            sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
            sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)


def packed_case(files: Folder) -> str:
    """A case as text for the log."""
    raw = json.dumps({n: base64.b64encode(encoded(c)).decode() for n, c in files.items()}).encode()
    return base64.b64encode(zlib.compress(raw)).decode()


def unpacked_case(text: str) -> dict[str, bytes]:
    """The files of a case in a log."""
    return {n: base64.b64decode(c) for n, c in json.loads(zlib.decompress(base64.b64decode(text))).items()}


@dataclass(frozen=True)
class Prepared:
    """Seeds that ran without a fault.

    home      what the kinds "journal" and "resume" read
    coverage  the lines that the seeds reach
    """

    home: Path
    seeds: list[Seed]
    coverage: Coverage


def prepare(folder: Path, kinds: tuple[str, ...] = ()) -> Prepared:
    """Write the seeds of these kinds below `folder`, run each; AssertionError for one that fails.

    What the targets import is loaded afterwards, so that a process forked from here begins with its
    first mutant.
    """
    home = folder / "home"
    initial = seeds(home, kinds)
    for seed in initial:
        result = run_one(seed, seed.files, folder / "work", home)
        if result.outcome == "fault":
            raise AssertionError(f"a seed fails: {result.detail}")
    coverage = Coverage()
    for seed in initial:
        run_one(seed, seed.files, folder / "work", home)
    if not kinds or {"config", "checkpoint"} & set(kinds):
        for model_type in MODEL_TYPES:  # a mutant names one of them: its code is imported here
            required_by_transformers({"model_type": model_type}, [])
    return Prepared(home, initial, coverage)


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, where the system has one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def fuzz(
    seconds: float,
    seed: int,
    crashers: Path | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    kinds: tuple[str, ...] = (),
    most_cases: int = 1 << 62,
) -> dict[str, Any]:
    """A run of `seconds` or `most_cases` in this process; returns the counts and the faults."""
    with temporary() as name:
        prepared = prepare(Path(name), kinds)
        try:
            return run_mutants(prepared, seconds, seed, Path(name) / "work", crashers, report, most_cases=most_cases)
        finally:
            prepared.coverage.close()


def run_mutants(
    prepared: Prepared, seconds: float, seed: int, work: Path, crashers: Path | None = None,
    report: Callable[[dict[str, Any]], None] | None = None, most_cases: int = 1 << 62,
    begins: Callable[[dict[str, Any], dict[str, bytes]], None] = lambda words, files: None,
) -> dict[str, Any]:  # fmt: skip
    """Mutants of prepared seeds, drawn by `seed`.

    report  gets each fault, and the counts every 5 s
    begins  gets each case before it runs: (its seed in words, its files)
    """
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    coverage, grown = prepared.coverage, 0
    corpus: list[tuple[int, Folder]] = [(i, s.files) for i, s in enumerate(prepared.seeds)]
    counts: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    places: Counter[str] = Counter()
    faults: dict[str, str] = {}
    slowest = most = 0.0
    base = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    last = begun

    def figures() -> dict[str, Any]:
        total = sum(counts.values())
        return {
            "seed": seed, "cases": total, "seconds": round(time.monotonic() - begun, 1),
            "a_second": round(total / max(time.monotonic() - begun, 0.01)), **counts, "kinds": dict(by_kind),
            "places": len(places), "lines": len(coverage.lines), "corpus": len(corpus), "grown": grown,
            "slowest_s": round(slowest, 2), "peak_mb": round(most), "faults": list(faults.values()),
        }  # fmt: skip

    while (now := time.monotonic()) < begun + seconds and counts.total() < most_cases:
        index, files = rng.choice(corpus)
        case = prepared.seeds[index]
        if rng.random() > SLOW_KINDS.get(case.kind, 1):
            continue
        mutant = mutate(files, rng)
        words = {"seed": seed, "kind": case.kind, "producer": case.producer, "index": index}
        contents = {name: written(content) for name, content in mutant.items()}
        start = time.process_time()
        coverage.grown = False
        if any(data is None for data in contents.values()):
            result = Result("unwritten")
        else:
            begins(words, contents)
            result = run_one(case, contents, work, prepared.home)
        took = time.process_time() - start
        slowest = max(slowest, took)
        outcome, detail = result.outcome, result.detail
        counts["faulty" if outcome == "fault" else outcome] += 1
        by_kind[case.kind] += 1
        if outcome == "accepted" and result.compared:
            by_kind["compared cases"] += 1
        if outcome == "refused":
            places[detail] += 1
        new = coverage.grown if coverage.on else outcome == "refused" and places[detail] == 1
        if new and len(corpus) < 5000 and outcome in ("refused", "accepted"):
            corpus.append((index, mutant))
            grown += 1
        peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        most = (peak - base) / 1024
        if outcome == "unwritten":  # no file holds it: its cost is the mutator's own
            base = max(base, peak)
        elif took > SECONDS:
            outcome, detail = "fault", f"took {took:.1f} s: {case.kind}"
        elif most > MEGABYTES:
            outcome, detail = "fault", f"took {most:.0f} MB: {case.kind}"
            base = peak
        if outcome == "fault" and (key := detail.split(": ")[0] + case.producer) not in faults and len(faults) < 200:
            faults[key] = detail
            if report:
                report({**words, "fault": detail, "case": packed_case(contents)})
            if crashers is not None:
                write_case(crashers / f"{len(faults):03d}", contents)
        if report and now - last > 5:
            last = now
            report(figures())
    out = figures()
    if report:
        report({**out, "covered": sorted(f"{f}:{n}" for f, n in coverage.lines)} if seed % 16 == 0 else out)
    return out


def write_case(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class Slot:
    """Memory that a worker shares with its parent: the time its case began, and the case."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SLOT)

    def begin(self, words: dict[str, Any], files: dict[str, bytes]) -> None:
        head = json.dumps({**words, "files": {name: len(data) for name, data in files.items()}}).encode()
        record = b"".join([len(head).to_bytes(8, "little"), head, *files.values()])
        fits = len(record) <= SLOT - 8
        self.memory[8:16] = bytes(8)
        if fits:
            self.memory[16 : 8 + len(record)] = record[8:]
            self.memory[8:16] = record[:8]
        self.touch()

    def touch(self) -> None:
        self.memory[:8] = int(time.monotonic() * 1000).to_bytes(8, "little")

    def age(self) -> float:
        """Seconds since the case began."""
        return time.monotonic() - int.from_bytes(self.memory[:8], "little") / 1000

    def case(self) -> dict[str, Any]:
        """The words and the packed files of the case that runs; {} before the first."""
        at = 16 + int.from_bytes(self.memory[8:16], "little")
        if at == 16:
            return {}
        words = json.loads(self.memory[16:at])
        files = {}
        for name, length in words.pop("files").items():
            files[name] = self.memory[at : at + length]
            at += length
        return {**words, "case": packed_case(files)}


def fuzz_in_processes(seconds: float, seed: int, workers: int, log: Path, kinds: tuple[str, ...] = ()) -> None:
    """Workers forked after the seeds ran, each with its own seed, that append JSON lines to `log`.

    A worker that dies or hangs is a fault, logged with its case and its Python stack; another one
    takes its place.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    slots = [Slot() for _ in range(workers)]

    def write(line: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps(line).encode() + b"\n")

    with temporary() as name:
        prepared = prepare(Path(name), kinds)
        end = time.monotonic() + seconds

        def start(slot: int, number: int) -> int:
            slots[slot].memory[8:16] = bytes(8)
            slots[slot].touch()
            child = os.fork()
            if child:
                return child
            status = 1
            try:
                if sys.platform == "linux":
                    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))
                stacks = os.open(f"{name}/{slot}.stack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                faulthandler.enable(stacks)
                faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
                work = Path(name) / f"work{slot}"
                run_mutants(prepared, end - time.monotonic(), number, work, report=write, begins=slots[slot].begin)
                status = 0
            except BaseException as error:
                write({"seed": number, "fault": f"the fuzzer itself: {type(error).__name__}: {error!s:.300}"})
            finally:
                os._exit(status)

        def lost(slot: int, number: int, what: str) -> None:
            with contextlib.suppress(OSError):
                stack = Path(f"{name}/{slot}.stack").read_text(errors="replace")
                write({**slots[slot].case(), "seed": number, "fault": what, "stack": stack[:6000]})

        children = {start(i, seed + i): i for i in range(workers)}
        numbers = {i: seed + i for i in range(workers)}
        while children:
            time.sleep(0.2)
            now = time.monotonic()
            for child, slot in list(children.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if not done and (slots[slot].age() > HUNG or now > end + HUNG):
                    os.kill(child, signal.SIGUSR1)
                    time.sleep(0.5)
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    lost(slot, numbers[slot], "a worker hangs")
                    done = child
                elif done and os.WIFSIGNALED(status):
                    lost(slot, numbers[slot], f"a worker ends with signal {os.WTERMSIG(status)}")
                if done:
                    del children[child]
                    if now < end - 5:
                        numbers[slot] += 1000
                        children[start(slot, numbers[slot])] = slot
        prepared.coverage.close()
    os.close(descriptor)


def replay(log: Path) -> list[dict[str, Any]]:
    """Run the case of each fault in a log again: [{"fault", "outcome", "detail", "seconds"}]."""
    out = []
    with temporary() as name:
        prepared = prepare(Path(name))
        prepared.coverage.close()
        for line in lines_of(log):
            if "case" in line:
                seed = prepared.seeds[line["index"]]
                start = time.process_time()
                result = run_one(seed, unpacked_case(line["case"]), Path(name) / "work", prepared.home)
                took = round(time.process_time() - start, 2)
                out.append({"fault": line["fault"], "outcome": result.outcome, "detail": result.detail, "seconds": took})
    return out


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; without those that were cut where the run ended."""
    out = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    return out


def summary(log: Path) -> dict[str, Any]:
    """The figures of all workers of a log: the last line of each, and the faults by kind."""
    last: dict[int, dict[str, Any]] = {}
    faults: dict[str, list[int]] = {}
    for value in lines_of(log):
        if "fault" in value:
            faults.setdefault(value["fault"][:160], []).append(value["seed"])
        else:
            last[value["seed"]] = value
    out: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for value in last.values():
        out.update({k: value.get(k, 0) for k in ("cases", "accepted", "refused", "unwritten", "faulty")})
        kinds.update(value["kinds"])
    seconds = max((v["seconds"] for v in last.values()), default=1)
    return {
        "workers": len(last), **out, "kinds": dict(kinds), "seconds": seconds, "a_second": round(out["cases"] / seconds),
        "slowest_s": max((v["slowest_s"] for v in last.values()), default=0),
        "peak_mb": max((v["peak_mb"] for v in last.values()), default=0),
        "lines": max((v["lines"] for v in last.values()), default=0), "places": max((v["places"] for v in last.values()),
        default=0),
        "faults": faults,
    }  # fmt: skip
