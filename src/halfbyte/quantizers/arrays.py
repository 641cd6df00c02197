"""Functions that NumPy and torch name differently, so that an algorithm is written once and runs on
its weight's device.

`functions(x)` is the array namespace of x: NumPy for an array, torch under NumPy's names for a
tensor. torch is not imported here: a caller with a tensor has imported it. Results differ at most
by the order of summation.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.array_interop import is_torch


class NumPyFunctions:
    """NumPy, with the additional names of `TorchFunctions`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    LinAlgError = np.linalg.LinAlgError

    @staticmethod
    def array(x: Any, dtype: Any = None) -> Any:
        """An array in host memory, moved to the device."""
        return np.asarray(x, dtype)

    @staticmethod
    def cast(x: Any, dtype: Any) -> Any:
        """x in another dtype."""
        return x.astype(dtype)

    @staticmethod
    def weighted_dot(a: Any, b: Any, w: Any) -> Any:
        """Σ a b w over the last axis."""
        return np.einsum("...g,...g,...g->...", a, b, w)


class TorchFunctions:
    """torch under NumPy's names, new tensors on one device."""

    def __init__(self, device: Any) -> None:
        self.torch, self.device = sys.modules["torch"], device
        self.LinAlgError = self.torch.linalg.LinAlgError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    def array(self, x: Any, dtype: Any = None) -> Any:
        """An array in host memory, moved to the device."""
        return self.torch.as_tensor(x, dtype=dtype, device=self.device)

    @staticmethod
    def cast(x: Any, dtype: Any) -> Any:
        """x in another dtype."""
        return x.to(dtype)

    @staticmethod
    def weighted_dot(a: Any, b: Any, w: Any) -> Any:
        """Σ a b w over the last axis."""
        return (a * b * w).sum(-1)

    def rint(self, x: Any, out: Any = None) -> Any:
        """To the nearest whole number, halfway to the even one."""
        return self.torch.round(x, out=out)

    def zeros(self, shape: Any, dtype: Any = None) -> Any:
        """Zeros, float64 by default."""
        return self.torch.zeros(shape, dtype=dtype or self.torch.float64, device=self.device)

    def full(self, shape: Any, value: float) -> Any:
        """A constant array, float64."""
        return self.torch.full(shape, value, dtype=self.torch.float64, device=self.device)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Uninitialized memory."""
        return self.torch.empty(shape, dtype=dtype, device=self.device)

    def eye(self, n: int) -> Any:
        """The identity, float64."""
        return self.torch.eye(n, dtype=self.torch.float64, device=self.device)

    def take_along_axis(self, x: Any, index: Any, axis: int) -> Any:
        """Elements at an index along an axis."""
        return self.torch.take_along_dim(x, index, axis)

    def ascontiguousarray(self, x: Any) -> Any:
        """x in C order."""
        return x.contiguous()


_NUMPY = NumPyFunctions()


def functions(x: Any) -> Any:
    """The array namespace of x."""
    return TorchFunctions(x.device) if is_torch(x) else _NUMPY


def host(x: Any) -> NDArray[Any]:
    """x as a NumPy array."""
    out: NDArray[Any] = x.detach().cpu().numpy() if is_torch(x) else np.asarray(x)
    return out
