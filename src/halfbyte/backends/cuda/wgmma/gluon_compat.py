"""Gluon's names for the same operations in Triton 3.6 and in 3.9."""

from __future__ import annotations

from typing import Any, get_type_hints

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

block_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for every thread of the block."""
copy_in: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(map, coordinates, barrier, destination, pred=): a box from global to shared memory by the copy
engine.
"""
copy_out: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(map, coordinates, source): a box from shared to global memory."""


def aggregate(cls: type) -> Any:
    """A class of annotated fields as a record of a kernel: made from the fields in order, it keeps
    the names of records that it holds. Its fields are the whole of it, so Triton's cache needs no
    hash of its code.
    """
    fields = get_type_hints(cls)  # Triton wants types where `annotations` of __future__ leaves strings

    def fill(self: Any, *values: Any) -> None:
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, value)

    made = type(
        cls.__name__, (), {"__annotations__": fields, "__init__": fill, "__module__": cls.__module__, "__doc__": cls.__doc__}
    )
    out: Any = core._aggregate(made)
    out.hash_attrs = []
    return out
