"""One function at a time: what may be at a name, and what is created, deleted and copied."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from halfbyte.checkpoints.io import safe_files
from halfbyte.checkpoints.io.safe_files import (
    alive,
    carried_files,
    check_name,
    copy_file,
    create,
    delete,
    delete_folder,
    foreign,
    replace_text,
    sync_folder,
    write_file,
)
from halfbyte.errors import CheckpointError

posix = pytest.mark.skipif(os.name != "posix", reason="files as Unix has them")


@posix
def test_what_is_at_a_name_is_told_by_its_kind(tmp_path, monkeypatch):
    for name in ("file", "linked"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.link(tmp_path / "linked", tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    special, hard = "is a pipe, a device or a socket", "is a hard link to a file with another name"
    said = {"missing": ("", ""), "file": ("", "is not a folder"), "folder": ("is not a file", ""),
            "link": ("is a link", "is a link"),
            "pipe": (special, "is not a folder"),
            "hard": (hard, "is not a folder"), "linked": (hard, "is not a folder")}  # fmt: skip
    for name, both in said.items():
        assert (foreign(tmp_path / name), foreign(tmp_path / name, folder=True)) == both, name
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for name, folder in (("file", False), ("folder", True)):
        assert foreign(tmp_path / name, folder) == f"belongs to user {owner}"


@posix
def test_a_new_file_is_written_and_read_and_open_to_those_whom_the_mask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        with create(tmp_path / "a") as f:
            f.write(b"abc"), f.seek(1)
            assert f.read() == b"bc"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_process_is_alive_unless_the_system_has_none_of_its_id():
    assert [alive(pid) for pid in (os.getpid(), 1 << 23, 1 << 70)] == [True, False, True]


def test_deleting_takes_the_names_given_and_the_folder_when_it_is_empty(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir(), (folder / "inner").mkdir(), (folder / "a").touch(), (folder / "b").touch()
    assert delete_folder(folder, ["a", "missing", "inner"]) == ["b", "inner"]
    (folder / "inner").rmdir()
    assert delete_folder(folder, ["b"]) == []
    assert not folder.exists()
    assert delete_folder(folder, ["a"]) == []
    (tmp_path / "x").touch()
    delete([tmp_path / "missing", tmp_path / "x"])
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_link_to_a_folder_is_not_entered(tmp_path):
    (tmp_path / "f").mkdir(), (tmp_path / "f" / "a").touch(), (tmp_path / "link").symlink_to("f")
    assert delete_folder(tmp_path / "link", ["a"]) == []
    assert (tmp_path / "f" / "a").exists()


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127 + "x", ".a", "a b", "a..b", "…"])
def test_plain_names_are_taken(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["ü" * 128, "\x7f", "a\x1f", *'/\\:*?"<>|', "\ta", "a\u00a0"])
def test_names_that_some_system_cannot_have_are_refused(name):
    with pytest.raises(CheckpointError, match="a plain name of at most 255 bytes is allowed"):
        check_name(name)


@posix
def test_a_folder_is_synced_and_nothing_else_is(tmp_path, monkeypatch):
    sync_folder(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        with pytest.raises(NotADirectoryError):
            sync_folder(tmp_path / name)

    def refuse(code: int) -> None:
        raise OSError(code, os.strerror(code))

    for code in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):  # of file systems without it
        monkeypatch.setattr(os, "fsync", lambda fd, code=code: refuse(code))
        sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda fd: refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_model_files_of_up_to_1_gib_are_carried(tmp_path):
    for name in ("a.json", "b.model", "c.bin", "d.json.bak"):
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    os.truncate(tmp_path / "a.json", 1 << 30)
    assert carried_files(tmp_path, [".json", ".model"], "convert") == {n: tmp_path / n for n in ("a.json", "b.model")}
    os.truncate(tmp_path / "a.json", (1 << 30) + 1)
    with pytest.raises(CheckpointError, match=r"\[convert\] .*a\.json: 1,073,741,825 bytes; model files of up to 1,073,741,824"):
        carried_files(tmp_path, [".json"], "convert")
    assert list(carried_files(tmp_path, [".model"], "convert")) == ["b.model"]


@pytest.mark.parametrize("size", [0, 1, 6, 7])
def test_a_copy_has_every_byte(size, tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "_PIECE", 3)
    (tmp_path / "a").write_bytes(bytes(range(size)))
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == bytes(range(size))
    write_file(tmp_path / "c", bytes(range(size)))
    assert (tmp_path / "c").read_bytes() == bytes(range(size))


def test_an_error_of_the_system_names_the_file(tmp_path):
    for write in (lambda p: write_file(p, b""), lambda p: copy_file(Path(__file__), p)):
        with pytest.raises(FileNotFoundError) as caught:
            write(tmp_path / "no" / "a")
        assert caught.value.filename == str(tmp_path / "no" / "a")
    with pytest.raises(CheckpointError, match=r"\[save\] .*a: cannot be written: No such file"):
        replace_text(tmp_path / "no" / "a", "x")


@posix
@pytest.mark.parametrize(
    ("left", "goes"),
    [
        (f"{1 << 23}", True),
        (f"{os.getpid()}", True),
        (f"{os.getppid()}", False),
        ("x", False),
        ("", False),
        (f"{1 << 23}.x", False),
    ],
    ids=["of none", "own", "of the parent", "a word", "nothing", "a number and a word"],
)
def test_only_what_a_killed_run_left_is_deleted(left, goes, tmp_path):
    path = tmp_path / "a[1].html"
    part = tmp_path / f".a[1].html.{left}.part"
    part.write_text("half")
    replace_text(path, "whole")
    assert path.read_text() == "whole"
    assert part.exists() != goes
