"""A product that was made before hands the driver what the first call did: every argument but the
addresses of x, y, bias and scratch memory, without a GPU.

Triton's own launcher is around a C function that keeps its arguments; tensor maps are the
arguments of their encoder; new tensors of one size lie at one address.
"""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
torch = pytest.importorskip("torch")

from triton import knobs  # noqa: E402 # after the skips
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from halfbyte.backends import cuda  # noqa: E402
from halfbyte.backends.base import Prepared  # noqa: E402
from halfbyte.backends.cuda import launch, relaunch  # noqa: E402
from halfbyte.backends.cuda.weight import CALLS_KEPT, nbytes, to_device  # noqa: E402
from halfbyte.backends.cuda.wgmma import launch as fused_launch  # noqa: E402
from halfbyte.backends.cuda.wgmma import schedule as fused  # noqa: E402
from halfbyte.bench.weights import random_weight  # noqa: E402


class Launched:
    """A compiled kernel around Triton's launcher."""

    def __init__(self, calls, descriptors):
        self.function, self.packed_metadata = "function", (4, 1, 100)
        metas = [
            {"swizzle": 3, "elem_size": d.base.element_size(), "elem_type": 6, "block_size": d.block_shape, "fp4_padded": False}
            for d in descriptors
        ]
        signature = dict(enumerate(["tensordesc<fp16[16, 64],...>"] * len(metas) + ["*fp16"] * 20))
        inner = nvidia.wrap_handle_tensordesc(lambda *given: calls.append(given), signature, metas or None)
        scratch = dict.fromkeys(
            ("global_scratch_size", "profile_scratch_size", "global_scratch_align", "profile_scratch_align"), 0
        )
        self.run = object.__new__(nvidia.CudaLauncher)
        vars(self.run).update(launch=inner, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, **scratch)

    def __getitem__(self, grid):
        stream = driver.active.get_current_stream(0)
        return lambda *given: self.run(
            *(*grid, 1, 1)[:3], stream, self.function, self.packed_metadata, None, None, None, *relaunch.addresses(given)
        )


class Kernel:
    """What `triton.jit` makes: launches, and returns what it compiled."""

    def __init__(self, calls):
        self.calls, self.through_triton = calls, 0

    def __getitem__(self, grid):
        def run(*values, launch_pdl=True, num_warps=4, num_stages=3, enable_fp_fusion=False, **constants):
            self.through_triton += 1
            compiled = Launched(self.calls, [v for v in values if isinstance(v, relaunch.TensorDescriptor)])
            compiled[grid](*values, *constants.values())
            return compiled

        return run


@pytest.fixture
def host(monkeypatch):
    """The stand-in: `calls` are the C function's, `stream` is the current stream."""
    held = SimpleNamespace(calls=[], stream=7)
    held.kernel = Kernel(held.calls)
    encode = lambda *given: ("map", *[tuple(v) if isinstance(v, list | tuple | torch.Size) else v for v in given])  # noqa: E731
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=encode), get_current_stream=lambda device: held.stream)
    buffers, empty = {}, torch.empty

    def at_one_address(shape, **options):
        key = math.prod(shape) if isinstance(shape, tuple) else shape, str(sorted(options.items(), key=str))
        if key not in buffers:
            buffers[key] = empty(key[0], **options)
        return buffers[key].view(shape)

    relaunch._encode.cache_clear()
    for module, name in ((launch, "fragment_kernel"), (launch, "matvec_kernel"), (launch, "matmul_kernel"),
                         (fused_launch, "wgmma_kernel")):  # fmt: skip
        monkeypatch.setattr(module, name, held.kernel)
    monkeypatch.setattr(torch, "empty", at_one_address)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch.gpu, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch.gpu, "reads_lanes", lambda device: True)
    monkeypatch.setattr(launch.gpu, "stream_of", lambda device: held.stream)
    with mock.patch.object(driver, "_active", active):
        yield held
    relaunch._encode.cache_clear()
    launch.gpu._counters.clear()


def weight(word, n, k, invariant=False):
    q = random_weight(word, n, k, 0)
    packed = to_device(q, "cpu")
    return Prepared("cuda", q.format, q.shape, packed, nbytes(packed), invariant=invariant)


def linear(x, w, bias=None, **options):
    return cuda.CUDABackend().linear(x, w, bias, **options)


@pytest.mark.parametrize("word", ["int4:g128", "mxfp4", "nvfp4", "affine4:g64", "q8_0", "q4_K", "q6_K", "nf4:g64", "uint7:g64"])
@pytest.mark.parametrize("biased", [False, True])
def test_every_call_of_a_shape_hands_over_the_same(host, word, biased):
    n = 1024
    w, taken, dtype = weight(word, n, 2048), set(), torch.bfloat16
    one, other = (torch.zeros(777, 2048, dtype=dtype) for _ in range(2))
    biases = [torch.zeros(n, dtype=dtype) if biased else None for _ in range(2)]
    for m in (1, 2, 3, 16, 17, 100, 128, 200, 256, 300, 777):
        chosen = cuda.CUDABackend.schedule_of(one[:m], w.data)
        if chosen == "dequantize_then_gemm":
            continue
        taken.add(chosen)
        host.calls.clear()
        made = host.kernel.through_triton
        linear(one[:m], w, biases[0])
        each = len(host.calls)
        assert host.kernel.through_triton - made <= each
        made = host.kernel.through_triton
        for x, bias in ((one, 0), (one, 0), (other, 1), (one, 0), (other, 1)):
            linear(x[:m], w, biases[bias])
        assert host.kernel.through_triton == made
        calls = [host.calls[i : i + each] for i in range(0, 6 * each, each)]
        assert len(host.calls) == 6 * each
        assert calls[1] == calls[2] == calls[4] == calls[0]
        assert calls[3] == calls[5] != calls[0]
        to = {one.data_ptr(): other.data_ptr(), getattr(biases[0], "data_ptr", int)(): getattr(biases[1], "data_ptr", int)()}
        size = one.stride(0) * one.itemsize
        for row in range(m):
            to[one.data_ptr() + row * size] = other.data_ptr() + row * size
        assert moved(calls[0], {at: there for at, there in to.items() if at}) == calls[3]
    assert taken == {"matvec", "matmul"} if word == "uint7:g64" else taken == {"fragments", "fused"}


def moved(value, to):
    """Arguments with some addresses replaced."""
    if isinstance(value, list | tuple):
        return type(value)([moved(v, to) for v in value]) if type(value) in (list, tuple) else value
    return to.get(value, value) if type(value) is int and value > 1 << 20 else value


def test_launches_in_two_parts_are_repeated_whole(host):
    w = weight("int4:g128", 4096, 2048)
    m = next(m for m in range(65, 2048) if len(fused.steps_for(m, w.data, True)) == 2)
    x = torch.zeros(m, 2048).half()
    for _ in range(5):
        linear(x, w)
    assert len(host.calls) == 10
    assert all(host.calls[i : i + 2] == host.calls[:2] for i in range(0, 10, 2))


@pytest.mark.parametrize("word", ["int4:g128", "uint7:g64"])
@pytest.mark.parametrize("m", [1, 3, 16, 300])
def test_x_is_put_in_the_order_of_the_weight_on_every_call(host, word, m):
    if word == "uint7:g64" and m == 300:
        return
    w, x = weight(word, 256, 512), torch.zeros(m, 512).half()
    w.data.order = torch.arange(511, -1, -1)
    for _ in range(5):
        with mock.patch.object(torch.Tensor, "index_select", side_effect=lambda axis, order: x.clone()) as sorted_by:
            linear(x, w)
        assert sorted_by.call_args.args[1] is w.data.order
    assert not any(x.data_ptr() in call for call in host.calls)


@pytest.mark.parametrize("m", [16, 300])
def test_what_a_kernel_is_compiled_for_is_looked_up_anew(host, m):
    """Strides, alignment, types, a bias, another weight or a copy: each as if it came first."""
    w, k = weight("int4:g128", 1024, 2048), 2048
    wide = torch.zeros(m, 2 * k + 8).half()
    whole = torch.zeros(1032).half()
    cases = [
        (wide[:, :k], w, None), (wide[:, 8 : k + 8], w, None), (wide[:, 1 : k + 1], w, None), (wide[:, :k].contiguous(), w, None),
        (wide[:, : 2 * k : 2], w, None), (wide[:, :k].bfloat16(), w, None), (wide[:, :k], w, whole[:1024]),
        (wide[:, :k], w, whole[1:1025]), (wide[:, :k], w, whole[:1024].float()),
        (wide[:, :k], weight("int4:g128", 1024, k), None),
    ]  # fmt: skip
    fresh = []
    for x, one, bias in cases:
        one.data.launches.clear()
        one.data.launches.calls.clear()
        host.calls.clear()
        linear(x, one, bias)
        fresh.append(tuple(host.calls))
    for _ in range(4):
        for (x, one, bias), expected in zip(cases, fresh, strict=True):
            host.calls.clear()
            linear(x, one, bias)
            if x.stride(1) == 1 and x.data_ptr() % 16 == 0:  # a copy of x lies anywhere
                assert tuple(host.calls) == expected
            assert len(host.calls) == len(expected)


@pytest.mark.parametrize("m", [16, 300])
def test_streams_profilers_and_other_schedules(host, m):
    w, x = weight("int4:g128", 1024, 2048), torch.zeros(m, 2048).half()
    for _ in range(4):
        linear(x, w, schedule="fused")
    forced = host.calls[-1]
    for _ in range(4):
        linear(x, w)
    usual = host.calls[-1]
    assert (usual == forced) == (m == 300)  # 16 tokens are the fragment kernel's
    assert w.data.launches.calls
    host.stream = 9
    linear(x, w)
    assert host.calls[-1][3] == 9
    host.stream = 7
    invariant = Prepared(w.backend, w.format, w.shape, w.data, w.nbytes, invariant=True)
    for one, options, expected in ((invariant, {}, None), (w, {"schedule": "fused"}, forced)):
        got = []
        for _ in range(4):
            made = host.kernel.through_triton
            linear(x, one, **options)
            got.append(host.calls[-1])
        assert host.kernel.through_triton == made
        assert got == [expected or got[0]] * 4
        assert expected or got[0] != usual
    linear(x, w)
    assert host.calls[-1] == usual
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        with mock.patch.object(Launched, "__getitem__", lambda self, grid: lambda *given: seen.append(grid)):
            linear(x, w)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert seen == [usual[:3]]


def test_calls_are_bounded_and_go_with_the_weight(host):
    w = weight("mxfp4", 256, 512)
    for m in range(1, 200):
        for _ in range(3):
            linear(torch.zeros(m, 512).half(), w)
    assert 0 < len(w.data.launches.calls) <= CALLS_KEPT
    xs = [torch.zeros(100, 512).half() for _ in range(3 * relaunch.MAPS_KEPT)]
    for x in xs:
        linear(x, w)
    again = next(c for c in reversed(w.data.launches.calls.values()) if isinstance(c, fused_launch.FusedCall))
    assert all(len(one.repeat._known) <= relaunch.MAPS_KEPT for *_, one in again._launches)
    there, scales, x = weakref.ref(w.data), weakref.ref(w.data.scales), weakref.ref(xs[0])
    del w, xs, again
    gc.collect()
    assert there() is scales() is x() is None


@pytest.mark.parametrize("m", [1, 17, 100, 300])
@pytest.mark.parametrize("stride", [0, 2])
def test_a_strided_bias_is_handed_over_as_one_that_is_not(host, monkeypatch, m, stride):
    """Kernels read a bias from one address on."""
    w, x = weight("int4:g128", 1024, 2048), torch.zeros(m, 2048, dtype=torch.float16)
    view = torch.arange(2048, dtype=torch.float16).as_strided((1024,), (stride,))
    made, contiguous = [], torch.Tensor.contiguous

    def noting(self, *given, **options):
        out = contiguous(self, *given, **options)
        if self is view:
            made.append(out)
        return out

    monkeypatch.setattr(torch.Tensor, "contiguous", noting)
    for _ in range(4):
        host.calls.clear()
        linear(x, w, view)
        (kept,) = made
        assert torch.equal(kept, view)
        handed = str(host.calls)
        assert str(kept.data_ptr()) in handed
        assert str(view.data_ptr()) not in handed
        made.clear()
