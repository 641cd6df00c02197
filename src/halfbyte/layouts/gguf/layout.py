"""GGUF: rows of ggml blocks, the scales between the codes.

    weight   uint8 [*lead, n, k / block · bytes]      blocks as the file has them
    scale    float32 [1] or [e], optional             one factor a matrix (NVFP4 has it; types without a minimum may)

`config` is {"type": "Q4_K"}, the ggml type name or its number. The split of a block into canonical
parts is a bijection on all bytes, those no quantizer would write included, so any file is written
back as it was. Rare types keep their blocks (`formats/ggml/raw_blocks.py`). Block orders:
`blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, LayoutError, ShapeError, UnsupportedError
from ...formats import family_of, format_named
from ...formats.ggml.types import GGML_BY_CODEC, GGMLType, ggml_type
from ...numerics.bits import pack, unpack
from ...numerics.exact import bfloat16
from ...numerics.row_slices import row_slices
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, cannot_hold, label, require
from .blocks import ORDERS, join_codes, split_codes

_CHUNK = 1 << 18
"""Elements split at a time: enough to hide the calls, few enough for their codes, a byte each, to
stay in the last cache.
"""
_ACTIVATIONS = {"Q8_1", "Q8_K"}
"""Types ggml makes from activations while it multiplies; no file holds weights in them."""


class GGUF(Layout):
    """Rows of ggml blocks, by ggml type name."""

    name = "gguf"
    codec_aliases: ClassVar[dict[str, str]] = {"nvfp4": "nvfp4_ue4m3", "int4": "q4_0", "int5": "q5_0", "int8": "q8_0"}
    producers = ("gguf",)
    holds = Holds(
        (
            *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4_ue4m3", "iq4_nl", "iq4_xs"),
            *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
        ),
        "rows of whole blocks, groups in order, a factor that multiplies",
        groups=(32,),
        levels=("none", "multiply"),
        scales=("float16",),
        wider=(4, 5, 8),
    )
    container = "gguf"
    engine = "llama.cpp"
    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional: ClassVar[tuple[str, ...]] = ("scale",)
    parts: ClassVar[dict[str, str]] = {"weight": "codes", "scale": "global_scale"}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        kind = type_of(config, name)
        got = require("gguf", tensors, "weight", name, (np.dtype(np.uint8),))
        if len(got) < 2:
            raise LayoutError(
                f"[gguf] {label(name, 'weight')} has shape {list(got)}; a {kind.name} weight is rows of blocks, [*lead, n, bytes]"
            )
        try:
            k = kind.elements(got[-1])
        except ShapeError as e:
            raise LayoutError(f"{e}; {label(name, 'weight')} is cut short or of another type") from None
        fmt = format_named(kind.codec).with_(global_op="multiply" if "scale" in tensors else "")
        if fmt.global_op and (fmt.bias or fmt.minimum):
            raise UnsupportedError(
                f"[gguf] {name or 'weight'} is {kind.name} with a factor, {label(name, 'scale')}, over its minimum too; "
                "a factor is read beside types without one (NVFP4, MXFP4, Q8_0, Q6_K, ...)"
            )
        if fmt.global_op:
            require("gguf", tensors, "scale", name, (np.dtype(np.float32),), got[:-2] or (1,), "(one factor a matrix)")
        return Described(fmt, (*got[:-1], k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        kind = type_of(config, name)
        raw = np.asarray(tensors["weight"])
        parts = {"blocks": raw} if fmt.opaque else split(raw, kind, shape)
        if fmt.global_op:
            parts["global_scale"] = np.asarray(tensors["scale"]).reshape(shape[:-2])
        return QTensor(fmt, shape, parts, origin="gguf", name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        kind = type_of(config) if "type" in config else type_for(q)
        fits = type_for(q)
        if fits is not kind:
            raise cannot_hold(
                "gguf", q, f"its values are those of {fits.name} blocks, not {kind.name}", f"write it as {fits.name}"
            )
        out: dict[str, Array] = {"weight": np.asarray(q.parts["blocks"]) if q.format.opaque else join_blocks(q, kind)}
        if q.format.global_op:
            out["scale"] = np.asarray(q.parts["global_scale"]).reshape(q.shape[:-2] or (1,))
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        """{"type": name of the ggml type that holds `q`}."""
        return {"type": type_for(q).name}


def type_of(config: Config, name: str = "") -> GGMLType:
    """The block type a config names. Raises LayoutError, or UnsupportedError for one that holds no
    weights or is not read.
    """
    if "type" not in config:
        raise LayoutError(
            f'[gguf] {name or "weight"}: config {dict(config)} has no ggml type; give {{"type": "Q4_K"}} or its number'
        )
    try:
        kind = ggml_type(config["type"])
    except FormatError as e:
        raise LayoutError(f"{e}; tensor {name}" if name else str(e)) from None
    if kind.plain:
        raise LayoutError(f"[gguf] {name or 'weight'} is {kind.name}, plain numbers; read it with `dense`")
    if not kind.codec:
        why = "a type ggml makes from activations" if kind.name in _ACTIVATIONS else "a type that is not read here"
        read = ", ".join(t.name for t in GGML_BY_CODEC.values())
        raise UnsupportedError(f"[gguf] {name or 'weight'} is {kind.name}, {why}; read: {read}")
    return kind


def type_for(q: QTensor) -> GGMLType:
    """The ggml type that holds `q` exactly: by structure, so `int4:g32` with float16 scales is Q4_0
    and `affine4:g32` is Q4_1.

    Raises LayoutError when there is none.
    """
    fmt, k = q.format, q.shape[-1]
    shape = _structure(fmt)
    if fmt.element == "e2m1" and fmt.scale == "e4m3":
        if q.parts["scales"].size and int(q.parts["scales"].max()) > 0x7E:
            why = "a block scale is negative or NaN, and ggml reads scale bytes without a sign"
            raise cannot_hold("gguf", q, why, "requantize it")
        shape = shape.with_(scale="ue4m3")
    for word, kind in GGML_BY_CODEC.items():
        if _structure(format_named(word)) != shape or (fmt.opaque and fmt.name != word):
            continue
        if k % kind.block:
            raise cannot_hold("gguf", q, f"rows of {k} values are not whole {kind.name} blocks of {kind.block}")
        if "group_index" in q.parts:
            raise cannot_hold("gguf", q, "its groups are not in order along k (act-order), and a ggml block is", "requantize it")
        if fmt.global_op == "divide":
            raise cannot_hold("gguf", q, "its factor divides, ggml's multiplies, and a reciprocal would round", "requantize it")
        return kind
    near = "int4, int5, int8, affine4, affine5 with groups of 32 and float16 scales, mxfp4, nvfp4 without a dividing factor"
    raise cannot_hold("gguf", q, f"no ggml block has this structure (blocks can hold {near})", "requantize it")


def _structure(fmt: Format) -> Format:
    """`fmt` without its names and its factor a tensor, which is a tensor of its own in a file.
    Opaque types keep their bits.
    """
    return fmt.with_(family="", name="", global_op="")


def split(raw: NDArray[np.uint8], kind: GGMLType, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Block bytes [*lead, n, bytes] -> canonical parts of a weight of `shape`, a chunk of blocks at
    a time.
    """
    order, fmt = ORDERS[kind.name], format_named(kind.codec).with_(global_op="")
    parts = {p: np.empty(s.shape, s.dtype) for p, s in family_of(fmt).geometry(fmt, shape).items()}
    blocks = np.ascontiguousarray(raw).reshape(-1).view(order.dtype)
    flat = {p: _by_block(a, blocks.size) for p, a in parts.items()}
    for rows in row_slices((blocks.size, kind.block), _CHUNK):
        chunk = blocks[rows]
        fields = {f: _by_block(np.ascontiguousarray(chunk[f]), chunk.size) for f, _ in order.fields}
        if fmt.bits == 8:
            split_codes(order, fields, flat["codes"][rows])
        else:
            codes = np.empty((chunk.size, kind.block), np.uint8)
            split_codes(order, fields, codes)
            flat["codes"][rows] = pack(codes, fmt.bits)
        for part, field in order.whole.items():
            flat[part][rows] = fields[field]
        if order.small:
            for part, values in zip(order.small.parts, order.small.split(fields), strict=True):
                flat[part][rows] = values
    return parts


def join_blocks(q: QTensor, kind: GGMLType) -> NDArray[np.uint8]:
    """Canonical parts -> block bytes [*lead, n, bytes]. Inverse of `split`."""
    order, k = ORDERS[kind.name], q.shape[-1]
    if order.small:
        try:
            q.validate()
        except FormatError as error:  # its bits would run into the neighbours'
            raise cannot_hold("gguf", q, str(error)) from None
    out = np.empty((*q.shape[:-1], kind.row_bytes(k)), np.uint8)
    blocks = out.reshape(-1).view(order.dtype)
    flat = {p: _by_block(np.ascontiguousarray(a), blocks.size) for p, a in q.parts.items() if p != "global_scale"}
    for rows in row_slices((blocks.size, kind.block), _CHUNK):
        chunk = blocks[rows]
        fields = join_codes(order, unpack(flat["codes"][rows], q.format.bits, kind.block))
        fields |= {field: flat[part][rows] for part, field in order.whole.items()}
        if order.small:
            fields |= order.small.join(*(flat[part][rows] for part in order.small.parts))
        for f, data in fields.items():
            chunk[f] = np.ascontiguousarray(data).reshape(-1).view(order.dtype[f])
    return out


def _by_block(a: NDArray[Any], blocks: int) -> NDArray[np.uint8]:
    """The bytes of a contiguous array, a row a block."""
    return a.reshape(-1).view(np.uint8).reshape(blocks, a.nbytes // max(blocks, 1))


def dense(raw: NDArray[Any], which: str | int, name: str = "") -> NDArray[Any]:
    """Bytes [..., k · itemsize] of a plain type (F32, F16, BF16, F64, I8 to I64) as numbers [...,
    k], a view.

    Raises LayoutError for a block type or a length that is not whole numbers.
    """
    kind = ggml_type(which)
    if not kind.plain:
        raise LayoutError(f"[gguf] {name or 'weight'} is {kind.name}, blocks; read it with `unpack`")
    dtype = bfloat16 if kind.plain == "bfloat16" else np.dtype(kind.plain).newbyteorder("<")
    if raw.dtype == dtype:
        return raw
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % kind.nbytes:
        raise LayoutError(
            f"[gguf] {name or 'weight'} is {raw.dtype} {list(raw.shape)}; {kind.name} is uint8 rows, {kind.nbytes} bytes a value"
        )
    return raw.view(dtype)
