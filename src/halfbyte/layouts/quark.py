"""AMD Quark's exports: FP4, FP6, FP8, INT8 and 4-bit integers under `weight_scale`.

| `weight.dtype` of the config | weight | `weight_scale` | value |
|---|---|---|---|
| fp4, per_group of 32, e8m0 | uint8 [n, k/2], low nibble even | uint8 [n, k/32], E8M0 bytes | e2m1 · 2^(b − 127) |
| fp6_e2m3, fp6_e3m2, the same | uint8 [n, 3k/4], a little-endian stream | the same | e · 2^(b − 127) |
| fp4 of 16, its scales fp8_e4m3 | uint8 [n, k/2] | E4M3 [n, k/16], `weight_scale_2` float32 [] | e2m1 · s · s2 |
| fp8_e4m3 | E4M3 [n, k] | float, one or one a row | e4m3 · s |
| int8 | int8 [n, k], symmetric | float, one or one a row | q · s |
| int4, uint4, per_group | int32 [k, n/8], eight outputs a word | float [k/g, n] | (q − z) · s |
| int4, uint4, per_channel | int32 [n, k/8], eight inputs a word | float [n] | (q − z) · s |

Nibble i of a word is output or input [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight when the config's
`export.pack_method` is `reorder`, i when it is `order`; int4 is two's complement.
`weight_zero_point` int32 is packed the same way, [k/g, n/8] or [n/8]; of symmetric weights it is 0.

AMD's FP4 under E5M3 scales, weights quantized twice over (`int4_fp8`), MX6, MX9 and bfp16 are
refused by name. Config: `global_quant_config.weight`, then `layer_quant_config` by shell patterns
of module names, `exclude` by names, shell patterns or `re:`. Source: the exports of Quark 0.9 and
0.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, LayoutError, UnsupportedError
from ..formats import format_named
from ..numerics.bits import pack, unpack
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, label, require
from .common.float8 import E4M3, E8M0, F32, FLOATS, I8, U8, bytes_of, signed_codes, view_as
from .common.integers import check_no_group_index
from .common.words import as_bytes, as_words
from .quant_config.module_rules import covered, first_entry, glob_matches
from .quant_config.reader import ConfigReader

READ = ("fp4", "mx", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "int8", "int4", "uint4")
MX = {"fp4": format_named("mxfp4", 32), "fp6_e2m3": format_named("mxfp6_e2m3", 32), "fp6_e3m2": format_named("mxfp6_e3m2", 32)}
NVFP4 = format_named("nvfp4", 16)
I32 = np.dtype(np.int32)
INT4 = ("int4", "uint4")
NIBBLES = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}
"""`export.pack_method` -> which of its eight each nibble of a word is."""
_DECIDE = (
    "dtype", "qscheme", "group_size", "ch_axis", "symmetric", "scale_format", "is_dynamic", "mx_element_dtype",
    "scale_calculation_mode", "zero_point_type", "block_size", "is_scale_quant",
)  # fmt: skip
_SEARCH = ("observer_cls", "scale_type", "round_method", "qat_spec", "enable_buffer_reuse", "max_input_numel")


class QuarkConfig(ConfigReader):
    """`global_quant_config`, `layer_quant_config` by shell patterns, `layer_type_quant_config`,
    `exclude`.
    """

    method = "quark"
    consumed = (
        "exclude",
        "export.pack_method",
        "export.weight_format",
        "global_quant_config.weight",
        *(f"global_quant_config.weight.{key}" for key in _DECIDE),
    )
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized at run time": (
            "global_quant_config.input_tensors", "global_quant_config.output_tensors", "global_quant_config.bias",
            "global_quant_config.target_device", "kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec",
            "export.kv_cache_group", "export.min_kv_scale", "export.weight_merge_groups",
        ),
        "how the quantizer searched": (
            "algo_config", "quant_mode", "log_severity_level", *(f"global_quant_config.weight.{key}" for key in _SEARCH),
        ),
        "notes of the writer": ("version",),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._exclude = self._names("exclude")
        self._global = self._weight(self._object("global_quant_config"), "global_quant_config")
        self._layers = {
            name: self._weight(entry, f"layer_quant_config {name!r}") or {}
            for name, entry in self._object("layer_quant_config").items()
        }
        types = self._object("layer_type_quant_config")
        if types:
            raise UnsupportedError(
                f"[config] {where}: Quark's layer_type_quant_config ({', '.join(types)}) is not read; read: global_quant_config, "
                "layer_quant_config by names, exclude. Pass config= (--config) with layer_quant_config instead"
            )

    def _use(self, path: tuple[str, ...], value: Any) -> Any:
        # A pattern of layers has dots and is one key; what is below means what it means globally.
        if path[0] == "layer_quant_config" and len(path) > 2:
            path = ("global_quant_config", *path[2:])
        return super()._use(path, value)

    def _weight(self, entry: Any, what: str) -> dict[str, Any] | None:
        weight = entry.get("weight") if isinstance(entry, dict) else None
        if weight is None:
            return None
        if isinstance(weight, list):
            return self._two_levels(weight, what)
        if not isinstance(weight, dict):
            raise CheckpointError(f"[config] {self.where}: {what} has weight {weight!r:.80}; wanted an object")
        word = str(weight.get("dtype"))
        if word not in READ or (word == "mx" and weight.get("mx_element_dtype") != "fp4"):
            kind = weight.get("mx_element_dtype") or word
            raise UnsupportedError(
                f"[config] {self.where}: Quark's {what} has weights of {kind} (weight.dtype), which are recognised and not "
                f"read; read: {', '.join(READ)}. Use Quark's export to compressed-tensors or AWQ"
            )
        odd = {
            "scale_format": weight.get("scale_format") not in (None, "float32", "float", "e8m0"),
            "qscheme": weight.get("qscheme") not in (None, "per_tensor", "per_channel", "per_group"),
            "zero_point_type": weight.get("zero_point_type") not in (None, "int32") and word in INT4,
            "symmetric": word == "uint4" and weight.get("symmetric") is True,
        }
        for key in (key for key, wrong in odd.items() if wrong):
            raise UnsupportedError(
                f"[config] {self.where}: Quark's {what} has weights of {word} whose {key} is {weight[key]!r:.60}, which is "
                "recognised and not read. Use Quark's export to compressed-tensors or AWQ"
            )
        symmetric = weight.get("symmetric")
        if word in INT4 and not isinstance(symmetric, bool):
            raise CheckpointError(
                f"[config] {self.where}: {what} has weights of {word} and symmetric {symmetric!r:.60}; wanted true or false"
            )
        return {
            "dtype": "fp4" if word == "mx" else word,
            "qscheme": weight.get("qscheme"),
            "group_size": weight.get("group_size"),
            "symmetric": symmetric,
            "pack_method": self._object("export").get("pack_method"),
        }

    def _two_levels(self, levels: list[Any], what: str) -> dict[str, Any]:
        """Parameters of weights whose scales are quantized: NVFP4, FP4 of 16 under E4M3 scales."""
        words = [str(level.get("dtype")) if isinstance(level, dict) else repr(level)[:40] for level in levels]
        known = all(isinstance(level, dict) and set(level) <= {*_DECIDE, *_SEARCH} for level in levels)
        nvfp4 = words == ["fp4", "fp8_e4m3"] and known and levels[0].get("group_size") == 16 and levels[1].get("is_scale_quant")
        if not nvfp4 or (levels[0].get("qscheme"), levels[1].get("qscheme")) != ("per_group", "per_tensor"):
            raise UnsupportedError(
                f"[config] {self.where}: Quark's {what} quantizes weights to {', then '.join(words)}, "
                "which is recognised and not read; read: fp4 in groups of 16 whose scales are fp8_e4m3 (NVFP4)"
            )
        return {"dtype": "nvfp4", "qscheme": "per_group", "group_size": 16}

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._exclude, module, glob_matches):
            return None
        own = first_entry(self._layers, module, glob_matches)
        own = self._global if own is None else own
        return dict(own) if own else None


class Quark(Layout):
    """`weight` and `weight_scale`; the dtypes say which kind it is, and must agree with the config."""

    name = "quark"
    config_reader = QuarkConfig
    required = ("weight", "weight_scale")
    optional = ("weight_scale_2", "weight_zero_point")
    parts: ClassVar[dict[str, str]] = {
        "weight": "codes",
        "weight_scale": "scales",
        "weight_scale_2": "global_scale",
        "weight_zero_point": "zeros",
    }
    harmless: ClassVar[dict[str, str]] = {
        "input_scale": "scale of the activations",
        "input_scale_2": "scale of the activations' scales",
        "input_zero_point": "zero point of the activations",
        "output_scale": "scale of the outputs",
        "k_scale": "scale of the key cache",
        "v_scale": "scale of the value cache",
    }

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        if not self.matches(headers) or headers["weight"].dtype not in (U8, E4M3, I8, I32):
            return False
        # ModelOpt's NVFP4 has the same tensors: the config decides.
        return "weight_scale_2" not in headers or headers["weight"].dtype == U8

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        n, width = require(self.name, tensors, "weight", name, (U8, E4M3, I8, I32), (None, None))
        dtype, stated = tensors["weight"].dtype, config.get("dtype")
        kinds = {U8: ("fp4", "fp6_e2m3", "fp6_e3m2", "nvfp4"), E4M3: ("fp8_e4m3",), I8: ("int8",), I32: INT4}[dtype]
        if stated not in (None, *kinds):
            raise LayoutError(f"[quark] {label(name, 'weight')} is {dtype}; the config says {stated}")
        kind = str(stated or kinds[0])
        if kind != "nvfp4" and "weight_scale_2" in tensors:
            raise LayoutError(
                f"[quark] {label(name, 'weight_scale_2')} is there, and {kind} has one level of scales; wanted nvfp4"
            )
        if kind not in (*INT4, "int8") and "weight_zero_point" in tensors:
            raise LayoutError(
                f"[quark] {label(name, 'weight_zero_point')} is there, and {kind} has no zero point; wanted integers, or no such "
                "tensor"
            )
        if dtype == I32:
            return self._describe_int4(tensors, config, name)
        if kind == "nvfp4":
            require(self.name, tensors, "weight_scale", name, (E4M3,), (n, -(-2 * width // 16)), f"for {2 * width} inputs")
            require(self.name, tensors, "weight_scale_2", name, (F32,), ())
            return Described(NVFP4, (n, 2 * width))
        if dtype == U8:
            fmt = MX[kind]
            if config.get("group_size") not in (None, 32) or 8 * width % fmt.bits:
                raise LayoutError(
                    f"[quark] {label(name, 'weight')}: {width} bytes a row in groups of {config.get('group_size')!r}; wanted "
                    f"whole codes of {fmt.bits} bits in groups of 32"
                )
            k = 8 * width // fmt.bits
            require(self.name, tensors, "weight_scale", name, (U8, E8M0), (n, fmt.groups(k)), f"for {k} inputs")
            return Described(fmt, (n, k))
        scale = require(self.name, tensors, "weight_scale", name, FLOATS)
        if "weight_zero_point" in tensors:
            require(self.name, tensors, "weight_zero_point", name, (I8,), scale)
        scales = tensors["weight_scale"].dtype.name
        one = math.prod(scale) == 1 and (config.get("qscheme") == "per_tensor" or len(scale) < 2)
        if not one and scale not in ((n,), (n, 1)):
            raise LayoutError(f"[quark] {label(name, 'weight_scale')} has shape {list(scale)}; wanted one scale or [{n}]")
        return Described(format_named(kind, -1, scale_dtype=scales, **({"rows": -1} if one else {})), (n, width))

    def _describe_int4(self, tensors: Mapping[str, HasHeader], config: Config, name: str) -> Described:
        rows, words = tensors["weight"].shape
        require(self.name, tensors, "weight_scale", name, FLOATS)
        scheme, size, symmetric = (config.get(key) for key in ("qscheme", "group_size", "symmetric"))
        if scheme not in ("per_group", "per_channel") or symmetric is None or str(config.get("pack_method")) not in NIBBLES:
            raise LayoutError(
                f"[quark] {name or 'weight'}: qscheme {scheme!r}, symmetric {symmetric!r} and export.pack_method "
                f"{config.get('pack_method')!r} in the quantization config; 4-bit words need per_group or per_channel, true or "
                "false, and reorder or order"
            )
        if scheme == "per_group":
            n, k = 8 * words, rows
            if type(size) is not int or size < 1:
                raise LayoutError(f"[quark] {name or 'weight'}: group_size is {size!r} in the quantization config; wanted a size")
            wanted: tuple[int, ...] = (-(-k // size), n)
        else:
            n, k, size = rows, 8 * words, -1
            wanted = (n,)
        require(self.name, tensors, "weight_scale", name, (), wanted, f"for {n} outputs and {k} inputs")
        zeros = (*wanted[:-1], -(-n // 8))
        if not symmetric or "weight_zero_point" in tensors:
            require(self.name, tensors, "weight_zero_point", name, (I32,), zeros, f"for {n} outputs")
        word = "int4" if symmetric else "uint4"
        return Described(format_named(word, size, scale_dtype=tensors["weight_scale"].dtype.name), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        weight, scale = tensors["weight"], tensors["weight_scale"]
        if weight.dtype == I32:
            return self._unpack_int4(tensors, config, fmt, shape, name)
        details: dict[str, Any] = {"layout": self.name, "scale_shape": list(scale.shape), "scale_dtype": scale.dtype.name}
        codes = signed_codes(weight) if weight.dtype == I8 else bytes_of(weight)
        if fmt.family != "mx" and fmt != NVFP4:
            scales = scale.reshape((1, 1) if fmt.grouping == "block" else (shape[0], 1))
        else:
            scales = bytes_of(scale)
        parts: dict[str, Array] = {"codes": codes, "scales": scales}
        if fmt == NVFP4:
            parts["global_scale"] = tensors["weight_scale_2"]
        if "weight_zero_point" in tensors:
            if tensors["weight_zero_point"].any():
                raise LayoutError(f"[quark] {label(name, 'weight_zero_point')} is not 0; int8 weights are symmetric")
            details["zero_point"] = True
        return QTensor(fmt, shape, parts, details=details, name=name)

    def _unpack_int4(self, tensors: Tensors, config: Config, fmt: Format, shape: tuple[int, ...], name: str) -> QTensor:
        n, k = shape
        order = str(config["pack_method"])
        details: dict[str, Any] = {"layout": self.name, "pack_method": order, "dtype": str(config.get("dtype") or fmt.name)}
        # Two's complement nibbles of int4 become codes q + 8, and so do their zero points.
        signed = np.uint8(8 if details["dtype"] == "int4" else 0)
        grouped = fmt.group_size != -1
        fields = _fields(tensors["weight"], order, n if grouped else k) ^ signed
        scale = tensors["weight_scale"]
        codes = np.ascontiguousarray(fields.T) if grouped else fields
        scales = np.ascontiguousarray(scale.T) if grouped else scale.reshape(n, 1)
        parts: dict[str, Array] = {"codes": pack(codes, 4), "scales": scales}
        if "weight_zero_point" in tensors:
            stored = tensors["weight_zero_point"]
            zeros = _fields(stored if grouped else stored.reshape(1, -1), order, n)
            if fmt.name == "int4":
                if zeros.any():
                    raise LayoutError(
                        f"[quark] {label(name, 'weight_zero_point')} is not 0, and the config says symmetric; the two must agree"
                    )
                details["zero_point"] = True
            else:
                parts["zeros"] = np.ascontiguousarray((zeros ^ signed).T).astype(np.int16)
            if _padding(stored, order, n):
                raise LayoutError(f"[quark] {label(name, 'weight_zero_point')} has values beyond its {n} outputs; wanted 0 there")
        return QTensor(fmt, shape, parts, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt.family == "integer" and fmt.bits == 4:
            fits = fmt.grouping == "row" and fmt.zero in ("none", "int") and len(shape) == 2 and not fmt.inverse and not fmt.bias
            even = fits and shape[0 if fmt.group_size != -1 else 1] % 8 == 0
            return "" if even else "Quark's 4-bit words hold matrices in groups or rows, eight outputs or inputs a word"
        bytewide = fmt.name in ("fp8_e4m3", "int8") and fmt.group_size == -1 and fmt.group_rows in (1, -1) and not fmt.inverse
        packed = fmt in MX.values() or fmt == NVFP4
        if not packed and not bytewide:
            return "Quark's layout holds mxfp4, mxfp6 and nvfp4, and fp8_e4m3 and int8 under one scale or one a row"
        if len(shape) != 2 or (packed and shape[-1] * fmt.bits % 8):
            return "Quark's layout holds matrices (n, k) of whole bytes a row"
        return ""

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        own, codes, scales = self.own_details(q), q.parts["codes"], q.parts["scales"]
        if q.format.family == "integer" and q.format.bits == 4:
            return self._pack_int4(q, own)
        if q.format in MX.values():
            return {"weight": codes, "weight_scale": view_as(scales, str(own.get("scale_dtype", "uint8")))}
        if q.format == NVFP4:
            second = q.parts["global_scale"].reshape(())
            return {"weight": codes, "weight_scale": view_as(scales, E4M3), "weight_scale_2": second}
        shape = own.get("scale_shape", [] if scales.shape == (1, 1) and q.format.grouping == "block" else [q.shape[0]])
        weight = view_as(codes, E4M3) if q.format.name == "fp8_e4m3" else (codes ^ np.uint8(0x80)).view(I8)
        out = {"weight": weight, "weight_scale": scales.reshape(shape if math.prod(shape) == scales.size else scales.shape)}
        if own.get("zero_point"):
            out["weight_zero_point"] = np.zeros(out["weight_scale"].shape, I8)
        return out

    def _pack_int4(self, q: QTensor, own: Mapping[str, Any]) -> dict[str, Array]:
        check_no_group_index(self.name, q)
        n, k = q.shape
        order, grouped, zeros = str(own.get("pack_method", "reorder")), q.format.group_size != -1, q.parts.get("zeros")
        word = str(own.get("dtype", q.format.name))
        if zeros is not None and ((zeros < 0).any() or (zeros > 15).any()):
            raise cannot_hold(self.name, q, "its zero points take more than 4 bits")
        signed = np.uint8(8 if word == "int4" else 0)
        fields = unpack(q.parts["codes"], 4, k) ^ signed
        scales = q.parts["scales"]
        out: dict[str, Array] = {
            "weight": _words(np.ascontiguousarray(fields.T) if grouped else fields, order),
            "weight_scale": np.ascontiguousarray(scales.T) if grouped else scales.reshape(n),
        }
        if zeros is not None:
            stored = _words(np.ascontiguousarray(zeros.astype(np.uint8).T) ^ signed, order)
            out["weight_zero_point"] = stored if grouped else stored.reshape(-1)
        elif own.get("zero_point"):
            out["weight_zero_point"] = np.zeros((*out["weight_scale"].shape[:-1], -(-n // 8)), np.int32)
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        self.check_fits(q)
        if q.format == NVFP4:
            return {"dtype": "nvfp4", "qscheme": "per_group", "group_size": 16}
        if q.format in MX.values():
            return {"dtype": next(w for w, fmt in MX.items() if fmt == q.format), "qscheme": "per_group", "group_size": 32}
        if q.format.family == "integer" and q.format.bits == 4:
            own = self.own_details(q)
            size = q.format.group_size
            scheme: dict[str, Any] = {"qscheme": "per_channel"} if size == -1 else {"qscheme": "per_group", "group_size": size}
            word, order = own.get("dtype", q.format.name), own.get("pack_method", "reorder")
            return {"dtype": word, **scheme, "symmetric": q.format.zero == "none", "pack_method": order}
        return {"dtype": q.format.name, "qscheme": "per_tensor" if q.format.grouping == "block" else "per_channel"}


def _fields(words: Array, order: str, count: int) -> Array:
    """int32 [..., w] -> the first `count` nibbles [..., count] in order."""
    *lead, width = words.shape
    nibbles = unpack(as_bytes(words), 4, 8 * width).reshape(*lead, width, 8)
    return nibbles[..., np.argsort(NIBBLES[order])].reshape(*lead, 8 * width)[..., :count]


def _padding(words: Array, order: str, count: int) -> bool:
    """True when nibbles after the first `count` are not 0."""
    return bool(_fields(words, order, 8 * words.shape[-1])[..., count:].any())


def _words(fields: Array, order: str) -> NDArray[np.int32]:
    """Inverse of `_fields` of a matrix; nibbles that fill the last word are 0."""
    rows, count = fields.shape
    words = -(-count // 8)
    filled = np.pad(fields, ((0, 0), (0, 8 * words - count))).reshape(rows, words, 8)
    return as_words(pack(filled[..., list(NIBBLES[order])].reshape(rows, 8 * words), 4))
