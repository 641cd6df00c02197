"""HQQ: the flattened weight as a matrix of groups, packed in slabs of rows, high bits first.

    W_q    [ceil(R / per), C]   (R, C) is (n·k/g, g) with axis 1, (g, n·k/g) with axis 0; slab i of R/per rows: bits b·(per−1−i)
    scale  float [R, 1] or [1, C], zero likewise        value = (code − zero) · scale

| packing | dtype | per word |
|---|---|---|
| 8bit_u8 | uint8 | 1 (5, 6 and 7 bits too) |
| 4bit_u8, 2bit_u8, 1bit_u8 | uint8 | 2, 4, 8 |
| 3bit_32 | int32 | 10, rows padded to tens; the two top bits are unused |

A width of 1.58 bits has the codes 0, 1 and 2 in slots of two bits: it is read as hqq2.

A saved module also carries its parameters as tensors (`nbits`, `group_size`, `shape`, `axis`,
`packing`, ...: numbers, or text as bytes). They are read from there, else from the config: `nbits`,
`group_size`, `axis`, and `shape`, (n, k), which is stored nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import CheckpointError, LayoutError, UnsupportedError
from ..formats import family_of, format_named
from ..numerics.bits import pack, unpack
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import (
    Array,
    Config,
    Described,
    HasHeader,
    Layout,
    Tensors,
    cannot_hold,
    check_requested,
    integer_of,
    label,
    require,
    sizes_of,
)
from .claims import PARAMETERS
from .common.float8 import FLOATS, U8, dtype_by_name
from .common.words import as_bytes, as_words, recall, remember
from .quant_config.module_rules import covered, first_entry, path_matches
from .quant_config.reader import ConfigReader

_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10)}
"""packing -> (bits of a slot, slots a word)."""
_BY_BITS = {8: "8bit_u8", 7: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_TERNARY = 1.58
"""HQQ's name of the width of three codes; a saved module has it as a float32 tensor."""
_I32 = np.dtype(np.int32)
_STATE = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""Parameters that a saved module carries as tensors."""


class _Geometry(NamedTuple):
    """What the tensors of a module mean: logical shape, width, packing, and the matrix that is
    packed.
    """

    shape: tuple[int, int]
    bits: int
    packing: str
    axis: int
    rows: int
    columns: int
    group: int


class HQQConfig(ConfigReader):
    """HQQ: `quant_config` holds `weight_quant_params`, or a table of them by the end of a module's
    path; `skip_modules`.
    """

    method = "hqq"
    consumed = ("quant_config.**", "skip_modules", "nbits", "group_size", "axis", "shape", "packing")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how the quantizer searched": ("quant_config.weight_quant_params.optimize", "round_zero", "channel_wise"),
        "how the model runs": ("compute_dtype", "offload_meta", "backend"),
    }

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._quant = self._object("quant_config")
        self._skipped = self._names("skip_modules")
        # A table by the ends of module paths, or the parameters themselves, among which are flags.
        tables = ("weight_quant_params",) if "weight_quant_params" in self._quant else tuple(self._quant)
        for name in tables:
            entry = self._quant[name]
            inner = entry.get("weight_quant_params") if isinstance(entry, dict) else None
            for value in (entry, inner):
                if value is not None and not isinstance(value, dict):
                    raise CheckpointError(f"[config] {where}: quant_config {name!r} is {value!r:.80}; wanted an object")

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "quant_config" in raw

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._skipped, module):
            return None
        entry: Any = self._quant
        if "weight_quant_params" not in entry and entry:
            entry = first_entry({k: v or {} for k, v in entry.items()}, module, path_matches)
            if entry is None:
                return None
        own = entry.get("weight_quant_params", entry)
        return {**{k: v for k, v in self.raw.items() if k != "quant_config"}, **(own or {})}


class HQQ(Layout):
    """Slabs of rows of the matrix of groups."""

    name = "hqq"
    producers = ("hqq",)
    config_reader = HQQConfig
    required = ("W_q", "scale", "zero")
    optional: ClassVar[tuple[str, ...]] = _STATE
    peek = _STATE
    parts: ClassVar[dict[str, str]] = {"W_q": "codes", "scale": "scales", "zero": "zeros", **dict.fromkeys(_STATE, PARAMETERS)}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        geometry = _geometry(tensors, config, name)
        fmt = format_named(f"hqq{geometry.bits}", geometry.group, axis=geometry.axis, scale_dtype=tensors["scale"].dtype.name)
        return Described(family_of(fmt).fit(fmt, geometry.shape), geometry.shape)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        g = _geometry(tensors, config, name)
        width, per = _PACKINGS[g.packing]
        stored = tensors["W_q"]
        details: dict[str, Any] = {"packing": g.packing, "scale_shape": list(tensors["scale"].shape)}
        words = stored if stored.dtype in (U8, _I32) else _viewed(stored, g)
        if words is not stored:
            details["storage"] = stored.dtype.name
        slabs = _slabs(words, width, per)
        codes, padding = slabs[: g.rows], slabs[g.rows :]
        if padding.any():
            remember(details, "padding", padding)
        if width == 3 and bool((words >> 30).any()):
            remember(details, "top_bits", (words.view(np.uint32) >> np.uint32(30)).astype(np.uint8))
        if codes.size and int(codes.max()) >> g.bits:
            raise LayoutError(f"[hqq] {label(name, 'W_q')} holds code {codes.max()}; {g.bits} bits reach {(1 << g.bits) - 1}")
        state = {s: [t.dtype.name, list(t.shape), t.tobytes().hex()] for s, t in tensors.items() if s in _STATE}
        if state:
            details["state"] = state
        compute = _text(tensors.get("compute_dtype"))
        if compute is not None:
            details["compute_dtype"] = compute.removeprefix("torch.")
        spec = family_of(fmt).geometry(fmt, shape)["scales"].shape
        parts = {
            "codes": pack(codes.reshape(shape), g.bits),
            "scales": tensors["scale"].reshape(spec),
            "zeros": tensors["zero"].reshape(spec),
        }
        return QTensor(fmt, shape, parts, origin="hqq", details=details, name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self._check(q)
        wanted = {key: value for key, value in self.config(q).items() if key != "shape"}
        check_requested("hqq", q, _whole_width(config), wanted)
        kept = q.details if q.origin == "hqq" else {}
        fmt, (n, k) = q.format, q.shape
        axis = 0 if fmt.grouping == "strided" else 1
        group = k if fmt.group_size == -1 else fmt.group_size
        packing = str(kept.get("packing", _BY_BITS[fmt.bits]))
        width, per = _PACKINGS[packing]
        scale_shape = tuple(kept.get("scale_shape", ()))
        if "scale_shape" not in kept or math.prod(scale_shape) != q.parts["scales"].size:
            scale_shape = (q.parts["scales"].size, 1) if axis else (1, q.parts["scales"].size)
        # One scale for everything packs the weight as it is; otherwise the matrix of groups is
        # packed.
        columns = (group if scale_shape != () else k) if axis else n * k // group
        rows = n * k // columns if columns else 0
        if n * k % group or (rows % per and packing != "3bit_32"):
            raise cannot_hold(
                "hqq",
                q,
                f"{n * k} elements in groups of {group} make {rows} rows, and {packing} takes whole groups in multiples of {per}",
            )
        steps = -(-rows // per)
        slabs = np.zeros((steps * per, columns), np.uint8)
        slabs[:rows] = unpack(q.parts["codes"], fmt.bits, k).reshape(rows, columns)
        padding = recall(kept, "padding", slabs[rows:].shape)
        if padding is not None:
            slabs[rows:] = padding
        words = _words(slabs, width, per)
        top = recall(kept, "top_bits", words.shape)
        if top is not None:
            words = (words.view(np.uint32) | (top.astype(np.uint32) << np.uint32(30))).view(np.int32)
        storage = kept.get("storage")
        if storage is not None:
            words = as_words(as_bytes(words), dtype_by_name(str(storage)))
        out: dict[str, Array] = {
            "W_q": words,
            "scale": q.parts["scales"].reshape(scale_shape),
            "zero": q.parts["zeros"].reshape(scale_shape),
        }
        return {**out, **_state(q, kept, packing, axis, group)}

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt.family != "hqq":
            return "HQQ holds hqq1 to hqq8: unsigned codes with float zero points and scales"
        return "" if len(shape) == 2 else "HQQ holds matrices (n, k); write the experts of a stack one by one"

    def _check(self, q: QTensor) -> None:
        self.check_fits(q)
        if q.window is not None or "group_index" in q.parts:
            raise cannot_hold("hqq", q, "it is a slice of a weight whose groups run over the whole, or has a group index")

    def config(self, q: QTensor) -> dict[str, Any]:
        self._check(q)
        axis = 0 if q.format.grouping == "strided" else 1
        group = q.shape[-1] if q.format.group_size == -1 else q.format.group_size
        return {"nbits": q.format.bits, "group_size": group, "axis": axis, "shape": list(q.shape)}


def _geometry(tensors: Mapping[str, HasHeader], config: Config, name: str) -> _Geometry:
    """Parameters from the state tensors, else the config, checked against the shapes."""
    config = _whole_width(config)
    require("hqq", tensors, "W_q", name)
    for suffix in ("scale", "zero"):
        require("hqq", tensors, suffix, name, FLOATS)
    for flag in ("quant_scale", "quant_zero"):
        if _number(tensors.get(flag)):
            raise UnsupportedError(
                f"[hqq] {name}: {flag} is set, its {flag[6:]}s are quantized again; such files are not read. Save without it"
            )
    stated, given = _width(tensors.get("nbits"), name), integer_of("hqq", config, "nbits", name)
    if None not in (stated, given) and stated != given:
        raise LayoutError(f"[hqq] {label(name, 'nbits')} is {stated}; the config says {given}")
    bits = stated or given or integer_of("hqq", config, "bits", name)
    if bits is not None and not 1 <= bits <= 8:
        raise LayoutError(f"[hqq] {name or 'W_q'}: {bits} bits; allowed: 1 to 8")
    shape = tensors.get("shape")
    size = shape.reshape(-1).tolist() if isinstance(shape, np.ndarray) else config.get("shape")
    if bits is None or size is None or len(sizes_of("hqq", size, "shape", name)) != 2:
        raise LayoutError(
            f"[hqq] {name or 'W_q'}: nbits {bits}, shape {size}; both are needed, as tensors beside W_q or in the config"
        )
    n, k = size
    packing = _text(tensors.get("packing")) or str(config.get("packing") or _BY_BITS.get(bits, ""))
    if packing not in _PACKINGS:
        raise LayoutError(f"[hqq] {name or 'W_q'}: nbits {bits}, packing {packing!r}; allowed packings: {', '.join(_PACKINGS)}")
    _, per = _PACKINGS[packing]
    scale = tuple(tensors["scale"].shape)
    if tuple(tensors["zero"].shape) != scale or tensors["zero"].dtype != tensors["scale"].dtype:
        raise LayoutError(
            f"[hqq] {label(name, 'zero')} is {tensors['zero'].dtype} {list(tensors['zero'].shape)}, {label(name, 'scale')} "
            f"{tensors['scale'].dtype} {list(scale)}; they must agree"
        )
    count = math.prod(scale)
    axis = _number(tensors.get("axis"))
    asked = integer_of("hqq", config, "axis", name)
    if None not in (axis, asked) and axis != asked:
        raise LayoutError(f"[hqq] {label(name, 'axis')} is {axis}; the config says {asked}")
    axis = asked if axis is None else axis
    axis = int(scale in ((), (count, 1))) if axis is None else axis
    group = n * k // count if count else _number(tensors.get("group_size")) or integer_of("hqq", config, "group_size", name) or 64
    given = integer_of("hqq", config, "group_size", name)
    if count and given not in (None, group):
        raise LayoutError(
            f"[hqq] {label(name, 'scale')} has {count} scales for a weight of {[n, k]}, groups of {group}; "
            f"the config says {given}"
        )
    wanted = {1: (count, 1), 0: (1, count)}.get(axis, ())
    if scale not in (wanted, ()) or group * count != n * k:
        raise LayoutError(
            f"[hqq] {label(name, 'scale')} has shape {list(scale)} for a weight of {[n, k]} with axis {axis}; wanted one a group"
        )
    columns = (k if scale == () else group) if axis else count
    rows = n * k // columns if columns else 0
    stored = tensors["W_q"]
    dtype = _I32 if packing == "3bit_32" else U8
    steps = -(-rows // per)
    spread = dtype.itemsize * columns
    got = require("hqq", tensors, "W_q", name, (dtype, *FLOATS))
    if (rows % per and packing != "3bit_32") or len(got) != 2 or got[0] != steps or got[1] * stored.dtype.itemsize != spread:
        raise LayoutError(
            f"[hqq] {label(name, 'W_q')} is {stored.dtype} {list(got)}; {rows} × {columns} codes in {packing} are {dtype} "
            f"{[steps, columns]}"
        )
    return _Geometry((n, k), bits, packing, axis, rows, columns, group)


def _whole_width(config: Config) -> Config:
    """The config with `nbits` of 1.58 as 2, the bits of a slot."""
    return {**config, "nbits": 2} if config.get("nbits") == _TERNARY else config


def _width(t: HasHeader | None, name: str) -> int | None:
    """The bits of a slot that the tensor `nbits` gives; None where it gives none."""
    if not isinstance(t, np.ndarray) or t.dtype.kind != "f" or t.size != 1:
        return _number(t)
    value = round(float(t.item()), 4)
    if value != _TERNARY and not value.is_integer():
        raise LayoutError(f"[hqq] {label(name, 'nbits')} is {value}; allowed: 1 to 8, and {_TERNARY} for three codes")
    return 2 if value == _TERNARY else int(value)


def _number(t: HasHeader | None) -> int | None:
    """A parameter stored as an integer tensor; None for what is no such tensor."""
    return int(t.reshape(-1)[0]) if isinstance(t, np.ndarray) and t.size and t.dtype.kind in "iub" else None


def _text(t: HasHeader | None) -> str | None:
    """A parameter stored as the bytes of its text."""
    return t.tobytes().decode("ascii", "replace") if isinstance(t, np.ndarray) and t.dtype == U8 else None


def _viewed(stored: Array, g: _Geometry) -> Array:
    """`view_as_float` files: the same bytes under a float dtype."""
    raw = as_bytes(stored)
    return as_words(raw, np.int32) if g.packing == "3bit_32" else raw


def _slabs(words: Array, width: int, per: int) -> Array:
    """Words [s, C] -> codes uint8 [per·s, C]: slab i is in bits width·(per−1−i)."""
    mask = (1 << width) - 1
    return np.concatenate([((words >> (width * (per - 1 - i))) & mask).astype(np.uint8) for i in range(per)])


def _words(slabs: Array, width: int, per: int) -> Array:
    """Inverse of `_slabs`, the top bits zero."""
    wide = slabs.astype(np.int32 if width == 3 else np.uint8).reshape(per, slabs.shape[0] // per, slabs.shape[1])
    out = np.zeros(wide.shape[1:], wide.dtype)
    for i in range(per):
        out |= wide[i] << (width * (per - 1 - i))
    return out


def _state(q: QTensor, kept: Mapping[str, Any], packing: str, axis: int, group: int) -> dict[str, Array]:
    """The file's own parameter tensors while they fit, else the full set when HQQ did not write the
    weight.
    """
    old = kept.get("state")
    if isinstance(old, Mapping):
        out = {s: np.frombuffer(bytes.fromhex(h), np.dtype(d)).reshape(shape) for s, (d, shape, h) in old.items()}
        if "shape" not in out or tuple(out["shape"].reshape(-1)) == q.shape:
            return out
    elif kept:
        return {}
    view = "torch.int32" if packing == "3bit_32" else "torch.uint8"
    numbers = {"nbits": q.format.bits, "group_size": group, "axis": axis}
    flags = {
        "view_as_float": 0, "quant_scale": 0, "quant_zero": 0, "offload_meta": 0, "encoded_state_dict": 1,
        "stores_quant_config": 1,
        "channel_wise": 1, "optimize": 1, "round_zero": 0,
    }  # fmt: skip
    texts = {"packing": packing, "unpack_view_dtype": view, "compute_dtype": f"torch.{q.parts['scales'].dtype.name}"}
    return {
        **{s: np.array(v, np.int32) for s, v in numbers.items()},
        **{s: np.array(v, np.uint8) for s, v in flags.items()},
        **{s: np.frombuffer(v.encode(), np.uint8) for s, v in texts.items()},
        "shape": np.array(q.shape, np.int64),
    }
