"""GPTQ: codes down k in int32 words, v1 and v2 zero points, act-order, and GPTQModel's planar
words.

| tensor | dtype | shape | content |
|---|---|---|---|
| `qweight` | int32 | [k·bits/32, n] | column r has the codes of output r: a little-endian bit stream along k |
| `qzeros` | int32 | [G, n·bits/32] | zero points: such a stream along n |
| `scales` | float16 | [G, n] | |
| `g_idx` | int32 | [k] | group of each input; optional |

The config's `checkpoint_format` says how zero points are stored:

| word | stored | read |
|---|---|---|
| `gptq` (v1), AutoGPTQ | z − 1 | stored + 1 without a mask: 2^bits − 1 is read as 2^bits |
| `gptq` (v1), GPTQModel, 2, 4, 8 bits | the v2 word minus a word of ones | the word plus ones, wrapping |
| `gptq` (v1), GPTQModel, 3 bits | z − 1 modulo 2^bits | stored + 1 modulo 2^bits |
| `gptq_v2` | z | stored |
| `gptq_p` | z, planar | stored; per 32 codes, in both tensors, the words of the low plane come first, then the higher ones |

GPTQModel subtracts the ones from the whole word, so a zero point 0 borrows from the field above it;
adding the same word of ones restores all fields. `meta.quantizer` names GPTQModel in the files that
it wrote. With an empty `qzeros` every zero point is the middle code, 2^(bits−1). Words may be int8,
int16 or int64 (`pack_dtype`): the same bit stream in words of another width. 5, 6 and 7 bits are
`gptq_p` under every `checkpoint_format`. Source: files written by AutoGPTQ 0.7 and GPTQModel 7.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, LayoutError
from ..formats import format_named
from ..numerics import bits as stream
from ..numerics.exact import bfloat16
from ..numerics.transpose import transpose
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
    require,
)
from .common.integers import check_index, check_zero_range, integer_misfit, monotone, stored_zeros
from .common.words import (
    as_bytes,
    as_words,
    fields_of_words,
    recall,
    remember,
    stream_of_words,
    word_count,
    words_of_fields,
    words_of_stream,
)
from .quant_config import autoround
from .quant_config.module_rules import check_rule, covered, first_entry, regex_matches
from .quant_config.reader import ConfigReader
from .quant_config.writer import ConfigFiles, DenseTensor, PackedModule, dense_modules, differing, most_common

I32 = np.dtype(np.int32)
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))
BITS = (2, 3, 4, 5, 6, 7, 8)
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Widths of the bit planes of `gptq_p` words, low plane first."""
PLANAR_ONLY = (5, 6, 7)
"""Widths that are `gptq_p` under every label, zero points included: GPTQModel corrects the label,
for a whole checkpoint if one of its weights has such a width.
"""
FORMATS = {"gptq": (1, False), "gptq_v2": (2, False), "gptq_p": (2, True)}
"""checkpoint_format -> (version of the zero points, planar words)."""


PACK_DTYPES = ("int8", "int16", "int32", "int64")
"""`pack_dtype` of GPTQModel: the same bit stream cut into words of another width."""
_NO_ZERO = "v1 stores the zero point minus 1 and has no code for 0: write checkpoint_format gptq_v2"


class Variant(NamedTuple):
    """How one checkpoint writes its words.

    version   1 or 2, of the zero points
    planar    words hold bit planes
    writer    "autogptq" or "gptqmodel": they differ in v1 zero points out of range
    wordwise  v1 zero points came from subtracting ones from whole words, so that a borrow runs into
              the next field
    word      unsigned dtype of one word
    """

    version: int
    planar: bool
    writer: str
    wordwise: bool
    word: np.dtype[Any]


def variant(config: Config, bits: int) -> Variant:
    """The `Variant` a config names, for codes of `bits` bits. Raises LayoutError for an unknown
    checkpoint_format.
    """
    word = str(config.get("checkpoint_format") or "gptq").lower()
    if word not in FORMATS:
        raise LayoutError(
            f"[gptq] checkpoint_format {word!r}; read: {', '.join(FORMATS)}. Convert it with the tool that wrote it"
        )
    version, planar = FORMATS["gptq_p" if bits in PLANAR_ONLY else word]
    planar = planar and len(PLANES[bits]) > 1  # one plane is the ordinary stream
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    writer = "gptqmodel" if "gptqmodel" in str(quantizer).lower() else "autogptq"
    wordwise = version == 1 and writer == "gptqmodel" and bits in (2, 4, 8)
    packed = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if packed not in PACK_DTYPES:
        raise LayoutError(f"[gptq] pack_dtype {packed!r}; read: {', '.join(PACK_DTYPES)}")
    return Variant(version, planar, writer, wordwise, np.dtype(f"u{packed}"))


class GPTQConfig(ConfigReader):
    """AutoGPTQ's and GPTQModel's config. `dynamic` is an ordered list of rules: `-:regex` leaves a
    module dense, `+:regex` or `regex` gives it other parameters.
    """

    method = "gptq"
    methods = ("gptqmodel",)
    consumed = (
        "method", "bits", "group_size", "checkpoint_format", "format", "pack_dtype", "dynamic", "dynamic.**", "sym", "desc_act",
        "meta.quantizer", "meta.quantizer.**", "modules_in_block_to_quantize", "inside_layer_modules", "lm_head",
        "data_type",
    )  # fmt: skip
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        **autoround.WRITTEN,
        "how the quantizer searched": (
            "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "v2", "v2_alpha", "gptaq", "foem",
            "hyb_act", "act_group_aware", "failsafe", "fallback", "hessian", "mock_quantization", "smooth", "smoother", "process",
            "preprocessors",
        ),
        "what was quantized, and on which text": (
            "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "nsamples", "seqlen", "model_seqlen",
            "batch_size", "pad_token_id", "block_name_to_quantize", "module_name_preceding_first_block", "quantizer",
        ),
        "which kernel or device runs it": (
            "use_cuda_fp16", "disable_exllama", "use_exllama", "exllama_config", "backend", "max_input_length", "device",
            "cache_block_outputs", "is_marlin_format", "pack_impl", "parallel_packing", "offload_to_disk", "offload_to_disk_path",
            "vram_strategy", "moe", "gc_mode", "auto_forward_data_parallel", "wait_for_submodule_finalizers",
        ),
        "notes of the writer": ("meta",),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        autoround.check_integers(raw, where)
        self._base = {k: v for k, v in raw.items() if k != "dynamic"}
        if "checkpoint_format" not in raw and str(raw.get("format")) in FORMATS:
            self._base["checkpoint_format"] = raw["format"]
        self._block = self._listed()
        self._dynamic: dict[str, dict[str, Any] | Literal[False]] = {}
        for rule, entry in self._object("dynamic").items():
            if entry is not None and not isinstance(entry, dict):
                raise CheckpointError(f"[config] {where}: dynamic rule {rule!r} is {entry!r:.80}; wanted an object")
            check_rule(rule if rule[:2] in ("+:", "-:") else f"+:{rule}", where)
            self._dynamic[rule] = False if rule.startswith("-:") else {**self._base, **(entry or {})}

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "desc_act" in raw or "checkpoint_format" in raw

    def _listed(self) -> tuple[str, ...]:
        """Names of the quantized modules of a block, from a list or a list of lists; () when the
        config has none.
        """
        value = self.raw.get("modules_in_block_to_quantize") or self.raw.get("inside_layer_modules") or []
        lists = value if isinstance(value, list) else [value]
        names = [name for item in lists for name in (item if isinstance(item, list) else [item])]
        if not all(isinstance(n, str) for n in names):
            raise CheckpointError(
                f"[config] {self.where}: modules_in_block_to_quantize is {value!r:.80}; wanted names of modules"
            )
        return tuple(names)

    def common(self) -> dict[str, Any]:
        return dict(self._base)

    def parameters(self, module: str) -> dict[str, Any] | None:
        if self._block and "." in module and not covered(self._block, module):
            return None
        entry = first_entry(self._dynamic, module, _dynamic_rule)
        if entry is None:
            return dict(self._base)
        return None if entry is False else dict(entry)


def _dynamic_rule(rule: str, name: str) -> bool:
    return regex_matches(rule.removeprefix("+:").removeprefix("-:"), name)


class GPTQ(Layout):
    """AutoGPTQ's and GPTQModel's checkpoints."""

    name = "gptq"
    aliases: ClassVar[dict[str, dict[str, str]]] = {
        "gptq-v1": {"checkpoint_format": "gptq"},
        "gptq-v2": {"checkpoint_format": "gptq_v2"},
    }
    producers = ("autogptq", "gptqmodel")
    holds = Holds(
        tuple(f"{sign}int{b}" for b in (4, 8, 2, 3, 5, 6, 7) for sign in ("", "u")),
        "matrices with one float scale a group; 5 to 7 bits in whole 32s of inputs and outputs; v1 has no zero point 0",
    )
    splits_stacks = True
    config_reader = GPTQConfig
    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)
    parts: ClassVar[dict[str, str]] = {"qweight": "codes", "qzeros": "zeros", "g_idx": "group_index"}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        groups, n = require(self.name, tensors, "scales", name, FLOATS, (None, None))
        words = tuple(np.dtype(w) for w in PACK_DTYPES)
        columns = f"for the {n} columns of {label(name, 'scales')}"
        require(self.name, tensors, "qweight", name, words, (None, n), columns)
        itemsize = tensors["qweight"].dtype.itemsize
        rows = tensors["qweight"].shape[0] * itemsize // 4
        if tensors["qweight"].shape[0] * itemsize % 4:
            raise LayoutError(f"[gptq] {label(name, 'qweight')} has {tensors['qweight'].shape[0]} rows; words of 32 bits wanted")
        empty = self._empty_zeros(tensors, groups * n)
        width = 0
        if not empty:
            dtype = tensors["qweight"].dtype
            why = f"for the {groups} groups of {label(name, 'scales')}"
            width = require(self.name, tensors, "qzeros", name, (dtype,), (groups, None), why)[1] * itemsize // 4
        bits = integer_of(self.name, config, "bits", name)
        if bits is None and n and width and 32 * width % n == 0:
            bits = 32 * width // n
        if bits not in BITS:
            raise LayoutError(
                f"[gptq] {name}: bits {bits!r}; allowed: {', '.join(map(str, BITS))}, given in the quantization config"
            )
        if "g_idx" in tensors:
            (k,) = require(self.name, tensors, "g_idx", name, (I32,), (None,))
        elif 32 * rows % bits:
            raise LayoutError(
                f"[gptq] {label(name, 'qweight')} has {rows} rows of words; {bits}-bit codes fill a multiple of {bits} rows"
            )
        else:
            k = 32 * rows // bits
        planar = variant(config, bits).planar
        if itemsize != 4 and planar:
            raise LayoutError(f"[gptq] {label(name, 'qweight')} is {tensors['qweight'].dtype}; planar words are int32")
        count = self._words(k, bits, planar, name) * 4 // itemsize
        require(self.name, tensors, "qweight", name, (), (count, n), f"for {k} inputs of {bits} bits")
        if not empty:
            across = (groups, self._words(n, bits, planar, name) * 4 // itemsize)
            require(self.name, tensors, "qzeros", name, (), across, f"for {n} outputs of {bits} bits")
        size = integer_of(self.name, config, "group_size", name)
        if size is None:
            size = k // groups if groups and k % groups == 0 else -1
        if size != -1 and size < 1:
            raise LayoutError(f"[gptq] {name}: group_size {size}; allowed: 1 or more, or -1 for the whole row")
        word = f"int{bits}" if empty else f"uint{bits}"
        fmt = format_named(word, size, scale_dtype=tensors["scales"].dtype.name)
        if groups != fmt.groups(k):
            raise LayoutError(
                f"[gptq] {label(name, 'scales')} has {groups} groups; {k} inputs in groups of {size} are {fmt.groups(k)}"
            )
        return Described(fmt, (n, k))

    @staticmethod
    def _empty_zeros(tensors: Mapping[str, HasHeader], wanted: int) -> bool:
        """True when `qzeros` has no elements: all zero points are the middle code."""
        return "qzeros" in tensors and 0 in tensors["qzeros"].shape and wanted > 0

    @staticmethod
    def _words(count: int, bits: int, planar: bool, name: str) -> int:
        if planar and count % 32:
            raise LayoutError(f"[gptq] {name}: {count} codes of {bits} bits in planes; planar words hold whole 32s")
        return word_count(count, bits)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        how = self._variant(config, fmt.bits, tensors)
        details: dict[str, Any] = {"layout": self.name, "zeros": f"v{how.version} {how.writer}"}
        if how.word != np.uint32:
            details["pack_dtype"] = tensors["qweight"].dtype.name
        down = as_words(as_bytes(transpose(tensors["qweight"])))
        if how.planar:
            codes = stream.pack(codes_of_planes(down, fmt.bits), fmt.bits)
        else:
            codes, filling = stream_of_words(down, fmt.bits, k)
            remember(details, "filling.qweight", filling)
        parts: dict[str, Array] = {"codes": codes, "scales": transpose(tensors["scales"])}
        if fmt.zero == "int":
            words = as_words(as_bytes(tensors["qzeros"]))
            parts["zeros"] = transpose(self._read_zeros(words, fmt.bits, n, how, details))
        else:
            details["qzeros"] = list(tensors["qzeros"].shape)
        index = tensors.get("g_idx")
        if index is None:
            details["g_idx"] = "absent"
        else:
            check_index(self.name, label(name, "g_idx"), index, fmt.groups(k))
            if not np.array_equal(index, monotone(k, fmt.group_size)):
                parts["group_index"] = index
        return QTensor(fmt, (n, k), parts, origin=how.writer, details=details, name=name)

    @staticmethod
    def _variant(config: Config, bits: int, tensors: Mapping[str, HasHeader]) -> Variant:
        """`variant`, with the width of words as the file has it."""
        return variant(config, bits)._replace(word=np.dtype(f"u{tensors['qweight'].dtype.name}"))

    def zero_points(self, tensors: Tensors, config: Config, name: str = "") -> Array | None:
        fmt, (n, _) = self.describe(tensors, config, name)
        if fmt.zero != "int":
            return None
        how = self._variant(config, fmt.bits, tensors)
        return transpose(self._read_zeros(as_words(as_bytes(tensors["qzeros"])), fmt.bits, n, how, {}))

    @staticmethod
    def _read_zeros(words: Array, bits: int, n: int, how: Variant, details: dict[str, Any]) -> NDArray[np.int16]:
        if how.wordwise:
            words = (words.view(how.word) + _ones(bits, how.word)).view(np.int32)
        if how.planar:
            fields = codes_of_planes(words, bits)
        else:
            fields, filling = fields_of_words(words, bits, n)
            remember(details, "filling.qzeros", filling)
        zeros = fields.astype(np.int16)
        if how.version == 2 or how.wordwise:
            return zeros
        zeros += 1
        return zeros if how.writer == "autogptq" else zeros & np.int16((1 << bits) - 1)

    def checkpoint_params(self, given: Config, formats: Iterable[Format], usual_zeros: Callable[[], bool]) -> Config:
        """One `checkpoint_format` for all: planar beside a weight of 5, 6 or 7 bits, else v1, which
        every reader takes, where all zero points are usual ones, 2^(bits-1). v1 has no code for 0,
        and GPTQModel refuses asymmetric v1 files of any writer but itself.
        """
        stated, widths = given.get("checkpoint_format"), {fmt.bits for fmt in formats}
        planar = not widths.isdisjoint(PLANAR_ONLY)
        if stated == "gptq_v2" and planar and 3 in widths:  # readers take 3 bits beside 5 as planar
            stated = "gptq_p"
        return {**given, "checkpoint_format": stated or ("gptq_p" if planar else "gptq" if usual_zeros() else "gptq_v2")}

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        return integer_misfit(fmt, shape, BITS)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        fmt, (n, k) = q.format, q.shape
        check_requested(self.name, q, config, {"bits": fmt.bits, "group_size": fmt.group_size})
        own = self.own_details(q)
        how = variant({**config, "pack_dtype": own.get("pack_dtype", config.get("pack_dtype"))}, fmt.bits)
        if how.planar and (k % 32 or n % 32):
            raise cannot_hold(self.name, q, "planar words hold whole 32s of inputs and of outputs")
        if how.planar:
            down = planes_of_codes(stream.unpack(q.parts["codes"], fmt.bits, k), fmt.bits)
        else:
            nbytes = 4 * word_count(k, fmt.bits) - k * fmt.bits // 8
            down = words_of_stream(q.parts["codes"], fmt.bits, k, recall(own, "filling.qweight", (n, nbytes)))
        out: dict[str, Array] = {
            "qweight": transpose(down.view(f"i{how.word.itemsize}")),
            "qzeros": self._write_zeros(q, how, own).view(f"i{how.word.itemsize}"),
            "scales": transpose(q.parts["scales"]),
        }
        if "group_index" in q.parts:
            out["g_idx"] = q.parts["group_index"]
        elif own.get("g_idx") != "absent":
            out["g_idx"] = monotone(k, fmt.group_size)
        return out

    def _write_zeros(self, q: QTensor, how: Variant, own: Mapping[str, Any]) -> NDArray[np.int32]:
        bits, top = q.format.bits, (1 << q.format.bits) - 1
        if "qzeros" in own and q.format.zero != "int":
            return np.zeros(own["qzeros"], np.int32)
        zeros = stored_zeros(q)
        if how.version == 2:
            check_zero_range(
                self.name, q, zeros, 0, top, f"v1 (checkpoint_format gptq) as AutoGPTQ reads it holds 1 to {top + 1}"
            )
        elif how.writer == "autogptq":
            check_zero_range(self.name, q, zeros, 1, top + 1, _NO_ZERO)
        else:
            # GPTQModel's v1 words may wrap, which only a reader that checks `meta.quantizer`
            # undoes: only weights that came from such a file are written so.
            check_zero_range(self.name, q, zeros, 0 if own.get("zeros") == "v1 gptqmodel" else 1, top, _NO_ZERO)
        fields = transpose(zeros)
        if how.version == 1 and not how.wordwise:
            fields = (fields - 1) & np.int16(top)
        if how.planar:
            return planes_of_codes(fields.astype(np.uint8), bits)
        groups, n = fields.shape
        nbytes = 4 * word_count(n, bits) - n * bits // 8
        words = words_of_fields(fields, bits, recall(own, "filling.qzeros", (groups, nbytes)))
        if how.wordwise:
            words = (words.view(how.word) - _ones(bits, how.word)).view(np.int32)
        return words

    def config(self, q: QTensor) -> dict[str, Any]:
        """v2 zero points where v1 cannot store one of them, else v1, which all readers support."""
        self.check_fits(q)
        zeros = stored_zeros(q)
        middle = 1 << (q.format.bits - 1)
        v1 = not zeros.size or int(zeros.min()) > 0
        return {
            "quant_method": "gptq",
            "bits": q.format.bits,
            "group_size": q.format.group_size,
            "sym": bool((zeros == middle).all()),
            "desc_act": "group_index" in q.parts,
            **self.checkpoint_params({}, [q.format], lambda: v1),
        }

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization_config`, one width and group for most modules and `dynamic` rules for the
        others (the first match decides), and the same as quantize_config.json, which
        AutoGPTQ reads.
        """
        keys = ("bits", "group_size")
        planar = {p.name: p.params["bits"] for p in packed if p.params["bits"] in PLANAR_ONLY}
        other = next((p for p in packed if FORMATS[p.params["checkpoint_format"]][0] == 1 and p.name not in planar), None)
        if planar and other is not None:
            name, bits = next(iter(planar.items()))
            raise LayoutError(
                f"[gptq] {name} has {bits} bits and {other.name} {other.params['bits']}; beside 5, 6 or 7 bits v1 holds no other "
                "widths: write gptq or gptq-v2"
            )
        base = most_common(packed, keys)
        dynamic: dict[str, dict[str, Any]] = {}
        for p in differing(packed, base, keys):
            dynamic[f"+:^{re.escape(p.name)}$"] = {k: p.params[k] for k in keys}
        # Readers take the head as dense by default and never quantize embeddings.
        for name in dense_modules(dense):
            if name.rpartition(".")[2] != "lm_head":
                dynamic[f"-:^{re.escape(name)}$"] = {}
        config: dict[str, Any] = {
            "quant_method": "gptq", **base,
            "sym": all(p.params.get("sym") for p in packed), "desc_act": any(p.params.get("desc_act") for p in packed),
            "checkpoint_format": next((p.params["checkpoint_format"] for p in packed), "gptq"),
            "lm_head": any(p.name.rpartition(".")[2] == "lm_head" for p in packed),
            "pack_dtype": "int32", "meta": {"converter": "halfbyte"},
        }  # fmt: skip
        if dynamic:
            config["dynamic"] = dynamic
        return ConfigFiles({"quantization_config": config}, {"quantize_config.json": config})


def codes_of_planes(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Planar words [r, 32-code blocks · bits] -> codes uint8 [r, k]: each block has its low plane's
    words, then the higher planes'.
    """
    r = words.shape[0]
    blocks = words.shape[1] // bits
    grouped = words.reshape(r, blocks, bits)
    codes = np.zeros((r, blocks, 32), np.uint8)
    at = 0
    for plane in PLANES[bits]:
        codes |= stream.unpack(as_bytes(grouped[..., at : at + plane]), plane, 32) << np.uint8(at)
        at += plane
    return codes.reshape(r, 32 * blocks)


def planes_of_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Codes [r, k] -> planar int32 words [r, k·bits/32]. Inverse of `codes_of_planes`."""
    r, k = codes.shape
    grouped = codes.reshape(r, k // 32, 32)
    words, at = [], 0
    for plane in PLANES[bits]:
        part = (grouped >> np.uint8(at)) & np.uint8((1 << plane) - 1)
        words.append(as_words(stream.pack(part, plane)))
        at += plane
    return np.ascontiguousarray(np.concatenate(words, axis=-1).reshape(r, k // 32 * bits))


def _ones(bits: int, word: np.dtype[Any]) -> Any:
    """A word with 1 in each `bits`-wide field: 0x11111111 for 4 bits in 32."""
    return word.type(int(np.iinfo(word).max) // ((1 << bits) - 1))
