"""Runs the code of a documentation page in the order of the page: its Python, and each line that
calls `halfbyte`, with a small model under the names that the page uses.

    python -m support.page_runner MODEL.gguf [PAGE ...]

runs the guides on a real model in an empty folder and prints the CPU seconds of each command and
page, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from halfbyte.cli import main

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LANGUAGES = {"": True, "python": True, "console": False, "sh": False, "text": False}
"""Languages of blocks -> whether they are run: `console` and `sh` install programs, `text` is
output.
"""
NOT_RUN = {
    r"halfbyte serve ": "it runs until it is stopped; tests/generation/test_chat.py starts it",
    r"--device cuda": "it needs an NVIDIA GPU",
    r"^halfbyte bench": "it measures the machine's limits first; tests/cli/test_bench.py",
    r"^halfbyte selftest$": "it times every kernel of a device; tests/backends/metal/test_selftest.py",
    r"vllm serve": "it needs vLLM; tests/vllm/test_plugin.py",
}
"""Commands that are not run, and why."""
GIVEN = ("model.gguf", "text.txt")
"""The files that guides/run-a-model.md says how to get: all that a guide starts from."""
PLACEHOLDERS = {"TEXT": "text.txt", "FILE": "text.txt", "A": "model.gguf", "B": "model.gguf"}
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\nThe quick brown fox.\n"


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """("python", code) and ("command", line) in the order of the page; comments of commands are
    removed.
    """
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            yield "python", code
        elif LANGUAGES[language]:
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith("halfbyte "):
                    yield "command", re.split(r"\s+#", line)[0].strip()


def reason_not_to_run(line: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), "")


def statuses(words: list[str]) -> tuple[int, ...]:
    """Exit statuses that mean the command did what the page says: 1 is a verdict of these."""
    verdict = (
        words[0] == "verify" or "--for" in words or "--plan" in words or any(w.startswith(("--max-", "--min-")) for w in words)
    )
    return (0, 1) if verdict else (0,)


def prepare(folder: Path, model: Path, page: Path) -> None:
    """The files that the page takes as given: `GIVEN`, and a dense folder where it is no guide."""
    (folder / "model.gguf").symlink_to(model)
    (folder / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    words = {word for kind, line in steps(page) if kind == "command" for word in shlex.split(line)}
    if words & {"model", "PATH"} and page.parent != DOCS / "guides":
        assert main(["dequantize", str(model), str(folder / "model")]) == 0


def run(page: Path, model: Path, folder: Path, report: Callable[[str, float], None] = lambda step, seconds: None) -> int:
    """Runs the page with a GGUF in an empty folder; the number of steps that ran. AssertionError
    names the command that did not end as the page says.
    """
    prepare(folder, model, page)
    names: dict[str, object] = {"__name__": page.stem}
    count, stdin, before = 0, sys.stdin, Path.cwd()
    os.chdir(folder)
    try:
        for kind, text in steps(page):
            begin = time.process_time()
            if kind == "python":
                exec(compile(text, f"{page.name}: {text.strip().splitlines()[0]}", "exec"), names)
            elif reason_not_to_run(text):
                continue
            else:
                words = shlex.split(text)[1:]
                dense = "model" if words[0] == "quantize" else "model.gguf"
                words = [dense if word == "PATH" else PLACEHOLDERS.get(word, word) for word in words]
                words = [re.sub("^OUT", f"out-{count}", word) for word in words]
                sys.stdin = io.StringIO("Hello\n")
                try:
                    status = main(words)
                finally:
                    sys.stdin = stdin
                assert status in statuses(words), f"{page.name}: {text!r} ended with status {status}"
            count += 1
            report(text.strip().splitlines()[0], time.process_time() - begin)
    finally:
        os.chdir(before)
    return count


if __name__ == "__main__":
    given, chosen = Path(sys.argv[1]).absolute(), [Path(p).absolute() for p in sys.argv[2:]]
    for guide in chosen or sorted((DOCS / "guides").glob("*.md")):
        scratch, started = Path(tempfile.mkdtemp()), time.process_time()
        print(f"== {guide.stem}", file=sys.stderr, flush=True)
        try:
            run(guide, given, scratch, lambda step, seconds: print(f"{seconds:8.1f} s  {step}", file=sys.stderr, flush=True))
        except (Exception, AssertionError) as error:
            print(f"FAILED {guide.stem}: {error!r}", file=sys.stderr, flush=True)
        print(f"== {guide.stem}: {time.process_time() - started:.0f} s", file=sys.stderr, flush=True)
        shutil.rmtree(scratch)
