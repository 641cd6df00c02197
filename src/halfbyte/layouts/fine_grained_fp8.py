"""FP8 checkpoints of `quant_method: fp8`: DeepSeek-V3 and V4, Qwen3-FP8, Ministral, and static FP8
of AutoFP8's time.

| | weight | scale | value |
|---|---|---|---|
| tiles (V3, Qwen3) | `weight` E4M3 [n, k] | `weight_scale_inv` float32 or bfloat16 [⌈n/r⌉, ⌈k/c⌉] | e4m3 · s |
| tiles (V4) | the same | `scale` E8M0 [⌈n/r⌉, ⌈k/c⌉] | e4m3 · 2^(b − 127) |
| one scale (Ministral, static FP8) | the same | `weight_scale_inv` or `weight_scale`, [] or [1] | e4m3 · s |
| a scale a row | the same | `weight_scale` [n] or [n, 1] | e4m3 · s |
| FP4 experts (V4) | `weight` int8 [n, k/2], low nibble even | `scale` E8M0 [n, k/32] | e2m1 · 2^(b − 127) |

The scale multiplies, in spite of the name `_inv`. `weight_block_size` of the config is [r, c]; null
says that a matrix has one scale. E8M0 scales of tiles become float32, which holds every power of
two they name; `details` keeps the file's dtype and names. Scales of activations
(`activation_scale`, `input_scale`) and of caches (`kv_scale`) do not enter the weight.

W4AFP8, int4 pairs in the same int8 tensors under float scales of 128, is refused by name: no
published file says how its nibbles are ordered. Source: the configs and model code of DeepSeek-V3
and V4, Ministral 3, and AutoFP8.
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
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, label, require
from .common.float8 import BF16, E4M3, E8M0, F32, FLOATS, I8, bytes_of, view_as
from .quant_config.reader import SkipListReader

WEIGHT, SCALE = "weight", "weight_scale_inv"
SCALES = (SCALE, "scale", "weight_scale")
MXFP4 = format_named("mxfp4", 32)


class FineGrainedFP8Config(SkipListReader):
    """`weight_block_size`, and the modules that stay dense under `modules_to_not_convert` or
    `ignored_layers`.
    """

    method = "fp8"
    skip_keys = ("modules_to_not_convert", "ignored_layers")
    consumed = ("weight_block_size", "fmt", "scale_fmt")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized at run time": ("activation_scheme", "kv_cache_scheme", "kv_cache_quant"),
        "whether transformers decodes when it loads": ("dequantize",),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        word = raw.get("fmt")
        if word is not None and "e4m3" not in str(word).lower():
            raise UnsupportedError(f"[config] {where}: fmt is {word!r:.40}; read: e4m3 (float8_e4m3fn)")


class FineGrainedFP8(Layout):
    """float8 weights under the scales of tiles, of a row or of the whole matrix, and V4's FP4
    experts.
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
            return self._describe_fp4(tensors, suffix, name)
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

    def _describe_fp4(self, tensors: Mapping[str, HasHeader], suffix: str, name: str) -> Described:
        n, half = tensors[WEIGHT].shape
        scale = tensors[suffix]
        if scale.dtype != E8M0 and len(scale.shape) == 2 and scale.shape[0] == n:
            raise UnsupportedError(
                f"[fp8] {label(name, WEIGHT)} is int8 under {scale.dtype} scales {list(scale.shape)}: W4AFP8, int4 pairs for "
                "8-bit activations. It is recognised and not read; use a checkpoint in block FP8, GPTQ or AWQ"
            )
        if scale.dtype != E8M0:
            require(self.name, tensors, WEIGHT, name, (E4M3,))
        require(self.name, tensors, suffix, name, (), (n, -(-2 * half // 32)), f"for FP4 pairs in [{n}, {half}] bytes")
        return Described(MXFP4, (n, 2 * half))

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
        if fmt == MXFP4:
            scales: Array = bytes_of(scale)
        else:
            if scale.dtype == E8M0:
                details["scale_dtype"] = E8M0.name
            canonical = (shape[0], 1) if fmt.grouping == "row" else (1, 1) if fmt.group_rows == -1 else scale.shape
            if scale.shape != canonical:
                details["scale_shape"] = list(scale.shape)
            scales = (scale.astype(np.float32) if scale.dtype == E8M0 else scale).reshape(canonical)
        return QTensor(fmt, shape, {"codes": bytes_of(tensors[WEIGHT]), "scales": scales}, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        fp8 = fmt.family == "fp8" and fmt.element == "e4m3" and not fmt.inverse
        fp8 = fp8 and (fmt.group_size == -1 or fmt.grouping == "block")
        if not (fp8 and fmt.scale in ("float32", "bfloat16", "float16")) and fmt != MXFP4:
            return "the layout holds fp8_e4m3 in tiles, rows or one piece under float scales, and mxfp4:g32"
        if fmt == MXFP4 and shape[-1] % 2:
            return f"two codes share a byte, and k = {shape[-1]} is odd"
        if fp8 and fmt.grouping == "block" and (fmt.group_size == -1) != (fmt.group_rows == -1):
            return "tiles have a number of rows and of columns"
        return "" if len(shape) == 2 else "the layout holds whole (n, k) matrices"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if q.window is not None:
            raise cannot_hold(self.name, q, "it is a slice of rows; the layout holds whole (n, k) matrices")
        own, scales = self.own_details(q), q.parts["scales"]
        usual = "scale" if q.format == MXFP4 else SCALE if q.format.grouping == "block" else "weight_scale"
        suffix = str(own.get("scale", usual))
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
        tiles = q.format.grouping == "block" and q.format.group_size != -1
        base: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**base, "weight_block_size": [q.format.group_rows, q.format.group_size] if tiles else None}
