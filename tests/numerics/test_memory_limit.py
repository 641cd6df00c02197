"""Limits of the process and of nested control groups: found, and named before an allocation."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.numerics import memory_limit as module
from halfbyte.numerics.memory_limit import MemoryLimit, check_memory, memory_limit
from support.conversion_models import write_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
MB = 1 << 20


def groups(folder: Path, cgroup: str, files: dict[str, str]) -> MemoryLimit | None:
    process, root = folder / "proc", folder / "groups"
    process.mkdir()
    (process / "statm").write_text("1000 500 100 1 0 800 0")
    (process / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit(str(process), str(root))


def group(path: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{path}memory.max": limit,
        f"{path}memory.current": str(used),
        f"{path}memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/a/b", group("a/b/", str(100 * MB), 30 * MB, 10 * MB), 80 * MB),
        ("0::/a/b", group("a/b/", "max", 0) | group("a/", str(50 * MB), 45 * MB), 5 * MB),
        ("0::/a/b", group("a/b/", str(9 * MB), 0) | group("a/", str(50 * MB), 45 * MB), 5 * MB),
        ("0::/a/b", group("a/b/", "max", 0), None),
        ("0::/of/the/host", group("", str(64 * MB), 4 * MB), 60 * MB),
        ("0::/", group("", str(64 * MB), 65 * MB), -MB),
        ("4:cpu:/x\n9:memory:/a", {"memory/a/memory.limit_in_bytes": str(7 * MB), "memory/a/memory.usage_in_bytes": str(2 * MB),
         "memory/a/memory.stat": f"total_inactive_file {MB}"}, 6 * MB),
        ("9:memory:/a", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096), "memory/a/memory.usage_in_bytes": "1",
         "memory/a/memory.stat": ""}, None),
        ("4:cpu:/a", group("a/", "1", 0), None),
    ],
)  # fmt: skip
def test_the_tightest_control_group_counts(tmp_path, cgroup, files, left):
    found = groups(tmp_path, cgroup, files)
    assert (None if found is None else found.left) == left


@pytest.mark.parametrize(("kind", "pages"), [("RLIMIT_AS", 1000), ("RLIMIT_DATA", 800)])
def test_what_the_process_has_counts_against_its_own_limit(tmp_path, monkeypatch, kind, pages):
    soft = 64 * MB
    limits = {getattr(resource, kind): (soft, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda of: limits.get(of, (resource.RLIM_INFINITY,) * 2))
    found = groups(tmp_path, "0::/", {})
    assert found is not None
    assert (found.left, found.limit) == (soft - pages * os.sysconf("SC_PAGESIZE"), soft)


def test_a_message_names_sizes_and_the_limit(monkeypatch):
    monkeypatch.setattr(module, "memory_limit", lambda: MemoryLimit(20 * MB, 64 * MB, "RLIMIT_AS (ulimit -v)"))
    check_memory(20 * MB, "[open] x: a tensor")
    with pytest.raises(
        HalfbyteError, match=r"\[open\] x: a tensor takes 20,971,521 bytes; .* 20,971,520 more of the 67,108,864"
    ) as e:
        check_memory(20 * MB + 1, "[open] x: a tensor")
    assert isinstance(e.value, MemoryError)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run with an address space of 1.5 GB."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1536 * MB}, resource.RLIM_INFINITY))\n{code}"
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)], env=env, capture_output=True, text=True, check=False
    )


def sparse(path: Path, nbytes: int) -> Path:
    """A file of one tensor, of holes."""
    head = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.truncate(8 + len(head) + nbytes)
    return path


def test_a_tensor_that_does_not_fit_is_an_error_by_name(tmp_path):
    path = sparse(tmp_path / "big.safetensors", 4 << 30)
    code = "import sys, halfbyte\nwith halfbyte.open(sys.argv[1]) as c:\n    print(c.info('w').shape)\n    c['w']"
    done = python(code, path)
    assert done.returncode == 1
    assert done.stdout == "(4294967296,)\n"
    assert f"MemoryLimitError: [open] {path}: a tensor takes 4,294,967,296 bytes; this process may take" in done.stderr
    assert "that RLIMIT_AS (ulimit -v) allows" in done.stderr


@pytest.mark.slow
def test_a_control_group_above_the_process_s_own_counts(tmp_path):
    """A real group with a limit, the process in one below it that has none. Needs root."""
    line = next((li for li in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in li or li.startswith("0::")), "")
    first = line.split(":")[1] == "memory"
    outer = Path("/sys/fs/cgroup", *(["memory"] if first else []), line.split(":", 2)[2].lstrip("/"), f"halfbyte{os.getpid()}")
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        (outer / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(512 * MB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    path = sparse(tmp_path / "big.safetensors", 1 << 30)
    code = f"""
import os, sys
open({str(inner / "cgroup.procs")!r}, "w").write(str(os.getpid()))
import halfbyte
with halfbyte.open(sys.argv[1]) as checkpoint:
    checkpoint["w"]
"""
    try:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=False)
    finally:
        inner.rmdir()
        outer.rmdir()
    assert done.returncode == 1, done.stderr
    assert "MemoryLimitError: [open] " in done.stderr
    assert f"more of the {512 * MB:,} that the control group" in done.stderr


def test_a_weight_that_does_not_fit_dense_is_an_error_by_name():
    code = """
import numpy as np, halfbyte
from halfbyte.errors import HalfbyteError
from halfbyte import format_named, QTensor
parts = {"codes": np.zeros((8192, 32768), np.uint8), "scales": np.zeros((8192, 2048), np.float16)}
w = QTensor(format_named("int4", 32), (8192, 65536), parts)
try:
    w.dequantize()
except HalfbyteError as error:
    print(error)
"""
    assert "[dequantize] a weight of shape (8192, 65536) in float32 takes 2,147,483,648 bytes" in python(code).stdout


def test_plan_compares_with_what_the_process_may_take(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    from halfbyte.cli import app, plan

    folder, _, _ = write_llama(tmp_path / "m", "int4:g32")
    for left, status, words in (
        (10**9, 0, "fits the 1 GB that RLIMIT_AS"),
        (1000, 1, "does not fit the 1,000 bytes that RLIMIT_AS"),
    ):
        monkeypatch.setattr(plan, "memory_limit", lambda left=left: MemoryLimit(left, 10**10, "RLIMIT_AS (ulimit -v)"))
        assert app.main(["plan", str(folder), "--context", "64"]) == status
        out = capsys.readouterr().out
        assert words.split(" RLIMIT")[0].split(" 1")[0] in out, out
        assert "RLIMIT_AS (ulimit -v) leaves this process" in out
