"""Formats that are recognised and not read are refused by name in every command, by their config
and by their tensors alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.cli import main
from halfbyte.errors import UnsupportedError
from support.safetensors_bytes import folder, under

NAME = "model.layers.0.mlp.down_proj"
I16, I32, F16 = np.int16, np.int32, np.float16
FORMATS = {
    "EXL2": ("exl2", {"q_weight": (I32, (8, 64)), "q_scale": (I32, (4, 8)), "q_scale_max": (F16, (4,)), "q_groups": (I16, (8,)),
                      "q_invperm": (I32, (64,))}),
    "AQLM": ("aqlm", {"codes": (I16, (64, 8, 1)), "codebooks": (F16, (1, 256, 1, 8)), "scales": (F16, (64, 1, 1, 1))}),
    "QuIP#": ("quip", {"Qidxs": (I16, (64, 8)), "SU": (F16, (64,)), "SV": (F16, (64,)), "Wscale": (np.float32, ())}),
    "SpQR": ("spqr", {"dense_weights": (np.int64, (64, 4)), "row_offsets": (I32, (65,)), "col_vals": (I32, (12,))}),
    "VPTQ": ("vptq", {"indices": (I32, (1, 64, 4)), "centroids.weight": (F16, (1, 256, 8))}),
    "HIGGS": ("higgs", {"weight": (I16, (32, 64)), "scales": (F16, (64, 1)), "tables": (F16, (16,)),
                        "tables2": (np.float32, (16, 16, 1))}),
}  # fmt: skip
COMMANDS = {
    "inspect": (), "dequantize": ("OUT",), "convert": ("OUT", "--to", "halfbyte"), "verify": ("SELF",),
    "quantize": ("OUT", "--to", "mlx:affine4:g32", "--from-packed"), "plan": (), "eval": ("--text", "TEXT"),
    "generate": ("--prompt", "hello"),
}  # fmt: skip


@pytest.mark.parametrize("stated", [True, False], ids=["config", "tensors"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_command_names_the_format(name: str, stated: bool, tmp_path: Path, capsys):
    method, tensors = FORMATS[name]
    model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    config = model | ({"quantization_config": {"quant_method": method, "bits": 4}} if stated else {})
    stored = under(NAME, {s: np.zeros(shape, dtype) for s, (dtype, shape) in tensors.items()})
    path = str(folder(tmp_path / "in", {"model.safetensors": stored}, config))
    (tmp_path / "text.txt").write_text("hello")
    words = {"OUT": str(tmp_path / "out"), "SELF": path, "TEXT": str(tmp_path / "text.txt")}
    with pytest.raises(UnsupportedError, match=name):
        hb.open(path)
    for command, rest in COMMANDS.items():
        capsys.readouterr()
        assert main([command, path, *(words.get(word, word) for word in rest)]) != 0, command
        said = "".join(capsys.readouterr())
        assert name in said, f"{command}: {said[-300:]}"
        assert "recognised and not read" in said, command
        assert not (tmp_path / "out").exists()
    load = pytest.importorskip("transformers") and hb.load_model
    with pytest.raises(UnsupportedError, match=name):
        load(path)


def test_the_table_is_json(tmp_path: Path, capsys):
    """`--json` names the format, too."""
    method, tensors = FORMATS["AQLM"]
    stored = under(NAME, {s: np.zeros(shape, dtype) for s, (dtype, shape) in tensors.items()})
    path = folder(tmp_path / "in", {"model.safetensors": stored}, {"quantization_config": {"quant_method": method}})
    assert main(["inspect", str(path), "--json"]) != 0
    said = capsys.readouterr()
    assert "AQLM" in said.out + said.err
    for line in said.out.splitlines():
        json.loads(line)
