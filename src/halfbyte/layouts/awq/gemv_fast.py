"""AWQ gemv_fast: int16 words over four rows, scales and −scale·zero down k.

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int16 | [n/4, k] |
| `scales` | float16 or bfloat16 | [8·W, n], W as for gemv |
| `qzeros`, or `scaled_zeros` | that of the scales | [8·W, n], −scale·zero rounded |

Word (i, c), nibble t: with p = 4(c mod 64) + t and j = p mod 64, row 4i + p/64, column 64(c/64) +
32(j/32) + 8(j mod 4) + 2((j mod 32)/8) + (j mod 8)/4, divisions rounding down. The integer zero
point is round(−qzeros/scale); a stored number that is an epsilon or two beside −scale·zero is kept,
and one that is farther from every integer is an error. AutoAWQ calls the last tensor `qzeros`;
llm-awq, whose second version the order is, `scaled_zeros`. Source: AutoAWQ 0.2 and llm-awq, by the
files they write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...formats import format_named
from ...formats.rounding.policy import float_info
from ...numerics import bits as stream
from ...numerics.exact import bfloat16
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, label, require
from ..common.integers import check_no_group_index, integer_misfit, stored_zeros
from ..common.words import as_bytes, as_words, recall, remember
from .gemm import AWQConfig, awq_bits, awq_config, awq_group, check_config
from .gemv import zeros_width

FLOATS, I16 = (np.dtype(np.float16), bfloat16), np.dtype(np.int16)
ZEROS, LLM_AWQ_ZEROS = "qzeros", "scaled_zeros"
"""The name of −scale·zero in AutoAWQ's files and in llm-awq's."""

_J = np.arange(64)
COLUMN = 32 * (_J // 32) + 8 * (_J % 4) + 2 * ((_J % 32) // 8) + (_J % 8) // 4
"""Column within 64 of nibble j of a row's 64."""


class AWQGemvFast(Layout):
    """AutoAWQ's gemv_fast checkpoints, and llm-awq's of its second version."""

    name = "awq-gemv_fast"
    producers = ("autoawq",)
    config_reader = AWQConfig
    required = ("qweight", ZEROS, "scales")
    optional = (LLM_AWQ_ZEROS,)
    parts: ClassVar[dict[str, str]] = {"qweight": "codes", ZEROS: "zeros", LLM_AWQ_ZEROS: "zeros"}

    def matches(self, suffixes: Collection[str]) -> bool:
        return all(s in suffixes for s in ("qweight", zeros_name(suffixes), "scales"))

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        awq_bits(self.name, config, name)
        if ZEROS in tensors and LLM_AWQ_ZEROS in tensors:
            raise LayoutError(
                f"[awq-gemv_fast] {label(name, ZEROS)} and {label(name, LLM_AWQ_ZEROS)} are there; a weight has one"
            )
        quads, k = require(self.name, tensors, "qweight", name, (I16,), (None, None))
        n = 4 * quads
        if k % 64:
            raise LayoutError(f"[awq-gemv_fast] {label(name, 'qweight')} has {k} columns; words cover whole 64s of inputs")
        rows, _ = require(self.name, tensors, "scales", name, FLOATS, (None, n), f"for the {n} rows of {label(name, 'qweight')}")
        dtype = tensors["scales"].dtype
        require(self.name, tensors, zeros_name(tensors), name, (dtype,), (rows, n), f"as {label(name, 'scales')}")
        size = awq_group(self.name, config, name, k, None)
        fmt = format_named("uint4", size, scale_dtype=dtype.name)
        if rows < fmt.groups(k):
            raise LayoutError(
                f"[awq-gemv_fast] {label(name, 'scales')} has {rows} rows; {k} inputs are {fmt.groups(k)} groups of {size}"
            )
        return Described(fmt, (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        groups, rows, own = fmt.groups(k), tensors["scales"].shape[0], zeros_name(tensors)
        details: dict[str, Any] = {"layout": self.name}
        if rows != 8 * zeros_width(k, fmt.group_size):
            details["rows"] = rows
        if own != ZEROS:
            details["zeros"] = own
        scales = np.ascontiguousarray(tensors["scales"][:groups].T)
        offsets = np.ascontiguousarray(tensors[own][:groups].T)
        zeros = integer_zeros(scales, offsets, label(name, own))
        if not np.array_equal(_offsets(scales, zeros).view(np.uint16), offsets.view(np.uint16)):
            remember(details, "offsets", offsets)
        for suffix in ("scales", own):
            beyond = as_bytes(tensors[suffix][groups:])
            remember(details, f"filling.{suffix}", beyond if beyond.any() else None)
        fields = stream.unpack(as_bytes(tensors["qweight"]), 4, 4 * k).reshape(n // 4, k // 64, 4, 64)
        codes = fields[..., np.argsort(COLUMN)].transpose(0, 2, 1, 3).reshape(n, k)
        parts = {"codes": stream.pack(codes, 4), "scales": scales, "zeros": zeros}
        return QTensor(fmt, (n, k), parts, origin="autoawq", details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = integer_misfit(fmt, shape, (4,), tuple(d.name for d in FLOATS))
        if not why and (shape[1] % 64 or shape[0] % 4):
            why = "words cover 4 outputs by 64 inputs; write awq-gemm, gptq or compressed-tensors"
        return why

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        check_no_group_index(self.name, q)
        check_config(self.name, q, config)
        n, k = q.shape
        scales, zeros, own = q.parts["scales"], stored_zeros(q), self.own_details(q)
        word = own.get("zeros", ZEROS)
        offsets = _offsets(scales, zeros)
        kept = recall(own, "offsets", offsets.shape, scales.dtype)
        if kept is not None:
            nearest, whole = _nearest_zeros(scales, kept)
            offsets = np.where(whole & (nearest == zeros), kept, offsets)
        back = integer_zeros(scales, offsets, word)
        if not np.array_equal(back, zeros):
            at = tuple(int(i) for i in np.argwhere(back != zeros)[0])
            raise cannot_hold(
                self.name,
                q,
                f"zero point {zeros[at]} at group {at} under scale {scales[at]} is {back[at]} when read back from −scale·zero",
            )
        groups = scales.shape[1]
        rows = own.get("rows", 8 * zeros_width(k, q.format.group_size))
        out: dict[str, Array] = {}
        for suffix, values in (("scales", scales), (word, offsets)):
            out[suffix] = np.zeros((rows, n), scales.dtype)
            out[suffix][:groups] = values.T
            beyond = recall(own, f"filling.{suffix}", (rows - groups, n), scales.dtype)
            if beyond is not None:
                out[suffix][groups:] = beyond
        codes = stream.unpack(q.parts["codes"], 4, k).reshape(n // 4, 4, k // 64, 64)
        fields = codes.transpose(0, 2, 1, 3)[..., COLUMN].reshape(n // 4, 4 * k)
        out["qweight"] = as_words(stream.pack(fields, 4), np.int16)
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        return awq_config(q, self.name)


def zeros_name(suffixes: Collection[str]) -> str:
    """What −scale·zero is called beside these suffixes."""
    return LLM_AWQ_ZEROS if LLM_AWQ_ZEROS in suffixes and ZEROS not in suffixes else ZEROS


def _offsets(scales: NDArray[Any], zeros: NDArray[np.int16]) -> NDArray[Any]:
    """−(scale · zero) in the scales' dtype, as the producers compute it."""
    with np.errstate(over="ignore", invalid="ignore"):
        offsets: NDArray[Any] = -(scales * zeros.astype(scales.dtype))
    return offsets


def _nearest_zeros(scales: NDArray[Any], offsets: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(round(−offset / scale), 0 under a scale of 0; whether that is a 16-bit integer whose product
    with the scale the offset is). Both numbers are rounded to their dtype, so product and offset
    differ by up to 2 of its epsilons.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offset, scale = offsets.astype(np.float64), scales.astype(np.float64)
        z = np.where((scale == 0) & (offset == 0), 0.0, np.rint(-offset / scale))
        limits = float_info(scales.dtype)
        room = 2 * (float(limits.eps) * np.abs(offset) + float(limits.smallest_subnormal))
        return z, (np.abs(z) <= 32767) & (np.abs(offset + z * scale) <= room)


def integer_zeros(scales: NDArray[Any], offsets: NDArray[Any], where: str) -> NDArray[np.int16]:
    """Zero points of offsets. Raises LayoutError for an offset that is no whole number of scales."""
    z, whole = _nearest_zeros(scales, offsets)
    if not whole.all():
        row, group = (int(i) for i in np.argwhere(~whole)[0])
        raise LayoutError(
            f"[awq-gemv_fast] {where}: {offsets[row, group]} over the scale {scales[row, group]} of output {row}, group {group} "
            "is no zero point; wanted a whole number of scales, 32,767 at most"
        )
    return z.astype(np.int16)
