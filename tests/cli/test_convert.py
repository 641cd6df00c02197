"""`halfbyte convert`: plans, refusals, what is printed and written."""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest

import halfbyte
from halfbyte.cli import main
from halfbyte.layouts import written_layouts
from support.conversion_models import identical, write_model


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_plan_says_which_edge_and_why_and_writes_nothing(tmp_path, capsys):
    source = write_model(tmp_path / "in", "uint4:g64")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "modelopt", "--plan"]) == 1
    text = capsys.readouterr().out
    assert "model.layers.0.self_attn.q_proj" in text
    assert "lossy" in text
    assert "int4 holds -8 to 7" in text
    assert text.splitlines()[-1].startswith("would write ")
    assert text.splitlines()[-1].endswith(" to modelopt: 8 lossy, 4 copied")
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "awq", "--plan"]) == 0
    assert "8 exact, 4 copied" in capsys.readouterr().out


def test_a_refusal_gives_each_cause_and_a_command_to_copy(tmp_path, capsys):
    source = write_model(tmp_path / "in", "uint4:g64")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "modelopt:int4"]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    refused, following = got.err.splitlines()
    assert refused.startswith("halfbyte: [convert] 8 weights cannot go to modelopt:int4 exactly: ")
    assert "a relative RMS error of 0.0" in refused
    assert refused.endswith("Allow the error with --lossy (lossy=True)")
    assert sorted(os.listdir(tmp_path)) == ["in"]
    prefix = "halfbyte: next: halfbyte "
    assert following.startswith(prefix)
    assert main(shlex.split(following.removeprefix(prefix))) == 0
    assert "8 lossy, 4 copied" in capsys.readouterr().out


def test_the_command_to_copy_is_exact_where_the_layout_can_be(tmp_path, capsys):
    source = write_model(tmp_path / "in", "int8:g32")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "mlx:affine4:g64"]) == 2
    following = capsys.readouterr().err.splitlines()[-1].removeprefix("halfbyte: next: halfbyte ")
    assert shlex.split(following)[-2:] == ["--to", "mlx:affine8:g32"]
    assert main(shlex.split(following)) == 0
    assert "8 exact" in capsys.readouterr().out


def test_json_has_a_record_a_tensor_and_a_summary(tmp_path, capsys):
    source = write_model(tmp_path / "in", "nvfp4")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "compressed-tensors", "--json"]) == 0
    *tensors, summary = records(capsys.readouterr().out)
    assert len(tensors) == 12
    (one,) = [t for t in tensors if t["key"] == "model.layers.1.mlp.down_proj"]
    assert one["record"] == "tensor"
    assert one["kind"] == "equal"
    assert one["format"] == one["other_format"] == "nvfp4:g16"
    assert one["relative_rms"] is None
    assert summary["record"] == "converted"
    assert summary["to"] == "compressed-tensors"
    assert (summary["exact"], summary["equal"], summary["copied"]) == (0, 8, 4)
    assert "config.json" in summary["files"]
    assert summary["nbytes"] == sum(t["other_nbytes"] for t in tensors)


def test_lossy_is_done_when_asked_for_and_reported(tmp_path, capsys):
    source = write_model(tmp_path / "in", "uint4:g64")
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", "mlx:mxfp4", "--lossy", "--workers", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 lossy, 4 copied" in text
    assert text.splitlines()[-1] == (
        f"checked: 8 were rounded again, with the errors above; `halfbyte verify {source} {out}` compares every value, "
        "with no tolerance"
    )
    with halfbyte.open(out) as written:
        assert written.info("model.layers.0.mlp.down_proj").format.name == "mxfp4"


def test_scale_dtype_shards_and_force(tmp_path, capsys):
    source = write_model(tmp_path / "in", "uint4:g64")
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", "mlx", "--scale-dtype", "float32", "--max-shard-size", "40KB"]) == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    assert identical(source, out)
    assert main(["convert", str(source), str(out), "--to", "awq"]) == 2
    assert "exists; give another path, or --force" in capsys.readouterr().err
    assert main(["convert", str(source), str(out), "--to", "awq", "--force"]) == 0
    with halfbyte.open(out) as written:
        assert written.format == "awq"


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("gtpq", "'gtpq' is not a layout; nearest: gptq"),
        ("gguf", "a gguf target is one file"),
        ("onnx", "no writer for onnx"),
        ("zzz", "'zzz' is not a layout; checkpoints are written as gptq, awq-gemm, compressed-tensors"),
        ("mlx:zzz", "'zzz' is not a codec; mlx holds affine4, "),
    ],
)
def test_targets_that_cannot_be(tmp_path, capsys, to, text):
    source = write_model(tmp_path / "in", "int4:g128")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", to]) == 2
    assert text in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in"]


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_without_a_target_the_layouts_are_listed(tmp_path, capsys, command):
    """Each that is listed is written by `convert`; GGUF, which wants a whole model, in
    test_folder_to_gguf.py.
    """
    source = write_model(tmp_path / "in", "mxfp4")
    assert main([command, str(source), str(tmp_path / "out")]) == 2
    listed = re.search(r"no target; .*checkpoints are written as ([^;]+);", capsys.readouterr().err)[1].split(", ")
    assert listed == list(written_layouts())
    for name in set(listed) - {"gguf"}:
        assert main(["convert", str(source), str(tmp_path / name), "--to", name, "--lossy"]) == 0, name
        assert (tmp_path / name / "config.json").exists()


@pytest.mark.parametrize(
    ("codec", "to", "said"),
    [
        ("int4:g128", "compressed-tensors", "8 keep their values by rule"),
        ("int4:g64", "mlx", "8 by what was checked on these bits"),
    ],
)
def test_the_last_line_says_what_was_checked_and_how_to_check_again(tmp_path, capsys, codec, to, said):
    """The command that it names finds the two identical."""
    source, out = write_model(tmp_path / "in", codec), tmp_path / "an out"
    assert main(["convert", str(source), str(out), "--to", to]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"checked: {said}; `halfbyte verify {source} '{out}'` compares every value, with no tolerance"
    assert main(shlex.split(last.split("`")[1])[1:]) == 0


@pytest.mark.parametrize("command", ["convert", "quantize", "dequantize"])
def test_a_bad_shard_size_is_reported_under_the_command_that_was_run(tmp_path, capsys, command):
    source = write_model(tmp_path / "in", "int4:g128")
    target = [] if command == "dequantize" else ["--to", "mlx:affine4:g64"]
    assert main([command, str(source), str(tmp_path / "out"), *target, "--max-shard-size", "5XB"]) == 2
    assert f"[{command}] shard size '5XB'; allowed: a number with B" in capsys.readouterr().err
