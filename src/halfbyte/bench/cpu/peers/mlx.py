"""MLX's quantized product on its CPU device. MLX has no setting for the number of threads of that
product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .base import F32, Calls, Peer, Ready


class MLX(Peer):
    """`mlx-affine4-g64`, `mlx-mxfp4`: float32 activations, which make affine's scales and biases
    float32 too.
    """

    modules = ("mlx",)

    def __init__(self, mode: str, width: int, group: int, bits: float) -> None:
        self.options = {"mode": mode, "bits": width, "group_size": group}
        super().__init__(f"mlx-affine{width}-g{group}" if mode == "affine" else f"mlx-{mode}", "exact", bits)

    def reason(self) -> str | None:
        missing = super().reason()
        if missing:
            return missing
        try:
            import mlx.core  # noqa: F401  its shared library may be the part that is missing
        except ImportError as problem:
            return f"mlx cannot start: {problem}"
        return None

    def pack(self, weights: list[F32], threads: int) -> Ready:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        packed_weights = [mx.quantize(mx.array(w), **self.options) for w in weights]
        mx.eval(packed_weights)

        def product(x: Any, parts: Any) -> Any:
            codes, scales, *bias = parts
            y = mx.quantized_matmul(x, codes, scales, bias[0] if bias else None, transpose=True, **self.options)
            mx.eval(y)
            return y

        def calls(x: F32) -> Calls:
            mine = mx.array(x)
            return [partial(product, mine, parts) for parts in packed_weights]

        return calls


MLX_AFFINE = tuple(MLX("affine", width, group, width + 64 / group) for width, group in ((4, 32), (4, 64), (4, 128), (8, 128)))
MLX_PEERS = (*MLX_AFFINE, MLX("mxfp4", 4, 32, 4.25), MLX("nvfp4", 4, 16, 4.5), MLX("mxfp8", 8, 32, 8.25))
