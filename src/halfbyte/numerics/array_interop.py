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


@functools.cache
def torch_state() -> tuple[Callable[[], bool], Callable[..., bool]]:
    """(recording, plain) of the torch that is loaded, which is therefore never asked for before a
    tensor is there.

    recording()   True while a mode, a transform or a tracer observes operations
    plain(x, …)   True for tensors whose memory may be read by address; None is skipped. False for
                  fake, meta, functional, batched, sparse, nested, quantized and zero tensors,
                  unresolved negation, and subclasses that dispatch in Python
    """
    torch = sys.modules["torch"]
    core, forward_ad = torch._C, importlib.import_module("torch.autograd.forward_ad")
    key = core.DispatchKey
    names = (
        "Python", "PythonTLSSnapshot", "FuncTorchBatched", "FuncTorchGradWrapper", "BatchedNestedTensor", "Functionalize", "Meta",
        "Negative", "Conjugate", "ZeroTensor", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "NestedTensorCPU",
        "NestedTensorCUDA", "QuantizedCPU", "QuantizedCUDA", "MkldnnCPU",
    )  # fmt: skip
    special = [getattr(key, name) for name in names if hasattr(key, name)]
    modes, transforms, tracing = core._len_torch_dispatch_stack, core._functorch.peek_interpreter_stack, core._get_tracing_state
    keys = core._dispatch_keys
    known: dict[int, bool] = {}

    def recording() -> bool:
        return bool(modes() or transforms() or tracing())

    def plain(*tensors: Any) -> bool:
        for x in tensors:
            if x is None:
                continue
            found = keys(x)
            code = found.raw_repr()
            good = known.get(code)
            if good is None:
                good = known[code] = x.layout is torch.strided and not any(found.has(s) for s in special)
            if not good or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None):
                return False
        return True

    return recording, plain


def check_memory(op: str, *arrays: Any) -> None:
    """ShapeError for torch tensors that have no memory of their own, and while torch traces or
    transforms.
    """
    tensors = [x for x in arrays if is_torch(x)]
    if not tensors:
        return
    recording, plain = torch_state()
    if not recording() and plain(*tensors):
        return
    kinds = ", ".join(f"{type(x).__name__} ({_dtype_name(x.layout)}, {x.device})" for x in tensors)
    raise ShapeError(
        f"[{op}] {kinds}; allowed: strided tensors with memory of their own, outside torch's modes and transforms. torch "
        "traces the modules of halfbyte.torch; a sparse or nested tensor must be made dense"
    )


def records_gradient(x: Any) -> bool:
    """True for a torch tensor whose operations autograd records."""
    return is_torch(x) and bool(x.requires_grad) and bool(sys.modules["torch"].is_grad_enabled())


def device_of(x: Any) -> str:
    """torch's name of an array's device ("cuda:1"); NumPy is "cpu"."""
    return str(x.device) if is_torch(x) else "cpu"


def dtype_of(x: Any) -> str:
    """Dtype name of a NumPy array or torch tensor: "float32", "bfloat16", ..."""
    return _dtype_name(x.dtype)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    """Cached: NumPy builds the name of a dtype on each call, which was most of the host time of a
    small product.
    """
    return str(dtype).removeprefix("torch.")


def to_numpy(x: Any) -> NDArray[Any]:
    """A NumPy view of a CPU tensor (any strides), or of anything NumPy takes as an array."""
    if not is_torch(x):
        return np.asarray(x)
    torch = sys.modules["torch"]
    x = x.detach()
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
    not k.

    NumPy and torch keep a view where the strides allow it.
    """
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(f"[{op}] x has shape {tuple(x.shape)}; its last axis must be k = {k} of the weight")
    lead = tuple(int(d) for d in x.shape[:-1])
    m = 1
    for d in lead:
        m *= d
    return x.reshape(m, k), lead
