"""Marlin 4-bit weights as AutoAWQ writes them: symmetric codes and scales in the order of the
kernel's matrix fragments.

| tensor | dtype | shape |
|---|---|---|
| `qweight` | int32 | [k/16, 2·n], code q + 8 |
| `scales` | float16 | [G, n], permuted |

A strip of 16 inputs by 64 outputs is 128 words, four for each of the 32 threads of a warp. Thread t
holds, of each 16×16 tile, the fragment of an m16n8k16 product: inputs 2(t mod 4) + {0, 1, 8, 9} of
output t/4 and of output t/4 + 8. Its four words are the four tiles; the eight codes of a word, in
fragment order 0 … 7, sit in nibbles so that nibble i holds code [0, 2, 4, 6, 1, 3, 5, 7][i] and
pairs come out by one mask. Scales are permuted within 64 outputs (8×8 transposed), or with one
group for the whole row within 32 (pairs of outputs 2i, 2i+1 of each 8). Source: Frantar et al.
2024, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models", and the
files AutoAWQ 0.2 writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...formats import format_named
from ...numerics import bits as stream
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Layout, Tensors, label, require
from ..common.integers import check_middle_zeros, check_no_group_index, integer_misfit
from ..common.words import as_bytes, as_words
from .gemm import FLOATS, I32, ORDER, AWQConfig, awq_bits, awq_config, awq_group, check_config


def _codes_of_strip() -> NDArray[np.int64]:
    """Position of each of a strip's 1024 nibbles in its 16 inputs × 64 outputs, as 64·input +
    output.
    """
    thread, tile, code = np.meshgrid(np.arange(32), np.arange(4), np.array(ORDER[4]), indexing="ij")
    within, half = code % 4, code // 4
    k = 2 * (thread % 4) + within % 2 + 8 * (within // 2)
    n = 16 * tile + thread // 4 + 8 * half
    return np.asarray(64 * k + n).reshape(-1)


STRIP = _codes_of_strip()
GROUPED = np.arange(64).reshape(8, 8).T.reshape(-1)
"""Output, of 64, of each stored scale when there are several groups."""
SINGLE = np.array([2 * i + 8 * j + b for i in range(4) for j in range(4) for b in range(2)])
"""Output, of 32, of each stored scale when one group covers k."""


class AWQMarlin(Layout):
    """AutoAWQ's marlin checkpoints."""

    name = "awq-marlin"
    producers = ("autoawq",)
    config_reader = AWQConfig
    required = ("qweight", "scales")
    parts: ClassVar[dict[str, str]] = {"qweight": "codes"}

    def matches(self, suffixes: Any) -> bool:
        return "qzeros" not in suffixes and super().matches(suffixes)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        awq_bits(self.name, config, name)
        groups, n = require(self.name, tensors, "scales", name, FLOATS, (None, None))
        strips, _ = require(self.name, tensors, "qweight", name, (I32,), (None, 2 * n), f"for {n} outputs")
        if n % 64:
            raise LayoutError(f"[awq-marlin] {label(name, 'scales')} has {n} columns; strips are 64 outputs wide")
        k = 16 * strips
        size = awq_group(self.name, config, name, k, groups)
        return Described(format_named("int4", size, scale_dtype=tensors["scales"].dtype.name), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        fields = stream.unpack(as_bytes(tensors["qweight"]), 4, 16 * n).reshape(k // 16, n // 64, 1024)
        codes = fields[..., np.argsort(STRIP)].reshape(k // 16, n // 64, 16, 64).transpose(1, 3, 0, 2).reshape(n, k)
        order = _scale_order(fmt.groups(k))
        scales = tensors["scales"].reshape(-1, order.size)[:, np.argsort(order)].reshape(fmt.groups(k), n)
        parts = {"codes": stream.pack(codes, 4), "scales": np.ascontiguousarray(scales.T)}
        return QTensor(fmt, (n, k), parts, origin="autoawq", details={"layout": self.name}, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = integer_misfit(fmt, shape, (4,))
        if not why and (shape[0] % 64 or shape[1] % 16):
            why = "strips are 64 outputs by 16 inputs; write awq-gemm, gptq or compressed-tensors"
        return why

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        check_no_group_index(self.name, q)
        check_middle_zeros(self.name, q)
        check_config(self.name, q, config)
        n, k = q.shape
        codes = stream.unpack(q.parts["codes"], 4, k).reshape(n // 64, 64, k // 16, 16)
        fields = codes.transpose(2, 0, 3, 1).reshape(k // 16, n // 64, 1024)[..., STRIP].reshape(k // 16, 16 * n)
        scales = q.parts["scales"].T
        order = _scale_order(scales.shape[0])
        permuted = np.ascontiguousarray(scales).reshape(-1, order.size)[:, order].reshape(scales.shape)
        return {"qweight": as_words(stream.pack(fields, 4)), "scales": permuted}

    def config(self, q: QTensor) -> dict[str, Any]:
        return awq_config(q, self.name)


def _scale_order(groups: int) -> NDArray[np.int64]:
    """Output at each stored position, within the run of outputs that is permuted."""
    return SINGLE if groups == 1 else GROUPED
