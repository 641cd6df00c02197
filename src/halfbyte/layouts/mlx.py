"""MLX: uint32 words, codes least significant bit first along k; a scale and a bias a group, or the
block formats by mode.

    weight  uint32 [*lead, n, k·bits/32]     the canonical byte stream, four bytes a word
    scales  [*lead, n, G]                    affine: float16, bfloat16 or float32. mxfp4, mxfp8: E8M0 bytes. nvfp4: E4M3 bytes
    biases  as scales                        affine only
    global_scale  float32 []                 nvfp4, optional: the tensor's largest magnitude (the factor is that / 2688)

| mode | bits | group |
|---|---|---|
| affine | 1, 2, 3, 4, 5, 6, 8 | 32, 64, 128 |
| mxfp4, mxfp8 | 4, 8 | 32 |
| nvfp4 | 4 | 16 |

Config: `mode` ("affine"), `bits`, `group_size`, as in the `quantization` entry of an MLX
config.json. Where one of the affine pair is left out it follows from the shapes; both cannot be: 4
bits in groups of 32 and 2 bits in groups of 64 have the same shapes.

When scales and biases differ in dtype both are kept as float32, which is exact, and `details` keeps
the file's dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..formats.affine import one_dtype
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
from .claims import CONSUMED, KeyUse
from .common.float8 import E4M3, E8M0, F32, FLOATS, U8, bytes_of, cast, dtype_by_name, exact_cast, view_as
from .common.words import as_bytes, as_words, remember_lost, restored
from .quant_config.module_rules import lookup
from .quant_config.reader import ConfigReader
from .quant_config.writer import ConfigFiles, DenseTensor, PackedModule, dense_modules, differing, most_common

_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
_BLOCK_MODES = {"mxfp4": ("mxfp4", 4, 32, E8M0), "mxfp8": ("mxfp8_e4m3", 8, 32, E8M0), "nvfp4": ("nvfp4", 4, 16, E4M3)}
"""mode -> (codec word, bits, group, the scales' dtype where it is not plain U8)."""
_U32 = np.dtype(np.uint32)


class MLXConfig(ConfigReader):
    """MLX's config: `group_size`, `bits`, `mode`, and under a module's own path an object of its
    own or false. What such an object leaves out is MLX's default.
    """

    method = "mlx"
    consumed = ("group_size", "bits", "mode")
    defaults: ClassVar[dict[str, Any]] = {"mode": "affine", "bits": 4, "group_size": 64}

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._base = {k: v for k, v in raw.items() if not isinstance(v, dict | bool)}
        self._own: dict[str, dict[str, Any] | bool] = {k: v for k, v in raw.items() if isinstance(v, dict | bool)}

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return ("bits" in raw and "group_size" in raw) or "mode" in raw

    def _use(self, path: tuple[str, ...], value: Any) -> KeyUse:
        # A module's path has dots and is one key.
        own = path[0] in self._own and (len(path) == 1 or path[1] in self.consumed)
        return KeyUse(".".join(path), value, CONSUMED) if own else super()._use(path, value)

    def parameters(self, module: str) -> dict[str, Any] | None:
        own = lookup(self._own, module)
        if own is False:
            return None
        if isinstance(own, dict):
            return {**self.defaults, **own} if own.get("mode", "affine") == "affine" else dict(own)
        return dict(self._base)


class MLX(Layout):
    """Words along k, scales and biases a group; the mode is in the config."""

    name = "mlx"
    codec_aliases: ClassVar[dict[str, str]] = {
        **{f"{sign}int{b}": f"affine{b}" for sign in ("", "u") for b in _AFFINE_BITS},
        "mxfp8": "mxfp8_e4m3",
    }
    producers = ("mlx",)
    holds = Holds(
        (*(f"affine{b}" for b in (4, 8, 6, 5, 3, 2, 1)), "mxfp4", "nvfp4", "mxfp8_e4m3"),
        "matrices and stacks whose rows are whole groups in whole 32-bit words",
        groups=(128, 64, 32),
        levels=("none", "amax"),
        wider=(2, 3, 4, 5, 6, 8),
    )
    engine = "mlx-lm"
    engine_names = True
    config_reader = MLXConfig
    required = ("weight", "scales")
    optional: ClassVar[tuple[str, ...]] = ("biases", "global_scale")
    parts: ClassVar[dict[str, str]] = {"weight": "codes"}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        mode = str(config.get("mode", "affine"))
        if mode not in ("affine", *_BLOCK_MODES):
            raise LayoutError(f"[mlx] {name or 'config'}: mode {mode!r}; allowed: affine, {', '.join(_BLOCK_MODES)}")
        weight = require("mlx", tensors, "weight", name, (_U32,))
        scales = require("mlx", tensors, "scales", name)
        if len(weight) < 2 or len(scales) < 2 or scales[:-1] != weight[:-1]:
            raise LayoutError(
                f"[mlx] {label(name, 'scales')} has shape {list(scales)}, {label(name, 'weight')} {list(weight)}; "
                "all axes but the last must agree"
            )
        *lead, words = weight
        bits, group = self._parameters(mode, config, words, scales[-1], name)
        k = words * 32 // bits
        if words * 32 % bits or k != scales[-1] * group:
            raise LayoutError(
                f"[mlx] {name or 'weight'}: {words} words a row of {bits}-bit codes are {words * 32 / bits:g} inputs, "
                f"{scales[-1]} scales in groups of {group} are {scales[-1] * group}; the config's bits and group_size "
                "do not fit these tensors"
            )
        fmt = self._format(mode, bits, group, tensors, scales, name)
        return Described(fmt, (*lead, k))

    @staticmethod
    def _parameters(mode: str, config: Config, words: int, groups: int, name: str) -> tuple[int, int]:
        bits, group = integer_of("mlx", config, "bits", name), integer_of("mlx", config, "group_size", name)
        if mode != "affine":
            _, own_bits, own_group, _ = _BLOCK_MODES[mode]
            if bits not in (None, own_bits) or group not in (None, own_group):
                raise LayoutError(
                    f"[mlx] {name}: mode {mode} with bits {bits}, group_size {group}; it has {own_bits} and {own_group}"
                )
            return own_bits, own_group
        if bits is None and group is None:
            raise LayoutError(f"[mlx] {name}: neither bits nor group_size is given, and the shapes leave both open; pass config")
        if bits is None:
            inputs = groups * (group or 0)
            bits = words * 32 // inputs if inputs else 4
        if group is None:
            group = words * 32 // bits // groups if groups and bits else 64
        if bits not in _AFFINE_BITS or group not in _AFFINE_GROUPS:
            raise LayoutError(
                f"[mlx] {name}: affine with bits {bits}, group_size {group}; allowed: bits {', '.join(map(str, _AFFINE_BITS))}, "
                f"group_size {', '.join(map(str, _AFFINE_GROUPS))}"
            )
        return bits, group

    @staticmethod
    def _format(mode: str, bits: int, group: int, tensors: Mapping[str, HasHeader], scales: tuple[int, ...], name: str) -> Format:
        if mode == "affine":
            reject_extra("mlx", tensors, ("weight", "scales", "biases"), name, "mode affine")
            require("mlx", tensors, "scales", name, FLOATS)
            require("mlx", tensors, "biases", name, FLOATS, scales, "as the scales")
            same = tensors["scales"].dtype == tensors["biases"].dtype
            return format_named(f"affine{bits}", group, scale_dtype=tensors["scales"].dtype.name if same else "float32")
        word, _, _, dtype = _BLOCK_MODES[mode]
        require("mlx", tensors, "scales", name, (U8, dtype))
        extra = ("global_scale",) if mode == "nvfp4" else ()
        reject_extra("mlx", tensors, ("weight", "scales", *extra), name, f"mode {mode}")
        if mode != "nvfp4":
            return format_named(word, group)
        if "global_scale" in tensors:
            require("mlx", tensors, "global_scale", name, (F32,), ())
            if len(scales) > 2:
                raise LayoutError(f"[mlx] {label(name, 'global_scale')} on a stack of shape {list(scales)}; one matrix has it")
        return format_named(word, group, global_scale="amax" if "global_scale" in tensors else "none")

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts: dict[str, Array] = {"codes": as_bytes(tensors["weight"])}
        details: dict[str, Any] = {}
        scales = tensors["scales"]
        if fmt.bias:
            parts["scales"], parts["biases"] = one_dtype(scales, tensors["biases"])
            if scales.dtype != tensors["biases"].dtype:
                details = {"scales_dtype": scales.dtype.name, "biases_dtype": tensors["biases"].dtype.name}
                for suffix in ("scales", "biases"):
                    stored = tensors[suffix]
                    remember_lost(details, f"{suffix}_bits", stored, cast(parts[suffix], stored.dtype))
        else:
            parts["scales"] = bytes_of(scales)
            if scales.dtype != U8:
                details = {"scales_dtype": scales.dtype.name}
            if fmt.global_op:
                parts["global_scale"] = tensors["global_scale"]
        return QTensor(fmt, shape, parts, origin="mlx", details=details, name=name)

    def unfilled(self, fmt: Format, shape: tuple[int, ...]) -> str:
        size, k = fmt.group_size, shape[-1]
        return f"rows of {k}; MLX wants whole groups of {size}" if k % size else ""

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if fmt.family == "affine" and fmt.group_size not in _AFFINE_GROUPS:
            return f"groups of {fmt.group_size}; MLX has {', '.join(map(str, _AFFINE_GROUPS))}"
        if self._mode(fmt) is None:
            return "MLX holds affine1 to affine8, mxfp4, mxfp8_e4m3 and nvfp4 (one level, or the global scale as amax)"
        if shape[-1] % fmt.group_size or shape[-1] * fmt.bits % 32:
            return f"k = {shape[-1]} is not whole groups of {fmt.group_size} in whole 32-bit words"
        if fmt.global_op and len(shape) > 2:
            return "a stack of experts has no global scale in MLX"
        return ""

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        fmt = q.format
        self.check_fits(q)
        check_requested("mlx", q, config, self.config(q))
        if "group_index" in q.parts:
            raise cannot_hold("mlx", q, "MLX has no group index (act-order)")
        out: dict[str, Array] = {"weight": as_words(q.parts["codes"], _U32)}
        if fmt.family == "affine":
            for suffix in ("scales", "biases"):
                kept = q.details if q.origin == "mlx" else {}
                out[suffix] = q.parts[suffix]
                if f"{suffix}_dtype" in kept:
                    narrow = exact_cast(q.parts[suffix], dtype_by_name(kept[f"{suffix}_dtype"]))
                    out[suffix] = q.parts[suffix] if narrow is None else restored(kept, f"{suffix}_bits", narrow)
            return out
        out["scales"] = view_as(q.parts["scales"], str(q.details.get("scales_dtype", "uint8")) if q.origin == "mlx" else "uint8")
        if fmt.global_op:
            out["global_scale"] = q.parts["global_scale"]
        return out

    @staticmethod
    def _mode(fmt: Format) -> str | None:
        """MLX's word for the kind of format, None where it has none."""
        if fmt.family == "affine":
            return "affine"
        for mode, (word, _, group, _) in _BLOCK_MODES.items():
            levels = [{"global_scale": "amax"}, {"global_scale": "none"}] if mode == "nvfp4" else [{}]
            if any(fmt == format_named(word, group, **level) for level in levels):
                return mode
        return None

    def config(self, q: QTensor) -> dict[str, Any]:
        self.check_fits(q)
        return {"group_size": q.format.group_size, "bits": q.format.bits, "mode": self._mode(q.format)}

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization`, and its copy under `quantization_config`: the most common parameters, an
        object under the path of a module that has others, and false for dense projections.
        """
        keys = ("group_size", "bits", "mode")
        base = most_common(packed, keys)
        config: dict[str, Any] = dict(base)
        for p in differing(packed, base, keys):
            config[p.name] = {k: p.params[k] for k in keys}
        config |= dict.fromkeys(dense_modules(dense), False)
        return ConfigFiles({"quantization": config, "quantization_config": config})
