"""The project's own launches with CPU tensors: kernels compiled to PTX for Hopper, which ptx_machine executes."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from halfbyte.backends.cuda import launch
from ptx_machine import Entry, execute

TARGET = GPUTarget("cuda", 90, 32)
_compiled = {}


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return TARGET


def run(kernel, *args, grid, warmup=False, **options):
    """JITFunction.run: bound by Triton's own binder, compiled to PTX and no further, executed here."""
    options |= {"debug": False, "instrumentation_mode": ""}
    _, _, target, backend, binder = kernel.device_caches["hopper"]
    bound, specialization, given = binder(*args, **options)
    key = kernel, str(specialization), str(given)
    if key not in _compiled:
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given)
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        binary = triton.compile(source, target=target, options=parsed.__dict__)
        names = [n for n, t in signature.items() if t != "constexpr"]
        _compiled[key] = Entry(binary.asm["ptx"]), 32 * parsed.num_warps, binary.metadata.shared, names
    entry, threads, room, names = _compiled[key]
    execute(entry, threads, room, grid, [bound[n] for n in names])


def nan(*shape, original=torch.empty, **options):
    """torch.empty, poisoned."""
    out = original(*shape, **options)
    return out.fill_(float("nan") if out.is_floating_point() else 0x55)


@contextlib.contextmanager
def hopper(multiprocessors=4, cache=None, card=""):
    """Launches with CPU tensors go through `run`, on a card of a few multiprocessors, with its
    tiles where it is named; new tensors hold NaN."""
    with contextlib.ExitStack() as stack:
        for name, value in {"_multiprocessors": multiprocessors, "_hopper": True, "_converts": True, "_card": card}.items():
            stack.enter_context(mock.patch.object(launch, name, return_value=value))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        stack.enter_context(mock.patch.object(torch, "empty", nan))
        if cache is not None:
            stack.enter_context(mock.patch.dict("os.environ", {"TRITON_CACHE_DIR": str(cache)}))
        stack.enter_context(mock.patch.object(driver, "_active", Hopper()))
        yield
