"""GPTQModel's gpt-oss: gate and up are halves of alternating rows in the file, rows of gate and of
up to whoever reads them.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import QTensor
from halfbyte.checkpoints.safetensors.writer import SafetensorsWriter
from halfbyte.checkpoints.views.gptqmodel_gpt_oss import AlternatingRows, rows_by_name
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, ShapeError
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.concat import concat_rows, take_rows
from halfbyte.verification.compare import verify
from support.layout_tensors import integer_tensor
from support.memory_checkpoint import MemoryCheckpoint

EXPERTS, F, K = 2, 24, 64
STATED = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "checkpoint_format": "gptq_v2",
    "meta": {"quantizer": ["gptqmodel:7.5"]},
}
PATH = "model.layers.0.mlp.experts"


def whole(expert: int) -> QTensor:
    """gate_up_proj of an expert: 2F rows, gate's and up's in turns."""
    return integer_tensor(4, (2 * F, K), 32, seed=expert, zeros=(0, 15))


def biases(expert: int) -> np.ndarray:
    return np.arange(2 * F, dtype=np.float32) + 100 * expert


def folder(path, drop: str = "", **config) -> None:
    """What GPTQModel writes of gpt-oss: the halves of gate_up_proj under gate's and up's names."""
    path.mkdir()
    with SafetensorsWriter(path / "model.safetensors", {"format": "pt"}) as out:
        for e in range(EXPERTS):
            for name, rows in (("gate_proj", (0, F)), ("up_proj", (F, 2 * F))):
                tensors = LAYOUTS["gptq"].pack(whole(e).rows(*rows), STATED)
                for suffix, array in tensors.items():
                    if f"{e}.{name}" != drop:
                        out.add(f"{PATH}.{e}.{name}.{suffix}", array)
                out.add(f"{PATH}.{e}.{name}.bias", biases(e)[slice(*rows)])
        out.add("model.norm.weight", np.ones(K, np.float32))
    stated = {**STATED, **config}
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": stated}))


def test_rows_come_by_name_with_every_bit(tmp_path):
    folder(tmp_path / "in")
    with hb.open(tmp_path / "in") as stored:
        view = rows_by_name(stored)
        assert isinstance(view, AlternatingRows)
        assert view.keys() == stored.keys()
        for e in range(EXPERTS):
            for name, first in (("gate_proj", 0), ("up_proj", 1)):
                key = f"{PATH}.{e}.{name}"
                want = take_rows(whole(e), np.arange(first, 2 * F, 2))
                assert view.info(key).shape == view[key].shape == (F, K)
                for part in ("codes", "scales", "zeros"):
                    assert view[key].parts[part].tobytes() == want.parts[part].tobytes()
                assert view[f"{key}.bias"].tolist() == biases(e)[first::2].tolist()
                assert not np.array_equal(stored[key].parts["codes"], want.parts["codes"])
                view.fetch(key)
        assert view["model.norm.weight"].tolist() == [1.0] * K


def test_others_are_left_as_they_are(tmp_path):
    folder(tmp_path / "in", meta={"quantizer": ["another:1.0"]})
    with hb.open(tmp_path / "in") as stored:
        assert rows_by_name(stored) is stored


@pytest.mark.parametrize("to", ["compressed-tensors", "awq", "mlx", "halfbyte"])
def test_converted_rows_are_what_their_names_say(tmp_path, to):
    """The result names no writer of halves, so all readers take its names at their word; verify
    sees the same weights.
    """
    folder(tmp_path / "in")
    done = hb.convert(tmp_path / "in", tmp_path / "out", to=to)
    assert done.counts["lossy"] == done.counts["equal"] == 0
    with hb.open(tmp_path / "in") as a, hb.open(tmp_path / "out") as b:
        assert rows_by_name(b) is b
        stacked = to == "mlx"  # under mlx-lm's names
        gate = b[f"{PATH}.gate_proj"][1] if stacked else b[f"{PATH}.1.gate_proj"]
        assert np.array_equal(gate.dequantize("float64"), whole(1).dequantize("float64")[::2])
        bias = b[f"{PATH}.up_proj.bias"][1] if stacked else b[f"{PATH}.1.up_proj.bias"]
        assert bias.tolist() == biases(1)[1::2].tolist()
        assert verify(a, b).verdict == "identical"
        assert verify(b, a).verdict == "identical"


def test_dequantized_experts_are_the_alternating_columns_of_transformers(tmp_path):
    folder(tmp_path / "in")
    assert main(["dequantize", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    with hb.open(tmp_path / "out") as dense:
        joined = dense[f"{PATH}.gate_up_proj"]
        assert np.array_equal(joined[0], whole(0).dequantize("float32").T)
        assert np.array_equal(joined[1], whole(1).dequantize("float32").T)


def test_rows_rounded_again_are_what_their_names_say(tmp_path, capsys):
    """`quantize --from-packed` writes a configuration that names no writer of halves either."""
    folder(tmp_path / "in")
    options = ["--to", "halfbyte:int8:g32", "--method", "rtn", "--from-packed"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    with hb.open(tmp_path / "out") as b:
        for name, first in (("gate_proj", 0), ("up_proj", 1)):
            want = whole(1).dequantize("float64")[first::2]
            error = b[f"{PATH}.1.{name}"].dequantize("float64") - want
            assert np.abs(error).max() <= 0.01 * np.abs(want).max()
            assert b[f"{PATH}.1.{name}.bias"].tolist() == biases(1)[first::2].tolist()
    capsys.readouterr()
    options[1] = "gptq:int8:g32"
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "again"), *options]) != 0
    assert "it would read most rows wrongly" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["gptq", "gptq-v2"])
def test_gptq_again_is_refused_with_the_reason(tmp_path, to):
    folder(tmp_path / "in")
    with pytest.raises(CheckpointError, match="with rows sorted by name it would read most rows wrongly"):
        hb.convert(tmp_path / "in", tmp_path / "out", to=to)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_inspect_says_how_rows_lie(tmp_path):
    folder(tmp_path / "in")
    with hb.open(tmp_path / "in") as stored:
        (found,) = [f for f in stored.findings() if f.code == "alternating-rows"]
    assert found.severity == "note"
    assert "gate_proj and up_proj of gpt-oss are halves" in found.message


def test_a_half_alone_is_named(tmp_path):
    folder(tmp_path / "in", drop="1.up_proj")
    with pytest.raises(CheckpointError, match=r"1\.gate_proj is half of a matrix, and the other half, .*up_proj, is not there"):
        hb.convert(tmp_path / "in", tmp_path / "out", to="compressed-tensors")


CONFIG = {"model_type": "gpt_oss", "quantization_config": STATED}


def test_halves_that_do_not_make_one_matrix():
    """Two orders of inputs, or one half dense: what cannot be put together is said."""
    q = integer_tensor(4, (F, K), 32, zeros=(0, 15), act_order=True)
    other = integer_tensor(4, (F, K), 32, seed=9, zeros=(0, 15), act_order=True)
    keys = (f"{PATH}.0.gate_proj", f"{PATH}.0.up_proj")
    view = rows_by_name(MemoryCheckpoint(dict(zip(keys, (q, other), strict=True)), config=CONFIG))
    with pytest.raises(CheckpointError, match=r"halves of one matrix: .*each has a group index of its own"):
        view[keys[0]]
    same = rows_by_name(MemoryCheckpoint(dict(zip(keys, (q, q), strict=True)), config=CONFIG))
    assert np.array_equal(same[keys[1]].parts["group_index"], q.parts["group_index"])
    mixed = rows_by_name(MemoryCheckpoint(dict(zip(keys, (q, np.ones((F, K))), strict=True)), config=CONFIG))
    with pytest.raises(CheckpointError, match="halves of one matrix, and differ in shape or kind"):
        mixed[keys[1]]


def test_dense_halves_and_stacks_too():
    x = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    keys = (f"{PATH}.gate_proj.weight", f"{PATH}.up_proj.weight")
    view = rows_by_name(MemoryCheckpoint(dict(zip(keys, (x[:, :3], x[:, 3:]), strict=True)), config=CONFIG))
    assert np.array_equal(view[keys[0]], x[:, ::2])
    assert np.array_equal(view[keys[1]], x[:, 1::2])


def test_rows_taken_of_a_stack_and_of_what_has_no_rows():
    q = integer_tensor(4, (3, 8, 64), 32, zeros=(0, 15))
    index = np.array([5, 0, 3])
    assert np.array_equal(take_rows(q, index).dequantize("float64"), q.dequantize("float64")[:, index])
    tiles = integer_tensor(4, (32, 64), 32, rows=16)
    with pytest.raises(ShapeError, match="cannot be reordered: rows share its scales"):
        take_rows(tiles, index)
    assert concat_rows([q, q]).shape == (3, 16, 64)
