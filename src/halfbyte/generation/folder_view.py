"""A checkpoint folder as the native decoder reads one: its tensors, and a configuration in which
nothing is left to a default of transformers.

    view = FolderView(open("folder"))     view["model.layers.0.self_attn.q_proj"], view.config

Names and row orders of a folder are those of transformers' models already. A config.json that
states less than is computed with is left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..checkpoints import Checkpoint
from ..checkpoints.config_numbers import impossible_number
from ..checkpoints.views.base import View
from ..errors import CheckpointError, UnsupportedError
from ..tensor.qtensor import QTensor

QUERIES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (*QUERIES, "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"attention_bias": ATTENTION, "mlp_bias": MLP}, "qwen2": {"": QUERIES}, "qwen3": {"attention_bias": ATTENTION},
    "gemma3_text": {"attention_bias": ATTENTION}, "mistral": {},
}  # fmt: skip
"""Model type -> option of the configuration, "" for always -> modules of a layer with a bias."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
ROTATIONS = {
    "default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
"""Kind of rotation -> the numbers that it needs."""
NAMES, PARTIAL = ("rope_type", "type", "rope_theta"), "partial_rotary_factor"
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")
KINDS = ("full_attention", "sliding_attention")


class FolderView(View):
    """`source` with the configuration that `NativeReader` takes.

    Raises UnsupportedError for a configuration that is left to transformers, CheckpointError for
    sizes that its tensors cannot have and for a bias that is missing.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        infos = list(source.infos())
        if found := impossible_number(source.config, len(infos), max((d for i in infos for d in i.shape), default=0)):
            raise CheckpointError(f"[generate] {source.path}: config.json has {found}")
        self.config = self._config(source.config)
        biased = {
            module
            for option, modules in BIASES[self.config["model_type"]].items()
            if not option or source.config.get(option)
            for module in modules
        }
        wanted = {f"model.layers.{i}.{module}.bias" for i in range(self.config["num_hidden_layers"]) for module in biased}
        if missing := sorted(key for key in wanted if key not in source):
            raise CheckpointError(f"[generate] {source.path}: tensor {missing[0]!r} is missing; config.json states it")
        others = {key for key in source.keys() if key.endswith("_proj.bias") and key not in wanted}  # noqa: SIM118
        if used := sorted(key for key in others if np.any(np.asarray(source[key]))):
            raise self._other(f"{used[0]} is a bias that config.json does not state")
        # GPTQ writes a bias of zeros for every matrix.
        self._keys = dict.fromkeys(key for key in source.keys() if key not in others)  # noqa: SIM118 in file order

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def keys(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def row_pieces(self, key: str, multiple: int) -> Iterator[QTensor]:
        """A packed matrix, whole."""
        weight = self.source[key]
        assert isinstance(weight, QTensor)
        yield weight

    def _other(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[generate] {self.path}: {why}")

    def _number(self, given: Mapping[str, Any], name: str, kind: type = float) -> Any:
        """A positive number that config.json states."""
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not 0 < value < float("inf"):
            raise self._other(f"config.json states {name} as {value!r:.40}; without transformers a positive number is needed")
        return value

    def _config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kind, gemma = given["model_type"], given["model_type"] == "gemma3_text"
        config = {name: self._number(given, name, int) for name in SIZES}
        heads = config["num_attention_heads"]
        optional_head = kind not in ("qwen3", "gemma3_text") and given.get("head_dim") is None
        config["head_dim"] = config["hidden_size"] // heads if optional_head else self._number(given, "head_dim", int)
        optional_kv = kind == "llama" and given.get("num_key_value_heads") is None
        config["num_key_value_heads"] = heads if optional_kv else self._number(given, "num_key_value_heads", int)
        if heads % config["num_key_value_heads"] or config["head_dim"] % 2:
            raise self._other(f"{heads} heads of {config['head_dim']}, {config['num_key_value_heads']} for keys, do not divide")
        activation = given.get("hidden_activation", "gelu_pytorch_tanh") if gemma else given.get("hidden_act", "silu")
        tied = given.get("tie_word_embeddings", gemma)
        if not isinstance(tied, bool) or not isinstance(activation, str):
            raise self._other(f"config.json states tie_word_embeddings as {tied!r}, the activation as {activation!r}")
        config |= {"model_type": kind, "hidden_act": activation, "tie_word_embeddings": tied}
        config["rms_norm_eps"] = self._number(given, "rms_norm_eps")
        config |= self._windows(given, kind, config["num_hidden_layers"]) | {"rope_parameters": self._rotations(given, gemma)}
        return {**given, **config}

    def _windows(self, given: Mapping[str, Any], kind: str, layers: int) -> dict[str, Any]:
        """Which layers have a window, and its length."""
        kinds, window = given.get("layer_types"), given.get("sliding_window")
        if kind == "mistral":
            if "sliding_window" not in given:
                raise self._other("config.json states no sliding_window")
            return {"layer_types": None, "sliding_window": None if window is None else self._number(given, "sliding_window", int)}
        if kind != "gemma3_text":
            if kind != "llama" and (given.get("use_sliding_window") or kinds not in (None, layers * ["full_attention"])):
                raise self._other(f"the windows of {kind} are computed by transformers")
            return {"layer_types": None}
        if kinds is None:
            pattern = self._number(given, "sliding_window_pattern", int)
            kinds = [KINDS[bool((i + 1) % pattern)] for i in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in KINDS for k in kinds):
            raise self._other(f"layer_types do not state {' or '.join(KINDS)} for each of {layers} layers")
        numbers = {"sliding_window": int, "query_pre_attn_scalar": float}
        return {"layer_types": kinds} | {name: self._number(given, name, number) for name, number in numbers.items()}

    def _rotations(self, given: Mapping[str, Any], gemma: bool) -> dict[str, Any]:
        """`rope_parameters`, of one rotation or by kind of layer, from any of transformers' names;
        `rope_scaling` goes first, as it does there.
        """
        rope, scaled = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
        if not (isinstance(rope, dict) and isinstance(scaled, dict)):
            raise self._other("rope_parameters or rope_scaling is no object")
        if not gemma:
            return self._rotation(scaled or rope, given, "rope_theta")
        full, local = (rope.get(kind) or {} for kind in KINDS)
        if not (isinstance(full, dict) and isinstance(local, dict)):
            raise self._other("rope_parameters state no object for each kind of layer")
        return {
            "full_attention": self._rotation({**full, **scaled}, given, "rope_theta"),
            "sliding_attention": self._rotation(local, given, "rope_local_base_freq"),
        }

    def _rotation(self, rope: Mapping[str, Any], given: Mapping[str, Any], base: str) -> dict[str, Any]:
        kind = rope.get("rope_type", rope.get("type", "default"))
        partial = any(part.get(PARTIAL) not in (None, 1) for part in (rope, given))
        known = (*NAMES, *OPTIONAL, *ROTATIONS.get(kind, ()), PARTIAL) if isinstance(kind, str) else ()
        unknown = [name for name, value in rope.items() if value is not None and name not in known]
        if kind not in tuple(ROTATIONS) or partial or (unknown and kind != "default"):
            raise self._other(f"the rotation {kind!r} with {', '.join(rope)} is computed by transformers")
        numbers = {name: self._number(rope, name) for name in ROTATIONS[kind]}
        numbers |= {name: self._number(rope, name) for name in OPTIONAL if rope.get(name) is not None}
        theta = self._number(rope if rope.get("rope_theta") is not None else {"rope_theta": given.get(base)}, "rope_theta")
        return {"rope_type": kind, "rope_theta": theta, **numbers}
