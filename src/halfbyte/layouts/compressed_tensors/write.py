"""From a canonical tensor to compressed-tensors' tensors and config: the inverse of
`read.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...formats import family_of
from ...numerics import bits as stream
from ...numerics.transpose import transpose
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, cannot_hold, check_requested
from ..common.integers import check_zero_range, integer_misfit, monotone
from ..common.words import recall
from . import words

FLOAT8 = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
}
WORDS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp6_e2m3": "mxfp6-pack-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
    "mxfp8_e5m2": "mxfp8-quantized",
    "fp8_e4m3": "float-quantized",
    "fp8_e5m2": "float-quantized",
}
"""Codec -> `format` word of the config. Integers are pack-quantized or int-quantized."""
PLAIN = ("int-quantized", "naive-quantized")
INTEGER = ("pack-quantized", *PLAIN)


def scales_shape(fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Canonical shape of the scales."""
    return family_of(fmt).geometry(fmt, shape)["scales"].shape


def write_misfit(fmt: Format, shape: tuple[int, ...]) -> str:
    """Why no weight of this format and shape can be written, "" when it depends on its values."""
    if fmt.family == "integer":
        return integer_misfit(fmt, shape, range(1, 9), groupings=("row", "block"), ndims=(2, 3))
    if fmt.name not in WORDS or fmt.family not in ("nvfp4", "mx", "fp8"):
        return "the layout holds int, uint, fp8, nvfp4, mxfp4, mxfp6_e2m3 and mxfp8"
    if fmt.family == "nvfp4" and not fmt.global_op:
        return "NVFP4 has a global scale in this layout, and the weight has none"
    if fmt.name not in FLOAT8 and shape[-1] * fmt.bits % 8:
        return f"{shape[-1]} codes of {fmt.bits} bits are not whole bytes, and nothing in the file would say so"
    return ""


def word_of(layout: str, q: QTensor, args: Config, own: Mapping[str, Any]) -> str:
    """The `format` to write: the config's where it names one that fits, else the one q came in,
    else the usual one.
    """
    fmt, asked = q.format, args.get("format")
    if fmt.family != "integer":
        if fmt.name not in WORDS or fmt.family not in ("nvfp4", "mx", "fp8"):
            raise cannot_hold(layout, q, write_misfit(fmt, q.shape))
        allowed = (WORDS[fmt.name], *(("naive-quantized",) if fmt.family == "fp8" else ()))
    else:
        allowed = (own.get("format", "pack-quantized"), *INTEGER)
    if asked in (None, "mixed-precision"):
        return str(allowed[0])
    if asked not in allowed:
        raise cannot_hold(layout, q, f"the config says {asked}; this weight is written as {' or '.join(dict.fromkeys(allowed))}")
    return str(asked)


def write(layout: str, q: QTensor, args: Config, own: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors of `q`. Raises LayoutError when the layout cannot hold it."""
    fmt, (*lead, n, k) = q.format, q.shape
    word = word_of(layout, q, args, own)
    check_requested(layout, q, args, {"num_bits": fmt.bits})
    why = write_misfit(fmt, q.shape)
    if why:
        raise cannot_hold(layout, q, why)
    if fmt.family != "integer" and "group_index" in q.parts:
        raise cannot_hold(layout, q, "only integers can have an act-order group index here")
    out: dict[str, Array] = {}
    codes = q.parts["codes"]
    if fmt.name in FLOAT8:
        out["weight"] = codes.view(FLOAT8[fmt.name])
    elif word in PLAIN:
        half = np.uint8(1 << (fmt.bits - 1))
        out["weight"] = (stream.unpack(codes, fmt.bits, k) - half).view(np.int8)
    elif word == "pack-quantized":
        packing = own.get("packing", words.DENSE)
        unused = recall(own, "unused.weight_packed", words.unused_shape((*lead, n), k, fmt.bits, packing))
        out["weight_packed"] = words.words_of_codes(codes, fmt.bits, k, packing, unused)
    else:
        out["weight_packed"] = codes
    dtype = own.get("weight_shape", "int64" if word == "pack-quantized" else "absent")
    if dtype != "absent":
        out["weight_shape"] = np.array(q.shape, dtype)
    out["weight_scale"] = _scales(q, own)
    if fmt.family == "nvfp4":
        _global_scale(layout, q, own, out)
    if "zero_point" in own or fmt.zero == "int":
        out["weight_zero_point"] = _zeros(layout, q, word, own)
    _index(q, own, out)
    return out


def _scales(q: QTensor, own: Mapping[str, Any]) -> Array:
    fmt, scales = q.format, q.parts["scales"]
    if own.get("scale_dtype") == "float8_e8m0fnu":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    elif fmt.scale == "e4m3":
        scales = scales.view(ml_dtypes.float8_e4m3fn)
    tensor = fmt.grouping == "block" and fmt.group_rows == -1 and fmt.group_size == -1 and q.ndim == 2
    shape = own.get("scale_shape", [1] if tensor else list(scales.shape))
    return scales.reshape(shape) if math.prod(shape) == scales.size else scales


def _global_scale(layout: str, q: QTensor, own: Mapping[str, Any], out: dict[str, Array]) -> None:
    fmt = q.format
    if not fmt.global_op:
        return
    g = q.parts["global_scale"]
    if fmt.global_op != "divide" or fmt.divisor != 1.0:
        # A reciprocal is exact only of a power of two.
        mantissa, _ = np.frexp(g)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / g
        if fmt.divisor != 1.0 or not ((np.abs(mantissa) == 0.5) & np.isfinite(inverse) & (inverse != 0)).all():
            raise cannot_hold(
                layout,
                q,
                "its global scale multiplies, here it divides, and a reciprocal is exact only of a power of two",
                "write modelopt, or --lossy",
            )
        g = np.asarray(inverse, np.float32)
    shape = own.get("global_shape", [1] if q.ndim == 2 else list(g.shape))
    out["weight_global_scale"] = g.reshape(shape if math.prod(shape) == g.size else g.shape)


def _zeros(layout: str, q: QTensor, word: str, own: Mapping[str, Any]) -> Array:
    """`weight_zero_point`: packed along n, or one signed integer a scale."""
    fmt, n = q.format, q.shape[-2]
    kept = own.get("zero_point")
    if fmt.zero != "int":
        return np.zeros(own["zero_point"][1], own["zero_point"][0])
    zeros, half = q.parts["zeros"], 1 << (fmt.bits - 1)
    if word == "pack-quantized" and fmt.grouping == "row" and kept is None:
        packing = own.get("packing", words.DENSE)
        check_zero_range(layout, q, zeros, 0, 2 * half - 1)
        fields = transpose(zeros.astype(np.uint8))
        unused = recall(own, "unused.weight_zero_point", words.unused_shape(fields.shape[:-1], n, fmt.bits, packing))
        packed = words.words_of_codes(stream.pack(fields, fmt.bits), fmt.bits, n, packing, unused)
        return transpose(packed)
    dtype = np.dtype(kept[0] if kept else np.int8)
    info = np.iinfo(dtype)
    check_zero_range(layout, q, zeros, int(info.min) + half, int(info.max) + half)
    signed: NDArray[Any] = (zeros.astype(np.int32) - half).astype(dtype)
    shape = kept[1] if kept and math.prod(kept[1]) == zeros.size else _scales(q, own).shape
    return signed.reshape(shape)


def _index(q: QTensor, own: Mapping[str, Any], out: dict[str, Array]) -> None:
    k, state = q.shape[-1], own.get("g_idx")
    if "group_index" in q.parts:
        out["weight_g_idx"] = q.parts["group_index"]
    elif state == "monotone":
        out["weight_g_idx"] = monotone(k, q.format.group_size)
    elif state == "unset":
        kept = recall(own, "g_idx values", (k,), np.int32)
        out["weight_g_idx"] = np.full(k, -1, np.int32) if kept is None else kept


def group_config(layout: str, q: QTensor, own: Mapping[str, Any]) -> dict[str, Any]:
    """A config group without its targets: `format` and the `weights` arguments."""
    fmt = q.format
    word = word_of(layout, q, {}, own)
    weights: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "int" if fmt.family == "integer" else "float",
        "symmetric": fmt.zero != "int",
        "strategy": "channel" if fmt.group_size == -1 else "group",
        "group_size": None if fmt.group_size == -1 else fmt.group_size,
        "dynamic": False,
    }
    if fmt.grouping == "block":
        whole = fmt.group_rows == -1 and fmt.group_size == -1
        # The layout has no word for "all rows" or "all inputs": their number is written.
        tile = [max(1, d) if size == -1 else size for size, d in zip((fmt.group_rows, fmt.group_size), q.shape[-2:], strict=True)]
        strategy = {"strategy": "tensor"} if whole else {"strategy": "block", "block_structure": tile}
        weights |= {"group_size": None, **strategy}
    if fmt.family == "nvfp4":
        weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    elif fmt.family == "mx":
        weights["scale_dtype"] = "torch.uint8"
    if "group_index" in q.parts:
        weights["actorder"] = "group"
    return {"format": word, "weights": weights}
