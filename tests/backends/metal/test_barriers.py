"""Every barrier of the shaders is needed: with any one taken out, some kernel races, and the
machine says so.
"""

from __future__ import annotations

import re

import pytest

import torch
from halfbyte.backends.metal import MetalBackend, launch
from halfbyte.backends.metal.source import shared_source
from halfbyte.backends.metal.torch_runtime import TorchRuntime
from support.metal_cpu.machine import MetalFaultError, available
from support.metal_cpu.torch_stand_in import compile_shader
from support.metal_formats import SIX
from support.random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")

BARRIER = re.compile(r"^ *(?:threadgroup|simdgroup)_barrier\(mem_flags::mem_threadgroup\);\n", re.M)
PLACES = list(BARRIER.finditer(shared_source()))


def function_of(place: re.Match[str]) -> str:
    """Name of the device function a barrier stands in."""
    return re.findall(r"inline \S+ (\w+)\(", shared_source()[: place.start()])[-1]


def run_all(runtime: TorchRuntime, function: str) -> None:
    """The kernels that call a function, over more than one step of k and tile of x."""
    b = MetalBackend(runtime)
    w = b.prepare(finite_tensor(SIX["affine4"], (70, 96), 1))
    x = torch.ones(9, 96).half()
    product = lambda: launch.Product(runtime, x, w.data, None)  # noqa: E731
    if function in ("gemm_single_stage", "store_matrix"):
        b.linear(x, w, None, schedule="single-stage")
    elif function == "gemm_double_buffered":
        b.linear(x, w, None, schedule="double-buffered")
    elif function == "gemm_striped":
        b.linear(x, w, None, schedule="striped")
    elif function == "gemm_fused":
        launch.fused(product(), "")
    elif function == "gemm_fused_wide":
        launch.fused(product(), "wide")
    elif function == "fill_e2m1_table":
        e2m1 = b.prepare(finite_tensor(SIX["mxfp4"], (9, 96), 1))
        launch.matvec(launch.Product(runtime, x[:1], e2m1.data, None), "threadgroup")
    elif function == "matvec":
        launch.matvec(product())
    elif function == "rmsnorm_matvec":
        launch.rmsnorm_matvec(runtime, x[0], x[0], w.data, 1e-6)
    else:
        down = b.prepare(finite_tensor(SIX["mxfp4"], (2, 5, 64), 1))
        m = 2 if function == "experts_matvec" else 40
        up = b.prepare(finite_tensor(SIX["mxfp4"], (2, 128, 96), 1))
        index = torch.arange(2 * m).reshape(m, 2) % 2
        b.experts(torch.ones(m, 96).half(), up, down, index, torch.ones(m, 2))


@pytest.mark.parametrize("place", PLACES, ids=[f"{function_of(p)}-{i}" for i, p in enumerate(PLACES)])
def test_without_this_barrier_a_kernel_races(place, monkeypatch):
    monkeypatch.setattr(launch, "STRIPES", 1)  # a stripe of several steps

    def broken(source: str):
        return compile_shader(source.replace(shared_source(), shared_source()[: place.start()] + shared_source()[place.end() :]))

    function = function_of(place)
    with pytest.raises(MetalFaultError, match=r"race|uninitialised"):
        run_all(TorchRuntime(broken, "cpu"), function)
