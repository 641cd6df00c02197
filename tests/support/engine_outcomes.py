"""What each engine is expected to do with checkpoints that differ in one word or number.

    python -m support.engine_outcomes             # in tests/: write data/engine_outcomes.txt anew
    python -m support.engine_outcomes versions    # print each case of a kind and the predictions

The checkpoints are stand-ins that state what the rules ask of one: format, configuration, metadata,
weights. Every engine is asked at its newest version, and at each version at which a rule begins or
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from halfbyte.checkpoints import TensorInfo, engines
from halfbyte.checkpoints.engines import ENGINES, LATEST, READS, RULES, predictions
from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from support.outcome_table import OutcomeTable

LAYER = "model.layers.0"
Outcomes = Iterator[tuple[str, str, str]]


@dataclass
class StandIn:
    """A checkpoint, as far as the rules look."""

    format: str
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorInfo, ...] = ()
    zeros: int = 8
    path: Path = Path("MODEL")
    remote: None = None
    shards: Any = None

    @property
    def scheme(self) -> Any:
        return SimpleNamespace(raw=self.quantization)

    def infos(self) -> tuple[TensorInfo, ...]:
        return self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(info.key for info in self.tensors)

    def __contains__(self, key: object) -> bool:
        return any(info.key == key for info in self.tensors)

    def keys(self) -> tuple[str, ...]:
        return tuple(info.key for info in self.tensors)

    def info(self, key: str) -> TensorInfo:
        return next(info for info in self.tensors if info.key == key)

    def zero_points(self, key: str) -> np.ndarray | None:
        return np.full((4, 2), self.zeros, np.int16)

    def raw(self, key: str) -> dict[str, np.ndarray]:
        return {"weight_scale_2": np.float32([1.0]), "qzeros": np.zeros((2, 4), np.int32)}


def _packed(codec: str, layout: str, *names: str, shape: tuple[int, ...] = (64, 128), **options: Any) -> tuple[TensorInfo, ...]:
    fmt = format_named(codec, options.pop("group", None), **options)
    return tuple(TensorInfo(f"{LAYER}.{n}", "quantized", layout, fmt, shape, "uint8", 4096, ("m.safetensors",)) for n in names)


def _dense(*names: str, shape: tuple[int, ...] = (64, 128)) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(f"{LAYER}.{n}", "tensor", "", None, shape, "float16", 4096, ("m.safetensors",)) for n in names)


def _said(checkpoint: StandIn, engine: str) -> str:
    try:
        found = predictions(checkpoint, engine)  # type: ignore[arg-type]
    except HalfbyteError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError, StopIteration) as error:  # a rule that looks into the files
        return type(error).__name__
    return "\n".join(" ".join((p.key, p.verdict, p.reason, p.report, p.repair)) for p in found)


KINDS = (*dict.fromkeys(kind for kinds in READS.values() for kind in kinds), "halfbyte", "onnx", "exl3")
WEIGHTS = {
    "int4": ("int4", {"group": 32}), "int4 of 64": ("int4", {"group": 64}), "int4 of 128": ("int4", {"group": 128}),
    "int4 rows": ("int4", {"group": -1}), "uint4": ("uint4", {"group": 32}), "int3": ("int3", {"group": 32}),
    "int8": ("int8", {"group": 32}), "uint8": ("uint8", {"group": 128}), "fp8": ("fp8_e4m3", {"group": -1}),
    "fp8 blocks": ("fp8_e4m3", {"group": 128, "rows": 128}), "e5m2": ("fp8_e5m2", {"group": -1}), "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}), "mxfp8": ("mxfp8_e4m3", {}), "nf4": ("nf4", {"group": 64}), "q4_K": ("q4_K", {}),
    "affine4": ("affine4", {"group": 32}),
}  # fmt: skip
MODULES = ("self_attn.q_proj", "mlp.down_proj")
EXPERTS = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj")


def _versions(engine: str) -> list[str]:
    marks = {v for rule in RULES if rule.engine in (engine, engines.BUILDS.get(engine)) for v in (rule.since, rule.before)}
    marks -= {(), LATEST}
    below = {(*v[:-1], v[-1] - 1) for v in marks if v[-1]}
    return [engine, *(f"{engine}=={'.'.join(map(str, v))}" for v in sorted(marks | below))]


def of_versions() -> Outcomes:
    for kind in KINDS:
        for label, (codec, options) in WEIGHTS.items():
            for names in (MODULES, EXPERTS):
                weights = _packed(codec, "modelopt" if "fp4" in codec else kind, *names, **options)
                stand_in = StandIn(kind, {"model_type": "llama"}, quantization={"quant_method": kind, "bits": 4}, tensors=weights)
                for engine in ENGINES:
                    for asked in _versions(engine) if label in ("int4", "fp8", "nvfp4", "uint4") else (engine,):
                        yield f"{kind} in {engine}", f"{label} {names[0]} {asked}", _said(stand_in, asked)


QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "bits": (1, 2, 3, 4, 8, None),
    "sym": (True, False, None),
    "desc_act": (True, False),
    "group_size": (-1, 32, 64, 128),
    "checkpoint_format": ("gptq", "gptq_v2", "gptq_p"),
    "quant_algo": ("FP8", "NVFP4", "MXFP8", "W4A16_AWQ", "MIXED_PRECISION"),
    "activation_scheme": ("dynamic", "static", None),
    "weight_block_size": (None, [128, 128], [32, 128], [1024, 128], [1056, 128], [128, 64], [31, 128]),
    "format": ("marlin-24", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized"),
    "sparsity_config": ({"sparsity_structure": "2:4"}, {"sparsity_structure": "0:0"}, {"format": "sparse-24-bitmask"}, "2:4"),
    "quant_method": ("gptq", "awq", "compressed-tensors", "sparseml", "auto-round"),
    "zero_point": (True, False),
    "dynamic": ({"-:.*q_proj": {}}, {"+:.*q_proj": {"bits": 8}}, {}),
    "packing_format": ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8_static", "auto_round"),
    "version": ("gemm", "gemv"),
    "mode": ("affine", "mxfp4", "nvfp4"),
    "modules_to_not_convert": (["lm_head"], ["self_attn"], [f"{LAYER}.self_attn.q_proj"], ["mlp"], None),
    "ignore": (["lm_head"], ["re:.*"], ["Linear"]),
    "exclude": (["lm_head"],),
    "producer": ({"name": "modelopt"},),
    "quant_type": ({"default": {"_type": "Int4WeightOnlyConfig"}}, {"default": {"_type": "NVFP4InferenceConfig"}}),
    "llm_int8_skip_modules": (["lm_head"],),
    "config_groups": tuple(
        {"g": {"targets": ["Linear"], "weights": weights, **more}}
        for weights in (
            {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            {"num_bits": 4, "type": "int", "symmetric": False, "actorder": "group"},
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            {"num_bits": 8, "type": "float", "actorder": "weight"},
            {"num_bits": 4, "type": "float", "actorder": "static"},
            {"num_bits": 8, "type": "int", "strategy": "channel"},
        )
        for more in (
            {},
            {"format": "marlin-24"},
            {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}},
            {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}},
        )
    ),
}


def of_quantization() -> Outcomes:
    for kind in KINDS:
        for key, values in QUANTIZATION.items():
            for value in values:
                for codec, options in (WEIGHTS["int4"], WEIGHTS["uint8"], WEIGHTS["fp8 blocks"]):
                    for names in (MODULES, EXPERTS):
                        stated = {"quant_method": kind, "bits": 4, "group_size": 32, "sym": True, key: value}
                        tensors = (*_packed(codec, kind, *names, **options), *_dense("mlp.gate.weight"))
                        asked = [v for e in ENGINES for v in (_versions(e) if codec == "int4" and kind in READS[e] else [e])]
                        found = [_said(StandIn(kind, {"model_type": "llama"}, {}, stated, tensors), v) for v in asked]
                        yield f"{kind} {key}", f"{value} {codec} {names[0]}", "\n".join(found)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64,
    "num_hidden_layers": 6, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
FULL, WINDOW = "full_attention", "sliding_attention"
PATTERN = [WINDOW] * 5 + [FULL]
CHANGES: dict[str, tuple[Any, ...]] = {
    "head_dim": (..., 32, 64, 128, 0),
    "num_attention_heads": (..., 1, 4),
    "hidden_size": (..., 64, 256),
    "sliding_window": (None, 1, 4095, 4096, 4097),
    "max_position_embeddings": (..., 1, 8192),
    "num_hidden_layers": (1, 3, 4, 5, 6, 7),
    "layer_types": ([FULL] * 6, [WINDOW] * 6, PATTERN, PATTERN[::-1], [FULL, *PATTERN[1:]], [WINDOW, FULL], None, []),
    "sliding_window_pattern": (1, 2, 4, 5, 6, 7),
    "rope_theta": (..., 1e6, 1.5e5),
    "tie_word_embeddings": (True, ...),
    "rope_scaling": (
        None,
        {"rope_type": "yarn", "truncate": False},
        {"type": "yarn", "truncate": False},
        {"rope_type": "linear"},
    ),
    "rope_parameters": (
        {"rope_theta": 1e4},
        {"rope_theta": 1e6},
        {"rope_type": "yarn", "truncate": False},
        {"rope_type": "default"},
        {},
        {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 1e4}},
        {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 2e4}},
        {FULL: {"rope_type": "yarn", "truncate": False}},
        {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "rope_type": "yarn", "original_max_position_embeddings": 4096},
        {FULL: {"rope_type": "linear", "factor": 8.0}},
    ),
    "rope_local_base_freq": (1e4,),
    "num_experts": (1, 2, 8, "8"),
    "num_local_experts": (1, 2),
    "n_routed_experts": (2,),
    "moe_num_experts": (2,),
    "quantization_config": ({"bits": 4},),
    "text_config": ({"model_type": "gemma4", "num_hidden_layers": 2},),
}


def of_configs() -> Outcomes:
    tables = (engines.MLX_THETA, engines.MLX_WIDTH_HEADS, engines.MLX_NO_WINDOW, engines.MLX_PATTERN, engines.MLX_LAYERS)
    types = sorted({*(t for table in tables for t in table), *engines.MLX_STACKS, "mamba", "other", "qwen3_moe"})
    tensors = (*_packed("affine4", "mlx", *MODULES, group=32), *_dense("mlp.experts.gate_up_proj", shape=(2, 8, 8)))
    other = (*_packed("mxfp4", "gpt-oss", "mlp.experts.down_proj", shape=(2, 64, 128)), *_dense("mlp.switch_mlp.up_proj.weight"))
    for model_type in types:
        for key, values in CHANGES.items():
            for value in values:
                config = {**CONFIG, "model_type": model_type, key: value}
                without = {k: v for k, v in config.items() if v is not ...}
                for theta in (True, False) if key.startswith("rope_") else (True,):
                    stated = without if theta else {k: v for k, v in without.items() if k != "rope_theta"}
                    found = [_said(StandIn("dense", stated, tensors=tensors), e) for e in ("mlx", "vllm", "transformers")]
                    found.append(_said(StandIn("mlx", stated, tensors=tensors), "mlx"))
                    if key in ("rope_parameters", "num_hidden_layers"):
                        found += [_said(StandIn("gpt-oss", stated, tensors=other), e) for e in ("mlx", "vllm", "transformers")]
                    yield model_type, f"{key}={value} {theta}", "\n".join(found)


METADATA: dict[str, Any] = {
    "embedding_length": 128, "attention.head_count": 2, "attention.key_length": 64, "block_count": 2, "logit_scale": 0.5,
    "expert_feed_forward_length": 64, "attention.sliding_window": 128, "expert_count": 0,
}  # fmt: skip
NUMBERS = (..., 0, 1, 2, 32, 46, 62, 63, 128, 256, 512)


def of_metadata() -> Outcomes:
    archs = {*engines.TRANSFORMERS_GGUF, *engines.LLAMA_CPP_WIDTH, *engines.HEAD_LENGTH, *engines.GEMMA_27B, "clip", "other"}
    archs |= {arch for some in engines.LLAMA_CPP_KEYS.values() for arch in some}
    tensors = _packed("q4_K", "gguf", *MODULES, shape=(64, 256))

    def said(arch: str, metadata: dict[str, Any]) -> str:
        stand_in = StandIn("gguf", {"model_type": arch}, {"general.architecture": arch, **metadata}, tensors=tensors)
        return "\n".join(_said(stand_in, engine) for engine in ("llama.cpp", "transformers", "vllm", "mlx"))

    for arch in sorted(archs):
        base = {f"{arch}.{key}": value for key, value in METADATA.items()}
        for key in METADATA:
            for value in NUMBERS:
                changed = {**base, f"{arch}.{key}": value}
                yield arch, f"{key}={value}", said(arch, {k: v for k, v in changed.items() if v is not ...})
        for width, heads, length, layers in (
            (512, 2, 256, 46),
            (5376, 32, 128, 62),
            (4608, 32, 128, 46),
            (2048, 8, 256, 2),
            (128, 2, 128, 2),
        ):
            sizes = {
                "embedding_length": width,
                "attention.head_count": heads,
                "attention.key_length": length,
                "block_count": layers,
            }
            yield arch, f"{width} {heads} {length} {layers}", said(arch, {f"{arch}.{k}": v for k, v in sizes.items()})
        for more in (
            {"": 1}, {"a": [[1], [2]]}, {"a": [1, 2]}, {"a": ["x"]}, {"a": []}, {"tokenizer.ggml.tokens": ["x"] * 3},
            {"tokenizer.ggml.tokens": ["x"] * 32000}, {"tokenizer.ggml.tokens": ["x"] * 32001},
            {"tokenizer.ggml.tokens": ["x"], "tokenizer.ggml.padding_token_id": 0}, {f"{arch}.rope.scaling.type": "yarn"},
            {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}, {"gemma3.rope.scaling.type": "linear"},
            {"gemma3.rope.scaling.type": "none", "gemma3.rope.scaling.factor": 8.0},
            {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 1},
        ):  # fmt: skip
            yield arch, str(more)[:60], said(arch, {**base, **more})


def of_words() -> Outcomes:
    for text in (
        *ENGINES,
        "all",
        "vllm==0.19",
        "vllm==0.19.1",
        "vllm==",
        "vllm==0.x",
        "VLLM",
        "mlx==0.31",
        "other",
        "",
        "vllm=0.1",
    ):
        yield (
            "words",
            text,
            _said(StandIn("awq", {"num_experts": 2}, tensors=_packed("uint4", "awq-gemm", *MODULES, group=32)), text),
        )


KINDS_OF_CASES: dict[str, Callable[[], Outcomes]] = {
    "versions": of_versions, "quantization": of_quantization, "configs": of_configs, "metadata": of_metadata, "words": of_words,
}  # fmt: skip


def outcomes(kind: str) -> Outcomes:
    """(subject, case, predictions) of each case of a kind, on a CPU with AVX-512."""
    with patch.object(engines, "cpu_flags", lambda: frozenset({"avx2", "avx512f"})):
        yield from KINDS_OF_CASES[kind]()


TABLE = OutcomeTable("engine_outcomes", KINDS_OF_CASES, outcomes)

if __name__ == "__main__":
    TABLE.main()
