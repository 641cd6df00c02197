"""The Metal backend on MLX arrays: the kernels of `halfbyte.mlx` behind the interface of all
backends, so that one selftest checks both runtimes.
"""

from __future__ import annotations

import platform
from typing import Any

import mlx.core as mx

from ..backends.base import Prepared
from ..backends.metal import MetalBackend, launch
from ..backends.metal.experts import experts, refuse_two_stacks
from ..backends.metal.mlx_runtime import MLXRuntime


class MLXBackend(MetalBackend):
    """halfbyte's kernels, never `mx.quantized_matmul`. Arrays are MLX's. Indices are not checked:
    reading them would evaluate MLX's lazy graph.

    runtime  None for `mx.fast.metal_kernel`; tests pass their own
    """

    def __init__(self, runtime: MLXRuntime | None = None) -> None:
        super().__init__()
        self._given, self._mlx = runtime is not None, runtime or MLXRuntime()

    @property
    def runtime(self) -> MLXRuntime:  # type: ignore[override] # the other framework's, behind the same protocol
        return self._mlx

    def reason(self) -> str | None:
        if self._given or mx.metal.is_available():
            return None
        return f"MLX finds no Metal device; this machine runs {platform.system()}"

    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        return launch.dequantize(self.runtime, w.data, dtype, ids)

    def experts(
        self,
        x: Any,
        gate_up: Prepared,
        down: Prepared,
        topk_ids: Any,
        topk_weights: Any,
        *,
        gate: str = "swiglu",
        interleaved: bool = False,
        gate_up_bias: Any | None = None,
        down_bias: Any | None = None,
        up: Prepared | None = None,
        up_bias: Any | None = None,
    ) -> Any:
        refuse_two_stacks(up)
        return experts(
            self.runtime,
            x,
            gate_up.data,
            down.data,
            topk_ids,
            topk_weights,
            gate=gate,
            interleaved=interleaved,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    def describe(self) -> str:
        return f"{platform.processor() or 'Apple GPU'}, MLX {mx.__version__}; its kernels are tested on the CPU only"

    def _same_device(self, op: str, x: Any) -> None:
        """MLX arrays have no device."""
