"""FP8 checkpoints of `quant_method: fp8`: DeepSeek-V3 and V4, Qwen3-FP8, Ministral, and static FP8
of AutoFP8's time.

| | weight | scale | value |
|---|---|---|---|
| tiles (V3, Qwen3) | `weight` E4M3 [n, k] | `weight_scale_inv` float32 or bfloat16 [⌈n/r⌉, ⌈k/c⌉] | e4m3 · s |
| tiles (V4) | the same | `scale` E8M0 [⌈n/r⌉, ⌈k/c⌉] | e4m3 · 2^(b − 127) |
| one scale (Ministral, static FP8) | the same | `weight_scale_inv` or `weight_scale`, [] or [1] | e4m3 · s |
| a scale a row | the same | `weight_scale` [n] or [n, 1] | e4m3 · s |
| FP4 experts (V4) | `weight` int8 [n, k/2], low nibble even | `scale` E8M0 [n, k/32] | e2m1 · 2^(b − 127) |
| int4 experts (W4AFP8) | `weight` int8 [n, k/2], low nibble even | `weight_scale_inv` bfloat16, float32 [n, k/g] | int4 · s |

The scale multiplies, in spite of the name `_inv`. `weight_block_size` of the config is [r, c]; null
says that a matrix has one scale. E8M0 scales of tiles become float32, which holds every power of
two they name; `details` keeps the file's dtype and names. Scales of activations
(`activation_scale`, `input_scale`) and of caches (`kv_scale`) do not enter the weight.

W4AFP8 (`quant_method: w4afp8`, or `quant_algo: MIXED_PRECISION` without a table) has experts of
int4 pairs in two's complement, for activations in FP8, and block FP8 elsewhere; g is `group_size`,
128 where it is not given. Source: the configs and model code of DeepSeek-V3 and V4, Ministral 3,
AutoFP8; vLLM's and SGLang's loaders of W4AFP8.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError, UnsupportedError
from ..formats import format_named
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, integer_of, label, require
from .common.float8 import BF16, E4M3, E8M0, F32, FLOATS, I8, bytes_of, view_as
from .quant_config.reader import SkipListReader

WEIGHT, SCALE = "weight", "weight_scale_inv"
SCALES = (SCALE, "scale", "weight_scale")
MXFP4 = format_named("mxfp4", 32)
INT4_FLIP = np.uint8(0x88)
"""Two's complement nibbles, exclusive-or this, are the biased codes of int4."""


class FineGrainedFP8Config(SkipListReader):
    """`weight_block_size`, and the modules that stay dense under `modules_to_not_convert` or
    `ignored_layers`.
    """

    method = "fp8"
    methods = ("w4afp8",)
    skip_keys = ("modules_to_not_convert", "ignored_layers")
    consumed = ("weight_block_size", "fmt", "scale_fmt", "group_size", "quant_algo")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized at run time": (
            "activation_scheme", "kv_cache_scheme", "kv_cache_quant",
            "linear_activation_scheme", "moe_activation_scheme", "kv_cache_quant_algo",
        ),
        "notes of the writer": ("producer",),
        "what the dtypes of the tensors state": ("expert_dtype",),
        "whether transformers decodes when it loads": ("dequantize",),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        word = raw.get("fmt")
        if word is not None and "e4m3" not in str(word).lower():
            raise UnsupportedError(f"[config] {where}: fmt is {word!r:.40}; read: e4m3 (float8_e4m3fn)")


class FineGrainedFP8(Layout):
    """float8 weights under the scales of tiles, of a row or of the whole matrix, V4's FP4 experts
    and W4AFP8's int4 experts.
    """

    name = "fp8"
    config_reader = FineGrainedFP8Config
    required = (WEIGHT,)
    optional = SCALES
    parts: ClassVar[dict[str, str]] = {WEIGHT: "codes", **dict.fromkeys(SCALES, "scales")}
    harmless: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("activation_scale", "input_scale"), "scale of the activations"),
        **dict.fromkeys(("kv_scale", "k_scale", "v_scale"), "scale of the cache"),
    }

    def matches(self, suffixes: Collection[str]) -> bool:
        return WEIGHT in suffixes and any(s in suffixes for s in SCALES) and "weight_scale_2" not in suffixes

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        # `weight` beside `scale` is an ordinary pair of names; its dtypes are not.
        return self.matches(headers) and headers[WEIGHT].dtype in (E4M3, I8)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        suffix = self._scale_suffix(tensors, name)
        weight = require(self.name, tensors, WEIGHT, name, (E4M3, I8), (None, None))
        scale = require(self.name, tensors, suffix, name, (*FLOATS, E8M0))
        n, k = weight
        if tensors[WEIGHT].dtype == I8:
            return self._describe_pairs(tensors, suffix, config, name)
        tile = self._tile(config, name)
        dtype = "float32" if tensors[suffix].dtype == E8M0 else tensors[suffix].dtype.name
        if tile is None and math.prod(scale) == 1 and n * k:
            return Described(format_named("fp8_e4m3", -1, rows=-1, scale_dtype=dtype), (n, k))
        if tile is None and scale in ((n,), (n, 1)):
            return Described(format_named("fp8_e4m3", -1, scale_dtype=dtype), (n, k))
        rows, columns = tile or (128, 128)
        grid = (-(-n // rows), -(-k // columns))
        require(self.name, tensors, suffix, name, (F32, BF16, E8M0), grid, f"for tiles of {rows} x {columns} of [{n}, {k}]")
        return Described(format_named("fp8_e4m3", columns, rows=rows, scale_dtype=dtype), (n, k))

    def _scale_suffix(self, tensors: Mapping[str, HasHeader], name: str) -> str:
        found = [s for s in SCALES if s in tensors]
        if not found:
            require(self.name, tensors, SCALE, name)
        if len(found) > 1:
            raise LayoutError(f"[fp8] {' and '.join(label(name, s) for s in found)} are both there; one of them is the scale")
        return found[0]

    def _describe_pairs(self, tensors: Mapping[str, HasHeader], suffix: str, config: Config, name: str) -> Described:
        """FP4 pairs under E8M0 scales, int4 pairs under float ones."""
        n, half = tensors[WEIGHT].shape
        scale = tensors[suffix]
        if scale.dtype == E8M0:
            require(self.name, tensors, suffix, name, (), (n, -(-2 * half // 32)), f"for FP4 pairs in [{n}, {half}] bytes")
            return Described(MXFP4, (n, 2 * half))
        if suffix != SCALE or scale.shape[:1] != (n,):  # int8 numbers under some other scales
            require(self.name, tensors, WEIGHT, name, (E4M3,))
        size = integer_of(self.name, config, "group_size", name) or 128
        if size < 1:
            raise LayoutError(f"[fp8] {name}: group_size is {size}; int4 pairs have groups of a number of inputs above 0")
        groups = (n, -(-2 * half // size))
        require(self.name, tensors, suffix, name, (BF16, F32), groups, f"for int4 pairs in [{n}, {half}] bytes (W4AFP8)")
        return Described(format_named("int4", size, scale_dtype=scale.dtype.name), (n, 2 * half))

    @staticmethod
    def _tile(config: Config, name: str) -> tuple[int, int] | None:
        """(rows, columns) of a tile from `weight_block_size`; None when the config gives none."""
        size = config.get("weight_block_size")
        if size is None:
            return None
        if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(s) is int and s > 0 for s in size):
            raise LayoutError(
                f"[fp8] {name}: weight_block_size is {size!r}; two whole numbers above 0, [rows, columns], are wanted"
            )
        return size[0], size[1]

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        suffix = self._scale_suffix(tensors, name)
        scale = tensors[suffix]
        details: dict[str, Any] = {"layout": self.name, "scale": suffix}
        codes = bytes_of(tensors[WEIGHT])
        if fmt == MXFP4:
            scales: Array = bytes_of(scale)
        elif fmt.family == "integer":
            codes, scales = codes ^ INT4_FLIP, scale
        else:
            if scale.dtype == E8M0:
                details["scale_dtype"] = E8M0.name
            canonical = (shape[0], 1) if fmt.grouping == "row" else (1, 1) if fmt.group_rows == -1 else scale.shape
            if scale.shape != canonical:
                details["scale_shape"] = list(scale.shape)
            scales = (scale.astype(np.float32) if scale.dtype == E8M0 else scale).reshape(canonical)
        return QTensor(fmt, shape, {"codes": codes, "scales": scales}, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        fp8 = fmt.family == "fp8" and fmt.element == "e4m3" and not fmt.inverse
        fp8 = fp8 and (fmt.group_size == -1 or fmt.grouping == "block")
        int4 = fmt.name == "int4" and fmt.grouping == "row" and fmt.group_size > 0 and fmt.zero == "none"
        int4 = int4 and fmt.scale in ("float32", "bfloat16")
        if not (fp8 and fmt.scale in ("float32", "bfloat16", "float16")) and fmt != MXFP4 and not int4:
            return (
                "the layout holds fp8_e4m3 in tiles, rows or one piece under float scales, mxfp4:g32, and int4 in groups under "
                "float32 or bfloat16 scales"
            )
        if fp8 and fmt.grouping == "block" and (fmt.group_size == -1) != (fmt.group_rows == -1):
            return "tiles have a number of rows and of columns"
        if len(shape) != 2:
            return "the layout holds whole (n, k) matrices"
        _, k = shape
        return "" if fp8 or k % 2 == 0 else f"two codes share a byte, and k = {k} is odd"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if q.window is not None:
            raise cannot_hold(self.name, q, "it is a slice of rows; the layout holds whole (n, k) matrices")
        own, scales = self.own_details(q), q.parts["scales"]
        usual = "scale" if q.format == MXFP4 else SCALE if q.format.grouping == "block" else "weight_scale"
        suffix = str(own.get("scale", SCALE if q.format.family == "integer" else usual))
        if q.format.family == "integer":
            return {WEIGHT: (q.parts["codes"] ^ INT4_FLIP).view(I8), suffix: scales}
        if q.format == MXFP4:
            return {WEIGHT: q.parts["codes"].view(I8), suffix: view_as(scales, E8M0)}
        if own.get("scale_dtype") == E8M0.name:
            narrow = scales.astype(E8M0)
            # A power of two under another name; NaN is 0xFF.
            same = np.array_equal(narrow.astype(np.float32), scales, equal_nan=True)
            scales = narrow if same else scales
        shape = own.get("scale_shape", [] if q.format.group_rows == -1 and q.format.grouping == "block" else list(scales.shape))
        fits = math.prod(shape) == scales.size
        return {WEIGHT: view_as(q.parts["codes"], E4M3), suffix: scales.reshape(shape) if fits else scales}

    def config(self, q: QTensor) -> dict[str, Any]:
        self.check_fits(q)
        if q.format.family == "integer":
            words = {"quant_method": "w4afp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
            return {**words, "group_size": q.format.group_size}
        tiles = q.format.grouping == "block" and q.format.group_size != -1
        base: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**base, "weight_block_size": [q.format.group_rows, q.format.group_size] if tiles else None}
