"""Products with rounded activations, as far as no GPU is needed: the bytes that wgmma multiplies,
by the kernel's own source on NumPy (gluon_numpy.py), and the order of x that meets them.

The portable kernel runs in test_interpreter.py, both compile in test_compile.py and
test_wgmma_compile.py, and test_rounded_gpu.py needs a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

from halfbyte.backends.cuda import decoders, order
from halfbyte.backends.cuda.mma import operands
from halfbyte.backends.cuda.rounded import launch, quantize, wgmma
from halfbyte.numerics.bits import pack
from halfbyte.numerics.minifloat import element_table
from support.gluon_numpy import Pointer, Source, T


@pytest.fixture(scope="module")
def source():
    return Source(operands, wgmma)


@pytest.mark.parametrize("key", decoders.BYTES, ids=str)
def test_operands_are_the_elements_in_the_order_of_x(source, key):
    bits, element, mode = key
    row, n, k = decoders.BYTES[key], 64, 256
    codes = np.random.default_rng(1).permutation(n * k).reshape(n, k).astype(np.uint8) & np.uint8((1 << bits) - 1)
    words = order.to_fragments(codes if bits == 8 else pack(codes, bits), k, False, element, bits).reshape(n // 16, -1, 32)
    fold, powers = mode == decoders.FOLDED, np.zeros((n, k // 32), np.int32)
    if fold:
        mode, powers = "fp8", np.random.default_rng(2).integers(-5, 7, (n, k // 32), np.int32)
    config = SimpleNamespace(
        row_blocks=1, bits=bits, decoder=row.code, registers="", segment=128, mode=launch.MODES[mode], fold=fold
    )
    tiled = Pointer(order.by_tiles(powers.astype(np.uint8) + np.uint8(120)).reshape(-1))
    work, got = SimpleNamespace(groups=k // 32, lowest=120), []
    for unit in range(k // 128):
        scales = source.function("exponents")(SimpleNamespace(scales=tiled), 0, unit, n // 16, work, config)
        v = source.function("decoded")(T(words[:, unit * 2 * bits : (unit + 1) * 2 * bits]), scales, config)
        v = np.ascontiguousarray(v.a).view(np.uint8).reshape(4, 8, 4, 2, 4, 2, 4)  # warp, g, 32 inputs, b, t, row + 8, byte
        v = np.ascontiguousarray(v.transpose(0, 5, 1, 2, 3, 4, 6)).reshape(64, 128)
        got.append(v)
    table = element_table("e4m3", 8) if mode == "fp8" else np.arange(256.0)
    got = np.concatenate(got, 1)
    values = table[got] if mode == "fp8" else got.view(np.int8).astype(np.float64)
    less = 128 if (element, mode) == ("uint", "int8") and bits == 8 else 0
    want = (element_table(element, bits)[codes] - less) * np.exp2(powers.repeat(32, 1))
    at = Source(quantize).function("stored_at")(np.arange(k), launch.order_of(bits, element))
    assert sorted(at) == list(range(k))
    np.testing.assert_array_equal(values[:, at] * row.unit, want)
