"""Counters of arrived programs under CUDA graphs: whose memory they are, and what zeroes them."""

from __future__ import annotations

import pytest

import torch
from halfbyte.backends.cuda import device as gpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(gpu, "_counters", {})
    monkeypatch.setattr(gpu, "_OUTGROWN", [])


def recording(monkeypatch, now: bool) -> None:
    monkeypatch.setattr(gpu, "recording", lambda device: now)


def test_a_graph_has_counters_of_its_own(monkeypatch):
    recording(monkeypatch, True)
    first, second = (gpu.arrival_counters(CPU, 12, stream=5) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == (12,)
    assert not first.any()
    recording(monkeypatch, False)
    eager = gpu.arrival_counters(CPU, 12, stream=5)
    assert eager.data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_a_graph_on_a_stream_that_has_counters_takes_them(monkeypatch):
    recording(monkeypatch, False)
    eager = gpu.arrival_counters(CPU, 12, stream=5)
    recording(monkeypatch, True)
    assert gpu.arrival_counters(CPU, eager.numel(), stream=5) is eager
    assert gpu.arrival_counters(CPU, eager.numel() + 1, stream=5) is not eager
    assert gpu.arrival_counters(CPU, 12, stream=6) is not eager


def test_counters_that_a_graph_holds_outlive_their_successors(monkeypatch):
    recording(monkeypatch, False)
    small = gpu.arrival_counters(CPU, 12, stream=5)
    address = small.data_ptr()
    del small
    large = gpu.arrival_counters(CPU, 10_000, stream=5)
    assert large.numel() >= 10_000
    assert [t.data_ptr() for t in gpu._OUTGROWN] == [address]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_graphs_recorded_on_one_stream_replay_in_any_order():
    import halfbyte as hb

    w = hb.quantize(torch.randn(4096, 4096).numpy(), "int4:g128")
    prepared = hb.prepare(w, device="cuda")
    xs = [torch.randn(m, 4096, device="cuda", dtype=torch.float16) for m in (1, 40, 100)]
    wanted = [hb.linear(x, prepared) for x in xs]
    graphs, found = [], []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(hb.linear(x, prepared))
        graphs.append(graph)
    for order in ((2, 1, 0), (0, 2, 1)):
        for i in order:
            found[i].fill_(torch.nan)
            graphs[i].replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
