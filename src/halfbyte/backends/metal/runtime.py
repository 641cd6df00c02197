"""What the launch code needs of a framework: arrays in, a kernel run, arrays out. torch and MLX
each have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from .source import Kernel

Shape = tuple[int, ...]


class Runtime(Protocol):
    """One way to run kernels.

    `run` binds arrays in the order of the kernel's inputs, then numbers, and returns new arrays of
    the outputs' dtypes. `threads` counts threads, not threadgroups, as both frameworks do.
    """

    def array(self, a: NDArray[Any]) -> Any:
        """A NumPy array (bfloat16 by ml_dtypes) on the device."""

    def dtype_of(self, x: Any) -> str:
        """ "float32", "float16" or "bfloat16"."""

    def rows(self, x: Any, k: int, order: Any | None) -> tuple[Any, int]:
        """x (m, k') with inputs in `order`, zero-padded to k inputs, rows of inner stride 1; and
        the row stride.

        It may begin at any element: kernels read x, scales, zero points and biases one number at a
        time.
        """

    def cast(self, a: Any, dtype: str) -> Any:
        """`a` in another dtype, contiguous."""

    def aligned(self, codes: Any, nbytes: int) -> Any:
        """Bytes that begin at a multiple of `nbytes` in memory: `codes` themselves, or a copy of a
        view that does not.
        """

    def words(self, codes: Any) -> Any:
        """Bytes [..., 4 w] as 32-bit words [..., w]."""

    def zeros(self, shape: Shape, dtype: str) -> Any:
        """An array of zeros on the device."""

    def take_columns(self, a: Any, order: Any) -> Any:
        """a with column order[j] holding what column j held: `rows`' permutation undone."""

    def matmul(self, x: Any, w: Any) -> Any:
        """x · wᵀ of dense arrays of one dtype."""

    def by_expert(self, index: Any, experts: int) -> tuple[Any, Any]:
        """Positions of `index` (int32, one axis) sorted by expert, in order within each, and where
        each begins [experts + 1].
        """

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        ints: Sequence[int],
        floats: Sequence[float],
        shapes: Sequence[Shape],
        threads: tuple[int, int, int],
    ) -> list[Any]:
        """Run `threads` threads of `kernel`."""
