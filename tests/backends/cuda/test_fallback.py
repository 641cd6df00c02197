"""Formats that are decoded as a whole on NVIDIA GPUs: in Triton's interpreter here, on a GPU with
`make test-gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import QTensor, format_named
from halfbyte.backends.cuda import weight
from halfbyte.backends.cuda.fallback import weight as plain
from halfbyte.formats import family_of

torch = pytest.importorskip("torch")


def cases():
    """Name -> weight: one of each way that no packed product takes."""
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((9, 192)).astype(np.float32)
    out = {f"hqq{b}": hb.quantize(dense, f"hqq{b}") for b in (1, 2, 3, 4, 8)}
    out["bnb_int8"] = hb.quantize(dense, "bnb_int8")
    out["flat"] = hb.quantize(rng.standard_normal((5, 24)).astype(np.float32), "nf4:g64")
    for name, (word, options) in OPTIONS.items():
        fmt = format_named(word, **options)
        shape = (9, 192)
        parts = {}
        for part, (size, dtype) in family_of(fmt).geometry(fmt, shape).items():
            kind = np.dtype(dtype).kind
            if part == "codes":
                parts[part] = rng.integers(0, 120, size, dtype=np.uint8)
            elif kind in "iu":
                parts[part] = rng.integers(1, 100, size).astype(dtype)
            else:
                parts[part] = (0.5 + rng.random(size)).astype(dtype)
        out[name] = QTensor(fmt, shape, parts)
    uneven = hb.quantize(dense, "uint4:g32")
    index = np.repeat(np.arange(6, dtype=np.int32), (40, 24, 32, 32, 32, 32))
    out["uneven act-order"] = QTensor(uneven.format, uneven.shape, {**uneven.parts, "group_index": index})
    return out


OPTIONS = {
    "float8 in blocks": ("fp8_e4m3:g64", {"rows": 4}),
    "nested": ("nf4:g64", {"nested": True}),
    "nested, divided": ("nf4_modelopt:g64", {"nested": True}),
    "flat and nested": ("nf4:g64", {"nested": True, "grouping": "flat"}),
    "strided": ("hqq4:g64", {"axis": 0}),
    "divided": ("int4:g64", {"inverse": True}),
    "flat": ("bnb_fp4:g64", {"grouping": "flat"}),
}


def check(device, names=None):
    from halfbyte.backends.cuda.fallback import kernel as fallback

    for name, q in cases().items():
        if names and name not in names:
            continue
        assert weight.refusal(q.format) is not None or not weight.even_groups(q), name
        held = plain.to_device(q, device)
        got = fallback.dequantize(held, torch.float32).cpu().numpy()
        np.testing.assert_array_equal(got, q.dequantize("float32"), err_msg=name)
        half = fallback.dequantize(held, torch.float16).cpu().numpy()
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(half, q.dequantize("float32").astype(np.float16), err_msg=name)
        rows = fallback.dequantize(held, torch.float32, torch.tensor([4, 0, 4], device=device)).cpu().numpy()
        np.testing.assert_array_equal(rows, q.dequantize("float32")[[4, 0, 4]], err_msg=name)
        for part, want in q.parts.items():
            assert plain.canonical_parts(held)[part].tobytes() == np.ascontiguousarray(want).tobytes(), (name, part)
        print(name, "ok", flush=True)


def test_decoding_as_a_whole_without_a_gpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(cases())


@pytest.mark.gpu
def test_decoding_and_products_on_a_gpu():
    from support.gpu_weights import cuda

    cuda()
    check("cuda")
    for name, q in cases().items():
        p = hb.prepare(q, device="cuda")
        x = torch.randn(5, q.shape[1], device="cuda", dtype=torch.float32)
        x64, w64 = x.double().cpu().numpy(), q.dequantize("float64")
        error = np.abs(hb.linear(x, p).double().cpu().numpy() - x64 @ w64.T)
        assert (error <= 2e-6 * (np.abs(x64) @ np.abs(w64.T))).all(), name


if __name__ == "__main__":
    check("cpu")
