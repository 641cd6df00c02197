"""What the launches need to know of a GPU: size, abilities, how launches overlap, counters kept
between launches.

Tensors on the CPU stand for a GPU in Triton's interpreter and in tests: there every answer is the
least one.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from triton.runtime.driver import driver

import torch

_counters: dict[Any, Any] = {}
_OUTGROWN: list[torch.Tensor] = []
"""Counters that were replaced by more: a graph that was recorded may count there."""
_unchanged = nullcontext()


def use(device: torch.device) -> Any:
    """Context in which `device` is the current one; free of charge where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _unchanged
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors; a few for the interpreter's CPU."""
    return 5 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for the interpreter's CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def card_name(device: torch.device) -> str:
    """The card's name; "" for the interpreter's CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def supports_pdl(device: torch.device) -> bool:
    """True where a kernel may start before the previous one has ended (programmatic dependent
    launch): capability 9.0 and up.
    """
    return capability(device)[0] >= 9


def reads_lanes(device: torch.device | str) -> bool:
    """True where `mma` reads lane order: every GPU that the kernels run on, not the interpreter's
    CPU.
    """
    return capability(torch.device(device))[0] >= 8


def converts_fp8(device: torch.device) -> bool:
    """True where pairs of E4M3 have a conversion instruction: capability 8.9 and up."""
    return capability(device) >= (8, 9)


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch options for overlap with the previous kernel. A kernel launched so reads weights early
    (nothing on the device writes them: `weight.to_device` waits for its copies) and everything else
    after `gdc_wait`.
    """
    return {"launch_pdl": supports_pdl(device)} if device.type == "cuda" else {}


def overlap_options(device: torch.device) -> dict[str, Any]:
    """`launch_options`, and the compile-time argument PDL that goes with them."""
    return {"PDL": supports_pdl(device), **launch_options(device)}


def stream_of(device: torch.device) -> int:
    """The address of the current stream; 0 for the interpreter's CPU."""
    return int(driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0


def recording(device: torch.device) -> bool:
    """True while what is launched becomes a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def arrival_counters(device: torch.device, tiles: int, stream: int | None = None) -> torch.Tensor:
    """Counters of arrived programs, zero between launches (the last program of a tile resets its
    own); one set a device and stream. On a stream without one, a CUDA graph that is recorded gets
    counters of its own memory, which each replay zeroes: another graph's replay must not rely on
    them. Keep the tensor until the launch.
    """
    key = device, stream_of(device) if stream is None else stream
    counters = _counters.get(key)
    if counters is not None and counters.numel() >= tiles:
        return counters
    if recording(device):
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    if counters is not None:
        _OUTGROWN.append(counters)
    counters = _counters[key] = torch.zeros(max(4096, tiles), dtype=torch.int32, device=device)
    return counters
