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

import torch
from halfbyte import QTensor, format_named
from halfbyte.backends.base import Call
from halfbyte.backends.cuda import CUDABackend, decoders, order
from halfbyte.backends.cuda.mma import operands
from halfbyte.backends.cuda.rounded import launch, quantize, wgmma
from halfbyte.backends.cuda.weight import to_device
from halfbyte.backends.cuda.wgmma import operand
from halfbyte.numerics.bits import pack
from halfbyte.numerics.minifloat import element_table, scale_table
from support.gluon_numpy import Source, T
from support.gpu_weights import random_parts


@pytest.fixture(scope="module")
def source():
    return Source(operands, operand, wgmma)


def test_scales_of_whole_tokens_in_integers_are_the_cpus_alone():
    call = Call("linear", format_named("int8:channel"), activations="int8_token")
    assert CUDABackend().refuses(call) == "int8_token activations are computed on the CPU; rounded here: int8, fp8"


@pytest.mark.parametrize("key", decoders.BYTES, ids=str)
def test_operands_are_the_elements_in_the_order_of_x(source, key):
    bits, element, mode = key
    row, n, k = decoders.BYTES[key], 64, 256
    codes = np.random.default_rng(1).permutation(n * k).reshape(n, k).astype(np.uint8) & np.uint8((1 << bits) - 1)
    words = order.to_fragments(codes if bits == 8 else pack(codes, bits), k, False, element, bits).reshape(n // 16, -1, 32)
    fold, powers = mode == decoders.FOLDED, np.zeros((n, k // 32), np.int32)
    if fold:
        mode, powers = "fp8", np.random.default_rng(2).integers(-decoders.FOLDED_SPREAD, 1, (n, k // 32), np.int32)
    config = SimpleNamespace(
        row_blocks=1, bits=bits, decoder=row.code, registers="", segment=128, mode=launch.MODES[mode], fold=fold
    )
    top = 120
    tiled, got = order.by_tiles((powers + top).astype(np.uint8)).view(np.int16).reshape(n // 16, -1), []
    for unit in range(k // 128):
        scales = source.function("factors")(T(tiled[:, 32 * unit : 32 * (unit + 1)]), launch.fold_shift(top), config)
        v = source.function("decoded")(T(words[:, unit * 2 * bits : (unit + 1) * 2 * bits]), scales, config)
        v = np.ascontiguousarray(v.a).view(np.uint8).reshape(4, 8, 4, 2, 4, 2, 4)  # warp, g, 32 inputs, b, t, row + 8, byte
        v = np.ascontiguousarray(v.transpose(0, 5, 1, 2, 3, 4, 6)).reshape(64, 128)
        got.append(v)
    table = element_table("e5m2" if row.e5m2 else "e4m3", 8) if mode == "fp8" else np.arange(256.0)
    got = np.concatenate(got, 1)
    values = table[got] if mode == "fp8" else got.view(np.int8).astype(np.float64)
    less = 128 if (element, mode) == ("uint", "int8") and bits == 8 else 0
    want = (element_table(element, bits)[codes] - less) * np.exp2(powers.repeat(32, 1) + (1 if fold else 0))
    at = Source(quantize).function("stored_at")(np.arange(k), launch.order_of(bits, element, key[2]))
    assert sorted(at) == list(range(k))
    np.testing.assert_array_equal(values[:, at] * (1 if fold else row.unit), want)


@pytest.mark.parametrize(
    ("word", "scale"),
    [("int4:g128", "float16"), ("int4:g32", "bfloat16"), ("mxfp4", None), ("nvfp4", None), ("int4:g64", "float16")],
)
def test_staged_scales_are_those_of_each_group(source, word, scale):
    """A stage's 16-bit words of 64 rows and 128 inputs, as rows and groups have them."""
    fmt = format_named(word, **({"scale_dtype": scale} if scale else {}))
    q = QTensor(fmt, (64, 256), random_parts(fmt, (64, 256), np.random.default_rng(4)))
    w = to_device(q, "cpu")
    words = launch.staged_words(w)
    kind = launch.E8M0_NORMAL.value if w.normal_scales else launch.SCALES[fmt.scale]
    config = SimpleNamespace(
        row_blocks=1, group=fmt.group_size, scale=kind, scale_bfloat=scale == "bfloat16", unit=0.5, scale_words=words
    )
    stored = w.scales.view(torch.int16).reshape(4, -1).numpy()
    assert words
    assert stored.shape[1] % words == 0
    got = []
    for unit in range(2):
        groups = max(1, 128 // fmt.group_size)
        at = unit * 128 // fmt.group_size * (words // groups)
        got += [one.a for one in source.function("staged_terms")(T(stored[:, at : at + words]), None, config)]
    raw = q.parts["scales"]
    table = scale_table(fmt.scale) if raw.dtype == np.uint8 else None
    want = (raw.astype(np.float64) if table is None else table[raw].astype(np.float64)) * 0.5
    np.testing.assert_array_equal(np.stack(got, 1), want)
