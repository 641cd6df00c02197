"""The kinds of weight that ModelOpt's unified export writes: NVFP4, MXFP4, MXFP8, INT4 (AWQ), FP8
and INT8. See `base.py` for the table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...errors import LayoutError, UnsupportedError
from ...formats import format_named
from ...numerics.bits import pack, unpack
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Tensors, cannot_hold, integer_of, label, require
from ..common.float8 import E4M3, E8M0, F32, FLOATS, I8, U8, bytes_of, signed_codes, view_as
from ..common.words import recall, remember

Headers = Mapping[str, HasHeader]
LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
"""Factors of SVDQuant: [r, k] and [n, r]."""
LOW_RANK_OF_QUANTIZER = {f"weight_quantizer._{name}": name for name in LOW_RANK}
"""What ModelOpt 0.47 exports them as, the names that its quantizer has for them."""


class Kind(ABC):
    """One kind of packed weight that ModelOpt writes.

    algos     parts of the config's `quant_algo` that name it
    suffixes  its tensors
    """

    algos: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")

    @abstractmethod
    def recognises(self, t: Headers) -> bool:
        """True when these tensors, by suffix and dtype, are of this kind."""

    @abstractmethod
    def describe(self, t: Headers, config: Config, name: str) -> Described:
        """Format and logical shape from headers."""

    @abstractmethod
    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        """The canonical tensor."""

    @abstractmethod
    def holds(self, fmt: Format) -> bool:
        """True when this kind is where a tensor of this format goes."""

    @abstractmethod
    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        """Tensors of `q`; `kept` is its details when ModelOpt wrote it, else empty."""


def has(t: Headers, suffix: str, *dtypes: np.dtype[Any]) -> bool:
    """True when tensor `suffix` is there and of one of these dtypes."""
    return suffix in t and t[suffix].dtype in dtypes


def shape_of(t: Headers, suffix: str, name: str) -> tuple[int, ...]:
    """Shape of a tensor of two or more axes."""
    got = require("modelopt", t, suffix, name)
    if len(got) < 2:
        raise LayoutError(f"[modelopt] {label(name, suffix)} has shape {list(got)}; wanted two or more axes")
    return got


class BlockScaled(Kind):
    """E2M1 or E4M3 elements, low nibble even, under one scale byte a block; NVFP4 has a float32 a
    matrix besides.
    """

    word: ClassVar[str]
    group: ClassVar[int]
    weight: ClassVar[np.dtype[Any]]
    scale: ClassVar[tuple[np.dtype[Any], ...]]

    def recognises(self, t: Headers) -> bool:
        return has(t, "weight", self.weight) and has(t, "weight_scale", *self.scale)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        *rows, width = shape_of(t, "weight", name)
        fmt = format_named(self.word, self.group)
        k = width * 8 // fmt.bits
        require("modelopt", t, "weight_scale", name, self.scale, (*rows, fmt.groups(k)), f"(one a block of {self.group})")
        return Described(fmt, (*rows, k))

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        fmt, shape = self.describe(t, config, name)
        parts = {"codes": bytes_of(t["weight"]), "scales": bytes_of(t["weight_scale"])}
        details: dict[str, Any] = {}
        if t["weight_scale"].dtype != self.scale[0]:
            details["weight_scale_dtype"] = t["weight_scale"].dtype.name
        if fmt.global_op:
            second = t["weight_scale_2"]
            lead = shape[:-2]
            parts["global_scale"] = np.broadcast_to(second.reshape(()), lead) if second.size == 1 else second.reshape(lead)
            if second.shape != lead:
                details["weight_scale_2_shape"] = list(second.shape)
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def holds(self, fmt: Format) -> bool:
        return fmt == format_named(self.word, self.group)

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        if q.shape[-1] * q.format.bits % 8:
            raise cannot_hold("modelopt", q, f"k = {q.shape[-1]} is odd and rows are whole bytes of codes")
        dtype = kept.get("weight_scale_dtype", self.scale[0])
        out = {"weight": view_as(q.parts["codes"], self.weight), "weight_scale": view_as(q.parts["scales"], dtype)}
        if q.format.global_op:
            out["weight_scale_2"] = self._second(q, kept)
        return out

    @staticmethod
    def _second(q: QTensor, kept: Mapping[str, Any]) -> Array:
        factor = q.parts["global_scale"]
        shape = tuple(kept.get("weight_scale_2_shape", factor.shape))
        if math.prod(shape) == factor.size:
            return factor.reshape(shape)
        one = factor.reshape(-1)[:1]
        if math.prod(shape) == 1 and one.size and bool((factor.view(np.uint32) == one.view(np.uint32)).all()):
            return one.reshape(shape)
        return factor


class NVFP4(BlockScaled):
    """Two levels: E4M3 a block of 16, float32 a matrix."""

    algos = ("NVFP4",)
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_2")
    word, group, weight, scale = "nvfp4", 16, U8, (E4M3,)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        width, groups = (shape_of(t, s, name)[-1] for s in ("weight", "weight_scale"))
        if groups and 2 * width == 32 * groups:
            raise UnsupportedError(
                f"[modelopt] {label(name, 'weight_scale')} has {groups} scales for {2 * width} inputs: NVFP4 in blocks of 32. It "
                "is recognised and not read; read: blocks of 16"
            )
        out = super().describe(t, config, name)
        lead = out.shape[:-2]
        second = require("modelopt", t, "weight_scale_2", name, (F32,))
        if math.prod(second) not in (1, math.prod(lead)):
            raise LayoutError(
                f"[modelopt] {label(name, 'weight_scale_2')} has shape {list(second)}; wanted one factor, "
                f"or one for each of {list(lead)}"
            )
        return out


class NVFP4SVD(NVFP4):
    """NVFP4 of what SVDQuant leaves, plus lora_b · lora_a: both are parts of the weight."""

    algos = ("NVFP4_SVD",)
    suffixes = (*NVFP4.suffixes, *LOW_RANK)

    def recognises(self, t: Headers) -> bool:
        return super().recognises(t) and any(s in t for s in LOW_RANK)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        fmt, shape = super().describe(t, config, name)
        if len(shape) != 2:
            raise LayoutError(
                f"[modelopt] {label(name, LOW_RANK[0])} is beside a stack {list(shape)}; a matrix has a low-rank part"
            )
        rank, _ = require("modelopt", t, LOW_RANK[0], name, FLOATS, (None, shape[1]))
        require("modelopt", t, LOW_RANK[1], name, FLOATS, (shape[0], rank), f"for {LOW_RANK[0]} of rank {rank}")
        return Described(fmt.with_(extra="low-rank"), shape)

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        self.describe(t, config, name)
        base = NVFP4().unpack({s: a for s, a in t.items() if s not in LOW_RANK}, config, name)
        parts = {**base.parts, **{s.removeprefix("svdquant_"): t[s] for s in LOW_RANK}}
        fmt = base.format.with_(extra="low-rank")
        return QTensor(fmt, base.shape, parts, details=base.details, name=name)

    def holds(self, fmt: Format) -> bool:
        return fmt == format_named(self.word, self.group).with_(extra="low-rank")

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        own = {s: q.parts[s.removeprefix("svdquant_")] for s in LOW_RANK}
        plain = {p: a for p, a in q.parts.items() if not p.startswith("lora_")}
        base = QTensor(q.format.with_(extra=""), q.shape, plain, details=q.details)
        return {**super().pack(base, q.details), **own}


class MXFP4(BlockScaled):
    """E2M1 under a power of two a block of 32."""

    algos = ("MXFP4",)
    word, group, weight, scale = "mxfp4", 32, U8, (U8, E8M0)


class MXFP8(BlockScaled):
    """E4M3 under a power of two a block of 32."""

    algos = ("MXFP8",)
    word, group, weight, scale = "mxfp8_e4m3", 32, E4M3, (U8, E8M0)


class INT4Export(Kind):
    """Pairs of output rows share a byte: low nibble row 2i, high nibble row 2i + 1, two's
    complement.
    """

    algos = ("W4A16_AWQ", "INT4_AWQ", "W4A8_AWQ")
    suffixes = ("weight", "weight_scale", "weight_scale_2")

    def recognises(self, t: Headers) -> bool:
        return has(t, "weight", U8) and has(t, "weight_scale", *FLOATS)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        *lead, half, k = shape_of(t, "weight", name)
        *_, groups = require(
            "modelopt", t, "weight_scale", name, FLOATS, (*lead, 2 * half, None), "(one row for each of the paired rows)"
        )
        group = integer_of("modelopt", config, "group_size", name)
        if group is None:
            group = k // groups if groups and k % groups == 0 else 128
        fmt = format_named("int4", group, scale_dtype=t["weight_scale"].dtype.name)
        if fmt.groups(k) != groups:
            raise LayoutError(
                f"[modelopt] {label(name, 'weight_scale')} has {groups} groups a row; {k} inputs in groups of "
                f"{group} make {fmt.groups(k)}"
            )
        if "weight_scale_2" in t:
            require("modelopt", t, "weight_scale_2", name, (F32,), ())
        return Described(fmt, (*lead, 2 * half, k))

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        fmt, shape = self.describe(t, config, name)
        *lead, n, k = shape
        nibbles = np.empty((*lead, n // 2, 2, k), np.uint8)
        np.bitwise_and(t["weight"], 15, out=nibbles[..., 0, :])
        np.right_shift(t["weight"], 4, out=nibbles[..., 1, :])
        nibbles ^= 8
        parts = {"codes": pack(nibbles.reshape(shape), 4), "scales": t["weight_scale"]}
        # W4A8_AWQ keeps the scale of a later float8 step beside; it does not enter the weight's
        # value.
        details = {"weight_scale_2": float(t["weight_scale_2"])} if "weight_scale_2" in t else {}
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def holds(self, fmt: Format) -> bool:
        return fmt.name == "int4" and fmt.grouping == "row" and not fmt.inverse

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        *lead, n, k = q.shape
        if n % 2:
            raise cannot_hold("modelopt", q, "the int4 export pairs output rows and n is odd")
        nibbles = (unpack(q.parts["codes"], 4, k) ^ np.uint8(8)).reshape(*lead, n // 2, 2, k)
        out: dict[str, Array] = {
            "weight": nibbles[..., 0, :] | (nibbles[..., 1, :] << np.uint8(4)),
            "weight_scale": q.parts["scales"],
        }
        if "weight_scale_2" in kept:
            out["weight_scale_2"] = np.array(kept["weight_scale_2"], np.float32)
        return out


class ByteCodes(Kind):
    """One byte an element under one float scale a tensor, a row, or a tile."""

    weight: ClassVar[np.dtype[Any]]
    word: ClassVar[str]
    tiles: ClassVar[bool]

    def recognises(self, t: Headers) -> bool:
        return has(t, "weight", self.weight) and has(t, "weight_scale", *FLOATS)

    def describe(self, t: Headers, config: Config, name: str) -> Described:
        shape = shape_of(t, "weight", name)
        scale = require("modelopt", t, "weight_scale", name, FLOATS)
        given = integer_of("modelopt", config, "group_size", name)
        block = given if given is not None and given > 0 else 128
        scopes = [s for s, shapes in self._scale_shapes(shape, block).items() if scale in shapes]
        algo = str(config.get("quant_algo") or "").upper()
        named_one = (
            "tile" if "_PB" in algo else "row" if "CHANNEL" in algo or "_PC_" in algo else "tensor" if algo == "FP8" else ""
        )
        if not scopes:
            allowed = " or ".join(f"{list(v[0])} ({s})" for s, v in self._scale_shapes(shape, block).items())
            raise LayoutError(
                f"[modelopt] {label(name, 'weight_scale')} has shape {list(scale)} for a weight of {list(shape)}; "
                f"wanted {allowed}"
            )
        scope = named_one if named_one in scopes else scopes[0]
        group, options = {"row": (-1, {}), "tensor": (-1, {"rows": -1}), "tile": (block, {"rows": block})}[scope]
        return Described(format_named(self.word, group, scale_dtype=t["weight_scale"].dtype.name, **options), shape)

    def _scale_shapes(self, shape: tuple[int, ...], block: int) -> dict[str, list[tuple[int, ...]]]:
        """Shapes in which ModelOpt writes the scales, its first choice first. That of a one-row
        weight may be a row or a tensor.
        """
        *lead, n, k = shape
        row = [(*lead, n), (*lead, n, 1)]
        if not self.tiles:
            return {"row": row}
        tiles = -(-n // block), -(-k // block)
        tile = [(*lead, *tiles), (*lead, tiles[0], 1, tiles[1], 1)]
        tensor = [tuple(lead), (*lead, 1), (*lead, 1, 1)]
        return {"tensor": tensor, "row": row, "tile": tile}

    def unpack(self, t: Tensors, config: Config, name: str) -> QTensor:
        fmt, shape = self.describe(t, config, name)
        scale = t["weight_scale"]
        *lead, n, k = shape
        rows = n if fmt.grouping == "row" else 1 if fmt.group_rows == -1 else -(-n // fmt.group_rows)
        canonical = (*lead, rows, fmt.groups(k))
        details: dict[str, Any] = {}
        if scale.shape != self._plain(fmt, shape):
            details["weight_scale_shape"] = list(scale.shape)
        if k == 0:  # no group is left to hold them
            remember(details, "unused_scales", scale)
            scale = scale.reshape(-1)[:0]
        parts = {"codes": self.to_codes(t["weight"]), "scales": scale.reshape(canonical)}
        return QTensor(fmt, shape, parts, origin="modelopt", details=details, name=name)

    def _plain(self, fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape ModelOpt gives the scale: [*lead] a tensor, [*lead, n] a row, [*lead, tiles of
        n, tiles of k].
        """
        scope = "row" if fmt.grouping == "row" else "tensor" if fmt.group_rows == -1 else "tile"
        return self._scale_shapes(shape, fmt.group_rows if scope == "tile" else 128)[scope][0]

    @staticmethod
    @abstractmethod
    def to_codes(weight: Array) -> Array:
        """Stored bytes -> codes."""

    @abstractmethod
    def from_codes(self, codes: Array) -> Array:
        """Codes -> stored bytes."""

    def holds(self, fmt: Format) -> bool:
        if fmt.name != self.word or fmt.inverse:
            return False
        if fmt.grouping == "row":
            return fmt.group_size == -1
        return self.tiles and (fmt.group_rows == fmt.group_size)

    def pack(self, q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
        scale = q.parts["scales"]
        plain = self._plain(q.format, q.shape)
        shape = tuple(kept.get("weight_scale_shape", plain))
        if q.shape[-1] == 0:
            unused = recall(kept, "unused_scales", shape, scale.dtype)
            scale = np.zeros(shape, scale.dtype) if unused is None else unused
        return {
            "weight": self.from_codes(q.parts["codes"]),
            "weight_scale": scale.reshape(shape if math.prod(shape) == scale.size else plain),
        }


class FP8(ByteCodes):
    """E4M3 under one scale a tensor, row or tile."""

    algos = ("FP8",)
    weight, word, tiles = E4M3, "fp8_e4m3", True

    @staticmethod
    def to_codes(weight: Array) -> Array:
        return bytes_of(weight)

    def from_codes(self, codes: Array) -> Array:
        return view_as(codes, E4M3)


class INT8(ByteCodes):
    """Two's complement bytes under one scale a row."""

    algos = ("W8A8", "W8A16", "INT8")
    weight, word, tiles = I8, "int8", False

    @staticmethod
    def to_codes(weight: Array) -> Array:
        return signed_codes(weight)

    def from_codes(self, codes: Array) -> Array:
        return (codes ^ np.uint8(0x80)).view(np.int8)
