"""Quantization configs: which producer wrote one, and what it says of each module.

`scheme_of(config)` recognises the dictionary that stands under `quantization_config` in a config.json (or in the file that a
producer puts beside it) and returns a `Scheme`. `scheme.parameters(module)` is what a layout is given for that module,
per-module rules applied; None where the config leaves the module dense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ...errors import CheckpointError
from ...layouts.claims import CONSUMED, KeyUse
from ...layouts.unsupported import refuse_recognised
from ..findings import Finding
from .module_rules import check_rule, covered, first_entry, glob_matches, lookup, path_matches, regex_matches, rule_matches

WIDTHS = ("bits", "num_bits", "nbits", "w_bit")
GROUPS = ("group_size", "q_group_size", "block_size")
"""Keys that hold a width or a group size in some producer's config."""
MAX_DEPTH = 16


class Scheme(ABC):
    """One producer's quantization config.

    method   what `Checkpoint.format` says
    layouts  names of layouts it can mean, or their beginnings ("awq" is every "awq-..."), most likely first
    raw      the dictionary
    where    names its file in messages
    """

    method: ClassVar[str]
    layouts: tuple[str, ...]

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        check_numbers(raw, where)
        self.layouts = (self.method,)

    @abstractmethod
    def parameters(self, module: str) -> dict[str, Any] | None:
        """What the config says of `module`, in the producer's words; None when it leaves the module dense."""

    def key_uses(self) -> tuple[KeyUse, ...]:
        """One entry for each key of the config, nested ones by their dotted path."""
        return tuple(KeyUse(path, value, CONSUMED) for path, value in _leaves(self.raw, ""))

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names, of layouts, that the config can mean, most likely first."""
        names = tuple(names)
        ranked = [n for word in self.layouts for n in names if n == word or n.startswith(word + "-")]
        return tuple(dict.fromkeys(ranked))

    def complete(self, other: Scheme) -> list[Finding]:
        """Take from another file's config of the same method what this one leaves out; findings where the two contradict each
        other."""
        mine, theirs = self.raw, other.raw
        keys = (*WIDTHS, *GROUPS, "checkpoint_format", "quant_algo", "version", "mode")
        both = [k for k in keys if mine.get(k) is not None and theirs.get(k) is not None]
        says = "{} is {!r:.60} in {} and {!r:.60} in {}; the first is used"
        odd = [
            Finding("warning", "configs-disagree", "", says.format(k, mine[k], self.where, theirs[k], other.where))
            for k in both
            if str(mine[k]).lower() != str(theirs[k]).lower()
        ]
        type(self).__init__(self, {**theirs, **{k: v for k, v in mine.items() if v is not None}}, self.where)
        return odd

    def _names(self, *keys: str) -> tuple[str, ...]:
        """The list of names under the first of `keys` that is there; null is empty."""
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            if isinstance(value, str):
                value = [value]
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise CheckpointError(f"[config] {self.where}: {key} is {value!r:.80}; wanted a list of module names")
            return tuple(check_rule(v, self.where) for v in value)
        return ()

    def _object(self, key: str) -> Mapping[str, Any]:
        """The object under `key`; null and absence are empty."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"[config] {self.where}: {key} is {value!r:.80}; wanted an object")
        return value


class GPTQScheme(Scheme):
    """AutoGPTQ and GPTQModel. `dynamic` holds rules in order: `-:regex` dense, `+:regex` or `regex` with other parameters."""

    method = "gptq"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._base = {k: v for k, v in raw.items() if k != "dynamic"}
        self._dynamic: dict[str, dict[str, Any] | bool] = {}
        for rule, entry in self._object("dynamic").items():
            if entry is not None and not isinstance(entry, dict):
                raise CheckpointError(f"[config] {where}: dynamic rule {rule!r} is {entry!r:.80}; wanted an object")
            check_rule(rule if rule[:2] in ("+:", "-:") else f"+:{rule}", where)
            self._dynamic[rule] = False if rule.startswith("-:") else {**self._base, **(entry or {})}

    def parameters(self, module: str) -> dict[str, Any] | None:
        entry = first_entry(self._dynamic, module, _dynamic_rule)
        if entry is None:
            return dict(self._base)
        return dict(entry) if isinstance(entry, dict) else None


class AWQScheme(Scheme):
    """AutoAWQ: one set of parameters, a kernel order under `version`, and `modules_to_not_convert`."""

    method = "awq"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._skipped = self._names("modules_to_not_convert")
        version = str(raw.get("version") or "gemm").lower()
        self.layouts = (f"awq-{version}", "awq")
        self._base = {"bits": raw.get("bits", raw.get("w_bit")), "group_size": raw.get("group_size", raw.get("q_group_size"))}
        self._base = {**raw, **{k: v for k, v in self._base.items() if v is not None}, "version": version}

    def parameters(self, module: str) -> dict[str, Any] | None:
        return None if covered(self._skipped, module) else dict(self._base)


class CompressedTensorsScheme(Scheme):
    """compressed-tensors: `config_groups`, each with `targets` (a module's name, `re:` and a pattern, or a class) and
    `weights`; `ignore`."""

    method = "compressed-tensors"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._ignore = self._names("ignore")
        self._named: dict[str, dict[str, Any] | bool] = {}
        self._classes: dict[str, dict[str, Any] | bool] = {}
        for label, group in self._object("config_groups").items():
            targets = group.get("targets") if isinstance(group, dict) else None
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise CheckpointError(
                    f"[config] {where}: config_groups {label!r} has targets {targets!r:.80}; wanted a list of names"
                )
            if weights is not None and not isinstance(weights, dict):
                raise CheckpointError(f"[config] {where}: config_groups {label!r} has weights {weights!r:.80}; wanted an object")
            params: dict[str, Any] | bool = (
                False if weights is None else {**weights, "format": group.get("format") or raw.get("format")}
            )
            for target in (check_rule(t, where) for t in targets):
                is_class = target[:1].isupper() and "." not in target
                (self._classes if is_class else self._named).setdefault(target, params)

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._ignore, module):
            return None
        params = lookup(self._named, module)
        if params is None:
            params = first_entry(self._named, module, rule_matches)
        if params is None:
            # A file does not say what class a module had: embeddings by their name, everything else is a Linear.
            embedding = module.rpartition(".")[2] in ("embed_tokens", "wte", "word_embeddings")
            order = ("Embedding", "Linear") if embedding else ("Linear", *self._classes)
            params = next((self._classes[c] for c in order if c in self._classes), None)
        return dict(params) if isinstance(params, dict) else None


class ModelOptScheme(Scheme):
    """ModelOpt: config.json's own words or hf_quant_config.json, `exclude_modules` as shell patterns, `quantized_layers` when
    mixed."""

    method = "modelopt"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        inner = self._object("quantization")
        self._flat = {**{k: v for k, v in raw.items() if k != "quantization"}, **inner}
        groups = [g.get("weights") for g in self._object("config_groups").values() if isinstance(g, dict)]
        if "group_size" not in self._flat and len(groups) == 1 and isinstance(groups[0], dict):
            self._flat["group_size"] = groups[0].get("group_size")
        layers = self._flat.pop("quantized_layers", None) or {}
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise CheckpointError(f"[config] {where}: quantized_layers is {layers!r:.80}; wanted an object of objects")
        self._layers: dict[str, dict[str, Any]] = layers
        self.raw = self._flat
        self._skipped = self._names("exclude_modules", "ignore")

    def parameters(self, module: str) -> dict[str, Any] | None:
        own = lookup(self._layers, module)
        if own is not None:
            return {**self._flat, **own}
        return None if self._layers or covered(self._skipped, module, glob_matches) else dict(self._flat)


class MLXScheme(Scheme):
    """MLX: `group_size`, `bits`, `mode`, and a module's own path with an object of its own or false. What an object leaves out
    is MLX's default."""

    method = "mlx"
    DEFAULTS: ClassVar[dict[str, Any]] = {"mode": "affine", "bits": 4, "group_size": 64}

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._base = {k: v for k, v in raw.items() if not isinstance(v, dict | bool)}
        self._own: dict[str, dict[str, Any] | bool] = {k: v for k, v in raw.items() if isinstance(v, dict | bool)}

    def parameters(self, module: str) -> dict[str, Any] | None:
        own = lookup(self._own, module)
        if own is False:
            return None
        if isinstance(own, dict):
            return {**self.DEFAULTS, **own} if own.get("mode", "affine") == "affine" else dict(own)
        return dict(self._base)


class SkipListScheme(Scheme):
    """One set of parameters and a list of modules that stay dense."""

    skip_keys: ClassVar[tuple[str, ...]]

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._skipped = self._names(*self.skip_keys)

    def parameters(self, module: str) -> dict[str, Any] | None:
        return None if covered(self._skipped, module) else dict(self.raw)


class GptOssScheme(SkipListScheme):
    """gpt-oss as transformers writes it: `modules_to_not_convert`; the layout has no parameters."""

    method = "gpt-oss"
    skip_keys = ("modules_to_not_convert",)


class BitsAndBytesScheme(SkipListScheme):
    """bitsandbytes: `llm_int8_skip_modules`; each 4-bit weight carries its own state."""

    method = "bitsandbytes"
    skip_keys = ("llm_int8_skip_modules",)


class FineGrainedFP8Scheme(SkipListScheme):
    """Fine-grained FP8: `weight_block_size`, `modules_to_not_convert`."""

    method = "fp8"
    skip_keys = ("modules_to_not_convert",)


class TorchAOScheme(SkipListScheme):
    """torchao: `quant_type` is an object {"default": {"_type", "_data"}}, per-module ones under a name or `re:` pattern."""

    method = "torchao"
    skip_keys = ("modules_to_not_convert",)

    def parameters(self, module: str) -> dict[str, Any] | None:
        params = super().parameters(module)
        if params is None:
            return None
        kinds = self.raw.get("quant_type")
        if not isinstance(kinds, dict):
            return params
        kind = kinds.get("default", kinds)
        data = kind.get("_data") if isinstance(kind, dict) else None
        table = next((v for v in (data or {}).values() if isinstance(v, dict) and "_default" in v), None) if data else None
        if table is not None:
            own = {k: v or False for k, v in table.items() if k != "_default"}
            kind = first_entry(own, module, rule_matches)
            kind = table["_default"] if kind is None else kind
            if not kind:
                return None
            data = kind.get("_data") if isinstance(kind, dict) else None
        return {**params, **(data or {}), "_type": kind.get("_type") if isinstance(kind, dict) else None}


class HQQScheme(Scheme):
    """HQQ: `quant_config` holds `weight_quant_params`, or a table of them by the end of a module's path; `skip_modules`."""

    method = "hqq"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._quant = self._object("quant_config")
        self._skipped = self._names("skip_modules")
        for name, entry in self._quant.items():
            if entry is not None and not isinstance(entry, dict):
                raise CheckpointError(f"[config] {where}: quant_config {name!r} is {entry!r:.80}; wanted an object")

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._skipped, module):
            return None
        entry: Any = self._quant
        if "weight_quant_params" not in entry and entry:
            entry = first_entry({k: v or {} for k, v in entry.items()}, module, path_matches)
            if entry is None:
                return None
        own = entry.get("weight_quant_params", entry)
        return {**{k: v for k, v in self.raw.items() if k != "quant_config"}, **(own or {})}


class PlainScheme(Scheme):
    """Parameters for every module alike: ONNX node attributes, Metal-Marlin buffers."""

    def parameters(self, module: str) -> dict[str, Any] | None:
        return dict(self.raw)


class ONNXScheme(PlainScheme):
    """Attributes of a MatMulNBits node."""

    method = "onnx"


class MetalMarlinScheme(PlainScheme):
    """Buffers of the fused Metal kernels: `codec`, `group_size`."""

    method = "metal-marlin"


SCHEMES: dict[str, type[Scheme]] = {
    "gptq": GPTQScheme, "gptqmodel": GPTQScheme, "awq": AWQScheme, "compressed-tensors": CompressedTensorsScheme,
    "modelopt": ModelOptScheme, "modelopt_fp4": ModelOptScheme, "modelopt_mixed": ModelOptScheme, "mlx": MLXScheme,
    "mxfp4": GptOssScheme, "bitsandbytes": BitsAndBytesScheme, "torchao": TorchAOScheme, "hqq": HQQScheme, "onnx": ONNXScheme,
    "metal-marlin": MetalMarlinScheme, "fp8": FineGrainedFP8Scheme,
}  # fmt: skip
"""`quant_method` -> scheme."""


def scheme_of(raw: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of a quantization config. CheckpointError when it is of no known kind, or its values are of the wrong type.

    raw    the dictionary, or one that holds it under `quantization_config` or `quantization`
    where  names its file in messages
    """
    for key in ("quantization_config", "quantization"):
        if isinstance(raw.get(key), dict) and "quant_method" not in raw and "producer" not in raw:
            return scheme_of(raw[key], where)
    refuse_recognised(raw, where=where)
    method = raw.get("quant_method")
    if method is None:
        return _unnamed(raw, where)
    word = str(method).lower().replace("compressed_tensors", "compressed-tensors")
    if word not in SCHEMES:
        raise CheckpointError(f"[config] {where}: quant_method {method!r} is not read; read: {', '.join(SCHEMES)}")
    return SCHEMES[word](raw, where)


def _unnamed(raw: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of a config without `quant_method`, by the keys it has."""
    tests: tuple[tuple[Callable[[], bool], type[Scheme]], ...] = (
        (lambda: "config_groups" in raw and "quant_algo" not in raw, CompressedTensorsScheme),
        (lambda: "quant_algo" in raw or "producer" in raw, ModelOptScheme),
        (lambda: "w_bit" in raw or "q_group_size" in raw, AWQScheme),
        (lambda: "version" in raw and "zero_point" in raw, AWQScheme),
        (lambda: "desc_act" in raw or "checkpoint_format" in raw, GPTQScheme),
        (lambda: "load_in_4bit" in raw or "load_in_8bit" in raw or "blocksize" in raw, BitsAndBytesScheme),
        (lambda: "block_size" in raw and "bits" in raw, ONNXScheme),
        (lambda: "quant_config" in raw, HQQScheme),
        (lambda: "quant_type" in raw, TorchAOScheme),
        (lambda: "bits" in raw and "group_size" in raw, MLXScheme),
        (lambda: "mode" in raw, MLXScheme),
    )
    for test, scheme in tests:
        if test():
            return scheme(raw, where)
    keys = ", ".join(sorted(map(str, raw))[:12]) or "no keys"
    raise CheckpointError(f"[config] {where}: a quantization config with {keys} and no quant_method; its producer cannot be told")


def check_numbers(raw: Mapping[str, Any], where: str) -> None:
    """Widths are whole numbers from 1 to 32, group sizes −1 or at least 1, or null; CheckpointError naming the key otherwise."""
    for path, value in _leaves(raw, ""):
        key = path.rpartition(".")[2]
        if value is None or key not in (*WIDTHS, *GROUPS):
            continue
        whole = type(value) is int
        if key in WIDTHS and not (whole and 1 <= value <= 32):
            raise CheckpointError(f"[config] {where}: {path} is {value!r:.80}; wanted a whole number of bits, 1 to 32")
        if key in GROUPS and not (whole and (value == -1 or 1 <= value < 1 << 31)):
            raise CheckpointError(
                f"[config] {where}: {path} is {value!r:.80}; wanted a whole group size of at least 1, or -1 for a row"
            )


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if depth > MAX_DEPTH:
            return
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key), depth + 1)
    elif not isinstance(value, list) or path.rpartition(".")[2] in (*WIDTHS, *GROUPS):
        yield path, value


def _dynamic_rule(rule: str, name: str) -> bool:
    return regex_matches(rule.removeprefix("+:").removeprefix("-:"), name)
