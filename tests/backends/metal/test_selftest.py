"""selftest: right kernels pass, a wrong one is named, an absent device is a sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest

import torch
from halfbyte.backends import Backend, backend_named
from halfbyte.bench import selftest
from halfbyte.cli.app import main
from halfbyte.errors import BackendError
from halfbyte.ops import apply_gate
from support.metal_cpu.machine import available


def metal_bench():
    from support.metal_formats import backend

    return selftest.Bench(
        "torch",
        backend(),
        lambda a, dtype: torch.from_numpy(np.ascontiguousarray(a, np.float32)).to(getattr(torch, dtype)),
        lambda y: y.float().numpy(),
        lambda _: None,
    )


VARIANTS = {"fused, plain"} | {
    f"{kernel}, {decoder}" for kernel in ("matvec", "fused") for decoder in ("single", "subnormal", "constant", "threadgroup")
}


@pytest.mark.skipif(not available(), reason="clang-19 is not installed")
@pytest.mark.parametrize("codec", ["affine4:g64", "int8:g128", "mxfp4"])
def test_the_metal_kernels_pass_on_the_cpu_build(codec):
    from halfbyte.backends.metal import kernels
    from halfbyte.formats import format_named
    from support.metal_formats import stand

    fmt, dtype = format_named(codec), "float16"
    few = [*(kernels.matvec(fmt, dtype, tokens) for tokens in (1, 2, 4)), kernels.dequantize(fmt, dtype)]
    few += [make(fmt, dtype) for make in (kernels.gemm_single_stage, kernels.gemm_double_buffered, kernels.gemm_striped)]
    if codec == "affine4:g64":
        few += [kernels.gemm_fused(fmt, dtype, variant) for variant in kernels.FUSED]
    if codec == "mxfp4":
        few += [kernels.matvec(fmt, dtype, t, d) for t in (1, 2, 4) for d in kernels.E2M1_DECODERS]
        few += [kernels.gemm_fused(fmt, dtype, "wide", d) for d in kernels.E2M1_DECODERS] + [kernels.gemm_fused(fmt, dtype)]
    for gate in kernels.GATES:
        few += [make(fmt, dtype, gate, down=False) for make in (kernels.experts_gemm, kernels.experts_matvec)]
    identity = format_named("int4", -1)
    few += [make(identity, "float32", "none", down=True) for make in (kernels.experts_gemm, kernels.experts_matvec)]
    few += [kernels.embedding(fmt, dtype), kernels.rmsnorm_matvec(fmt, dtype), kernels.experts_combine(dtype)]
    stand().load([*few, kernels.gemm_striped_reduce("", dtype)])
    outcomes = list(selftest.run(metal_bench(), (codec,), shape=None))
    assert [o for o in outcomes if not o.passed] == []
    schedules = {o.schedule for o in outcomes if o.op == "linear"}
    assert {"automatic", "single-stage", "double-buffered", "striped", "dequantize_then_gemm"} <= schedules
    assert ("fused" in schedules) == (codec != "int8:g128")
    assert {"dequantize", "embedding", "experts", "rmsnorm_matvec"} <= {o.op for o in outcomes}
    assert {o.schedule for o in outcomes if o.op == "experts"} == {"", *selftest.GATES}
    assert {o.schedule for o in outcomes if o.op == "variant"} == (
        set() if codec == "int8:g128" else {"fused, plain"} if codec != "mxfp4" else VARIANTS
    )
    assert {o.framework for o in outcomes} == {"torch"}


class Wrong(Backend):
    """The reference, one output wrong by one part in a thousand."""

    name, device = "wrong", "cpu"

    def __init__(self):
        self.inner = backend_named("reference")

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reason(self):
        return None

    def refuses(self, call):
        return self.inner.refuses(call)

    def prepare(self, w):
        return self.inner.prepare(w)

    def linear(self, x, w, bias, **how):
        y = self.inner.linear(x, w, bias, **how)
        y[:, 3] *= 1.004
        return y

    def embedding(self, ids, w, dtype):
        raise NotImplementedError

    def dequantize(self, w, dtype):
        raise RuntimeError("the device was lost")

    def expert(self, w, index):
        raise NotImplementedError


def test_a_wrong_kernel_is_caught_and_an_exception_is_an_outcome():
    bench = selftest._numpy_bench(Wrong())
    outcomes = list(selftest.run(bench, ("int4:g128",), dtypes=("float16",), shape=None))
    linear = [o for o in outcomes if o.op == "linear"]
    assert linear
    assert not any(o.one_hot or o.passed for o in linear)
    assert all(o.worst > 1 for o in linear)
    (other,) = [o for o in outcomes if o.op == "dequantize"]
    assert other.failure == "the device was lost"
    assert not other.passed


def test_the_right_one_passes_and_is_timed():
    bench = selftest._numpy_bench(backend_named("reference"))
    outcomes = list(selftest.run(bench, ("int4:g128",), shape=(64, 256), tokens=(1,)))
    assert all(o.passed for o in outcomes)
    timed = [o for o in outcomes if o.time_us is not None]
    assert timed
    assert all(o.time_us > 0 and o.gbps > 0 and (o.m, o.n, o.k) == (1, 64, 256) for o in timed)


@pytest.mark.parametrize("kind", selftest.GATES)
@pytest.mark.parametrize(("wrong", "passed"), [(0.0, True), (4e-3, False)])
def test_a_wrong_gate_is_caught(kind, wrong, passed):
    """Gates of float32 rounded once pass; off by four thousandths, or NaN where exp or tanh
    overflow, they do not.
    """
    w = selftest.random_weight("affine4:g64", 70, 256)
    bench = selftest._numpy_bench(backend_named("reference"))

    def gated(x, spoilt=False):
        h = (x.astype(np.float64) @ w.dequantize("float32").astype(np.float64).T).astype(np.float32)
        y = apply_gate(kind, h) * np.float32(1 + wrong)
        return np.where(np.abs(h[:, :35]) > 100, np.nan, y).astype(np.float16) if spoilt else y.astype(np.float16)

    for m in (2, 67):
        assert (selftest._gated_error(bench, w, m, "float16", gated, kind) <= 1) == passed
        assert selftest._gated_error(bench, w, m, "float16", lambda x: gated(x, spoilt=True), kind) > 1


def test_a_device_that_is_not_there_is_a_sentence(capsys):
    if torch.backends.mps.is_available():
        pytest.skip("this is a Mac")
    with pytest.raises(BackendError, match=r"nothing computes on 'mps' here: metal: Metal needs an Apple GPU; this machine runs"):
        selftest.benches_for("mps")
    assert main(["selftest", "--device", "mps"]) == 2
    assert "Metal needs an Apple GPU" in capsys.readouterr().err
    with pytest.raises(BackendError, match="allowed: mps, cuda, cpu"):
        selftest.benches_for("tpu")


@pytest.fixture
def mlx_route(monkeypatch):
    """The MLX runtime on the CPU build, as the one bench a Mac without torch would have."""
    pytest.importorskip("mlx.core")
    if not available():
        pytest.skip("clang-19 is not installed")
    from halfbyte.backends.metal.mlx_runtime import MLXRuntime
    from halfbyte.mlx.backend import MLXBackend
    from support.metal_cpu.mlx_stand_in import metal_kernel

    bench = selftest.mlx_bench(MLXBackend(MLXRuntime(metal_kernel)))
    monkeypatch.setattr(selftest, "_without_mlx", lambda: None)
    monkeypatch.setattr(selftest, "mlx_bench", lambda: bench)
    return bench


def test_the_mlx_route_passes_on_the_cpu_build(mlx_route):
    outcomes = list(selftest.run(mlx_route, ("affine4:g64",), shape=None))
    assert [o for o in outcomes if not o.passed] == []
    assert {o.framework for o in outcomes} == {"mlx"}
    assert {"linear", "variant", "dequantize", "embedding", "experts", "rmsnorm_matvec"} == {o.op for o in outcomes}
    assert {o.schedule for o in outcomes if o.op == "variant"} == {"fused, plain"}


def test_the_mlx_route_is_timed_beside_mlx_own_product(mlx_route, capsys):
    """On the CPU build the times mean nothing; that both are taken, of one shape and format, does."""
    status = main(["selftest", "--device", "mps", "--format", "affine4:g64", "--shape", "8,64", "--m", "2", "--json"])
    assert status == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {r["framework"] for r in lines} == {"mlx"}
    timed = [r for r in lines if r["time_us"] is not None]
    assert {r["schedule"] for r in timed} >= {"automatic", "fused", "fused, plain"}
    assert all(r["time_us"] > 0 and r["dense_us"] > 0 and (r["m"], r["n"], r["k"]) == (2, 8, 64) for r in timed)
    assert all(r["peer_us"] > 0 for r in timed)
    assert selftest._mlx_us(selftest.random_weight("int4:g64", 8, 64), (2, 8, 64), "float16") is None


def test_a_wrong_kernel_on_the_mlx_route_is_caught(mlx_route, monkeypatch):
    product = mlx_route.backend.linear
    monkeypatch.setattr(mlx_route.backend, "linear", lambda *a, **how: product(*a, **how) * 1.004)
    outcomes = [o for o in selftest.run(mlx_route, ("affine4:g64",), shape=None) if o.op == "linear"]
    assert outcomes
    assert not any(o.passed or o.one_hot for o in outcomes)


def test_the_command_reports_lines_and_a_status(capsys):
    status = main(["selftest", "--device", "cpu", "--format", "int4:g128", "--shape", "0", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == int(not all(r["passed"] for r in lines))
    assert {"format", "schedule", "dtype", "one_hot", "worst", "passed", "time_us", "peer_us"} <= set(lines[0])
    assert main(["selftest", "--device", "cpu", "--shape", "4096"]) == 2
    assert "allowed: N,K or 0" in capsys.readouterr().err


def test_without_a_device_the_first_that_computes_here_is_checked(monkeypatch):
    """Here the CPU, or the reference in its place; a named device is not replaced by another."""
    from halfbyte.cli import selftest as command

    monkeypatch.setattr("halfbyte.bench.selftest.DEVICES", ("mps", "cpu"))
    assert next(b.backend.name for b in command._benches(None)) in ("cpu", "reference")
    with pytest.raises(BackendError, match="nothing computes on 'mps' here"):
        command._benches("mps")
