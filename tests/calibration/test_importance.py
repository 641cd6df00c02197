"""`halfbyte imatrix`: the squares of a model's own inputs, whatever its experts and fused modules."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.calibration import collect_importance
from halfbyte.calibration.walk import token_sequences
from halfbyte.cli import main
from halfbyte.conversion.importance import read_importance
from support.calibration_models import drift, write_model, write_text


def inputs_of_linears(model, ids) -> dict[str, np.ndarray]:
    """Path of each linear module -> Σ x² of its inputs, by hooks on the model itself."""
    found: dict[str, np.ndarray] = {}

    def hook(name):
        def seen(module, args):
            rows = args[0].double().reshape(-1, args[0].shape[-1])
            found[name] = found.get(name, 0) + rows.square().sum(0).numpy()

        return seen

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        for sequence in ids:
            model(torch.tensor([sequence]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3"])
def test_sums_are_those_of_the_model(tmp_path, kind):
    model = write_model(tmp_path / "in", kind)
    text = write_text(tmp_path / "text.txt", 400)
    assert main(["imatrix", str(tmp_path / "in"), str(tmp_path / "i.gguf"), "--text", str(text), "--context", "32",
                 "--sequences", "5"]) == 0  # fmt: skip
    matrix = read_importance(tmp_path / "i.gguf")
    assert (matrix.chunks, matrix.chunk_size, matrix.datasets) == (5, 32, ("text.txt",))
    assert len(matrix.entries) == 2 * 7
    tokenizer = hb.load_model(tmp_path / "in")[1]
    want = inputs_of_linears(model, token_sequences(tokenizer, text, 32, 5))
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(2):
        for stem, path in names.items():
            entry = matrix.entries[f"blk.{layer}.{stem}"]
            np.testing.assert_allclose(entry.sums[0], want[f"model.layers.{layer}.{path}"], rtol=2e-5)
            assert entry.counts.tolist() == [5 * 32]


def test_experts_count_the_tokens_that_reached_them(tmp_path):
    write_model(tmp_path / "in", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    text = write_text(tmp_path / "text.txt", 400)
    with hb.open(tmp_path / "in") as checkpoint:
        matrix = collect_importance(checkpoint, text, context=32, sequences=3)
    for stem in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        entry = matrix.entries[f"blk.0.{stem}"]
        assert entry.sums.shape[0] == 4
        assert entry.counts.sum() == 2 * 3 * 32
        assert ((entry.sums.sum(1) > 0) == (entry.counts > 0)).all()
    gate, up = (matrix.entries[f"blk.0.{stem}"].sums for stem in ("ffn_gate_exps", "ffn_up_exps"))
    np.testing.assert_array_equal(gate, up)


def test_a_collected_matrix_moves_the_logits_less(tmp_path):
    dense = write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt", 3000)
    assert main(["imatrix", str(tmp_path / "in"), str(tmp_path / "i.gguf"), "--text", str(text), "--context", "64"]) == 0
    command = ["quantize", str(tmp_path / "in"), "--to", "halfbyte:int3:g64", "--method", "mse"]
    assert main([*command[:2], str(tmp_path / "plain"), *command[2:]]) == 0
    assert main([*command[:2], str(tmp_path / "weighted"), *command[2:], "--imatrix", str(tmp_path / "i.gguf")]) == 0
    assert drift(tmp_path / "weighted", dense) < 0.95 * drift(tmp_path / "plain", dense)


def test_outputs_are_checked_before_the_model_runs(tmp_path, capsys):
    write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt", 100)
    (tmp_path / "i.gguf").write_bytes(b"mine")
    command = ["imatrix", str(tmp_path / "in"), str(tmp_path / "i.gguf"), "--text", str(text), "--context", "32"]
    assert main(command) == 2
    assert (tmp_path / "i.gguf").read_bytes() == b"mine"
    assert main([*command[:2], str(tmp_path / "i.bin"), *command[3:]]) == 2
    assert "one file named *.gguf" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
