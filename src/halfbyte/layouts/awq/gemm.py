"""AWQ gemm: codes along n, eight to an int32, in an interleaved order.

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int32 | [k, n·bits/32] |
| `qzeros` | int32 | [G, n·bits/32], zero points as they are |
| `scales` | float16 | [G, n] |

Nibble i of a word, counted from the lowest, is the code of column [0, 2, 4, 6, 1, 3, 5, 7][i] of
its eight (`ORDER`), so codes 0 … 7 of eight columns make 0x75316420. Bytes of eight-bit files,
which vLLM reads, are those of columns [0, 2, 1, 3]. Source: AutoAWQ 0.2, by the files it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, LayoutError
from ...formats import format_named
from ...numerics import bits as stream
from ...numerics.exact import bfloat16
from ...numerics.transpose import transpose, transpose_nibbles
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import (
    Array,
    Config,
    Described,
    HasHeader,
    Holds,
    Layout,
    Tensors,
    check_requested,
    integer_of,
    label,
    require,
)
from ..common.integers import check_no_group_index, check_zero_range, integer_misfit, stored_zeros
from ..common.words import as_bytes, as_words
from ..quant_config import autoround
from ..quant_config.reader import SkipListReader
from ..quant_config.writer import ConfigFiles, DenseTensor, PackedModule, dense_modules, differing, most_common

I32 = np.dtype(np.int32)
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))
ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Column of each field of a word, lowest field first."""


def key_in(config: Config, transformers: str, autoawq: str) -> str:
    """The key under which a config gives a parameter: AutoAWQ's own where it is the only one, else
    transformers'.
    """
    return autoawq if config.get(transformers) is None and autoawq in config else transformers


def awq_bits(layout: str, config: Config, name: str, allowed: tuple[int, ...] = (4,)) -> int:
    """`bits` (or AutoAWQ's own `w_bit`) of a config, 4 when it says nothing. Raises LayoutError for
    another width than allowed.
    """
    bits = integer_of(layout, config, key_in(config, "bits", "w_bit"), name)
    bits = 4 if bits is None else bits
    if bits not in allowed:
        raise LayoutError(f"[{layout}] {name}: bits {bits!r}; allowed: {', '.join(map(str, allowed))}")
    return bits


def awq_group(layout: str, config: Config, name: str, k: int, groups: int | None) -> int:
    """`group_size` (or AutoAWQ's own `q_group_size`) of a config, checked against `groups`, the
    number of groups of the scales; None where padding hides it.
    """
    size = integer_of(layout, config, key_in(config, "group_size", "q_group_size"), name)
    if size is None:
        if not groups or k % groups:
            shapes = f"{k} inputs are not {groups} equal groups" if groups else "padded scales leave it open"
            raise LayoutError(
                f"[{layout}] {name}: the config has no group_size, and {shapes}; pass config= (--config) with group_size"
            )
        return k // groups
    if size != -1 and size < 1:
        raise LayoutError(f"[{layout}] {name}: group_size {size}; allowed: 1 or more, or -1 for the whole row")
    expected = min(k, 1) if size == -1 else -(-k // size)
    if groups is not None and expected != groups:
        raise LayoutError(
            f"[{layout}] {label(name, 'scales')} has {groups} groups; {k} inputs in groups of {size} are {expected}"
        )
    return size


class AWQConfig(SkipListReader):
    """AutoAWQ's config: one set of parameters, the layout under `version`, and
    `modules_to_not_convert`.
    """

    method = "awq"
    skip_keys = ("modules_to_not_convert",)
    consumed = (
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "version",
        "format",
        "zero_point",
        "checkpoint_format",
        "pack_dtype",
        "data_type",
    )
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        **autoround.WRITTEN,
        "which kernel runs it": (
            "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend", "use_exllama", "hidden_act",
        ),
        "how the quantizer searched": ("n_parallel_calib_samples", "max_calib_samples", "max_calib_seq_len", "true_sequential"),
        "notes of the writer": ("meta", "quantizer", "model_name_or_path", "dataset"),
        "GPTQ's keys, which mean nothing in AWQ": ("damp_percent", "desc_act", "static_groups", "sym", "lm_head", "method"),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        autoround.check_integers(raw, where)
        version = str(raw.get("version") or "gemm").lower()
        if "llm-awq" in (version, raw.get("format"), raw.get("checkpoint_format")):
            version = "gemv_fast"  # the order of llm-awq's second version
        self.layouts = (f"awq-{version}", "awq")
        given = {"bits": raw.get("bits", raw.get("w_bit")), "group_size": raw.get("group_size", raw.get("q_group_size"))}
        self._base = {**raw, **{k: v for k, v in given.items() if v is not None}, "version": version}

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "w_bit" in raw or "q_group_size" in raw or ("version" in raw and "zero_point" in raw)

    def parameters(self, module: str) -> dict[str, Any] | None:
        return None if super().parameters(module) is None else dict(self._base)


class AWQGemm(Layout):
    """AutoAWQ's gemm checkpoints."""

    name = "awq-gemm"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"awq": {}}
    producers = ("autoawq",)
    holds = Holds(("int4", "uint4", "int8", "uint8"), "matrices with one float scale a group and outputs that fill whole words")
    splits_stacks = one_format = True
    config_reader = AWQConfig
    required = ("qweight", "qzeros", "scales")
    parts: ClassVar[dict[str, str]] = {"qweight": "codes", "qzeros": "zeros"}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        bits = awq_bits(self.name, config, name, tuple(ORDER))
        groups, n = require(self.name, tensors, "scales", name, FLOATS, (None, None))
        if n * bits % 32:
            raise LayoutError(
                f"[awq-gemm] {label(name, 'scales')} has {n} columns; words hold {32 // bits} codes of {bits} bits each"
            )
        words, why = n * bits // 32, f"for {n} outputs of {bits} bits"
        k, _ = require(self.name, tensors, "qweight", name, (I32,), (None, words), why)
        require(self.name, tensors, "qzeros", name, (I32,), (groups, words), f"{why} in {groups} groups")
        size = awq_group(self.name, config, name, k, groups)
        return Described(format_named(f"uint{bits}", size, scale_dtype=tensors["scales"].dtype.name), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        words = tensors["qweight"]
        parts = {
            "codes": rows_of_words(words) if fmt.bits == 4 else stream.pack(deinterleave(words, fmt.bits).T, fmt.bits),
            "scales": transpose(tensors["scales"]),
            "zeros": _zeros(tensors, fmt.bits),
        }
        return QTensor(fmt, shape, parts, origin="autoawq", details={"layout": self.name}, name=name)

    def zero_points(self, tensors: Tensors, config: Config, name: str = "") -> Array:
        return _zeros(tensors, self.describe(tensors, config, name).format.bits)

    def unfilled(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = f"{shape[-2]} outputs; AWQ packs {32 // fmt.bits} of them a word"
        return why if shape[-2] * fmt.bits % 32 else ""

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = integer_misfit(fmt, shape, tuple(ORDER))
        if not why and shape[0] * fmt.bits % 32:
            why = f"{shape[0]} outputs are not whole words of {32 // fmt.bits} columns; write gptq or compressed-tensors"
        return why

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        check_no_group_index(self.name, q)
        bits, k = q.format.bits, q.shape[1]
        check_config(self.name, q, config)
        zeros = stored_zeros(q)
        check_zero_range(self.name, q, zeros, 0, (1 << bits) - 1)
        codes = q.parts["codes"]
        return {
            "qweight": words_of_rows(codes, k) if bits == 4 else interleave(stream.unpack(codes, bits, k).T, bits),
            "qzeros": interleave(zeros.T.astype(np.uint8), bits),
            "scales": transpose(q.parts["scales"]),
        }

    def config(self, q: QTensor) -> dict[str, Any]:
        return awq_config(q, self.name)

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization_config`: one width and group, and the modules that stay dense.
        CheckpointError where modules differ: AWQ has no per-module rules.
        """
        keys = ("bits", "group_size")
        base = most_common(packed, keys)
        others = differing(packed, base, keys)
        if others:
            p = others[0]
            raise CheckpointError(
                f"[convert] AWQ has one width and group size for all modules: most have {base}, {p.name} has "
                f"{ {k: p.params[k] for k in keys} } (and {len(others) - 1} more differ); name one (awq:uint4:g64), or write gptq"
            )
        config = {"quant_method": "awq", **base, "zero_point": True, "version": "gemm"}
        return ConfigFiles({"quantization_config": {**config, "modules_to_not_convert": dense_modules(dense) or None}})


def _zeros(tensors: Tensors, bits: int) -> NDArray[np.int16]:
    """Zero points [n, G]."""
    return np.ascontiguousarray(deinterleave(tensors["qzeros"], bits).T.astype(np.int16))


def awq_config(q: QTensor, layout: str) -> dict[str, Any]:
    """A quantization config in transformers' words for one of the AWQ layouts."""
    return {
        "quant_method": "awq",
        "bits": q.format.bits,
        "group_size": q.format.group_size,
        "zero_point": layout != "awq-marlin",
        "version": layout.removeprefix("awq-"),
    }


def check_config(layout: str, q: QTensor, config: Config) -> None:
    """LayoutError when the config names other bits or groups than q has."""
    bits, size = key_in(config, "bits", "w_bit"), key_in(config, "group_size", "q_group_size")
    check_requested(layout, q, config, {bits: q.format.bits, size: q.format.group_size})


def words_of_rows(rows: NDArray[np.uint8], k: int) -> NDArray[np.int32]:
    """Canonical rows of k nibbles [n, ceil(k/2)] -> words [k, n/8] in AWQ order."""
    return as_words(transpose_nibbles(rows, k, order=ORDER[4]))


def rows_of_words(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Words [k, n/8] in AWQ order -> canonical rows of nibbles [n, ceil(k/2)]. Inverse of
    `words_of_rows`.
    """
    return transpose_nibbles(as_bytes(words), 8 * words.shape[1], out_order=ORDER[4])


def deinterleave(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Words [r, n·bits/32] in AWQ order -> codes uint8 [r, n], a transposed view of contiguous [n,
    r].
    """
    order, per_byte, mask = ORDER[bits], 8 // bits, np.uint8((1 << bits) - 1)
    r, w = words.shape
    # Byte by byte along r, which is contiguous: a gather of fields takes 4 times as long (Zen 3).
    raw = as_bytes(np.ascontiguousarray(words.T)).reshape(w, r, 4)
    down = np.empty((w, len(order), r), np.uint8)
    for field, column in enumerate(order):
        byte, shift = raw[..., field // per_byte], np.uint8(field % per_byte * bits)
        down[:, column] = (byte >> shift) & mask
    return down.reshape(w * len(order), r).T


def interleave(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Codes [r, n] -> int32 words [r, n·bits/32] in AWQ order. Inverse of `deinterleave`; fastest
    for a transposed [n, r].
    """
    order, per_byte = ORDER[bits], 8 // bits
    r, n = codes.shape
    down = np.ascontiguousarray(codes.T).reshape(n // len(order), len(order), r)
    out = np.zeros((n // len(order), r, 4), np.uint8)
    for field, column in enumerate(order):
        out[..., field // per_byte] |= down[:, column] << np.uint8(field % per_byte * bits)
    return np.ascontiguousarray(as_words(out.reshape(n // len(order), r * 4)).T)
