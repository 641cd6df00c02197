"""Fine-grained FP8, as DeepSeek-V3 and Qwen3 FP8 checkpoints have it: float8 tiles of 128 × 128 under one float each.

    value[i, j] = e4m3(weight[i, j]) · weight_scale_inv[i div r, j div g]

`weight` is float8_e4m3fn [n, k]; `weight_scale_inv` is float32 (or bfloat16) [ceil(n/r), ceil(k/g)] and multiplies, in spite
of its name. `weight_block_size` of the config is [r, g]. Source: the config and the dequantization that DeepSeek-V3's model
card gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, want
from .common.float8 import BF16, E4M3, F32, bytes_of, named

WEIGHT, SCALE = "weight", "weight_scale_inv"


class FineGrainedFP8(Layout):
    """float8 tiles under float32 or bfloat16 scales."""

    name = "fp8"
    required = (WEIGHT, SCALE)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        rows, columns = _tile(config, name)
        n, k = want(self.name, tensors, WEIGHT, name, (E4M3,), (None, None))
        grid = (-(-n // rows), -(-k // columns))
        want(self.name, tensors, SCALE, name, (F32, BF16), grid, f"for tiles of {rows} x {columns} of [{n}, {k}]")
        scale = np.dtype(tensors[SCALE].dtype).name
        return Described(format_named("fp8_e4m3", columns, rows=rows, scale_dtype=scale), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts = {"codes": bytes_of(tensors[WEIGHT]), "scales": tensors[SCALE]}
        return QTensor(fmt, shape, parts, details={"layout": self.name}, name=name)

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        f = q.format
        if (
            f.family != "fp8"
            or f.element != "e4m3"
            or f.grouping != "block"
            or f.group_size == -1
            or f.scale not in ("float32", "bfloat16")
        ):
            raise LayoutError(f"[{self.name}] cannot hold {f}; it holds fp8_e4m3 in tiles under float32 or bfloat16 scales")
        if q.ndim != 2 or q.window is not None:
            raise LayoutError(f"[{self.name}] a weight of shape {q.shape}; it holds whole (n, k) matrices")
        return {WEIGHT: named(q.parts["codes"], E4M3), SCALE: q.parts["scales"]}

    def config(self, q: QTensor) -> dict[str, Any]:
        rows = q.shape[-2] if q.format.group_rows == -1 else q.format.group_rows
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [rows, q.format.group_size],
        }


def _tile(config: Config, name: str) -> tuple[int, int]:
    """(rows, columns) of a tile from `weight_block_size`, 128 × 128 when the config does not say."""
    size = config.get("weight_block_size", [128, 128])
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(s) is int and s > 0 for s in size):
        raise LayoutError(f"[fp8] {name}: weight_block_size is {size!r}; two whole numbers above 0, [rows, columns], are wanted")
    return size[0], size[1]
