"""torchao tensor subclasses, flattened into a safetensors file: `weight_qdata`, `weight_scale`, ...
or, in newer files, `_weight_qdata`, ...

| subclass | qdata | scale | zero_point | value |
|---|---|---|---|---|
| MXTensor fp4 | uint8 [n, k/2], low nibble even | E8M0 bytes [n, k/32] | – | e2m1 · 2^(b − 127) |
| MXTensor fp6 | uint8 [n, k], a code a byte | the same | – | e2m3 or e3m2 · 2^(b − 127) |
| MXTensor fp8 | E4M3 or E5M2 [n, k] | the same | – | element · 2^(b − 127) |
| NVFP4Tensor | uint8 [n, k/2], low nibble even | E4M3 [n, k/16] | – | e2m1 · s, times `per_tensor_scale` float32 when there |
| IntxUnpackedToInt8Tensor, affine | int8 or uint8 [n, k], a code a byte | float [n, G] | integer [n, G] | (q − z) · s |
| Int8Tensor | int8 [n, k] | float [n, G] | left out | q · s |
| Float8Tensor | E4M3 or E5M2 [n, k] | float [n, 1], [1, 1] or one a tile | – | element · s |

Dtypes and shapes say which; the config (the subclass's attributes, as torchao's safetensors
metadata has them under `_data`) says the rest: `target_dtype` or `bits` for codes of fewer than 8
bits, `elem_dtype` for fp6, `block_size`. Scales may be in tensor-core tiles ("swizzled"),
recognised by their shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import CheckpointError, LayoutError, UnsupportedError
from ..formats import family_of, format_named
from ..numerics.bits import pack, unpack
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, integer_of, label, require, sizes_of
from .common.float8 import E4M3, E5M2, E8M0, F32, FLOATS, I8, U8, bytes_of, view_as
from .common.scale_tiles import tile, tiled_shape, untile
from .common.words import recall, remember
from .quant_config.module_rules import first_entry, lookup
from .quant_config.reader import SkipListReader
from .quant_config.safe_regex import compiled

_PREFIXES = ("_weight_", "weight_")
_NAMES = ("qdata", "scale", "zero_point", "per_tensor_scale")
_INTS = tuple(np.dtype(d) for d in (np.int8, np.uint8, np.int16, np.int32, np.int64))
_FP8 = {E4M3: "e4m3", E5M2: "e5m2"}


class TorchAOConfig(SkipListReader):
    """torchao: `quant_type` is an object {"default": {"_type", "_data"}}, per-module ones under a
    name or `re:` pattern.
    """

    method = "torchao"
    skip_keys = ("modules_to_not_convert",)
    consumed = ("quant_type", "quant_type.**", "_type", "target_dtype", "bits", "elem_dtype", "block_size", "group_size")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how the model runs": ("quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights"),
    }

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "quant_type" in raw and "blocksize" not in raw

    def parameters(self, module: str) -> dict[str, Any] | None:
        params = super().parameters(module)
        if params is None:
            return None
        kinds = self.raw.get("quant_type")
        if not isinstance(kinds, dict):
            return params
        kind = kinds.get("default", kinds)
        data = self._data(kind)
        table = next((v for v in data.values() if isinstance(v, dict) and "_default" in v), None) if data else None
        if table is not None:
            own = {k: v or False for k, v in table.items() if k != "_default"}
            kind = _entry_of(own, module)
            kind = table["_default"] if kind is None else kind
            if not kind:
                return None
            data = self._data(kind)
        return {**params, **data, "_type": kind.get("_type") if isinstance(kind, dict) else None}

    def _data(self, kind: Any) -> dict[str, Any]:
        """The arguments of a config object."""
        data = kind.get("_data") if isinstance(kind, dict) else None
        if data is not None and not isinstance(data, dict):
            raise CheckpointError(f"[config] {self.where}: quant_type has _data {data!r:.80}; wanted an object")
        return data or {}


def _entry_of(table: Mapping[str, Any], module: str) -> Any:
    """The entry of a `FqnToConfig`: of the weight's or the module's own name, else of the first
    expression that matches the whole of either; None without one.
    """
    weight = f"{module}.weight"
    exact = (lookup(table, weight), lookup(table, module))
    patterns = {rule: entry for rule, entry in table.items() if rule.startswith("re:")}
    found = (*exact, *(first_entry(patterns, name, _whole) for name in (weight, module)))
    return next((entry for entry in found if entry is not None), None)


def _whole(rule: str, name: str) -> bool:
    return compiled(rule.removeprefix("re:")).fullmatch(name)


class TorchAO(Layout):
    """The tensors a torchao tensor subclass is flattened into."""

    name = "torchao"
    producers = ("torchao",)
    config_reader = TorchAOConfig
    required = ()
    optional: ClassVar[tuple[str, ...]] = tuple(p + s for p in _PREFIXES for s in _NAMES)
    parts: ClassVar[dict[str, str]] = {
        prefix + suffix: part
        for prefix in ("_weight_", "weight_")
        for suffix, part in (
            ("qdata", "codes"), ("scale", "scales"), ("zero_point", "zeros"), ("per_tensor_scale", "global_scale"),
        )
    }  # fmt: skip

    def matches(self, suffixes: Collection[str]) -> bool:
        return any(p + "qdata" in suffixes and p + "scale" in suffixes for p in _PREFIXES)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        t, prefix = _bare(tensors)
        where = label(name, prefix[:-1])
        other = next((p for p in _PREFIXES if p != prefix and any(p + s in tensors for s in _NAMES)), None)
        if other is not None:
            raise LayoutError(f"[torchao] {name or 'the module'} has tensors under {prefix} and {other}; one of them is a weight")
        got = require("torchao", t, "qdata", where, (U8, I8, E4M3, E5M2))
        scale = require("torchao", t, "scale", where, (U8, E8M0, E4M3, *FLOATS))
        if len(got) < 2:
            raise LayoutError(f"[torchao] {where}_qdata has shape {list(got)}; wanted (n, k) or a stack of those")
        if t["scale"].dtype == E4M3:
            _only(t, where, "an NVFP4Tensor", "per_tensor_scale")
            return _nvfp4(t, where, got, scale)
        if t["scale"].dtype in (U8, E8M0):
            _only(t, where, "an MXTensor")
            return _mx(t, config, where, got, scale)
        if t["qdata"].dtype in _FP8:
            _only(t, where, "a Float8Tensor")
            return _float8(t, config, where, got, scale)
        _only(t, where, "an integer tensor", "zero_point")
        return _integer(t, config, where, got, scale)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        t, prefix = _bare(tensors)
        details: dict[str, Any] = {"prefix": prefix}
        qdata, scale = t["qdata"], t["scale"]
        parts: dict[str, Array] = {}
        if fmt.family == "integer":
            details["signed"] = int(qdata.dtype == I8)
            parts |= _codes_and_zeros(fmt, shape, t, details, label(name, prefix[:-1]))
        elif fmt.bits == 6:
            _check_codes(qdata, 6, label(name, prefix[:-1]))
            parts["codes"] = pack(qdata, 6)
        else:
            parts["codes"] = bytes_of(qdata)
        groups = fmt.groups(shape[-1])
        if fmt.float_scale:
            parts["scales"] = scale.reshape(family_of(fmt).geometry(fmt, shape)["scales"].shape)
            if scale.shape != parts["scales"].shape:
                details["scale_shape"] = list(scale.shape)
        elif scale.shape == (*shape[:-1], groups):
            parts["scales"] = bytes_of(scale)
        else:
            parts["scales"], padding = untile(bytes_of(scale), shape[0], groups)
            details["swizzled"] = 1
            if padding.any():
                remember(details, "scale_padding", padding)
        if scale.dtype == E8M0:
            details["scale_dtype"] = scale.dtype.name
        if fmt.global_op:
            factor = t["per_tensor_scale"]
            parts["global_scale"] = factor.reshape(shape[:-2])
            if factor.shape != shape[:-2]:
                details["per_tensor_shape"] = list(factor.shape)
        return QTensor(fmt, shape, parts, origin="torchao", details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        integer = fmt.family == "integer" and fmt.grouping == "row" and not fmt.inverse and fmt.divisor == 1.0
        one_level = fmt in (format_named("nvfp4", 16), format_named("nvfp4", 16, global_scale="none"))
        if integer and (fmt.bits == 8 or fmt.zero == "int"):
            fills = fmt.group_size == -1 or shape[-1] % fmt.group_size == 0
        elif (fmt.family == "mx" and fmt.element != "mxint") or one_level:
            fills = shape[-1] % fmt.group_size == 0
        elif fmt.family == "fp8":
            fills = True
        else:
            return (
                "torchao holds uint2 to uint8 with zero points, int8, fp8, mxfp4, mxfp6, mxfp8 and nvfp4 (multiply or one level)"
            )
        return "" if fills else f"k = {shape[-1]} is not whole groups of {fmt.group_size}"

    def _check(self, q: QTensor) -> None:
        if "group_index" in q.parts:
            raise cannot_hold("torchao", q, "torchao has no group index (act-order)")
        self.check_fits(q)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        fmt, kept = q.format, q.details if q.origin == "torchao" else {}
        self._check(q)
        k = q.shape[-1]
        out: dict[str, Array] = {}
        if fmt.family == "integer":
            out |= _stored_integers(q, kept)
        elif fmt.bits == 6:
            out["qdata"] = unpack(q.parts["codes"], 6, k)
        else:
            out["qdata"] = view_as(q.parts["codes"], {"e4m3": E4M3, "e5m2": E5M2}.get(fmt.element, U8))
        scale = q.parts["scales"]
        if fmt.float_scale:
            wanted = tuple(kept.get("scale_shape", scale.shape))
            out["scale"] = scale.reshape(wanted) if math.prod(wanted) == scale.size else scale
        else:
            if kept.get("swizzled"):
                size = math.prod(tiled_shape(q.shape[0], fmt.groups(k))) - scale.size
                scale = tile(scale, recall(kept, "scale_padding", (size,)))
            out["scale"] = view_as(scale, E4M3 if fmt.scale == "e4m3" else str(kept.get("scale_dtype", "uint8")))
        if fmt.global_op:
            factor = q.parts["global_scale"]
            wanted = tuple(kept.get("per_tensor_shape", factor.shape))
            out["per_tensor_scale"] = factor.reshape(wanted) if math.prod(wanted) == factor.size else factor
        prefix = str(kept.get("prefix", _PREFIXES[0]))
        return {prefix + s: a for s, a in out.items()}

    def config(self, q: QTensor) -> dict[str, Any]:
        self._check(q)
        fmt = q.format
        kinds = {"mx": "MXTensor", "nvfp4": "NVFP4Tensor", "fp8": "Float8Tensor"}
        out: dict[str, Any] = {"_type": kinds.get(fmt.family, "IntxUnpackedToInt8Tensor" if fmt.zero == "int" else "Int8Tensor")}
        if fmt.family == "integer":
            out["target_dtype"] = f"int{fmt.bits}"
        if fmt.family == "mx":
            out["elem_dtype"] = {4: "float4_e2m1fn_x2", 6: f"fp6_{fmt.element}", 8: f"float8_{fmt.element}"}[fmt.bits]
            out["block_size"] = fmt.group_size
        elif fmt.family != "nvfp4":
            rows = {"row": 1, "block": q.shape[-2] if fmt.group_rows == -1 else fmt.group_rows}[fmt.grouping]
            group = q.shape[-1] if fmt.group_size == -1 else fmt.group_size
            out["block_size"] = [*[1] * (q.ndim - 2), rows, group]
        return out


def _bare(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Tensors without their prefix, and the prefix."""
    for prefix in _PREFIXES:
        if prefix + "qdata" in tensors:
            return {s: tensors[prefix + s] for s in _NAMES if prefix + s in tensors}, prefix
    raise LayoutError(
        f"[torchao] the module has {', '.join(sorted(tensors)) or 'no tensors'}; wanted weight_qdata or _weight_qdata"
    )


def _only(t: Mapping[str, HasHeader], where: str, what: str, *optional: str) -> None:
    """LayoutError for a tensor that this subclass does not have."""
    extra = sorted(set(t) - {"qdata", "scale", *optional})
    if extra:
        raise LayoutError(f"[torchao] {where}_{extra[0]} is there; {what} has {', '.join(('qdata', 'scale', *optional))} only")


def _scales_fit(where: str, fmt: Format, shape: tuple[int, ...], scale: tuple[int, ...]) -> Described:
    """Check scale bytes of plain or tiled shape."""
    plain = (*shape[:-1], fmt.groups(shape[-1]))
    if shape[-1] % fmt.group_size:
        raise LayoutError(f"[torchao] {where}_qdata has {shape[-1]} inputs a row; wanted whole blocks of {fmt.group_size}")
    if scale == plain or (len(shape) == 2 and scale == tiled_shape(*plain)):
        return Described(fmt, shape)
    tiled = f" or {list(tiled_shape(*plain))} in tiles" if len(shape) == 2 else ""
    raise LayoutError(
        f"[torchao] {where}_scale has shape {list(scale)} for {fmt} of shape {list(shape)}; wanted {list(plain)}{tiled}"
    )


def _nvfp4(t: Mapping[str, HasHeader], where: str, got: tuple[int, ...], scale: tuple[int, ...]) -> Described:
    require("torchao", t, "qdata", where, (U8,))
    shape = (*got[:-1], 2 * got[-1])
    if "per_tensor_scale" in t:
        second = require("torchao", t, "per_tensor_scale", where, (F32,))
        if math.prod(second) != math.prod(shape[:-2]):
            raise LayoutError(
                f"[torchao] {where}_per_tensor_scale has shape {list(second)}; wanted one factor for each matrix of {list(shape)}"
            )
    level = "multiply" if "per_tensor_scale" in t else "none"
    return _scales_fit(where, format_named("nvfp4", 16, global_scale=level), shape, scale)


def _mx(t: Mapping[str, HasHeader], config: Config, where: str, got: tuple[int, ...], scale: tuple[int, ...]) -> Described:
    block = _last(config, where) or 32
    dtype = t["qdata"].dtype
    if dtype in _FP8:
        return _scales_fit(where, format_named(f"mxfp8_{_FP8[dtype]}", block), got, scale)
    require("torchao", t, "qdata", where, (U8,))
    element = _word(config.get("elem_dtype"))
    six = re.search(r"e2m3|e3m2", element)
    fp4, fp6 = (*got[:-1], 2 * got[-1]), got
    if not element and scale == (*got[:-1], fp6[-1] // block) != (*got[:-1], fp4[-1] // block):
        raise LayoutError(
            f"[torchao] {where}_qdata has a code a byte: fp6, and only the config's elem_dtype says e2m3 or e3m2; give it"
        )
    if six:
        return _scales_fit(where, format_named(f"mxfp6_{six[0]}", block), fp6, scale)
    return _scales_fit(where, format_named("mxfp4", block), fp4, scale)


def _float8(t: Mapping[str, HasHeader], config: Config, where: str, got: tuple[int, ...], scale: tuple[int, ...]) -> Described:
    word, dtype = f"fp8_{_FP8[t['qdata'].dtype]}", t["scale"].dtype.name
    *lead, n, k = got
    block = _block(config, where)
    rows, group = block[-2:] if len(block) > 1 else (0, 0)
    row, tensor = format_named(word, -1, scale_dtype=dtype), format_named(word, -1, scale_dtype=dtype, rows=-1)
    if scale == (*got[:-1], row.groups(k)) and rows in (0, 1) and group in (0, k):
        return Described(row, got)
    if scale in ((*lead, 1, row.groups(k)), () if not lead else None) and k and rows in (0, n) and group in (0, k):
        return Described(tensor, got)
    if not rows and len(scale) == len(got) and scale[-1] and scale[-2] == n:
        # Without block_size: groups of each row alone. Tiles of several rows have the shape of more
        # than one size, and of scales that were transposed.
        rows, group = 1, -(-k // scale[-1])
    if not rows or not group or scale != (*lead, -(-n // rows), -(-k // group)):
        raise LayoutError(f"[torchao] {where}_scale has shape {list(scale)} for a float8 weight of {list(got)}; give block_size")
    options = {} if rows == 1 else {"rows": rows}
    return Described(format_named(word, group, scale_dtype=dtype, **options), got)


def _integer(t: Mapping[str, HasHeader], config: Config, where: str, got: tuple[int, ...], scale: tuple[int, ...]) -> Described:
    kind = str(config.get("_type") or "")
    if kind.startswith("Int4") and kind.endswith("Tensor"):
        raise UnsupportedError(
            f"[torchao] {where} is an {kind}, an order of one GPU kernel; read: IntxUnpackedToInt8Tensor, Int8Tensor, "
            "Float8Tensor, MXTensor, NVFP4Tensor"
        )
    zero = t.get("zero_point")
    if zero is not None and zero.dtype not in _INTS:
        raise UnsupportedError(
            f"[torchao] {where}_zero_point is {zero.dtype}: an Int4Tensor, whose zero points are added to the product; "
            "read: integer zero points"
        )
    *lead, n, k = got
    if zero is None and t["qdata"].dtype != I8:
        raise LayoutError(f"[torchao] {where}_qdata is {t['qdata'].dtype} without zero points; wanted int8")
    bits = integer_of("torchao", config, "bits", where) or _width(config.get("target_dtype")) or 8
    if not 1 <= bits <= 8:
        raise LayoutError(f"[torchao] {where}: codes of {bits} bits; allowed: 1 to 8")
    if zero is None and (bits != 8 or "Intx" in kind):
        what = f"codes of {bits} bits have" if bits != 8 else f"the weights of {kind} have"
        raise LayoutError(f"[torchao] {where}_zero_point is missing; {what} one a group")
    block = _last(config, where)
    count = math.prod(scale) // max(1, math.prod(lead) * n)
    group = block or (k // count if count and k % count == 0 else 0)
    fmt = format_named(
        f"{'int' if zero is None else 'uint'}{bits}", int(group) if group and group < k else -1, scale_dtype=t["scale"].dtype.name
    )
    if (
        k % fmt.group_size
        or math.prod(scale) != math.prod(lead) * n * fmt.groups(k)
        or (zero is not None and math.prod(zero.shape) != math.prod(scale))
    ):
        raise LayoutError(
            f"[torchao] {where}_scale has shape {list(scale)} for a weight of {list(got)}; wanted one a group along k, "
            "zero points likewise"
        )
    return Described(fmt, got)


def _codes_and_zeros(fmt: Format, shape: tuple[int, ...], t: Tensors, details: dict[str, Any], where: str) -> dict[str, Array]:
    """Bytes and zero points, shifted by 2^(bits−1) when they are signed or the format has no zero
    points.
    """
    qdata = t["qdata"]
    half = 1 << (fmt.bits - 1)
    shift = half if qdata.dtype == I8 else 0
    codes = qdata.view(np.uint8) + np.uint8(shift)
    _check_codes(codes, fmt.bits, where)
    parts: dict[str, Array] = {"codes": pack(codes, fmt.bits)}
    if fmt.zero == "int":
        zeros = t["zero_point"]
        details["zero_dtype"] = zeros.dtype.name
        if zeros.size and not (int(zeros.min()) >= -(1 << 14) and int(zeros.max()) < 1 << 14):
            raise LayoutError(
                f"[torchao] {where}_zero_point runs from {zeros.min()} to {zeros.max()}; wanted those of {fmt.bits}-bit codes"
            )
        shifted = (zeros.astype(np.int16) + np.int16(shift)).reshape(*shape[:-1], fmt.groups(shape[-1]))
        parts["zeros"] = shifted
        if zeros.shape != shifted.shape:
            details["zero_shape"] = list(zeros.shape)
    return parts


def _stored_integers(q: QTensor, kept: Mapping[str, Any]) -> dict[str, Array]:
    """Inverse of `_codes_and_zeros`; signed unless the file was not."""
    fmt = q.format
    signed = bool(kept.get("signed", 1))
    shift = 1 << (fmt.bits - 1) if signed else 0
    codes: Array = unpack(q.parts["codes"], fmt.bits, q.shape[-1]) - np.uint8(shift)
    out: dict[str, Array] = {"qdata": codes.view(np.int8) if signed else codes}
    if fmt.zero == "int":
        zeros = q.parts["zeros"].astype(np.int64) - shift
        dtype = np.dtype(str(kept.get("zero_dtype", "int8")))
        if zeros.size and (int(zeros.min()) < np.iinfo(dtype).min or int(zeros.max()) > np.iinfo(dtype).max):
            raise cannot_hold("torchao", q, f"zero points run from {zeros.min()} to {zeros.max()}, beyond {dtype}")
        shape = tuple(kept.get("zero_shape", zeros.shape))
        out["zero_point"] = zeros.astype(dtype).reshape(shape if math.prod(shape) == zeros.size else zeros.shape)
    return out


def _check_codes(codes: Array, bits: int, where: str) -> None:
    if codes.size and int(codes.max()) >> bits:
        raise LayoutError(
            f"[torchao] {where}_qdata holds a code outside {bits} bits; a code a byte, the config's bits or elem_dtype is wrong"
        )


def _word(value: Any) -> str:
    """A dtype's name as a string, a torch name, or torchao's {"_type", "_data"} object."""
    if isinstance(value, Mapping):
        value = value.get("_data")
    return "" if value is None else str(value).removeprefix("torch.")


def _width(value: Any) -> int | None:
    match = re.fullmatch(r"u?int(\d)", _word(value))
    return int(match[1]) if match else None


def _block(config: Config, where: str) -> tuple[int, ...]:
    """The block size as one number for each axis that is given; () without one."""
    value = config.get("block_size")
    value = [] if value is None else [value] if isinstance(value, int) else value
    return sizes_of("torchao", value, "block_size", where)


def _last(config: Config, where: str) -> int | None:
    """The group along k."""
    block = _block(config, where)
    return block[-1] if block else None
