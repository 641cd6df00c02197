"""A folder of halfbyte's own layout in a program that does not import halfbyte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte as hb
import torch
from support.tiny_models import ids, logits, write_tiny

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
{before}
assert "halfbyte" not in sys.modules
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
assert "halfbyte" in sys.modules
"""


def run(code, folder, *arguments):
    """A program in an environment where halfbyte is installed, as far as entry points go."""
    installed = folder / "site" / "halfbyte-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.backends"]\n')[2]
    (installed / "entry_points.txt").write_text("[torch.backends]\n" + text.partition("\n")[0].replace('"', ""))
    path = os.pathsep.join([str(folder / "site"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("before", ["", "import transformers.quantizers.auto"])
def test_from_pretrained_without_an_import(tmp_path, before):
    write_tiny(tmp_path / "in", "llama", "mlx")
    model = hb.load_model(tmp_path / "in")[0]
    model.save_pretrained(tmp_path / "saved")
    torch.save(ids(), tmp_path / "ids.pt")
    done = run(PROGRAM.format(before=before), tmp_path, tmp_path / "saved", tmp_path / "ids.pt", tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, ids()))
    assert "Unknown quantization type" not in done.stderr


def test_importing_halfbyte_after_torch_registers_its_own_classes(tmp_path):
    run(
        "import sys, torch, transformers.quantizers.auto as auto; assert 'halfbyte' in auto.AUTO_QUANTIZER_MAPPING\n"
        "import halfbyte.transformers as t\n"
        "assert auto.AUTO_QUANTIZER_MAPPING['halfbyte'] is t.HalfbyteQuantizer\n"
        "assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING['halfbyte'] is t.HalfbyteConfig",
        tmp_path,
    )


def test_a_program_without_transformers_imports_nothing_more(tmp_path):
    run("import sys, torch; assert 'transformers' not in sys.modules and 'halfbyte' not in sys.modules", tmp_path)
