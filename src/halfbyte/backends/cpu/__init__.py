"""The native CPU backend: C++ kernels for the instruction set of this machine (native/), on a pool of threads.

Two activation modes. `exact` multiplies float32 activations by exactly decoded elements, sums a segment (one group, at most
128 inputs) in float32 and applies the group's scale to the sum. `int8` rounds activations to 8 bits under a scale max|x| / 127
a segment, or a span of short segments of at most 128 inputs, sums a segment's integers exactly and applies both scales; its error
is that rounding's alone, 5e-3 to 7e-3 of the result on Gaussian data. Elements that are no small whole numbers (NF4, FP8, FP6,
and weights no panel holds) are multiplied exactly in either mode.

Environment: HALFBYTE_CPU names an instruction set (scalar, avx2, avx512, neon); HALFBYTE_THREADS bounds the threads of a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError, ShapeError
from ...numerics.exact import DTYPES
from ...numerics.minifloat import MINIFLOATS
from ...tensor.qtensor import QTensor
from ..base import Backend, Call, Prepared
from .pack import PackedWeight, address, pack_weight

_DTYPE = {"float32": 0, "float16": 1, "bfloat16": 2}
_DTYPES = {np.dtype(DTYPES[name]): number for name, number in _DTYPE.items()}
_SCHEDULES = (None, "fused")
MODES = {"exact": 0, "int8": 1}
"""Modes of activations as the native core numbers them."""


@cache
def _native() -> ModuleType | str:
    """The extension module, or the sentence that says why it is not there."""
    try:
        from ... import _native as module
    except ImportError as problem:
        if "nanobind" in str(problem):
            return f"the native core could not start ({problem}); install the nanobind-backend package"
        return (
            f"the native core is not in this installation ({problem}): it was installed without a C++ compiler; "
            "reinstall halfbyte where a C++17 compiler is on the path"
        )
    threads = os.environ.get("HALFBYTE_THREADS")
    if threads:
        if not threads.isdigit() or int(threads) < 1:
            raise BackendError(f"[cpu] HALFBYTE_THREADS={threads!r}; allowed: a whole number of threads, 1 or more")
        module.set_threads(int(threads))
    try:
        module.current()
    except ValueError as problem:
        raise BackendError(f"[cpu] HALFBYTE_CPU={os.environ.get('HALFBYTE_CPU')!r}: {problem}") from None
    return module


def native() -> ModuleType:
    """The extension module; BackendError with the reason when there is none."""
    module = _native()
    if isinstance(module, str):
        raise BackendError(f"[cpu] {module}")
    return module


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets this machine can run, best first."""
    return tuple(native().supported())


def use_instruction_set(name: str) -> None:
    """Compute with the named set from now on. BackendError lists the sets for an unknown or unsupported name."""
    try:
        native().use(name)
    except ValueError as problem:
        raise BackendError(f"[cpu] {problem}") from None


def set_threads(count: int) -> None:
    """Threads a call uses at most; 0 takes what the affinity mask and the cgroup's quota allow."""
    if count < 0:
        raise BackendError(f"[cpu] {count} threads; allowed: 1 or more, or 0 for all this process may use")
    native().set_threads(count)


def native_of(w: Prepared) -> Callable[..., None]:
    """The core's product for one (n, k) weight this backend prepared, by address.

    Arguments: x, its dtype (0 float32, 1 float16, 2 bfloat16), rows, strides of rows and columns in elements, bias (float32, or
    0 for none), mode, dtype of the result, result (contiguous). Nothing is checked: that is the caller's part.
    """
    return w.data.multiply  # type: ignore[no-any-return]


class CPUBackend(Backend):
    """C++ kernels, one table of functions an instruction set."""

    name = "cpu"
    device = "cpu"

    def reason(self) -> str | None:
        found = _native()
        return found if isinstance(found, str) else None

    def describe(self) -> str:
        module = native()
        threads = int(module.threads())
        others = [s for s in module.supported() if s != module.current()]
        also = f" (also: {', '.join(others)})" if others else ""
        return f"{module.current()}, {threads} thread{'s' if threads > 1 else ''}{also}"

    def refuses(self, call: Call) -> str | None:
        fmt = call.format
        if fmt.opaque:
            return f"{fmt.name} is kept as ggml blocks, which the native core does not decode"
        if fmt.bits != 4 and fmt.element not in ("int", "uint", "mxint", *MINIFLOATS):
            return f"{fmt.name} has {fmt.bits}-bit elements {fmt.element!r}; the native core decodes tables of 4 bits only"
        if fmt.scale == "nested" and fmt.inverse:
            return f"{fmt.name} divides by a nested scale, which the native core does not decode"
        if call.dtype not in _DTYPE:
            return f"dtype {call.dtype} is not computed here; allowed: {', '.join(_DTYPE)}"
        if call.schedule not in _SCHEDULES:
            return f"schedule {call.schedule!r} is for GPUs; the CPU kernels have one, 'fused' (decoded a cache block at a time)"
        return None

    def prepare(self, w: QTensor) -> Prepared:
        if w.ndim == 2:
            packed: Any = pack_weight(w)
            nbytes = packed.nbytes
        elif w.format.grouping in ("flat", "strided"):
            raise BackendError(
                f"[cpu] {w.format} of shape {w.shape}: groups run over the flattened stack; take one expert's own tensor"
            )
        else:
            packed = tuple(pack_weight(w[e]) for e in range(w.shape[0]))
            nbytes = sum(p.nbytes for p in packed)
        return Prepared(self.name, w.format, w.shape, packed, nbytes)

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        from .unpack import canonical_parts

        if len(w.shape) == 2:
            return canonical_parts(w.data, w.format, (w.shape[0], w.shape[1]))
        experts = [canonical_parts(p, w.format, (w.shape[1], w.shape[2])) for p in w.data]
        if not experts:
            return None
        # A group index belongs to the stack: every expert has the same.
        return {name: a if name == "group_index" else np.stack([e[name] for e in experts]) for name, a in experts[0].items()}

    def expert(self, w: Prepared, index: int) -> Prepared:
        packed: PackedWeight = w.data[index]
        return Prepared(self.name, w.format, w.shape[1:], packed, packed.nbytes)

    def quick(self, x: NDArray[Any], w: Prepared, activations: str) -> NDArray[Any] | None:
        dtype, mode, shape, flags = _DTYPES.get(x.dtype), MODES.get(activations), x.shape, x.flags
        if dtype is None or mode is None or len(shape) != 2 or len(w.shape) != 2 or shape[1] != w.shape[1]:
            return None
        if not flags.c_contiguous or not flags.aligned:
            return None
        out = np.empty((shape[0], w.shape[0]), x.dtype)
        native_of(w)(address(x), dtype, shape[0], shape[1], 1, 0, mode, dtype, address(out))
        return out

    def linear(
        self,
        x: NDArray[Any],
        w: Prepared,
        bias: NDArray[Any] | None,
        *,
        activations: str = "exact",
        schedule: str | None = None,
    ) -> NDArray[Any]:
        n, k = w.shape
        dtype = _DTYPES.get(x.dtype)
        if dtype is None or x.ndim != 2 or x.shape[1] != k:
            raise ShapeError(f"[linear] x is {x.dtype} {x.shape}; allowed: (m, {k}) in {', '.join(_DTYPE)}")
        size = x.dtype.itemsize
        rows, columns = x.strides
        if rows % size or columns % size or not x.flags.aligned:
            x = np.ascontiguousarray(x)
            rows, columns = x.strides
        b = 0
        if bias is not None:
            if bias.shape != (n,):
                raise ShapeError(f"[linear] bias has shape {bias.shape}; the weight has n = {n} outputs, so ({n},) is allowed")
            bias = np.ascontiguousarray(bias, dtype=np.float32)
            b = address(bias)
        out = np.empty((x.shape[0], n), x.dtype)
        mode = MODES[activations]
        native_of(w)(address(x), dtype, x.shape[0], rows // size, columns // size, b, mode, dtype, address(out))
        return out

    def embedding(self, ids: NDArray[Any], w: Prepared, dtype: str) -> NDArray[Any]:
        n, k = w.shape
        index = np.ascontiguousarray(ids, dtype=np.int64)
        if index.size and (int(index.min()) < 0 or int(index.max()) >= n):
            raise ShapeError(f"[embedding] ids run from {index.min()} to {index.max()}; the table has rows 0 to {n - 1}")
        out = np.empty((index.size, k), DTYPES[dtype])
        native().embedding(w.data.native, address(index), index.size, _DTYPE[dtype], address(out))
        return out

    def dequantize(self, w: Prepared, dtype: str) -> NDArray[Any]:
        out = np.empty(w.shape, DTYPES[dtype])
        stack = ((w.data, out),) if len(w.shape) == 2 else zip(w.data, out, strict=True)
        for packed, dense in stack:
            native().dequantize(packed.native, 0, w.shape[-2], _DTYPE[dtype], address(dense))
        return out
