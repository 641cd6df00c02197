"""The driver that runs every command on what tests of published cases open: it records what was
opened, finds nothing on a right checkpoint, and notices values that a command changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("transformers")

import halfbyte as hb
from support import every_command
from support.safetensors_bytes import folder

NAME = "model.layers.0.mlp.down_proj"


def static_fp8(path: Path) -> Path:
    codes = np.random.default_rng(0).integers(0, 0x7F, (64, 128)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": np.float32([0.01]), f"{NAME}.activation_scale": np.float32([2])}
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    return folder(path, {"model.safetensors": tensors}, config)


def test_a_right_checkpoint_runs_in_every_command_and_changed_values_are_noticed(tmp_path, monkeypatch):
    path = static_fp8(tmp_path / "in")
    with every_command.recorded(tmp_path / "copies", 2) as opened, hb.open(path), hb.open(path):
        pass
    assert opened == [tmp_path / "copies" / "0" / "m"], "each state once"
    found = every_command.completed(opened[0], tmp_path / "whole")
    assert found is not None
    assert every_command.model_faults(*found, tmp_path / "work") == []
    right = every_command.contents

    def doubled(p: Path) -> Any:
        """As `open` would give if the commands wrote half of it."""
        values = right(p)
        return {k: 2 * v for k, v in values.items()} if p == opened[0] else values

    again = tmp_path / "again"
    again.mkdir()
    two = {name: line for name, line in every_command.commands(opened[0], again).items() if name in ("dequantize", "convert")}
    monkeypatch.setattr(every_command, "commands", lambda path, work: two)
    monkeypatch.setattr(every_command, "contents", doubled)
    wrong = every_command.faults(opened[0], again)
    assert [fault.partition("m: ")[2] for fault in wrong] == ["dense has other values", "own has other values"]


def test_what_open_refuses_every_command_refuses_by_name(tmp_path):
    path = static_fp8(tmp_path / "in")
    (path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "turn_count": 3}}'
    )
    assert "turn_count" in str(every_command.contents(path))
    assert every_command.faults(path, tmp_path / "work") == []
