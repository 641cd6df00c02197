"""K-quants and IQ4_XS under importances: never worse than the encoder, next to what trying every
parameter finds, and GPTQ over super-blocks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats.ggml.scale_search import nearest
from halfbyte.formats.ggml.types import GGML_BY_CODEC
from halfbyte.numerics.minifloat import element_table
from halfbyte.quantizers import gptq, has_search, mse, weighted_error

CODECS = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs")


def squared(x, q, importance=1.0) -> float:
    return float((importance * (x.astype(np.float64) - q.dequantize("float64")) ** 2).sum())


def inputs_of(k: int, seed: int = 0) -> np.ndarray:
    """Importances of very different magnitudes, as trained models have them."""
    return np.exp(2 * np.random.default_rng(seed).standard_normal(k))


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-7, 1e-3, 1.0, 1e4]), heavy=st.booleans(), zeros=st.booleans())
@settings(max_examples=6, deadline=None)
def test_never_worse_than_the_encoder(codec, seed, scale, heavy, zeros):
    rng = np.random.default_rng(seed)
    x = ((rng.standard_t(3, (2, 512)) if heavy else rng.standard_normal((2, 512))) * scale).astype(np.float32)
    importance = inputs_of(512, seed)
    if zeros:
        x[0, :256] = 0
        x[1, 40:72] = x[1, 40]
        importance[rng.random(512) < 0.3] = 0
    plain = quantize(x, codec)
    assert squared(x, mse(x, codec)) <= squared(x, plain) * (1 + 1e-9)
    assert squared(x, mse(x, codec, importance), importance) <= squared(x, plain, importance) * (1 + 1e-9)


@pytest.mark.parametrize(("codec", "share"), [("q2_K", 0.5), ("q3_K", 0.7), ("q4_K", 0.6), ("q5_K", 0.6), ("q6_K", 0.7),
                                              ("iq4_xs", 0.7)])  # fmt: skip
def test_importances_are_used(codec, share):
    x = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32) * 0.02
    importance = inputs_of(512)
    weighted = mse(x, codec, importance)
    assert squared(x, weighted, importance) < share * squared(x, quantize(x, codec), importance)
    assert squared(x, mse(x, codec)) < squared(x, weighted)


def test_an_input_of_no_importance_is_ignored_and_keeps_a_nearest_code():
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    importance = np.ones(256)
    importance[::32] = 0
    x[:, ::32] *= 50
    q, without = mse(x, "q4_K", importance), mse(np.where(importance > 0, x, 0), "q4_K", importance)
    assert squared(x, q, importance) < 1.2 * squared(x, without, importance) < 0.1 * squared(x, quantize(x, "q4_K"), importance)


def best_by_trying(x, h, codec, d, dmin):
    """The least error of one super-block under d and dmin, every pair of small integers tried."""
    fmt = format_named(codec)
    total, values = 0.0, element_table(fmt.element, fmt.bits)
    smalls = range(16) if codec == "q2_K" else range(-32, 32)
    for group, weight in zip(x.reshape(-1, fmt.group_size), h.reshape(-1, fmt.group_size), strict=True):
        errors = []
        for sc, mn in itertools.product(smalls, range(16) if fmt.minimum else (0,)):
            step, floor = d * sc, dmin * mn
            t = (group + floor) / step if step else np.zeros_like(group)
            value = values[nearest(t, fmt.element, fmt.bits)] * step - floor
            errors.append((weight * (group - value) ** 2).sum())
        total += min(errors)
    return total


@pytest.mark.parametrize("codec", ["q2_K", "q3_K", "iq4_xs"])
@pytest.mark.parametrize("seed", range(3))
def test_small_integers_next_to_the_best_of_all(codec, seed):
    x = np.random.default_rng(seed).standard_normal((1, 256))
    h = inputs_of(256, seed)
    q = mse(x, codec, h)
    d = float(q.parts["super_scales"][0, 0])
    dmin = float(q.parts["super_mins"][0, 0]) if "super_mins" in q.parts else 0.0
    assert squared(x, q, h) <= 1.03 * best_by_trying(x[0], h, codec, d, dmin)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_independent_of_the_blocks_they_are_searched_in(codec, monkeypatch):
    x = np.random.default_rng(0).standard_normal((7, 512)).astype(np.float32)
    whole = mse(x, codec, inputs_of(512))
    monkeypatch.setattr("halfbyte.quantizers.super_blocks.CHUNK", 1024)
    assert mse(x, codec, inputs_of(512)) == whole
    assert mse(x[2:3], codec, inputs_of(512)) == whole.rows(2, 3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_over_super_blocks(codec, act_order):
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((512, 512)) * np.exp(rng.standard_normal(512))
    inputs = rng.standard_normal((1024, 512)) @ mixing.T
    h = inputs.T @ inputs
    w = (rng.standard_normal((24, 512)) * 0.02).astype(np.float32)
    q = gptq(w, h, codec, act_order=act_order)
    assert q.format == format_named(codec)
    assert weighted_error(w, q, h) < 0.4 * weighted_error(w, mse(w, codec, h.diagonal()), h)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0)])
@pytest.mark.parametrize("codec", CODECS)
def test_empty_weights(codec, shape):
    x = np.zeros(shape, np.float32)
    assert mse(x, codec) == quantize(x, codec)
    assert gptq(x, np.eye(shape[1]), codec) == quantize(x, codec)


def test_stacks_have_importances_of_their_own():
    x = np.random.default_rng(0).standard_normal((3, 4, 256)).astype(np.float32)
    h = np.stack([inputs_of(256, seed) for seed in range(3)])
    q = mse(x, "q4_K", h)
    for e in range(3):
        assert q[e] == mse(x[e], "q4_K", h[e])
    with pytest.raises(ShapeError, match=r"importance \[2, 256\] for a weight \[3, 4, 256\]; wanted \[256\] or \[3, 256\]"):
        mse(x, "q4_K", h[:2])
    with pytest.raises(ShapeError, match=r"importance \[3, 256\] for a weight \[4, 256\]; wanted \[256\]"):
        mse(x[0], "q4_K", h)


def test_what_has_a_search():
    assert all(has_search(format_named(c)) for c in (*CODECS, "q4_0", "iq4_nl", "int4:g128", "nvfp4"))
    assert not any(has_search(format_named(c)) for c in ("iq2_xxs", "hqq4", "tq1_0"))


def test_torch_tensors_are_refused_by_name():
    torch = pytest.importorskip("torch")
    for search in (lambda x: mse(x, "q4_K"), lambda x: gptq(x, torch.eye(256), "q4_K")):
        with pytest.raises(FormatError, match=r"q4_K:g32 of a Tensor.*Give a NumPy array"):
            search(torch.zeros(2, 256))


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("codec", [*CODECS, "q4_0", "q5_0", "q4_1", "q5_1", "iq4_nl"])
def test_no_worse_than_ggml_under_the_same_importances(codec, heavy):
    """The weighted squared error of `ggml_quantize_chunk`, whose weights grow with the values too."""
    rng = np.random.default_rng(0)
    x = (rng.standard_t(3, (256, 1024)) if heavy else rng.standard_normal((256, 1024))).astype(np.float32) * np.float32(0.02)
    importance = (rng.gamma(0.5, 1, 1024) ** 2 + 1e-3).astype(np.float32)
    theirs = (importance * (x - ggml_quantized(x, codec, importance).astype(np.float64)) ** 2).sum()
    assert squared(x, mse(x, codec, importance), importance) <= theirs


def ggml_quantized(x: np.ndarray, codec: str, importance: np.ndarray) -> np.ndarray:
    """x [n, k] through ggml's quantizer and gguf's decoder."""
    import ctypes
    from pathlib import Path

    import gguf
    import llama_cpp

    kind = gguf.GGMLQuantizationType[GGML_BY_CODEC[codec].name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = np.zeros((len(x), x.shape[1] // block * nbytes), np.uint8)
    library.ggml_quantize_chunk(int(kind), x.ctypes.data, out.ctypes.data, 0, *x.shape, importance.ctypes.data)
    values: np.ndarray = gguf.quants.dequantize(out, kind)
    return values
