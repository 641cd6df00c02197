"""`mx.fast.metal_kernel` on the CPU, with that function's rules, on real MLX arrays.

It writes the signature from what it is given: an input of fewer than 8 elements is a `constant`
pointer, a 0-d input a `constant` reference, all others `device` pointers of the array's dtype;
built-in values appear when their name stands in the source, and `NAME_shape`, `NAME_strides`,
`NAME_ndim` likewise. Inputs are made row contiguous, which leaves a view of neighbouring elements
where it is, at whatever offset. The grid counts threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .machine import SPARSE, compile_source

TYPES = {
    mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.uint8: "uint8_t", mx.int16: "int16_t",
    mx.int32: "int32_t", mx.uint32: "uint32_t", mx.int64: "int64_t",
}  # fmt: skip
BUILT_IN = {
    "simdgroup_index_in_threadgroup": "uint", "simdgroups_per_threadgroup": "uint", "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint", "thread_position_in_grid": "uint3", "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3", "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint", "threads_per_threadgroup": "uint3",
}  # fmt: skip
CONSTANT_BELOW = 8


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> Callable[..., list[mx.array]]:
    """What MLX returns: a callable that runs the kernel on arrays."""
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    if atomic_outputs or not ensure_row_contiguous:
        raise NotImplementedError("the stand-in makes inputs contiguous and has no atomics")
    for n in input_names:
        if any(f"{n}_{what}" in source for what in ("shape", "strides", "ndim")):
            raise NotImplementedError(f"the stand-in does not pass {n}'s shape; pass numbers")

    def call(
        *,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        **options: Any,
    ) -> list[mx.array]:
        if len(inputs) != len(input_names) or not len(output_shapes) == len(output_dtypes) == len(output_names):
            raise ValueError(f"[metal_kernel] {name}: {len(inputs)} inputs for {len(input_names)} names")
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        text, kernel = whole_source(name, header, source, input_names, arrays, output_names, output_dtypes, template)
        bound = [_to_numpy(a) for a in arrays]
        outputs = [np.empty(shape, _numpy_dtype(d)) for shape, d in zip(output_shapes, output_dtypes, strict=True)]
        group = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
        compile_source(text).run(kernel, [*bound, *outputs], grid, group, may_leave=SPARSE, **options)
        return [_to_mlx(o, d) for o, d in zip(outputs, output_dtypes, strict=True)]

    return call


def whole_source(
    name: str,
    header: str,
    source: str,
    input_names: Sequence[str],
    arrays: Sequence[mx.array],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]] = (),
) -> tuple[str, str]:
    """The source MLX would compile, and the kernel's name. Template arguments become types and
    constants of the body.
    """
    kernel = "custom_kernel_" + name
    parameters = []
    for n, a in zip(input_names, arrays, strict=True):
        space = "constant" if a.size < CONSTANT_BELOW else "device"
        parameters.append(f"const {space} {TYPES[a.dtype]}{'&' if a.ndim == 0 else '*'} {n}")
        kernel += f"_{TYPES[a.dtype]}" + ("s" if a.ndim == 0 else "c" if space == "constant" else "")
    kernel += "".join(f"_{TYPES[d]}" for d in output_dtypes)
    parameters += [f"device {TYPES[d]}* {n}" for n, d in zip(output_names, output_dtypes, strict=True)]
    lines = [f"{p} [[buffer({i})]]" for i, p in enumerate(parameters)]
    lines += [f"{t} {b} [[{b}]]" for b, t in BUILT_IN.items() if b in source]
    given = ""
    for n, value in template:
        if isinstance(value, mx.Dtype):
            given += f"typedef {TYPES[value]} {n};\n"
        else:
            given += f"constant constexpr {'bool' if isinstance(value, bool) else 'int'} {n} = {int(value)};\n"
    return f"{header}\n{given}kernel void {kernel}(\n  " + ",\n  ".join(lines) + f") {{\n{source}\n}}\n", kernel


def _numpy_dtype(d: mx.Dtype) -> Any:
    return np.uint16 if d == mx.bfloat16 else np.dtype(str(d).removeprefix("mlx.core."))


def _address(a: mx.array) -> int:
    return np.array(a, copy=False).ctypes.data


BASE = _address(mx.zeros(64)) % 16
"""Where MLX's CPU allocator puts the first byte of an array; on Metal that is a multiple of 16 and
more.
"""


def _to_numpy(a: mx.array) -> np.ndarray:
    """The array's numbers, as far from a multiple of 16 bytes as the array is from its own
    allocation's beginning.
    """
    held = mx.contiguous(a)
    held = held.view(mx.uint16) if a.dtype == mx.bfloat16 else held
    mx.eval(held)
    value = np.array(held, copy=False)
    if not value.size:
        return np.array(value)
    offset = (value.ctypes.data - BASE) % 16
    room = np.empty(value.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + offset
    out = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape) if offset % value.itemsize == 0 else None
    assert out is not None, "MLX aligns elements"
    out[...] = value
    return out


def _to_mlx(a: np.ndarray, d: mx.Dtype) -> mx.array:
    return mx.array(a).view(mx.bfloat16) if d == mx.bfloat16 else mx.array(a)
