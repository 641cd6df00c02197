"""bitsandbytes: 4-bit codes over the flattened tensor with a JSON state beside them, and row-wise
int8.

4 bit (nf4, fp4), suffixes as transformers saves them:

    weight                                [bytes, 1], high nibble even; uint8, or another storage
                                          dtype over the same bytes
    weight.absmax                         float32 [ceil(n·k/g)], or uint8 when double quantized
    weight.quant_map                      float32 [16], the table
    weight.nested_absmax                  float32 [ceil(blocks/256)], double quantized only
    weight.nested_quant_map               float32 [256], double quantized only
    weight.quant_state.bitsandbytes__nf4  uint8: JSON of quant_type, blocksize, dtype, shape and
                                          nested_offset

int8:

    weight  int8 [n, k]     SCB  float32 [n]     weight_format  uint8 [], 0 ("row") or left out      value = q · SCB / 127

Config: nothing, but for a 4-bit weight without its state, which needs `shape`, `quant_type` and
`blocksize` there. The decoder has the table built in, so a `quant_map` that is not that table is
refused. The state's text is kept in `details` and written back while it still describes the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError, UnsupportedError
from ..formats import family_of, format_named
from ..formats.decode import NESTED_BLOCK
from ..numerics.bits import pack, unpack
from ..numerics.minifloat import element_table
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, label, reject_extra, require
from .claims import PARAMETERS
from .common.float8 import F32, I8, U8, signed_codes, swap_nibbles
from .common.words import as_bytes, as_words, recall, remember
from .quant_config.reader import SkipListReader

_STATES = {"nf4": "weight.quant_state.bitsandbytes__nf4", "fp4": "weight.quant_state.bitsandbytes__fp4"}
_WORDS = {"nf4": "nf4", "fp4": "bnb_fp4"}
_TABLE_SLACK = 1e-6
"""Largest difference of a stored table from ours: versions of bitsandbytes rounded 1/192 and
similar entries differently.
"""


class BitsAndBytesConfig(SkipListReader):
    """bitsandbytes: `llm_int8_skip_modules`; each 4-bit weight carries its own state."""

    method = "bitsandbytes"
    skip_keys = ("llm_int8_skip_modules",)
    consumed = (
        "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "blocksize",
        "quant_type", "shape",
    )  # fmt: skip
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how the model runs": (
            "bnb_4bit_compute_dtype",
            "llm_int8_threshold",
            "llm_int8_has_fp16_weight",
            "llm_int8_enable_fp32_cpu_offload",
        ),
        "copies of other keys": ("_load_in_4bit", "_load_in_8bit"),
    }

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "load_in_4bit" in raw or "load_in_8bit" in raw or "blocksize" in raw


class BitsAndBytes(Layout):
    """Codes over the flattened tensor with their state in JSON, and row-wise int8."""

    name = "bitsandbytes"
    producers = ("bitsandbytes",)
    config_reader = BitsAndBytesConfig
    required = ("weight",)
    optional: ClassVar[tuple[str, ...]] = (
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *_STATES.values(),
        "SCB",
        "weight_format",
    )
    peek = (*_STATES.values(), "weight_format")
    parts: ClassVar[dict[str, str]] = {
        "weight": "codes", "weight.absmax": "scales", "weight.quant_map": PARAMETERS, "weight.nested_absmax": "nested_absmax",
        "weight.nested_quant_map": "nested_map", **dict.fromkeys(_STATES.values(), PARAMETERS), "SCB": "scales",
        "weight_format": PARAMETERS,
    }  # fmt: skip

    def matches(self, suffixes: Collection[str]) -> bool:
        return "weight" in suffixes and ("SCB" in suffixes or "weight.absmax" in suffixes)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        if "SCB" in tensors:
            reject_extra("bitsandbytes", tensors, ("weight", "SCB", "weight_format"), name, "int8")
            return _describe_int8(tensors, name)
        state = _state(tensors, config, name)
        kind = state["quant_type"]
        nested = "weight.nested_absmax" in tensors
        extra = ("weight.nested_absmax", "weight.nested_quant_map") if nested else ()
        reject_extra("bitsandbytes", tensors, ("weight", "weight.absmax", "weight.quant_map", _STATES[kind], *extra), name, kind)
        shape = tuple(int(d) for d in state["shape"])
        size, group = math.prod(shape), int(state["blocksize"])
        require("bitsandbytes", tensors, "weight", name)
        weight = tensors["weight"]
        nbytes = math.prod(weight.shape) * weight.dtype.itemsize
        if len(shape) < 2 or nbytes != -(-size // (2 * weight.dtype.itemsize)) * weight.dtype.itemsize:
            raise LayoutError(
                f"[bitsandbytes] {label(name, 'weight')} has {nbytes} bytes for shape {list(shape)}; wanted {(size + 1) // 2}"
            )
        blocks = -(-size // group)
        require(
            "bitsandbytes", tensors, "weight.absmax", name, (U8,) if nested else (F32,), (blocks,), f"(one a block of {group})"
        )
        require("bitsandbytes", tensors, "weight.quant_map", name, (F32,), (16,))
        if nested:
            if state.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
                raise LayoutError(f"[bitsandbytes] {name}: nested_blocksize {state['nested_blocksize']}; read: {NESTED_BLOCK}")
            require("bitsandbytes", tensors, "weight.nested_absmax", name, (F32,), (-(-blocks // NESTED_BLOCK),))
            require("bitsandbytes", tensors, "weight.nested_quant_map", name, (F32,), (256,))
        fmt = format_named(_WORDS[kind], group, nested=nested)
        return Described(family_of(fmt).fit(fmt, shape), shape)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        if fmt.element == "int":
            parts: dict[str, Array] = {"codes": signed_codes(tensors["weight"]), "scales": tensors["SCB"].reshape(shape[0], 1)}
            details: dict[str, Any] = {}
            if "weight_format" in tensors:
                details["weight_format_shape"] = list(tensors["weight_format"].shape)
            return QTensor(fmt, shape, parts, origin="bitsandbytes", details=details, name=name)
        state, weight = _state(tensors, config, name), tensors["weight"]
        details = {"dtype": str(state.get("dtype", "float32")), "weight_shape": list(weight.shape), "storage": weight.dtype.name}
        for key in _STATES.values():
            if key in tensors:
                details["quant_state"] = tensors[key].tobytes().decode()
        _check_table(tensors["weight.quant_map"], fmt, name)
        if tensors["weight.quant_map"].tobytes() != _table(fmt).tobytes():
            remember(details, "quant_map", tensors["weight.quant_map"])
        size, k = math.prod(shape), shape[-1]
        raw = as_bytes(weight).reshape(-1)
        if k % 2 == 0 and 2 * raw.size == size:
            codes = swap_nibbles(raw).reshape(*shape[:-1], k // 2)
        else:
            flat = unpack(swap_nibbles(raw), 4, 2 * raw.size)
            codes = pack(flat[:size].reshape(shape), 4)
            if flat[size:].any():
                remember(details, "padding", flat[size:])
        specs = family_of(fmt).geometry(fmt, shape)
        parts = {"codes": codes, "scales": tensors["weight.absmax"].reshape(specs["scales"].shape)}
        if fmt.scale == "nested":
            parts["nested_map"] = tensors["weight.nested_quant_map"]
            parts["nested_absmax"] = tensors["weight.nested_absmax"]
            parts["nested_offset"] = np.array(state["nested_offset"], np.float32)
        return QTensor(fmt, shape, parts, origin="bitsandbytes", details=details, name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        fmt, kept = q.format, q.details if q.origin == "bitsandbytes" else {}
        self.check_fits(q)
        if q.window is not None:
            raise cannot_hold("bitsandbytes", q, "it is a slice of rows of a weight whose blocks run over the whole")
        if fmt == format_named("bnb_int8"):
            out: dict[str, Array] = {
                "weight": (q.parts["codes"] ^ np.uint8(0x80)).view(np.int8),
                "SCB": q.parts["scales"].reshape(-1),
            }
            if "weight_format_shape" in kept:
                out["weight_format"] = np.zeros(kept["weight_format_shape"], np.uint8)
            return out
        kind = str(self._kind(fmt))
        size = q.size
        storage = np.dtype(_storage(str(kept.get("storage", "uint8"))))
        word = 2 * storage.itemsize  # codes
        codes = np.zeros(-(-size // word) * word, np.uint8)
        codes[:size] = unpack(q.parts["codes"], 4, q.shape[-1]).reshape(-1)
        padding = recall(kept, "padding", (codes.size - size,))
        if padding is not None:
            codes[size:] = padding
        raw = swap_nibbles(pack(codes, 4))
        weight = as_words(raw, storage) if storage.itemsize > 1 else raw.view(storage)
        shape = tuple(kept.get("weight_shape", ()))
        if "weight_shape" not in kept or math.prod(shape) != weight.size:
            shape = (weight.size, 1)
        table = recall(kept, "quant_map", (16,), np.float32)
        out = {
            "weight": weight.reshape(shape),
            "weight.absmax": q.parts["scales"].reshape(-1),
            "weight.quant_map": _table(fmt) if table is None else table,
        }
        if fmt.scale == "nested":
            out["weight.nested_absmax"] = q.parts["nested_absmax"]
            out["weight.nested_quant_map"] = q.parts["nested_map"]
        if "quant_state" in kept or not kept:
            out[_STATES[kind]] = np.frombuffer(_state_text(q, kind, kept).encode(), np.uint8)
        return out

    @staticmethod
    def _kind(fmt: Format) -> str | None:
        """bitsandbytes' word for a 4-bit format, None where it has none."""
        kind = next((k for k, word in _WORDS.items() if fmt.name == word), None)
        return kind if fmt.scale in ("float32", "nested") else None

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt == format_named("bnb_int8"):
            return "" if len(shape) == 2 else "int8 rows are those of one matrix"
        if self._kind(fmt) is None:
            return "bitsandbytes holds nf4 and bnb_fp4 with float32 or nested scales, and bnb_int8"
        return ""

    def config(self, q: QTensor) -> dict[str, Any]:
        self.check_fits(q)
        if q.format.name == "bnb_int8":
            return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
        nested = q.format.scale == "nested"
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": False,
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self._kind(q.format),
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_quant_storage": "uint8",
        }


def _describe_int8(tensors: Mapping[str, HasHeader], name: str) -> Described:
    n, k = require("bitsandbytes", tensors, "weight", name, (I8,), (None, None))
    require("bitsandbytes", tensors, "SCB", name, (F32,), (n,), "(one a row)")
    if "weight_format" in tensors:
        require("bitsandbytes", tensors, "weight_format", name, (U8,))
    order = tensors.get("weight_format")
    if isinstance(order, np.ndarray) and order.any():
        raise UnsupportedError(
            f"[bitsandbytes] {label(name, 'weight_format')} is {order.max()}, a tiled order of old GPU kernels; "
            "read: 0 (rows). Save the model again with a current bitsandbytes"
        )
    return Described(format_named("bnb_int8"), (n, k))


def _state(tensors: Mapping[str, HasHeader], config: Config, name: str) -> dict[str, Any]:
    """The quantization state: from its JSON tensor, or from the config when the file has none."""
    for kind, key in _STATES.items():
        if key not in tensors:
            continue
        raw = tensors[key]
        if not isinstance(raw, np.ndarray):
            raise LayoutError(f"[bitsandbytes] {label(name, key)} was passed as a header; its bytes say the shape, pass them")
        try:
            state = json.loads(raw.tobytes().decode())
            shape, group = [int(d) for d in state["shape"]], int(state["blocksize"])
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise LayoutError(
                f"[bitsandbytes] {label(name, key)} is not a quantization state in JSON: {e!r}; wanted shape, "
                "blocksize and quant_type"
            ) from None
        if state.get("quant_type") != kind or group < 1 or any(d < 0 for d in shape):
            raise LayoutError(
                f"[bitsandbytes] {label(name, key)} says quant_type {state.get('quant_type')!r}, blocksize {group}, "
                f"shape {shape}; wanted quant_type {kind!r}, a blocksize of 1 or more, sizes of 0 or more"
            )
        if "weight.nested_absmax" in tensors and not isinstance(state.get("nested_offset"), (int, float)):
            raise LayoutError(
                f"[bitsandbytes] {label(name, key)} has no nested_offset, but the scales are double quantized; wanted a number. "
                "Save the model again"
            )
        return dict(state)
    missing = [w for w in ("shape", "quant_type", "blocksize") if w not in config]
    if missing:
        raise LayoutError(
            f"[bitsandbytes] {label(name, 'weight')} has no quant_state tensor and the config no {', '.join(missing)}; "
            "save the model with its quantization state, or pass config= (--config) with them"
        )
    if config["quant_type"] not in _STATES:
        raise LayoutError(f"[bitsandbytes] {name}: quant_type {config['quant_type']!r}; allowed: {', '.join(_STATES)}")
    return dict(config)


def _table(fmt: Format) -> Array:
    table = element_table(fmt.element, 4).astype(np.float32)
    return table


def _check_table(stored: Array, fmt: Format, name: str) -> None:
    off = np.abs(stored.astype(np.float64) - _table(fmt)) > _TABLE_SLACK
    off |= np.isnan(stored)
    if off.any():
        i = int(np.flatnonzero(off)[0])
        raise LayoutError(
            f"[bitsandbytes] {label(name, 'weight.quant_map')} has {stored[i]} for code {i}; {fmt.name} has {_table(fmt)[i]}, "
            "and bitsandbytes decodes by its built-in table whatever the file says"
        )


def _storage(name: str) -> Any:
    """The dtype that `bnb_4bit_quant_storage` spread over the bytes."""
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def _state_text(q: QTensor, kind: str, kept: Mapping[str, Any]) -> str:
    """The state's JSON in bitsandbytes' order of keys; the file's own text while it says the same."""
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": q.format.group_size,
        "dtype": kept.get("dtype", "float32"),
        "shape": list(q.shape),
    }
    if q.format.scale == "nested":
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.parts["nested_offset"])}
    text = kept.get("quant_state")
    if isinstance(text, str):
        old = json.loads(text)
        if "nested_offset" in old:
            old["nested_offset"] = float(np.float32(old["nested_offset"]))
        if {**state, **old} == {**old, **state}:
            return text
    return json.dumps(state)
