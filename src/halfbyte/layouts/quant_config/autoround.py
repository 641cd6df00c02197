"""AutoRound's config: the tensors of GPTQ, AWQ, compressed-tensors or block FP8 under its own name,
with a table of layers that differ.

    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
     "bits": 4, "group_size": 128, "sym": true,
     "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}, ".*self_attn.*": {"bits": 16}}}

| packing_format | tensors |
|---|---|
| `auto_gptq`, `auto_round:auto_gptq`, `auto_round:gptq`, `auto` | GPTQ, zero points minus 1 (`gptq`) |
| `auto_round`, `auto_round:exllamav2`, `:tritonv2`, `:gptqmodel` and other kernels | GPTQ, zero points as they are (`gptq_v2`) |
| `auto_awq`, `auto_round:auto_awq`, `auto_round:awq` | AWQ gemm |
| `auto_round:llm_compressor`, data_type `mx_fp` (4 or 8 bits) or `nv_fp` | compressed-tensors: MXFP4, MXFP8, NVFP4 |
| `auto_round:fp8_static`, `auto_round:fp8` or none, data_type `fp` | FP8: group_size 0: one scale, -1: rows, [r, c]: tiles |

A layer of 16 or more bits is dense. A key of `extra_config` is a module's name, else a regular
expression searched for in it. Source: the exporters and loaders of AutoRound 0.9 and 0.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import CheckpointError, UnsupportedError
from ..claims import CONSUMED, KeyUse
from .module_rules import check_rule, covered, first_entry, lookup, regex_found
from .reader import ConfigReader, check_numbers

GPTQ_V1 = ("auto", "auto_gptq", "auto_round:auto_gptq", "auto_round:gptq", "gptq")
AWQ = ("auto_awq", "auto_round:auto_awq", "auto_round:awq", "awq")
GPTQ_V2 = ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:gptqmodel", "auto_round:marlin", "gptqmodel")
COMPRESSED_TENSORS = ("auto_round:llm_compressor", "llm_compressor")
FP8 = ("auto_round:fp8_static", "auto_round:fp8", "fp8_static", "fp8")
DENSE_BITS = 16
_FLOATS = {
    "mx_fp": ("compressed-tensors", (4, 8)), "mx_fp_rceil": ("compressed-tensors", (4, 8)), "nv_fp": ("compressed-tensors", (4,)),
    "fp": ("fp8", (8,)),
}  # fmt: skip
"""data_type -> the layout of its tensors, and the widths that are read."""
_LAYER = ("bits", "group_size", "sym", "data_type")
_ACTIVATIONS = ("act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type")
WRITTEN: dict[str, tuple[str, ...]] = {
    "how AutoRound searched": (
        "iters", "lr", "minmax_lr", "nsamples", "seqlen", "batch_size", "gradient_accumulate_steps", "low_gpu_mem_usage", "amp",
        "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "enable_alg_ext", "disable_opt_rtn",
        "scale_dtype", "dataset", "not_use_best_mse", "dynamic_max_gap", "super_bits", "super_group_size",
    ),
    "how activations and caches are quantized at run time": (
        *_ACTIVATIONS, "static_kv_dtype", "static_kv_granularity", "static_attention_dtype", "static_attention_granularity",
    ),
    "which blocks AutoRound quantized": (
        "block_name_to_quantize", "to_quant_block_names", "quant_block_list", "supported_types", "quant_lm_head",
    ),
    "notes of AutoRound": ("autoround_version", "provider"),
}  # fmt: skip
"""What AutoRound says of itself, in its own configuration and in those of GPTQ and AWQ that it
writes: what they are -> keys.
"""


def check_integers(raw: Mapping[str, Any], where: str) -> None:
    """UnsupportedError where AutoRound says of GPTQ's or AWQ's tensors that they hold no integers."""
    if str(raw.get("data_type") or "int") != "int":
        raise UnsupportedError(f"[config] {where}: data_type is {raw['data_type']!r:.40}; of GPTQ and AWQ int is read")


class AutoRoundConfig(ConfigReader):
    """One set of parameters, and `extra_config` for the layers that differ."""

    method = "auto-round"
    methods = ("auto_round", "intel/auto-round")
    consumed = ("packing_format", "backend", *_LAYER, "modules_to_not_convert", "weight_block_size", "fmt")
    unchecked = ("group_size", "extra_config")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        **WRITTEN,
        "entries of layers for the run time": tuple(f"extra_config.*.{key}" for key in _ACTIVATIONS),
        "notes of the writer": ("version", "model_name_or_path", "true_sequential", "damp_percent", "activation_scheme"),
        "words of GPTQ and AWQ that repeat others": ("desc_act", "lm_head", "zero_point", "static_groups"),
    }

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        floats = _FLOATS.get(str(raw.get("data_type") or "int"))
        usual = "auto_round:auto_gptq" if floats is None else {"fp8": FP8[0]}.get(floats[0], COMPRESSED_TENSORS[0])
        packing = str(raw.get("packing_format") or raw.get("backend") or usual).lower()
        if packing in AWQ:
            self.layouts, self._base = ("awq-gemm",), {"version": "gemm"}
        elif packing in GPTQ_V1 or packing in GPTQ_V2:
            self.layouts = ("gptq",)
            self._base = {"checkpoint_format": "gptq" if packing in GPTQ_V1 else "gptq_v2"}
        elif packing in COMPRESSED_TENSORS or packing in FP8:
            self.layouts, self._base = ("compressed-tensors" if packing in COMPRESSED_TENSORS else "fp8",), {}
        else:
            raise UnsupportedError(
                f"[config] {where}: AutoRound's packing_format {packing!r} is recognised and not read; read: "
                f"{', '.join((*GPTQ_V1, *GPTQ_V2, *AWQ, *COMPRESSED_TENSORS, *FP8))}. Export with --format auto_round, "
                "auto_gptq, auto_awq or llm_compressor"
            )
        if str(raw.get("fmt") or "e4m3") != "e4m3":
            raise UnsupportedError(f"[config] {where}: fmt is {raw['fmt']!r:.40}; read: e4m3 (float8_e4m3fn)")
        for key in ("rotation_config", "hadamard_config", "transform_config"):
            if raw.get(key):
                raise UnsupportedError(
                    f"[config] {where}: AutoRound's {key} rotates the inputs of each layer; such checkpoints are recognised and "
                    "not read"
                )
        self._base |= {key: raw[key] for key in _LAYER if key in raw}
        self._check_type(self._base, "data_type", "")
        self._layers: dict[str, dict[str, Any]] = {}
        for name, entry in self._object("extra_config").items():
            if not isinstance(entry, dict):
                raise CheckpointError(f"[config] {where}: extra_config {name!r} is {entry!r:.80}; wanted an object")
            self._layers[name] = {**self._base, **{k: v for k, v in entry.items() if k in _LAYER}}
            self._check_type(self._layers[name], f"extra_config {name!r} data_type", name)
        # A name with a wildcard or a bracket is a pattern; dots alone may be a plain name's.
        self._patterns = {n: e for n, e in self._layers.items() if set(n) & set("*+?[](){}|^$\\")}
        for name in self._patterns:
            check_rule(f"re:{name}", where)
        self._skipped = self._names("modules_to_not_convert")

    def _check_type(self, entry: Mapping[str, Any], what: str, name: str) -> None:
        """UnsupportedError for a data_type that the packing's layout does not hold, CheckpointError
        for a group size that means nothing; `name` is the entry's in `extra_config`.
        """
        kind, bits, size = str(entry.get("data_type") or "int"), entry.get("bits"), entry.get("group_size")
        layout, widths = _FLOATS.get(kind, ("", ()))
        fp8 = self.layouts == ("fp8",)
        scoped = fp8 and (size == 0 or isinstance(size, list))  # one scale, or tiles
        own = {key: value for key, value in entry.items() if key != "group_size" or not scoped}
        check_numbers({"extra_config": {name: own}} if name else own, self.where)
        if isinstance(bits, int) and bits >= DENSE_BITS:
            return
        fits = (layout,) == self.layouts and bits in widths if layout else kind.startswith("int") and not fp8
        if not fits:
            raise UnsupportedError(
                f"[config] {self.where}: AutoRound's {what} {kind!r} of {bits} bits is recognised and not read in tensors of the "
                f"layout {self.layouts[0]}; read: int in gptq and awq-gemm, "
                f"{', '.join(f'{k} of {w} bits in {name}' for k, (name, ws) in _FLOATS.items() for w in ws)}. Export with "
                "--format llm_compressor"
            )

    def _use(self, path: tuple[str, ...], value: Any) -> KeyUse:
        # A module's path has dots and is one key.
        if len(path) == 3 and path[0] == "extra_config":
            path = (path[0], "*", path[2])
            if path[2] in _LAYER:
                return KeyUse(".".join(path), value, CONSUMED)
        return super()._use(path, value)

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._skipped, module):
            return None
        own = lookup(self._layers, module)
        if own is None:
            own = first_entry(self._patterns, module, regex_found)
        own = self._base if own is None else own
        bits, size = own.get("bits"), own.get("group_size")
        if isinstance(bits, int) and bits >= DENSE_BITS:
            return None
        if self.layouts == ("fp8",):
            return {"weight_block_size": self.raw.get("weight_block_size") or (size if isinstance(size, list) else None)}
        if self.layouts == ("compressed-tensors",):
            return {"num_bits": bits, "type": "float", "strategy": "group", "group_size": size}
        return {key: value for key, value in own.items() if key != "data_type"}
