"""docs/adding-a-layout.md is true: its example, run as it stands, gives a layout that everything
else finds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import halfbyte as hb
from halfbyte.checkpoints.quant_config import read_config
from halfbyte.cli import main
from halfbyte.conversion.targets import goal_named
from halfbyte.errors import FormatError, LayoutError
from halfbyte.layouts import LAYOUTS, Layout
from halfbyte.layouts.claims import CONSUMED, HARMLESS, UNKNOWN, Claim
from halfbyte.tensor.quantize import quantize

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-layout.md"
NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """The example's layout in the registry, for one test."""
    code = next(b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S) if "class Pairs(" in b)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    monkeypatch.setitem(LAYOUTS, "pairs", scope["Pairs"]())
    return LAYOUTS["pairs"]


def foreign(n: int = 6, k: int = 64, group: int = 32, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(tensors by the page's table, the values they stand for), written without the layout."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (n, k))
    steps = rng.standard_normal((n, k // group)).astype(np.float16)
    stored = np.zeros((n // 2, k), np.uint8)
    for i in range(n // 2):
        for j in range(k):
            stored[i, j] = codes[2 * i, j] + 16 * codes[2 * i + 1, j]
    return {"pairs": stored, "steps": steps}, (codes - 8) * np.repeat(steps.astype(np.float64), group, axis=1)


def folder(path: Path, **config: Any) -> np.ndarray:
    """A checkpoint of one packed and one dense module at `path`; the packed one's values."""
    tensors, values = foreign()
    path.mkdir(exist_ok=True)
    dense = {"model.layers.0.mlp.gate.weight": np.ones((4, 64), np.float16)}
    save_file({f"{NAME}.{s}": t for s, t in tensors.items()} | dense, path / "model.safetensors")
    described = {"quant_method": "pairs", "group_size": 32, "skip": ["mlp.gate"], **config}
    (path / "config.json").write_text(json.dumps({"quantization_config": described}))
    return values


def test_its_values_are_those_of_the_table(pairs):
    tensors, values = foreign()
    q = pairs.unpack(tensors, {"group_size": 32})
    np.testing.assert_array_equal(q.dequantize("float64"), values)
    back = pairs.pack(q, pairs.config(q))
    assert {s: a.tobytes() for s, a in back.items()} == {s: a.tobytes() for s, a in tensors.items()}


def test_open_finds_layout_and_config_reader(pairs, tmp_path):
    values = folder(tmp_path / "in", author="nobody")
    with hb.open(tmp_path / "in") as checkpoint:
        assert checkpoint.format == "pairs"
        assert checkpoint.info(NAME).layout == "pairs"
        np.testing.assert_array_equal(checkpoint[NAME].dequantize("float64"), values)
        assert checkpoint.findings() == []


def test_it_says_what_it_consumes(pairs):
    assert pairs.consumes(["pairs", "steps", "bias"]) == (Claim("pairs", "codes"), Claim("steps", "scales"))
    reader = read_config({"quant_method": "pairs", "group_size": 32, "skip": [], "author": "x", "twist": 3}, "config.json")
    uses = {use.path: use.use for use in reader.key_uses()}
    assert uses == {
        "quant_method": CONSUMED,
        "group_size": CONSUMED,
        "skip": CONSUMED,
        "author": HARMLESS,
        "twist": UNKNOWN,
    }


def test_it_is_a_target_of_conversions(pairs, tmp_path, capsys):
    q = quantize(np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32), "int4:g32")
    hb.save(tmp_path / "w.safetensors", {NAME: q})
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "w.safetensors"), str(out), "--to", "pairs"]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "pairs", "group_size": 32, "skip": []}
    (file,) = out.glob("*.safetensors")
    stored = load_file(file)
    np.testing.assert_array_equal(stored[f"{NAME}.steps"], q.parts["scales"])
    with hb.open(out) as checkpoint:
        np.testing.assert_array_equal(checkpoint[NAME].dequantize("float64"), q.dequantize("float64"))
    assert main(["verify", str(tmp_path / "w.safetensors"), str(out)]) == 0
    capsys.readouterr()
    with pytest.raises(FormatError, match=r"pairs holds no mxfp4; it holds int4"):
        goal_named("pairs:mxfp4")


def test_what_it_cannot_hold_is_said(pairs):
    odd = quantize(np.ones((3, 64), np.float32), "int4:g32")
    with pytest.raises(LayoutError, match=r"\[pairs\] int4:g32 .* cannot be written: 3 outputs by 64 inputs are not pairs"):
        pairs.pack(odd, {})
    tensors, _ = foreign()
    with pytest.raises(LayoutError, match=r"\[pairs\] m\.steps has shape \[6, 2\]; wanted \[6, 1\] for groups of 64"):
        pairs.unpack(tensors, {"group_size": 64}, "m")


def test_it_is_gone_afterwards():
    with pytest.raises(LayoutError, match="'pairs' is not a layout"):
        goal_named("pairs")
