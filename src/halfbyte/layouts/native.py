"""halfbyte's own layout: the canonical parts as they are, the rest of a QTensor as JSON.

Suffixes are the parts' names (`codes`, `scales`, ...); `config(q)` is what a reader needs besides
and what a writer keeps in the file's metadata:

    {"format": {"family": "mx", "name": "mxfp4", ...}, "shape": [n, k],
     "origin": "mlx", "details": {..}, "window": [i, rows]}

Fields of the format that have their default, an empty origin, empty details and no window are left
out. Every QTensor can be written, and comes back identical, its origin, details and window
included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar

from ..errors import FormatError, HalfbyteError, LayoutError
from ..formats import EXTRA_PARTS, FAMILIES, family_of
from ..spec import SCALE_KINDS, Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, label, sizes_of
from .quant_config.writer import ConfigFiles, DenseTensor, PackedModule

PARTS = (
    "codes", "scales", "zeros", "biases", "mins", "super_scales", "super_mins", "global_scale", "group_index",
    "nested_map", "nested_absmax", "nested_offset", "blocks", "trellis", "input_scales", "output_scales",
    *(part for parts in EXTRA_PARTS.values() for part in parts),
)  # fmt: skip


class Native(Layout):
    """The parts as they are."""

    name = "halfbyte"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"native": {}}
    container = "halfbyte"
    input_scales = True
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = PARTS

    def matches(self, suffixes: Collection[str]) -> bool:
        return any(part in suffixes for part in ("codes", "blocks", "trellis"))

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        where = name or "tensor"
        try:
            fmt = format_from_json(config["format"])
            shape = sizes_of("halfbyte", config["shape"], "shape", where)
        except KeyError as e:
            raise LayoutError(
                f"[halfbyte] {where}: its description has {', '.join(config) or 'nothing'}; {e} is missing"
            ) from None
        except (TypeError, ValueError) as e:
            raise LayoutError(f"[halfbyte] {where}: its description cannot be read: {e}") from None
        if len(shape) < 2:
            raise LayoutError(f"[halfbyte] {where}: shape {list(shape)}; a weight is (n, k) or (experts, n, k)")
        try:
            window = config.get("window")
            rows = window[1] if fmt.composite and window else shape[-2]
            specs = family_of(fmt).geometry(fmt, (*shape[:-2], rows, shape[-1]))
        except HalfbyteError as e:
            raise LayoutError(f"[halfbyte] {where}: {e}") from None
        for part in () if config.get("window") else specs:
            if part not in tensors:
                raise LayoutError(f"[halfbyte] {label(name, part)} is missing; {fmt} has {', '.join(specs)}")
            t = tensors[part]
            if tuple(t.shape) != specs[part].shape or t.dtype != specs[part].dtype:
                raise LayoutError(
                    f"[halfbyte] {label(name, part)} is {t.dtype} {list(t.shape)}; {fmt} of shape {list(shape)} wants "
                    f"{specs[part].dtype} {list(specs[part].shape)}"
                )
        return Described(fmt, shape)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts = {p: tensors[p] for p in PARTS if p in tensors}
        origin, details, window = config.get("origin", ""), config.get("details", {}), config.get("window")
        if not isinstance(origin, str) or not isinstance(details, Mapping):
            raise LayoutError(f"[halfbyte] {name}: origin {origin!r:.40}, details {details!r:.40}; wanted a name and an object")
        if window is not None:
            window = sizes_of("halfbyte", window, "window", name)
            if len(window) != 2 or window[0] + math.prod(shape[:-1]) > window[1]:
                raise LayoutError(
                    f"[halfbyte] {name}: window {list(window)} for shape {list(shape)}; wanted [first row, rows of the whole]"
                )
        q = QTensor(fmt, shape, parts, origin=origin, details=details, window=window, name=name)
        q.validate(name)
        return q

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        return dict(q.parts)

    def config(self, q: QTensor) -> dict[str, Any]:
        out: dict[str, Any] = {"format": format_to_json(q.format), "shape": list(q.shape)}
        if q.origin:
            out["origin"] = q.origin
        if q.details:
            out["details"] = dict(q.details)
        if q.window is not None:
            out["window"] = list(q.window)
        return out

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """The method alone, for transformers: each weight's description is a tensor beside it."""
        return ConfigFiles({"quantization_config": {"quant_method": self.name}})


def format_to_json(fmt: Format) -> dict[str, Any]:
    """The fields of a Format that do not have their default."""
    defaults = {f.name: f.default for f in fields(fmt) if f.default is not MISSING}
    return {k: v for k, v in asdict(fmt).items() if k not in defaults or defaults[k] != v}


def format_from_json(data: Any) -> Format:
    """Inverse of `format_to_json`. FormatError for fields, types or a family that are not known
    here.
    """
    if not isinstance(data, Mapping):
        raise FormatError(f"[format] description {data!r:.80}; wanted an object")
    known = {f.name: f for f in fields(Format)}
    unknown = sorted(set(data) - set(known))
    missing = sorted(n for n, f in known.items() if f.default is MISSING and n not in data)
    if unknown or missing:
        raise FormatError(
            f"[format] description with unknown {unknown or 'nothing'}, missing {missing or 'nothing'}; "
            "written by another version?"
        )
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    for key, value in data.items():
        wanted = kinds[str(known[key].type)]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise FormatError(f"[format] {key} is {value!r:.80}; wanted {known[key].type}")
    fmt = Format(**data)
    if fmt.scale not in SCALE_KINDS:
        raise FormatError(f"[format] scale is {fmt.scale!r:.80}; allowed: {', '.join(SCALE_KINDS)}")
    tile = (fmt.group_rows, fmt.group_size)
    sizes_fit = all(size == -1 or 1 <= size < 1 << 31 for size in tile)
    if fmt.family not in FAMILIES or (not 1 <= fmt.bits <= 8 and not fmt.opaque) or not sizes_fit:
        raise FormatError(
            f"[format] family {fmt.family!r}, {fmt.bits} bits, groups of {tile[0]} by {tile[1]}; sizes are 1 to 2^31 - 1, or -1; "
            f"families: {', '.join(FAMILIES)}"
        )
    return fmt
