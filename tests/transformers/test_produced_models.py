"""Tiny models that the producers' own tools wrote: each loads, and its logits are those of the
dense model with the same values.

tests/data/models keeps some of them; `make test-ecosystem` writes them all again with each producer
in its own environment (tests/support/producers/run.py) and names their folder in HALFBYTE_PRODUCED.
benchmarks/ecosystem-models.md keeps that run's log.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.cli import main
from halfbyte.conversion.to_dense import QUANTIZATION_KEYS
from halfbyte.errors import UnsupportedError
from halfbyte.torch import packed_modules
from halfbyte.transformers import load_model
from support.gguf_twin import gguf_twin
from support.tiny_models import agree, ids, logits
from transformers import AutoConfig, AutoModelForCausalLM

KEPT = sorted((Path(__file__).parents[1] / "data" / "models").glob("*/*"))
PRODUCED = Path(os.environ.get("HALFBYTE_PRODUCED", "none"))
WRITTEN = sorted(p for p in PRODUCED.glob("*/*") if p.parent.name != "dense" and (p.is_dir() or p.suffix == ".gguf"))
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale", ".bias")
"""Last words of tensors that a dense model has no place for: scales of activations, GPTQ's biases
of zeros.
"""
LINEARS = {"llama": 7, "qwen3": 7, "gemma3_text": 7, "mistral": 7, "phi3": 4, "mixtral": 5, "qwen3_moe": 5, "gpt_oss": 5}
"""Modules of a layer that may be packed: linear layers, and the experts as one."""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def original(path: Path) -> Path:
    """The dense model a checkpoint was made of: AWQ's search wants matrices of 64 outputs."""
    wide = path.stem.endswith("-awq") and path.parent.name in ("gptqmodel", "autoawq")
    return PRODUCED / "dense" / (architecture(path) + ("_wide" if wide else ""))


def architecture(path: Path) -> str:
    return path.stem.partition("-")[0]


def dense_twin(path: Path, config: Any):
    """The dense model with the checkpoint's values: a GGUF file by the gguf package, else a strict
    state dict of what `halfbyte.open` decodes, stacks of experts put together here.
    """
    if path.suffix == ".gguf":
        return gguf_twin(path, config)
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, str], np.ndarray]] = defaultdict(dict)
    fused: dict[str, np.ndarray] = {}
    scales: dict[str, torch.Tensor] = {}
    with hb.open(path) as checkpoint:
        config = {k: v for k, v in checkpoint.config.items() if k not in QUANTIZATION_KEYS}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
        for key in checkpoint:
            value, quantized = checkpoint[key], checkpoint.info(key).quantized
            array = value.dequantize("float32") if quantized else np.asarray(value).astype(np.float32)
            name = key.replace("block_sparse_moe", "mlp").replace("switch_mlp", "experts")
            name += ".weight" if quantized else ""
            if found := re.fullmatch(r"(.*\.experts)\.(?:(\d+)\.)?(w1|w2|w3|gate_proj|up_proj|down_proj)\.(weight|bias)", name):
                whole = [array] if found[2] else list(array)
                for e, matrix in enumerate(whole, int(found[2] or 0)):
                    experts[found[1]][e, f"{WORDS.get(found[3], found[3])}.{found[4]}"] = matrix
            elif found := re.fullmatch(r"(.*\.experts\.(?:gate_up_proj|down_proj))\.weight", name):
                state[found[1]] = torch.from_numpy(array.swapaxes(1, 2).copy())  # gpt-oss's stacks are (k, n) there
            elif name in model.state_dict():
                state[name] = torch.from_numpy(array.copy())
            elif name.endswith(".pre_quant_scale"):
                scales[name.replace("pre_quant_scale", "weight")] = torch.from_numpy(array)
            elif re.search(r"\.(q|k|v|gate|up)_proj\.weight$", name):
                fused[name] = array  # of a module that transformers keeps in one
            else:
                assert name.endswith(UNUSED), name
    for name in [n for n in model.state_dict() if n.endswith(("qkv_proj.weight", "gate_up_proj.weight")) and n not in state]:
        words = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
        parts = [fused.pop(re.sub(r"(qkv|gate_up)_proj", word, name)) for word in words]
        state[name] = torch.from_numpy(np.concatenate(parts))
    assert not fused
    for module, matrices in experts.items():
        # GPTQModel cuts gpt-oss's alternating rows in the middle, and its model puts them together
        # again before it gates.
        halves = "gptqmodel" in path.parts[-2]
        state |= stacks(module, matrices, gpt_oss=model.config.model_type == "gpt_oss", halves=halves)
    for name, scale in scales.items():
        state[name] = state[name] * scale  # (x · s) · wᵀ = x · (w · s)ᵀ
    if model.config.tie_word_embeddings and "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def stacks(module: str, matrices: dict[tuple[int, str], np.ndarray], gpt_oss: bool, halves: bool) -> dict[str, torch.Tensor]:
    """transformers' two stacks of an experts module; gpt-oss's rows of gate and up in turns, its
    matrices (k, n).
    """
    count = 1 + max(e for e, _ in matrices)
    out = {}

    def put(name: str, leaf: str, array: np.ndarray) -> None:
        turned = array.swapaxes(1, 2) if gpt_oss and leaf == "weight" else array
        out[f"{module}.{name}" + ("_bias" if leaf == "bias" else "")] = torch.from_numpy(np.ascontiguousarray(turned))

    for leaf in {name.partition(".")[2] for _, name in matrices}:
        put("down_proj", leaf, np.stack([matrices[e, f"down_proj.{leaf}"] for e in range(count)]))
        if (0, f"gate_proj.{leaf}") in matrices:
            gate, up = (np.stack([matrices[e, f"{p}_proj.{leaf}"] for e in range(count)]) for p in ("gate", "up"))
            both = np.concatenate([gate, up], axis=1)
            if gpt_oss and not halves:
                both = np.stack([gate, up], axis=2).reshape(both.shape)
            put("gate_up_proj", leaf, both)
    return out


def check(path: Path) -> None:
    """load_model against the dense model, and against the producer's own logits where it left them."""
    model, tokenizer = load_model(path)
    packed = packed_modules(model)
    layers = [name for name in packed if ".layers." in name]
    # What quantizes linear layers only leaves transformers' stacks of experts dense.
    dense_experts = path.parent.name in ("transformers", "hqq") and architecture(path) in ("mixtral", "qwen3_moe")
    least = 1 if architecture(path) == "gpt_oss" else LINEARS[architecture(path)] - dense_experts
    assert len(layers) >= least * model.config.num_hidden_layers
    assert tokenizer is not None
    ours = logits(model, ids())
    assert agree(ours, logits(dense_twin(path, model.config), ids()))
    if (path / "logits.npy").exists():
        theirs = torch.from_numpy(np.load(path / "logits.npy"))
        assert float((ours - theirs).abs().max()) < 1e-3 * float(theirs.abs().max())


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_kept_checkpoints_load_as_the_dense_model(path):
    check(path)


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_kept_checkpoints_saved_again_answer_the_same(path, tmp_path):
    """save_pretrained and load_model: the same bits, whoever wrote them, GPTQModel's halves with
    their own group indices too.
    """
    model, _ = load_model(path)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path)[0], ids()), logits(model, ids()))


CASES = WRITTEN or [PRODUCED / "nothing" / "was-written"]
"""Without what the producers write these tests fail where they are asked for; `make test` does not.
"""
REFUSED = {"modelopt/gpt_oss-mxfp4": "scale groups along the outputs", "modelopt/gpt_oss-fp8": "ModelOpt's FP8 stack of experts"}
"""What a producer writes and no product can read."""


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("name", REFUSED)
def test_written_checkpoints_that_are_refused(name):
    (path,) = (p for p in WRITTEN if name_of(p) == name)
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        load_model(path)


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("path", [p for p in CASES if name_of(p) not in REFUSED], ids=name_of)
def test_written_checkpoints_load_as_the_dense_model(path):
    check(path)


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("path", [p for p in CASES if p.suffix != ".gguf" and not p.stem.endswith("-awq")], ids=name_of)
def test_written_weights_are_near_the_originals(path):
    """Every packed matrix against the dense one it was made from: four bits cost less than a fifth
    in relative RMS. (AWQ folds its scales into the layers before.)
    """
    with hb.open(original(path)) as dense, hb.open(path) as packed:
        compared = 0
        for key in packed:
            if f"{key}.weight" in dense and packed.info(key).quantized:
                a, b = (np.asarray(v, np.float64) for v in (dense[f"{key}.weight"], packed[key].dequantize("float64")))
                assert np.linalg.norm(b - a) < 0.2 * np.linalg.norm(a), key
                compared += 1
    assert compared >= 2


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("path", [p for p in CASES if name_of(p) not in REFUSED], ids=name_of)
def test_written_models_answer_as_the_originals(path):
    """Logits against the dense model's that was quantized: gate for up, or rows in another order,
    would leave nothing of them. Rounding to nearest alone leaves a cosine of 0.83 and more here.
    """
    dense = AutoModelForCausalLM.from_pretrained(original(path), dtype=torch.float32)
    ours, theirs = logits(load_model(path)[0], ids()), logits(dense, ids())
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
    assert float(cosine.mean()) > 0.75


def listed() -> set[str]:
    """producer/architecture-kind of every ✓ and ✗ in the log's table."""
    folders = {"llama.cpp": "llamacpp", "llm-compressor": "llmcompressor", "mlx-lm": "mlx"}
    through = {"bitsandbytes": "bnb-", "torchao": "torchao-", "transformers": ""}
    log = (Path(__file__).parents[2] / "benchmarks" / "ecosystem-models.md").read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| (producer \| kind \| llama .*|[\w.-]+ \| [\w-]+ \|(?: [✓✗–] \|)+)$", log, re.MULTILINE)
    architectures = [{"gemma3": "gemma3_text"}.get(a, a.replace("-", "_")) for a in re.findall(r"[\w-]+", head)[2:]]
    names = set()
    for producer, kind, *marks in (re.split(r" ?\| ?", row.strip(" |")) for row in rows):
        folder = "transformers" if producer in through else folders.get(producer, producer)
        kind = through.get(producer, "") + kind
        assert len(marks) == len(architectures) == len(LINEARS)
        names |= {f"{folder}/{a}-{kind}" for a, m in zip(architectures, marks, strict=True) if m != "–"}
    return names


def test_what_is_kept_is_in_the_log():
    assert len(listed()) == 256
    assert {name_of(p) for p in KEPT} <= listed()


@pytest.mark.ecosystem("applications")
@pytest.mark.skipif(not PRODUCED.is_dir(), reason="make test-ecosystem lets the producers write")
def test_everything_that_the_log_lists_was_written():
    """A producer whose environment broke writes nothing, which no other test would see."""
    assert {name_of(p) for p in WRITTEN if p.parent.name != "logs"} == listed()


def test_every_architecture_and_producer_is_kept():
    """What `make test` has of them; what a producer cannot write is in
    benchmarks/ecosystem-models.md.
    """
    assert {architecture(p) for p in KEPT} == set(LINEARS)
    producers = {"autoawq", "autoround", "gptqmodel", "hqq", "llamacpp", "llmcompressor", "mlx", "modelopt", "transformers"}
    assert {p.parent.name for p in KEPT} == producers
    for path in KEPT:
        assert sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir())) < 205_000


@pytest.mark.parametrize("verb", ["convert", "dequantize"])
def test_gpt_oss_halves_of_gptqmodel_become_the_rows_that_their_names_mean(verb, tmp_path):
    """The file's gate_proj and up_proj are the halves of gate_up_proj, whose rows alternate."""
    path = Path(__file__).parents[1] / "data" / "models" / "gptqmodel" / "gpt_oss-gptq-act-order"
    out = tmp_path / "out.safetensors"
    assert main([verb, str(path), str(out), *(["--to", "halfbyte"] if verb == "convert" else [])]) == 0
    given, made = hb.open(path), hb.open(out)
    for expert in range(2):
        gate, up = (f"model.layers.0.mlp.experts.{expert}.{name}_proj" for name in ("gate", "up"))
        rows = np.concatenate([given[name].dequantize("bfloat16") for name in (gate, up)])
        if verb == "dequantize":  # transformers' own stack, whose matrices are (k, n)
            joined = np.asarray(made["model.layers.0.mlp.experts.gate_up_proj"][expert])
            assert np.array_equal(joined.astype("float32"), rows.T.astype("float32"))
            continue
        for name, wanted in ((gate, rows[0::2]), (up, rows[1::2])):
            assert np.array_equal(made[name].dequantize("bfloat16").astype("float32"), wanted.astype("float32"))
