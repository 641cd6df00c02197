"""The `verify` command on real files: exit status, table, JSON Lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from halfbyte.checkpoints import save
from halfbyte.cli import main
from support.memory_checkpoint import packed


@pytest.fixture
def pair(golden: Path, tmp_path: Path) -> tuple[str, str]:
    """A real checkpoint and its dense counterpart."""
    a, b = golden / "mlx" / "ckpt_mxfp4", tmp_path / "dense"
    assert main(["dequantize", str(a), str(b)]) == 0
    return str(a), str(b)


def test_identical(pair, capsys):
    capsys.readouterr()
    assert main(["verify", *pair]) == 0
    assert capsys.readouterr().out == "identical: 12 identical\n"


def test_every_tensor_on_request(pair, capsys):
    capsys.readouterr()
    assert main(["verify", *pair, "--all"]) == 0
    out = capsys.readouterr().out
    assert out.count("identical") == 12 + 2
    assert "model.layers.0.mlp.down_proj" in out


@pytest.mark.parametrize("name", ["mlx/ckpt_affine_g64_b4", "compressed-tensors/ckpt_w4a16", "modelopt/ckpt_mxfp8"])
def test_a_map_and_producer_arithmetic_meet_the_producers_reference(name, golden, capsys):
    a = golden / name
    rule = ["--map", "^=ref::", "--arithmetic", "producer"]
    assert main(["verify", str(a), str(a / "reference.safetensors"), *rule]) == 0
    assert "identical: 12 identical" in capsys.readouterr().out


def test_one_damaged_byte_is_found_and_placed(pair, capsys):
    path = Path(pair[1]) / "model.safetensors"
    tensors = load_file(path)
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key] = tensors[key].copy()
    tensors[key].view(np.uint8)[17, 22] ^= 1
    save_file(tensors, path, {"format": "pt"})
    capsys.readouterr()
    assert main(["verify", *pair]) == 1
    out = capsys.readouterr().out
    assert "worst value: model.layers.0.mlp.up_proj, row 17, input 11" in out
    assert out.endswith("different: 1 different, 11 identical\n")
    assert main(["verify", *pair, "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["record"] for r in lines] == ["tensor"] * 12 + ["summary"]
    worst = lines[0]
    assert (worst["key"], worst["status"], worst["differing"], worst["worst"]) == (
        "model.layers.0.mlp.up_proj",
        "different",
        1,
        [17, 11],
    )
    assert lines[-1] == {
        "record": "summary", "verdict": "different", "unaccounted": 0, "unpaired": 0, "missing": 0, "extra": 0,
        "shape": 0, "different": 1,
        "close": 0, "auxiliary": 0, "identical": 11,
    }  # fmt: skip


def test_missing_tensors_and_shapes_are_rows(pair, capsys):
    path = Path(pair[1]) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    save_file(tensors, path, {"format": "pt"})
    capsys.readouterr()
    assert main(["verify", *pair]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("model.", "lm_"))]
    rows = {(words[0], words[1]) for words in lines if words[1] != "identical"}
    # The dense side has lost what its config.json requires, which is a row of its own.
    assert rows >= {
        ("model.norm", "unaccounted"),
        ("lm_head", "unaccounted"),
        ("model.norm.weight", "missing"),
        ("lm_head", "shape"),
    }


def test_a_tolerance(pair, tmp_path, capsys):
    path = Path(pair[1]) / "model.safetensors"
    tensors = {k: (v.astype(np.float32) * 1.01).astype(v.dtype) for k, v in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert main(["verify", *pair]) == 1
    assert main(["verify", *pair, "--rtol", "0.05"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("close: ")


def test_non_finite_measures_are_json_strings(tmp_path, capsys):
    save(tmp_path / "a.safetensors", {"w": packed("mxfp4", (4, 32))})
    save_file({"w.weight": np.full((4, 32), np.nan, np.float32)}, tmp_path / "b.safetensors")
    assert main(["verify", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--json"]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (record["relative_rms"], record["max_abs_error"], record["differing"]) == ("inf", "inf", 128)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--rtol", "-1"), "[verify] --rtol -1.0; allowed: 0 or a positive number"),
        (("--rtol", "inf"), "[verify] --rtol inf; allowed"),
        (("--rtol", "nan"), "[verify] --rtol nan; allowed"),
        (("--arithmetic", "fast"), "[verify] --arithmetic fast; allowed: exact, producer"),
        (("--dtype", "fp5"), "'fp5' is not a dtype to decode to"),
        (("--map", "no-such-file"), "[map] 'no-such-file' is neither a rule old=new nor a readable file"),
    ],
)
def test_bad_options_are_status_2(option, message, golden, capsys):
    a = str(golden / "mlx" / "ckpt_mxfp4")
    assert main(["verify", a, a, *option]) == 2
    assert message in capsys.readouterr().err


def test_sharded_and_single_files_are_the_same_weights(golden, tmp_path):
    a = golden / "mlx" / "ckpt_mxfp4"
    dense = tmp_path / "dense"
    assert main(["dequantize", str(a), str(dense), "--max-shard-size", "20kB"]) == 0
    assert len(list(dense.glob("*.safetensors"))) > 2
    assert main(["verify", str(a), str(dense)]) == 0
    moved = tmp_path / "moved"
    shutil.move(dense, moved)
    assert main(["verify", str(moved), str(a)]) == 0
