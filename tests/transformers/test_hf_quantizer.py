"""from_pretrained and save_pretrained of packed models."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref

import pytest

import halfbyte as hb
import torch
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import FormatError, UnsupportedError
from halfbyte.torch import QEmbedding, packed_modules
from halfbyte.transformers import HalfbyteConfig, HalfbyteQuantizer, load_model, model_size
from halfbyte.transformers.hf_quantizer import _one_device
from support.golden_case import GOLDEN
from support.many_architectures import random_model
from support.quiet import quiet
from support.tiny_models import agree, ids, logits, write_tiny
from transformers import AutoModelForCausalLM

MATRIX = [
    ("llama", "gptq"), ("llama", "mlx"), ("qwen2", "awq"), ("gemma3_text", "mlx"), ("gemma3_text", "ct-int4"),
    ("phi3", "ct-mxfp4"),
    ("mixtral", "gptq"), ("qwen3_moe", "ct-nvfp4"), ("qwen3_moe", "mlx"), ("gpt_oss", "gpt-oss"), ("llama", "bitsandbytes"),
    ("llama", "halfbyte"),
]  # fmt: skip


def from_pretrained(folder, **options):
    """Without a warning, and without a parameter that was made up."""
    with quiet("DeprecationWarning", "slowly"):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model


@pytest.mark.parametrize(("arch", "producer"), MATRIX)
def test_from_pretrained_equals_load_model(tmp_path, arch, producer):
    tiny = write_tiny(tmp_path, arch, producer)
    model = from_pretrained(tmp_path, quantization_config=HalfbyteConfig())
    ours = load_model(tmp_path)[0]
    assert {n: type(m) for n, m in packed_modules(model).items()} == {n: type(m) for n, m in packed_modules(ours).items()}
    assert torch.equal(logits(model, ids()), logits(ours, ids()))
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


@pytest.mark.parametrize(("arch", "producer"), MATRIX)
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_save_pretrained_round_trip(tmp_path, arch, producer, shards):
    """Saved by transformers, read by `open`, load_model and from_pretrained without being told how."""
    write_tiny(tmp_path / "in", arch, producer)
    first = load_model(tmp_path / "in")[0]
    first.save_pretrained(tmp_path / "out", max_shard_size=shards)
    if shards != "1GB":
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "halfbyte"
    with hb.open(tmp_path / "out") as ckpt:
        assert ckpt.format == "halfbyte"
        assert not [f for f in ckpt.findings() if f.severity != "note"]
        packed = {k: ckpt[k] for k in ckpt if ckpt.info(k).quantized}
    held = {
        ".".join(p for p in (n, piece) if p): h.canonical()
        for n, m in packed_modules(first).items()
        for piece, h in m.packed.items()
    }
    assert all(packed[k] == held[k] for k in packed)
    want = logits(first, ids())
    for again in (load_model(tmp_path / "out")[0], from_pretrained(tmp_path / "out")):
        assert torch.equal(logits(again, ids()), want)


def test_a_tied_head_is_saved_once(tmp_path):
    write_tiny(tmp_path / "in", "gemma3_text", "mlx")
    model = from_pretrained(tmp_path / "in", quantization_config=HalfbyteConfig())
    assert isinstance(model.model.embed_tokens, QEmbedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "out")
    with hb.open(tmp_path / "out") as ckpt:
        assert "lm_head" not in ckpt
        assert "model.embed_tokens" in ckpt


def test_options_reach_the_modules(tmp_path):
    write_tiny(tmp_path, "llama", "gptq")
    model = from_pretrained(tmp_path, quantization_config=HalfbyteConfig(backend="reference"))
    assert {m.weight.prepared.backend for m in packed_modules(model).values()} == {"reference"}
    assert model.config.quantization_config.to_dict() == {
        "quant_method": "halfbyte",
        "activations": "exact",
        "backend": "reference",
    }


@pytest.mark.parametrize("folder", ["mlx/ckpt_mxfp4", "modelopt/ckpt_nvfp4", "compressed-tensors/ckpt_w4a16"])
def test_producers_checkpoints(folder):
    model = from_pretrained(GOLDEN / folder, quantization_config=HalfbyteConfig())
    tokens = ids() % 32
    assert torch.equal(logits(model, tokens), logits(load_model(GOLDEN / folder)[0], tokens))


def test_sizes_count_packed_weights(tmp_path):
    tiny = write_tiny(tmp_path, "gemma3_text", "mlx")
    model = load_model(tmp_path)[0]
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.num_parameters() == tiny.dense.num_parameters()
        assert made.num_parameters(exclude_embeddings=True) == tiny.dense.num_parameters(exclude_embeddings=True)
        assert made.num_parameters(only_trainable=True) == 0
        size = model_size(made)
        assert made.get_memory_footprint(return_buffers=False) == size.nbytes < tiny.dense.get_memory_footprint() / 3
        assert made.get_memory_footprint() == size.nbytes + sum(b.nbytes for b in made.buffers())
    gone = weakref.ref(model)
    del model, made
    gc.disable()
    try:
        assert gone() is None, "a model is freed without the garbage collector"
    finally:
        gc.enable()


def test_a_packed_weight_has_the_dtype_of_its_activations(tmp_path):
    write_tiny(tmp_path, "gemma3_text", "mlx")
    model = load_model(tmp_path, dtype="bfloat16")[0]
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    moved = model.to(torch.float32)
    assert {w.dtype for m in packed_modules(moved).values() for w in m.packed.values()} == {torch.float32}
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert moved.model.layers[0].mlp.up_proj.weight.prepared is weight.prepared


def test_a_codec_is_no_way_to_run(tmp_path):
    with pytest.raises(
        FormatError, match=r"activations='int4:g128'; allowed: exact, int8, int8_token, fp8\. .* halfbyte quantize MODEL OUT --to"
    ):
        HalfbyteConfig("int4:g128")
    with pytest.raises(FormatError, match=r"--to halfbyte:int4:g32$"):
        HalfbyteConfig("int4:g32")
    with pytest.raises(FormatError, match=r"--to halfbyte:int4:g128$"):
        HalfbyteConfig("fast")


def test_maps_that_transformers_would_compute_are_one_device():
    quantizer = HalfbyteQuantizer(HalfbyteConfig())
    for name in ("auto", "balanced", "sequential"):
        assert len(quantizer.update_device_map(name)) == 1
    assert quantizer.update_device_map({"": "cpu"}) == {"": "cpu"}


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("given", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map(tmp_path, given, tied):
    """With accelerate installed, of a folder that `quantize` wrote, without a config given."""
    import accelerate  # noqa: F401  transformers needs it for a device map

    random_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "in")
    with hb.open(tmp_path / "in") as checkpoint:
        quantize_checkpoint(checkpoint, tmp_path / "packed", recipe_of("halfbyte:int4:g32"), "rtn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32, device_map=given).eval()
    ours = hb.load_model(tmp_path / "packed")[0]
    assert set(packed_modules(model)) == set(packed_modules(ours))
    assert torch.equal(logits(model, ids()), logits(ours, ids()))
    assert (model.get_memory_footprint(), model.num_parameters()) == (ours.get_memory_footprint(), ours.num_parameters())


def test_generate_runs(tmp_path):
    write_tiny(tmp_path, "llama", "mlx")
    model = from_pretrained(tmp_path, quantization_config=HalfbyteConfig())
    out = model.generate(ids(4, 1), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 9)


def test_several_devices_are_refused():
    """A map of several devices reaches the quantizer only where accelerate is installed, so it is
    asked directly.
    """
    with pytest.raises(UnsupportedError, match="device_map over cpu, meta; packed weights go to one device"):
        _one_device({"model": "cpu", "lm_head": "meta"})
    assert _one_device({"": "cpu"}) == "cpu"


def test_others_configs_are_left_alone(tmp_path):
    """Without a HalfbyteConfig transformers sees what it always saw."""
    write_tiny(tmp_path, "llama", "gptq")
    with pytest.raises(Exception, match=r"(?i)gptq"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
