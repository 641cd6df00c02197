"""Fine-grained FP8, as DeepSeek-V3 and Qwen3 FP8 checkpoints have it: float8 tiles of 128 × 128 under one float each.

    value[i, j] = e4m3(weight[i, j]) · weight_scale_inv[i div r, j div g]

`weight` is float8_e4m3fn [n, k]; `weight_scale_inv` is float32 (or bfloat16) [ceil(n/r), ceil(k/g)] and multiplies, in spite
of its name. `weight_block_size` of the config is [r, g]. Source: the config and the dequantization that DeepSeek-V3's model
card gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError
from ..formats import format_named
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, require
from .common.float8 import BF16, E4M3, F32, bytes_of, view_as
from .quant_config.reader import SkipListReader

WEIGHT, SCALE = "weight", "weight_scale_inv"


class FineGrainedFP8Config(SkipListReader):
    """Fine-grained FP8: `weight_block_size`, `modules_to_not_convert`."""

    method = "fp8"
    skip_keys = ("modules_to_not_convert",)
    consumed = ("weight_block_size", "fmt")
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations are quantized when the model runs": ("activation_scheme",),
        "whether transformers decodes when it loads": ("dequantize",),
    }


class FineGrainedFP8(Layout):
    """float8 tiles under float32 or bfloat16 scales."""

    name = "fp8"
    config_reader = FineGrainedFP8Config
    required = (WEIGHT, SCALE)
    parts: ClassVar[dict[str, str]] = {WEIGHT: "codes", SCALE: "scales"}
    harmless: ClassVar[dict[str, str]] = dict.fromkeys(("activation_scale", "input_scale"), "scale of the activations")

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        rows, columns = _tile(config, name)
        n, k = require(self.name, tensors, WEIGHT, name, (E4M3,), (None, None))
        grid = (-(-n // rows), -(-k // columns))
        require(self.name, tensors, SCALE, name, (F32, BF16), grid, f"for tiles of {rows} x {columns} of [{n}, {k}]")
        scale = np.dtype(tensors[SCALE].dtype).name
        return Described(format_named("fp8_e4m3", columns, rows=rows, scale_dtype=scale), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts = {"codes": bytes_of(tensors[WEIGHT]), "scales": tensors[SCALE]}
        return QTensor(fmt, shape, parts, details={"layout": self.name}, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        tiles = fmt.family == "fp8" and fmt.element == "e4m3" and fmt.grouping == "block" and fmt.group_size != -1
        if not tiles or fmt.scale not in ("float32", "bfloat16"):
            return "the layout holds fp8_e4m3 in tiles under float32 or bfloat16 scales"
        return "" if len(shape) == 2 else "the layout holds whole (n, k) matrices"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if q.window is not None:
            raise cannot_hold(self.name, q, "it is a slice of rows; the layout holds whole (n, k) matrices")
        return {WEIGHT: view_as(q.parts["codes"], E4M3), SCALE: q.parts["scales"]}

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
