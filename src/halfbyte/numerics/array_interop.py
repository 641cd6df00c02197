"""Between torch tensors and NumPy arrays without copying, and without importing torch unless the
caller already has.

bfloat16 is passed as raw 16-bit words: NumPy's bfloat16 is the type of ml_dtypes, which torch does
not know.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from .exact import bfloat16


def is_torch(x: Any) -> bool:
    """True for a torch tensor; False without importing torch when the program has not."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


class TorchState:
    """What the loaded torch is doing, and which tensors' memory may be read by address.

    kind, parameter, floats     torch.Tensor, torch.nn.Parameter, the dtypes that are computed
    modes, transforms, tracing  torch's own functions: the number of dispatch modes, the innermost
                                transform of torch.func or None, the state of torch.jit.trace or
                                None
    grad_enabled, forward_ad    torch.is_grad_enabled, the module torch.autograd.forward_ad
    """

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        core, self.forward_ad = torch._C, importlib.import_module("torch.autograd.forward_ad")
        key = core.DispatchKey
        names = (
            "Python", "PythonTLSSnapshot", "FuncTorchBatched", "FuncTorchGradWrapper", "BatchedNestedTensor", "Functionalize",
            "Meta", "Negative", "Conjugate", "ZeroTensor", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA",
            "NestedTensorCPU", "NestedTensorCUDA", "QuantizedCPU", "QuantizedCUDA", "MkldnnCPU",
        )  # fmt: skip
        self._special = [getattr(key, name) for name in names if hasattr(key, name)]
        self._keys, self._strided = core._dispatch_keys, torch.strided
        self.kind, self.parameter = torch.Tensor, torch.nn.Parameter
        self.floats = (torch.float32, torch.float16, torch.bfloat16)
        self.grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._known: dict[int, bool] = {}
        self.modes: Callable[[], int] = core._len_torch_dispatch_stack
        self.transforms: Callable[[], Any] = core._functorch.peek_interpreter_stack
        self.tracing: Callable[[], Any] = core._get_tracing_state

    def observed(self) -> bool:
        """True while a mode, a transform or a tracer observes operations."""
        return bool(self.modes() or self.transforms() or self.tracing())

    def readable(self, *tensors: Any) -> bool:
        """True for tensors with memory of their own; None is skipped.

        False for fake, meta, functional, batched, sparse, nested, quantized and zero tensors,
        unresolved negation, dual numbers, subclasses that dispatch in Python, and what is no
        tensor. The answer is kept for each set of dispatch keys.
        """
        for x in tensors:
            if x is None:
                continue
            if not isinstance(x, self.kind):
                return False
            found = self._keys(x)
            code = found.raw_repr()
            good = self._known.get(code)
            if good is None:
                good = self._known[code] = x.layout is self._strided and not any(found.has(s) for s in self._special)
            if not good or (self.forward_ad._current_level >= 0 and self.forward_ad.unpack_dual(x).tangent is not None):
                return False
        return True


@functools.cache
def torch_state() -> TorchState:
    """The state of the torch that is loaded; called when there is a tensor."""
    return TorchState()


def fits_storage(x: Any) -> bool:
    """True where the storage of a strided torch tensor reaches its last element: `resize_` of a
    storage, by which sharding frees parameters, leaves tensors that torch itself reads past.
    """
    if x.is_contiguous():
        elements = x.numel() and x.storage_offset() + x.numel()
    elif x.numel():
        elements = x.storage_offset() + 1 + sum((d - 1) * step for d, step in zip(x.shape, x.stride(), strict=True))
    else:
        elements = 0
    return bool(elements * x.itemsize <= x.untyped_storage().nbytes())


def check_storage(op: str, *arrays: Any) -> None:
    """ShapeError for a strided torch tensor whose storage was freed or shortened."""
    for x in arrays:
        if is_torch(x) and not fits_storage(x):
            raise ShapeError(
                f"[{op}] a tensor of dtype {_dtype_name(x.dtype)} and shape {tuple(x.shape)} whose memory was freed: its storage "
                f"has {x.untyped_storage().nbytes()} bytes, fewer than its elements span; allowed: tensors with all their "
                "memory; gather or load it first"
            )


def check_memory(op: str, *arrays: Any) -> None:
    """ShapeError for torch tensors that have no memory of their own or not all of it, and while
    torch traces or transforms.
    """
    tensors = [x for x in arrays if is_torch(x)]
    if not tensors:
        return
    state = torch_state()
    if not state.observed() and state.readable(*tensors):
        check_storage(op, *tensors)
        return
    kinds = ", ".join(f"{type(x).__name__} ({layout_of(x)}, {x.device})" for x in tensors)
    raise ShapeError(
        f"[{op}] {kinds}; allowed: strided tensors with memory of their own, outside torch's modes and transforms. torch "
        "traces the modules of halfbyte.torch; a sparse or nested tensor must be made dense"
    )


def check_tensor(op: str, name: str, x: Any) -> None:
    """ShapeError for anything but a torch tensor."""
    if not is_torch(x):
        raise ShapeError(
            f"[{op}] {name} is a {type(x).__name__}; a torch.Tensor is allowed: torch.as_tensor(x) makes one of numbers, and "
            "torch.fx traces the modules of halfbyte.torch alone"
        )


def as_array(op: str, name: str, x: Any) -> Any:
    """x itself when it is a torch tensor, else as a NumPy array. ShapeError for what is neither."""
    if is_torch(x):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        raise ShapeError(f"[{op}] {name} is a {type(x).__name__}; NumPy arrays and torch tensors are allowed") from None


def records_gradient(x: Any) -> bool:
    """True for a torch tensor whose operations autograd records."""
    return is_torch(x) and bool(x.requires_grad) and bool(sys.modules["torch"].is_grad_enabled())


def device_of(x: Any) -> str:
    """torch's name of an array's device ("cuda:1"); NumPy is "cpu"."""
    return str(x.device) if is_torch(x) else "cpu"


def dtype_of(x: Any) -> str:
    """Dtype name of a NumPy array or torch tensor: "float32", "bfloat16", ..."""
    return _dtype_name(x.dtype)


def layout_of(x: Any) -> str:
    """Name of a torch tensor's layout: "strided", "sparse_coo", ..."""
    return _dtype_name(x.layout)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    """Cached: NumPy builds the name of a dtype on each call."""
    return str(dtype).removeprefix("torch.")


def to_numpy(x: Any) -> NDArray[Any]:
    """A NumPy view of a CPU tensor (any strides), or of anything NumPy takes as an array.
    ShapeError for a tensor whose storage was freed or shortened: NumPy would give other memory.
    """
    if not is_torch(x):
        return np.asarray(x)
    torch = sys.modules["torch"]
    x = x.detach()
    check_storage("numpy", x)
    if x.dtype == torch.bfloat16:
        view: NDArray[Any] = x.view(torch.int16).numpy().view(bfloat16)
        return view
    array: NDArray[Any] = x.numpy()
    return array


def like(result: NDArray[Any], x: Any) -> Any:
    """`result` in x's framework: unchanged for NumPy, a torch tensor over the same memory
    otherwise.
    """
    if not is_torch(x):
        return result
    torch = sys.modules["torch"]
    if result.dtype == bfloat16:
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(result)


def as_matrix(op: str, x: Any, k: int) -> tuple[Any, tuple[int, ...]]:
    """x (..., k) as 2-D (m, k) and its leading shape. ShapeError names both when the last axis is
    not k; it refuses a tensor whose storage was freed or shortened before it is copied.

    NumPy and torch keep a view where the strides allow it.
    """
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(f"[{op}] x has shape {tuple(x.shape)}; its last axis must be k = {k} of the weight")
    check_storage(op, x)
    lead = tuple(int(d) for d in x.shape[:-1])
    m = 1
    for d in lead:
        m *= d
    return x.reshape(m, k), lead
