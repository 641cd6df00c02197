"""Calibrated rounding of every GGUF architecture: to a folder, of its folder to a GGUF, and to a
GGUF again. Each weight is near its own values, whatever the file has in another order or form; or
the command says which method serves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.calibration import collect_importance
from halfbyte.cli import main
from halfbyte.conversion.importance import write_importance
from halfbyte.verification.compare import verify
from support.gguf_families import FAMILIES, architecture, family_model, write_family
from torch import nn

BOUND = 0.3
"""Largest relative RMS of a weight rounded to 8 bits under a scale of 32 inputs: 0.005, up to 25
times as much where GPTQ makes up for the errors of others on few tokens. Rows or inputs in another
order make it 1 or more.
"""
ENTANGLED = {"gemma3n", "glm-dsa", "hy_v4"}
"""Models whose layers take more from those before them than hidden states."""


@pytest.fixture
def text(tmp_path, monkeypatch):
    ids = np.random.default_rng(0).integers(3, 48, (8, 24)).tolist()
    for module in ("walk", "importance"):
        monkeypatch.setattr(f"halfbyte.calibration.{module}.token_sequences", lambda *a: ids)
    (tmp_path / "text.txt").write_text("")
    return str(tmp_path / "text.txt")


def walked(name: str) -> bool:
    """Whether calibration walks the model: one list of layers of a causal language model."""
    lists = [n for n, m in family_model(name).named_modules() if isinstance(m, nn.ModuleList)]
    lists = [n for n in lists if n.rpartition(".")[2] == "layers"]
    return architecture(name).task == "text" and len(lists) == 1 and name not in ENTANGLED


def check(source: Path, result: Path) -> None:
    """Every weight of the result is that of the source, rounded to 8 bits or kept."""
    with halfbyte.open(source) as a, halfbyte.open(result) as b:
        report = verify(a, b)
        assert any(info.quantized for info in b.infos())
    worst = report.comparisons[0]
    assert worst.difference is not None, worst
    assert worst.difference.relative_rms < BOUND, worst


def quantize(source: Path, out: Path, to: str, text: str, method: str = "gptq") -> int:
    return main(["quantize", str(source), str(out), "--to", to, "--method", method, "--calibration", text])


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_file_to_a_folder(tmp_path, capsys, text, name):
    source = write_family(tmp_path / "model.gguf", name, family_model(name))
    status = quantize(source, tmp_path / "out", "mlx:affine8:g32", text)
    if walked(name):
        assert status == 0, capsys.readouterr().err
        check(source, tmp_path / "out")
    else:
        assert (status, (tmp_path / "out").exists()) == (2, False)
        assert "calibration walks" in (said := " ".join(capsys.readouterr().err.split()))
        assert said.endswith("use --method mse or rtn"), said


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_folder_to_a_file(tmp_path, capsys, text, name):
    model = write_family(tmp_path / "model.gguf", name, family_model(name))
    folder, out = tmp_path / "folder", tmp_path / "out.gguf"
    assert main(["dequantize", str(model), str(folder), "--dtype", "float32"]) == 0
    status = quantize(folder, out, "gguf:q8_0", text)
    if walked(name):
        assert status == 0, capsys.readouterr().err
        check(folder, out)
    else:
        assert (status, out.exists()) == (2, False)
        said = " ".join(capsys.readouterr().err.split())
        assert said.endswith("use --method mse or rtn"), said


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_file_to_a_file(tmp_path, capsys, text, name):
    source, out = write_family(tmp_path / "model.gguf", name, family_model(name)), tmp_path / "out.gguf"
    if quantize(source, out, "gguf:q8_0", text) == 0:
        check(source, out)
        return
    assert not out.exists()
    assert "use --method mse or rtn" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", [name for name in FAMILIES if architecture(name).columns])
def test_an_importance_matrix_has_the_inputs_of_the_file(tmp_path, text, name):
    """Where a folder has a matrix's inputs in another order, its matrix of importances is that of
    the file, and each rounds the folder and the file alike.
    """
    model = write_family(tmp_path / "model.gguf", name, family_model(name))
    folder = tmp_path / "folder"
    assert main(["dequantize", str(model), str(folder), "--dtype", "float32"]) == 0
    with halfbyte.open(folder) as checkpoint:
        matrix = collect_importance(checkpoint, text)
    rng = np.random.default_rng(0)
    for entry in matrix.entries.values():
        entry.sums[:] = rng.uniform(0, 1, entry.sums.shape) ** 8
    imatrix = write_importance(tmp_path / "imatrix.gguf", matrix)
    outs = []
    for i, (source, to) in enumerate([(model, "halfbyte:int3:g16"), (folder, "halfbyte:int3:g16")]):
        outs.append(tmp_path / str(i))
        command = ["quantize", str(source), str(outs[-1]), "--to", to, "--method", "mse", "--imatrix", str(imatrix)]
        assert main(command) == 0
    with halfbyte.open(outs[0]) as a, halfbyte.open(outs[1]) as b:
        key = next(key for key in a if key.endswith("out_proj"))
        assert np.array_equal(a[key].dequantize("float32"), b[key].dequantize("float32"))
