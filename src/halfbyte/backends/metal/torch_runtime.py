"""The torch runtime: whole kernels through `torch.mps.compile_shader`, one library a kernel,
compiled on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch

from ...numerics.exact import bfloat16
from .runtime import Shape
from .source import Kernel, whole_source

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}


class TorchRuntime:
    """Kernels on torch tensors of one device.

    compile_shader  `torch.mps.compile_shader`, or what stands in for it in the tests
    """

    def __init__(self, compile_shader: Callable[[str], Any], device: str = "mps") -> None:
        self.compile_shader = compile_shader
        self.device = device
        self._kernels: dict[str, Any] = {}

    def array(self, a: NDArray[Any]) -> Any:
        if a.dtype == bfloat16:
            return torch.from_numpy(a.view(np.int16).copy()).to(self.device).view(torch.bfloat16)
        return torch.from_numpy(a if a.flags.writeable else a.copy()).to(self.device)

    def to_numpy(self, t: Any) -> NDArray[Any]:
        """A tensor brought to the host; bfloat16 by ml_dtypes."""
        if t.dtype == torch.bfloat16:
            words: NDArray[Any] = t.view(torch.int16).cpu().numpy()
            return words.view(bfloat16)
        array: NDArray[Any] = t.cpu().numpy()
        return array

    def dtype_of(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def rows(self, x: Any, k: int, order: Any | None) -> tuple[Any, int]:
        if order is not None:
            x = x.index_select(1, order)
        if x.shape[1] != k:
            x = torch.nn.functional.pad(x, (0, k - x.shape[1]))
        if x.stride(1) != 1:
            x = x.contiguous()
        return x, x.stride(0)

    def cast(self, a: Any, dtype: str) -> Any:
        return a.to(DTYPES[dtype]).contiguous()

    def aligned(self, codes: Any, nbytes: int) -> Any:
        # Storage itself begins on a page.
        return codes if codes.storage_offset() * codes.element_size() % nbytes == 0 else codes.clone()

    def words(self, codes: Any) -> Any:
        return codes.view(torch.int32)

    def zeros(self, shape: Shape, dtype: str) -> Any:
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)

    def take_columns(self, a: Any, order: Any) -> Any:
        out = torch.empty_like(a)
        out[:, order.long()] = a
        return out

    def matmul(self, x: Any, w: Any) -> Any:
        return torch.nn.functional.linear(x, w)

    def by_expert(self, index: Any, experts: int) -> tuple[Any, Any]:
        order = torch.argsort(index, stable=True)
        counts = (index[None, :] == torch.arange(experts, device=self.device, dtype=index.dtype)[:, None]).sum(1)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return order.to(torch.int32), offsets.to(torch.int32)

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
            function = self._kernels[kernel.name] = getattr(self.compile_shader(whole_source(kernel)), kernel.name)
        outputs = [torch.empty(s, dtype=DTYPES[b.dtype], device=self.device) for s, b in zip(shapes, kernel.outputs, strict=True)]
        function(*inputs, *ints, *map(float, floats), *outputs, threads=list(threads), group_size=list(kernel.group))
        return outputs
