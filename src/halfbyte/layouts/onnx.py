"""ONNX MatMulNBits (com.microsoft): blocks along k in bytes, low bits first, zero points packed
along the blocks of a row.

    weight_Q4           uint8 [n, blocks, block·bits/8]    weight_Q2, weight_Q8 likewise; the last block is padded
    weight_scales       float [n, blocks], or flat
    weight_zero_points  uint8 [n, ceil(blocks·bits/8)], or flat; or floats in the shape of the
                        scales; left out: 2^(bits−1)
    weight_g_idx        int32 [k], optional

Config, the node's attributes: `K` (blocks · block_size when left out), `N`, `bits`, `block_size`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..numerics.bits import pack, unpack
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import (
    Array,
    Config,
    Described,
    HasHeader,
    Holds,
    Layout,
    Tensors,
    cannot_hold,
    check_requested,
    integer_of,
    label,
    reject_extra,
    require,
)
from .common.float8 import FLOATS, U8
from .common.integers import check_index
from .common.words import join_stream, recall, remember, split_stream
from .quant_config.reader import PlainReader

_CODES = {"weight_Q2": 2, "weight_Q4": 4, "weight_Q8": 8}


class ONNXConfig(PlainReader):
    """Attributes of a MatMulNBits node."""

    method = "onnx"
    consumed = ("K", "N", "bits", "block_size")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {"how the node computes": ("accuracy_level",)}

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "block_size" in raw and "bits" in raw


class ONNX(Layout):
    """The initializers of a MatMulNBits node."""

    name = "onnx"
    producers = ("onnxruntime",)
    holds = Holds(
        ("uint4", "uint8", "uint2"),
        "matrices in blocks of a power of two of at least 16 along k, zero points within the codes' range",
        groups=(256, 128, 64, 32, 16),
    )
    config_reader = ONNXConfig
    required = ("weight_scales",)
    optional: ClassVar[tuple[str, ...]] = (*_CODES, "weight_zero_points", "weight_g_idx")
    parts: ClassVar[dict[str, str]] = {
        "weight_scales": "scales",
        **dict.fromkeys(_CODES, "codes"),
        "weight_zero_points": "zeros",
        "weight_g_idx": "group_index",
    }

    def matches(self, suffixes: Collection[str]) -> bool:
        return "weight_scales" in suffixes and any(s in suffixes for s in _CODES)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        suffix = _codes_suffix(tensors, name)
        reject_extra(
            "onnx", tensors, (suffix, *(s for s in ONNX.optional if s not in _CODES), *ONNX.required), name, "MatMulNBits"
        )
        bits = _CODES[suffix]
        n, blocks, width = require("onnx", tensors, suffix, name, (U8,), (None, None, None))
        block = width * 8 // bits
        k = integer_of("onnx", config, "K", name)
        k = blocks * block if k is None else k
        for key, have in (("bits", bits), ("block_size", block), ("N", n)):
            if config.get(key, have) != have:
                raise LayoutError(
                    f"[onnx] {label(name, suffix)} has shape {[n, blocks, width]}: {key} {have}; the node says {config[key]}"
                )
        if block == 0 or -(-k // block) != blocks:
            raise LayoutError(
                f"[onnx] {label(name, suffix)} has {blocks} blocks of {block}; K = {k} takes {-(-k // block) if block else '?'}"
            )
        _sized(tensors, "weight_scales", name, FLOATS, (n, blocks))
        if "weight_g_idx" in tensors:
            require("onnx", tensors, "weight_g_idx", name, (np.dtype(np.int32),), (k,))
        scale = tensors["weight_scales"].dtype.name
        if "weight_zero_points" not in tensors:
            return Described(format_named(f"int{bits}", block, scale_dtype=scale), (n, k))
        if tensors["weight_zero_points"].dtype == U8:
            _sized(tensors, "weight_zero_points", name, (U8,), (n, -(-blocks * bits // 8)))
            return Described(format_named(f"uint{bits}", block, scale_dtype=scale), (n, k))
        _sized(tensors, "weight_zero_points", name, (tensors["weight_scales"].dtype,), (n, blocks))
        return Described(format_named(f"hqq{bits}", block, scale_dtype=scale), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        blocks = fmt.groups(k)
        details: dict[str, Any] = {}
        stream = tensors[_codes_suffix(tensors, name)].reshape(n, blocks * fmt.group_size * fmt.bits // 8)
        codes, filling = split_stream(stream, fmt.bits, k)
        remember(details, "padding", filling)
        parts: dict[str, Array] = {"codes": codes, "scales": tensors["weight_scales"].reshape(n, blocks)}
        if tensors["weight_scales"].ndim != 2:
            details["scales_shape"] = list(tensors["weight_scales"].shape)
        if fmt.zero != "none":
            stored = tensors["weight_zero_points"]
            if stored.ndim != 2:
                details["zero_points_shape"] = list(stored.shape)
            if fmt.zero == "float":
                parts["zeros"] = stored.reshape(n, blocks)
            else:
                stored = stored.reshape(n, -(-blocks * fmt.bits // 8))
                fields = unpack(stored, fmt.bits, stored.shape[1] * 8 // fmt.bits)
                parts["zeros"] = fields[:, :blocks].astype(np.int16)
                if bool((fields[:, blocks:] != 1 << (fmt.bits - 1)).any()):
                    remember(details, "zero_padding", fields[:, blocks:])
        if "weight_g_idx" in tensors:
            check_index("onnx", label(name, "weight_g_idx"), tensors["weight_g_idx"], blocks)
            parts["group_index"] = tensors["weight_g_idx"]
        return QTensor(fmt, (n, k), parts, origin="onnxruntime", details=details, name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        fmt, kept = q.format, q.details if q.origin == "onnxruntime" else {}
        self._check(q)
        check_requested("onnx", q, config, self.config(q))
        n, k = q.shape
        block, blocks = fmt.group_size, fmt.groups(k)
        width = block * fmt.bits // 8
        tail = blocks * width - k * fmt.bits // 8
        stream = join_stream(q.parts["codes"], blocks * width, fmt.bits, k, recall(kept, "padding", (n, tail)) if tail else None)
        out: dict[str, Array] = {
            f"weight_Q{fmt.bits}": stream.reshape(n, blocks, width),
            "weight_scales": _reshaped(q.parts["scales"], kept, "scales_shape"),
        }
        if fmt.zero == "float":
            out["weight_zero_points"] = _reshaped(q.parts["zeros"], kept, "zero_points_shape")
        elif fmt.zero == "int":
            fields = np.full((n, -(-blocks * fmt.bits // 8) * 8 // fmt.bits), 1 << (fmt.bits - 1), np.uint8)
            fields[:, :blocks] = q.parts["zeros"]
            padding = recall(kept, "zero_padding", fields[:, blocks:].shape)
            if padding is not None:
                fields[:, blocks:] = padding
            out["weight_zero_points"] = _reshaped(pack(fields, fmt.bits), kept, "zero_points_shape")
        if "group_index" in q.parts:
            out["weight_g_idx"] = q.parts["group_index"]
        return out

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        plain = (fmt.family == "integer" and not fmt.inverse and fmt.divisor == 1.0) or fmt.family == "hqq"
        if not plain or fmt.bits not in _CODES.values() or fmt.grouping != "row" or len(shape) != 2:
            return "MatMulNBits holds matrices of int, uint or hqq codes of 2, 4 or 8 bits in groups along k"
        if fmt.group_size < 16 or fmt.group_size & (fmt.group_size - 1):
            return "MatMulNBits has blocks of 16, 32, 64, ... (a power of two)"
        return ""

    def _check(self, q: QTensor) -> None:
        self.check_fits(q)
        if q.format.zero == "int":
            zeros = q.parts["zeros"]
            if zeros.size and (int(zeros.min()) < 0 or int(zeros.max()) >> q.format.bits):
                raise cannot_hold(
                    "onnx", q, f"zero points run from {zeros.min()} to {zeros.max()}; it stores 0 to {(1 << q.format.bits) - 1}"
                )

    def config(self, q: QTensor) -> dict[str, Any]:
        self._check(q)
        return {"K": q.shape[1], "N": q.shape[0], "bits": q.format.bits, "block_size": q.format.group_size}


def _codes_suffix(tensors: Mapping[str, HasHeader], name: str) -> str:
    for suffix in _CODES:
        if suffix in tensors:
            return suffix
    raise LayoutError(
        f"[onnx] {name or 'weight'} has {', '.join(sorted(tensors)) or 'no tensors'}; wanted one of {', '.join(_CODES)}"
    )


def _sized(tensors: Mapping[str, HasHeader], suffix: str, name: str, dtypes: tuple[Any, ...], shape: tuple[int, int]) -> None:
    """Check dtype and number of elements of a tensor that is a matrix or flat."""
    got = require("onnx", tensors, suffix, name, dtypes)
    if got not in (shape, (math.prod(shape),)):
        raise LayoutError(f"[onnx] {label(name, suffix)} has shape {list(got)}; wanted {list(shape)} or [{math.prod(shape)}]")


def _reshaped(a: Array, kept: Mapping[str, Any], key: str) -> Array:
    shape = tuple(kept.get(key, a.shape))
    return a.reshape(shape) if math.prod(shape) == a.size else a
