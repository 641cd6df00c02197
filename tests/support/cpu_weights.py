"""Weights and instruction sets for the tests of the native core."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.backends import backend_named
from halfbyte.errors import FormatError
from halfbyte.formats import codec_names, family_of, format_named
from halfbyte.numerics.bits import pack, unpack
from halfbyte.numerics.minifloat import element_table
from halfbyte.spec import Format
from halfbyte.tensor.qtensor import QTensor
from support.random_tensors import random_tensor

CPU = backend_named("cpu")
REASON = CPU.reason()
needs_native = pytest.mark.skipif(REASON is not None, reason=REASON or "")

if REASON is None:
    from halfbyte.backends.cpu import instruction_sets

    SETS = instruction_sets()
else:
    SETS = ("native",)

LISTED = (
    "int2:g32", "uint2:g64", "int3:g32", "uint3:g128", "int4:g32", "uint4:g128", "uint4:g16", "int8:g64", "uint8:g32",
    "int4:channel",
    "affine2:g32", "affine3:g64", "affine4:g64", "affine5:g32", "affine6:g32", "affine8:g64", "fp4:g32",
    "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4", "nf4:g64", "bnb_fp4:g64",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs",
)  # fmt: skip
"""One format of every structure the kernels know."""


def formats() -> list[Format]:
    """Every registered word whose blocks the core decodes, at its default group."""
    found = [format_named(w) for w in codec_names()]
    return [f for f in found if not f.opaque and not (f.scale == "nested" and f.inverse)]


def unit_of(fmt: Format) -> int:
    """Inputs a row must be whole multiples of."""
    return 64 if fmt.family == "ggml_fp4" else fmt.super_size or 1


def ordinary_tensor(fmt: Format, shape: tuple[int, ...], seed: int, scale: float = 0.05) -> QTensor:
    """Random codes that are numbers, under random finite scales of both signs where the format has
    signs.
    """
    q = random_tensor(fmt, shape, seed)
    fmt, rng, parts = q.format, np.random.default_rng(seed + 1), dict(q.parts)
    table = element_table(fmt.element, fmt.bits)
    codes = unpack(parts["codes"], fmt.bits, shape[-1])
    parts["codes"] = pack(np.where(np.isfinite(table[codes]), codes, 1).astype(np.uint8), fmt.bits)
    for name, a in parts.items():
        if a.dtype.kind == "f" or a.dtype.name == "bfloat16":
            spread = 1.0 if name == "nested_map" else float(1 << fmt.bits) if name == "zeros" else scale
            parts[name] = np.asarray(rng.normal(0, spread, a.shape)).astype(a.dtype)
        elif name == "scales" and fmt.scale == "e8m0":
            parts[name] = rng.integers(110, 134, a.shape).astype(np.uint8)
        elif name == "scales" and fmt.scale in ("e4m3", "ue4m3"):
            parts[name] = (rng.integers(0, 0x7E, a.shape) | (rng.integers(0, 2, a.shape) << 7)).astype(np.uint8)
        elif name in ("scales", "mins") and fmt.scale in ("u4", "u6", "i6"):
            low, high = {"u4": (0, 16), "u6": (0, 64), "i6": (-32, 32)}[fmt.scale if name == "scales" else fmt.minimum]
            parts[name] = rng.integers(low, high, a.shape).astype(a.dtype)
    return QTensor(fmt, shape, parts)


def act_ordered(q: QTensor, seed: int) -> QTensor:
    """The same parts under a random assignment of inputs to groups."""
    groups = q.format.groups(q.shape[-1])
    index = np.random.default_rng(seed).integers(0, groups, q.shape[-1]).astype(np.int32)
    return QTensor(q.format, q.shape, dict(q.parts) | {"group_index": index})


def optional_index(fmt: Format) -> bool:
    """True when act-order is a part of the format."""
    try:
        return "group_index" in family_of(fmt).optional_parts(fmt, (1, 256))
    except FormatError:
        return False


@pytest.fixture
def instruction_set(request):
    """Run a test on one instruction set, then return to the one in use."""
    from halfbyte.backends.cpu import native, use_instruction_set

    before = native().current()
    use_instruction_set(request.param)
    yield request.param
    use_instruction_set(before)


each_set = pytest.mark.parametrize("instruction_set", SETS, indirect=True)
