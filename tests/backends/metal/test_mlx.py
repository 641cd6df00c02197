"""halfbyte.mlx: kernels through a stand-in for `mx.fast.metal_kernel` that keeps its rules, and
module code on MLX's own CPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte import ops
from halfbyte.errors import BackendError, CheckpointError, ShapeError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.qtensor import QTensor
from support import metal_bounds as bounds
from support.metal_cpu.machine import MetalCompileError, available
from support.random_tensors import finite_tensor

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

import halfbyte.mlx as hm  # noqa: E402
from halfbyte.backends.metal.mlx_runtime import MLXRuntime  # noqa: E402
from halfbyte.mlx import verbs  # noqa: E402

WORDS = (
    "q4_K",
    "q6_K",
    "hqq4",
    "mxfp4",
    "nvfp4",
    "int4",
    "uint4",
    "fp4",
    "affine3",
    "affine8",
    "int8",
    "mxfp8_e4m3",
    "nf4",
    "q5_0",
    "mxint4",
)
"""Formats of every kind of element, scale and addend."""


def fmt(word, shape=(9, 128)):
    from halfbyte.formats import family_of

    f = format_named(word, 32) if word.startswith(("int", "uint", "fp4", "affine")) else format_named(word)
    return family_of(f).fit(f, shape)


def numbers(word, shape, seed=0):
    q = finite_tensor(fmt(word, shape), shape, seed)
    if q.format.element in ("e4m3", "e5m2"):
        q = QTensor(q.format, q.shape, {**q.parts, "codes": q.parts["codes"] & np.uint8(0xBF)})
    return q


def as_numpy(a) -> np.ndarray:
    return np.array(a.astype(mx.float32))


@pytest.fixture
def on_metal(monkeypatch):
    """The verbs believe in Metal; kernels run on the CPU build."""
    if not available():
        pytest.skip("clang-19 is not installed")
    from support.metal_cpu.mlx_stand_in import metal_kernel

    runtime = MLXRuntime(metal_kernel)
    monkeypatch.setattr(verbs, "on_metal", lambda: True)
    monkeypatch.setattr(verbs, "_runtime", lambda: runtime)
    return runtime


# ---- kernels
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_and_embedding_through_the_route(on_metal, dtype):
    q = finite_tensor(fmt("nvfp4"), (5, 32), 1)
    w = hm.prepare(q)
    right = q.dequantize(dtype).astype(np.float32)
    np.testing.assert_array_equal(as_numpy(hm.dequantize(w, dtype)), right)
    ids = mx.array([[4, 0], [2, 2]])
    np.testing.assert_array_equal(as_numpy(hm.embedding(ids, w, dtype=dtype)), right[np.array(ids)])


@pytest.mark.parametrize("schedule", [None, "single-stage", "double-buffered", "striped", "fused"])
@pytest.mark.parametrize("m", [1, 20])
def test_one_hot_products_through_the_route(on_metal, m, schedule):
    q = finite_tensor(fmt("uint4"), (11, 64), 1)
    x = np.eye(64, dtype=np.float16)[:m]
    y = hm.linear(mx.array(x), hm.prepare(q), schedule=schedule)
    assert y.dtype == mx.float16
    np.testing.assert_array_equal(as_numpy(y), q.dequantize("float16").astype(np.float32).T[:m])


def test_arrays_too_short_for_device_memory(on_metal):
    """Three outputs, one group, a bias of three: MLX would pass each of these as `constant`."""
    q = finite_tensor(format_named("int8", -1), (3, 8), 1)
    w = hm.prepare(q)
    x, bias = mx.ones((1, 8)), mx.array([1.0, 2.0, 3.0])
    y = as_numpy(hm.linear(x, w, bias))
    np.testing.assert_allclose(y[0], q.dequantize().sum(1) + np.arange(1, 4), rtol=1e-6)
    np.testing.assert_array_equal(as_numpy(hm.embedding(mx.array([2]), w)), q.dequantize()[2:3])


def test_the_stand_in_passes_short_arrays_as_constant(on_metal):
    from support.metal_cpu.mlx_stand_in import metal_kernel

    kernel = metal_kernel(
        name="first",
        input_names=["x"],
        output_names=["y"],
        header="#include <metal_stdlib>\nusing namespace metal;\ninline float first(const device float* p) { return p[0]; }\n",
        source="y[0] = first(x);",
    )
    run = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    assert kernel(inputs=[mx.arange(8).astype(mx.float32)], **run)[0].item() == 0
    with pytest.raises(MetalCompileError, match="no matching function"):
        kernel(inputs=[mx.arange(7).astype(mx.float32)], **run)


def at_odd_offset(a, by=1):
    """The same array as a view that begins `by` elements into its memory."""
    flat = mx.concatenate([mx.zeros(by, a.dtype), a.reshape(-1)])
    mx.eval(flat)
    view = flat[by:].reshape(a.shape)
    mx.eval(view)
    return view


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("schedule", [None, "single-stage", "double-buffered", "striped", "fused"])
def test_x_may_begin_at_any_element(on_metal, schedule, dtype):
    w = hm.prepare(finite_tensor(fmt("uint4"), (11, 64), 1))
    x = mx.array(np.eye(64, dtype=np.float32)[:20]).astype(getattr(mx, dtype))
    right = as_numpy(hm.linear(x, w, schedule=schedule))
    for by in (1, 3):
        np.testing.assert_array_equal(as_numpy(hm.linear(at_odd_offset(x, by), w, schedule=schedule)), right)
        np.testing.assert_array_equal(as_numpy(hm.linear(at_odd_offset(x, by)[:1], w, schedule=schedule)), right[:1])


@pytest.mark.parametrize("word", ["uint4", "int8", "mxfp6_e3m2", "affine2", "affine3"])
def test_weights_may_be_views_at_any_offset(on_metal, word):
    """Codes of every word the kernels read (4, 8 and 2 bytes, single bytes), scales and addends,
    each from an odd element on.
    """
    from dataclasses import replace

    w = hm.prepare(numbers(word, (11, 128), 1))
    odd = replace(
        w,
        codes=at_odd_offset(w.codes),
        scales=at_odd_offset(w.scales),
        factors=at_odd_offset(w.factors),
        addends=None if w.addends is None else at_odd_offset(w.addends),
    )
    x = at_odd_offset(mx.array(np.random.default_rng(0).standard_normal((20, 128)).astype(np.float16)))
    for rows in (x[:1], x):
        np.testing.assert_array_equal(as_numpy(hm.linear(rows, odd)), as_numpy(hm.linear(rows, w)))
    if w.format.bits == 4:
        np.testing.assert_array_equal(as_numpy(hm.linear(x, odd, schedule="fused")), as_numpy(hm.linear(x, w, schedule="fused")))
    np.testing.assert_array_equal(as_numpy(hm.dequantize(odd)), as_numpy(hm.dequantize(w)))
    ids = at_odd_offset(mx.array([3, 0, 10], mx.int32))
    np.testing.assert_array_equal(as_numpy(hm.embedding(ids, odd)), as_numpy(hm.dequantize(w))[[3, 0, 10]])


def test_experts_of_views_at_any_offset(on_metal):
    from dataclasses import replace

    up, down = (hm.prepare(finite_tensor(fmt("int4"), (3, n, 32), 1)) for n in (32, 9))
    odd = [replace(w, codes=at_odd_offset(w.codes), scales=at_odd_offset(w.scales)) for w in (up, down)]
    for rows in (5, 40):
        x = mx.array(np.random.default_rng(0).standard_normal((rows, 32)).astype(np.float16) * 0.01)
        index, share = mx.array(np.arange(2 * rows).reshape(rows, 2) % 3), mx.ones((rows, 2))
        y = hm.experts(at_odd_offset(x), *odd, at_odd_offset(index), at_odd_offset(share), gate="none")
        np.testing.assert_array_equal(as_numpy(y), as_numpy(hm.experts(x, up, down, index, share, gate="none")))


def test_the_stand_in_sees_a_misaligned_view(on_metal):
    """Four halves at once from a view that begins at an odd one: what the shaders did, and MLX does
    not say.
    """
    from support.metal_cpu.machine import MetalFaultError
    from support.metal_cpu.mlx_stand_in import metal_kernel

    kernel = metal_kernel(
        name="wide",
        input_names=["x"],
        output_names=["y"],
        header="#include <metal_stdlib>\nusing namespace metal;\n",
        source="const half4 v = *(const device half4*)x; y[0] = float(v.x) + float(v.y) + float(v.z) + float(v.w);",
    )
    run = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    x = mx.arange(16).astype(mx.float16)
    assert kernel(inputs=[x], **run)[0].item() == 6
    with pytest.raises(MetalFaultError, match="misaligned: read of 8 bytes at byte 0 of x"):
        kernel(inputs=[at_odd_offset(x)], **run)


def test_experts_through_the_route(on_metal):
    up, down = finite_tensor(fmt("int4"), (3, 32, 32), 1), finite_tensor(fmt("int4"), (3, 8, 32), 2)
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32) * 0.01
    index = np.array([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0]])
    share = np.random.default_rng(1).random((5, 2)).astype(np.float32)
    for rows in (5, 40):  # few and sorted
        xs, ix, sh = (np.resize(a, (rows, *a.shape[1:])) for a in (x, index, share))
        kind = {"gate": "none"}
        y = hm.experts(mx.array(xs), hm.prepare(up), hm.prepare(down), mx.array(ix), mx.array(sh), **kind)
        bounds.assert_within(as_numpy(y), *bounds.experts(xs.astype(np.float64), up, down, ix, sh, **kind), "float32", 32)


# ---- MLX's own CPU
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_every_kind_of_format_decodes_exactly_without_metal(word):
    q = finite_tensor(fmt(word, (9, 256)), (9, 256), 3)
    np.testing.assert_array_equal(as_numpy(hm.dequantize(hm.prepare(q))), q.dequantize())


@pytest.mark.parametrize("level", ["multiply", "divide", "amax", "none"])
def test_nvfp4_with_each_kind_of_factor(level):
    q = finite_tensor(format_named("nvfp4", global_scale=level), (9, 64), 3)
    np.testing.assert_array_equal(as_numpy(hm.dequantize(hm.prepare(q))), q.dequantize())


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_linear_on_the_cpu(word, dtype):
    q = numbers(word, (9, 256), 3)
    x = mx.array(np.random.default_rng(0).standard_normal((2, 3, 256)).astype(np.float32) * 0.01).astype(getattr(mx, dtype))
    bias = mx.ones(9)
    y = hm.linear(x, hm.prepare(q), bias)
    assert y.dtype == x.dtype
    assert y.shape == (2, 3, 9)
    x64, w64 = as_numpy(x).astype(np.float64), q.dequantize().astype(np.float64)
    native = verbs.native_mode(q.format, dtype) is not None
    ulp = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    size = np.abs(x64) @ np.abs(w64).T + 1
    if q.format.bias or q.format.minimum or q.format.zero == "float":  # terms that cancel
        size = size + np.abs(x64).sum(-1, keepdims=True) * 64
    # MLX's own product rounds in x's dtype as it goes.
    slack = ulp * np.abs(x64 @ w64.T + 1) + (8 * ulp if native else 2.0**-16) * size + 2.0**-24
    assert (np.abs(as_numpy(y) - (x64 @ w64.T + 1)) <= slack).all()


@pytest.mark.parametrize(("word", "dtype", "mode"), [
    ("affine4", "float16", "affine"), ("affine4", "bfloat16", None), ("mxfp4", "bfloat16", "mxfp4"),
    ("mxfp8_e4m3", "float16", "mxfp8"), ("nvfp4", "float16", None), ("int4", "float16", None), ("affine1", "float16", None),
])  # fmt: skip
def test_mlx_serves_its_own_formats(word, dtype, mode):
    found = verbs.native_mode(fmt(word), dtype)
    assert (found or {}).get("mode") == mode


def test_nvfp4_without_a_factor_is_mlx_own():
    assert verbs.native_mode(format_named("nvfp4", global_scale="none"), "float16") == {
        "mode": "nvfp4",
        "bits": 4,
        "group_size": 16,
    }


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_weights_quantized_by_mlx_are_read_where_they_lie(mode):
    x = mx.array(np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32))
    parts = mx.quantize(x, mode=mode)
    names = ("weight", "scales", "biases")
    tensors = {n: np.array(a) for n, a in zip(names, parts, strict=False)}
    group = {"affine": 64, "nvfp4": 16}.get(mode, 32)
    q = LAYOUTS["mlx"].unpack(tensors, {"mode": mode, "bits": 8 if mode == "mxfp8" else 4, "group_size": group})
    w = hm.prepare(q)
    np.testing.assert_array_equal(np.array(w.codes.view(mx.uint32)), tensors["weight"])
    np.testing.assert_allclose(
        as_numpy(hm.dequantize(w)), np.array(mx.dequantize(*parts, mode=mode).astype(mx.float32)), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("gate", "interleaved"), [("swiglu", False), ("swiglu_clamped", True), ("geglu", False), ("none", False)]
)
def test_experts_on_the_cpu(gate, interleaved):
    f2 = 32 if gate == "none" else 64
    up, down = finite_tensor(fmt("int4"), (3, f2, 32), 1), finite_tensor(fmt("int4"), (3, 8, 32), 2)
    rng = np.random.default_rng(0)
    x, index, share = (
        rng.standard_normal((6, 32)).astype(np.float32) * 0.1,
        rng.integers(0, 2, (6, 2)),
        rng.random((6, 2), np.float32),
    )
    ub, db = rng.standard_normal((3, f2)).astype(np.float32), rng.standard_normal((3, 8)).astype(np.float32)
    module = hm.QExperts(up, down, gate=gate, interleaved=interleaved, gate_up_bias=mx.array(ub), down_bias=mx.array(db))
    y = module(mx.array(x), mx.array(index), mx.array(share))
    right = ops.experts(
        x,
        up,
        down,
        index,
        share,
        gate=gate,
        interleaved=interleaved,
        gate_up_bias=ub,
        down_bias=db,
        backend="reference",
    )
    np.testing.assert_allclose(as_numpy(y), right, rtol=2e-5, atol=2e-6 * np.abs(right).max())
    assert not module.trainable_parameters()["gate_up"]


# ---- modules
# ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 32)
        self.o_proj = nn.Linear(32, 64, bias=False)
        self.norm = nn.RMSNorm(64)

    def __call__(self, x):
        return self.norm(x + self.o_proj(self.q_proj(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 64)
        self.layers = [Block(), Block()]

    def __call__(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.as_linear(x)


def checkpoint():
    """Packed weights of several formats and a dense bias, keyed as `halfbyte.open` keys them."""
    held = {"model.embed_tokens": finite_tensor(fmt("mxfp4"), (10, 64), 9), "model.layers.0.norm.weight": np.ones(64, np.float32)}
    for i in range(2):
        held[f"model.layers.{i}.q_proj"] = finite_tensor(fmt("uint4"), (32, 64), i)
        held[f"model.layers.{i}.o_proj"] = finite_tensor(fmt("nvfp4"), (64, 32), i + 2)
        held[f"model.layers.{i}.q_proj.bias"] = np.full(32, 0.5, np.float32)
    return held


def test_modules_of_a_model_are_replaced_and_compute_the_same():
    model, held = Model(), checkpoint()
    assert hm.replace_modules(model, held, prefix="model.") == [
        "embed_tokens",
        "layers.0.o_proj",
        "layers.0.q_proj",
        "layers.1.o_proj",
        "layers.1.q_proj",
    ]
    assert isinstance(model.layers[1].q_proj, hm.QLinear)
    dense = Model()
    dense.embed_tokens.weight = mx.array(held["model.embed_tokens"].dequantize())
    for i, layer in enumerate(dense.layers):
        layer.q_proj.weight = mx.array(held[f"model.layers.{i}.q_proj"].dequantize())
        layer.q_proj.bias = mx.full(32, 0.5)
        layer.o_proj.weight = mx.array(held[f"model.layers.{i}.o_proj"].dequantize())
    ids = mx.array([[1, 2, 9]])
    np.testing.assert_allclose(np.array(model(ids)), np.array(dense(ids)), rtol=1e-4, atol=1e-4 * float(mx.abs(dense(ids)).max()))


def test_case_51_a_module_loads_what_it_saved(tmp_path):
    model, other = Model(), Model()
    hm.replace_modules(model, checkpoint(), prefix="model.")
    hm.replace_modules(
        other,
        {k: v if "norm" in k or "bias" in k else finite_tensor(v.format, v.shape, 50) for k, v in checkpoint().items()},
        prefix="model.",
    )
    model.save_weights(str(tmp_path / "w.safetensors"))
    other.load_weights(str(tmp_path / "w.safetensors"), strict=True)
    ids = mx.array([[3, 0]])
    np.testing.assert_array_equal(np.array(model(ids)), np.array(other(ids)))


def test_a_weight_of_another_shape_is_refused():
    held = {"embed_tokens": finite_tensor(fmt("mxfp4"), (12, 64), 9)}
    with pytest.raises(CheckpointError, match=r"embed_tokens has shape \(12, 64\); the model's module has \(10, 64\)"):
        hm.replace_modules(Model(), held)


def test_modules_from_a_checkpoint_one_by_one():
    held = checkpoint()
    found = dict(hm.linears(held))
    assert sorted(found) == sorted(k for k, v in held.items() if isinstance(v, QTensor))
    x = mx.ones((1, 64))
    y = found["model.layers.0.q_proj"](x)
    np.testing.assert_allclose(as_numpy(y)[0], held["model.layers.0.q_proj"].dequantize().sum(1) + 0.5, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \(64,\), dense; a packed \(n, k\) weight is wanted"):
        list(hm.linears(held, ["model.layers.0.norm.weight"]))


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ("gptq", "uint4"), ("awq-gemm", "uint4"), ("compressed-tensors", "int4"), ("compressed-tensors", "nvfp4"),
        ("gpt-oss", "mxfp4"),
    ],
)  # fmt: skip
def test_foreign_layouts_become_modules_bit_for_bit(layout, word):
    """Through the producer's own tensors and back: nothing is requantized on the way to a module."""
    f = fmt(word) if word != "nvfp4" else format_named("nvfp4", global_scale="divide")
    shape = (3, 32, 64) if layout == "gpt-oss" else (32, 64)
    q = finite_tensor(f, shape, 4)
    if word == "uint4":
        q = QTensor(q.format, q.shape, {**q.parts, "zeros": np.maximum(q.parts["zeros"], 1)})
    lay = LAYOUTS[layout]
    config = lay.config(q)
    back = lay.unpack(lay.pack(q, config), config)
    w = hm.prepare(back)
    np.testing.assert_array_equal(as_numpy(hm.dequantize(w)), q.dequantize())
    assert w.codes.nbytes == q.parts["codes"].nbytes


FOLDERS = sorted(p.parent for p in (Path(__file__).parents[2] / "golden").glob("*/ckpt_*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_checkpoints_of_the_producers_become_modules(folder):
    """compressed-tensors, ModelOpt's NVFP4 with its global scale, MLX's own: every packed matrix,
    bit for bit.
    """
    with halfbyte.open(folder) as ckpt:
        if any(f.scale == "nested" for f in (ckpt.info(k).format for k in ckpt) if f is not None):
            with pytest.raises(BackendError, match="nested scales, which have no Metal kernel"):
                list(hm.linears(ckpt))
            return
        made = list(hm.linears(ckpt))
        assert made
        for key, module in made:
            w = ckpt[key]
            np.testing.assert_array_equal(as_numpy(hm.dequantize(module.weight())), w.dequantize())
            x = mx.ones((1, w.shape[1]), mx.float32) / w.shape[1]
            assert module(x).shape == (1, w.shape[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: hm.linear(np.zeros((1, 64)), w), ShapeError, "x is ndarray; an mx.array is wanted"),
        (lambda w: hm.linear(mx.zeros((1, 64), mx.int32), w), ShapeError, "x is int32; allowed: float32"),
        (lambda w: hm.linear(mx.zeros((1, 32)), w), ShapeError, r"x has shape \(1, 32\); its last axis must be k = 64"),
        (lambda w: hm.linear(mx.zeros((1, 64)), w, mx.zeros(3)), ShapeError, r"bias has shape \(3,\)"),
        (lambda w: hm.linear(mx.zeros((1, 64)), w, schedule="fast"), BackendError, "allowed: mlx, single-stage"),
        (lambda w: hm.linear(mx.zeros((1, 64)), w, schedule="mlx"), BackendError, "mx.quantized_matmul has no uint4:g32"),
        (lambda w: hm.linear(mx.zeros((1, 64)), w, schedule="fused"), BackendError, "MLX has no Metal here"),
        (lambda w: hm.dequantize(w, "float64"), ShapeError, "allowed: float32, float16, bfloat16"),
        (lambda w: hm.embedding(mx.array([1]), w, dtype="int32"), ShapeError, "dtype 'int32'; allowed: float32, float16"),
        (lambda w: hm.embedding(mx.array([1.0]), w), ShapeError, "ids are float32; integers are allowed"),
        (lambda w: hm.experts(mx.zeros((1, 64)), w, w, mx.array([[0]]), mx.ones((1, 1))), ShapeError, "stacks .* are allowed"),
    ],
)
def test_what_does_not_fit_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call(hm.prepare(finite_tensor(fmt("uint4"), (9, 64), 0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "relu"}, "gate 'relu'; allowed: none, swiglu, swiglu_clamped, geglu"),
        ({"gate": "none"}, r"down \(3, 8, 32\), gate 'none'; allowed: x \(m, k\), gate_up \(e, f, k\)"),
        ({"x": mx.ones((5, 16))}, r"x \(5, 16\), gate_up \(3, 64, 32\)"),
        ({"topk_weights": mx.ones((5, 1))}, r"topk_ids \(5, 2\), topk_weights \(5, 1\) for 5 tokens"),
        ({"topk_ids": mx.zeros((5, 2))}, "topk_ids are float32; integers are allowed"),
        ({"gate_up_bias": mx.ones((3, 8))}, r"gate_up_bias has shape \(3, 8\); \(3, 64\) is allowed"),
        ({"down_bias": mx.ones((1, 8))}, r"down_bias has shape \(1, 8\); \(3, 8\) is allowed"),
    ],
)
def test_experts_that_do_not_fit_are_said(change, message):
    up, down = (hm.prepare(finite_tensor(fmt("int4"), (3, n, 32), 1)) for n in (64, 8))
    given = {"x": mx.ones((5, 32)), "topk_ids": mx.zeros((5, 2), mx.int32), "topk_weights": mx.ones((5, 2)), **change}
    with pytest.raises(ShapeError, match=message):
        hm.experts(given.pop("x"), up, down, given.pop("topk_ids"), given.pop("topk_weights"), **given)


def test_experts_with_an_odd_number_of_gates_and_ups_are_refused():
    """A gate without its up: the kernels would write one unit past the end of each row."""
    up, down = (hm.prepare(finite_tensor(fmt("int4"), (3, n, 32), 1)) for n in (65, 8))
    with pytest.raises(ShapeError, match=r"gate_up \(3, 65, 32\)"):
        hm.experts(mx.ones((5, 32)), up, down, mx.zeros((5, 2), mx.int32), mx.ones((5, 2)))


def test_an_embedding_of_a_stack_is_refused():
    with pytest.raises(ShapeError, match=r"the weight has shape \(2, 8, 32\); \(n, k\) is allowed"):
        hm.embedding(mx.array([1]), hm.prepare(finite_tensor(fmt("int4"), (2, 8, 32), 1)))


def test_case_32_no_tokens():
    w = hm.prepare(finite_tensor(fmt("mxfp4"), (9, 64), 0))
    assert hm.linear(mx.zeros((0, 64)), w).shape == (0, 9)
    assert hm.linear(mx.zeros((2, 0, 64)), w).shape == (2, 0, 9)


# ---- the example, and the stand-in against MLX itself
# -------------------------------------------------------------------------


def test_the_example_runs_and_its_checker_can_fail():
    import importlib.util

    from support.metal_cpu.mlx_stand_in import metal_kernel

    path = Path(__file__).parents[3] / "examples" / "metal_fused_dequantize_matvec.py"
    spec = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(12, 1056, metal_kernel) <= 1
    example.BODY = example.BODY.replace("8 * w / G", "0")
    with pytest.raises(SystemExit, match="the kernel is wrong"):
        example.main(12, 1056, metal_kernel)


@pytest.mark.parametrize("schedule", [None, "single-stage", "double-buffered", "striped", "fused"])
def test_the_stand_in_writes_what_mlx_writes(schedule, capfd, tmp_path):
    """Without Metal, MLX still writes a kernel's source while a function is exported: ours must be
    the same text.
    """
    from support.metal_cpu.mlx_stand_in import whole_source

    ours = []

    def both(**how):
        real = mx.fast.metal_kernel(**how)

        def call(**given):
            ours.append(
                whole_source(
                    how["name"],
                    how["header"],
                    how["source"],
                    how["input_names"],
                    given["inputs"],
                    how["output_names"],
                    given["output_dtypes"],
                )[0]
            )
            return real(**given, verbose=True)

        return call

    from halfbyte.backends.metal import launch

    runtime = MLXRuntime(both)
    w = hm.prepare(finite_tensor(fmt("uint4"), (9, 64), 1))
    capfd.readouterr()
    with pytest.raises(ValueError, match="Unable to serialize"):  # a copy of x; the text is written before that
        mx.export_function(
            str(tmp_path / "f.mlxfn"), lambda x: launch.linear(runtime, x, w, None, schedule), mx.zeros((2, 64), mx.float16)
        )
    written = capfd.readouterr().out.split("Generated source code for")[1:]
    assert len(written) == len(ours) == (2 if schedule == "striped" else 1)
    for theirs, text in zip(written, ours, strict=True):
        # But for the kernel's name, which MLX versions make differently.
        body = theirs.split("```\n")[1].replace("[[kernel]] void", "kernel void")
        same = [re.sub(r"custom_kernel_\w+", "custom_kernel", t).split() for t in (body, text)]
        assert same[0] == same[1]
