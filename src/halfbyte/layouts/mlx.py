"""MLX: uint32 words, codes least significant bit first along k; a scale and a bias a group, or the block formats by mode.

    weight  uint32 [*lead, n, k·bits/32]     the canonical byte stream, four bytes a word
    scales  [*lead, n, G]                    affine: float16, bfloat16 or float32. mxfp4, mxfp8: E8M0 bytes. nvfp4: E4M3 bytes
    biases  as scales                        affine only
    global_scale  float32 []                 nvfp4, optional: the tensor's largest magnitude (the factor is that / 2688)

| mode | bits | group |
|---|---|---|
| affine | 1, 2, 3, 4, 5, 6, 8 | 32, 64, 128 |
| mxfp4, mxfp8 | 4, 8 | 32 |
| nvfp4 | 4 | 16 |

Config: `mode` ("affine"), `bits`, `group_size`, as in the `quantization` entry of an MLX config.json. Where one of the affine
pair is left out it follows from the shapes; both cannot be: 4 bits in groups of 32 and 2 bits in groups of 64 have the same
shapes.

When scales and biases differ in dtype both are held as float32, which is exact, and `details` keeps the file's dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..formats.affine import one_dtype
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, check_asked, join, only, refuse, want, whole
from .common.float8 import E4M3, E8M0, F32, FLOATS, U8, bytes_of, cast, dtype_by_name, held_exactly, named
from .common.words import as_bytes, as_words, remember_lost, restored

_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
_BLOCK_MODES = {"mxfp4": ("mxfp4", 4, 32, E8M0), "mxfp8": ("mxfp8_e4m3", 8, 32, E8M0), "nvfp4": ("nvfp4", 4, 16, E4M3)}
"""mode -> (codec word, bits, group, the scales' dtype where it is not plain U8)."""
_U32 = np.dtype(np.uint32)


class MLX(Layout):
    """Words along k, scales and biases a group; the mode is in the config."""

    name = "mlx"
    required = ("weight", "scales")
    optional: ClassVar[tuple[str, ...]] = ("biases", "global_scale")

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        mode = str(config.get("mode", "affine"))
        if mode not in ("affine", *_BLOCK_MODES):
            raise LayoutError(f"[mlx] {name or 'config'}: mode {mode!r}; allowed: affine, {', '.join(_BLOCK_MODES)}")
        weight = want("mlx", tensors, "weight", name, (_U32,))
        scales = want("mlx", tensors, "scales", name)
        *lead, words = weight if len(weight) > 1 else (0, 0)
        if len(weight) < 2 or len(scales) < 2 or list(scales[:-1]) != lead:
            raise LayoutError(
                f"[mlx] {join(name, 'scales')} has shape {list(scales)}, {join(name, 'weight')} {list(weight)}; "
                "all axes but the last must agree"
            )
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
        bits, group = whole("mlx", config, "bits", name), whole("mlx", config, "group_size", name)
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
            only("mlx", tensors, ("weight", "scales", "biases"), name, "mode affine")
            want("mlx", tensors, "scales", name, FLOATS)
            want("mlx", tensors, "biases", name, FLOATS, scales, "as the scales")
            same = tensors["scales"].dtype == tensors["biases"].dtype
            return format_named(f"affine{bits}", group, scale_dtype=tensors["scales"].dtype.name if same else "float32")
        word, _, _, dtype = _BLOCK_MODES[mode]
        want("mlx", tensors, "scales", name, (U8, dtype))
        extra = ("global_scale",) if mode == "nvfp4" else ()
        only("mlx", tensors, ("weight", "scales", *extra), name, f"mode {mode}")
        if mode != "nvfp4":
            return format_named(word, group)
        if "global_scale" in tensors:
            want("mlx", tensors, "global_scale", name, (F32,), ())
            if len(scales) > 2:
                raise LayoutError(f"[mlx] {join(name, 'global_scale')} on a stack of shape {list(scales)}; one matrix has it")
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

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        fmt = q.format
        mode = self._mode(q)
        check_asked("mlx", q, config, self.config(q))
        if q.shape[-1] % fmt.group_size or q.shape[-1] * fmt.bits % 32:
            raise refuse("mlx", q, f"k = {q.shape[-1]} is not whole groups of {fmt.group_size} in whole 32-bit words")
        if "group_index" in q.parts:
            raise refuse("mlx", q, "MLX has no group index (act-order)")
        out: dict[str, Array] = {"weight": as_words(q.parts["codes"], _U32)}
        if mode == "affine":
            for suffix in ("scales", "biases"):
                kept = q.details if q.origin == "mlx" else {}
                out[suffix] = q.parts[suffix]
                if f"{suffix}_dtype" in kept:
                    narrow = held_exactly(q.parts[suffix], dtype_by_name(kept[f"{suffix}_dtype"]))
                    out[suffix] = q.parts[suffix] if narrow is None else restored(kept, f"{suffix}_bits", narrow)
            return out
        out["scales"] = named(q.parts["scales"], str(q.details.get("scales_dtype", "uint8")) if q.origin == "mlx" else "uint8")
        if fmt.global_op:
            if q.ndim > 2:
                raise refuse("mlx", q, "a stack of experts has no global scale in MLX")
            out["global_scale"] = q.parts["global_scale"]
        return out

    @staticmethod
    def _mode(q: QTensor) -> str:
        fmt = q.format
        if fmt.family == "affine":
            if fmt.group_size not in _AFFINE_GROUPS:
                raise refuse("mlx", q, f"groups of {fmt.group_size}; MLX has {', '.join(map(str, _AFFINE_GROUPS))}")
            return "affine"
        for mode, (word, _, group, _) in _BLOCK_MODES.items():
            levels = [{"global_scale": "amax"}, {"global_scale": "none"}] if mode == "nvfp4" else [{}]
            if any(fmt == format_named(word, group, **level) for level in levels):
                return mode
        raise refuse(
            "mlx", q, "MLX holds affine1 to affine8, mxfp4, mxfp8_e4m3 and nvfp4 (one level, or the global scale as amax)"
        )

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"group_size": q.format.group_size, "bits": q.format.bits, "mode": self._mode(q)}
