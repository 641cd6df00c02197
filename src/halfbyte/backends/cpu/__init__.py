"""The native CPU backend: C++ kernels for this machine's instruction set, on a pool of threads.

The kernels are in native/, beside src/: `products.inl` multiplies (`blocks_f32`, `blocks_i8`),
written over the vector type of `isa_avx2.cpp`, `isa_avx512.cpp`, `isa_neon.cpp` or
`isa_scalar.cpp`; `isa_amx.cpp` adds products of tile registers to AVX-512's, and `isa_i8mm.cpp`
products of small matrices to NEON's. Experts are multiplied one after another by `linear`
(`ops.experts`).

Three activation modes. `exact` multiplies float32 activations by exactly decoded elements, sums a
segment (one group, at most 128 inputs) in float32 and applies the group's scale to the sum. `int8`
rounds activations to 8 bits under a scale max|x| / 127 a segment, or a span of short segments of at
most 128 inputs, sums a segment's integers exactly and applies both scales; its error is that
rounding's alone, 5e-3 to 7e-3 of the result on Gaussian data. `int8_token` has one such scale a
token for weights of one group a row. Elements that are no small whole numbers (NF4, FP8, FP6), and
weights that are not in panel order, are multiplied exactly in every mode.

Environment: HALFBYTE_CPU names an instruction set (scalar, avx2, avx512, amx, neon, i8mm);
HALFBYTE_THREADS bounds the threads of a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError, HalfbyteError, plural
from ...numerics.array_interop import fits_storage, torch_state
from ...numerics.exact import DTYPES, bfloat16
from ...numerics.minifloat import MINIFLOATS
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import X_DTYPES, Backend, Call, Prepared
from .pack import PANEL_ROWS, PackedWeight, aligned_empty, fits_panels, pack_pieces, pack_weight

_SCHEDULES = (None, "fused")
ACTIVATIONS = ("exact", "int8", "int8_token")


class _Threads:
    """own     a number was asked of halfbyte itself, by HALFBYTE_THREADS or `set_threads`
    read    the functions that tell torch's number and the core's; None while `own`, and until torch
            is loaded
    bounds  torch's number -> the core's: no more than this process may use
    """

    __slots__ = ("bounds", "own", "read")

    def __init__(self) -> None:
        self.own = False
        self.read: tuple[Callable[[], int], Callable[[], int]] | None = None
        self.bounds: dict[int, int] = {}


_threads = _Threads()


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
    if not hasattr(module, "WeightFields"):
        return f"the native core {module.__file__} is of another version of halfbyte; run `make native` or reinstall"
    threads = os.environ.get("HALFBYTE_THREADS")
    if threads:
        if not threads.isdigit() or int(threads) < 1:
            raise BackendError(f"[cpu] HALFBYTE_THREADS={threads!r}; allowed: a whole number of threads, 1 or more")
        module.set_threads(int(threads))
        _threads.own = True
    try:
        module.current()
    except ValueError as problem:
        raise BackendError(f"[cpu] HALFBYTE_CPU={os.environ.get('HALFBYTE_CPU')!r}: {problem}") from None
    return module


@cache
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
    """Compute with the named set from now on. BackendError lists the sets for an unknown or
    unsupported name.
    """
    try:
        native().use(name)
    except ValueError as problem:
        raise BackendError(f"[cpu] {problem}") from None


def set_threads(count: int) -> None:
    """Threads a call uses at most; 0 takes what the affinity mask, the cgroup's quota and
    `torch.set_num_threads` allow.
    """
    if count < 0:
        raise BackendError(f"[cpu] {count} threads; allowed: 1 or more, or 0 for all this process may use")
    native().set_threads(count)
    _threads.own, _threads.read = count > 0, None
    _threads.bounds.clear()


def follow_torch() -> None:
    """Use no more threads than torch does in the calling thread, where it is loaded: a program
    limits both by `torch.set_num_threads`, as a data loader does in its workers. It is asked at
    every call: 0.1 µs.
    """
    read = _threads.read
    if read is None:
        number = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if number is None or _threads.own:
            return
        _threads.read = read = number, native().threads
    count = read[0]()
    bound = _threads.bounds.get(count)
    if bound is None:
        bound = _threads.bounds[count] = min(count, native().usable_threads())
    if read[1]() != bound:  # the core has one number, which calls of other threads change
        native().set_threads(bound)


@cache
def activations_named(name: str) -> Any:
    """The core's member for an activation mode, one of `ACTIVATIONS`."""
    return native().Activations[name]


def at_once(x: Any, w: Prepared, bias: Any | None, activations: str) -> Any | None:
    """x · wᵀ + bias for tensors of torch's own classes on the CPU that record no gradient, x a
    matrix of any strides or contiguous; None for all else.

    The core reads x and bias through torch's DLPack functions, which fail for tensors without
    memory of their own; negative views and shortened storages, which they do not see, and modes are
    excluded here. Every failure is left to the checked path, which says what is wrong.
    """
    if w.backend != "cpu":
        return None
    torch = torch_state()
    kind = torch.kind
    if type(x) is not kind or (bias is not None and type(bias) is not kind and type(bias) is not torch.parameter):
        return None
    if torch.modes() or torch.transforms() or torch.tracing() or torch.forward_ad._current_level >= 0 or x.is_neg():
        return None
    if x.requires_grad and torch.grad_enabled():
        return None
    if bias is not None and (bias.is_neg() or (bias.requires_grad and torch.grad_enabled())):
        return None
    try:
        n, k = w.shape
        shape = x.shape
        if k == 0 or x.dtype not in torch.floats or not fits_storage(x) or (bias is not None and not fits_storage(bias)):
            return None
        follow_torch()
        # Sizes as arguments: torch takes 1 µs longer to read them from a tuple.
        y = x.new_empty(shape[0], n) if len(shape) == 2 else x.new_empty(*shape[:-1], n)
        w.data.linear(x, bias, activations_named(activations), y)
    except (HalfbyteError, RuntimeError, TypeError, ValueError, KeyError, BufferError):
        return None
    return y


class CPUBackend(Backend):
    """C++ kernels, one table of functions an instruction set."""

    name = "cpu"
    batch_invariant = True
    device = "cpu"

    def reason(self) -> str | None:
        module = _native()
        return module if isinstance(module, str) else None

    def describe(self) -> str:
        module = native()
        follow_torch()
        threads = int(module.threads())
        others = [s for s in module.supported() if s != module.current()]
        also = f" (also: {', '.join(others)})" if others else ""
        return f"{module.current()}, {plural(threads, 'thread')}{also}"

    def refuses(self, call: Call) -> str | None:
        fmt = call.format
        if call.activations not in ACTIVATIONS:
            return f"the native core computes {', '.join(ACTIVATIONS)} activations, not {call.activations!r}"
        if fmt.opaque:
            return f"{fmt.name} is kept as {fmt.kept_as}, which the native core does not decode"
        if fmt.bits != 4 and fmt.element not in ("int", "uint", "mxint", *MINIFLOATS):
            return f"{fmt.name} has {fmt.bits}-bit elements {fmt.element!r}; the native core decodes tables of 4 bits only"
        if fmt.scale == "nested" and fmt.inverse:
            return f"{fmt.name} divides by a nested scale, which the native core does not decode"
        if call.dtype not in X_DTYPES:
            return f"dtype {call.dtype} is not computed here; allowed: {', '.join(X_DTYPES)}"
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

    def prepare_pieces(self, fmt: Format, shape: tuple[int, int], pieces: Callable[[int], Iterator[QTensor]]) -> Prepared:
        """A matrix whose rows are read a piece at a time, so that a large one is not in memory
        twice.

        pieces  a number m -> consecutive rows of the weight, but for the last piece in multiples of
                m
        """
        packed = pack_pieces(fmt, shape, pieces(PANEL_ROWS if fits_panels(fmt) else max(shape[0], 1)))
        return Prepared(self.name, fmt, shape, packed, packed.nbytes)

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

    def linear(
        self,
        x: NDArray[Any],
        w: Prepared,
        bias: NDArray[Any] | None,
        *,
        activations: str = "exact",
        schedule: str | None = None,
    ) -> NDArray[Any]:
        """The core checks shapes, dtypes and alignment against the weight itself; here arrays
        become what it takes.
        """
        if not x.flags.aligned:
            x = x.copy()
        out = np.empty((x.shape[0] if x.ndim else 1, w.shape[0]), x.dtype)
        if bias is not None:
            bias = np.require(bias, np.float32, ["C", "A"])
        follow_torch()
        w.data.linear(_words(x), bias, activations_named(activations), _words(out))
        return out

    def embedding(self, ids: NDArray[Any], w: Prepared, dtype: str) -> NDArray[Any]:
        index = np.require(ids, np.int64, ["C", "A"])
        out = np.empty((index.size, w.shape[1]), DTYPES[dtype])
        follow_torch()
        native().embedding(w.data.native, index, _words(out))
        return out

    def dequantize(self, w: Prepared, dtype: str) -> NDArray[Any]:
        out = np.empty(w.shape, DTYPES[dtype])
        follow_torch()
        stack = ((w.data, out),) if len(w.shape) == 2 else zip(w.data, out, strict=True)
        for packed, dense in stack:
            native().dequantize(packed.native, _words(dense))
        return out


def _words(a: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 as its 16-bit words, which is how it crosses to the core; other dtypes as they are."""
    return a.view(np.uint16) if a.dtype == bfloat16 else a


__all__ = [
    "ACTIVATIONS", "CPUBackend", "activations_named", "aligned_empty", "at_once", "follow_torch", "instruction_sets",
    "native", "set_threads", "use_instruction_set",
]  # fmt: skip
