"""Models of every architecture that is built: a random small one of transformers, as llama.cpp
writes it, read back packed.

Stored as float32 the logits are equal bit for bit. Packed, they are those of the dense model with
the decoded weights, up to float32's order of summation.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

import torch
from halfbyte.errors import FormatError
from halfbyte.torch import QEmbedding, QLinear, packed_modules
from halfbyte.transformers import load_model, model_size
from halfbyte.transformers.compat import cache_name
from support.gguf_models import HEAD, HEADS, HIDDEN, MODELS, VOCABULARY, dense_model, write
from transformers import AutoModelForCausalLM

IDS = torch.tensor([[1, 5, 9, 13, 40, 22, 7, 7, 30, 11, 3, 46]])


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", MODELS)
def test_dense_tensors_give_the_same_logits_bit_for_bit(tmp_path, name):
    model = dense_model(name)
    read, _ = load_model(write(tmp_path / "m.gguf", name, model, packed=False))
    assert packed_modules(read) == {}
    if name == "llama-3":
        torch.testing.assert_close(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0)
        torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-5)
    else:
        assert torch.equal(logits(read), logits(model))
    assert dict(read.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_give_the_logits_of_the_decoded_ones(tmp_path, name):
    model = dense_model(name)
    read, _ = load_model(write(tmp_path / "m.gguf", name, model, packed=True))
    want, have = logits(model), logits(read)
    assert len(packed_modules(read)) >= 4
    error, size = (have - want).double(), want.double().pow(2).mean().sqrt()
    # A sum of k float32 products in another order is off by about √k · 2^−24; seven products a
    # layer add up as a random walk.
    bound = math.sqrt(HEADS * HEAD) * 2**-24 * math.sqrt(7 * MODELS[name][2]["num_hidden_layers"] + 1)
    assert error.pow(2).mean().sqrt() <= bound * size
    assert error.abs().max() <= 8 * bound * size
    assert torch.equal(have.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision_is_transformers_half_precision(tmp_path, name, dtype):
    model = dense_model(name)
    half = AutoModelForCausalLM.from_config(model.config, dtype=getattr(torch, dtype)).eval()
    path = write(tmp_path / "m.gguf", name, model, packed=False)
    half.load_state_dict(model.state_dict())
    assert torch.equal(logits(load_model(path, dtype=dtype)[0]), logits(half))
    packed, _ = load_model(write(path, name, model, packed=True), dtype=dtype)
    half.load_state_dict(model.state_dict())
    assert packed.dtype == logits(packed).dtype == getattr(torch, dtype)
    spread = 2**-8 if dtype == "bfloat16" else 2**-11
    error, size = (logits(packed) - logits(half)).double(), logits(half).double().pow(2).mean().sqrt()
    assert error.pow(2).mean().sqrt() <= 4 * spread * math.sqrt(model.config.num_hidden_layers) * size


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(FormatError, match="dtype='float64'; allowed: float32, float16, bfloat16"):
        load_model(tmp_path / "any.gguf", dtype="float64")


def test_the_check_sees_one_wrong_norm(tmp_path):
    """The bounds above are not vacuous: a norm without its offset is far outside."""
    model = dense_model("gemma3")
    read, _ = load_model(write(tmp_path / "m.gguf", "gemma3", model, packed=True))
    with torch.no_grad():
        read.model.layers[3].self_attn.q_norm.weight.add_(1)
    assert (logits(read) - logits(model)).abs().max() > 1e-3 * logits(model).abs().max()


def test_case_50_tied_heads_share_one_weight(tmp_path):
    """Tied and untied, packed and dense: no head is made twice, and none is missing."""
    tied, _ = load_model(write(tmp_path / "a.gguf", "gemma3", dense_model("gemma3"), packed=True))
    assert isinstance(tied.lm_head, QLinear)
    assert isinstance(tied.model.embed_tokens, QEmbedding)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    dense, _ = load_model(write(tmp_path / "b.gguf", "gemma3", dense_model("gemma3"), packed=False))
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    untied, _ = load_model(write(tmp_path / "c.gguf", "qwen3", dense_model("qwen3"), packed=True))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    n = VOCABULARY * HIDDEN
    assert model_size(dense).weights == sum(p.numel() for p in dense_model("gemma3").parameters())
    assert model_size(untied).weights == sum(p.numel() for p in dense_model("qwen3").parameters())
    assert model_size(tied).weights == model_size(dense).weights
    assert model_size(tied).nbytes < model_size(dense).nbytes - 2 * n


def test_a_split_file_and_a_folder_are_the_model_too(tmp_path):
    model = dense_model("qwen3")
    path = write(tmp_path / "whole.gguf", "qwen3", model, packed=True)
    want = logits(load_model(path)[0])
    write(path, "qwen3", dense_model("qwen3"), packed=True, shards=3)
    path.unlink()
    assert torch.equal(logits(load_model(tmp_path / "whole-00002-of-00003.gguf")[0]), want)
    assert torch.equal(logits(load_model(tmp_path)[0]), want)


def test_cached_steps_equal_one_pass(tmp_path):
    """Token by token, past the sliding window, with the architecture's own cache."""
    read, _ = load_model(write(tmp_path / "m.gguf", "gemma3", dense_model("gemma3"), packed=True))
    whole = logits(read)[0]
    name = cache_name(read)
    with torch.inference_mode():
        out = read(input_ids=IDS[:, :3], use_cache=True)
        rows = [out.logits[0, -1]]
        for i in range(3, IDS.shape[1]):
            out = read(input_ids=IDS[:, i : i + 1], use_cache=True, **{name: out[name]})
            rows.append(out.logits[0, -1])
    torch.testing.assert_close(torch.stack(rows), whole[2:], rtol=0, atol=5e-6 * float(whole.abs().max()))
