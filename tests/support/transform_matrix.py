"""Every packed product under everything torch does to a call and to a tensor.

    python -m support.transform_matrix --log FILE         in tests/: the whole matrix

A cell is a subject (a module or a verb over a weight of one format), and a transform: a mode, a
tracer, a transform of `torch.func`, a kind of tensor, a copy of the module, another process. It is
right when the result has the bits of the plain product (derivatives: of the product with the
decoded matrix, within float32's rounding; tensors without memory: shape and dtype), or when an
error of the library says what was given and what is allowed. A cell that is not of one of these two
kinds is a fault; one that ends the process ends its child alone, since the command runs each
subject in a process of its own. More than 800 lines: one table, whose rows are a few lines each.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import halfbyte as hb
import torch
from halfbyte import ops
from halfbyte.backends import backend_named
from halfbyte.errors import HalfbyteError
from halfbyte.torch import ConcatLinear, QEmbedding, QExperts, QLinear, functional
from halfbyte.torch.composite_linear import CompositeLinear
from halfbyte.torch.scaled_linear import scaled
from torch import Tensor, nn

FORMATS = ("int4:g32", "uint3:g64", "affine4:g32", "nvfp4", "mxfp4", "nf4", "fp8_e4m3", "q4_K", "q8_0", "iq4_nl")
"""One or two of every family that `quantize` writes."""
N, K, M = 48, 256, 3
SENTENCE = re.compile(r"\[\w+(\.\w+)*\] \S+ .*\S")
Pair = tuple[Any, Any]


def weight(codec: str, *shape: int) -> hb.QTensor:
    """A packed weight of random values, the same for the same arguments."""
    return hb.quantize(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32), codec)


def activations(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass
class Subject:
    """What is called. `dense` is the matrix of a linear subject, (n, k)."""

    name: str
    call: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    module: nn.Module | None = None
    dense: Tensor | None = None
    exact: bool = True
    """A row has the same bits whatever the number of rows; not so on the reference backend, where
    torch multiplies the decoded matrix, and where it multiplies dense parts.
    """

    @property
    def x(self) -> Tensor:
        return self.args[0]

    @property
    def floats(self) -> bool:
        return self.x.is_floating_point()

    def plain(self) -> Tensor:
        return self.call(*self.args)

    def with_x(self, x: Any) -> Tensor:
        return self.call(x, *self.args[1:])

    def needs_module(self) -> nn.Module:
        if self.module is None:
            raise UnsuitedError("a verb is no module")
        return self.module

    def needs_floats(self) -> None:
        if not self.floats:
            raise UnsuitedError("integers have no derivative and no arithmetic")


class UnsuitedError(Exception):
    """The transform has no meaning for this subject."""


def _linear(codec: str, activations_: str = "exact", bias: bool = True, backend: str | None = None) -> tuple[QLinear, Tensor]:
    q = weight(codec, N, K)
    dense = torch.from_numpy(np.array(q.dequantize()))
    return QLinear(q, torch.linspace(-1, 1, N) if bias else None, activations=activations_, backend=backend), dense


def _composite() -> Subject:
    q = weight("int4:g32", N, K)
    rng = np.random.default_rng(3)
    extra = {"lora_a": rng.standard_normal((4, K)).astype(np.float32), "lora_b": rng.standard_normal((N, 4)).astype(np.float32)}
    whole = hb.QTensor(q.format.with_(extra="low-rank"), q.shape, {**q.parts, **extra})
    layer = CompositeLinear(whole)
    return Subject("CompositeLinear", layer, (activations(M, K),), layer, exact=False)


def subjects(formats: tuple[str, ...] = FORMATS) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Names, and what makes each subject in the process that uses it."""
    native = backend_named("cpu").reason() is None

    def module(make: Callable[[], nn.Module], *args: Tensor, dense: Callable[[], Tensor] | None = None) -> Callable[[], Subject]:
        def made() -> Subject:
            layer = make()
            return Subject("", layer, args, layer, dense and dense(), native or not args[0].is_floating_point())

        return made

    def verb(make: Callable[[], Callable[..., Tensor]], *args: Tensor) -> Callable[[], Subject]:
        return lambda: Subject("", make(), args, exact=native or not args[0].is_floating_point())

    x, ids = activations(M, K), torch.tensor([[0, N - 1, 7]])
    routed = (
        activations(M, K),
        torch.tensor([[0, 3], [2, 1], [0, 2]]),
        torch.rand(M, 2, generator=torch.Generator().manual_seed(1)),
    )
    for codec in formats:
        yield f"QLinear {codec}", module(lambda c=codec: _linear(c)[0], x, dense=lambda c=codec: _linear(c)[1])
        yield f"QEmbedding {codec}", module(lambda c=codec: QEmbedding(weight(c, N, K), scale=16.0), ids)
        yield (
            f"QExperts {codec}",
            module(lambda c=codec: QExperts({"gate_up_proj": weight(c, 4, 2 * K, K), "down_proj": weight(c, 4, K, K)}), *routed),
        )
        yield f"torch.linear {codec}", verb(lambda c=codec: _bound(functional.linear, hb.prepare(weight(c, N, K))), x)
        yield f"ops.linear {codec}", verb(lambda c=codec: _bound(ops.linear, weight(c, N, K)), x)
        yield f"ops.embedding {codec}", verb(lambda c=codec: _bound(ops.embedding, weight(c, N, K)), ids)
    codec = formats[0]
    yield "QLinear int8", module(lambda: _linear(codec, "int8")[0], x)
    yield "QLinear without bias", module(lambda: _linear(codec, bias=False)[0], x, dense=lambda: _linear(codec)[1])
    yield "QLinear reference", lambda: Subject("", (layer := _linear(codec, backend="reference")[0]), (x,), layer, exact=False)
    yield "QLinear bfloat16", module(lambda: _linear(codec)[0], x.bfloat16())
    yield "QLinear float16", module(lambda: _linear(codec)[0], x.half())
    yield (
        "ConcatLinear",
        module(lambda: ConcatLinear([weight(c, N, K) for c in (formats[0], formats[-1])], torch.linspace(-1, 1, 2 * N)), x),
    )
    yield "ScaledLinear", module(lambda: scaled(_linear(codec)[0], torch.linspace(0.5, 2, K)), x)
    yield "CompositeLinear", _composite
    yield "QEmbedding bfloat16", module(lambda: QEmbedding(weight(codec, N, K), dtype=torch.bfloat16), ids)
    yield (
        "QExperts one by one",
        module(
            lambda: QExperts(
                {"gate_proj": weight(codec, 4, K, K), "up_proj": weight("nvfp4", 4, K, K), "down_proj": weight(codec, 4, K, K)}
            ),
            *routed,
        ),
    )
    yield "ops.experts", verb(lambda: _experts(codec), *routed)


def _bound(verb: Callable[..., Any], w: Any) -> Callable[..., Tensor]:
    return lambda x: verb(x, w, dtype=torch.float32) if verb is functional.embedding else verb(x, w)


def _experts(codec: str) -> Callable[..., Tensor]:
    up, down = weight(codec, 4, 2 * K, K), weight(codec, 4, K, K)
    return lambda x, ids, share: ops.experts(x, up, down, ids, share)


TRANSFORMS: dict[str, Callable[[Subject], list[Pair]]] = {}
SLOW: set[str] = set()
"""Transforms that compile or start processes."""


def transform(name: str, slow: bool = False) -> Callable[[Callable[[Subject], list[Pair]]], Callable[[Subject], list[Pair]]]:
    """Registers a function that gives pairs of a result and what it must equal, bit for bit."""

    def added(function: Callable[[Subject], list[Pair]]) -> Callable[[Subject], list[Pair]]:
        TRANSFORMS[name] = function
        if slow:
            SLOW.add(name)
        return function

    return added


# ---- modes


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@contextlib.contextmanager
def _changed(state: Callable[[], Any], change: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A setting of torch with another value."""
    before = state()
    change(value)
    try:
        yield
    finally:
        change(before)


def _threads(count: int) -> Any:
    return _changed(torch.get_num_threads, torch.set_num_threads, count)


def _default_dtype(dtype: torch.dtype) -> Any:
    return _changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _deterministic() -> Any:
    return _changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16), "a function mode": _Functions,
    "a dispatch mode": _Operations,
    "anomaly detection": torch.autograd.detect_anomaly, "deterministic algorithms": _deterministic, "a profiler": _profiler,
    "one thread": lambda: _threads(1), "three threads": lambda: _threads(3),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"), "saved tensors on the CPU": torch.autograd.graph.save_on_cpu,
    "a dual level": forward_ad.dual_level,
}  # fmt: skip
for _name, _mode in MODES.items():

    @transform(_name)
    def _in_mode(s: Subject, mode: Callable[[], Any] = _mode) -> list[Pair]:
        want = s.plain()
        with mode():
            return [(s.plain(), want)]


@transform("tensors of inference mode")
def _inference_tensors(s: Subject) -> list[Pair]:
    with torch.inference_mode():
        args = tuple(a.clone() for a in s.args)
    return [(s.call(*args), s.plain())]


# ---- tensors without memory


def _is_shaped(got: Tensor, want: Tensor, kind: str) -> list[Pair]:
    of = got.device.type if kind == "meta" else type(got).__name__
    return [((got.shape, got.dtype, of), (want.shape, want.dtype, kind))]


@transform("fake tensors in their mode")
def _fake_inside(s: Subject) -> list[Pair]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _is_shaped(s.call(*(mode.from_tensor(a) for a in s.args)), s_plain(s), "FakeTensor")


def s_plain(s: Subject) -> Tensor:
    """The plain product, outside the modes that are on."""
    with torch.utils._python_dispatch._disable_current_modes():
        return s.plain()


@transform("real tensors in a fake mode")
def _fake_real(s: Subject) -> list[Pair]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _is_shaped(s.plain(), s_plain(s), "FakeTensor")


@transform("fake tensors outside their mode")
def _fake_outside(s: Subject) -> list[Pair]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _is_shaped(s.call(*(mode.from_tensor(a) for a in s.args)), s.plain(), "FakeTensor")


@transform("meta tensors")
def _meta(s: Subject) -> list[Pair]:
    return _is_shaped(s.call(*(a.to("meta") for a in s.args)), s.plain(), "meta")


@transform("x on another device than the rest")
def _one_meta(s: Subject) -> list[Pair]:
    if len(s.args) == 1 and s.module is None:
        raise UnsuitedError("one tensor")
    return _is_shaped(s.with_x(s.x.to("meta")), s.plain(), "meta")


@transform("a module moved to meta")
def _module_on_meta(s: Subject) -> list[Pair]:
    module = copy.deepcopy(s.needs_module()).to("meta")
    return _is_shaped(module(*(a.to("meta") for a in s.args)), s.plain(), "meta")


@transform("a lazy module to a device that is missing")
def _missing_device(s: Subject) -> list[Pair]:
    if torch.cuda.is_available():
        raise UnsuitedError("there is a GPU")
    module = copy.deepcopy(s.needs_module())
    with contextlib.suppress(RuntimeError, AssertionError):  # torch's own sentence: no such device
        module.to("cuda")
    return [(module(*s.args), s.plain())]


for _name, _kept in {"freed memory": 0.0, "shortened memory": 0.5}.items():

    @transform(_name)
    def _freed(s: Subject, kept: float = _kept) -> list[Pair]:
        x = s.x.clone()
        x.untyped_storage().resize_(int(kept * x.nbytes))
        return [(s.with_x(x), "an error")]


@transform("a view past shortened memory")
def _shortened_view(s: Subject) -> list[Pair]:
    x = _spaced(s.x)
    x.untyped_storage().resize_(x.nbytes)
    return [(s.with_x(x), "an error")]


# ---- tracers


def _compiled(s: Subject, **options: Any) -> list[Pair]:
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            compiled = torch.compile(s.call, **options)
            return [(compiled(*s.args), s.plain()), (compiled(*s.args), s.plain())]
    finally:
        torch._dynamo.reset()


for _name, _options in {
    "compile eager": {"backend": "eager"}, "compile whole graph": {"backend": "eager", "fullgraph": True},
    "compile aot": {"backend": "aot_eager"}, "compile dynamic": {"backend": "eager", "dynamic": True}, "compile inductor": {},
}.items():  # fmt: skip
    transform(_name, slow=True)(lambda s, options=_options: _compiled(s, **options))


@transform("compile and differentiate", slow=True)
def _compiled_gradient(s: Subject) -> list[Pair]:
    s.needs_floats()
    torch._dynamo.reset()
    grads = []
    for call in (torch.compile(s.call, backend="aot_eager"), s.call):
        x = s.x.clone().requires_grad_()
        call(x, *s.args[1:]).float().sum().backward()
        grads.append(x.grad)
    torch._dynamo.reset()
    return [(grads[0], grads[1])]


class _Around(nn.Module):
    """A verb as a module, for tracers that take modules only."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(*args) * 1


def _around(s: Subject) -> nn.Module:
    return _Around(s.call)


for _strict in (True, False):
    transform(f"export{' strict' * _strict}", slow=True)(
        lambda s, strict=_strict: [(torch.export.export(_around(s), s.args, strict=strict).module()(*s.args), s.plain())]
    )


@transform("export of any number of tokens", slow=True)
def _export_dynamic(s: Subject) -> list[Pair]:
    tokens = torch.export.Dim.DYNAMIC
    axis = {0: tokens} if s.floats else {1: tokens}
    shapes = (tuple(axis for _ in s.args),)
    graph = torch.export.export(_around(s), s.args, dynamic_shapes=shapes).module()
    more = tuple(torch.cat([a, a], 0 if s.floats else 1) for a in s.args)
    return [(graph(*s.args), s.plain()), (graph(*more), s.call(*more))]


for _tracing in ("real", "fake", "symbolic"):
    transform(f"make_fx {_tracing}")(
        lambda s, tracing=_tracing: [
            (make_fx(lambda *a: s.call(*a) * 1, tracing_mode=tracing, _allow_non_fake_inputs=True)(*s.args)(*s.args), s.plain())
        ]
    )


@transform("fx")
def _fx(s: Subject) -> list[Pair]:
    root = s.module or (lambda x: s.with_x(x) * 1)
    return [(torch.fx.symbolic_trace(root)(*(s.args if s.module else s.args[:1])), s.plain())]


@transform("fx of a model")
def _fx_model(s: Subject) -> list[Pair]:
    s.needs_module()
    if len(s.args) > 1:
        raise UnsuitedError("a sequence passes one tensor")
    return [(torch.fx.symbolic_trace(nn.Sequential(s.module, nn.Identity()))(*s.args), s.plain())]


@transform("jit.trace")
def _jit(s: Subject) -> list[Pair]:
    return [(torch.jit.trace(_around(s), s.args)(*s.args), s.plain())]


@transform("functionalize")
def _functionalize(s: Subject) -> list[Pair]:
    return [(torch.func.functionalize(s.call)(*s.args), s.plain())]


# ---- torch.func and autograd


def _batch(s: Subject) -> tuple[tuple[Tensor, ...], Tensor]:
    other = tuple(torch.flip(a, [0 if s.floats else 1]) for a in s.args)
    return tuple(torch.stack(pair) for pair in zip(s.args, other, strict=True)), torch.stack([s.plain(), s.call(*other)])


@transform("vmap")
def _vmap(s: Subject) -> list[Pair]:
    args, want = _batch(s)
    return [(torch.vmap(s.call)(*args), want)]


@transform("vmap over other axes")
def _vmap_axes(s: Subject) -> list[Pair]:
    args, want = _batch(s)
    return [(torch.vmap(s.call, in_dims=-1, out_dims=1)(*(a.movedim(0, -1) for a in args)), want.movedim(0, 1))]


@transform("vmap in vmap")
def _vmap_twice(s: Subject) -> list[Pair]:
    args, want = _batch(s)
    return [(torch.vmap(torch.vmap(s.call))(*(torch.stack([a, a]) for a in args)), torch.stack([want, want]))]


@transform("vmap of x alone")
def _vmap_one(s: Subject) -> list[Pair]:
    axes = (0, *(None for _ in s.args[1:]))
    return [(torch.vmap(s.call, in_dims=axes)(torch.stack([s.x, s.x]), *s.args[1:]), torch.stack([s.plain()] * 2))]


@transform("vmap in chunks")
def _vmap_chunks(s: Subject) -> list[Pair]:
    args, want = _batch(s)
    return [(torch.vmap(s.call, chunk_size=1)(*args), want)]


def _derivative(s: Subject) -> Callable[[Tensor], Tensor]:
    s.needs_floats()
    return lambda x: s.with_x(x).float().sum()


def _near(got: Tensor, want: Tensor) -> Pair:
    """Compared within float32's rounding of a sum of n or k terms; bfloat16's where x is."""
    exact = 1e-4 if got.dtype == torch.float32 else 3e-2
    return bool(torch.allclose(got.double(), want.double(), rtol=exact, atol=exact * (1 + float(want.abs().max())))), True


def _backward(s: Subject) -> Tensor:
    x = s.x.clone().requires_grad_()
    _derivative(s)(x)
    s.with_x(x).float().sum().backward()
    assert x.grad is not None
    return x.grad


@transform("backward")
def _grad_of_call(s: Subject) -> list[Pair]:
    s.needs_floats()
    got = _backward(s)
    want = got if s.dense is None else s.dense.sum(0).expand_as(s.x)
    return [_near(got, want)]


@transform("backward twice")
def _backward_twice(s: Subject) -> list[Pair]:
    s.needs_floats()
    x = s.x.clone().requires_grad_()
    y = s.with_x(x).float().square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    if s.dense is None:
        raise UnsuitedError("no matrix to compare with")
    return [_near(second, (2 * s.dense.T @ s.dense).sum(0).expand_as(x))]


def _with_dense(s: Subject) -> Tensor:
    s.needs_floats()
    if s.dense is None:
        raise UnsuitedError("no matrix to compare with")
    return s.dense


@transform("grad")
def _grad(s: Subject) -> list[Pair]:
    call = _derivative(s)
    return [_near(torch.func.grad(call)(s.x), _backward(s))]


@transform("grad of every sample")
def _grad_samples(s: Subject) -> list[Pair]:
    dense = _with_dense(s)
    return [_near(torch.vmap(torch.func.grad(_derivative(s)))(s.x), dense.sum(0).expand_as(s.x))]


@transform("vjp")
def _vjp(s: Subject) -> list[Pair]:
    s.needs_floats()
    y, back = torch.func.vjp(lambda x: s.with_x(x), s.x)
    return [(y, s.plain()), _near(back(torch.ones_like(y))[0], _backward(s))]


@transform("jvp")
def _jvp(s: Subject) -> list[Pair]:
    s.needs_floats()
    y, tangent = torch.func.jvp(lambda x: s.with_x(x), (s.x,), (s.x,))
    return [(y, s.plain()), _near(tangent, s.x @ s.dense.T if s.dense is not None else tangent)]


@transform("dual numbers")
def _dual(s: Subject) -> list[Pair]:
    s.needs_floats()
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(s.with_x(forward_ad.make_dual(s.x, s.x)))
    return [(y, s.plain()), _near(tangent, s.x @ s.dense.T if s.dense is not None else tangent)]


@transform("jacrev")
def _jacrev(s: Subject) -> list[Pair]:
    dense = _with_dense(s)
    return [_near(torch.func.jacrev(s.with_x)(s.x[0]), dense)]


@transform("jacfwd")
def _jacfwd(s: Subject) -> list[Pair]:
    dense = _with_dense(s)
    return [_near(torch.func.jacfwd(s.with_x)(s.x[0]), dense)]


@transform("hessian")
def _hessian(s: Subject) -> list[Pair]:
    dense = _with_dense(s)
    return [_near(torch.func.hessian(lambda x: s.with_x(x).square().sum())(s.x[0]), 2 * dense.T @ dense)]


@transform("linearize")
def _linearize(s: Subject) -> list[Pair]:
    dense = _with_dense(s)
    y, tangent = torch.func.linearize(s.with_x, s.x)
    return [(y, s.plain()), _near(tangent(s.x), s.x @ dense.T)]


@transform("functional_call")
def _functional_call(s: Subject) -> list[Pair]:
    module = s.needs_module()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [(torch.func.functional_call(module, state, s.args), s.plain())]


for _reentrant in (True, False):

    @transform(f"checkpoint{' reentrant' * _reentrant}")
    def _checkpoint(s: Subject, reentrant: bool = _reentrant) -> list[Pair]:
        s.needs_floats()
        x = s.x.clone().requires_grad_()
        y = checkpoint(s.call, x, *s.args[1:], use_reentrant=reentrant)
        want = s.with_x(s.x.clone().requires_grad_(not reentrant))  # a reentrant one runs without a tape first
        y.float().sum().backward()
        return [(y.detach(), want.detach()), _near(x.grad, _backward(s))]


# ---- kinds of tensors


class Marked(Tensor):
    """A subclass with memory of its own and no dispatch of its own."""


class Wrapped(Tensor):
    """A subclass without memory: operations go to the tensor within."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def within(a: Any) -> Any:
            return a.inner if isinstance(a, Wrapped) else a

        return function(*torch.utils._pytree.tree_map(within, args), **torch.utils._pytree.tree_map(within, kwargs or {}))


def _spaced(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def _shifted(x: Tensor) -> Tensor:
    """Every axis reversed in memory."""
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def _in_file(x: Tensor) -> Tensor:
    """Memory of a file that another process could map."""
    return x.clone().share_memory_()


def _misaligned(x: Tensor) -> Tensor:
    name = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}.get(x.dtype)
    if name is None:
        raise UnsuitedError("NumPy has no such dtype")
    return torch.from_numpy(np.frombuffer(b"\0" + x.numpy().tobytes(), name, offset=1).reshape(x.shape))


def _read_only(x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        raise UnsuitedError("NumPy has no such dtype")
    array = x.numpy().copy()
    array.flags.writeable = False
    return torch.from_numpy(array)


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "a subclass": lambda x: x.clone().as_subclass(Marked), "a wrapper": lambda x: Wrapped(x),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False), "transposed": _shifted, "every other element": _spaced,
    "an offset": lambda x: torch.cat([x, x])[len(x):], "a slice of columns": lambda x: torch.cat([x, x], -1)[..., x.shape[-1]:],
    "shared memory": _in_file, "misaligned": _misaligned, "read-only": _read_only,
    "a lazy negation": lambda x: torch._neg_view(-x),
    "overlapping rows": lambda x: x[:1].expand(x.shape).clone()[:1].expand(x.shape),
}  # fmt: skip
"""x -> a tensor with x's values in another form."""
for _name, _form in SAME.items():

    @transform(_name)
    def _same(s: Subject, name: str = _name, form: Callable[[Tensor], Tensor] = _form) -> list[Pair]:
        if name == "a lazy negation":
            s.needs_floats()
        x = form(s.x)
        got = s.with_x(x)
        return [(got, s.with_x(x.contiguous().clone() if name == "overlapping rows" else s.x))]


@transform("all arguments transposed")
def _all_transposed(s: Subject) -> list[Pair]:
    return [(s.call(*(_shifted(a) for a in s.args)), s.plain())]


@transform("a lazy zero")
def _zero(s: Subject) -> list[Pair]:
    s.needs_floats()
    return [(s.with_x(torch._efficientzerotensor(s.x.shape, dtype=s.x.dtype)), s.with_x(torch.zeros_like(s.x)))]


@transform("no tokens")
def _empty(s: Subject) -> list[Pair]:
    args = tuple(a[:0] for a in s.args)
    want = s.plain()[:0]
    return [(s.call(*args), want)]


@transform("one token")
def _one(s: Subject) -> list[Pair]:
    return [(s.call(*(a[:1] for a in s.args)), s.plain()[:1])]


@transform("five axes")
def _axes(s: Subject) -> list[Pair]:
    if len(s.args) > 1:
        raise UnsuitedError("experts take a matrix")
    return [(s.with_x(s.x[None, :, None, None]), s.plain()[None, :, None, None])]


OTHER: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(), "sparse rows": lambda x: x.to_sparse_csr(), "sparse columns": lambda x: x.to_sparse_csc(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "mkldnn": lambda x: x.float().to_mkldnn(),
    "float64": lambda x: x.double(), "complex": lambda x: x.to(torch.complex64),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "booleans": lambda x: x > 0, "float8": lambda x: x.to(torch.float8_e4m3fn), "int32": lambda x: x.int(),
    "a wrong width": lambda x: x[..., :-1], "a number": lambda x: x.flatten()[0], "a list": lambda x: x.tolist(),
    "None": lambda x: None,
    "NumPy": lambda x: x.float().numpy(), "out of range": lambda x: x + 10**6, "negative": lambda x: -x - 1,
}  # fmt: skip
"""x -> something else, which is refused, or computed as the same values in plain form are."""
for _name, _form in OTHER.items():

    @transform(_name)
    def _refused(s: Subject, name: str = _name, form: Callable[[Tensor], Any] = _form) -> list[Pair]:
        try:
            x = form(s.x)
        except (RuntimeError, NotImplementedError):
            raise UnsuitedError("torch has no such tensor") from None
        got = s.with_x(x)
        if isinstance(x, list):
            return [(torch.as_tensor(np.asarray(got)), s.plain())]
        if isinstance(x, np.ndarray):
            return [
                (
                    torch.from_numpy(np.asarray(got)) if not isinstance(got, Tensor) else got,
                    s.with_x(s.x.float() if s.floats else s.x),
                )
            ]
        if name in ("int32", "out of range", "negative") or (name == "a wrong width" and not s.floats) or name == "a number":
            x = x.to(s.x.dtype) if isinstance(x, Tensor) else x
            return [(got, s.with_x(x.clone()))]
        return [(got, "an error")]


# ---- copies, files, threads and processes


@transform("deepcopy")
def _deepcopy(s: Subject) -> list[Pair]:
    return [(copy.deepcopy(s.needs_module())(*s.args), s.plain())]


@transform("copy")
def _copy(s: Subject) -> list[Pair]:
    return [(copy.copy(s.needs_module())(*s.args), s.plain())]


@transform("pickle")
def _pickle(s: Subject) -> list[Pair]:
    return [(pickle.loads(pickle.dumps(s.needs_module()))(*s.args), s.plain())]


@transform("torch.save")
def _save(s: Subject) -> list[Pair]:
    file = io.BytesIO()
    torch.save(s.needs_module(), file)
    file.seek(0)
    return [(torch.load(file, weights_only=False)(*s.args), s.plain())]


for _assign in (True, False):

    @transform(f"state dict{' assigned' * _assign}")
    def _state(s: Subject, assign: bool = _assign) -> list[Pair]:
        module, file = s.needs_module(), io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(module)
        other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        return [(other(*s.args), s.plain())]


@transform("half the state dict")
def _half_state(s: Subject) -> list[Pair]:
    module = s.needs_module()
    state = module.state_dict()
    other = copy.deepcopy(module)
    with contextlib.suppress(RuntimeError):  # torch's own form, with a line for each key
        other.load_state_dict(dict(itertools.islice(state.items(), len(state) // 2)))
        return [("half of a state was loaded", "an error")]
    return [(other(*s.args), s.plain())]


@transform("threads")
def _in_threads(s: Subject) -> list[Pair]:
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(s.plain())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    return [(got, s.plain()) for got in results]


@transform("the autograd thread")
def _hook(s: Subject) -> list[Pair]:
    found: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    (x * 2).register_hook(lambda g: found.append(s.plain()))
    y = x * 2
    y.register_hook(lambda g: found.append(s.plain()))
    y.sum().backward()
    return [(found[0], s.plain())]


def _call_pickled(module: bytes, args: list[np.ndarray]) -> np.ndarray:
    torch.set_num_threads(1)
    result: np.ndarray = pickle.loads(module)(*map(torch.from_numpy, args)).float().numpy()
    return result


for _method in ("fork", "spawn"):

    @transform(f"multiprocessing {_method}", slow=True)
    def _process(s: Subject, method: str = _method) -> list[Pair]:
        if any(a.dtype in (torch.bfloat16,) for a in s.args):
            raise UnsuitedError("NumPy has no such dtype")
        work = pickle.dumps(s.needs_module()), [a.numpy() for a in s.args]
        with multiprocessing.get_context(method).Pool(1) as pool:
            got = pool.apply_async(_call_pickled, work).get(timeout=300)
        return [(torch.from_numpy(got), s.plain().float())]


def _child(s: Subject, out: Any) -> None:
    out.send(s.plain().float().detach().numpy())


@transform("a forked call", slow=True)
def _forked(s: Subject) -> list[Pair]:
    """The object itself in a child, after the parent has used its threads."""
    want = s.plain().float()
    receive, send = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(s, send))
    process.start()
    got = receive.recv() if receive.poll(120) else None
    process.join(10)
    process.kill()
    return [(got is not None and torch.from_numpy(got), want)]


class _Rows(Dataset):  # type: ignore[misc] # torch is not type-checked
    def __init__(self, s: Subject) -> None:
        self.subject = s

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.subject.plain().clone()


for _workers, _method in ((0, "fork"), (2, "fork"), (1, "spawn")):

    @transform(f"a data loader, {_workers} workers by {_method}", slow=_workers > 0)
    def _loader(s: Subject, workers: int = _workers, method: str = _method) -> list[Pair]:
        if method == "spawn":
            s = Subject(s.name, s.needs_module(), s.args, s.module)
        loader = DataLoader(_Rows(s), num_workers=workers, multiprocessing_context=method if workers else None)
        return [(y[0], s.plain()) for y in loader]


# ---- the verdict


def verdict(s: Subject, function: Callable[[Subject], list[Pair]]) -> tuple[str, str]:
    """ "right", "refused" with the sentence, "unsuited", or "fault" with what was wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = function(s)
    except UnsuitedError as why:
        return "unsuited", str(why)
    except HalfbyteError as error:
        said = str(error)
        return ("refused", said) if SENTENCE.match(said.replace("\n", " ")) else ("fault", f"no sentence: {said}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "fault", "".join(traceback.format_exception(error)[-1:]).strip()[:600]
    for got, want in pairs:
        if not _equal(got, want, s.exact):
            return "fault", f"got {str(got)[:200]}; expected {str(want)[:200]}"
    return "right", ""


def _equal(got: Any, want: Any, exact: bool) -> bool:
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        if torch.equal(got, want) or (bool(want.isnan().any()) and torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)):
            return True
        if exact or not want.is_floating_point():
            return False
        largest = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 0.0
        return torch.allclose(got, want, rtol=0, atol=max(1e-6, torch.finfo(want.dtype).eps) * largest)
    return type(got) is type(want) and bool(got == want)


def cells(make: Callable[[], Subject], names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(transform, kind, detail) of each transform of one subject."""
    s = make()
    for name in names:
        kind, detail = verdict(s, TRANSFORMS[name])
        yield name, kind, detail


def in_child(make: Callable[[], Subject], names: list[str]) -> list[tuple[str, str, str]]:
    """`cells` in a forked process; a transform that ends it is a fault, and the others go on."""
    found: list[tuple[str, str, str]] = []
    while len(found) < len(names):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            with open(write, "w") as out:
                for cell in cells(make, names[len(found) :]):
                    out.write(repr(cell) + "\n")
                    out.flush()
            os._exit(0)
        os.close(write)
        with open(read) as lines:
            found += [eval(line) for line in lines]
        _, status = os.waitpid(pid, 0)
        if len(found) < len(names):
            end = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
            found.append((names[len(found)], "fault", f"the process ended: {end}"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--only", default="", help="subjects whose name has this")
    parser.add_argument("--transforms", default="", help="transforms whose name has this")
    parser.add_argument("--quick", action="store_true", help="without those that compile or start processes")
    given = parser.parse_args()
    names = [n for n in TRANSFORMS if given.transforms in n and not (given.quick and n in SLOW)]
    counts, faults = collections.Counter[str](), 0
    with open(given.log, "w") if given.log else contextlib.nullcontext(sys.stdout) as out:
        for subject, make in subjects():
            if given.only not in subject:
                continue
            for name, kind, detail in in_child(make, names):
                counts[kind] += 1
                if kind == "fault" or given.log:
                    print(f"{kind}\t{subject}\t{name}\t{detail!r}", file=out, flush=True)
                faults += kind == "fault"
        print(dict(counts), file=out)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
