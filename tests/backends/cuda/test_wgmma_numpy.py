"""What the wgmma kernel multiplies, by its own source on NumPy (gluon_numpy.py): stored words,
scales and addends to the finished operand, and sums to outputs. The products themselves, the copies
and the barriers need a GPU (test_wgmma_gpu.py).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

import torch
from halfbyte import QTensor, format_named
from halfbyte.backends.cuda.mma import epilogue as mma_epilogue
from halfbyte.backends.cuda.mma import operands as mma_operands
from halfbyte.backends.cuda.tuning.wgmma_tiles import FusedTile
from halfbyte.backends.cuda.weight import to_device
from halfbyte.backends.cuda.wgmma import epilogue, kernel, launch, operand
from support import ptx
from support.gluon_numpy import Pointer, Source, T
from support.gpu_weights import random_parts

WORDS = ["int4:g128", "int4:g32", "uint4:g64", "uint4:g16", "affine4:g64", "mxfp4", "nvfp4", "nvfp4_ue4m3", "fp4:g16", "int8:g32",
         "uint8:g64", "affine8:g64", "mxfp8_e4m3", "mxfp8_e5m2", "int2:g64", "uint2:g32", "affine2:g64"]  # fmt: skip
WORDS += [f"{word} bfloat16" for word in ("int4:g32", "uint4:g64", "affine4:g64", "uint8:g64", "uint2:g32", "affine2:g64")]
LANES = ["int3:g64", "uint3:g64", "int5:g32", "uint5:g16", "uint6:g128", "int6:g-1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
         "q5_0", "q5_1", "nf4:g64", "iq4_nl", "iq4_xs", "mxfp6_e2m3", "mxfp6_e3m2", "affine3:g64", "affine6:g64", "affine1:g64",
         "uint5:g64 bfloat16", "affine6:g64 bfloat16", "int3:g32 float32",
         "nf4:g32 bfloat16", "nf4_modelopt:g64", "int6:g16"]  # fmt: skip
TILES = [FusedTile(32, 1, 1), FusedTile(64, 1, 2), FusedTile(128, 2, 2)]


@pytest.fixture(scope="module")
def source():
    return Source(mma_operands, mma_epilogue, operand, epilogue, kernel)


def box(tensor, first, size):
    """Rows of a tensor as the copy engine delivers them: zeros past its end."""
    rows = tensor[first : first + size]
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


def operands_of(source, kept, n, table=None):
    """The A operand of every row, unit after unit, as `read_stage` and `consume` make it."""
    C = kept.config
    words, more, scales, addends, ups, lows = (m.tensor.numpy() for m in kept.maps)
    each, shift = 4 * C.row_blocks, T(np.int32(kept.factors.shift))
    positions, out = source.function("pair_positions")(kernel.Values(None, None, table, None), C), []
    width = C.plane or C.bits
    with np.errstate(all="ignore"):
        for first in range(0, -(-n // 16), each):
            halves = []
            for k in range(kept.units):
                at = k * 64 // C.group
                w = box(words, first, each)[:, k * width : (k + 1) * width]
                v = box(more, first, each)[:, k * C.more : (k + 1) * C.more] if C.more else w
                s = box(scales, first, each)[:, at * (C.scale_words // C.groups) :][:, : C.scale_words]
                a = box(addends, first, each)[:, at * (C.addend_words // C.groups) :][:, : C.addend_words]
                of_super = k // C.super_units * 16 if C.super_units else 0
                up, low = (T(box(t, first, each)[:, of_super : of_super + 16]) for t in (ups, lows))
                both = source.function("unit")(T(w), T(v), (T(s), T(a), up, low), shift, C)
                operand_of = source.function("operand")
                finished = [operand_of(half, positions, second, None, C) for second, half in enumerate(both)]
                halves.append(source.function("join_halves")(*finished, None).a)
            out.append(np.concatenate(halves, 1))
    return np.concatenate(out)


def prepared(monkeypatch, word, n, k, half, tile=TILES[0], **options):
    monkeypatch.setattr(launch.gpu, "supports_pdl", lambda device: False)
    name, _, scales = word.partition(" ")
    fmt = format_named(name, **({"scale_dtype": scales} if scales else {}))
    q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), np.random.default_rng(3)))
    w = to_device(q, "cpu", lanes=True)
    return q, w, launch._kernel(w, tile, half, options.get("bias", False), 1, False, options.get("gate", 0))


@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("word", WORDS + LANES)
def test_operands_are_the_weights_rounded_once(source, monkeypatch, word, half):
    k = 512 if word in LANES else 384  # whole super-blocks
    q, w, kept = prepared(monkeypatch, word, 84, k, half)
    table = None if w.table is None else Pointer(w.table.numpy())
    assert w.lanes == (word in LANES and word != "q4_K")
    got = operands_of(source, kept, 84, table)[:84, :k].astype(np.float64) * kept.factors.unit
    plain = q.format.with_(global_op="")
    want = QTensor(plain, q.shape, {p: v for p, v in q.parts.items() if p != "global_scale"}).dequantize("float64")
    if kept.config.arithmetic >= launch.FLOAT32:
        want = want.astype(np.float32).astype(np.float64)
    want = ptx.rounded(want / kept.factors.unit, np.dtype(np.float16 if half else ml_dtypes.bfloat16)).astype(np.float64)
    assert np.array_equal(got, want * kept.factors.unit)


@pytest.mark.parametrize(
    ("word", "half", "gate", "biased"),
    [
        ("int4:g128", True, 0, True), ("nvfp4", True, 0, True), ("nvfp4", False, 1, False), ("nvfp4_ue4m3", False, 2, False),
        ("mxfp4", True, 3, False), ("uint4:g64", False, 0, False),
    ],
)  # fmt: skip
def test_sums_become_outputs(source, monkeypatch, word, half, gate, biased):
    """The tensor's factor, the bias and the gate of rows 2 j and 2 j + 1, of a weight's products."""
    n, k, m = 64, 256, 8
    q, w, kept = prepared(monkeypatch, word, n, k, half, bias=biased, gate=gate)
    rng = np.random.default_rng(9)
    x, bias = rng.standard_normal((m, k)), rng.standard_normal(n).astype(np.float32)
    sums = (operands_of(source, kept, n)[:, :k].astype(np.float64) @ x.T).astype(np.float32)
    scale = Pointer(w.global_scale.numpy().reshape(-1)) if w.global_scale is not None else None
    values = kernel.Values(Pointer(np.concatenate([np.zeros(n, np.float32), bias])), scale, None, None)  # of expert 1
    if scale is not None:
        scale.base = np.concatenate([np.zeros(1, np.float32), scale.base])
    out = source.function("finished")(T(sums), values, T(np.int32(1)), 0, n, kept.factors, None, kept.config)
    exact = q.dequantize("float64")
    want = exact @ x.T + (bias[:, None] if biased else 0)
    bound = 2.0 ** -(10 if half else 7) * (np.abs(exact) @ np.abs(x.T)) + 1e-6
    assert np.all(np.abs(out.a - want) <= bound)
    if gate:
        with np.errstate(over="ignore"):
            gated = source.function("gated_rows")(out, gate, 4).a
        a, b = torch.from_numpy(out.a[0::2].astype(np.float64)), torch.from_numpy(out.a[1::2].astype(np.float64))
        if gate == 2:
            a, b = a.clamp(max=7), b.clamp(-7, 7) + 1
        act = {1: torch.nn.functional.silu, 2: lambda v: v * torch.sigmoid(1.702 * v)}.get(gate)
        act = act or (lambda v: torch.nn.functional.gelu(v, approximate="tanh"))
        np.testing.assert_allclose(gated, (act(a) * b).numpy(), rtol=1e-5, atol=1e-30)
