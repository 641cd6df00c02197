"""Every architecture named by a table: a random small model as llama.cpp stores it gives
transformers' own logits bit for bit.

llama.cpp's own logits of these files are recorded. With llama-cpp-python installed
(`make test-ecosystem`), llama.cpp itself reads larger files, as float32 and quantized by its own
tool, and its logits are those of transformers' model with llama.cpp's own roundings of activations.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import torch
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.generation.single import Generation, GenerationError, end_tokens
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.torch import packed_modules
from halfbyte.transformers import load_model
from halfbyte.transformers.decode.rmsnorm import RMSNorm
from support import gguf_families
from support.gguf_families import FAMILIES, IDS, architecture, family_model, write_family
from support.gguf_models import MODELS
from support.gguf_writer import GGUF
from support.llama_cpp_logits import FLASH, llama_cpp_logits, recorded
from support.llama_cpp_rounding import dense_copy, rounded


def logits(model: Any) -> np.ndarray:
    """Of every token; of an encoder its vectors, of a model of two sides those of its decoder."""
    ids = torch.tensor([IDS])
    with torch.no_grad():
        out = model(input_ids=ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(input_ids=ids)
    rows: np.ndarray = (out.logits if "logits" in out else out.last_hidden_state)[0].double().numpy()
    return rows


def error(have: np.ndarray, want: np.ndarray) -> float:
    """Normalized mean squared error."""
    return float(((have - want) ** 2).mean() / (want**2).mean())


RECORDED = recorded()
BOUNDS = {"f32": 1e-6, "q8_0": 1e-3, "q4_k": 1e-3}
"""Of llama.cpp's logits against the model with llama.cpp's own roundings."""
FILE_TYPES = {"q8_0": 7, "q4_k": 15}
"""llama.cpp's numbers of its quantized file types."""
NO_EPSILON = {"qwen2vl"}
"""Architectures whose norms' epsilon llama.cpp (of llama-cpp-python 0.3.36) does not read: its
norms add 0.
"""


def as_llama_cpp(arch: str, model: Any, types: dict[str, str]) -> np.ndarray:
    """Logits of a dense model, computed as llama.cpp does a file of these types."""
    if arch in NO_EPSILON:
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = 0.0
    model.set_experts_implementation("eager")
    if hasattr(model.config, "scale_decoder_outputs"):
        model.config.scale_decoder_outputs = False
    with rounded(model, architecture(arch), types):
        return logits(model)


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_logits_are_transformers_own_and_llama_cpps(tmp_path, arch):
    model = family_model(arch)
    read, _ = load_model(write_family(tmp_path / "m.gguf", arch, model))
    assert packed_modules(read) == {}
    np.testing.assert_array_equal(logits(read), logits(model))
    assert error(as_llama_cpp(arch, read, {})[-1], np.array(RECORDED[arch])) <= BOUNDS["f32"]


def test_every_architecture_has_a_case():
    same = {"qwen3vlmoe"}  # the entry of qwen3moe
    assert set(ARCHITECTURES) == {case.partition(":")[0] for case in FAMILIES} | {entry[0] for entry in MODELS.values()} | same
    assert ARCHITECTURES["qwen3vlmoe"] is ARCHITECTURES["qwen3moe"]


def test_a_text_ends_at_every_token_the_file_names(tmp_path, monkeypatch):
    whole = GGUF.bytes

    def with_ends(file: GGUF) -> bytes:
        file.pairs += [("tokenizer.ggml.eot_token_id", "uint32", 7), ("tokenizer.ggml.eom_token_id", "uint32", 9)]
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", with_ends)
    model, tokenizer = load_model(write_family(tmp_path / "m.gguf", "xverse", family_model("xverse")))
    assert model.generation_config.eos_token_id == [2, 7, 9]
    assert end_tokens(model, tokenizer) == {2, 7, 9}


# A family of each kind of cache: recurrent states, convolutions, latent keys, an indexer's keys,
# windows with sinks, keys of another layer.
@pytest.mark.parametrize(
    "case",
    [
        "smallthinker",
        "mamba",
        "mamba2",
        "falcon-h1",
        "lfm2",
        "qwen35",
        "deepseek2",
        "gemma4",
        "llama4",
        "kimi-linear",
        "bailingmoe3",
        "dbrx",
        "hy_v4",
        "deepseek32",
        "glm-dsa",
        "mimo2",
        "laguna",
        "granite_swa:moe",
        "minicpm3",
        "hrm_text",
        "dots3note",
        "deepseek4",
        "minimax-m3:blocks",
        "qwen4exp",
        "qwen4exp:blocks",
    ],
)
def test_cached_steps_choose_the_tokens_of_whole_passes(tmp_path, case):
    model, tokenizer = load_model(write_family(tmp_path / "m.gguf", case, family_model(case)))
    steps = [piece.token for piece in Generation(model, tokenizer, IDS, max_tokens=6, stop_ids=set())]
    ids = list(IDS)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert steps == ids[len(IDS) :]


def test_t5_answers_what_its_encoder_read(tmp_path):
    model, tokenizer = load_model(write_family(tmp_path / "m.gguf", "t5", family_model("t5")))
    steps = [piece.token for piece in Generation(model, tokenizer, IDS, max_tokens=6, stop_ids=set())]
    answer = [0]
    with torch.no_grad():
        for _ in range(6):
            out = model(input_ids=torch.tensor([IDS]), decoder_input_ids=torch.tensor([answer]))
            answer.append(int(out.logits[0, -1].argmax()))
    assert steps == answer[1:]


def test_an_encoder_is_loaded_and_does_not_generate(tmp_path):
    model, tokenizer = load_model(write_family(tmp_path / "m.gguf", "bert", family_model("bert")))
    with pytest.raises(GenerationError, match="a BertModel makes vectors of a text"):
        Generation(model, tokenizer, IDS)


def test_one_projection_becomes_three(tmp_path, monkeypatch):
    """BERT's queries, keys and values as one tensor, which some files have."""
    model = family_model("bert")
    tensors = gguf_families.gguf_tensors

    def fused(arch: str, model: Any) -> dict[str, np.ndarray]:
        out = tensors(arch, model)
        for layer in range(2):
            for leaf in ("weight", "bias"):
                parts = [out.pop(f"blk.{layer}.attn_{w}.{leaf}") for w in "qkv"]
                out[f"blk.{layer}.attn_qkv.{leaf}"] = np.concatenate(parts)
        return out

    monkeypatch.setattr(gguf_families, "gguf_tensors", fused)
    read, _ = load_model(write_family(tmp_path / "m.gguf", "bert", model))
    np.testing.assert_array_equal(logits(read), logits(model))


def test_one_type_of_tokens_is_a_vector_in_a_file_that_llama_cpp_quantized(tmp_path, monkeypatch):
    model = family_model("jina-bert-v3")
    tensors = gguf_families.gguf_tensors(arch := "jina-bert-v3", model)
    assert tensors["token_types.weight"].shape == (1, 64)
    flat = tensors | {"token_types.weight": tensors["token_types.weight"][0]}
    monkeypatch.setattr(gguf_families, "gguf_tensors", lambda arch, model: flat)
    read, _ = load_model(write_family(tmp_path / "m.gguf", arch, model))
    np.testing.assert_array_equal(logits(read), logits(model))


def test_a_larger_baichuan_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "baichuan", (FAMILIES["baichuan"][0] | {"num_hidden_layers": 40}, []))
    path = write_family(tmp_path / "m.gguf", "baichuan", family_model("baichuan"))
    with pytest.raises(UnsupportedError, match="a baichuan model of 40 layers, which has ALiBi positions"):
        load_model(path)


def change_pairs(monkeypatch: pytest.MonkeyPatch, keys: list[tuple[str, str, Any]]) -> None:
    """Files that are written from now on have these key-values, in place of those of their names."""
    whole = GGUF.bytes

    def changed(file: GGUF) -> bytes:
        file.pairs = [*(pair for pair in file.pairs if pair[0] not in {name for name, *_ in keys}), *keys]
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", changed)


@pytest.mark.parametrize(
    ("case", "given", "why"),
    [
        ("bailingmoe3", ("swiglu_clamp_exp", "array[float32]", [0.0, 7.0]), "whose experts are limited"),
        ("bailingmoe3", ("rope.dimension_sections", "array[int32]", [2, 1, 1, 0]), "with sections of its rotation"),
        ("bailingmoe3", ("kda.safe_gate", "bool", 0), "without a floor of forgetting"),
        ("bailingmoe3", ("expert_shared_feed_forward_length", "uint32", 48), "whose shared experts are 48 wide; .* takes 32"),
        ("hy_v4", ("attention.indexer.top_k", "uint32", 0), "without an indexer"),
        (
            "hy_v4",
            [("rope.scaling.type", "string", "linear"), ("rope.scaling.factor", "float32", 4.0)],
            "with a stretched rotation",
        ),
        ("hy_v4", ("swiglu_clamp_exp", "array[float32]", [0.5, 0.5, 0.7]), "whose experts are limited to .* takes one limit"),
        ("deepseek4", ("expert_gating_func", "uint32", 2), "that scores experts by function 2; 4 .sqrtsoftplus. is read"),
        ("deepseek4", ("expert_weights_norm", "bool", 0), "whose weights of experts do not add up to one"),
        ("deepseek4", ("expert_shared_count", "uint32", 2), "with 2 shared experts"),
        ("deepseek4", ("swiglu_clamp_shexp", "array[float32]", [0.5, 0.5, 0.5, 0.7]), "whose experts are limited to"),
        ("deepseek4", ("attention.compress_ratios", "array[int32]", [0, 4, 64, 4]), r"that compresses \[64\] tokens into one"),
        (
            "dots3note",
            [("rope.scaling.type", "string", "linear"), ("rope.scaling.factor", "float32", 4.0)],
            "with a stretched rotation",
        ),
        ("dots3note", ("attention.head_count", "array[int32]", [4, 2, 2]), r"whose global layers have \[2, 4\] heads"),
        ("dots3note", ("expert_weights_norm", "bool", 0), "whose weights of experts do not add up to one"),
        ("minimax-m3", ("attention.indexer.head_count", "uint32", 1), "whose indexer has 1 heads and keys 2"),
        ("minimax-m3", ("expert_shared_count", "uint32", 2), "with 2 shared experts"),
        (
            "qwen4exp",
            ("attention.compress_ratios", "array[int32]", [0, 0]),
            r"whose layers of attention choose among blocks of \[0\] tokens",
        ),
        ("qwen4exp", ("ple.layers", "array[int32]", [0, 1]), r"with embeddings of several tokens in layers \[0, 1\]"),
        ("dbrx", ("attention.layer_norm_epsilon", "float32", 1e-6), "whose norms' epsilon is 1e-06; .* has 1e-5"),
    ],
)
def test_what_the_class_does_not_compute_is_refused(tmp_path, monkeypatch, case, given, why):
    keys = [(f"{case}.{key}", *rest) for key, *rest in (given if isinstance(given, list) else [given])]
    change_pairs(monkeypatch, keys)
    path = write_family(tmp_path / "m.gguf", case, family_model(case))
    with pytest.raises(UnsupportedError, match=f"a {case} model {why}"):
        load_model(path)


def test_hrm_texts_cycles_make_the_number_of_its_layers(tmp_path, monkeypatch):
    monkeypatch.setitem(
        FAMILIES, "hrm_text", (FAMILIES["hrm_text"][0], [*FAMILIES["hrm_text"][1], ("block_count", "uint32", 16)])
    )
    path = write_family(tmp_path / "m.gguf", "hrm_text", family_model("hrm_text"))
    with pytest.raises(
        CheckpointError, match=r"'hrm_text\.block_count' is 16; 2 high cycles of 2 low ones and 2 layers a stack make 12"
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("case", "given", "why"),
    [
        ("mpt", ("block_count", "uint32", 2**31), r"'mpt\.block_count' is 2147483648; 1 to 512 is allowed"),
        ("hrm_text", ("block_count", "uint32", 2**31), r"'hrm_text\.block_count' is 2147483648; 1 to 512 is allowed"),
        ("hrm_text", ("hrm.layers_per_stack", "uint32", 2**31), r"'hrm_text\.block_count' is 12; .* make 12884901888"),
        ("qwen4exp", ("ple.ngram_size", "uint32", 1), "head_vocab_sizes' has 4 sizes .*; up to 1 tokens in 2 heads make 0"),
        ("qwen4exp", ("ple.heads_per_ngram", "uint32", 3), "head_vocab_sizes' has 4 sizes .*; up to 3 tokens in 3 heads make 6"),
    ],
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_made(tmp_path, monkeypatch, case, given, why):
    key, *rest = given
    change_pairs(monkeypatch, [(f"{case}.{key}", *rest)])
    path = write_family(tmp_path / "m.gguf", case, family_model(case))
    with pytest.raises(CheckpointError, match=why):
        load_model(path)


def unequal_choices(have: np.ndarray, want: np.ndarray) -> int:
    """Positions whose greedy token differs although the gap to the second is more than twice the
    largest error there.
    """
    best = want.argmax(1)
    gap = want.max(1) - np.where(np.arange(want.shape[1]) == best[:, None], -np.inf, want).max(1)
    return int(((have.argmax(1) != best) & (gap > 2 * np.abs(have - want).max(1))).sum())


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("arch", FAMILIES)
def test_llama_cpp_reads_the_same_model(tmp_path, arch):
    """halfbyte's products are those of the dense model of the file's values; llama.cpp's logits are
    those of that model with the activations rounded as llama.cpp rounds them.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_family(tmp_path / "f32.gguf", arch, family_model(arch, 256))
    task = architecture(arch).task
    theirs = llama_cpp_logits(path, task, arch in FLASH)
    read = load_model(path)[0]
    unrounded = {"f32": error(logits(read), theirs)}
    errors = {"f32": error(as_llama_cpp(arch, read, {}), theirs)}
    options = llama_cpp.llama_model_quantize_default_params()
    for name, options.ftype in FILE_TYPES.items():
        options.nthread, options.pure = 1, True
        packed = tmp_path / f"{name}.gguf"
        assert llama_cpp.llama_model_quantize(bytes(path), bytes(packed), ctypes.byref(options)) == 0
        read = load_model(packed)[0]
        assert packed_modules(read)
        types = dense_copy(packed, tmp_path / f"{name}-dense.gguf")
        dense = load_model(tmp_path / f"{name}-dense.gguf")[0]
        ours, theirs = logits(read), llama_cpp_logits(packed, task, arch in FLASH)
        assert error(ours, logits(dense)) <= 1e-9
        assert unequal_choices(ours, theirs) == 0
        unrounded[name] = error(ours, theirs)
        errors[name] = error(as_llama_cpp(arch, dense, types), theirs)
    print(f"| {arch} | " + " | ".join(f"{unrounded[k]:.1e} | {errors[k]:.1e}" for k in errors) + " |")
    assert all(errors[k] <= BOUNDS[k] for k in BOUNDS), errors
