"""Paths that are no checkpoint: pipes, links in circles, names that lead nowhere, files of another
kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.errors import CheckpointError
from support.gguf_writer import F32, GGUF, Tensor

WEIGHT = {"a.weight": np.ones((2, 2), np.float32)}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "quantize_config.json", "m.gguf", "m-00002-of-00002.gguf"],
)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path):
    if name == "m-00002-of-00002.gguf":
        pairs = [("general.architecture", "string", "llama"), ("split.count", "uint16", 2), ("split.no", "uint16", 0)]
        first = GGUF(pairs=pairs, tensors=[Tensor("a", (4,), F32, bytes(16))])
        (tmp_path / "m-00001-of-00002.gguf").write_bytes(first.bytes())
    elif not name.endswith((".gguf", "model.safetensors")):
        save_file(WEIGHT, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / name)
    if name == "quantize_config.json":  # not a file, so it is no configuration
        assert list(hb.open(tmp_path)) == ["a.weight"]
        return
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: it is a pipe, a device or a socket"):
        hb.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"allowed: a folder or a regular file"):
        hb.open(tmp_path / name)


def test_links_that_go_round_are_refused(tmp_path: Path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*(is a broken link|Too many levels)"):
        hb.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read: Too many levels"):
        hb.open(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("path", "says"),
    [("", r"the path is empty"), ("x" * 5000, r"cannot be read: File name too long"),
     ("models/gemma/3", r"no such file or folder here, and it is no name on the hub"), ("a\0b", "no such file")],
    ids=["empty", "long", "deep", "nul"],
)  # fmt: skip
def test_paths_that_lead_nowhere(path: str, says: str):
    with pytest.raises(CheckpointError, match=says):
        hb.open(path)


def test_a_gguf_by_name_is_told_as_one(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError, match=r"m\.gguf: starts with b'xxxx'; a GGUF file starts with b'GGUF'"):
        hb.open(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"m\.gguf: the file is empty"):
        hb.open(tmp_path / "m.gguf")


def test_json_by_itself_is_told_as_such(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"config\.json is JSON; open the folder that it describes"):
        hb.open(tmp_path / "config.json")
    # A safetensors header whose length begins with the byte of a brace is none.
    metadata = {"x": "y" * 200}
    for _ in range(256):
        save_file(WEIGHT, tmp_path / "w.safetensors", metadata)
        if (tmp_path / "w.safetensors").read_bytes()[:1] == b"{":
            break
        metadata["x"] += "y"
    assert list(hb.open(tmp_path / "w.safetensors")) == ["a.weight"]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("change", ["truncated", "replaced", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_no_signal(kind: str, change: str, tmp_path: Path):
    path = tmp_path / f"m.{kind}"
    values = np.arange(1 << 16, dtype=np.float32)
    if kind == "safetensors":
        save_file({"a.weight": values, "b.weight": values}, path)
    else:
        pair = [Tensor(n, (1 << 16,), F32, values.tobytes(), offset=i << 18) for i, n in enumerate(("a.weight", "b.weight"))]
        path.write_bytes(GGUF(pairs=[("general.architecture", "string", "llama")], tensors=pair).bytes())
    with hb.open(path) as checkpoint:
        first = checkpoint["a.weight"]
        if change == "truncated":
            os.truncate(path, 4096)
        elif change == "replaced":
            (tmp_path / "new").write_bytes(path.read_bytes())
            os.utime(tmp_path / "new", (1, 1))
            (tmp_path / "new").replace(path)
        else:
            with path.open("r+b") as f:
                f.seek(-4, 2)
                f.write(b"\0\0\0\1")
            os.utime(path, (1, 1))
        if change != "replaced":  # what is open keeps the file that was replaced
            with pytest.raises(CheckpointError, match=rf"m\.{kind}: the file was (truncated|changed)"):
                checkpoint["b.weight"]
        assert np.array_equal(first, values)  # what was read stays


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "\\ud800", "a\\u001bb.safetensors", "d/" * 2100 + "x.safetensors"])
def test_a_shard_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a.weight": "{name}"}}}}')
    with pytest.raises(CheckpointError, match="a name of at most 255 bytes"):
        hb.open(tmp_path)


def test_an_onnx_file_beyond_protobuf_is_refused_unread(tmp_path: Path):
    pytest.importorskip("onnx")
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"model.onnx: cannot be read: it has more than 2,147,483,647 bytes"):
        hb.open(tmp_path / "model.onnx")
