"""vLLM's quantization method "halfbyte": which checkpoints it takes over, and what each layer gets.

A checkpoint that this vLLM reads by itself on this device is left to it. Taken over are those whose
method vLLM has no class for (bitsandbytes, HQQ, MLX, halfbyte's own), whose configuration its class
refuses (GPTQ with activation order, 2, 3 or asymmetric 4 bits), and those that no kernel of vLLM
runs on a CPU (MXFP4, MXFP8, NVFP4, FP8 of compressed-tensors with dense activations, packed
integers of other than 4 bits or of sizes that are no multiples of 32, experts in GPTQ and AWQ;
without AVX-512 all packed integers, without AMX FP8 in blocks).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

import torch
from torch import nn

from ..checkpoints.engines import amx_multiplies, is_fp8
from ..errors import BackendError
from ..numerics.waiting import let_threads_of_started_processes_sleep
from .source import Projection, Source, stated_activations

logger = init_logger("vllm.halfbyte")

NAME = "halfbyte"

READ = (
    "gptq", "awq", "bitsandbytes", "hqq", "mxfp4", "compressed-tensors", "modelopt", "fp8", "torchao", "quark",
    "auto-round", "intel/auto-round", "metal-marlin", "mlx", NAME,
)  # fmt: skip
"""`quant_method`s that halfbyte reads."""
TABLES = ("embed_tokens", "embedding", "embeddings", "word_embeddings", "wte", "embed_in")
"""Endings of the names of tables of embeddings."""


def _cpu_refusal(method: str, settings: Mapping[str, Any], hf_config: Any) -> str | None:
    """Why vLLM's own kernels cannot run a checkpoint on a CPU, as vLLM 0.32 has them."""
    listed = settings.get("config_groups")
    groups = [group for group in listed.values() if isinstance(group, dict)] if isinstance(listed, dict) else []
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    stated = [settings.get("quant_algo"), settings.get("format"), *(group.get("format") for group in groups)]
    kinds = f"{method} {' '.join(map(str, stated))}".lower()
    for kind in ("mxfp4", "mxfp8", "nvfp4"):
        if kind in kinds:
            return f"no {kind.upper()} kernel for CPUs"
    if method in ("gptq", "awq") or "pack-quantized" in kinds:
        if not _has_integer_kernel():
            return "this build for CPUs has no kernel for packed integers (cpu_gemm_wna16)"
        integers = [settings.get("bits", 4), *(w.get("num_bits", 4) for w in weights if w.get("type", "int") == "int")]
        if any(bits != 4 for bits in integers):
            return "the kernel for CPUs multiplies packed integers of 4 bits, no others"
        if any(size % 32 for size in _sizes(hf_config)):
            return "the kernel for CPUs wants multiples of 32 as inputs and outputs"
    if any(is_fp8(group) and not group.get("input_activations") for group in groups):
        return "no kernel on CPUs for FP8 weights with activations that are not FP8"
    blocks = [settings.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    if any(block is not None and not _has_fp8_kernel(block) for block in blocks):
        return "no kernel for FP8 in these blocks on this CPU"
    if method == "modelopt" and str(settings.get("quant_algo")).upper() == "FP8":
        return "no kernel on CPUs rounds activations to FP8 under a stored scale"
    experts = [getattr(hf_config, name, 0) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if method in ("gptq", "awq", "auto-round", "intel/auto-round") and any(experts):
        return "no kernel for packed experts on CPUs"
    return None


def _sizes(hf_config: Any) -> list[int]:
    """Inputs and outputs of the linear layers of a model, fused as vLLM fuses them; 0 for what its
    configuration does not state.
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config

    def stated(name: str) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else 0

    hidden, heads = stated("hidden_size"), stated("num_attention_heads")
    length = stated("head_dim") or (hidden // heads if heads else 0)
    return [hidden, heads * length, (heads + 2 * stated("num_key_value_heads")) * length, stated("intermediate_size")]


def _has_integer_kernel() -> bool:
    """Whether vLLM's build for this CPU multiplies packed integers: that for AVX2 does not."""
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def _has_fp8_kernel(block: Any) -> bool:
    """Whether vLLM multiplies FP8 with a scale for each block of [outputs, inputs] on this CPU."""
    return bool(torch.cpu._is_amx_tile_supported()) and amx_multiplies(block)


_opened: dict[str, Source] = {}
"""Path -> the checkpoint that a model of this process is being made from."""


class HalfbyteConfig(QuantizationConfig):  # type: ignore[misc] # vLLM is not type-checked
    """The quantization configuration of a model, as vLLM keeps it.

    settings  the checkpoint's own `quantization_config`; {} where it has none
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.settings = dict(settings or {})
        self.mapper: Any = None
        self.path = ""
        self._layers: tuple[dict[str, str], dict[str, dict[Projection, str]]] | None = None
        _use_loader()
        let_threads_of_started_processes_sleep(os.environ)  # vLLM starts its engine after this

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _use_loader()  # a worker process gets this object from the one that made it

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HalfbyteConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """NAME where it was asked for, or where this vLLM cannot read the checkpoint; else None."""
        if user_quant == NAME:
            return NAME
        method = str(hf_quant_cfg.get("quant_method", "")).lower()
        if user_quant is not None or method not in READ:
            return None
        reason = refusal(method, hf_quant_cfg, hf_config)
        if reason is None:
            return None
        logger.info("halfbyte takes over this %s checkpoint: %s", method, reason)
        return NAME

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names of transformers' modules -> vLLM's."""
        self.mapper, self._layers = hf_to_vllm_mapper, None

    def open(self, path: str) -> None:
        """Opens the checkpoint that the next model of this process is made from."""
        self.path, self._layers = path, None
        _opened[path] = Source(path)

    def source(self) -> Source:
        """The opened checkpoint. vLLM copies this object, so the files are not its own."""
        source = _opened.get(self.path)
        if source is None:
            raise BackendError("[vllm] quantization 'halfbyte' with another load format; allowed: auto, halfbyte")
        return source

    def close(self) -> None:
        """Close the files."""
        _opened.pop(self.path).checkpoint.close()

    def expert_keys(self) -> set[str]:
        """Keys of all packed experts, which vLLM's models never load."""
        return {key for keys in self.source().experts.values() for key in keys.values()}

    def _by_layer(self) -> tuple[dict[str, str], dict[str, dict[Projection, str]]]:
        """The source's matrices and experts by the names of vLLM's layers."""
        if self._layers is None:
            source = self.source()
            matrices = {self._vllm_name(name): key for name, key in source.matrices.items()}
            self._layers = matrices, {self._vllm_name(name): keys for name, keys in source.experts.items()}
        return self._layers

    def _vllm_name(self, name: str) -> str:
        if self.mapper is None:
            return name
        mapped: str | None = self.mapper.map_name(f"{name}.weight")
        return name if mapped is None else mapped.removesuffix(".weight")

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer: halfbyte's where the checkpoint has its weight packed, else vLLM's
        dense one.
        """
        from .experts import HalfbyteExpertsMethod
        from .linear import HalfbyteEmbeddingMethod, HalfbyteLinearMethod

        if not isinstance(layer, RoutedExperts | LinearBase | VocabParallelEmbedding):
            return None
        matrices, experts = self._by_layer()
        activations = stated_activations(self.settings)
        if _is_read_dense(prefix):
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            path = prefix.removesuffix(".routed_experts")
            stacks = experts.get(path) or _of_the_block(path, experts)
            return None if stacks is None else HalfbyteExpertsMethod(layer.moe_config, stacks, prefix, activations)
        keys = self._keys(prefix, matrices)
        if isinstance(layer, VocabParallelEmbedding):
            # A tied head has the table's weight; vLLM gives Llama's table no name.
            if not keys and (not prefix or (prefix.endswith("lm_head") and self.source().is_tied())):
                keys = _table(matrices)
            return HalfbyteEmbeddingMethod(keys) if keys else None
        return HalfbyteLinearMethod(keys, activations) if keys else UnquantizedLinearMethod()

    def _keys(self, prefix: str, matrices: Mapping[str, str]) -> list[str]:
        """Keys of the parts of a layer in the order of its rows; none where one of them is dense:
        then all of them are dequantized.
        """
        for whole in (prefix, prefix.partition(".")[2]):  # GPT-2 was published from its inner model
            if whole in matrices:
                return [matrices[whole]]
        parent, _, leaf = prefix.rpartition(".")
        keys = [matrices.get(f"{parent}.{part}") for part in self.packed_modules_mapping.get(leaf, [])]
        packed = [key for key in keys if key is not None]
        if packed and len(packed) < len(keys):
            logger.warning("%s: some of its parts are dense in the checkpoint; all of them are dequantized", prefix)
            return []
        return packed


def _is_read_dense(prefix: str) -> bool:
    """Whether vLLM's attention reads the values of a layer's matrix: of latent attention it cuts
    one into one for keys and one for values, of DeepSeek-V4 it multiplies one for each group of
    heads.
    """
    mla = prefix.endswith(".kv_b_proj") and bool(get_current_vllm_config().model_config.use_mla)
    return mla or prefix.endswith(".wo_a")


def _of_the_block(path: str, experts: Mapping[str, dict[Projection, str]]) -> dict[Projection, str] | None:
    """The experts of the layer of `path` where its module of experts has another name than the
    model passes: MiniMax M2's are in `block_sparse_moe`, and its path says `mlp`.
    """
    around = path.rsplit(".", 2)[::2]
    found = [keys for name, keys in experts.items() if name.rsplit(".", 2)[::2] == around]
    return found[0] if len(found) == 1 else None


def _table(matrices: Mapping[str, str]) -> list[str]:
    """The key of the table that a head shares."""
    return [key for name, key in matrices.items() if name.endswith(TABLES)][:1]


def refusal(method: str, settings: Mapping[str, Any], hf_config: Any = None) -> str | None:
    """Why this vLLM cannot run a checkpoint of this method on this device; None where it can."""
    if method == NAME or method not in get_args(quantization.QuantizationMethods):
        return f"vLLM has no quantization method {method!r}"
    if current_platform.is_cpu() and (reason := _cpu_refusal(method, settings, hf_config)) is not None:
        return reason
    try:
        quantization.get_quantization_config(method).from_config(dict(settings))
    except Exception as error:  # whatever a class of vLLM raises for words that it does not read
        return f"vLLM's reader says: {error}"
    return None


def _use_loader() -> None:
    """Let the usual load formats end in `HalfbyteLoader`, which is vLLM's own for other models."""
    from .loader import HalfbyteLoader

    for name in ("auto", "hf", "safetensors"):
        model_loader._LOAD_FORMAT_TO_MODEL_LOADER[name] = HalfbyteLoader


def register_config() -> None:
    """Add the quantization method "halfbyte"."""
    if NAME not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(NAME)(HalfbyteConfig)
