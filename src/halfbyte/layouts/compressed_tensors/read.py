"""compressed-tensors: packed integers, plain integers and floats, NVFP4 and the microscaled formats.

| config `format` | codes | scales | value |
|---|---|---|---|
| pack-quantized | `weight_packed` int32 [n, words], q + 2^(b−1) | `weight_scale` float | (q − z) · s |
| int-quantized, naive-quantized | `weight` int8 [n, k] | float | (q − z) · s |
| float-quantized, naive-quantized | `weight` float8 [n, k] | float | q · s |
| nvfp4-pack-quantized | `weight_packed` uint8 [n, k/2], low nibble even | E4M3 [n, k/16] | q · s / `weight_global_scale` |
| mxfp4-, mxfp6-pack-quantized | `weight_packed` uint8 [n, k·b/8], little-endian stream | E8M0 byte [n, k/32] | q · 2^(s − 127) |
| mxfp8-quantized | `weight` float8 [n, k] | E8M0 byte | the same |

`weight_scale` is [1] for a tensor, [n, 1] a channel, [n, G] groups, [⌈n/r⌉, ⌈k/c⌉] blocks. `weight_zero_point` of
pack-quantized groups and channels is packed along n like the weight, [words of n, G], else int8 in the scales' shape, both
signed; canonical zero points are z + 2^(b−1). `weight_shape` is the true (n, k), `weight_g_idx` (up to 0.17) the group of each
input, −1 for "in order". See `compressed_tensors_pack` for the words. Source: the files of versions 0.9 to 0.20.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...formats import format_named
from ...numerics import bits as stream
from ...numerics.exact import bfloat16
from ...numerics.transpose import turned
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, join, want, whole
from ..common.integers import check_index, monotone
from ..common.words import remember
from . import words
from .write import INTEGER, WORDS, group_config, scales_shape, write

I8, U8, I32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
E4M3, E5M2, E8M0 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))


READ = (None, "mixed-precision", *INTEGER, *dict.fromkeys(WORDS.values()))
"""`format` words of a config whose weights are read. Which one a module has, its dtypes say."""


def weight_args(config: Config) -> dict[str, Any]:
    """The `weights` arguments of a config group and its `format`, flat. `config` is a group, its `weights`, or a whole
    quantization config with a single group."""
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and len(groups) == 1:
        return {"format": config.get("format"), **weight_args(next(iter(groups.values())))}
    weights = config.get("weights")
    if isinstance(weights, Mapping):
        return {"format": config.get("format"), **weights}
    return dict(config)


class CompressedTensors(Layout):
    """compressed-tensors' checkpoints."""

    name = "compressed-tensors"
    required = ("weight_scale",)
    optional = ("weight_packed", "weight", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
    peek = ("weight_shape",)

    def matches(self, suffixes: Collection[str]) -> bool:
        return (
            "weight_scale" in suffixes
            and ("weight_packed" in suffixes or "weight" in suffixes)
            and "weight_scale_2" not in suffixes
        )

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        args = weight_args(config)
        if args.get("format") not in READ:
            known = ", ".join(str(f) for f in READ if f)
            raise LayoutError(f"[{self.name}] {name}: format {args['format']!r}; read: {known}")
        want(self.name, tensors, "weight_scale", name, (*FLOATS, E4M3, E8M0, U8))
        scale = tensors["weight_scale"]
        if "weight_packed" in tensors:
            want(self.name, tensors, "weight_packed", name, (I32, U8))
            if tensors["weight_packed"].dtype == I32:
                return self._describe_words(tensors, args, name)
            return self._describe_bytes(tensors, args, name)
        *lead, n, k = self._matrix(want(self.name, tensors, "weight", name, (I8, E4M3, E5M2)), "weight", name)
        dtype = tensors["weight"].dtype
        if scale.dtype in (U8, E8M0):
            word = {E4M3: "mxfp8_e4m3", E5M2: "mxfp8_e5m2"}.get(dtype)
            if word is None:
                raise LayoutError(f"[{self.name}] {join(name, 'weight')} is {dtype} under power-of-two scales; read: float8")
            fmt = format_named(word, whole(self.name, args, "group_size", name) or 32)
            want(self.name, tensors, "weight_scale", name, (), (*lead, n, fmt.groups(k)), f"for {k} inputs")
        elif dtype == I8:
            bits = whole(self.name, args, "num_bits", name) or 8
            fmt = self._scoped(f"{'u' if 'weight_zero_point' in tensors else ''}int{bits}", tensors, args, (*lead, n, k), name)
        else:
            fmt = self._scoped("fp8_e4m3" if dtype == E4M3 else "fp8_e5m2", tensors, args, (*lead, n, k), name)
        return Described(fmt, (*lead, n, k))

    def _describe_words(self, tensors: Mapping[str, HasHeader], args: Config, name: str) -> Described:
        """pack-quantized."""
        *lead, n, width = self._matrix(want(self.name, tensors, "weight_packed", name), "weight_packed", name)
        bits, size = whole(self.name, args, "num_bits", name), whole(self.name, args, "group_size", name)
        if bits is None or not 1 <= bits <= 8:
            raise LayoutError(
                f"[{self.name}] {name}: num_bits {bits!r}; packed words hold 1 to 8, given in the quantization config"
            )
        stated = tensors.get("weight_shape")
        if isinstance(stated, np.ndarray):
            shape = tuple(int(d) for d in stated.reshape(-1))
            if len(shape) != len(lead) + 2 or shape[:-1] != (*lead, n) or shape[-1] < 0:
                raise LayoutError(f"[{self.name}] {join(name, 'weight_shape')} is {list(shape)}; weight_packed has {n} rows")
            k = shape[-1]
        elif args.get("strategy") == "group" and size is not None and size > 0:
            k = math.prod(tensors["weight_scale"].shape[-1:]) * size
        else:
            k = 32 * width // bits
        if not words.packings(width, k, bits):
            dense, padded = (words.words_in(k, bits, p) for p in (words.DENSE, words.PADDED))
            raise LayoutError(
                f"[{self.name}] {join(name, 'weight_packed')} has {width} words a row; {k} codes of {bits} bits take {dense} "
                f"({padded} before version 0.19)"
            )
        fmt = self._scoped(f"{'u' if 'weight_zero_point' in tensors else ''}int{bits}", tensors, args, (*lead, n, k), name)
        return Described(fmt, (*lead, n, k))

    def _describe_bytes(self, tensors: Mapping[str, HasHeader], args: Config, name: str) -> Described:
        """NVFP4, MXFP4, MXFP6."""
        *lead, n, nbytes = self._matrix(want(self.name, tensors, "weight_packed", name), "weight_packed", name)
        scale = tensors["weight_scale"]
        groups = want(self.name, tensors, "weight_scale", name, (E4M3, E8M0, U8), (*lead, n, None), f"for {n} rows")[-1]
        if scale.dtype == E4M3:
            fmt, k = format_named("nvfp4", global_scale="divide" if "weight_global_scale" in tensors else "none"), 2 * nbytes
            if "weight_global_scale" in tensors:
                count = math.prod(want(self.name, tensors, "weight_global_scale", name, (np.dtype(np.float32),)))
                if count != math.prod(lead):
                    raise LayoutError(
                        f"[{self.name}] {join(name, 'weight_global_scale')} has {count} values; wanted {math.prod(lead)}"
                    )
        else:
            size = whole(self.name, args, "group_size", name) or 32
            bits = whole(self.name, args, "num_bits", name) or (8 * nbytes // (size * groups) if groups else 4)
            if bits not in (4, 6) or 8 * nbytes % bits:
                raise LayoutError(
                    f"[{self.name}] {join(name, 'weight_packed')} has {nbytes} bytes and {groups} scales a row; "
                    "MXFP4 or MXFP6 wanted"
                )
            fmt, k = format_named("mxfp4" if bits == 4 else "mxfp6_e2m3", size), 8 * nbytes // bits
        if groups != fmt.groups(k):
            raise LayoutError(
                f"[{self.name}] {join(name, 'weight_scale')} has {groups} scales a row; "
                f"{k} inputs in groups of {fmt.group_size} take {fmt.groups(k)}"
            )
        return Described(fmt, (*lead, n, k))

    def _matrix(self, shape: tuple[int, ...], suffix: str, name: str) -> tuple[int, ...]:
        if len(shape) not in (2, 3):
            raise LayoutError(f"[{self.name}] {join(name, suffix)} has shape {list(shape)}; a weight has 2 or 3 axes")
        return shape

    def _scoped(self, word: str, tensors: Mapping[str, HasHeader], args: Config, shape: tuple[int, ...], name: str) -> Format:
        """The format of float scales: a tensor, channels, groups or blocks, from the shape of the scales and the config."""
        *lead, n, k = shape
        got, strategy = want(self.name, tensors, "weight_scale", name, FLOATS), args.get("strategy")
        dtype = tensors["weight_scale"].dtype.name
        block, size = args.get("block_structure"), whole(self.name, args, "group_size", name)
        one = math.prod(got) == math.prod(lead) and (strategy == "tensor" or len(got) < 2 or (strategy is None and not lead))
        if strategy == "block":
            if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
                raise LayoutError(f"[{self.name}] {name}: block_structure {block!r}; wanted two positive sizes, rows and columns")
            fmt = format_named(word, block[1], scale_dtype=dtype, rows=block[0])
        elif one and k:
            return format_named(word, -1, scale_dtype=dtype, rows=-1)
        elif strategy == "channel" or (got[-1:] == (1,) and strategy != "group"):
            fmt = format_named(word, -1, scale_dtype=dtype)
        else:
            if size is None or size < 1:
                size = -(-k // got[-1]) if got and got[-1] and k else 1
            fmt = format_named(word, size, scale_dtype=dtype, **({"rows": -1} if got[:-1] == (1,) and n != 1 else {}))
        why = f"for a weight of {n} by {k} and {strategy} scales"
        want(self.name, tensors, "weight_scale", name, (), scales_shape(fmt, shape), why)
        return fmt

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        *lead, _, k = shape
        details: dict[str, Any] = {"layout": self.name}
        parts: dict[str, Array] = {}
        packing = words.DENSE
        if "weight_packed" not in tensors:
            weight = tensors["weight"]
            parts["codes"] = weight.view(np.uint8) if weight.dtype != I8 else self._codes_of_int8(weight, fmt.bits, name)
            if weight.dtype == I8:
                details["format"] = "int-quantized"
        elif tensors["weight_packed"].dtype == U8:
            parts["codes"] = tensors["weight_packed"]
        else:
            packed = tensors["weight_packed"]
            possible = words.packings(packed.shape[-1], k, fmt.bits)
            packing = possible[0] if len(possible) == 1 else words.decide(packed, fmt.bits, k, possible)
            details["packing"] = packing
            parts["codes"], unused = words.codes_of_words(packed, fmt.bits, k, packing)
            remember(details, "unused.weight_packed", unused)
            details["weight_shape"] = tensors["weight_shape"].dtype.name if "weight_shape" in tensors else "absent"
        scale = tensors["weight_scale"]
        if scale.shape != scales_shape(fmt, shape):
            details["scale_shape"] = list(scale.shape)
        if scale.dtype == E8M0:
            details["scale_dtype"] = E8M0.name
        parts["scales"] = (scale if fmt.float_scale else scale.view(np.uint8)).reshape(scales_shape(fmt, shape))
        if fmt.global_op:
            details["global_shape"] = list(tensors["weight_global_scale"].shape)
            parts["global_scale"] = tensors["weight_global_scale"].reshape(tuple(lead))
        if "weight_zero_point" in tensors:
            self._read_zeros(tensors["weight_zero_point"], fmt, shape, packing, parts, details, name)
        if "weight_g_idx" in tensors:
            want(self.name, tensors, "weight_g_idx", name, (I32,), (k,), f"for {k} inputs")
            self._read_index(tensors["weight_g_idx"], fmt, k, parts, details, name)
        return QTensor(fmt, shape, parts, origin=self.name, details=details, name=name)

    def _codes_of_int8(self, weight: NDArray[np.int8], bits: int, name: str) -> NDArray[np.uint8]:
        half = 1 << (bits - 1)
        if bits < 8 and weight.size and (int(weight.min()) < -half or int(weight.max()) >= half):
            raise LayoutError(
                f"[{self.name}] {join(name, 'weight')} runs from {weight.min()} to {weight.max()}; "
                f"{bits} bits hold {-half} to {half - 1}"
            )
        return stream.pack((weight.view(np.uint8) + np.uint8(half)), bits)

    def _read_zeros(
        self,
        zeros: Array,
        fmt: Format,
        shape: tuple[int, ...],
        packing: str,
        parts: dict[str, Array],
        details: dict[str, Any],
        name: str,
    ) -> None:
        *lead, n, _ = shape
        want_shape, half = scales_shape(fmt, shape), 1 << (fmt.bits - 1)
        where = join(name, "weight_zero_point")
        if fmt.zero != "int":
            if zeros.view(np.uint8).any():
                raise LayoutError(f"[{self.name}] {where} is {zeros.dtype} and not zero; a float weight has no zero point")
            details["zero_point"] = [zeros.dtype.name, list(zeros.shape)]
        elif zeros.dtype == I32 and "packing" in details and fmt.grouping == "row":
            groups = want_shape[-1]
            wanted = (*lead, words.words_in(n, fmt.bits, packing), groups)
            if zeros.shape != wanted:
                raise LayoutError(
                    f"[{self.name}] {where} has shape {list(zeros.shape)}; wanted {list(wanted)}, "
                    f"{n} codes of {fmt.bits} bits packed along n"
                )
            down = turned(zeros)
            codes, unused = words.codes_of_words(down, fmt.bits, n, packing)
            remember(details, "unused.weight_zero_point", unused)
            parts["zeros"] = turned(stream.unpack(codes, fmt.bits, n)).astype(np.int16)
        elif zeros.dtype.kind == "i" and math.prod(zeros.shape) == math.prod(want_shape):
            if zeros.size and max(-int(zeros.min()), int(zeros.max())) > 32767 - half:
                raise LayoutError(f"[{self.name}] {where} runs from {zeros.min()} to {zeros.max()}; zero points take 16 bits")
            details["zero_point"] = [zeros.dtype.name, list(zeros.shape)]
            parts["zeros"] = (zeros.astype(np.int16) + np.int16(half)).reshape(want_shape)
        else:
            raise LayoutError(
                f"[{self.name}] {where} is {zeros.dtype} {list(zeros.shape)}; "
                f"wanted one signed integer a scale, {list(want_shape)}"
            )

    def _read_index(self, index: Array, fmt: Format, k: int, parts: dict[str, Array], details: dict[str, Any], name: str) -> None:
        if (index == -1).any():
            # Never filled in by the producer, whose decoder then takes the groups in order.
            details["g_idx"] = "unset"
            remember(details, "g_idx values", None if (index == -1).all() else index)
            return
        check_index(self.name, join(name, "weight_g_idx"), index, fmt.groups(k))
        if np.array_equal(index, monotone(k, fmt.group_size)):
            details["g_idx"] = "monotone"
        elif fmt.grouping != "row":
            raise LayoutError(f"[{self.name}] {join(name, 'weight_g_idx')} reorders groups of {fmt}; only groups of a row can be")
        else:
            parts["group_index"] = index

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        return write(self.name, q, weight_args(config), self.remembered(q))

    def config(self, q: QTensor) -> dict[str, Any]:
        return group_config(self.name, q, self.remembered(q))
