"""Every format with a Metal kernel, and routes for the tests: kernels compiled in bundles, on a
stand-in for torch's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

import torch
from halfbyte.backends.metal import MetalBackend
from halfbyte.backends.metal.source import Kernel, whole_source
from halfbyte.backends.metal.torch_runtime import TorchRuntime
from halfbyte.backends.metal.weight import refusal
from halfbyte.backends.metal.widen import one_level_format, widens
from halfbyte.formats import FAMILIES, Format, format_named
from support.metal_cpu.torch_stand_in import compile_shader

SHAPE = (9, 256)
"""Of the tensors that formats are fitted to."""


def _all() -> dict[str, Format]:
    found = {}
    for family in FAMILIES.values():
        for word in family.codecs:
            fmt = family.fit(format_named(word), SHAPE)
            if refusal(fmt) is None:
                found[str(fmt)] = fmt
    for scale in ("bfloat16", "float32"):
        for word in ("int4", "affine4", "uint4", "fp4", "affine5"):
            fmt = format_named(word, 32, scale_dtype=scale)
            found[f"{fmt} {scale}"] = fmt
    for level in ("divide", "amax", "none"):
        found[f"nvfp4 {level}"] = format_named("nvfp4", global_scale=level)
    for word in ("int4", "affine3", "fp4"):
        found[f"{word}:channel"] = format_named(word, -1)
    return found


FORMATS = _all()


def on_device(fmt: Format) -> Format:
    """The format as the kernels see it."""
    return one_level_format(fmt) if widens(fmt) else fmt


SIX = {
    name: format_named(word, group)
    for name, word, group in (
        ("fp4", "fp4", 32), ("uint4", "uint4", 32), ("int4", "int4", -1), ("mxfp4", "mxfp4", None), ("nvfp4", "nvfp4", None),
        ("affine4", "affine4", 32),
    )
}  # fmt: skip
"""The 4-bit formats of the fused schedule."""

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Stand(TorchRuntime):
    """The torch runtime on CPU tensors. `load` compiles kernels a dozen at a time, which is faster
    than each alone.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(lambda source: compile_shader(source, **options), "cpu")

    def load(self, kernels: Sequence[Kernel]) -> None:
        todo = [k for k in {k.name: k for k in kernels}.values() if k.name not in self._kernels]
        for i in range(0, len(todo), 12):
            some = todo[i : i + 12]
            library = self.compile_shader(whole_source(*some))
            self._kernels.update({k.name: getattr(library, k.name) for k in some})


def stand(flush: bool = True) -> Stand:
    """One runtime a way of running: whether float32 subnormals are zero."""
    return _stand(flush)


@cache
def _stand(flush: bool) -> Stand:
    """Behind `stand`, since `cache` tells f() from f(True)."""
    return Stand(flush=flush)


def backend(flush: bool = True) -> MetalBackend:
    """The Metal backend on the stand-in."""
    return MetalBackend(stand(flush))


def as_float(t: torch.Tensor) -> np.ndarray:
    """A tensor's values as float32."""
    return t.float().numpy()
