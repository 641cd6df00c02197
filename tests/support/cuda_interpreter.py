"""Run by test_interpreter.py in a process of its own with TRITON_INTERPRET=1: formats through the
portable kernels.
"""

import sys

import numpy as np
from triton.runtime import interpreter

import torch
from halfbyte.backends import backend_named
from halfbyte.backends.cuda import launch
from halfbyte.backends.cuda.rounded import launch as rounded
from halfbyte.backends.cuda.tuning.mma_tiles import BlockTile, Tile
from halfbyte.backends.cuda.weight import in_lanes, to_device
from halfbyte.numerics import activations as definition
from support.gpu_weights import make, served


def patched(tensor, scope, original=interpreter._patch_lang_tensor):
    """Loop bounds known only when the kernel runs: the interpreter's own int() of a one-element
    array fails since NumPy 2.4.
    """
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patched


def fused(self, x, y, z):
    """x · y + z rounded once, but for ties that float64 makes; the interpreter's own rounds twice."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = fused
CPU = backend_named("cpu")


WHOLE = ("mxfp4", "uint3:g64")
"""Formats that go through every pair of schedule and words and every split: with fragment order and
without. Others meet each.
"""


def check(word):
    q = make(word, 5, 2, np.random.default_rng(1))
    check_order(word, q, to_device(q, "cpu"))
    if in_lanes(q.format, q.shape[1]):
        check_order(word, q, to_device(q, "cpu", lanes=True))


def check_order(word, q, w):
    np.testing.assert_array_equal(launch.dequantize(w, torch.float32, packed=False).numpy(), q.dequantize())
    half = launch.dequantize(w, torch.float16, packed=False).numpy()
    np.testing.assert_array_equal(half, q.dequantize().astype(np.float16))
    k = q.shape[1]
    for mode in ("int8", "fp8"):
        if definition.refusal(q.format, mode) is None:
            rows = np.random.default_rng(2).standard_normal((3, k)).astype(np.float32)
            y = rounded.linear(torch.from_numpy(rows), w, None, mode, rounded.PortableTile(16, 16, 4, 1), half=True).numpy()
            exact = definition.rounded(rows, q.format, mode).astype(np.float64) @ q.dequantize("float64").T
            assert np.abs(y - exact).max() <= 1e-5 * np.abs(exact).max(), (word, mode)
            if mode == "int8" and CPU.reason() is None:
                np.testing.assert_array_equal(y, CPU.linear(rows, CPU.prepare(q), None, activations=mode))
    x = torch.zeros(2, k)
    x[0, 3] = 1
    x[1, k - 1] = 1
    want = q.dequantize().T[[3, k - 1]]
    np.testing.assert_array_equal(launch.matvec(x, w, None, Tile(2, 32, 4), packed=False).numpy(), want)
    whole = word in WHOLE or len(sys.argv) < 2
    for split in (1, 2) if whole else (2,):
        y = launch.matmul(x, w, torch.ones(5), Tile(16, 4, 4, 16, 1, split), packed=False).numpy()
        np.testing.assert_array_equal(y, want + np.float32(1))
    # Whole units of fragment order, and word by word; double-buffered differs in nothing that an
    # interpreter knows.
    pairs = [("single-stage", 8), ("striped", 4), *((("single-stage", 4), ("striped", 8)) if whole else ())]
    for schedule, words in pairs:
        y = launch.tiled(x, w, torch.ones(5), schedule, BlockTile(16, 16, words, 4), packed=False).numpy()
        np.testing.assert_array_equal(y, want + np.float32(1))


def check_absent_tokens():
    """Scales and sums of tokens past the last, which the kernel for Hopper reads, are written."""
    filled = lambda shape, dtype, device: torch.full(shape, 77, dtype=dtype, device=device)  # noqa: E731
    for mode, span, sums in (("int8", 32, True), ("int8", 64, False), ("fp8", 64, True), ("fp8", 64, False)):
        s = rounded.Segments(32, span, 128)
        for m in (1, 3, 256):
            x = torch.from_numpy(np.random.default_rng(m).standard_normal((m, 100)).astype(np.float32))
            empty, torch.empty = torch.empty, filled
            try:
                absent = rounded.quantized(x, mode, s, sums, by_token=False)
            finally:
                torch.empty = empty
            present = rounded.quantized(x, mode, s, sums)
            for padded, plain in [(absent.scales, present.scales), (absent.sums, present.sums)][: 1 + sums]:
                assert padded.shape[-1] == 256
                assert (padded[..., m:] == 0).all()
                assert torch.equal(padded[..., :m], plain[:m].movedim(0, -1))


check_absent_tokens()
for word in served() if len(sys.argv) < 2 else sys.argv[1:]:
    check(word)
    print(word, "ok", flush=True)
