"""The project's own launches with CPU tensors: kernels compiled to PTX for Hopper, which
ptx_machine executes, or only bound.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import torch
from halfbyte.backends.cuda import device as gpu
from support.ptx_machine import Entry, execute

TARGET = GPUTarget("cuda", 90, 32)
_compiled = {}


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return TARGET


def leaves(kind, value):
    """The run-time values of an argument, which may be a record."""
    if isinstance(kind, tuple):
        return [v for k, one in zip(kind, value, strict=True) for v in leaves(k, one)]
    return [] if kind == "constexpr" else [value]


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
        _compiled[key] = Entry(binary.asm["ptx"]), 32 * parsed.num_warps, binary.metadata.shared, signature
    entry, threads, room, signature = _compiled[key]
    execute(entry, threads, room, grid, [v for n, t in signature.items() for v in leaves(t, bound[n])])


class Compiled:
    """What the fused schedule keeps of a launch: later ones go past Triton, and compile nothing."""

    def __getitem__(self, grid):
        return lambda *arguments: None


@contextlib.contextmanager
def bound(multiprocessors=132, card="NVIDIA H200"):
    """Launches with CPU tensors are bound by Triton and go no further: the set of what each would
    compile, by name and specialization.
    """
    seen = set()

    def bind(kernel, *arguments, grid, warmup=False, **options):
        options |= {"debug": False, "instrumentation_mode": ""}
        _, specialization, given = kernel.device_caches["hopper"][-1](*arguments, **options)
        seen.add((kernel.__name__, str(specialization), str(given)))
        return Compiled()

    with (
        hopper(multiprocessors, card=card),
        mock.patch.object(JITFunction, "run", bind),
    ):
        yield seen


def nan(*shape, original=torch.empty, **options):
    """torch.empty, poisoned."""
    out = original(*shape, **options)
    return out.fill_(float("nan") if out.is_floating_point() else 0x55)


@contextlib.contextmanager
def hopper(multiprocessors=4, cache=None, card="", assemble=False):
    """Launches with CPU tensors go through `run`, on a card of a few multiprocessors, with its
    tiles where it is named; new tensors hold NaN. assemble: the PTX is also assembled, which says
    whether it can be.
    """
    with contextlib.ExitStack() as stack:
        answers = {"multiprocessors": multiprocessors, "supports_pdl": True, "converts_fp8": True, "card_name": card}
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(gpu, name, return_value=value))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        if not assemble:
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        stack.enter_context(mock.patch.object(torch, "empty", nan))
        if cache is not None:
            stack.enter_context(mock.patch.dict("os.environ", {"TRITON_CACHE_DIR": str(cache)}))
        stack.enter_context(mock.patch.object(driver, "_active", Hopper()))
        yield
