"""Multimodal checkpoints: the language model, or the whole with its vision tower dense, gives the
logits of transformers' model of the dequantized folder.
"""

from __future__ import annotations

import json
import warnings

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import halfbyte as hb
import torch
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.generation.single import Generation
from halfbyte.torch import packed_modules
from support.many_architectures import SIZES
from support.tiny_models import agree, ids, logits
from support.tiny_tokenizer import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "depth": 1,
    "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "image_size": 16, "deepstack_visual_indexes": [0],
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "num_position_embeddings": 16,
}  # fmt: skip
TEXT = {
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
WHOLE = ("gemma3", "mistral3", "qwen3_vl")
ALONE = ("llama4", "qwen3_5")


def write(kind, folder):
    """A tiny whole model of random numbers, its matrices packed by halfbyte; the folder."""
    have = AutoConfig.for_model(kind)
    parts = {}
    for name, sizes in (("text_config", SIZES), ("vision_config", TOWER)):
        part = getattr(have, name)
        parts[name] = {k: v for k, v in sizes.items() if hasattr(part, k)} | {"model_type": part.model_type}
    parts["text_config"] |= TEXT.get(kind, {})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    model.save_pretrained(folder / "in")
    return pack(folder)


def pack(folder):
    with hb.open(folder / "in") as checkpoint:
        quantize_checkpoint(checkpoint, folder / "packed", recipe_of("halfbyte:int6:g16", []), "rtn")
    return folder / "packed"


def dense(folder, auto):
    """transformers' model of the dequantized folder."""
    with hb.open(folder) as checkpoint:
        dequantize_checkpoint(checkpoint, folder.with_name("dense"), dtype="float32")
    model, info = auto.from_pretrained(folder.with_name("dense"), dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    return model.eval()


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_without_a_causal_class_is_loaded_whole(tmp_path, kind):
    folder = write(kind, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = hb.load_model(folder)[0]
    reference = dense(folder, AutoModelForImageTextToText)
    assert type(model) is type(reference)
    assert packed_modules(model)
    assert agree(logits(model, ids()), logits(reference, ids()))
    tower = {n: p for n, p in model.named_parameters() if "vision" in n or "visual" in n}
    assert tower
    assert all(torch.equal(value, reference.get_parameter(name)) for name, value in tower.items())
    run = Generation(model, write_tokenizer(tmp_path), [3, 5, 7], max_tokens=4, stop_ids=set())
    list(run)
    assert (
        run.tokens
        == reference.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 3:].tolist()
    )


@pytest.mark.parametrize("kind", ALONE)
def test_a_model_with_a_causal_class_is_loaded_without_its_tower(tmp_path, kind):
    folder = write(kind, tmp_path)
    with pytest.warns(RuntimeWarning, match="is the language model alone; not loaded: .* tensors? of other towers"):
        model = hb.load_model(folder)[0]
    reference = dense(folder, AutoModelForCausalLM)
    assert type(model) is type(reference)
    assert agree(logits(model, ids()), logits(reference, ids()))


def test_an_unknown_tensor_beside_a_tower_is_still_refused(tmp_path):
    folder = write("qwen3_5", tmp_path)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | {"model.memory.weight": torch.zeros(4)}, file, metadata)
    with pytest.raises(hb.HalfbyteError, match=r"model\.memory"):
        hb.load_model(folder)


def test_gemma3n_whose_towers_need_a_package_is_loaded_as_text(tmp_path):
    """Gemma 3n's vision tower needs timm; its language model does not."""
    text = {k: v for k, v in SIZES.items() if hasattr(AutoConfig.for_model("gemma3n").get_text_config(), k)} | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }
    config = AutoConfig.for_model("gemma3n_text", **text)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    model.save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    named = {k.replace("model.", "model.language_model.", 1): v for k, v in load_file(file).items()}
    named |= {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.ones(4, 3, 3, 3)}
    save_file(named, file, {"format": "pt"})
    settings = json.loads((tmp_path / "in" / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": settings,
        "vision_config": {"model_type": "gemma3n_vision"},
    }
    (tmp_path / "in" / "config.json").write_text(json.dumps(whole))
    folder = pack(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"without its other towers, which need timm|is the language model alone"):
        loaded = hb.load_model(folder)[0]
    with hb.open(folder) as checkpoint, torch.no_grad():
        for name, p in model.named_parameters():
            key = name.replace("model.", "model.language_model.", 1).removesuffix(".weight")
            if key in checkpoint and checkpoint.info(key).quantized:
                p.copy_(torch.from_numpy(checkpoint[key].dequantize("float32")))
    assert agree(logits(loaded, ids()), logits(model, ids()))
