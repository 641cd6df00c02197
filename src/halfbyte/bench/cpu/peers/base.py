"""Other libraries' products on the CPU, set up as their own users set them up, for timing beside
ours in the same run.

A peer packs dense weights itself and then makes one argument-less call a weight for each x. What is
not installed is a sentence.
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
    """One way of another library to multiply by a weight.

    name     what `--peers` and reports call it
    kind     `exact`, `int8` or `half`: only results of one kind are compared
    bits     bits a weight it reads, scales and zero points included
    modules  what must be installed
    """

    modules: tuple[str, ...]

    def __init__(self, name: str, kind: str, bits: float) -> None:
        self.name, self.kind, self.bits = name, kind, bits

    def reason(self) -> str | None:
        """None when it can run, else the sentence that says what is missing."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    @abstractmethod
    def hold(self, weights: list[F32], threads: int) -> Ready:
        """Packs the dense (n, k) weights. What comes back makes, for x (m, k), a product x · wᵀ for
        each, ready to be called.
        """


def grid_of(w: F32, block: int, bits: int) -> tuple[NDArray[np.uint8], F32]:
    """Codes (n, k) around 2^(bits−1) and scales (n, k / block): w rounded to the nearest of a
    symmetric grid a block.
    """
    n, k = w.shape
    half = 1 << (bits - 1)
    blocks = w.reshape(n, k // block, block)
    scales = np.maximum(np.abs(blocks).max(-1) / (half - 1), np.float32(1e-30)).astype(np.float32)
    codes = np.rint(blocks / scales[..., None]) + half
    return codes.astype(np.uint8).reshape(n, k), scales
