"""One table reads the names of experts everywhere: what loads, writes, compares and serves a
checkpoint whose stacks are vLLM's `w13` and `w2` sees the model's own projections.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.checkpoints import expert_names
from halfbyte.checkpoints.views.mlx_experts import MLXExperts
from halfbyte.cli import main
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.expert_formats import check_experts
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import FormatError
from support.memory_checkpoint import MemoryCheckpoint

PATH = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        (f"{PATH}.3.gate_proj.weight", (PATH, "gate_proj", 3, "weight")),
        ("model.layers.0.block_sparse_moe.experts.12.w2", ("model.layers.0.block_sparse_moe.experts", "down_proj", 12, "")),
        (f"{PATH}.0.w1.bias", (PATH, "gate_proj", 0, "bias")),
        (f"{PATH}.0.w3", (PATH, "up_proj", 0, "")),
        (f"{PATH}.gate_up_proj", (PATH, "gate_up_proj", None, "")),
        (f"{PATH}.gate_up_proj_bias", (PATH, "gate_up_proj", None, "bias")),
        ("model.layers.0.mlp.switch_mlp.up_proj.weight", (PATH, "up_proj", None, "weight")),
        ("model.layers.0.mlp.switch_mlp.fc1", (PATH, "up_proj", None, "")),
        ("model.layers.0.mlp.switch_mlp.fc2.weight", (PATH, "down_proj", None, "weight")),
        (f"{PATH}.w13_weight", (PATH, "gate_up_proj", None, "weight")),
        (f"{PATH}.w2", (PATH, "down_proj", None, "")),
        (f"{PATH}.w2_bias", (PATH, "down_proj", None, "bias")),
    ],
)
def test_names_are_read(name, want):
    found = expert_names.parse(name)
    assert found is not None
    assert (found.path, found.projection, found.expert, found.leaf) == want
    assert name.startswith(found.module)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.gate_proj", f"{PATH}.router", f"{PATH}.3.gate_proj_bias", f"{PATH}.w1", f"{PATH}.3", f"{PATH}.q_proj",
     "blk.0.ffn_gate_exps", f"{PATH}.3.w4", "mlp.shared_experts.gate_proj", f"{PATH}.fc1.weight", f"{PATH}.fc2"],
)  # fmt: skip
def test_other_names_are_none_of_experts(name):
    assert expert_names.parse(name) is None


def test_stacks_of_experts_are_there_beside_their_matrices():
    names = [f"{PATH}.{i}.gate_proj.weight" for i in range(3)]
    stack = f"{PATH.removesuffix('.experts')}.switch_mlp.gate_proj.weight"
    source = MemoryCheckpoint({name: np.full((2, 32), i, np.float32) for i, name in enumerate(names)})
    view = MLXExperts(source)
    assert view.keys() == (stack,)
    for key in (stack, *names):
        assert key in view
    assert f"{PATH}.3.gate_proj.weight" not in view
    assert np.array_equal(view[stack], np.stack([source[name] for name in names]))
    assert np.array_equal(view[names[1]], source[names[1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A Qwen3-MoE whose experts are MXFP4 under vLLM's names, and the values of its stacks."""
    pytest.importorskip("transformers")
    from support.gguf_models import dense_model, write

    work, rng, model = tmp_path_factory.mktemp("w13"), np.random.default_rng(6), dense_model("qwen3moe")
    path = work / "in"
    assert main(["convert", str(write(work / "m.gguf", "qwen3moe", model, True)), str(path), "--to", "halfbyte"]) == 0
    tensors = {n: p.detach().numpy() for n, p in model.state_dict().items() if ".experts." not in n}
    values = {}
    for i, (word, projection) in product(range(model.config.num_hidden_layers), (("w13", "gate_up_proj"), ("w2", "down_proj"))):
        module = PATH.replace("0", str(i))
        shape = getattr(model.get_submodule(module), projection).shape
        stack = hb.quantize(rng.standard_normal(shape).astype(np.float32), "mxfp4")
        tensors |= {f"{module}.{word}_weight": stack.parts["codes"], f"{module}.{word}_weight_scale": stack.parts["scales"]}
        values[f"{module}.{projection}"] = stack.dequantize("float32")
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return path, values


def test_a_gguf_gets_gate_and_up_of_w13(folder, tmp_path):
    path, values = folder
    with hb.open(path) as checkpoint:
        convert_checkpoint(checkpoint, tmp_path / "m.gguf", to="gguf")
    gate_up, down = values[f"{PATH}.gate_up_proj"], values[f"{PATH}.down_proj"]
    half = gate_up.shape[1] // 2
    with hb.open(tmp_path / "m.gguf") as written:
        for stem, want in (("gate", gate_up[:, :half]), ("up", gate_up[:, half:]), ("down", down)):
            np.testing.assert_array_equal(written[f"blk.0.ffn_{stem}_exps"].dequantize("float32"), want)
    with hb.open(path) as source, hb.open(tmp_path / "m.gguf") as written:
        report = hb.verify(source, written)
    assert report.verdict == "identical"


def test_a_recipe_that_packs_one_of_w13_and_w2_alone_is_refused(tmp_path):
    tensors = {f"{PATH}.w13.weight": np.zeros((2, 64, 64), np.float32), f"{PATH}.w2.weight": np.zeros((2, 64, 32), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with hb.open(tmp_path) as checkpoint:
        assert check_experts(checkpoint, recipe_of("halfbyte:mxfp4")) == []
        with pytest.raises(FormatError, match=r"experts\.w2\.weight: dense by this recipe .* among experts that become mxfp4"):
            check_experts(checkpoint, recipe_of("halfbyte:mxfp4", [r"w2=keep"]))


def test_vllms_layers_get_w13_and_w2(folder):
    from halfbyte.vllm.source import Source

    source = Source(folder[0])
    assert source.experts[PATH] == {("gate_up_proj", None): f"{PATH}.w13", ("down_proj", None): f"{PATH}.w2"}
    assert not any(".experts." in name for name in source.matrices)
