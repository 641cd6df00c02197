"""`from_pretrained(gguf_file=…, quantization_config=HalfbyteConfig())`: the weights of a GGUF file
stay packed.

transformers asks whether `accelerate` is installed before it reads a GGUF file, and does not use it
without a device_map: these tests answer yes.
"""

from __future__ import annotations

import warnings

import pytest

import halfbyte as hb
import torch
import transformers
from halfbyte.errors import UnsupportedError
from halfbyte.torch import QLinear, packed_modules
from halfbyte.transformers import HalfbyteConfig, load_model
from support.gguf_models import VOCABULARY, dense_model, write
from support.second_model import write_smollm2
from support.tiny_models import ids, logits
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = ids() % VOCABULARY
CASES = ["llama", "llama-3", "llama-tied-bias", "qwen2", "qwen2-yarn", "qwen3", "gemma3", "phi3", "qwen3moe"]


def from_gguf(folder, name="model.gguf", config=None, **options):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if "device_map" not in options:
            patch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        options["quantization_config"] = HalfbyteConfig() if config is None else config
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_load_models(tmp_path, name):
    write(tmp_path / "model.gguf", name, dense_model(name), packed=True)
    model, ours = from_gguf(tmp_path), load_model(tmp_path / "model.gguf")[0]
    assert type(model) is type(ours)
    assert {n: type(m) for n, m in packed_modules(model).items()} == {n: type(m) for n, m in packed_modules(ours).items()}
    assert packed_modules(model)
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert model.get_memory_footprint() == ours.get_memory_footprint()
    assert torch.equal(logits(model, TOKENS), logits(ours, TOKENS))


def test_saved_and_opened_again_without_a_word(tmp_path):
    write(tmp_path / "model.gguf", "qwen3", dense_model("qwen3"), packed=True)
    model = from_gguf(tmp_path)
    model.save_pretrained(tmp_path / "out")
    with hb.open(tmp_path / "out") as checkpoint:
        assert checkpoint.format == "halfbyte"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))


def test_its_tokenizer_and_a_reply(tmp_path):
    write_smollm2(tmp_path / "model.gguf")
    model, (ours, tokens) = from_gguf(tmp_path), load_model(tmp_path / "model.gguf")
    assert isinstance(model.model.layers[0].mlp.down_proj, QLinear)
    prompt = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")("the and in", return_tensors="pt").input_ids
    assert torch.equal(prompt, tokens("the and in", return_tensors="pt").input_ids)
    reply = [m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (model, ours)]
    assert torch.equal(*reply)
    assert model.generation_config.eos_token_id == ours.generation_config.eos_token_id


def test_dtype_and_attention_as_asked_for(tmp_path):
    write(tmp_path / "model.gguf", "llama", dense_model("llama"), packed=True)
    model = from_gguf(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    ours = load_model(tmp_path / "model.gguf", dtype="bfloat16")[0]
    ours.set_attn_implementation("eager")
    assert torch.equal(logits(model, TOKENS), logits(ours, TOKENS))


def test_what_is_refused(tmp_path):
    write(tmp_path / "model.gguf", "mixtral", dense_model("mixtral"), packed=True)
    with pytest.raises(UnsupportedError, match="transformers reads a LlamaConfig, halfbyte a MixtralConfig"):
        from_gguf(tmp_path)
    # transformers' own refusal stays for configs that are not halfbyte's.
    with pytest.raises(ValueError, match="cannot combine Quantization and loading a model from a GGUF file"):
        from_gguf(tmp_path, config=transformers.FineGrainedFP8Config())


@pytest.mark.ecosystem("transformers")
def test_devices_with_accelerate(tmp_path):
    write(tmp_path / "model.gguf", "llama", dense_model("llama"), packed=True)
    model = from_gguf(tmp_path, device_map="auto")
    ours = load_model(tmp_path / "model.gguf")[0]
    assert torch.equal(logits(model, TOKENS), logits(ours, TOKENS))
    with pytest.raises(UnsupportedError, match="packed weights go to one device"):
        from_gguf(tmp_path, device_map={"model": "cpu", "lm_head": "meta"})
