"""Every backend by name, best first for its device, and the reason for each one that cannot run
here.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from ..errors import BackendError
from .base import ACTIVATIONS, OPERATIONS, SCHEDULES, X_DTYPES, AbsentBackend, Backend, Call, Prepared

# name -> (device, module:class, sentence when the module is not part of this version)
_TABLE: dict[str, tuple[str, str, str]] = {
    "cpu": ("cpu", "halfbyte.backends.cpu:CPUBackend", "the native CPU kernels are not part of this version"),
    "reference": ("cpu", "halfbyte.backends.reference:ReferenceBackend", ""),
    "cuda": ("cuda", "halfbyte.backends.cuda:CUDABackend", "the CUDA kernels are not part of this version"),
    "metal": ("mps", "halfbyte.backends.metal:MetalBackend", "the Metal kernels are not part of this version"),
}


def names() -> tuple[str, ...]:
    """Backend names in order of preference."""
    return tuple(_TABLE)


@cache
def backend_named(name: str) -> Backend:
    """The backend object; BackendError lists the names for an unknown one. Its module is imported
    on first use; one that misses torch or Triton is absent, with that reason.
    """
    if name not in _TABLE:
        raise BackendError(f"[backend] {name!r} is not a backend; known: {', '.join(_TABLE)}")
    device, target, sentence = _TABLE[name]
    module, _, cls = target.partition(":")
    if importlib.util.find_spec(module) is None:
        return AbsentBackend(name, device, sentence)
    try:
        backend: Backend = getattr(importlib.import_module(module), cls)()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "triton"):
            raise
        return AbsentBackend(name, device, f"{package} is not installed; pip install 'halfbyte[cuda]'")
    return backend


def backends_for(device: str) -> list[Backend]:
    """Backends that compute on a torch device type ("cpu", "cuda", "mps"), best first."""
    return [backend_named(n) for n, (d, _, _) in _TABLE.items() if d == device]


__all__ = [
    "ACTIVATIONS", "OPERATIONS", "SCHEDULES", "X_DTYPES", "AbsentBackend", "Backend", "Call", "Prepared", "backend_named",
    "backends_for", "names",
]  # fmt: skip
