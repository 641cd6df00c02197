"""A file system that is full, or a quota that is used up, for every command that writes: real ones,
mounted for the test, in place of the shim's errors. They need root.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.errors import HalfbyteError
from support import faults
from support.conversion_models import write_model
from support.gguf_models import dense_model, write

pytestmark = pytest.mark.slow
ROOM = 100 << 20
"""Bytes with which every run ends well."""
STEPS = 8
"""Sizes between nothing and what a run needs."""


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def call_or_skip(*command: str) -> None:
    """What a machine, or a user who is not root, may not be able to do."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """(where it is, what sets its bytes) of a file system in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    call_or_skip("mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(disk))
    try:
        yield disk, lambda nbytes: call("mount", "-o", f"remount,size={nbytes}", str(disk))
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.fixture
def quota(tmp_path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """The same of a quota group of btrfs."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("btrfs-progs is not here")
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    call_or_skip("mkfs.btrfs", "-q", str(image))
    call_or_skip("mount", "-o", "loop,max_inline=0", str(image), str(disk))
    try:
        call("btrfs", "subvolume", "create", str(disk / "limited"))

        def limit(nbytes: int) -> None:
            if nbytes == ROOM:  # a limit that is reached cannot be raised
                call("btrfs", "quota", "disable", str(disk))
                return
            call("btrfs", "quota", "enable", str(disk))
            call("btrfs", "quota", "rescan", "-w", str(disk))
            call("btrfs", "qgroup", "limit", str(nbytes), str(disk / "limited"))

        yield disk / "limited", limit
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.parametrize("kind", ["tmpfs", "quota"])
@pytest.mark.parametrize("command", [c for c in faults.COMMANDS if c != "planted"])
def test_no_room(request, tmp_path, kind, command):
    disk, limit = request.getfixturevalue(kind)
    function, name = faults.COMMANDS[command]
    if command == "gguf":
        (tmp_path / "in").mkdir()
        source = write(tmp_path / "in" / "in.gguf", "llama", dense_model("llama"), True)
    else:
        source = write_model(tmp_path / "in", "int4:g128", layers=1)
    (tmp_path / "fresh").mkdir()
    function(source, tmp_path / "fresh" / name)
    new = faults.contents(tmp_path / "fresh" / name)
    size = sum(map(len, new.values()))
    old_output = tmp_path / "old" / name
    old_output.parent.mkdir()
    if "." in name:
        old_output.write_bytes(b"old")
    else:
        old_output.mkdir()
        halfbyte.save(old_output / "model.safetensors", {"old": np.ones(3, np.float32)})
    refused = 0
    for step in range(STEPS):
        for over in (False, True):
            work = disk / f"{step}{over}"
            work.mkdir()
            out = work / name
            if over:
                shutil.copytree(old_output.parent, work, dirs_exist_ok=True)
            old = faults.contents(out)
            subprocess.run(["sync", "-f", str(disk)], check=True)
            used = shutil.disk_usage(disk).used if kind == "tmpfs" else blocks_of(disk)
            limit(max(4096, (used + size * step // STEPS) // 4096 * 4096))
            said = attempt(function, source, out)
            refused += bool(said)
            words = (os.strerror(errno.EDQUOT if kind == "quota" else errno.ENOSPC), "bytes are needed, ")
            assert not said or any(word in said for word in words)
            assert faults.contents(out) == (old if said else new)
            for path in work.iterdir():
                assert path == out or not keys_of(path)
            limit(ROOM)
            function(source, out)
            assert faults.contents(out) == new
            assert [p.name for p in work.iterdir()] == [name]
            shutil.rmtree(work)
    assert refused
    print(f"{kind}, {command}: {2 * STEPS} runs, {refused} without room")


def attempt(function: Callable[[Path, Path], None], source: Path, out: Path) -> str:
    """The error of a run, "" for none."""
    try:
        function(source, out)
    except HalfbyteError as error:
        return str(error)
    return ""


def keys_of(path: Path) -> list[str]:
    """Keys of a checkpoint, none where it does not open."""
    try:
        with halfbyte.open(path) as checkpoint:
            return list(checkpoint)
    except HalfbyteError:
        return []


def blocks_of(folder: Path) -> int:
    """Bytes of the blocks of all files."""
    return sum(os.lstat(path).st_blocks * 512 for path in folder.rglob("*")) + (32 << 10)
