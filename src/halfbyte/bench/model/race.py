"""A whole model on the CPU beside llama.cpp: time until it is ready, peak memory, tokens a second
of a prompt and of decoding.

Each contender runs in a process of its own (`run_one`), one after another. The order rotates by one
a round, so that a change of the machine's speed affects all contenders; the result is the median of
the rounds. All get the same file, token ids and number of threads.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import BackendError, UnsupportedError, plural
from ...numerics.waiting import let_threads_of_started_processes_sleep
from ..cpu.limits import machine_name
from ..records import Record

LLAMA = "llama.cpp"
MEASURED = ("ready_s", "peak_mb", "prompt_tokens_per_s", "decode_tokens_per_s")
HEADS = ("what", "ready, s", "peak, MB", "prompt, tokens/s", "decode, tokens/s", "prompt / llama.cpp", "decode / llama.cpp")
"""Headings of `row_of`."""


def llama_reason() -> str | None:
    """None when llama.cpp can run here, else what is missing, as a sentence."""
    if find_spec("llama_cpp") is None:
        return "llama_cpp is not installed (pip install llama-cpp-python builds it for this machine)"
    return None


def contenders_of(activations: Sequence[str], with_llama: bool) -> list[str]:
    """halfbyte in each mode of activations, then llama.cpp, whose activations are 8-bit integers."""
    return [*activations, *([LLAMA] if with_llama else [])]


def run_one(what: str, path: Path, threads: int, prompt: int, decode: int, clock: str) -> Record:
    """Measure one contender in a process of its own. Raises BackendError with the last line of its
    output when it fails.
    """
    count = str(threads)
    # OpenMP's threads of torch and llama.cpp, and BLAS' of NumPy, are set from outside: some
    # libraries read them at import.
    environment = os.environ | {"OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "HALFBYTE_THREADS": count}
    if what != LLAMA:
        let_threads_of_started_processes_sleep(environment)
    command = [sys.executable, "-m", "halfbyte.bench.model.run_one", what, str(path), count, str(prompt), str(decode), clock]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise BackendError(f"[bench] {what} ended with status {done.returncode}: {last}")
    found: Record = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def bench_model(
    path: Path,
    *,
    threads: int = 1,
    activations: Sequence[str] = ("exact", "int8"),
    with_llama: bool = True,
    rounds: int = 3,
    prompt: int = 512,
    decode: int = 128,
    clock: str = "wall",
) -> Iterator[Record]:
    """A record "model" for each contender; those of halfbyte have `prompt_ratio` and `decode_ratio`
    to llama.cpp in the same rounds.
    """
    if not path.is_file():
        raise UnsupportedError(f"[bench] --model {path}: no such file; a .gguf file, which llama.cpp reads too, is allowed")
    contenders = contenders_of(activations, with_llama)
    runs: dict[str, list[Record]] = {c: [] for c in contenders}
    for turn in range(rounds):
        for i in range(len(contenders)):
            what = contenders[(turn + i) % len(contenders)]
            runs[what].append(run_one(what, path, threads, prompt, decode, clock))
    medians = {c: {key: statistics.median(r[key] for r in runs[c]) for key in MEASURED} for c in contenders}
    for what in contenders:
        ours = what != LLAMA
        record: Record = {
            "record": "model", "peer": "halfbyte" if ours else LLAMA, "activations": what if ours else "int8",
            "format": path.name, "device": "cpu", "name": machine_name(), "threads": threads, "clock": clock,
            "prompt": prompt, "decode": decode, "engine": runs[what][-1]["engine"],
            **medians[what],
        }  # fmt: skip
        if ours and with_llama:
            for key in ("prompt", "decode"):
                record[f"{key}_ratio"] = medians[what][f"{key}_tokens_per_s"] / medians[LLAMA][f"{key}_tokens_per_s"]
        yield record


def row_of(r: Record) -> list[str]:
    """One record as cells under `HEADS`."""
    return [
        f"halfbyte {r['activations']}" if r["peer"] == "halfbyte" else str(r["peer"]),
        f"{r['ready_s']:.2f}",
        f"{r['peak_mb']:.0f}",
        f"{r['prompt_tokens_per_s']:.0f}",
        f"{r['decode_tokens_per_s']:.1f}",
        f"{r['prompt_ratio']:.2f}" if "prompt_ratio" in r else "",
        f"{r['decode_ratio']:.2f}" if "decode_ratio" in r else "",
    ]


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """The records as a table for a page of figures."""
    first = records[0]
    threads = plural(first["threads"], "thread")
    work = f"prompt of {first['prompt']} tokens, {first['decode']} decoded"
    yield f"{first['name']}, {threads}, {first['clock']} time; `{first['format']}`, {work}."
    yield ""
    yield "| " + " | ".join(HEADS) + " |"
    yield "|---" * len(HEADS) + "|"
    for r in records:
        yield "| " + " | ".join(row_of(r)) + " |"
