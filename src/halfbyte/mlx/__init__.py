"""MLX arrays in and out: packed weights of any format multiplied on an Apple GPU, or on the CPU
that MLX also has.

    import halfbyte, halfbyte.mlx as hm
    w = hm.prepare(halfbyte.open("model.safetensors")["model.layers.0.mlp.down_proj"])
    y = hm.linear(x, w)

For the formats that MLX has (affine in groups of 32, 64, 128; mxfp4, mxfp8, nvfp4 without a global
scale) `linear` calls `mx.quantized_matmul`. All other formats, from GPTQ to NVFP4 with a global
scale, run on halfbyte's Metal kernels without being requantized; without Metal, as on Linux, MLX
operations decode them a block of rows at a time.

No Metal kernel of halfbyte has run on Apple hardware yet (docs/design/metal.md). Needs the extra:
pip install 'halfbyte[mlx]'.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .modules import QEmbedding, QExperts, QLinear, linears, replace_modules
    from .verbs import dequantize, embedding, experts, linear, prepare

_HOMES = {
    "prepare": "verbs", "linear": "verbs", "embedding": "verbs", "dequantize": "verbs", "experts": "verbs",
    "QLinear": "modules", "QEmbedding": "modules", "QExperts": "modules", "linears": "modules", "replace_modules": "modules",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as e:
        if e.name not in ("mlx", "mlx.core", "mlx.nn"):
            raise
        raise ModuleNotFoundError(f"{e.name}, which halfbyte.mlx needs; pip install 'halfbyte[mlx]'", name=e.name) from e


__all__ = [
    "QEmbedding", "QExperts", "QLinear", "dequantize", "embedding", "experts", "linear", "linears", "prepare", "replace_modules",
]  # fmt: skip
