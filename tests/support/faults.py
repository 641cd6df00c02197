"""Faults injected into a run that writes: the n-th system call that changes files fails, or the
process is killed there (`faults.c`, preloaded).

    with faults.Process(shim) as process:
        found = process.run(task)                        what each injected fault led to

The process that has the shim imports halfbyte once and forks for each fault. Run as a program it
takes its tasks, one a line, from the standard input.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("faults.c")
KILL, CUT, FAIL = 0, 1, 2
MODES = {
    "kill": (KILL, 0, 0), "cut": (CUT, 0, 0), "full": (FAIL, errno.ENOSPC, 1), "error": (FAIL, errno.EIO, 0),
    "quota": (FAIL, errno.EDQUOT, 1), "denied": (FAIL, errno.EACCES, 0), "read-only": (FAIL, errno.EROFS, 1),
}  # fmt: skip
"""Name -> mode of the shim, errno, and whether all later calls fail too."""


ANSWER = "answer "
"""What a line with a task's result begins with."""


def built(folder: Path) -> Path:
    """The compiled shim."""
    out = folder / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(out), str(SOURCE), "-ldl"], check=True)
    return out


class Process:
    """A process with the shim, which carries out one task after another."""

    def __init__(self, shim: Path) -> None:
        paths = [str(Path(__file__).resolve().parents[1]), *(p for p in sys.path if p)]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim.resolve()),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "support.faults"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()
        self._errors.close()

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Carry out a task.

        task  command   a name of `COMMANDS`
              source    its input
              folder    an empty folder to work in
              mode      a name of `MODES`
              numbers   the calls to fault: a list, or a step through all of them
              exchange  False: the file system cannot exchange two names
        Returns {"calls": of an undisturbed run, "tried": faults, "problems": sentences}.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._errors.seek(0)
        raise AssertionError(self._errors.read()[-4000:])


def _convert(source: Path, out: Path) -> None:
    from halfbyte.conversion import convert

    convert(source, out, to="gptq", workers=1, max_shard_size=150_000, overwrite=True)


def _quantize(source: Path, out: Path) -> None:
    import halfbyte
    from halfbyte.conversion.quantize import quantize_checkpoint
    from halfbyte.conversion.recipe import recipe_of

    recipe = recipe_of("mlx:affine4:g32")
    with halfbyte.open(source) as c:
        quantize_checkpoint(c, out, recipe, workers=1, max_shard_size=150_000, overwrite=True, from_packed=True)


def _dequantize(source: Path, out: Path) -> None:
    import halfbyte
    from halfbyte.conversion.to_dense import dequantize_checkpoint

    with halfbyte.open(source) as checkpoint:
        dequantize_checkpoint(checkpoint, out, max_shard_size=400_000, overwrite=True)


def _save(source: Path, out: Path) -> None:
    import halfbyte

    with halfbyte.open(source) as checkpoint:
        halfbyte.save(out, checkpoint)


def _gguf(source: Path, out: Path) -> None:
    from halfbyte.conversion import convert

    convert(source, out, to="gguf", workers=1, overwrite=True)


def _imatrix(source: Path, out: Path) -> None:
    import numpy as np

    from halfbyte.conversion.importance import ImportanceMatrix, InputSquares, write_importance

    entries = {f"blk.{i}.ffn_up": InputSquares(np.full((1, 64), i + 0.5, np.float32), np.ones(1, np.float32)) for i in range(2)}
    write_importance(out, ImportanceMatrix(entries, ("text",), 1, 8))


def _report(source: Path, out: Path) -> None:
    """The page of `inspect --report` and `eval --report`, the file of `/save` in `chat`, the tiles
    of `tune`.
    """
    from halfbyte.checkpoints.io.safe_files import replace_text

    replace_text(out, "<!doctype html>" + 100_000 * "x")


def _planted(source: Path, out: Path) -> None:
    """A writer with a fault: it writes in place."""
    import halfbyte

    with halfbyte.open(source) as checkpoint:
        hidden = out.with_name("other.safetensors")
        halfbyte.save(hidden, checkpoint)
        out.write_bytes(hidden.read_bytes())
        hidden.unlink()


COMMANDS = {
    "convert": (_convert, "out"), "convert file": (_convert, "out.safetensors"), "quantize": (_quantize, "out"),
    "quantize file": (_quantize, "out.safetensors"), "dequantize": (_dequantize, "out"),
    "dequantize file": (_dequantize, "out.safetensors"), "save": (_save, "out.safetensors"), "gguf": (_gguf, "out.gguf"),
    "imatrix": (_imatrix, "out.gguf"), "report": (_report, "out.html"), "planted": (_planted, "out.safetensors"),
}  # fmt: skip
"""Name -> function and the name of its output."""


def opens(path: Path) -> bool:
    """Whether a file or folder is read as a complete checkpoint."""
    import halfbyte
    from halfbyte.errors import HalfbyteError

    try:
        with halfbyte.open(path) as checkpoint:
            list(checkpoint.infos())
    except HalfbyteError:
        return False
    return True


def contents(path: Path) -> dict[str, bytes] | None:
    """The bytes of a file, or of all files of a folder; None when there is nothing."""
    if path.is_dir():
        return {p.name: p.read_bytes() for p in sorted(path.iterdir())}
    return {"": path.read_bytes()} if path.exists() else None


class _Forks:
    """Runs a command in forked processes, with or without a fault."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ctypes

        self.function, self.name = COMMANDS[task["command"]]
        self.source, self.folder = Path(task["source"]), Path(task["folder"])
        self.mode, self.value, self.sticky = MODES[task["mode"]]
        self.exchange = task.get("exchange", True)
        self.shim = ctypes.CDLL(None)
        if not hasattr(self.shim, "halfbyte_arm"):
            raise SystemExit(f"[faults] LD_PRELOAD={os.environ.get('LD_PRELOAD')} was not loaded")

    def go(self, out: Path, n: int, count_to: int = -1) -> tuple[int, str]:
        """(exit status, negative for a signal; what was raised). n = 0 injects nothing."""
        from halfbyte.errors import HalfbyteError

        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            status, text = 0, ""
            self.shim.halfbyte_exchange(0 if self.exchange else errno.EINVAL)
            self.shim.halfbyte_arm(str(self.folder).encode(), n, self.mode, self.value, self.sticky)
            try:
                self.function(self.source, out)
            except HalfbyteError as error:
                status, text = 2, str(error)
            except BaseException as error:
                status, text = 70, f"{type(error).__name__}: {error}"
            calls = self.shim.halfbyte_count()
            self.shim.halfbyte_arm(b"", 0, 0, 0, 0)
            os.write(write, json.dumps([calls, text]).encode())
            os._exit(status)
        os.close(write)
        with os.fdopen(read, "rb") as f:
            said = f.read()
        _, status = os.waitpid(child, 0)
        calls, text = json.loads(said) if said else (0, "")
        self.calls = calls
        return os.waitstatus_to_exitcode(status), text


def _explore(task: dict[str, Any]) -> dict[str, Any]:
    import halfbyte

    forks = _Forks(task)
    base = forks.folder
    # The old output differs from the new one.
    old, fresh = base / "old", base / "fresh"
    old.mkdir(), fresh.mkdir()
    warm = base / "warm"
    warm.mkdir()
    forks.function(forks.source, warm / forks.name)  # imports what the forked processes need
    shutil.rmtree(warm)
    status, text = forks.go(fresh / forks.name, 0)
    assert status == 0, f"an undisturbed run ends with {status} {text}"
    calls, new = forks.calls, contents(fresh / forks.name)
    if (fresh / forks.name).is_dir():
        (old / forks.name).mkdir()
        halfbyte.save(old / forks.name / "model.safetensors", {"old": __import__("numpy").ones(3, "float32")})
        (old / forks.name / "old.json").write_text("{}")
    else:
        (old / forks.name).write_bytes(b"old" * 100)
    was = contents(old / forks.name)
    problems: list[str] = []
    numbers = task["numbers"]
    if isinstance(numbers, int):
        numbers = list(range(1, calls + 12, numbers))
    tried = 0
    for n in numbers:
        for there in (True, False):
            here = base / f"{n}"
            shutil.copytree(old, here) if there else here.mkdir()
            out = here / forks.name
            status, text = forks.go(out, n)
            tried += 1
            what = (
                f"{task['command']}, {task['mode']} at call {n} of {calls}, {'over an old output' if there else 'to a free name'}"
            )
            if status == 70 or (status < 0 and status != -9):
                problems.append(f"{what}: {status} {text}")
            if status == 2 and "cannot be written" not in text and "[save]" not in text:
                problems.append(f"{what}: message {text}")
            found = contents(out)
            if not (found == new or found == (was if there else None)) and not (found is None and not forks.exchange):
                problems.append(f"{what}: the output is {None if found is None else {k: len(v) for k, v in found.items()}}")
            for path in here.iterdir():
                if path == out:
                    continue
                if opens(path) and contents(path) not in (new, was):
                    problems.append(f"{what}: {path.name} opens as complete")
            status, text = forks.go(out, 0)
            if status != 0:
                problems.append(f"{what}: the next run ends with {status} {text}")
            elif contents(out) != new:
                problems.append(f"{what}: the next run gives other bytes")
            elif left := sorted(p.name for p in here.iterdir() if p != out):
                problems.append(f"{what}: {left} are left")
            shutil.rmtree(here)
    return {"calls": calls, "tried": tried, "problems": problems}


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(_explore(json.loads(line))), flush=True)
