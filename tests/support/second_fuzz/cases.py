"""Disturbed commands, drawn from a random generator, and the problems that they leave."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import halfbyte as hb

from . import sandbox, tracer
from .tracer import Fault

Array = NDArray[Any]
Rng = np.random.Generator
Contents = dict[str, str]
"""Relative path -> digest of a file, or what else is there; one entry "" for a lone file."""
CODES = ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS", "EPERM", "ENOMEM", "EMFILE", "ENOSYS", "EINVAL")
ACTIONS = ("errno", "errno", "sticky", "sticky", "late", "half", "kill", "kill", "kill-after", "half-kill")
NAMES = {"int64": "I64", "int32": "I32", "float32": "F32", "float16": "F16"}
OLD = {"old.weight": np.ones((4, 4), np.float32)}
"""The older output that a run with --force replaces."""
LIMITS = {
    "RLIMIT_NOFILE": (0, 3, 4, 5, 6, 8, 12, 20), "RLIMIT_FSIZE": (0, 1, 100, 1000, 4096, 9000), "RLIMIT_NPROC": (0,),
    "RLIMIT_DATA": (0, 1 << 20, 1 << 26), "RLIMIT_AS": (0, 1 << 28, 1 << 30),
}  # fmt: skip
"""Bounds of the process; for memory, bytes above what it has."""
VARIABLES: dict[str, tuple[str | None, ...]] = {
    "HOME": (None, "/nonexistent", ""), "TMPDIR": ("/nonexistent", "/dev/null"), "LC_ALL": ("C", "xx_YY"),
    "PYTHONIOENCODING": ("ascii",), "COLUMNS": ("1", "0", "abc"), "TERM": (None, "dumb"), "XDG_CACHE_HOME": ("/dev/null",),
    "OMP_NUM_THREADS": ("0", "-1", "abc", ""), "PATH": (None, ""), "PYTHONWARNINGS": ("error",),
    "PYTHONUTF8": ("0",), "HF_HOME": ("/dev/null",),
}  # fmt: skip


def pick(rng: Rng, pool: Any) -> Any:
    return pool[int(rng.integers(len(pool)))]


def safetensors(tensors: dict[str, Array]) -> bytes:
    """A file by the format's definition."""
    header, body = {}, b""
    for name, array in tensors.items():
        end = len(body) + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(body), end]}
        body += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def source(path: Path, seed: int, dense: bool = False) -> None:
    """A checkpoint of two weights: 4-bit words of compressed-tensors, or dense."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {"model.norm.weight": np.arange(64, dtype=np.float32)}
    for name in (f"model.layers.{i}.mlp.down_proj." for i in range(2)):
        if dense:
            tensors[name + "weight"] = rng.standard_normal((32, 64)).astype(np.float32)
            continue
        tensors[name + "weight_packed"] = rng.integers(-(2**31), 2**31, (32, 8)).astype(np.int32)
        tensors[name + "weight_scale"] = rng.choice([0.5, 0.25, 3.0], (32, 2)).astype(np.float16)
        tensors[name + "weight_shape"] = np.array([32, 64], np.int64)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({} if dense else {"quantization_config": config}))
    (path / "generation_config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(safetensors(tensors))


def contents(path: Path) -> Contents | None:
    """Of a file or a folder; None when there is none."""
    if path.is_symlink():
        return {"": f"link to {os.readlink(path)}"}
    if path.is_file():
        return {"": hashlib.sha256(path.read_bytes()).hexdigest()}
    if not path.is_dir():
        return None
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.rglob("*")) if p.is_file()}


def digests(path: str) -> dict[str, str]:
    """Key -> digest of its values in float32, each read after the whole has been opened."""
    with hb.open(path) as checkpoint:
        checkpoint.findings()
        found = {}
        for key in checkpoint:
            weight: Any = checkpoint[key]
            values = weight.dequantize("float32") if isinstance(weight, hb.QTensor) else np.asarray(weight)
            found[key] = hashlib.sha256(values.tobytes()).hexdigest()
        return found


@dataclass
class Writer:
    """A command, `{in}` and `{out}` for its paths, and the undisturbed result."""

    arguments: tuple[str, ...]
    out: str
    dense: bool = False
    calls: int = 0
    new: Contents = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def prepare(self, work: Path) -> None:
        """The result of a run that nothing disturbs, and its number of calls that change files."""
        work.mkdir()
        source(work / "in", 1, self.dense)
        sandbox.here(self.command(work))  # what is imported and made on first use is then there in every child
        shutil.rmtree(work / self.out) if (work / self.out).is_dir() else (work / self.out).unlink()
        counted = Fault("errno", 0)
        outcome = tracer.run(counted, str(work), sandbox.command, self.command(work))
        assert outcome.kind == "value" and outcome.value[0] == 0, (self.arguments, outcome)  # noqa: PT018
        self.calls, self.new = len(counted.calls), contents(work / self.out) or {}
        self.values = digests(str(work / self.out))

    def command(self, work: Path, force: bool = False) -> list[str]:
        paths = {"in": work / "in", "out": work / self.out}
        return [a.format(**paths) for a in self.arguments] + ["--force"] * force

    def old(self, out: Path) -> None:
        if out.suffix == ".gguf":
            out.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
        elif out.suffix:
            out.write_bytes(safetensors(OLD))
        else:
            out.mkdir()
            (out / "config.json").write_text("{}")
            (out / "model.safetensors").write_bytes(safetensors(OLD))


def writers() -> list[Writer]:
    shards = ("--max-shard-size", "3KB")
    return [
        Writer(("dequantize", "{in}", "{out}", *shards), "out"),
        Writer(("dequantize", "{in}", "{out}"), "out.safetensors"),
        Writer(("convert", "{in}", "{out}", "--to", "mlx", "--workers", "2", *shards), "out"),
        Writer(("convert", "{in}", "{out}", "--to", "halfbyte"), "out.safetensors"),
        Writer(("quantize", "{in}", "{out}", "--to", "mlx:affine4:g32"), "out", dense=True),
    ]


def wrong_beside(writer: Writer, work: Path) -> list[str]:
    """Names beside the output that open as a checkpoint and are neither the old nor the new one."""
    old = {"old.weight": hashlib.sha256(OLD["old.weight"].tobytes()).hexdigest()}
    found = []
    for path in sorted(work.iterdir()):
        if path.name not in ("in", "stranger", writer.out):
            outcome = sandbox.run(digests, str(path))
            if outcome.broken or (outcome.kind == "value" and outcome.value not in (writer.values, old)):
                found.append(f"{path.name} opens and is wrong ({outcome.kind})")
    return found


def ended_badly(outcome: sandbox.Outcome) -> list[str]:
    """A command ends with status 0, or 2 and a line."""
    if outcome.kind != "value":
        return [f"{outcome.kind}: {str(outcome.value)[-1200:]}"]
    status, text = outcome.value
    bad = status not in (0, 2) or "Traceback" in text or "a fault in halfbyte" in text or (status == 2 and not text.strip())
    return [f"status {status}: {text[-900:]}"] * bad


def undisturbed(writer: Writer, work: Path, force: bool) -> list[str]:
    """Problems of the next run: it gives the same bytes and leaves nothing."""
    outcome = sandbox.run(sandbox.command, writer.command(work, force))
    if outcome.kind != "value" or outcome.value[0] != 0:
        return [f"the next run: {outcome.kind} {str(outcome.value)[-600:]}"]
    problems = [] if contents(work / writer.out) == writer.new else ["the next run gives another output"]
    left = sorted(p.name for p in work.iterdir() if p.name not in ("in", "stranger", writer.out))
    return problems + [f"the next run leaves {left}"] * bool(left)


def interruption(rng: Rng, writer: Writer, work: Path) -> tuple[str, list[str]]:
    """One to three runs that are interrupted at a call, then one that is not."""
    source(work / "in", 1, writer.dense)
    out, over = work / writer.out, bool(rng.integers(2))
    if over:
        writer.old(out)
    old, before, what = contents(out), contents(work / "in"), []
    for _ in range(int(rng.integers(1, 4))):
        action, code = str(pick(rng, ACTIONS)), str(pick(rng, CODES))
        at = int(rng.integers(1, writer.calls + 8 * over + 1))
        fault = Fault("errno" if action == "sticky" else action, at, getattr(errno, code), action == "sticky")
        outcome = tracer.run(fault, str(work), sandbox.command, writer.command(work, over))
        what.append(f"{action} {code} at {fault.calls[at - 1] if at <= len(fault.calls) else 'no call'} {at}")
        now = contents(out)
        problems = [] if outcome.kind == "signal" and "kill" in action else ended_badly(outcome)
        if now not in (old, writer.new):
            problems.append(f"the output is neither the old nor the new one: {now}")
        if outcome.kind == "value" and outcome.value[0] == 0 and now != writer.new:
            problems.append("status 0, and the output is not the undisturbed one")
        if contents(work / "in") != before:
            problems.append("the source changed")
        problems += wrong_beside(writer, work)
        if problems or now == writer.new:
            break
    problems = problems or undisturbed(writer, work, over or out.exists())
    return f"{'; '.join(what)}{' over an old output' if over else ''}", problems


def interference(rng: Rng, writer: Writer, work: Path) -> tuple[str, list[str]]:
    """Something else happens while the command waits in front of a call."""
    source(work / "in", 1, writer.dense)
    out, over, stranger = work / writer.out, bool(rng.integers(2)), work / "stranger"
    stranger.write_bytes(b"not to be touched")
    if over:
        writer.old(out)
    old, model = contents(out), work / "in" / "model.safetensors"
    outcomes: list[sandbox.Outcome] = []

    def foreign() -> None:
        if not out.exists():
            out.write_bytes(b"of somebody else") if rng.integers(2) else out.symlink_to(stranger)

    def sweep() -> None:
        for path in work.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    actions: dict[str, Callable[[], object]] = {
        "a second run": lambda: outcomes.append(sandbox.run(sandbox.command, writer.command(work, over))),
        "a foreign output": foreign,
        "a source that is cut": lambda: os.truncate(model, model.stat().st_size // 2),
        "a source that is gone": lambda: shutil.rmtree(work / "in"),
        "temporary files that are gone": sweep,
    }
    kind, at = str(pick(rng, list(actions))), int(rng.integers(1, writer.calls + 1))
    fault = Fault("meanwhile", at, meanwhile=actions[kind])
    outcomes.append(tracer.run(fault, str(work), sandbox.command, writer.command(work, over)))
    now = contents(out)
    problems = [p for o in outcomes for p in ended_badly(o)] + wrong_beside(writer, work)
    if stranger.read_bytes() != b"not to be touched":
        problems.append("a file of somebody else was written through a link")
    if now not in (old, writer.new) and (kind != "a foreign output" or now is None or len(now) > 1):
        problems.append(f"the output is neither the old nor the new one: {now}")
    if now != writer.new and any(o.kind == "value" and o.value[0] == 0 for o in outcomes):
        problems.append("status 0, and the output is not the undisturbed one")
    return f"{kind} at call {at}", problems


def after(writer: Writer, work: Path, outcome: sandbox.Outcome) -> list[str]:
    """Problems of a run under a limit, and of the next one without."""
    now, problems = contents(work / writer.out), ended_badly(outcome)
    if now not in (None, writer.new):
        problems.append("the output is not the undisturbed one")
    elif not problems and (outcome.value[0] == 0) != (now is not None):
        problems.append(f"status {outcome.value[0]} and {'an' if now else 'no'} output: {outcome.value[1][-600:]}")
    return problems or undisturbed(writer, work, now is not None)


def limit(rng: Rng, writer: Writer, work: Path) -> tuple[str, list[str]]:
    """A limit of the process, set before the command."""
    source(work / "in", 1, writer.dense)
    name = str(pick(rng, list(LIMITS)))
    bound, which = int(pick(rng, LIMITS[name])), getattr(resource, name)
    work.chmod(0o777)

    def apply() -> None:
        used = 0
        if name in ("RLIMIT_AS", "RLIMIT_DATA"):
            used = int(Path("/proc/self/statm").read_text().split()[0 if name == "RLIMIT_AS" else 5]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(which, (used + bound, used + bound))
        if name == "RLIMIT_NPROC" and os.getuid() == 0:
            os.setuid(65534)  # the limit does not concern root

    return f"{name} {bound}", after(writer, work, sandbox.run(sandbox.command, writer.command(work), apply))


def environment(rng: Rng, writer: Writer, work: Path) -> tuple[str, list[str]]:
    """A process of its own, with odd variables and without some of its standard streams."""
    source(work / "in", 1, writer.dense)
    names = [str(n) for n in rng.choice(list(VARIABLES), int(rng.integers(1, 4)), replace=False)]
    chosen = {n: pick(rng, VARIABLES[n]) for n in names}
    closed = [i for i in range(3) if rng.integers(3) == 0]
    variables = {k: v for k, v in {**os.environ, **chosen}.items() if v is not None}
    # The shell closes them: subprocess' own pipes take descriptors that Python closes.
    line = " ".join(["exec", '"$@"', *(f"{i}{'<' if i == 0 else '>'}&-" for i in closed)])
    command = ["/bin/sh", "-c", line, "sh", sys.executable, "-m", "halfbyte", *writer.command(work)]
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=sandbox.WALL_LIMIT_S, check=False
    )
    text = done.stderr.decode("utf-8", "replace") or "-" * (2 in closed)
    kind = "value" if done.returncode >= 0 else "signal"
    return f"{chosen}, closed {closed}", after(writer, work, sandbox.Outcome(kind, (done.returncode, text)))


def change(rng: Rng, writer: Writer, work: Path) -> tuple[str, list[str]]:
    """The source changes in front of a call that reads it: values of one version, or an error."""
    path, next_ = work / "in", work / "next"
    for i, at in enumerate((path, next_)):
        source(at, 5 + i, writer.dense)
    versions = [sandbox.run(digests, str(at)).value for at in (path, next_)]
    model, counted = path / "model.safetensors", Fault("errno", 0, reads=True)
    tracer.run(counted, str(path), digests, str(path))

    def rewrite() -> None:
        with open(model, "rb+") as file:
            file.write((next_ / model.name).read_bytes())

    def become(make: Callable[[Path], None]) -> None:
        model.unlink()
        make(model)

    actions: dict[str, Callable[[], object]] = {
        "cut": lambda: os.truncate(model, int(model.stat().st_size * rng.random())),
        "longer": lambda: os.truncate(model, model.stat().st_size + 5000),
        "rewritten": rewrite,
        "replaced": lambda: os.replace(next_ / model.name, model),
        "gone": model.unlink,
        "a pipe": lambda: become(lambda p: os.mkfifo(p)),
        "a folder": lambda: become(Path.mkdir),
    }
    kind, at = str(pick(rng, list(actions))), int(rng.integers(1, len(counted.calls) + 1))
    outcome = tracer.run(Fault("meanwhile", at, meanwhile=actions[kind], reads=True), str(path), digests, str(path))
    problems = []
    if outcome.kind == "value" and outcome.value not in versions:
        problems.append("the values are those of neither version")
    elif outcome.kind not in ("value", "refused"):
        problems.append(f"{outcome.kind}: {str(outcome.value)[-1500:]}")
    return f"{kind} in front of {counted.calls[at - 1]} {at} of {len(counted.calls)}", problems


Case = Callable[[Rng, Writer, Path], tuple[str, list[str]]]
CASES: tuple[Case, ...] = (
    interruption,
    interruption,
    interruption,
    interference,
    interference,
    limit,
    limit,
    change,
    change,
    environment,
)
