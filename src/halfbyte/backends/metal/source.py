"""The text of a kernel: shared device functions from shaders/, and a thin entry for each of the two
runtimes.

An entry names the buffers, declares the threadgroup memory and calls one device function; its body
is the same text in both runtimes. `python -m halfbyte.backends.metal matvec mxfp4 float16` prints
one.

MSL 3.1 (macOS 14) is the oldest version these take: bfloat is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

SHADERS = ("decode", "rounding", "codec", "dequantize", "matvec", "gemm_tile", "gemm", "gemm_fused", "experts", "rmsnorm_matvec")
"""Files of shaders/ in the order in which each may use those before it."""
PREAMBLE = (
    "#include <metal_stdlib>\n#include <metal_simdgroup>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
    "#pragma METAL fp contract(off)\n"
)
"""The pragma: Metal joins a product and a sum into one fma even in safe mode, and rounding.metal's
remainders would be wrong.
"""
MSL_TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat",
    "uint8": "uchar",
    "uint32": "uint",
    "int16": "short",
    "int32": "int",
}
_ATTRIBUTES = {
    "thread_position_in_grid": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
}


@dataclass(frozen=True)
class Buffer:
    """An array argument: its name in the kernel and its dtype."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Kernel:
    """One kernel, complete but for the runtime.

    name         unique; carries codec, dtype, group
    inputs       arrays read                  ints, floats  numbers, after the inputs
    outputs      arrays written, last         body          declarations and the call, MSL
    group        threads of a threadgroup
    """

    name: str
    inputs: tuple[Buffer, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    outputs: tuple[Buffer, ...]
    body: str
    group: tuple[int, int, int]


@cache
def shared_source() -> str:
    """The device functions, with the includes they need."""
    folder = resources.files(__package__) / "shaders"
    return PREAMBLE + "\n".join((folder / f"{name}.metal").read_text(encoding="utf-8") for name in SHADERS)


def entry(kernel: Kernel) -> str:
    """The whole kernel for `torch.mps.compile_shader`: Python ints arrive there as 64-bit, floats
    as 32-bit constants.
    """
    parameters = [f"const device {MSL_TYPES[b.dtype]}* {b.name}" for b in kernel.inputs]
    parameters += [f"constant long& {i}" for i in kernel.ints] + [f"constant float& {f}" for f in kernel.floats]
    parameters += [f"device {MSL_TYPES[b.dtype]}* {b.name}" for b in kernel.outputs]
    parameters = [f"{p} [[buffer({i})]]" for i, p in enumerate(parameters)]
    parameters += [f"{t} {a} [[{a}]]" for a, t in _ATTRIBUTES.items() if a in kernel.body]
    return f"kernel void {kernel.name}(\n    " + ",\n    ".join(parameters) + f") {{\n{kernel.body}}}\n"


def whole_source(*kernels: Kernel) -> str:
    """A library of kernels for the torch runtime."""
    return shared_source() + "\n" + "\n".join(entry(k) for k in kernels)
