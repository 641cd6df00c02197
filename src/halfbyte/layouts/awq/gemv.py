"""AWQ gemv: rows of words along k in natural order, scales and zero points a row too, padded in
width.

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int32 | [n, k/8], low nibble first |
| `qzeros` | int32 | [n, W], zero points of consecutive groups, low nibble first |
| `scales` | float16 | [n, 8·W] |

W = m·ceil(ceil(k/group / 8) / m) words, m = 1, 2, 4 for groups of 128 or more, 64, 32; what follows
the last group is zero and kept if it is not. Source: AutoAWQ 0.2, by the files it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...errors import LayoutError
from ...formats import format_named
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, label, require
from ..common.integers import check_no_group_index, check_zero_range, integer_misfit, stored_zeros
from ..common.words import as_bytes, as_words, fields_of_words, recall, remember, stream_of_words, words_of_fields
from .gemm import FLOATS, I32, AWQConfig, awq_bits, awq_config, awq_group, check_config


def zeros_width(k: int, group_size: int) -> int:
    """Words of zero points in a row."""
    groups = 1 if group_size == -1 else -(-k // group_size)
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    words = -(-groups // 8)
    return -(-words // multiple) * multiple


class AWQGemv(Layout):
    """AutoAWQ's gemv checkpoints."""

    name = "awq-gemv"
    producers = ("autoawq",)
    config_reader = AWQConfig
    required = ("qweight", "qzeros", "scales")
    parts: ClassVar[dict[str, str]] = {"qweight": "codes", "qzeros": "zeros"}

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        awq_bits(self.name, config, name)
        n, width = require(self.name, tensors, "qweight", name, (I32,), (None, None))
        k = 8 * width
        size = awq_group(self.name, config, name, k, None)
        fmt = format_named("uint4", size, scale_dtype=scale_dtype(self.name, tensors, name))
        _, words = require(self.name, tensors, "qzeros", name, (I32,), (n, None), f"for {n} outputs")
        require(self.name, tensors, "scales", name, FLOATS, (n, 8 * words), f"eight a word of {label(name, 'qzeros')}")
        if 8 * words < fmt.groups(k):
            raise LayoutError(
                f"[awq-gemv] {label(name, 'scales')} has room for {8 * words} groups; {k} inputs are {fmt.groups(k)} of {size}"
            )
        return Described(fmt, (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        groups = fmt.groups(k)
        details: dict[str, Any] = {"layout": self.name}
        scales, words = tensors["scales"], tensors["qzeros"]
        if words.shape[1] != zeros_width(k, fmt.group_size):
            details["width"] = words.shape[1]
        fields, filling = fields_of_words(words, 4, groups) if words.shape[1] else (np.zeros((n, 0), np.uint8), None)
        remember(details, "filling.qzeros", filling)
        beyond = as_bytes(scales[:, groups:])
        remember(details, "filling.scales", beyond if beyond.any() else None)
        codes, _ = stream_of_words(tensors["qweight"], 4, k)
        parts = {"codes": codes, "scales": np.ascontiguousarray(scales[:, :groups]), "zeros": fields.astype(np.int16)}
        return QTensor(fmt, (n, k), parts, origin="autoawq", details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = integer_misfit(fmt, shape, (4,))
        if not why and shape[1] % 8:
            why = f"{shape[1]} inputs are not whole words of 8; write gptq or compressed-tensors"
        return why

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        check_no_group_index(self.name, q)
        check_config(self.name, q, config)
        n, k = q.shape
        zeros, scales, own = stored_zeros(q), q.parts["scales"], self.own_details(q)
        check_zero_range(self.name, q, zeros, 0, 15)
        groups, words = scales.shape[1], own.get("width", zeros_width(k, q.format.group_size))
        fields = np.zeros((n, 8 * words), np.uint8)
        fields[:, :groups] = zeros
        qzeros = words_of_fields(fields, 4)
        filling = recall(own, "filling.qzeros", (n, 4 * words - groups // 2))
        if filling is not None:
            raw = as_bytes(qzeros).copy()
            raw[:, groups // 2 :] |= filling
            qzeros = as_words(raw)
        padded = np.zeros((n, 8 * words), scales.dtype)
        padded[:, :groups] = scales
        beyond = recall(own, "filling.scales", (n, 8 * words - groups), scales.dtype)
        if beyond is not None:
            padded[:, groups:] = beyond
        return {"qweight": as_words(q.parts["codes"]), "qzeros": qzeros, "scales": padded}

    def config(self, q: QTensor) -> dict[str, Any]:
        return awq_config(q, self.name)


def scale_dtype(layout: str, tensors: Mapping[str, HasHeader], name: str) -> str:
    """Name of the scales' dtype, checked."""
    require(layout, tensors, "scales", name, FLOATS)
    return str(tensors["scales"].dtype.name)
