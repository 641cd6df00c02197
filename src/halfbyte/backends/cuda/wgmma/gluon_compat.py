"""Gluon's names for the same operations in Triton 3.6 and in 3.9."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

block_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for every thread of the block."""
copy_in: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(map, coordinates, barrier, destination, pred=): a box from global to shared memory by the copy
engine.
"""
copy_out: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(map, coordinates, source): a box from shared to global memory."""
