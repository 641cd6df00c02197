"""Packed modules behave as modules: state, copies, pickles, devices, compilation; and hold no dense
copy.
"""

from __future__ import annotations

import copy
import io
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte import ops
from halfbyte.backends import backend_named
from halfbyte.errors import BackendError, ShapeError
from halfbyte.formats import FAMILIES
from halfbyte.numerics.array_interop import to_numpy
from halfbyte.tensor.concat import concat_rows, incompatibility, stack
from halfbyte.torch import ConcatLinear, PackedWeight, QEmbedding, QExperts, QLinear, custom_ops
from halfbyte.torch.composite_linear import CompositeLinear
from halfbyte.torch.state import tensor
from support.memory_checkpoint import packed
from torch import nn

WORDS = [w for f in FAMILIES.values() for w in f.codecs if not hb.format_named(w).opaque]
BACKENDS = [b for b in ("reference", "cpu") if backend_named(b).reason() is None]
X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))


def weight(word: str = "int4", shape: tuple[int, ...] = (33, 256), seed: int = 0) -> hb.QTensor:
    fmt = hb.format_named(word)
    if fmt.grouping == "row" and not fmt.super_size and fmt.scale != "nested":
        return packed(word, shape, seed)
    return quantized(word, shape, seed)


def quantized(word: str, shape: tuple[int, ...] = (33, 256), seed: int = 0) -> hb.QTensor:
    return hb.quantize(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), word)


def modules() -> dict[str, nn.Module]:
    """One of each kind, of matrices as small as their formats allow."""
    bias = torch.randn(33, generator=torch.Generator().manual_seed(1))
    stacks = {"gate_up_proj": weight("int4", (4, 128, 256)), "down_proj": weight("int4", (4, 256, 64), 1)}
    apart_ = {
        "gate_proj": [weight("nvfp4", (64, 256), s) for s in range(4)],
        "up_proj": weight("mxfp4", (4, 64, 256)),
        "down_proj": weight("int4", (4, 256, 64), 1),
    }
    biases = {"gate_up_proj": torch.randn(4, 128), "down_proj": torch.randn(4, 256)}
    return {
        "linear": QLinear(weight(), bias),
        "linear without bias": QLinear(weight("q4_K")),
        "rows": ConcatLinear([weight("nvfp4", (16, 256)), weight("nvfp4", (17, 256), 1)], bias),
        "embedding": QEmbedding(weight("affine4"), scale=16.0),
        "experts": QExperts(stacks),
        "experts with biases": QExperts(stacks, biases, gate="swiglu_clamped", interleaved=True),
        "experts apart": QExperts(apart_, gate="geglu"),
        "experts with ReLU": QExperts(stacks, gate="reglu"),
    }


KINDS = list(modules())


def run(module: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        if isinstance(module, QEmbedding):
            return module(torch.tensor([[0, 32, 5]]))
        if isinstance(module, QExperts):
            return module(X, torch.tensor([[0, 3], [2, 1], [0, 2]]), torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, -1.0]]))
        return module(X)


@pytest.mark.parametrize("kind", KINDS)
def test_case_51_state_dict_round_trip(kind):
    """Into a module of other weights, strictly; the output is bit for bit the same."""
    module, other = modules()[kind], modules()[kind]
    state = module.state_dict()
    for name in other.packed:
        q = other.packed[name].canonical()
        other.packed[name] = PackedWeight.of(hb.quantize(np.ones(q.shape, np.float32), "int8:g32"))
    assert not torch.equal(run(other), run(module))
    assert other.load_state_dict(state, strict=True).missing_keys == []
    assert torch.equal(run(other), run(module))
    assert all(other.packed[n].canonical() == module.packed[n].canonical() for n in module.packed)


@pytest.mark.parametrize("kind", KINDS)
def test_case_51_copies_and_pickles(kind):
    module = modules()[kind]
    want = run(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert torch.equal(run(again), want)
        assert again.handle != module.handle


@pytest.mark.parametrize("kind", KINDS)
def test_case_51_moves(kind):
    """`.to` with the device it is on changes nothing; `.half()` leaves packed weights alone."""
    module = modules()[kind]
    packed = dict(module.packed)
    want = run(module)
    assert torch.equal(run(module.to("cpu")), want)
    module.half()
    assert all(module.packed[name].prepared is packed[name].prepared for name in packed)
    assert {w.dtype for w in module.packed.values()} == {torch.float16}
    if isinstance(module, QEmbedding):
        assert run(module).dtype == torch.float16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_as_one_graph(kind):
    module = modules()[kind]
    want = run(module)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: module(*args) * 1.0, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        if isinstance(module, QEmbedding):
            got = compiled(torch.tensor([[0, 32, 5]]))
        elif isinstance(module, QExperts):
            got = compiled(X, torch.tensor([[0, 3], [2, 1], [0, 2]]), torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, -1.0]]))
        else:
            got = compiled(X)
    assert torch.equal(got, want)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_canonical_restores_every_format(word, backend):
    """The canonical parts, from each backend's own layout, byte for byte."""
    q = weight(word)
    stored = PackedWeight.of(q, backend=backend)
    back = stored.canonical()
    assert back == q
    assert back.format == q.format
    assert stored._source is None or word in ("bnb_int8",), "no second copy of the weight is kept"


@pytest.mark.parametrize("backend", BACKENDS)
def test_act_order_comes_back(backend):
    index = np.random.default_rng(0).permutation(np.arange(256) // 32).astype(np.int32)
    q = weight("int4:g32")
    q = hb.QTensor(q.format, q.shape, {**q.parts, "group_index": index}, origin="autogptq", details={"layout": "gptq"})
    stored = PackedWeight.of(q, backend=backend)
    assert stored.canonical() == q
    assert (stored.canonical().origin, dict(stored.canonical().details)) == ("autogptq", {"layout": "gptq"})


def test_a_state_dict_is_a_checkpoint(tmp_path):
    """Written to safetensors it is a file that `open` reads."""
    from safetensors.torch import save_file

    model = nn.ModuleDict({"proj": modules()["linear"], "norm": nn.LayerNorm(4)})
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()},
        tmp_path / "m.safetensors",
        {"format": "halfbyte", "version": "1"},
    )
    with hb.open(tmp_path / "m.safetensors") as ckpt:
        assert set(ckpt) == {"proj", "proj.bias", "norm.weight", "norm.bias"}
        assert ckpt["proj"] == model["proj"].weight.canonical()


def test_what_cannot_be_loaded_is_said():
    module = QLinear(weight())
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*halfbyte"):
        QLinear(weight()).load_state_dict({k: v for k, v in state.items() if k != "halfbyte"})
    with pytest.raises(RuntimeError, match=r"hold a weight of shape \(33, 256\); the module's is \(32, 256\)"):
        QLinear(weight(shape=(32, 256))).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"codes is missing"):
        module.load_state_dict({k: v for k, v in state.items() if k != "codes"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        module.load_state_dict({**state, "extra": torch.zeros(1)})


def test_tied_modules_share_one_weight_in_copies():
    table = QEmbedding(weight())
    model = nn.ModuleDict({"table": table, "head": QLinear(table.weight)})
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again["table"].weight is again["head"].weight


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("linear", r"n=33, k=256, bias=True, int4:g128, 4 bits, group 128, [\d.]+ bits/weight, [\d,]+ bytes"),
        ("embedding", r"n=33, k=256, float32, scale=16, affine4:g64, 4 bits, group 64, [\d.]+ bits/weight, [\d,]+ bytes"),
        ("experts", r"experts=4, swiglu; gate_up_proj: int4:g128, 4 bits, group 128, .*; down_proj: int4:g128, 4 bits"),
    ],
)
def test_repr(kind, text):
    assert re.search(text, repr(modules()[kind]))


def test_no_parameter_is_a_weight():
    for module in modules().values():
        assert all(p.ndim < 3 and p.numel() <= 4 * 256 for p in module.parameters())


@pytest.mark.parametrize(("first", "second", "why"), [
    (weight("int4"), weight("mxfp4"), "formats differ"), (weight("int4"), weight("int4", (33, 128)), "shapes differ"),
    (weight("nvfp4"), quantized("nvfp4"), "a global scale of its own"),
    (quantized("nf4:g4096"), quantized("nf4:g4096"), "flattened"),
])  # fmt: skip
def test_what_cannot_be_joined(first, second, why):
    assert why in incompatibility([first, second])
    with pytest.raises(ShapeError, match=why):
        concat_rows([first, second])


@pytest.mark.parametrize("word", ["int4", "uint3:g32", "mxfp4", "affine4", "q4_K", "q6_K", "fp8_e4m3", "fp4"])
def test_joined_and_stacked_values(word):
    a, b = weight(word, (16, 256)), weight(word, (16, 256), 1)
    dense = [a.dequantize(), b.dequantize()]
    assert np.array_equal(concat_rows([a, b]).dequantize(), np.concatenate(dense), equal_nan=True)
    assert np.array_equal(stack([a, b]).dequantize(), np.stack(dense), equal_nan=True)


def test_rows_that_do_not_fit():
    with pytest.raises(ShapeError, match="with the same k"):
        ConcatLinear([weight(), weight(shape=(33, 128))])


def test_experts_that_do_not_fit():
    with pytest.raises(ShapeError, match="down_proj with gate_up_proj"):
        QExperts({"gate_proj": weight("int4", (4, 64, 256)), "down_proj": weight("int4", (4, 256, 64))})
    with pytest.raises(ShapeError, match="gate 'relu'"):
        QExperts({"gate_up_proj": weight("int4", (4, 128, 256)), "down_proj": weight("int4", (4, 256, 64))}, gate="relu")


def test_a_relu_gate_is_computed_on_packed_experts():
    """y = Σ w · down(relu(gate) · up), from the decoded matrices."""
    up, down = weight("int4", (4, 128, 256)), weight("int4", (4, 256, 64), 1)
    h = torch.einsum("mk,enk->emn", X, torch.from_numpy(up.dequantize("float32")))
    each = torch.einsum("emn,ekn->emk", torch.relu(h[..., :64]) * h[..., 64:], torch.from_numpy(down.dequantize("float32")))
    routes = ([(0, 0.5), (3, 0.25)], [(2, 1.0), (1, 2.0)], [(0, 0.125), (2, -1.0)])  # of `run`
    want = torch.stack([sum(w * each[e, i] for e, w in chosen) for i, chosen in enumerate(routes)])
    have = run(QExperts({"gate_up_proj": up, "down_proj": down}, gate="reglu"))
    assert torch.allclose(have, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_experts_apart_equal_experts_joined():
    """The loop and `ops.experts`, on the same numbers; a masked slot contributes nothing."""
    up, down = weight("int4", (4, 128, 256)), weight("int4", (4, 256, 64), 1)
    halves = [{"gate_proj": up[e].rows(0, 64), "up_proj": up[e].rows(64, 128)} for e in range(4)]
    together = QExperts({"gate_up_proj": up, "down_proj": down})
    separate = QExperts({**{n: [h[n] for h in halves] for n in ("gate_proj", "up_proj")}, "down_proj": down})
    a, b = run(together), run(separate)
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
    index, share = torch.tensor([[0, 4], [4, 4], [1, 0]]), torch.tensor([[1.0, 5.0], [2.0, 3.0], [1.0, 1.0]])
    a, b = together(X, index, share), separate(X, index, share)
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
    assert not a[1].any()


def test_case_44_stacks_with_a_factor_each_run_at_once():
    """NVFP4's gates and ups in a stack each, biases too: what one expert after another gives."""
    names = ("gate_proj", "up_proj", "down_proj")
    stacks = {n: weight("nvfp4", (4, 256, 64) if n == "down_proj" else (4, 64, 256), i) for i, n in enumerate(names)}
    factors = [stacks[n].parts["global_scale"] for n in names]
    assert not np.array_equal(factors[0], factors[1])
    biases = {n: torch.randn(4, stacks[n].shape[1], generator=torch.Generator().manual_seed(i)) for i, n in enumerate(names)}
    together = QExperts(stacks, biases, gate="swiglu_clamped")
    looped = QExperts({n: [q[e] for e in range(4)] for n, q in stacks.items()}, biases, gate="swiglu_clamped")
    assert together.at_once
    assert not looped.at_once
    a, b = run(together), run(looped)
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
    same = QExperts({**stacks, "up_proj": stacks["gate_proj"]}, biases, gate="swiglu_clamped")
    assert not torch.allclose(run(same), b, rtol=0.1)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="without the native core all formats are served by one backend")
def test_experts_of_two_backends_run_one_after_another():
    """A GGUF file may keep gates in Q4_K and downs in a type that only the reference backend reads."""
    up, down = weight("int4", (4, 128, 256)), weight("int4", (4, 256, 64), 1)
    mixed = QExperts({"gate_up_proj": ops.prepare(up), "down_proj": ops.prepare(down, backend="reference")})
    assert not mixed.at_once
    wanted = run(QExperts({"gate_up_proj": up, "down_proj": down}, backend="reference"))
    assert torch.allclose(run(mixed), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_case_51_experts_that_a_device_refused_are_at_once_again_on_another(monkeypatch):
    """float32 on a GPU runs one expert after another; back on the CPU the layer sums as one that
    has never been there.
    """
    layer = modules()["experts"]
    want = run(layer)
    x, index, share = X.to("meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta"), torch.zeros(3, 2, device="meta")

    def refuse(*_):
        raise BackendError("[experts] not here")

    with monkeypatch.context() as there:
        there.setattr(QExperts, "_together", refuse)
        there.setattr(QExperts, "_each", lambda *_: "one after another")
        said = r"\[experts\] not here; one expert after another instead, slower"
        with torch.inference_mode(), pytest.warns(RuntimeWarning, match=said):
            assert layer.compute(x, index, share) == "one after another"
        with torch.inference_mode():
            assert layer.compute(x, index, share) == "one after another"  # and no second warning
    monkeypatch.setattr(QExperts, "_each", lambda *_: pytest.fail("one after another on the CPU too"))
    for again in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(run(again), want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "bfloat16"])
def test_tensors_of_arrays_begin_where_torchs_own_do(dtype):
    """Wherever the array begins, in whatever order it is: 64 bytes, the same bits, memory of its
    own.
    """
    raw = np.random.default_rng(0).integers(0, 2, 8 * 41).astype(np.uint8)
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    size = np.dtype(of).itemsize
    for start in (0, 8, 16):
        array = raw[start : start + 24 * size].view(of).reshape(4, 6)
        for a in (array, array.T, array[::2, 1:], array[0, 0, ...], array[:0]):
            t = tensor(a)
            assert t.data_ptr() % 64 == 0
            assert t.is_contiguous()
            assert str(t.dtype) == f"torch.{dtype}"
            assert t.shape == a.shape
            assert to_numpy(t).tobytes() == a.tobytes()
            assert not np.shares_memory(t.view(torch.int16).numpy() if dtype == "bfloat16" else t.numpy(), raw)


def test_warmup_calls_each_kind_of_layer_once():
    model = nn.ModuleDict({"a": QLinear(weight()), "b": QLinear(weight(seed=1)), "c": QLinear(weight(), torch.zeros(33)),
                           "d": QEmbedding(weight("affine4")), "e": modules()["experts"]})  # fmt: skip
    calls = dict.fromkeys(model, 0)
    for name, module in model.items():
        module.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    assert hb.warmup(model, tokens=(1, 3), dtype=torch.float32) == 8
    assert calls == {"a": 2, "b": 0, "c": 2, "d": 2, "e": 2}


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_autocast_is_off_where_a_composite_layer_computes(kind, monkeypatch):
    """For each device that the library serves."""
    q, rng = weight("int4:g32", (8, 64)), np.random.default_rng(0)
    extra = {"lora_a": rng.standard_normal((4, 64)).astype(np.float32), "lora_b": rng.standard_normal((8, 4)).astype(np.float32)}
    layer = CompositeLinear(hb.QTensor(q.format.with_(extra="low-rank"), q.shape, {**q.parts, **extra}))
    seen = []
    monkeypatch.setattr(custom_ops, "check_activations", lambda *_: seen.append(torch.is_autocast_enabled(kind)))
    torch.set_autocast_enabled(kind, True)
    try:
        layer(torch.ones(2, 64))
        assert torch.is_autocast_enabled(kind)
    finally:
        torch.set_autocast_enabled(kind, False)
    assert seen == [False]
