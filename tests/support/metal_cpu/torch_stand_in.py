"""`torch.mps.compile_shader` on the CPU, with that function's rules.

    kernel(*args, threads=..., group_size=...)

Tensors bind from their storage offset on, strides ignored; Python ints are 64-bit and floats 32-bit
`constant` values; lists are arrays of those. `threads` counts threads, and `group_size` has as many
axes. Where torch would let a wrong call through to read nonsense (a dtype that is not the
parameter's, a bool, a strided output) this raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import torch

from .machine import SPARSE, Library, compile_source
from .signature import Parameter

TYPES = {
    "float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16, "uchar": torch.uint8, "short": torch.int16,
    "int": torch.int32, "uint": torch.int32, "long": torch.int64,
}  # fmt: skip


class ShaderCallError(TypeError):
    """A call that torch would refuse, or that would read other bytes than meant."""


def compile_shader(source: str, **options: Any) -> ShaderLibrary:
    """A library whose attributes are its kernels; `options` go to every run."""
    return ShaderLibrary(compile_source(source), options)


class ShaderLibrary:
    """Kernels by name."""

    def __init__(self, library: Library, options: dict[str, Any]) -> None:
        self._library, self._options = library, options

    def __dir__(self) -> list[str]:
        return list(self._library.kernels)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_") or name not in self._library.kernels:
            raise AttributeError(f"no kernel {name!r} in this library")
        return lambda *args, **how: self._call(name, args, **how)

    def _call(self, name: str, args: tuple[Any, ...], threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        parameters = self._library.kernels[name].buffers
        if len(args) != len(parameters):
            raise ShaderCallError(f"{name} has {len(parameters)} buffers; {len(args)} arguments given")
        if threads is None or group_size is None or not 0 < len(threads) < 4 or len(threads) != len(group_size):
            raise ShaderCallError(f"{name}: threads {threads}, group_size {group_size}; one to three axes, as many in both")
        if arg_casts is not None:
            raise ShaderCallError("arg_casts differ between torch versions; pass ints and floats as they are")
        bound = [_bind(name, p, a) for p, a in zip(parameters, args, strict=True)]
        self._library.run(name, bound, threads, group_size, may_leave=SPARSE, **self._options)


def _bind(kernel: str, p: Parameter, value: Any) -> np.ndarray:
    where = f"{kernel}, {p.name}"
    if isinstance(value, torch.Tensor):
        if p.space != "device" or p.by != "*" or TYPES[p.type] != value.dtype:
            raise ShaderCallError(f"{where}: a {value.dtype} tensor for {p.space} {p.type}{p.by}")
        if not p.const and not value.is_contiguous():
            raise ShaderCallError(f"{where}: an output with strides {value.stride()}")
        span = 1 + sum((d - 1) * s for d, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        flat = value.as_strided((span,), (1,))
        return (flat.view(torch.int16) if value.dtype == torch.bfloat16 else flat).numpy()
    if p.space != "constant":
        raise ShaderCallError(f"{where}: {value!r} for a device pointer")
    values = value if isinstance(value, (list, tuple)) else [value]
    kind = {"long": int, "float": float}.get(p.type)
    if not all(type(v) is kind for v in values) or (p.by == "*") != isinstance(value, (list, tuple)):
        raise ShaderCallError(
            f"{where}: {value!r} for constant {p.type}{p.by}; ints are long, floats are float, lists are pointers"
        )
    return np.array(values, np.int64 if kind is int else np.float32)
