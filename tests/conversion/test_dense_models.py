"""A dequantized folder is the packed model: transformers loads every tensor of it and gives the
same logits.
"""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import halfbyte as hb
import halfbyte.transformers
import torch
import transformers
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.torch import ConcatLinear, packed_modules
from support.many_architectures import ARCHITECTURES, DRAWN_AGAIN, NOT_COMPARED, QUICK, REFUSED, random_model
from support.tiny_models import MATRIX, agree, ids, logits, write_tiny
from transformers import AutoModelForCausalLM


def quantize_folder(folder, out) -> None:
    with hb.open(folder) as checkpoint:
        quantize_checkpoint(checkpoint, out, recipe_of("halfbyte:int6:g16", []), "rtn")


def check_dense(folder, out, model=None, drawn_again=False) -> None:
    with hb.open(folder) as checkpoint:
        dequantize_checkpoint(checkpoint, out, dtype="float32")
    dense, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    if drawn_again:
        dense = hb.load_model(out)[0]
    packed = hb.load_model(folder)[0] if model is None else model
    assert packed_modules(packed)
    assert agree(logits(packed, ids()), logits(dense.eval(), ids()))


@pytest.mark.parametrize(
    ("arch", "producer"), [m for m in MATRIX if m[0] != "llama"] + [("qwen3_moe", "mlx"), ("mixtral", "halfbyte")]
)
def test_folder_and_its_saved_copy(tmp_path, arch, producer):
    """A producer's folder, and the same model as `save_pretrained` writes it: stacks of experts,
    fused projections.
    """
    write_tiny(tmp_path / "in", arch, producer)
    model = hb.load_model(tmp_path / "in")[0]
    check_dense(tmp_path / "in", tmp_path / "dense", model)
    model.save_pretrained(tmp_path / "saved")
    check_dense(tmp_path / "saved", tmp_path / "dense-saved")


def test_case_76_square_down_projections_keep_their_orientation(tmp_path):
    """gpt-oss with hidden = intermediate, where no shape tells (n, k) from (k, n)."""
    tiny = write_tiny(tmp_path / "in", "gpt_oss", "gpt-oss", intermediate_size=64)
    down = tiny.dense.model.layers[0].mlp.experts.down_proj
    assert down.shape[1] == down.shape[2]
    check_dense(tmp_path / "in", tmp_path / "dense")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    assert torch.equal(logits(read, ids()), logits(tiny.dense, ids()))


def test_experts_that_are_no_stack(tmp_path):
    """Experts of two formats are saved one by one; gate's and up's scales differ."""
    codecs = {f"model.layers.0.mlp.experts.{e}.up_proj": f"affine4:g{32 << e % 2}" for e in range(4)}
    write_tiny(tmp_path / "in", "qwen3_moe", "mlx", codecs=codecs)
    hb.load_model(tmp_path / "in")[0].save_pretrained(tmp_path / "saved")
    with hb.open(tmp_path / "saved") as saved:
        assert "model.layers.0.mlp.experts.3.up_proj" in saved
    check_dense(tmp_path / "saved", tmp_path / "dense")


def test_parts_of_a_fused_projection(tmp_path):
    """q, k and v of different global scales in phi3's `qkv_proj` stay three weights, which are one
    matrix when dense.
    """
    tiny = write_tiny(tmp_path / "in", "phi3", "halfbyte")
    tensors = {k: v.numpy() for k, v in tiny.dense.state_dict().items()}
    for layer in range(2):
        rows = tensors.pop(f"model.layers.{layer}.self_attn.qkv_proj.weight")
        for part, piece, scale in zip("qkv", np.split(rows, [64, 96]), (1.0, 2.0, 0.5), strict=True):
            q = hb.quantize(piece, "nvfp4")
            parts = {**q.parts, "global_scale": np.float32(scale).reshape(())}
            tensors[f"model.layers.{layer}.self_attn.{part}_proj"] = hb.QTensor(q.format, q.shape, parts)
    hb.save(tmp_path / "in" / "model.safetensors", tensors)
    model = hb.load_model(tmp_path / "in")[0]
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, ConcatLinear)
    model.save_pretrained(tmp_path / "saved")
    with hb.open(tmp_path / "saved") as saved:
        assert "model.layers.0.self_attn.qkv_proj.2" in saved
    check_dense(tmp_path / "saved", tmp_path / "dense", model)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in ARCHITECTURES])
def test_every_architecture(tmp_path, kind):
    random_model(kind).save_pretrained(tmp_path / "in")
    quantize_folder(tmp_path / "in", tmp_path / "packed")
    check_dense(tmp_path / "packed", tmp_path / "dense", drawn_again=kind in DRAWN_AGAIN)


@pytest.mark.parametrize("kind", ["falcon", "longcat_flash", "prophetnet", "sarvam_moe", "zamba"])
def test_from_pretrained_fills_the_same_modules(tmp_path, kind):
    """A folder that `quantize` wrote, read by transformers without a config given: rows that are
    divided, blocks and tables that are shared, layers that the model reads by itself.
    """
    random_model(kind).save_pretrained(tmp_path / "in")
    quantize_folder(tmp_path / "in", tmp_path / "packed")
    ours = hb.load_model(tmp_path / "packed")[0]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    assert set(packed_modules(theirs)) == set(packed_modules(ours))
    assert torch.equal(logits(theirs, ids()), logits(ours, ids()))


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_is_refused(tmp_path, kind):
    random_model(kind).save_pretrained(tmp_path / "in")

    def quantize_and_load():
        quantize_folder(tmp_path / "in", tmp_path / "packed")
        hb.load_model(tmp_path / "packed")

    with pytest.raises(hb.HalfbyteError, match=REFUSED[kind]):
        quantize_and_load()


def test_the_lists_name_every_causal_class_of_transformers():
    """A new transformers adds classes, which belong to one of the lists."""
    lists = [set(ARCHITECTURES), set(REFUSED), set(NOT_COMPARED)]
    assert sum(map(len, lists)) == len(set().union(*lists))
    if (transformers.__version__).startswith("5.24."):
        assert set().union(*lists) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(QUICK) <= set(ARCHITECTURES)
