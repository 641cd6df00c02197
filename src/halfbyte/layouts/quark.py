"""AMD Quark's exports: MXFP4, FP8 and INT8 weights under `weight_scale`.

| `weight.dtype` of the config | weight | `weight_scale` | value |
|---|---|---|---|
| fp4, per_group of 32, scale_format e8m0 | uint8 [n, k/2], low nibble even | uint8 [n, k/32], E8M0 bytes | e2m1 · 2^(b − 127) |
| fp8_e4m3 | E4M3 [n, k] | float, one or one a row | e4m3 · s |
| int8 | int8 [n, k], symmetric | float, one or one a row | q · s |

MXFP6 and packed int4 (whose order the config calls `reorder`) are refused by name. Config:
`global_quant_config.weight`, then `layer_quant_config` by shell patterns of module names, `exclude`
by names, shell patterns or `re:`. Source: Quark 0.9's export and vLLM's reader of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import CheckpointError, LayoutError, UnsupportedError
from ..formats import format_named
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, label, require
from .common.float8 import E4M3, E8M0, FLOATS, I8, U8, bytes_of, signed_codes, view_as
from .quant_config.module_rules import covered, first_entry, glob_matches
from .quant_config.reader import ConfigReader

READ = ("fp4", "mx", "fp8_e4m3", "int8")
MXFP4 = format_named("mxfp4", 32)
_WEIGHT_KEYS = (
    "dtype", "qscheme", "group_size", "ch_axis", "symmetric", "scale_format", "is_dynamic", "mx_element_dtype",
    "scale_calculation_mode",
)  # fmt: skip


class QuarkConfig(ConfigReader):
    """`global_quant_config`, `layer_quant_config` by shell patterns, `layer_type_quant_config`,
    `exclude`.
    """

    method = "quark"
    consumed = (
        "exclude", "export.pack_method", "export.weight_format", *(f"global_quant_config.weight.{key}" for key in _WEIGHT_KEYS),
    )  # fmt: skip
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized at run time": (
            "global_quant_config.input_tensors", "global_quant_config.output_tensors", "global_quant_config.bias",
            "global_quant_config.target_device", "kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec",
            "export.kv_cache_group", "export.min_kv_scale", "export.weight_merge_groups",
        ),
        "how the quantizer searched": (
            "algo_config", "quant_mode", "log_severity_level", "global_quant_config.weight.observer_cls",
            "global_quant_config.weight.scale_type", "global_quant_config.weight.round_method",
        ),
        "notes of the writer": ("version",),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._exclude = self._names("exclude")
        self._global = self._weight(self._object("global_quant_config"), "global_quant_config")
        self._layers = {
            name: self._weight(entry, f"layer_quant_config {name!r}") or False
            for name, entry in self._object("layer_quant_config").items()
        }
        types = self._object("layer_type_quant_config")
        if types:
            raise UnsupportedError(f"[config] {where}: Quark's layer_type_quant_config ({', '.join(types)}) is not read")

    def _use(self, path: tuple[str, ...], value: Any) -> Any:
        # A pattern of layers has dots and is one key; what is below means what it means globally.
        if path[0] == "layer_quant_config" and len(path) > 2:
            path = ("global_quant_config", *path[2:])
        return super()._use(path, value)

    def _weight(self, entry: Any, what: str) -> dict[str, Any] | None:
        weight = entry.get("weight") if isinstance(entry, dict) else None
        if isinstance(weight, list):
            raise UnsupportedError(f"[config] {self.where}: Quark's {what} quantizes weights {len(weight)} times over; not read")
        if weight is None:
            return None
        if not isinstance(weight, dict):
            raise CheckpointError(f"[config] {self.where}: {what} has weight {weight!r:.80}; wanted an object")
        word = str(weight.get("dtype"))
        if word not in READ or (word == "mx" and weight.get("mx_element_dtype") != "fp4"):
            kind = weight.get("mx_element_dtype") or word
            raise UnsupportedError(
                f"[config] {self.where}: Quark's {what} has weights of {kind}, which are recognised and not read; read: "
                f"{', '.join(READ)}. Use Quark's export to compressed-tensors or AWQ"
            )
        return {
            "dtype": "fp4" if word == "mx" else word,
            "qscheme": weight.get("qscheme"),
            "group_size": weight.get("group_size"),
        }

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._exclude, module, glob_matches):
            return None
        own = first_entry(self._layers, module, glob_matches)
        own = self._global if own is None else own
        return dict(own) if isinstance(own, dict) else None


class Quark(Layout):
    """`weight` and `weight_scale`; the dtypes say which kind it is, and must agree with the config."""

    name = "quark"
    config_reader = QuarkConfig
    required = ("weight", "weight_scale")
    parts: ClassVar[dict[str, str]] = {"weight": "codes", "weight_scale": "scales"}
    harmless: ClassVar[dict[str, str]] = {
        "input_scale": "scale of the activations", "output_scale": "scale of the outputs", "k_scale": "scale of the key cache",
        "v_scale": "scale of the value cache",
    }  # fmt: skip

    def matches(self, suffixes: Collection[str]) -> bool:
        return super().matches(suffixes) and "weight_scale_2" not in suffixes

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        n, width = require(self.name, tensors, "weight", name, (U8, E4M3, I8), (None, None))
        kind = {U8: "fp4", E4M3: "fp8_e4m3", I8: "int8"}[tensors["weight"].dtype]
        asked = config.get("dtype")
        if asked not in (None, kind):
            raise LayoutError(f"[quark] {label(name, 'weight')} is {kind} by its dtype; the config says {asked}")
        if kind == "fp4":
            scales = (n, -(-2 * width // 32))
            require(self.name, tensors, "weight_scale", name, (U8, E8M0), scales, f"for {2 * width} inputs in groups of 32")
            return Described(MXFP4, (n, 2 * width))
        scale = require(self.name, tensors, "weight_scale", name, FLOATS)
        dtype = tensors["weight_scale"].dtype.name
        one = math.prod(scale) == 1 and (config.get("qscheme") == "per_tensor" or len(scale) < 2)
        if not one and scale not in ((n,), (n, 1)):
            raise LayoutError(f"[quark] {label(name, 'weight_scale')} has shape {list(scale)}; wanted one scale or [{n}]")
        return Described(format_named(kind, -1, scale_dtype=dtype, **({"rows": -1} if one else {})), (n, width))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        weight, scale = tensors["weight"], tensors["weight_scale"]
        details = {"layout": self.name, "scale_shape": list(scale.shape), "scale_dtype": scale.dtype.name}
        codes = signed_codes(weight) if weight.dtype == I8 else bytes_of(weight)
        scales = bytes_of(scale) if fmt == MXFP4 else scale.reshape((1, 1) if fmt.grouping == "block" else (shape[0], 1))
        return QTensor(fmt, shape, {"codes": codes, "scales": scales}, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        bytewide = fmt.name in ("fp8_e4m3", "int8") and fmt.group_size == -1 and fmt.group_rows in (1, -1) and not fmt.inverse
        if fmt != MXFP4 and not bytewide:
            return "Quark's layout holds mxfp4:g32, and fp8_e4m3 and int8 under one scale or one a row"
        if len(shape) != 2 or (fmt == MXFP4 and shape[-1] % 2):
            return "Quark's layout holds matrices (n, k), k even for mxfp4"
        return ""

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        own, codes, scales = self.own_details(q), q.parts["codes"], q.parts["scales"]
        if q.format == MXFP4:
            return {"weight": codes, "weight_scale": view_as(scales, str(own.get("scale_dtype", "uint8")))}
        shape = own.get("scale_shape", [] if scales.shape == (1, 1) and q.format.grouping == "block" else [q.shape[0]])
        weight = view_as(codes, E4M3) if q.format.name == "fp8_e4m3" else (codes ^ np.uint8(0x80)).view(I8)
        return {"weight": weight, "weight_scale": scales.reshape(shape if math.prod(shape) == scales.size else scales.shape)}

    def config(self, q: QTensor) -> dict[str, Any]:
        self.check_fits(q)
        if q.format == MXFP4:
            return {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
        return {"dtype": q.format.name, "qscheme": "per_tensor" if q.format.grouping == "block" else "per_channel"}
