"""ModelOpt's in-memory 4-bit tensors, saved as they are: INT4QTensor and NF4QTensor. See
`base.py` for the table.

Both flatten the weight and put the even element into the high nibble. INT4QTensor keeps the
reciprocal scale 7/amax and divides by it. NF4QTensor quantizes its scales again: block scale = byte
/ double_scale + zeros, the double scale covering 256 blocks; codes and scale bytes are padded to
whole blocks, and the padding is kept in `details`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import LayoutError
from ...formats import family_of, format_named
from ...formats.decode import NESTED_BLOCK
from ...numerics.bits import pack, unpack
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, Tensors, cannot_hold, integer_of, label, require, sizes_of
from ..common.float8 import BF16, FLOATS, I8, U8, cast, dtype_by_name, exact_cast, signed_codes, swap_nibbles
from ..common.words import recall, remember, remember_lost, restored
from .export import Headers, Kind, has, shape_of


class INT4QTensor(Kind):
    """Codes q + 8 and the scale that divides."""

    algos = ("INT4", "W4A16", "W4A8")
    suffixes = ("weight", "weight_scale_inv")

    def recognises(self, t: Headers) -> bool:
        return has(t, "weight", U8) and has(t, "weight_scale_inv", *FLOATS)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        *rows, half = shape_of(t, "weight", name)
        scale = require("modelopt", t, "weight_scale_inv", name, FLOATS)
        size, blocks = math.prod(rows) * half * 2, math.prod(scale)
        group = integer_of("modelopt", config, "group_size", name) or (size // blocks if blocks else 128)
        k = 2 * half
        if group < 1 or k % group or blocks * group != size:
            raise LayoutError(
                f"[modelopt] {label(name, 'weight_scale_inv')} has {blocks} scales for a weight of {[*rows, k]} in groups of "
                f"{group}; wanted one a group, and whole groups a row"
            )
        return Described(format_named("int4", group, scale_dtype=t["weight_scale_inv"].dtype.name, inverse=True), (*rows, k))

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        fmt, shape = self.describe(t, config, name)
        scale = t["weight_scale_inv"]
        parts = {"codes": swap_nibbles(t["weight"]), "scales": scale.reshape(*shape[:-1], fmt.groups(shape[-1]))}
        details = {} if scale.shape == (scale.size, 1) else {"weight_scale_inv_shape": list(scale.shape)}
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def holds(self, fmt: Format) -> bool:
        return fmt.name == "int4" and fmt.grouping == "row" and fmt.inverse and fmt.group_size > 0

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        if q.shape[-1] % 2 or q.shape[-1] % q.format.group_size:
            raise cannot_hold(
                "modelopt", q, f"rows of {q.shape[-1]} are not whole bytes in whole groups of {q.format.group_size}"
            )
        scale = q.parts["scales"]
        shape = tuple(kept.get("weight_scale_inv_shape", ()))
        if "weight_scale_inv_shape" not in kept or math.prod(shape) != scale.size:
            shape = (scale.size, 1)
        return {"weight": swap_nibbles(q.parts["codes"]), "weight_scale_inv": scale.reshape(shape)}


class NF4QTensor(Kind):
    """NF4 to four digits under scales that are quantized again."""

    algos = ("NF4",)
    suffixes = ("weight", "weight_scale", "weight_double_scale", "weight_scale_zeros")

    def recognises(self, t: Headers) -> bool:
        return has(t, "weight", U8) and has(t, "weight_scale", I8) and "weight_double_scale" in t

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        nbytes = math.prod(require("modelopt", t, "weight", name, (U8,), (None,), "(NF4 is flat)"))
        shape = config.get("shape")
        if shape is None:
            raise LayoutError(
                f"[modelopt] {label(name, 'weight')} is flat ({nbytes} bytes of NF4 codes); its shape is not in the file, "
                'give "shape"'
            )
        shape = sizes_of("modelopt", shape, "shape", name)
        group = integer_of("modelopt", config, "group_size", name) or 64
        if len(shape) < 2 or group < 1:
            raise LayoutError(f"[modelopt] {name}: shape {list(shape)}, group_size {group}; wanted [n, k] and a block")
        blocks = -(-math.prod(shape) // group)
        if blocks * group != 2 * nbytes:
            raise LayoutError(
                f"[modelopt] {label(name, 'weight')} has {2 * nbytes} codes; a weight of {list(shape)} takes {blocks} blocks "
                f"of {group}"
            )
        doubles, per = require("modelopt", t, "weight_scale", name, (I8,), (None, None))
        require("modelopt", t, "weight_double_scale", name, FLOATS, (doubles,), "(one a row of weight_scale)")
        require("modelopt", t, "weight_scale_zeros", name, FLOATS, ())
        if doubles * per < blocks or (doubles > 1 and per % NESTED_BLOCK):
            raise LayoutError(
                f"[modelopt] {label(name, 'weight_scale')} has shape {[doubles, per]}; {blocks} blocks want as many bytes, "
                f"in rows of a multiple of {NESTED_BLOCK} when there are several"
            )
        fmt = format_named("nf4_modelopt", group, nested=True)
        return Described(family_of(fmt).fit(fmt, shape), shape)

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        fmt, shape = self.describe(t, config, name)
        specs = family_of(fmt).geometry(fmt, shape)
        size, blocks = math.prod(shape), math.prod(specs["scales"].shape)
        codes, scale_bytes = (
            unpack(swap_nibbles(t["weight"]), 4, 2 * t["weight"].size),
            signed_codes(t["weight_scale"]).reshape(-1),
        )
        double = t["weight_double_scale"]
        details: dict[str, Any] = {
            "scale_shape": list(t["weight_scale"].shape),
            "double_scale_dtype": double.dtype.name,
            "zeros_dtype": t["weight_scale_zeros"].dtype.name,
        }
        for key, stored in (("double_scale", double), ("zeros", t["weight_scale_zeros"])):
            remember_lost(details, f"{key}_bits", stored, cast(cast(stored, np.float32), stored.dtype))
        _remember_padding(details, "code_padding", codes[size:])
        _remember_padding(details, "scale_padding", scale_bytes[blocks:] ^ np.uint8(0x80))
        per = max(1, t["weight_scale"].shape[1])
        _remember_padding(details, "double_scale_padding", double[-(-blocks // per) :].view(np.uint8))
        row = np.arange(math.prod(specs["nested_absmax"].shape)) * NESTED_BLOCK // per
        parts: dict[str, Array] = {
            "codes": pack(codes[:size].reshape(shape), 4),
            "scales": scale_bytes[:blocks].reshape(specs["scales"].shape),
            "nested_map": np.arange(-128, 128, dtype=np.float32),
            "nested_absmax": cast(double, np.float32)[row],
            "nested_offset": cast(t["weight_scale_zeros"], np.float32),
        }
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def holds(self, fmt: Format) -> bool:
        return fmt.name == "nf4_modelopt" and fmt.scale == "nested"

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        fmt = q.format
        if q.window is not None:
            raise cannot_hold("modelopt", q, "it is a slice of rows of a weight whose blocks run over the whole")
        if not np.array_equal(q.parts["nested_map"], np.arange(-128, 128, dtype=np.float32)):
            raise cannot_hold("modelopt", q, "its scale bytes go through a table, and ModelOpt's are plain int8")
        size, blocks = q.size, q.parts["scales"].size
        padded = -(-size // fmt.group_size) * fmt.group_size
        if padded % 2:
            raise cannot_hold("modelopt", q, f"{padded} codes are not whole bytes")
        doubles, per = kept.get("scale_shape", (-(-blocks // NESTED_BLOCK), NESTED_BLOCK))
        codes = np.zeros(padded, np.uint8)
        codes[:size] = unpack(q.parts["codes"], 4, q.shape[-1]).reshape(-1)
        _recall_padding(kept, "code_padding", codes[size:])
        scale = np.zeros(doubles * per, np.int8)
        _recall_padding(kept, "scale_padding", scale[blocks:].view(np.uint8))
        scale[:blocks] = signed_codes(q.parts["scales"].view(np.int8)).view(np.int8).reshape(-1)
        first = np.minimum(np.arange(doubles) * per // NESTED_BLOCK, q.parts["nested_absmax"].size - 1)
        double = self._held(q, "nested_absmax", str(kept.get("double_scale_dtype", BF16.name)))[first]
        _recall_padding(kept, "double_scale_padding", double[-(-blocks // max(1, per)) :].view(np.uint8))
        return {
            "weight": swap_nibbles(pack(codes, 4)),
            "weight_scale": scale.reshape(doubles, per),
            "weight_double_scale": restored(kept, "double_scale_bits", double),
            "weight_scale_zeros": restored(
                kept, "zeros_bits", self._held(q, "nested_offset", str(kept.get("zeros_dtype", BF16.name)))
            ),
        }

    @staticmethod
    def _held(q: QTensor, part: str, dtype: str) -> Array:
        out = exact_cast(q.parts[part], dtype_by_name(dtype))
        if out is None:
            raise cannot_hold("modelopt", q, f"{part} is not a number of {dtype}, the dtype ModelOpt keeps it in")
        return out


def _remember_padding(details: dict[str, Any], key: str, padding: Array) -> None:
    if padding.any():
        remember(details, key, padding)


def _recall_padding(kept: Mapping[str, Any], key: str, into: Array) -> None:
    padding = recall(kept, key, into.shape)
    if padding is not None:
        into[...] = padding
