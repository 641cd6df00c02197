"""Fuzzes the readers: structure-aware mutants of small checkpoints of every producer, guided by
coverage.

    python -m support.fuzz --seconds 60 [--seed 0] [--workers 2] [--crashers FOLDER] [--log FILE]      (make fuzz)
    python -m support.fuzz --summary FILE                                       the figures of a log

`targets.py` has the kinds of input and their oracles, `mutators.py` the mutations, `decoders.py`
the
independent decoders. A mutant that reaches a line of the source where none was before joins the
corpus (from Python 3.12, by sys.monitoring; before, one that is refused at a new line). Oracle for
each mutant: only errors of the library; under 5 s of CPU time; under 300 MB above the base; where
it
is accepted, the independent decoder's values.
"""

from __future__ import annotations

import base64
import json
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
from pathlib import Path
from types import CodeType
from typing import Any

from support.fuzz.mutators import Folder, encoded, mutate
from support.fuzz.targets import ROOT, run_one, seeds

SECONDS, MEGABYTES = 5.0, 300
HUNG = 60
"""Seconds after which a worker that has not ended a case is killed."""
ADDRESS_SPACE = 6 << 30
"""Bytes of a worker's address space: a request beyond it is a MemoryError, a fault."""
SLOW_KINDS = {"resume": 0.3, "tokenizer": 0.3, "template": 0.5}
"""How often a seed of a slow kind is drawn, beside 1 for the others."""


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


def fuzz(
    seconds: float, seed: int, crashers: Path | None = None, report: Callable[[dict[str, Any]], None] | None = None,
    kinds: tuple[str, ...] = (), started: Callable[[], None] = lambda: None, most_cases: int = 1 << 62,
) -> dict[str, Any]:  # fmt: skip
    """One worker's run of `seconds` or `most_cases`; returns the counts, and the faults by kind.
    `report` gets each fault, and the counts every 5 s.
    """
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        home, work = Path(name) / "home", Path(name) / "work"
        initial = seeds(home, kinds)
        for case in initial:
            result = run_one(case, case.files, work, home)
            if result.outcome == "fault":
                raise AssertionError(f"a seed fails: {result.detail}")
        coverage = Coverage()
        corpus = [(s, s.files) for s in initial]
        for case in initial:
            run_one(case, case.files, work, home)
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
                "places": len(places),
                "lines": len(coverage.lines), "corpus": len(corpus), "slowest_s": round(slowest, 2), "peak_mb": round(most),
                "faults": list(faults.values()),
            }  # fmt: skip

        try:
            while (now := time.monotonic()) < begun + seconds and counts.total() < most_cases:
                case, files = rng.choice(corpus)
                if rng.random() > SLOW_KINDS.get(case.kind, 1):
                    continue
                mutant = mutate(files, rng)
                started()
                start = time.process_time()
                coverage.grown = False
                result = run_one(case, mutant, work, home)
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
                    corpus.append((case, mutant))
                peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
                most = (peak - base) / 1024
                if took > SECONDS:
                    outcome, detail = "fault", f"took {took:.1f} s: {case.kind}"
                elif most > MEGABYTES:
                    outcome, detail = "fault", f"took {most:.0f} MB: {case.kind}"
                    base = peak
                if outcome == "fault" and (key := detail.split(": ")[0] + case.producer) not in faults and len(faults) < 200:
                    faults[key] = detail
                    if report:
                        report(
                            {
                                "seed": seed,
                                "fault": detail,
                                "kind": case.kind,
                                "producer": case.producer,
                                "case": packed_case(mutant),
                            }
                        )
                    if crashers is not None:
                        target = crashers / f"{len(faults):03d}"
                        for file, content in mutant.items():
                            (target / file).parent.mkdir(parents=True, exist_ok=True)
                            (target / file).write_bytes(encoded(content))
                if report and now - last > 5:
                    last = now
                    report(figures())
        finally:
            coverage.close()
        out = figures()
        if report:
            report({**out, "covered": sorted(f"{f}:{n}" for f, n in coverage.lines)} if seed % 16 == 0 else out)
        return out


def fuzz_in_processes(seconds: float, seed: int, workers: int, log: Path, kinds: tuple[str, ...] = ()) -> None:
    """Workers in processes of their own, each with its own seed, that append JSON lines to `log`.

    A worker that dies or hangs is a fault, whose case is logged; another one takes its place.
    """
    import mmap

    beats = mmap.mmap(-1, 16 * workers)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    end = time.monotonic() + seconds

    def write(line: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps(line).encode() + b"\n")

    def start(slot: int, number: int) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.environ["OMP_NUM_THREADS"] = "1"
            if sys.platform == "linux":
                resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))
            tempfile.tempdir = None

            def beat() -> None:
                beats[16 * slot : 16 * slot + 8] = int(time.monotonic() * 1000).to_bytes(8, "little")

            beat()
            fuzz(end - time.monotonic(), number, None, write, kinds, beat)
            status = 0
        except BaseException as error:
            write({"seed": number, "fault": f"the fuzzer itself: {type(error).__name__}: {error!s:.300}"})
        finally:
            os._exit(status)

    children = {start(i, seed + i): i for i in range(workers)}
    numbers = {i: seed + i for i in range(workers)}
    while children:
        time.sleep(0.2)
        now = time.monotonic()
        for child, slot in list(children.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            late = now - int.from_bytes(beats[16 * slot : 16 * slot + 8], "little") / 1000 > HUNG
            if not done and (now > end + HUNG or late):
                os.kill(child, signal.SIGKILL)
                write({"seed": numbers[slot], "fault": "a worker hangs", "late": late})
                os.waitpid(child, 0)
                done = child
            elif done and os.WIFSIGNALED(status):
                write({"seed": numbers[slot], "fault": f"a worker ends with signal {os.WTERMSIG(status)}"})
            if done:
                del children[child]
                if now < end - 5:
                    numbers[slot] += 1000
                    children[start(slot, numbers[slot])] = slot
    os.close(descriptor)


def summary(log: Path) -> dict[str, Any]:
    """The figures of all workers of a log: the last line of each, and the faults by kind."""
    last: dict[int, dict[str, Any]] = {}
    faults: dict[str, list[int]] = {}
    for line in log.read_text().splitlines():
        try:
            value = json.loads(line)
        except ValueError:  # cut where the run was ended
            continue
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
