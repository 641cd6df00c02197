"""The MLX runtime: kernel bodies through `mx.fast.metal_kernel`, which writes the signature from
the arrays it is given.

Three of its rules shape this file. An array of fewer than 8 elements becomes a `constant` pointer,
which the `device` parameters of the shared functions do not take: short arrays are padded. A 0-d
array becomes a reference: that is how numbers are passed. A view is bound where it begins, and MLX
does not say where that is: kernels read x one number at a time, and codes are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...numerics.exact import bfloat16
from .runtime import Shape
from .source import Kernel, shared_source
from .weight import FEWEST_ELEMENTS

DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "uint8": mx.uint8,
    "uint32": mx.uint32,
    "int16": mx.int16,
}


class MLXRuntime:
    """Kernels on MLX arrays.

    metal_kernel  `mx.fast.metal_kernel`, or what stands in for it in the tests
    """

    def __init__(self, metal_kernel: Callable[..., Any] = mx.fast.metal_kernel) -> None:
        self.metal_kernel = metal_kernel
        self._kernels: dict[str, Any] = {}

    def array(self, a: NDArray[Any]) -> Any:
        if a.dtype == bfloat16:
            return mx.array(a.view(np.uint16)).view(mx.bfloat16)
        return mx.array(a)

    def to_numpy(self, a: Any) -> NDArray[Any]:
        """An array brought to the host; bfloat16 by ml_dtypes."""
        return np.array(a.view(mx.uint16)).view(bfloat16) if a.dtype == mx.bfloat16 else np.array(a)

    def dtype_of(self, x: Any) -> str:
        return str(x.dtype).removeprefix("mlx.core.")

    def rows(self, x: Any, k: int, order: Any | None) -> tuple[Any, int]:
        if order is not None:
            x = mx.take(x, order, axis=1)
        if x.shape[1] != k:
            x = mx.pad(x, [(0, 0), (0, k - x.shape[1])])
        return mx.contiguous(x), k

    def cast(self, a: Any, dtype: str) -> Any:
        return mx.contiguous(a.astype(DTYPES[dtype]))

    def aligned(self, codes: Any, nbytes: int) -> Any:
        if nbytes == 1 or not codes.size:
            return codes
        try:
            address = np.array(codes, copy=False).ctypes.data  # shared with the GPU: no copy
        except ValueError:  # inside mx.compile there is no memory yet; the weights of `prepare` are aligned
            return codes
        return codes if address % nbytes == 0 else mx.array(np.array(codes))

    def words(self, codes: Any) -> Any:
        return codes.view(mx.uint32)

    def zeros(self, shape: Shape, dtype: str) -> Any:
        return mx.zeros(shape, dtype=DTYPES[dtype])

    def take_columns(self, a: Any, order: Any) -> Any:
        return mx.take(a, mx.argsort(order), axis=1)

    def matmul(self, x: Any, w: Any) -> Any:
        return x @ w.T

    def by_expert(self, index: Any, experts: int) -> tuple[Any, Any]:
        # MLX's sort is not documented as stable: the position breaks ties.
        order = mx.argsort(index.astype(mx.int64) * index.size + mx.arange(index.size))
        counts = (index[None, :] == mx.arange(experts, dtype=index.dtype)[:, None]).sum(axis=1)
        offsets = mx.concatenate([mx.zeros(1, mx.int32), mx.cumsum(counts).astype(mx.int32)])
        return order.astype(mx.int32), offsets

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        ints: Sequence[int],
        floats: Sequence[float],
        shapes: Sequence[Shape],
        threads: tuple[int, int, int],
    ) -> list[Any]:
        function = self._kernels.get(kernel.name)
        if function is None:
            function = self._kernels[kernel.name] = self.metal_kernel(
                name=kernel.name,
                input_names=[*(b.name for b in kernel.inputs), *kernel.ints, *kernel.floats],
                output_names=[b.name for b in kernel.outputs],
                source=kernel.body,
                header=shared_source(),
            )
        arrays = [_at_least(a) for a in inputs]
        numbers = [*(mx.array(i, mx.int32) for i in ints), *(mx.array(f, mx.float32) for f in floats)]
        outputs: list[Any] = function(
            inputs=[*arrays, *numbers],
            grid=threads,
            threadgroup=kernel.group,
            output_shapes=list(shapes),
            output_dtypes=[DTYPES[b.dtype] for b in kernel.outputs],
        )
        return outputs


def _at_least(a: Any) -> Any:
    """`a`, flattened and padded when it is shorter than MLX passes in device memory."""
    if a.size >= FEWEST_ELEMENTS:
        return a
    return mx.pad(a.reshape(-1), (0, FEWEST_ELEMENTS - a.size))
