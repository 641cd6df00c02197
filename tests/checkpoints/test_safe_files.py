"""Names that somebody planted, names that lead out of a folder, outputs that are inputs: what is
written and deleted is this program's own.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.checkpoints.io import rename
from halfbyte.checkpoints.io.journal import Journal, Lock, WriteError
from halfbyte.checkpoints.io.rename import exchange
from halfbyte.checkpoints.io.safe_files import (
    NotOursError,
    carried_files,
    check_name,
    copy_file,
    create,
    reopen,
    replace_text,
    write_file,
    write_json,
)
from halfbyte.checkpoints.safetensors.sharded_writer import ResumableFolder
from halfbyte.conversion import convert, convert_checkpoint
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError
from support.conversion_models import identical, write_model
from support.faults import contents

posix = pytest.mark.skipif(os.name != "posix", reason="links as Unix has them")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in", "int4:g128", layers=1)


def plant(kind: str, path: Path, victim: Path) -> None:
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("nothing"))
    elif kind == "hard link":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "thesis.txt").write_text("ten years")
    else:
        path.write_bytes(victim.read_bytes())


@posix
@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder", "file"])
@pytest.mark.parametrize("name", [".{}.partial", ".{}.partial.journal", ".{}.partial.journal.new", ".{}.partial.lock"])
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_what_is_planted_at_a_temporary_name_is_neither_followed_nor_deleted(source, tmp_path, out, name, kind):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine, all mine")
    path = tmp_path / name.format(out)
    plant(kind, path, victim)
    if kind == "file" and name.endswith(".new"):
        return  # an interrupted run leaves such a file
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(NotOursError, match=rf"{path.name}.* Delete it yourself, or give another output path"):
        convert(source, tmp_path / out, to="gptq", workers=1)
    assert victim.read_bytes() == b"mine, all mine"
    assert not victim.with_name("nothing").exists()
    after = sorted(p.name for p in tmp_path.iterdir())
    assert [n for n in after if not n.endswith(".lock")] == [n for n in before if not n.endswith(".lock")]
    if kind == "folder":
        assert (path / "thesis.txt").read_text() == "ten years"


@posix
@pytest.mark.parametrize("command", ["dequantize", "save"])
@pytest.mark.parametrize(
    "name", [".out.safetensors.partial", ".out.safetensors.partial.journal", ".out.safetensors.partial.lock"]
)
def test_a_planted_link_stops_every_command(source, tmp_path, command, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / name).symlink_to(victim)
    out = tmp_path / "out.safetensors"
    with halfbyte.open(source) as checkpoint, pytest.raises(NotOursError, match="is a link"):
        halfbyte.save(out, checkpoint) if command == "save" else dequantize_checkpoint(checkpoint, out)
    assert victim.read_bytes() == b"mine"


@posix
@pytest.mark.parametrize("inside", ["thesis.txt", "00001.shard"])
def test_a_file_or_link_in_the_temporary_folder_is_not_deleted(source, tmp_path, inside):
    """A folder that an interrupted run left, to which somebody has added something."""

    def stop(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1, progress=stop)
    partial = tmp_path / ".out.partial"
    (partial / inside).unlink(missing_ok=True)
    if inside == "thesis.txt":
        (partial / inside).write_text("ten years")
    else:
        (partial / inside).symlink_to(victim)
    with pytest.raises(NotOursError, match=inside):
        convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1)
    assert os.path.lexists(partial / inside)
    assert victim.read_bytes() == b"mine"
    (partial / inside).unlink()
    convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1)
    assert identical(source, tmp_path / "out")


def test_a_shard_whose_ends_were_zeroed_is_written_again(source, tmp_path):
    """Sizes alone would accept it; the journal has checksums of header and data."""

    def stop(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    convert(source, tmp_path / "whole", to="gptq", workers=1, max_shard_size=1)
    for part in ("head", "tail"):
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1, progress=stop, overwrite=True)
        shards = sorted((tmp_path / ".out.partial").glob("*.shard"))
        raw = bytearray(shards[1].read_bytes())
        if part == "head":
            raw[:16] = bytes(16)
        else:
            raw[-16:] = bytes(16)
        shards[1].write_bytes(raw)
        done = convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1, overwrite=True)
        assert 0 < done.resumed < len(shards)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@posix
def test_an_output_that_is_an_input_by_another_name_is_refused(source, tmp_path):
    weights = source / "model.safetensors"
    os.link(weights, tmp_path / "hard.safetensors")
    (tmp_path / "soft.safetensors").symlink_to(weights)
    (tmp_path / "folder").mkdir()
    os.link(weights, tmp_path / "folder" / "model.safetensors")
    before = weights.read_bytes()
    for name, word in (("hard.safetensors", "by another name"), ("soft.safetensors", "holds the checkpoint|is a link"),
                       ("folder", "by another name")):  # fmt: skip
        for read in (source, weights):
            with pytest.raises(CheckpointError, match=word):
                convert(read, tmp_path / name, to="gptq", overwrite=True)
    with pytest.raises(CheckpointError, match="by another name"):
        convert(source, weights, to="gptq", overwrite=True)
    with halfbyte.open(source) as checkpoint:
        for path in (weights, tmp_path / "hard.safetensors", tmp_path / "soft.safetensors"):
            with pytest.raises(CheckpointError, match="is read"):
                halfbyte.save(path, checkpoint)
    assert weights.read_bytes() == before


@posix
def test_a_model_file_that_links_out_of_the_folder_is_not_copied(source, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("private")
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer.json").symlink_to(secret)
    for command in (
        lambda c: dequantize_checkpoint(c, tmp_path / "out"),
        lambda c: convert_checkpoint(c, tmp_path / "out", "gptq"),
    ):
        with (
            halfbyte.open(source) as checkpoint,
            pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*id_rsa, outside the checkpoint"),
        ):
            command(checkpoint)
        assert not (tmp_path / "out").exists()
    (source / "tokenizer.json").unlink()
    (source / "real.model").write_text("{}")
    (source / "tokenizer.json").symlink_to("real.model")  # inside: what the link names is copied
    convert(source, tmp_path / "out", to="gptq")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_the_hubs_store_is_inside(tmp_path):
    store = tmp_path / "models--org--name"
    (store / "blobs").mkdir(parents=True)
    (store / "snapshots" / "abc").mkdir(parents=True)
    (store / "blobs" / ("a" * 40)).write_text("{}")
    link = store / "snapshots" / "abc" / "tokenizer.json"
    link.symlink_to(Path("..", "..", "blobs", "a" * 40))
    assert list(carried_files(link.parent, {".json"}, "convert")) == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\0b", "a\nb", " a", "a ", "x" * 256, "c:d", 'a"b'])
def test_names_that_lead_elsewhere_are_no_names_of_outputs(name, tmp_path):
    with pytest.raises(CheckpointError, match="a plain name of at most 255 bytes"):
        check_name(name)


def test_a_lone_surrogate_is_escaped(tmp_path):
    write_json(tmp_path / "config.json", {"a": "\ud800", "ü": 1})
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"a": "\ud800", "ü": 1}
    write_json(tmp_path / "plain.json", {"ü": [1]})
    assert (tmp_path / "plain.json").read_bytes() == '{\n  "ü": [\n    1\n  ]\n}\n'.encode()


@posix
def test_new_files_are_new(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for act in (create, lambda p: write_file(p, b"x"), lambda p: copy_file(tmp_path / "target", p)):
        for name in ("link", "target"):
            with pytest.raises(FileExistsError):
                act(tmp_path / name)
    assert (tmp_path / "target").read_text() == "mine"


def test_a_journal_ends_where_a_line_is_damaged_missing_or_moved(tmp_path):
    journal = Journal(tmp_path / "j", tmp_path / "out")
    values = [{"a": 1}, {"b": [1, 2]}, {"c": "ü"}, {"d": None}]
    journal.start(values[:2])
    for value in values[2:]:
        journal.append(value)
    lines = journal.path.read_bytes().split(b"\n")[:-1]

    def read(changed: list[bytes]) -> int:
        journal.path.write_bytes(b"".join(x + b"\n" for x in changed))
        found = Journal(journal.path, tmp_path / "out").read()
        assert found == values[: len(found)]
        return len(found)

    assert read(lines) == 4
    assert read([*lines[:2], *lines[3:]]) == 2
    assert read([lines[0], lines[2], lines[1], lines[3]]) == 1
    assert read([*lines[:2], lines[1], *lines[2:]]) == 2
    assert read([*lines[:3], lines[3][:-2]]) == 3
    assert read([lines[0], b"[1]", *lines[2:]]) == 1
    assert read([lines[0], b"\xff\xfe", *lines[2:]]) == 1
    rng = np.random.default_rng(0)
    for _ in range(300):
        raw = bytearray(b"".join(x + b"\n" for x in lines))
        at = int(rng.integers(len(raw)))
        raw[at] ^= 1 << int(rng.integers(8))
        journal.path.write_bytes(raw)
        try:
            found = Journal(journal.path, tmp_path / "out").read()
        except NotOursError:
            assert at < len(b'{"halfbyte": "journal"')
        else:
            assert found == values[: raw[:at].count(b"\n")] or found == values


def test_a_lock_is_of_one_run_and_free_after_it(tmp_path):
    path = tmp_path / "lock"
    with Lock(path, tmp_path / "out"), pytest.raises(CheckpointError, match="this process is writing it"):
        Lock(path, tmp_path / "out")
    assert not path.exists()
    path.write_text("1")  # a run that was killed; its number may be another process's now
    with Lock(path, tmp_path / "out"):
        assert path.read_text() == str(os.getpid())


@posix
def test_a_file_system_without_exchange_replaces_in_two_steps(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", to="awq", workers=1)
    monkeypatch.setattr(rename, "_CANNOT", rename._CANNOT)
    monkeypatch.setattr("halfbyte.checkpoints.safetensors.sharded_writer.exchange", lambda a, b: False)
    convert(source, tmp_path / "out", to="gptq", workers=1, overwrite=True)
    assert identical(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@posix
def test_a_run_killed_between_the_two_renames_is_completed_by_the_next(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", to="awq", workers=1)
    monkeypatch.setattr("halfbyte.checkpoints.safetensors.sharded_writer.exchange", lambda a, b: False)
    plain = Path.rename

    def stop(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", to="gptq", workers=1, overwrite=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="an interrupted run was about to replace it; run the same command again"):
        halfbyte.open(tmp_path / "out")
    convert(source, tmp_path / "out", to="gptq", workers=1, overwrite=True)
    assert identical(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@posix
def test_what_comes_into_the_old_output_meanwhile_is_kept(source, tmp_path):
    convert(source, tmp_path / "out", to="awq", workers=1)

    def add(done: int, total: int, key: str) -> None:
        (tmp_path / "out" / "thesis.json").write_text("{}")

    with pytest.raises(CheckpointError, match=r"thesis\.json.*, which came while the result was written"):
        convert(source, tmp_path / "out", to="gptq", workers=1, overwrite=True, progress=add)
    assert (tmp_path / "out" / "thesis.json").exists()
    (tmp_path / "out" / "thesis.json").unlink()
    assert convert(source, tmp_path / "out", to="gptq", workers=1, overwrite=True).resumed > 0


@posix
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_exchange_says_where_it_cannot(tmp_path, monkeypatch, code):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "b" / "x").exists()
    with pytest.raises(OSError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "missing")
    monkeypatch.setattr("ctypes.get_errno", lambda: code)
    assert exchange(tmp_path / "a", tmp_path / "missing") is False


@posix
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("made", [True, False])
def test_an_exchange_that_is_made_and_reported_as_failed_is_made(tmp_path, monkeypatch, code, made):
    """Otherwise the new folder, taken for the old one, is deleted."""

    class System:
        def renamex_np(self, a: bytes, b: bytes, flags: int) -> int:
            if made:
                os.rename(a, tmp_path / "between"), os.rename(b, a), os.rename(tmp_path / "between", b)
            return -1

        def renameat2(self, to: int, a: bytes, at: int, b: bytes, flags: int) -> int:
            return self.renamex_np(a, b, flags)

    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: System())
    monkeypatch.setattr("ctypes.get_errno", lambda: code)
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir(), (a / "new").touch()
    if made or code == errno.EINVAL:
        assert exchange(a, b) == made
    else:
        with pytest.raises(OSError, match=r"Input/output error.*b'"):
            exchange(a, b)
    assert (b / "new").exists() == made


@posix
def test_refusals_of_the_file_system_have_a_sentence(source, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "file").write_text("")
    for out in ("file/out", "file/out.safetensors"):
        with pytest.raises(WriteError, match=r"cannot be written: (Not a directory|File exists)"):
            convert(source, closed / out, to="gptq")
    with pytest.raises(WriteError, match="cannot be written: File name too long"):
        convert(source, closed / f"{'x' * 250}.safetensors", to="gptq")
    with pytest.raises(CheckpointError, match="is a mount point"):
        convert(source, Path("/proc"), to="gptq", overwrite=True)


@posix
def test_a_text_is_replaced_in_one_step_through_no_link_and_what_a_killed_run_left_goes(tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "other"
    other.write_text("of somebody else")
    page.symlink_to(other)
    gone = 1 << 23  # above every system's largest process id
    left, running = tmp_path / f".page.html.{gone}.part", tmp_path / f".page.html.{os.getppid()}.part"
    left.write_text("half"), running.write_text("half")
    planted = tmp_path / f".page.html.{os.getpid()}.part"
    planted.symlink_to(other)
    with pytest.raises(CheckpointError, match=r"\[save\] .*page.html: cannot be written: File exists"):
        replace_text(page, "new")
    planted.unlink()
    replace_text(page, "new \ud800")
    assert page.read_text() == "new \\ud800"
    assert not page.is_symlink()
    assert other.read_text() == "of somebody else"
    assert sorted(p.name for p in tmp_path.iterdir()) == [running.name, "other", "page.html"]
    with pytest.raises(CheckpointError, match="Is a directory"):
        replace_text(tmp_path, "new")


@posix
def test_a_file_that_is_reopened_is_read_and_written(tmp_path):
    path, out = tmp_path / "part", tmp_path / "out"
    for checked in (False, True):
        with pytest.raises(FileNotFoundError):
            os.close(reopen(path, out, checked=checked))
        for create_missing in (True, False):
            with os.fdopen(reopen(path, out, create_missing, checked), "rb+") as f:
                assert f.read() == (b"" if create_missing else b"new")
                f.seek(0)
                f.write(b"new")
        path.unlink()


@posix
@pytest.mark.parametrize(("kind", "why"), [
    ("link", "is a link"), ("dangling link", "is a link"), ("hard link", "is a hard link"), ("pipe", "is a pipe"),
    ("folder", "is not a file"),
])  # fmt: skip
def test_what_is_not_a_file_of_this_program_is_not_reopened(kind, why, tmp_path):
    path, victim = tmp_path / "part", tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(kind, path, victim)
    with pytest.raises(NotOursError, match=why):
        os.close(reopen(path, tmp_path / "out", create_missing=True))
    if kind != "folder":  # which `open` refuses for writing
        with pytest.raises(NotOursError, match="is a link" if "link" in kind and kind != "hard link" else "was replaced"):
            os.close(reopen(path, tmp_path / "out", create_missing=True, checked=True))
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("work", [{}, {"file": "1.shard"}, {"names": ["model.safetensors"], "put": 1}, {"file": 1, "names": 2}])
def test_what_a_run_is_called_is_no_part_of_what_it_wrote(work, tmp_path):
    """A folder goes on after its finished shards whatever keys the identity of its run has."""
    x = np.arange(8, dtype=np.float32)

    def unit(folder: ResumableFolder, name: str) -> None:
        folder.add([(name, x.dtype, x.shape, [x])], x.nbytes, {"name": name})

    def interrupted_run(units: list[str]) -> list[dict]:
        folder = ResumableFolder(tmp_path / "out", work, 8, {"format": "pt"})
        found = list(folder.notes)
        for name in units:
            unit(folder, name)
            folder.end_shard()
        folder.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        return found

    assert interrupted_run(["a"]) == []
    assert interrupted_run([]) == [{"name": "a"}]
    with ResumableFolder(tmp_path / "out", work, 8, {"format": "pt"}) as folder:
        assert folder.notes == [{"name": "a"}]
        unit(folder, "b")
        assert folder.finish({"config.json": {}}, {}) == [
            "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    with halfbyte.open(tmp_path / "out") as checkpoint:
        assert all(np.array_equal(checkpoint[name], x) for name in ("a", "b"))
