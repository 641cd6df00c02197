"""Whole small checkpoints, one or more for each row of tests/cases.md that an engine can be given.

    for name, path in write_cases(folder): ...      "case-45-awq-skip", folder/"case-45-awq-skip"

Rows on kernels, platforms, encoders and tokenizers have none: no file shows them to an engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.errors import HalfbyteError
from support.gguf_models import dense_model as dense_gguf_model
from support.gguf_models import write as write_gguf
from support.gguf_writer import GGUF, Tensor
from support.safetensors_bytes import gptq_weight, under
from support.tiny_models import PRODUCERS, Producer, write_tiny

Tensors = dict[str, Any]
Config = dict[str, Any]

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MLP = ("gate_proj", "up_proj", "down_proj")


def rebuilt(base: str, codec: str | None = None, **stated: Any) -> Producer:
    """A producer with another codec or further words in its quantization config."""
    how = PRODUCERS[base]
    return how._replace(codec=codec or how.codec, config={**how.config, **stated})


def ct(
    codec: str, word: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None, **options: Any
) -> Producer:
    """compressed-tensors with one group, as llm-compressor states it."""
    group = {"targets": ["Linear"], "weights": dict(weights)} | ({"input_activations": dict(activations)} if activations else {})
    config = {
        "quant_method": "compressed-tensors",
        "format": word,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    return Producer("compressed-tensors", codec, options, config)


def tiny(
    path: Path, producer: str | Producer, arch: str = "llama", config: Callable[[Config], object] = lambda c: None, **options: Any
) -> Path:
    """A tiny model; its config names its class."""

    def named(c: Config) -> None:
        c["architectures"] = [CLASSES[arch]]
        config(c)

    write_tiny(path, arch, producer, change_config=named, **{**HEADS, **options})
    return path


def ends(tensors: Tensors, *suffixes: str) -> list[str]:
    """Names of tensors with one of the endings."""
    return [n for n in tensors if n.endswith(suffixes)]


def shards(path: Path, parts: Callable[[str], int], count: int) -> Path:
    """Splits model.safetensors, and writes the index."""
    from safetensors.torch import load_file, save_file  # NumPy has no float8

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    where = {n: names[parts(n)] for n in tensors}
    for name in names:
        save_file({n: t for n, t in tensors.items() if where[n] == name}, path / name, {"format": "pt"})
    index(path, where)
    return path


def index(path: Path, where: Mapping[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(where)}), "utf-8")


def layer(name: str) -> int:
    """0 for the first layer and what is before it, else 1."""
    return int(".layers.1." in name or name.startswith(("model.norm", "lm_head")))


CASES: dict[str, Callable[[Path], Path]] = {}


def case(name: str) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def added(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES[f"case-{name}"] = make
        return make

    return added


def simple(name: str, producer: str | Producer, **options: Any) -> None:
    """A case that `tiny` writes."""
    CASES[f"case-{name}"] = lambda path: tiny(path, producer, **options)


def _zero_word(tensors: Tensors) -> None:
    for name in ends(tensors, ".qzeros"):
        tensors[name] = tensors[name].copy()
        tensors[name][0, 0] &= ~0xF


def _full_word(tensors: Tensors) -> None:
    for name in ends(tensors, ".qzeros"):
        words = tensors[name].copy()
        words[0, 0] |= 0xF
        tensors[name] = words


def _scale_zero(tensors: Tensors) -> None:
    """The first block's exponent byte becomes 0, 2^-127."""
    for name in ends(tensors, ".weight_scale", "_proj.scales", "_proj_scales"):
        scales = np.array(tensors[name])
        scales.view(np.uint8).reshape(-1)[0] = 0
        tensors[name] = scales


def _zero_block(tensors: Tensors) -> None:
    """The first block of each weight becomes codes 0 under scale 0."""
    for name in ends(tensors, ".weight_scale"):
        packed = name.replace("weight_scale", "weight_packed")
        for part, size in ((name, 1), (packed if packed in tensors else name.removesuffix("_scale"), 8)):
            array = np.array(tensors[part])
            array.view(np.uint8).reshape(-1)[:size] = 0
            tensors[part] = array


simple("01-awq-zero-point-0", "awq", edit=_zero_word)
simple("02-gptq-v1-zero-word-15", rebuilt("gptq3", "uint4:g32", bits=4, checkpoint_format="gptq"), edit=_full_word)
simple("02-gptq-v2-4-bits", rebuilt("gptq3", "uint4:g32", bits=4))
simple("02-gptq-v1-2-bits", rebuilt("gptq3", "uint2:g32", bits=2, checkpoint_format="gptq"))
simple("02-gptq-v1-8-bits", rebuilt("gptq", "int8:g32", bits=8))
simple("03-gptq-3-bits", rebuilt("gptq3", checkpoint_format="gptq"))
simple("04-awq-interleave", "awq")
simple("06-ct-mxfp4-exponent-0", "ct-mxfp4", edit=_scale_zero)
simple("06-mlx-mxfp4-exponent-0", "mlx-mxfp4", edit=_scale_zero)
simple("06-gpt-oss-exponent-0", "gpt-oss", arch="gpt_oss", edit=_scale_zero)
simple(
    "07-modelopt-mxfp8-bytes",
    Producer(
        "modelopt", "mxfp8_e4m3", {}, {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ["lm_head"]}
    ),
)
simple("08-modelopt-zero-blocks", "modelopt", edit=_zero_block)
simple("08-ct-nvfp4-zero-blocks", "ct-nvfp4", edit=_zero_block)

INT = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BF16 = {"scale_dtype": "bfloat16"}
simple("10-ct-uint4", ct("uint4:g32", "pack-quantized", {**INT, "num_bits": 4, "symmetric": False}, **BF16))
simple("10-ct-int4", ct("int4:g32", "pack-quantized", {**INT, "num_bits": 4}, **BF16))
simple(
    "11-ct-uint4-channels",
    ct(
        "uint4:channel",
        "pack-quantized",
        {**INT, "num_bits": 4, "symmetric": False, "strategy": "channel", "group_size": None},
        **BF16,
    ),
    skip=lambda n: n.endswith("down_proj"),
    intermediate_size=100,
)
simple(
    "15-nf4-partial-block",
    Producer(
        "bitsandbytes", "nf4:g4096", {}, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    ),
    intermediate_size=96,
)
simple(
    "16-fp4-block-128",
    Producer(
        "bitsandbytes", "bnb_fp4:g128", {}, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    ),
)
simple("20-gptq-odd-groups", "gptq", intermediate_size=96)

# int8 and FP8 with activations of the same kind: what engines call W8A8.
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
simple("10-ct-w8a8", ct("int8:channel", "int-quantized", CHANNEL, TOKENS, scale_dtype="float32"))
simple("10-ct-w8a8-odd-sizes", ct("int8:channel", "int-quantized", CHANNEL, TOKENS, scale_dtype="float32"), intermediate_size=100)
simple("70-ct-fp8-channels", ct("fp8_e4m3:channel", "float-quantized", {**CHANNEL, "type": "float"}, {**TOKENS, "type": "float"}))
simple("70-ct-fp8-weights-alone", ct("fp8_e4m3:channel", "float-quantized", {**CHANNEL, "type": "float"}))
simple("19-gptq-odd-sizes", "gptq", intermediate_size=160, head_dim=32)


@case("37-counts-past-the-file")
def _counts(path: Path) -> Path:
    return _bytes(path, GGUF(tensors=[Tensor("w", (4194305, 4194305, 211106198978564), 0, bytes(16))]).bytes())


@case("38-offset-past-the-file")
def _offset(path: Path) -> Path:
    return _bytes(path, GGUF(tensors=[Tensor("w", (4, 1), 0, bytes(16), offset=2**40)]).bytes())


@case("38-cut-by-a-byte")
def _cut(path: Path) -> Path:
    whole = write_gguf(path.with_suffix(".whole"), "llama", dense_gguf_model("llama"), True)
    return _bytes(path, whole.read_bytes()[:-1])


@case("39-k-quant-rows-of-32")
def _short_rows(path: Path) -> Path:
    return _bytes(path, GGUF(tensors=[Tensor("w", (32, 8), 12, bytes(144))]).bytes())


def _bytes(path: Path, content: bytes) -> Path:
    file = path.with_suffix(".gguf")
    file.write_bytes(content)
    return file


@case("40-shard-outside")
def _outside(path: Path) -> Path:
    tiny(path, "gptq")
    shards(path, layer, 2)
    outside = path.with_name(f"{path.name}-outside.safetensors")
    (path / "model-00002-of-00002.safetensors").rename(outside)
    _repoint(path, "model-00002-of-00002.safetensors", f"../{outside.name}")
    return path


def _repoint(path: Path, old: str, new: str) -> None:
    where = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    index(path, {n: new if f == old else f for n, f in where.items()})


@case("41-missing-shard")
def _missing(path: Path) -> Path:
    shards(tiny(path, "gptq"), layer, 2)
    (path / "model-00002-of-00002.safetensors").unlink()
    return path


def _stray(path: Path, producer: str, config: Callable[[Config], object] = lambda c: None) -> Path:
    """A whole model of other norms beside the shards that the index names."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny(path, producer, config=config) / "model.safetensors")
    shards(path, layer, 2)
    other = {n: t.flip(0).contiguous() if n.endswith("norm.weight") else t for n, t in tensors.items()}
    save_file(other, path / "model.safetensors", {"format": "pt"})
    return path


CASES["case-42-stray-file-ct"] = lambda path: _stray(path, "ct-int4", _compressed)
CASES["case-42-stray-file-gptq"] = lambda path: _stray(path, "gptq")
CASES["case-42-stray-file-mlx"] = lambda path: _stray(path, "mlx")


def _compressed(config: Config) -> None:
    config["quantization_config"]["quantization_status"] = "compressed"


@case("42-stale-index")
def _stale(path: Path) -> Path:
    shards(tiny(path, "gptq"), layer, 2)
    where = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    index(path, where | {"model.layers.2.mlp.up_proj.weight": "model-00002-of-00002.safetensors"})
    return path


def stated(**words: Any) -> Callable[[Config], None]:
    """Further words of the quantization config; None removes one."""

    def change(config: Config) -> None:
        q = config.get("quantization_config", config.get("quantization"))
        q.update(words)
        for word in [w for w, v in words.items() if v is None]:
            del q[word]

    return change


def _dense_down(name: str) -> bool:
    return name.endswith("down_proj")


simple("44-ct-nvfp4-unequal-scales", "ct-nvfp4", config=_compressed)
simple("45-awq-skip-mlp.gate", "awq", config=stated(modules_to_not_convert=["mlp.gate"]))
simple("45-awq-skip-down", "awq", config=stated(modules_to_not_convert=["mlp.down_proj"]), skip=_dense_down)
simple("45-ct-ignore-mlp.gate", "ct-int4", config=stated(ignore=["lm_head", "mlp.gate"], quantization_status="compressed"))
simple("45-bitsandbytes-skip-mlp.gate", "bitsandbytes", config=stated(llm_int8_skip_modules=["lm_head", "mlp.gate"]))
simple("45-fp8-skip-layers.1", "fp8", config=stated(modules_to_not_convert=["lm_head", "layers.10"], activation_scheme="dynamic"))
simple("45-mlx-dense-down", "mlx", skip=_dense_down)

DOWN = "model.layers.0.mlp.down_proj"
simple(
    "48-gptq-one-layer-of-8-bits",
    "gptq",
    codecs={DOWN: "int8:g32"},
    config=stated(dynamic={r"+:.*layers\.0\.mlp\.down_proj": {"bits": 8}}),
)
simple("48-gptq-one-dense-layer", "gptq", skip=lambda n: n == DOWN, config=stated(dynamic={r"-:.*layers\.0\.mlp\.down_proj": {}}))
simple("48-mlx-one-layer-of-8-bits", "mlx", codecs={DOWN: "affine8:g32"}, config=stated(**{DOWN: {"group_size": 32, "bits": 8}}))
simple("48-mlx-one-layer-of-6-bits", "mlx", codecs={DOWN: "affine6:g64"}, config=stated(**{DOWN: {"group_size": 64, "bits": 6}}))
simple(
    "48-ct-two-groups",
    ct("int4:g32", "pack-quantized", {**INT, "num_bits": 4}, **BF16),
    codecs={f"model.layers.{i}.mlp.down_proj": "int8:g32" for i in range(2)},
    config=stated(
        config_groups={
            "group_0": {"targets": ["re:.*self_attn.*", "re:.*gate_proj", "re:.*up_proj"], "weights": {**INT, "num_bits": 4}},
            "group_1": {"targets": ["re:.*down_proj"], "weights": {**INT, "num_bits": 8}},
        }
    ),
)
simple("49-gptq-one-group", rebuilt("gptq", "int4:channel", group_size=-1))
simple("49-gptq-one-group-act-order", rebuilt("gptq", "int4:channel", group_size=-1, desc_act=True))
simple("49-awq-one-group", rebuilt("awq", "uint4:channel", group_size=-1))


def _tied(config: Config) -> None:
    config["tie_word_embeddings"] = True


simple("50-gptq-tied", "gptq", tie_word_embeddings=True)
simple("50-mlx-tied", "mlx", tie_word_embeddings=True)
simple(
    "50-gptq-tied-head-stored",
    "gptq",
    tie_word_embeddings=True,
    edit=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}),
)
simple("50-ct-tied", "ct-int4", tie_word_embeddings=True, config=_compressed)
simple("77-mlx-head-under-a-tied-config", "mlx", config=_tied)
simple("77-gptq-dense-head-under-a-tied-config", "gptq", config=_tied)

simple(
    "58-gptq-list-without-attention",
    "gptq",
    config=stated(modules_in_block_to_quantize=[["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]),
)
simple(
    "58-gptq-dense-mlp",
    "gptq",
    skip=lambda n: ".mlp." in n,
    config=stated(
        modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    ),
)


@case("59-gptq-3-bits-one-group")
def _three(path: Path) -> Path:
    def side(config: Config) -> None:
        q = config.pop("quantization_config") | {"group_size": -1, "desc_act": True}
        del q["checkpoint_format"]
        path.mkdir(parents=True, exist_ok=True)
        (path / "quantize_config.json").write_text(json.dumps(q), "utf-8")

    return tiny(path, rebuilt("gptq3", "uint3:channel", group_size=-1, checkpoint_format="gptq"), config=side)


def _empty_zeros(tensors: Tensors) -> None:
    for name in ends(tensors, ".qzeros"):
        if ".self_attn." in name:
            tensors[name] = np.zeros(0, np.int32)


simple("60-gptq-empty-zero-points", rebuilt("gptq", checkpoint_format="gptq_v2"), edit=_empty_zeros)

AUTOROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "data_type": "int",
    "iters": 200,
    "autoround_version": "0.9.1",
    "block_name_to_quantize": "model.layers",
}
simple("61-auto-round", rebuilt("gptq", **AUTOROUND))
simple(
    "61-auto-round-8-bits-and-dense",
    rebuilt("gptq", **AUTOROUND),
    codecs={DOWN: "int8:g64"},
    skip=lambda n: n.endswith("q_proj"),
    config=stated(extra_config={DOWN: {"bits": 8, "group_size": 64}, ".*q_proj.*": {"bits": 16, "data_type": "float"}}),
)
simple(
    "61-auto-round-v2-zeros",
    rebuilt("gptq3", "uint4:g32", **AUTOROUND | {"bits": 4, "checkpoint_format": None, "packing_format": "auto_round"}),
)
simple("61-auto-round-awq", rebuilt("awq", **AUTOROUND | {"sym": False, "packing_format": "auto_round:auto_awq"}))

MIXED = {
    "group_0": {
        "targets": ["re:.*self_attn.*_proj"],
        "format": "float-quantized",
        "input_activations": {**TOKENS, "type": "float"},
        "weights": {**CHANNEL, "type": "float"},
    },
    "group_1": {
        "targets": ["re:.*mlp.*"],
        "format": "nvfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    },
}
simple(
    "62-ct-fp8-and-nvfp4",
    Producer(
        "compressed-tensors",
        "nvfp4",
        {"policy": "compressed-tensors"},
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": MIXED,
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        },
    ),
    codecs={f"model.layers.{i}.self_attn.{p}_proj": "fp8_e4m3:channel" for i in range(2) for p in "qkvo"},
)


def _old_key(config: Config) -> None:
    config["compression_config"] = config.pop("quantization_config") | {"quant_method": "sparseml"}


def _old_method(config: Config) -> None:
    config["quantization_config"]["quant_method"] = "sparseml"


simple("63-ct-compression_config", "ct-int4", config=_old_key)
simple("63-ct-sparseml", "ct-int4", config=_old_method)


def _stack_experts(tensors: Tensors) -> None:
    for base in sorted({n.partition(".experts.")[0] for n in tensors if ".experts." in n}):
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(f"{base}.experts.")})
        for suffix in ("weight_packed", "weight_scale"):
            one = [{p: tensors.pop(f"{base}.experts.{e}.{p}.{suffix}") for p in MLP} for e in range(count)]
            tensors[f"{base}.experts.gate_up_proj.{suffix}"] = np.stack(
                [np.concatenate([np.asarray(w["gate_proj"]), np.asarray(w["up_proj"])]) for w in one]
            )
            tensors[f"{base}.experts.down_proj.{suffix}"] = np.stack([np.asarray(w["down_proj"]) for w in one])
        for name in [n for n in tensors if n.startswith(f"{base}.experts.") and n.endswith("weight_shape")]:
            del tensors[name]


simple("64-ct-experts-stacked", "ct-int4", arch="qwen3_moe", edit=_stack_experts, config=_compressed)
simple("64-ct-experts-single", "ct-int4", arch="qwen3_moe", config=_compressed)
simple(
    "65-ct-ignore-wrapped",
    "ct-int4",
    config=stated(ignore=["lm_head", "model.vision_tower.q_proj.linear"], quantization_status="compressed"),
)


@case("66-modelopt-weights-alone-in-the-sidecar")
def _sidecar(path: Path) -> Path:
    def side(config: Config) -> None:
        del config["quantization_config"]
        quantization = {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        }
        path.mkdir(parents=True, exist_ok=True)
        (path / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt", "version": "0.40"}, "quantization": quantization}), "utf-8"
        )

    return tiny(path, "modelopt", config=side)


def _mixed_precision(config: Config) -> None:
    layers = {}
    for i in range(2):
        for p in MLP:
            layers[f"model.layers.{i}.mlp.{p}"] = {"quant_algo": "NVFP4", "group_size": 16}
        for p in "qkvo":
            layers[f"model.layers.{i}.self_attn.{p}_proj"] = {"quant_algo": "MXFP8", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
        "producer": {"name": "modelopt"},
    }


simple(
    "67-modelopt-mixed-precision",
    Producer("modelopt", "nvfp4", {}, PRODUCERS["modelopt"].config),
    codecs={f"model.layers.{i}.self_attn.{p}_proj": "mxfp8_e4m3" for i in range(2) for p in "qkvo"},
    config=_mixed_precision,
)


def _low_rank(tensors: Tensors) -> None:
    rng = np.random.default_rng(0)
    for name in ends(tensors, ".weight_scale_2"):
        base = name.removesuffix(".weight_scale_2")
        n, k = np.asarray(tensors[f"{base}.weight"]).shape
        tensors[f"{base}.svdquant_lora_a"] = (rng.integers(-8, 8, (8, 2 * k)) / 64).astype(ml_dtypes.bfloat16)
        tensors[f"{base}.svdquant_lora_b"] = (rng.integers(-8, 8, (n, 8)) / 64).astype(ml_dtypes.bfloat16)


simple(
    "68-modelopt-svd",
    "modelopt",
    edit=_low_rank,
    config=lambda c: c["quantization_config"].update(
        quant_algo="NVFP4_SVD",
        config_groups={
            "group_0": {
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "has_zero_point": False,
                "pre_quant_scale": True,
                "targets": ["Linear"],
                "lora_rank": 8,
            }
        },
    ),
)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def _one_scale(tensors: Tensors) -> None:
    """A scale for a whole matrix under the name of block scales."""
    for name in ends(tensors, ".weight_scale_inv"):
        scale = float(np.asarray(tensors[name]).astype(np.float32).max())
        tensors[name] = np.float32(scale).astype(ml_dtypes.bfloat16).reshape(())


def _exponents(tensors: Tensors) -> None:
    for name in ends(tensors, ".weight_scale_inv"):
        scale = np.exp2(np.ceil(np.log2(np.asarray(tensors[name]).astype(np.float32))))
        tensors[name] = scale.astype(ml_dtypes.float8_e8m0fnu)


simple("70-fp8-one-scale", rebuilt("fp8", **FP8, weight_block_size=None), edit=_one_scale)
simple(
    "70-fp8-blocks-of-128",
    rebuilt("fp8", "fp8_e4m3:g128", **FP8, weight_block_size=[128, 128])._replace(options={"rows": 128}),
    hidden_size=128,
    intermediate_size=256,
)
simple("70-fp8-blocks-of-32", rebuilt("fp8", **FP8))


def _w4afp8(tensors: Tensors) -> None:
    """Experts as pairs of int4 under a scale for 128 inputs."""
    for name in [n for n in tensors if n.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        base = name.rpartition(".")[0]
        for e, whole in enumerate(np.asarray(tensors.pop(name), np.float32)):
            leaves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for leaf, w in zip(leaves, np.split(whole, len(leaves)), strict=True):
                scale = np.abs(w).reshape(w.shape[0], -1, 128).max(-1) / 7
                codes = np.clip(np.rint(w / np.repeat(scale, 128, 1)), -8, 7).astype(np.int8)
                tensors[f"{base}.{e}.{leaf}.weight"] = (codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)
                tensors[f"{base}.{e}.{leaf}.weight_scale_inv"] = scale


simple(
    "69-w4afp8",
    rebuilt("fp8", "fp8_e4m3:g128", **FP8, weight_block_size=[128, 128])._replace(options={"rows": 128}),
    arch="qwen3_moe",
    hidden_size=128,
    moe_intermediate_size=128,
    skip=lambda n: n.endswith(".experts"),
    edit=_w4afp8,
    config=stated(quant_method="w4afp8", group_size=128, ignored_layers=["lm_head"]),
)
simple("71-fp8-exponents", rebuilt("fp8", **FP8, scale_fmt="ue8m0"), edit=_exponents)


@case("73-fp8-scales-in-another-shard")
def _apart(path: Path) -> Path:
    return shards(tiny(path, rebuilt("fp8", **FP8)), lambda n: int(n.endswith("_scale_inv")), 2)


@case("73-gptq-parts-over-three-shards")
def _apart_gptq(path: Path) -> Path:
    return shards(tiny(path, "gptq"), lambda n: 1 + n.endswith("scales") if n.endswith(("qzeros", "scales")) else 0, 3)


@case("73-ct-parts-over-two-shards")
def _apart_ct(path: Path) -> Path:
    return shards(tiny(path, "ct-int4", config=_compressed), lambda n: int(n.endswith("_scale")), 2)


FP4 = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None, "ch_axis": -1,
    "observer_cls": "PerBlockMXObserver", "is_dynamic": False,
}  # fmt: skip
"""Activations stay dense: of those rounded to 4 bits too no logits tell right weights from wrong."""
simple(
    "74-quark-mxfp4",
    Producer(
        "quark",
        "mxfp4",
        {},
        {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "exclude": ["lm_head"],
            "algo_config": None,
            "global_quant_config": {
                "weight": FP4,
                "input_tensors": None,
                "output_tensors": None,
                "bias": None,
            },
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "kv_cache_quant_config": {},
            "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
        },
    ),
)


def _w13(tensors: Tensors) -> None:
    for base in sorted({n.partition(".experts.")[0] for n in tensors if ".experts." in n}):
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(f"{base}.experts.")})
        for suffix, to in (("weight_packed", "weight"), ("weight_scale", "weight_scale")):
            one = [{p: np.asarray(tensors.pop(f"{base}.experts.{e}.{p}.{suffix}")) for p in MLP} for e in range(count)]
            tensors[f"{base}.experts.w13_{to}"] = np.stack([np.concatenate([w["gate_proj"], w["up_proj"]]) for w in one])
            tensors[f"{base}.experts.w2_{to}"] = np.stack([w["down_proj"] for w in one])


simple(
    "75-qwen3-moe-w13",
    Producer("compressed-tensors", "mxfp4", {}, {"quant_method": "mxfp4"}),
    arch="qwen3_moe",
    skip=lambda n: ".experts" not in n,
    edit=_w13,
)


simple("76-gpt-oss-square", "gpt-oss", arch="gpt_oss", intermediate_size=64)


@case("78-consolidated-beside-the-shards")
def _consolidated(path: Path) -> Path:
    from safetensors.numpy import save_file

    shards(tiny(path, "awq"), layer, 2)
    (path / "model.safetensors.index.json").unlink()
    save_file(dict(under("layers.0.attention.wq", gptq_weight())), path / "consolidated.safetensors")
    return path


def _whole_gguf(path: Path) -> bytes:
    """The whole llama as llama.cpp's converter writes it, in Q8_0."""
    file = write_gguf(path.with_suffix(".whole"), "llama", dense_gguf_model("llama"), True)
    content = file.read_bytes()
    file.unlink()
    return content


def _with_pairs(path: Path, pairs: list[tuple[str, str, Any]], raw: bytes = b"", more: int = 0) -> Path:
    """The whole llama with these pairs before its own, which begin at byte 24, and a filler that
    keeps the data aligned.
    """
    whole, g = _whole_gguf(path), GGUF()
    added = b"".join(g.string(key) + g.value(kind, value) for key, kind, value in pairs)
    added += g.string("filler") + g.value("string", "x" * (-(len(added) + len(raw) + 26) % 32)) + raw
    count = int.from_bytes(whole[16:24], "little") + len(pairs) + more + 1
    return _bytes(path, whole[:16] + count.to_bytes(8, "little") + added + whole[24:])


@case("79-key-twice")
def _twice(path: Path) -> Path:
    return _with_pairs(path, [("odd", "uint32", 1), ("odd", "uint32", 2)])


@case("79-unknown-value-type")
def _unknown_type(path: Path) -> Path:
    return _with_pairs(path, [], GGUF().string("odd") + (77).to_bytes(4, "little"), 1)


@case("79-empty-key")
def _empty_key(path: Path) -> Path:
    return _with_pairs(path, [("", "uint32", 7)])


@case("79-nested-arrays")
def _nested(path: Path) -> Path:
    return _with_pairs(path, [("nested", "array[array[uint32]]", [[1, 2], [3]])])


@case("79-text-beyond-ascii")
def _text(path: Path) -> Path:
    return _with_pairs(path, [("é", "string", "ü"), ("none", "array[string]", [])])


def _split(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_gguf(path / "m.gguf", "llama", dense_gguf_model("llama"), True, 2).unlink()
    return path / "m-00001-of-00002.gguf"


@case("80-split-in-two")
def _both_parts(path: Path) -> Path:
    return _split(path)


@case("80-second-part-missing")
def _lost_part(path: Path) -> Path:
    first = _split(path)
    (path / "m-00002-of-00002.gguf").unlink()
    return first


@case("81-byte-pieces")
def _pieces(path: Path) -> Path:
    whole = _whole_gguf(path)
    path.mkdir(parents=True, exist_ok=True)
    parts = [path / f"m.gguf.part{i}of2" for i in (1, 2)]
    parts[0].write_bytes(whole[:4000])
    parts[1].write_bytes(whole[4000:])
    return parts[0]


@case("82-projector")
def _projector(path: Path) -> Path:
    pairs = [("general.architecture", "string", "clip"), ("clip.has_vision_encoder", "bool", 1)]
    return _bytes(path, GGUF(pairs=pairs, tensors=[Tensor("v.patch_embd.weight", (4, 4), 0, bytes(64))]).bytes())


def write_cases(folder: Path, report: Callable[[str], object] = print) -> Iterator[tuple[str, Path]]:
    """Writes every case; (name, path). What halfbyte's own writers refuse is reported and left out."""
    for name, make in CASES.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        try:
            yield name, make(folder / name)
        except HalfbyteError as error:
            report(f"{name} is not written: {error}")
