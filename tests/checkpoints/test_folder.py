"""Which files make up a checkpoint: indices, shards, links and what escapes, is missing, stray or
stale.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import CheckpointError
from support.safetensors_bytes import SHARDS, A, B, folder, mlx_weight, two_shards, under, write


def test_an_index_can_be_named(tmp_path: Path):
    path = two_shards(tmp_path)
    (path / "model.safetensors.index.json").rename(path / "other.safetensors.index.json")
    assert hb.open(path / "other.safetensors.index.json").keys() == (A, B)
    assert hb.open(path).keys() == (A, B)
    (path / "third.safetensors.index.json").write_text((path / "other.safetensors.index.json").read_text())
    with pytest.raises(CheckpointError, match=r"2 shard indices \(other.*third.*\); open one of them by its path"):
        hb.open(path)


def test_shards_without_an_index_are_read_all_or_refused(tmp_path: Path):
    path = two_shards(tmp_path / "a", index=None)
    assert hb.open(path).keys() == (A, B)
    (path / SHARDS[1]).unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 shards are there; the first missing is 'model-00002-of-00002\.safetensors'"
    ):
        hb.open(path)
    path = two_shards(tmp_path / "b", index=None)
    (path / SHARDS[1]).rename(path / "extra-00001-of-00009.safetensors")
    with pytest.raises(CheckpointError, match="several sharded sets and no index"):
        hb.open(path)
    path = two_shards(tmp_path / "c", index=None)
    for i, name in enumerate(SHARDS):
        (path / name).rename(path / f"part{i}.safetensors")
    assert set(hb.open(path).keys()) == {A, B}


@pytest.mark.parametrize(
    "name",
    ["../out.safetensors", "sub/../../out.safetensors", "/etc/passwd", "/tmp/out.safetensors", "..\\out.safetensors",
     "sub\\out.safetensors",
     "C:\\out.safetensors", "C:out.safetensors", "\\\\host\\share\\out.safetensors", "..", "", "a\0b.safetensors"],
)  # fmt: skip
def test_case_40_shard_names_that_escape_the_folder_are_refused(name: str, tmp_path: Path):
    write(tmp_path / "out.safetensors", {"secret": np.zeros(2, np.float32)})
    path = folder(
        tmp_path / "model", {"model.safetensors": {"w": np.zeros(2, np.float32)}}, {}, {"w": "model.safetensors", "secret": name}
    )
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: shard name .*do not trust this folder") as caught:
        hb.open(path)
    assert repr(name) in str(caught.value)


def test_case_40_links_that_leave_the_folder_are_refused_and_plain_subfolders_are_read(tmp_path: Path):
    out = write(tmp_path / "out.safetensors", {"w": np.zeros(2, np.float32)})
    path = folder(
        tmp_path / "model", {"sub/deep/a.safetensors": {"v": np.ones(2, np.float32)}}, {}, {"v": "sub/deep/a.safetensors"}
    )
    assert hb.open(path)["v"].tolist() == [1, 1]
    (path / "link.safetensors").symlink_to(out)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "link.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'link\.safetensors' is a link to .*out\.safetensors, outside"):
        hb.open(path)
    (path / "model.safetensors.index.json").unlink()
    (path / "link.safetensors").rename(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a link to"):
        hb.open(path)
    (path / "up").symlink_to(tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "up/out.safetensors"}}))
    with pytest.raises(CheckpointError, match="is a link to"):
        hb.open(path)
    # The file itself, a link inside the folder, and a folder that is itself a link are the user's
    # own choice.
    (path / "inner.safetensors").symlink_to(path / "sub/deep/a.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "inner.safetensors"}}))
    (tmp_path / "alias").symlink_to(path)
    assert hb.open(tmp_path / "alias")["v"].tolist() == [1, 1]
    assert hb.open(path / "model.safetensors")["w"].tolist() == [0, 0]


def test_case_40_the_hub_cache_keeps_its_links(tmp_path: Path):
    """A snapshot of the Hugging Face hub links to ../../blobs/<hash>, and to nothing else outside."""
    repo = tmp_path / "models--x--y"
    blob = "0123456789abcdef" * 4
    (repo / "blobs").mkdir(parents=True)
    write(repo / "blobs" / blob, {"w": np.ones(2, np.float32)})
    snapshot = repo / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    assert hb.open(snapshot)["w"].tolist() == [1, 1]
    (repo / "blobs" / "other").write_bytes((repo / "blobs" / blob).read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/other")
    with pytest.raises(CheckpointError, match="is a link to"):
        hb.open(snapshot)


def test_case_41_a_missing_shard_is_named(tmp_path: Path):
    path = two_shards(tmp_path)
    (path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"shard '{SHARDS[1]}' is missing; .* puts tensor '{B}\.weight' and 1 more in it"):
        hb.open(path)


def test_case_42_a_stray_file_is_left_out_with_a_warning(tmp_path: Path):
    path = two_shards(tmp_path)
    write(path / "model.safetensors", under(A, mlx_weight(seed=9)) | {"stray": np.zeros(1, np.float32)})
    checkpoint = hb.open(path)
    assert np.array_equal(checkpoint[A].parts["scales"], mlx_weight(seed=1)["scales"])
    assert "stray" not in checkpoint
    (finding,) = checkpoint.findings()
    assert (finding.severity, finding.code, finding.key) == ("warning", "unreferenced-file", "model.safetensors")


@pytest.mark.parametrize("where", [SHARDS[0], "absent-00009-of-00009.safetensors"])
def test_case_42_a_stale_index_is_refused_naming_the_tensor(where: str, tmp_path: Path):
    path = two_shards(tmp_path)
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    weight_map["old.weight"] = where
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"tensor 'old\.weight'") as caught:
        hb.open(path)
    assert where in str(caught.value)


def test_case_42_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path):
    path = two_shards(tmp_path)
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    weight_map[f"{B}.biases"] = SHARDS[1]
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=rf"{SHARDS[1]}: tensor '{B}\.biases' is missing; .* it is in '{SHARDS[0]}' instead"
    ):
        hb.open(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    twice = {"w": np.zeros(2, np.float32)}
    path = folder(tmp_path, dict.fromkeys(SHARDS, twice), {}, index=None)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]}: tensor 'w' is in '{SHARDS[0]}' too"):
        hb.open(path)


def test_tensors_that_the_index_does_not_name_are_read_with_a_warning(tmp_path: Path):
    path = folder(
        tmp_path, {"a.safetensors": {"w": np.zeros(2, np.float32), "v": np.ones(2, np.float32)}}, {}, {"w": "a.safetensors"}
    )
    checkpoint = hb.open(path)
    assert checkpoint["v"].tolist() == [1, 1]
    assert [(f.severity, f.code, f.key) for f in checkpoint.findings()] == [("warning", "unlisted-tensor", "v")]


@pytest.mark.parametrize(
    ("text", "says"),
    [("{}", "weight_map is null"), ('{"weight_map": {}}', "weight_map is empty"), ('{"weight_map": []}',
     "weight_map is an array"),
     ('{"weight_map": {"w": 3}}', "puts tensor 'w' in a number"), ("[]", "holds a JSON array"), ("{", "not JSON")],
)  # fmt: skip
def test_a_damaged_index_is_refused(text: str, says: str, tmp_path: Path):
    path = folder(tmp_path, {"a.safetensors": {"w": np.zeros(2, np.float32)}})
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        hb.open(path)
    assert "index.json" in str(caught.value)
    assert says in str(caught.value)
