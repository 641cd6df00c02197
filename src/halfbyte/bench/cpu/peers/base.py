"""Other libraries' products on the CPU, set up as their own users set them up, for timing beside
ours in the same run.

A peer packs dense weights itself and then returns, for an x, one call without arguments for each
weight. `reason` says what is not installed.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Calls = list[Callable[[], Any]]
Ready = Callable[[F32], Calls]


class Peer(ABC):
    """One product of another library.

    name     what `--peers` and reports call it
    kind     `exact`, `int8` or `half`: only results of one kind are compared
    bits     bits a weight it reads, scales and zero points included
    modules  what must be installed
    """

    modules: tuple[str, ...]

    def __init__(self, name: str, kind: str, bits: float) -> None:
        self.name, self.kind, self.bits = name, kind, bits

    def reason(self) -> str | None:
        """None when it can run, else what is missing, as a sentence."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    @abstractmethod
    def pack(self, weights: list[F32], threads: int) -> Ready:
        """Pack the dense (n, k) weights. Returns a function from x (m, k) to one call for each
        weight, which computes x · wᵀ.
        """


def grid_of(w: F32, block: int, bits: int) -> tuple[NDArray[np.uint8], F32]:
    """w rounded to the nearest of a symmetric grid in each block of inputs: codes (n, k), of which
    2^(bits−1) is zero, and scales (n, k / block).
    """
    n, k = w.shape
    half = 1 << (bits - 1)
    blocks = w.reshape(n, k // block, block)
    scales = np.maximum(np.abs(blocks).max(-1) / (half - 1), np.float32(1e-30)).astype(np.float32)
    codes = np.rint(blocks / scales[..., None]) + half
    return codes.astype(np.uint8).reshape(n, k), scales
