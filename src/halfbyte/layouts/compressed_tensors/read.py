"""compressed-tensors: packed integers, plain integers and floats, NVFP4 and the microscaled
formats.

| config `format` | codes | scales | value |
|---|---|---|---|
| pack-quantized | `weight_packed` int32 [n, words], q + 2^(b−1) | `weight_scale` float | (q − z) · s |
| int-quantized, naive-quantized | `weight` int8 [n, k] | float | (q − z) · s |
| float-quantized, naive-quantized | `weight` float8 [n, k] | float | q · s |
| nvfp4-pack-quantized | `weight_packed` uint8 [n, k/2], low nibble even | E4M3 [n, k/16] | q · s / `weight_global_scale` |
| mxfp4-, mxfp6-pack-quantized | `weight_packed` uint8 [n, k·b/8], little-endian stream | E8M0 byte [n, k/32] | q · 2^(s − 127) |
| mxfp8-quantized | `weight` float8 [n, k] | E8M0 byte | the same |

`weight_scale` is [1] for a tensor, [n, 1] a channel, [n, G] groups, [⌈n/r⌉, ⌈k/c⌉] blocks.
`weight_zero_point` of pack-quantized groups and channels is packed along n like the weight, [words
of n, G], else int8 in the scales' shape, both signed; canonical zero points are z + 2^(b−1).
`weight_shape` is the true (n, k), `weight_g_idx` (up to 0.17) the group of each input, −1 for "in
order". See `words.py` for the words. Source: the files of versions 0.9 to 0.20.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, LayoutError, UnsupportedError
from ...formats import format_named
from ...numerics import bits as stream
from ...numerics.exact import bfloat16
from ...numerics.transpose import transpose
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, integer_of, label, require
from ..claims import PARAMETERS
from ..common.integers import check_index, monotone
from ..common.words import remember
from ..quant_config.module_rules import check_rule, covered, first_entry, lookup, rule_matches
from ..quant_config.reader import ConfigReader, Transform
from ..quant_config.writer import EMBEDDINGS, ConfigFiles, DenseTensor, PackedModule, dense_modules
from . import words
from .transforms import transforms_of
from .write import FLOAT8, INTEGER, WORDS, group_config, scales_shape, write, write_misfit

I8, U8, I32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
E4M3, E5M2, E8M0 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))


T = TypeVar("T")

SPARSITY = (None, "dense", "sparse-24-bitmask", "sparse-bitmask")
"""`format` words of `sparsity_config` that are read; which weights are sparse, their tensors say.
"""
READ = (None, "mixed-precision", *INTEGER, *dict.fromkeys(WORDS.values()))
"""`format` words of a config whose weights are read. Which one a module has, its dtypes say."""


def weight_args(config: Config) -> dict[str, Any]:
    """The `weights` arguments of a config group and its `format`, flat. `config` is a group, its
    `weights`, or a whole quantization config with a single group.
    """
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if isinstance(group, Mapping):
        return {"format": config.get("format"), **weight_args(group)}
    weights = config.get("weights")
    if isinstance(weights, Mapping):
        return {"format": config.get("format"), **weights}
    return dict(config)


class CompressedTensorsConfig(ConfigReader):
    """compressed-tensors' config: `config_groups`, each with `targets` (a module's name, `re:` and
    a pattern, or a class) and `weights`; `ignore`.
    """

    method = "compressed-tensors"
    methods = ("sparseml",)
    consumed = (
        "format", "ignore", "sparsity_config.format", "config_groups.*.targets", "config_groups.*.format",
        *(f"config_groups.*.weights.{key}" for key in (
            "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder", "scale_dtype", "zp_dtype",
        )),
        *(f"transform_config.config_groups.*.{key}" for key in ("type", "apply", "head_dim", "randomize")),
    )  # fmt: skip
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized when the model runs": (
            "kv_cache_scheme",
            "config_groups.*.input_activations",
            "config_groups.*.output_activations",
        ),
        "how the quantizer searched": (
            "config_groups.*.weights.observer",
            "config_groups.*.weights.observer_kwargs",
            "config_groups.*.weights.dynamic",
        ),
        "how transforms are computed": (
            "transform_config.config_groups.*.precision",
            "transform_config.config_groups.*.requires_grad",
        ),
        "which weights the writer made sparse; their tensors show it": (
            *(
                f"sparsity_config.{key}"
                for key in (
                    "targets",
                    "ignore",
                    "global_sparsity",
                    "sparsity_structure",
                    "registry_requires_subclass",
                )
            ),
            "moe_sparsity_config",
        ),
        "notes of the writer": ("quantization_status", "global_compression_ratio", "version", "run_compressed", "provider"),
    }

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._transforms = transforms_of(self._object("transform_config").get("config_groups") or {}, where)
        sparsity = self._object("sparsity_config").get("format")
        if sparsity not in SPARSITY:
            raise UnsupportedError(
                f"[config] {where}: sparsity_config has format {sparsity!r:.80}, which is not read; read: "
                f"{', '.join(word for word in SPARSITY if word)}. Save the model without sparsity compression"
            )
        # Wrappers of a vision tower put `.linear` behind a name that its tensors may not have.
        ignore = self._names("ignore")
        self._ignore = (*ignore, *(name.removesuffix(".linear") for name in ignore if name.endswith(".linear")))
        self._named: dict[str, dict[str, Any] | bool] = {}
        self._classes: dict[str, dict[str, Any] | bool] = {}
        for group_name, group in self._object("config_groups").items():
            targets = group.get("targets") if isinstance(group, dict) else None
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise CheckpointError(
                    f"[config] {where}: config_groups {group_name!r} has targets {targets!r:.80}; wanted a list of names"
                )
            if weights is not None and not isinstance(weights, dict):
                raise CheckpointError(
                    f"[config] {where}: config_groups {group_name!r} has weights {weights!r:.80}; wanted an object"
                )
            params: dict[str, Any] | bool = (
                False if weights is None else {**weights, "format": group.get("format") or raw.get("format")}
            )
            for target in (check_rule(t, where) for t in targets):
                is_class = target[:1].isupper() and "." not in target
                (self._classes if is_class else self._named).setdefault(target, params)

    def transforms(self, module: str) -> tuple[Transform, ...]:
        return tuple(entry.transform for entry in self._transforms if entry.covers(module))

    @property
    def transform_groups(self) -> tuple[str, ...]:
        groups = self._object("transform_config").get("config_groups") or {}
        return tuple(groups)

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "config_groups" in raw and "quant_algo" not in raw

    def parameters(self, module: str) -> dict[str, Any] | None:
        if covered(self._ignore, module):
            return None
        params = lookup(self._named, module)
        if params is None:
            params = first_entry(self._named, module, rule_matches)
        if params is None:
            # A file does not say what class a module had: embeddings by their name, everything else
            # is a Linear.
            embedding = module.rpartition(".")[2] in EMBEDDINGS
            order = ("Embedding", "Linear") if embedding else ("Linear", *self._classes)
            params = next((self._classes[c] for c in order if c in self._classes), None)
        return dict(params) if isinstance(params, dict) else None


class CompressedTensors(Layout):
    """compressed-tensors' checkpoints."""

    name = "compressed-tensors"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"ct": {}}
    codec_aliases: ClassVar[dict[str, str]] = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "fp8": "fp8_e4m3"}
    producers = ("compressed-tensors",)
    holds: ClassVar[Holds | None] = Holds(
        (
            *(f"{sign}int{b}" for b in (4, 8, 2, 3, 5, 6, 7, 1) for sign in ("", "u")),
            "nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3", "fp8_e5m2",
        ),
        "matrices and stacks; float scales a tensor, channel, group or block; a global scale divides",
        levels=("divide",),
    )  # fmt: skip
    config_reader = CompressedTensorsConfig
    required: ClassVar[tuple[str, ...]] = ("weight_scale",)
    optional: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight",
        "weight_shape",
        "weight_zero_point",
        "weight_global_scale",
        "weight_g_idx",
    )
    peek = ("weight_shape",)
    parts: ClassVar[dict[str, str]] = {
        "weight_scale": "scales",
        "weight_packed": "codes",
        "weight": "codes",
        "weight_shape": PARAMETERS,
        "weight_zero_point": "zeros",
        "weight_global_scale": "global_scale",
        "weight_g_idx": "group_index",
    }
    harmless: ClassVar[dict[str, str]] = {
        "input_scale": "scale of the activations", "input_zero_point": "zero point of the activations",
        "input_global_scale": "global scale of the activations", "output_scale": "scale of the outputs",
        "output_zero_point": "zero point of the outputs", "k_scale": "scale of the key cache",
        "v_scale": "scale of the value cache", "k_zero_point": "zero point of the key cache",
        "v_zero_point": "zero point of the value cache",
    }  # fmt: skip

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
        require(self.name, tensors, "weight_scale", name, (*FLOATS, E4M3, E8M0, U8))
        self._check_siblings(tensors, name)
        described = self._described(tensors, args, name)
        word, fmt = args.get("format"), described.format
        fitting = INTEGER if fmt.family == "integer" else (WORDS.get(fmt.name), "naive-quantized")
        if word not in (None, "mixed-precision", *fitting):
            words = ", ".join(str(w) for w in fitting if w)
            raise LayoutError(
                f"[{self.name}] {name or 'weight'} is {fmt} by its tensors, and the config's format is {word}; wanted {words}"
            )
        if "weight_global_scale" in tensors and not fmt.global_op:
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_global_scale')} is there, and {fmt} has no global scale; wanted "
                "nvfp4, or no such tensor"
            )
        stated = tensors.get("weight_shape")
        sizes = stated.reshape(-1).tolist() if isinstance(stated, np.ndarray) else list(described.shape)
        if sizes != list(described.shape):
            where = label(name, "weight_shape")
            raise LayoutError(f"[{self.name}] {where} is {sizes}; the tensors are {list(described.shape)}")
        return described

    def _check_siblings(self, tensors: Mapping[str, HasHeader], name: str) -> None:
        """LayoutError for tensors of which only one can be the weight's."""
        if "weight" in tensors and "weight_packed" in tensors:
            both = f"{label(name, 'weight')} and {label(name, 'weight_packed')}"
            raise LayoutError(f"[{self.name}] {both} are both there; one of them is the weight")

    def _described(self, tensors: Mapping[str, HasHeader], args: Config, name: str) -> Described:
        scale = tensors["weight_scale"]
        if "weight_packed" in tensors:
            require(self.name, tensors, "weight_packed", name, (I32, U8))
            if tensors["weight_packed"].dtype == I32:
                return self._describe_words(tensors, args, name)
            return self._describe_bytes(tensors, args, name)
        *lead, n, k = self._matrix(require(self.name, tensors, "weight", name, (I8, E4M3, E5M2)), "weight", name)
        dtype = tensors["weight"].dtype
        if scale.dtype in (U8, E8M0):
            word = {E4M3: "mxfp8_e4m3", E5M2: "mxfp8_e5m2"}.get(dtype)
            if word is None:
                raise LayoutError(f"[{self.name}] {label(name, 'weight')} is {dtype} under power-of-two scales; read: float8")
            fmt = format_named(word, integer_of(self.name, args, "group_size", name) or 32)
            require(self.name, tensors, "weight_scale", name, (), (*lead, n, fmt.groups(k)), f"for {k} inputs")
        elif dtype == I8:
            bits = integer_of(self.name, args, "num_bits", name) or 8
            fmt = self._scoped(self._integers(bits, tensors, args, name), tensors, args, (*lead, n, k), name)
        else:
            fmt = self._scoped("fp8_e4m3" if dtype == E4M3 else "fp8_e5m2", tensors, args, (*lead, n, k), name)
        return Described(fmt, (*lead, n, k))

    def _describe_words(self, tensors: Mapping[str, HasHeader], args: Config, name: str) -> Described:
        """pack-quantized."""
        *lead, n, width = self._matrix(require(self.name, tensors, "weight_packed", name), "weight_packed", name)
        bits, size = integer_of(self.name, args, "num_bits", name), integer_of(self.name, args, "group_size", name)
        if bits is None or not 1 <= bits <= 8:
            raise LayoutError(
                f"[{self.name}] {name}: num_bits {bits!r}; packed words hold 1 to 8, given in the quantization config"
            )
        stated = tensors.get("weight_shape")
        if isinstance(stated, np.ndarray):
            shape = tuple(int(d) for d in stated.reshape(-1))
            if len(shape) != len(lead) + 2 or shape[:-1] != (*lead, n) or shape[-1] < 0:
                raise LayoutError(f"[{self.name}] {label(name, 'weight_shape')} is {list(shape)}; weight_packed has {n} rows")
            k = shape[-1]
        elif args.get("strategy") == "group" and size is not None and size > 0:
            k = math.prod(tensors["weight_scale"].shape[-1:]) * size
        else:
            k = 32 * width // bits
        if not words.packings(width, k, bits):
            dense, padded = (words.words_in(k, bits, p) for p in (words.DENSE, words.PADDED))
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_packed')} has {width} words a row; {k} codes of {bits} bits take {dense} "
                f"({padded} before version 0.19)"
            )
        fmt = self._scoped(self._integers(bits, tensors, args, name), tensors, args, (*lead, n, k), name)
        return Described(fmt, (*lead, n, k))

    def _describe_bytes(self, tensors: Mapping[str, HasHeader], args: Config, name: str) -> Described:
        """NVFP4, MXFP4, MXFP6."""
        *lead, n, nbytes = self._matrix(require(self.name, tensors, "weight_packed", name), "weight_packed", name)
        scale = tensors["weight_scale"]
        groups = require(self.name, tensors, "weight_scale", name, (E4M3, E8M0, U8), (*lead, n, None), f"for {n} rows")[-1]
        if scale.dtype == E4M3:
            fmt, k = format_named("nvfp4", global_scale="divide"), 2 * nbytes
        else:
            size = integer_of(self.name, args, "group_size", name) or 32
            bits = integer_of(self.name, args, "num_bits", name) or (8 * nbytes // (size * groups) if groups else 4)
            if bits not in (4, 6) or 8 * nbytes % bits:
                raise LayoutError(
                    f"[{self.name}] {label(name, 'weight_packed')} has {nbytes} bytes and {groups} scales a row; "
                    "MXFP4 or MXFP6 wanted"
                )
            fmt, k = format_named("mxfp4" if bits == 4 else "mxfp6_e2m3", size), 8 * nbytes // bits
        if groups != fmt.groups(k):
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_scale')} has {groups} scales a row; "
                f"{k} inputs in groups of {fmt.group_size} take {fmt.groups(k)}"
            )
        if fmt.global_op:  # no writer leaves it out, and the block scales alone give other values
            count = math.prod(require(self.name, tensors, "weight_global_scale", name, (np.dtype(np.float32),)))
            if count != math.prod(lead):
                raise LayoutError(
                    f"[{self.name}] {label(name, 'weight_global_scale')} has {count} values; wanted {math.prod(lead)}"
                )
        return Described(fmt, (*lead, n, k))

    def _matrix(self, shape: tuple[int, ...], suffix: str, name: str) -> tuple[int, ...]:
        if len(shape) not in (2, 3):
            raise LayoutError(f"[{self.name}] {label(name, suffix)} has shape {list(shape)}; a weight has 2 or 3 axes")
        return shape

    def _integers(self, bits: int, tensors: Mapping[str, HasHeader], args: Config, name: str) -> str:
        """The codec word of integer codes. LayoutError where the config says that they have zero
        points and there are none: without them other values would be read.
        """
        zeros = "weight_zero_point" in tensors
        if not zeros and args.get("symmetric") is False:
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_zero_point')} is missing; the config says symmetric: false, whose codes "
                "have zero points"
            )
        return f"{'u' if zeros else ''}int{bits}"

    def _scoped(self, word: str, tensors: Mapping[str, HasHeader], args: Config, shape: tuple[int, ...], name: str) -> Format:
        """The format of float scales: a tensor, channels, groups or blocks, from the shape of the
        scales and the config.
        """
        *lead, n, k = shape
        got, strategy = require(self.name, tensors, "weight_scale", name, FLOATS), args.get("strategy")
        dtype = tensors["weight_scale"].dtype.name
        block, size = args.get("block_structure"), integer_of(self.name, args, "group_size", name)
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
        require(self.name, tensors, "weight_scale", name, (), scales_shape(fmt, shape), why)
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
            require(self.name, tensors, "weight_g_idx", name, (I32,), (k,), f"for {k} inputs")
            self._read_index(tensors["weight_g_idx"], fmt, k, parts, details, name)
        return QTensor(fmt, shape, parts, origin=self.name, details=details, name=name)

    def _codes_of_int8(self, weight: NDArray[np.int8], bits: int, name: str) -> NDArray[np.uint8]:
        half = 1 << (bits - 1)
        if weight.size and (int(weight.min()) < -half or int(weight.max()) >= half):
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight')} runs from {weight.min()} to {weight.max()}; "
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
        where = label(name, "weight_zero_point")
        if fmt.zero != "int":
            if any(zeros.tobytes()):
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
            down = transpose(zeros)
            codes, unused = words.codes_of_words(down, fmt.bits, n, packing)
            remember(details, "unused.weight_zero_point", unused)
            parts["zeros"] = transpose(stream.unpack(codes, fmt.bits, n)).astype(np.int16)
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
        check_index(self.name, label(name, "weight_g_idx"), index, fmt.groups(k))
        if np.array_equal(index, monotone(k, fmt.group_size)):
            details["g_idx"] = "monotone"
        elif fmt.grouping != "row":
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_g_idx')} reorders groups of {fmt}; only groups of a row can be"
            )
        else:
            parts["group_index"] = index

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        return write(self.name, q, weight_args(config), self.own_details(q))

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        return write_misfit(fmt, shape)

    def config(self, q: QTensor) -> dict[str, Any]:
        return group_config(self.name, q, self.own_details(q))

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization_config`: one group that takes every Linear, or a group for each set of
        arguments that names its modules.
        """
        groups: dict[str, list[PackedModule]] = {}
        for p in packed:
            groups.setdefault(json.dumps(p.params, sort_keys=True), []).append(p)
        embedding = any(p.name.rpartition(".")[2] in EMBEDDINGS for p in packed)
        config_groups: dict[str, Any] = {}
        for number, members in enumerate(groups.values()):
            args = members[0].params
            targets = ["Linear"] if len(groups) == 1 and not embedding else [p.name for p in members]
            config_groups[f"group_{number}"] = {
                "targets": targets,
                "format": args["format"],
                "weights": args["weights"],
                "input_activations": None,
                "output_activations": None,
            }
        formats = {g["format"] for g in config_groups.values()}
        config = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": config_groups,
            "ignore": dense_modules(dense),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
        return ConfigFiles({"quantization_config": config})


class CompressedTensorsStack(CompressedTensors):
    """A stack of experts that keeps its parameter's name: `gate_up_proj_packed`,
    `gate_up_proj_scale`, for all experts.
    """

    name = "compressed-tensors-stack"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    holds = None
    required = ("packed", "scale")
    optional = ("shape", "zero_point", "global_scale", "g_idx")
    peek = ("shape",)
    parts: ClassVar[dict[str, str]] = {s: CompressedTensors.parts[f"weight_{s}"] for s in (*required, *optional)}
    harmless: ClassVar[dict[str, str]] = {}
    separator = "_"

    def matches(self, suffixes: Collection[str]) -> bool:
        return all(s in suffixes for s in self.required)

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        return self.matches(headers) and headers["packed"].dtype in (I32, U8) and len(headers["packed"].shape) == 3

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        return super().describe(_prefixed(tensors), config, name)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        return super().unpack(_prefixed(tensors), config, name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if len(shape) != 3 or fmt.name in FLOAT8:
            return "this layout holds stacks (e, n, k) of packed codes of at most 6 bits, or integers"
        return super().misfit(fmt, shape)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        return {s.removeprefix("weight_"): t for s, t in super().pack(q, config).items()}

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        return Layout.write_config(self, packed, dense)

    @property
    def writes_checkpoints(self) -> bool:
        return False


def _prefixed(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors under the suffixes of a module of its own (`weight_packed`), whichever they have."""
    return {s if s.startswith("weight_") else f"weight_{s}": t for s, t in tensors.items()}
