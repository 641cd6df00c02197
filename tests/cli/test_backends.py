"""The `backends` command: everything there is, with a sentence for what cannot run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from halfbyte import backends
from halfbyte.cli import main
from support.conversion_models import write_model
from support.tiny_models import write_tiny
from support.tiny_tokenizer import write_tokenizer


def records(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["backends", "--json"]) == 0
    return {r["backend"]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}


def test_every_backend_is_listed_in_order_with_a_reason_or_a_description(capsys):
    found = records(capsys)
    assert tuple(found) == backends.names()
    for r in found.values():
        assert set(r) == {"record", "backend", "device", "available", "reason", "description"}
        assert (r["reason"] is None) == r["available"]
        assert r["available"] or len(str(r["reason"]).split()) > 3, "a reason is a sentence"
    assert found["reference"]["available"]


def test_the_table_says_the_same(capsys):
    found = records(capsys)
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    for name, r in found.items():
        row = next(line for line in out.splitlines() if line.startswith(name))
        assert str(r["reason"] or r["description"]) in row


LIGHT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from halfbyte.cli import main
sys.exit(max(main(words.split()) for words in sys.argv[2:]))
"""
"""Command lines in one process, where packages cannot be imported; the worst status."""


@pytest.mark.parametrize("missing", ["triton", "torch,triton", "torch,triton,transformers,mlx,tokenizers,onnx,huggingface_hub"])
def test_a_light_installation_does_what_needs_no_torch(tmp_path, missing):
    """As after `pip install halfbyte`; what is missing is said by the backend that needs it."""
    source = write_model(tmp_path / "in", "int4:g128")
    commands = [
        "backends", "doctor", "selftest --format int4:g128 --shape 0", "selftest --device cpu --format mxfp4 --shape 0",
        f"inspect {source} --data", f"convert {source} {tmp_path}/mlx --to mlx", f"verify {source} {tmp_path}/mlx",
        f"dequantize {source} {tmp_path}/dense", f"quantize {tmp_path}/dense {tmp_path}/q --to gptq:int4:g128",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", LIGHT, missing, *commands], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "triton is not installed; pip install 'halfbyte[cuda]'" in done.stdout
    assert "no known problem" in done.stdout
    refused = subprocess.run(
        [sys.executable, "-c", LIGHT, missing, "selftest --device cuda"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "nothing computes on 'cuda' here: cuda: triton is not installed" in refused.stderr


def test_models_run_and_are_planned_with_torch_and_without_triton(tmp_path):
    """As after `pip install 'halfbyte[transformers]'` where PyTorch brings no Triton."""
    dense, experts = tmp_path / "llama", tmp_path / "mixtral"
    write_tiny(dense, "llama", "gptq")
    write_tiny(experts, "mixtral", "gptq")
    write_tokenizer(dense)
    (tmp_path / "text.txt").write_text("a b c d " * 40, encoding="utf-8")
    commands = [
        f"plan {dense}", f"plan {experts}", f"plan {dense} --device-memory 24GB", f"plan {experts} --device cuda --dtype float32",
        f"generate {dense} -p a --max-tokens 2 --engine transformers",
        f"eval {dense} --text {tmp_path}/text.txt --context 16 --baseline {dense}",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", LIGHT, "triton", *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total, at most") == 4
    refused = subprocess.run(
        [sys.executable, "-c", LIGHT, "triton", f"plan {experts} --device-memory 24GB --context 4096"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "halfbyte: [plan] a package is missing: triton, by whose kernels' tiles experts on a GPU are planned; "
        "pip install 'halfbyte[cuda]'\n"
    )


def test_one_broken_backend_does_not_hide_the_others(capsys, monkeypatch):
    original = backends.backend_named

    def broken(name: str) -> backends.Backend:
        if name == "cuda":
            raise OSError("libcuda.so.1: file too short")
        return original(name)

    monkeypatch.setattr(backends, "backend_named", broken)
    found = records(capsys)
    assert found["cuda"]["reason"] == "it could not be loaded: OSError: libcuda.so.1: file too short"
    assert found["reference"]["available"]
