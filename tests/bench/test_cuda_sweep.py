"""halfbyte bench --device cuda --sweep, without a GPU: which schedules are timed and on what, and
how it is shown.
"""

from __future__ import annotations

import json
from unittest import mock

import pytest

from halfbyte import format_named
from halfbyte.backends import backend_named
from halfbyte.bench.cpu.sweep import Case
from halfbyte.bench.cuda import sweep as s
from halfbyte.cli import main

SMALL = (
    Case("square", "int4:g128", 64, 256), Case("wide n", "int4:g128", 8192, 128), Case("many groups", "nvfp4", 64, 128),
    Case("eight bits", "q8_0", 48, 128), Case("three bits", "int3:g64", 64, 128),
)  # fmt: skip
LIMITS = {"record": "limits", "device": "cuda", "name": "NVIDIA T9", "read_gbps": 4000.0, "gflops": 8e5}


def record(why, m, taken="fused", **us):
    times = {s.CUBLAS if name == "cublas" else name: t for name, t in us.items()}
    fastest = min((name for name in times if name != s.CUBLAS), key=lambda name: times[name])
    return {"record": "sweep", "why": why, "m": m, "n": 64, "k": 256, "format": "int4:g128", "taken": taken, "fastest": fastest,
            "time_us": times}  # fmt: skip


RECORDS = [
    record("square", 16, "fragments", fragments=4.0, fused=6.0, dequantize_then_gemm=30.0, cublas=8.0),
    record("square", 1024, fused=50.0, dequantize_then_gemm=40.0, cublas=25.0),
]


def test_cases_show_where_the_fused_schedule_could_lose():
    """Cases on both sides of each limit of `schedule.pays`, and tokens on both sides of it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from halfbyte.backends.cuda.tuning import wgmma_tiles as t

    by_why = {case.why: case for case in s.CASES}
    assert len(by_why) == len(s.CASES)  # a line of the table each
    assert by_why["small k"].k < t.FEW_INPUTS <= by_why["square"].k
    assert by_why["small k"].n < t.MANY_ROWS <= by_why["wide n"].n
    assert by_why["wide n"].k < t.FEW_INPUTS
    assert by_why["few outputs"].n <= t.FEW_ROWS < by_why["square"].n
    formats = {why: format_named(case.codec) for why, case in by_why.items()}
    assert formats["eight bits"].bits == 8
    assert formats["many groups"].group_size < formats["square"].group_size
    assert formats["many groups, E4M3 scales"].scale == "e4m3"
    limits = (t.LEAST_TOKENS, t.FEW_INPUTS_LEAST, t.FEW_ROWS_MOST + 1)
    assert all(min(s.TOKENS) < limit <= max(s.TOKENS) for limit in limits)


def test_a_row_says_what_linear_takes_and_what_it_loses():
    assert s.row_of(RECORDS[0])[:4] == ["square", "int4:g128", "64x256", "16"]
    assert s.row_of(RECORDS[0])[4:] == ["4.0", "6.0", "30.0", "8.0", "fragments", "0.50", "1.00"]
    assert s.row_of(RECORDS[1])[4:] == ["", "50.0", "40.0", "25.0", "fused", "2.00", "1.25"]
    assert len(s.HEADS) == len(s.row_of(RECORDS[0]))
    assert s.row_of(record("square", 16, "fused", dequantize_then_gemm=3.0, cublas=8.0))[-3:] == ["fused", "", ""]


def test_markdown():
    assert list(s.markdown([LIMITS, *RECORDS])) == [
        "NVIDIA T9; reads 4,000.0 GB/s, float32 FMA 800,000 GFLOP/s.",
        "",
        "| us · of cuBLAS | format | weight | schedule | m = 16 | m = 1024 |",
        "|---|---|---|---|---|---|",
        "| square | `int4:g128` | 64x256 | fragments | **4.0 · 0.50** |  |",
        "|  |  |  | fused | 6.0 · 0.75 | **50.0 · 2.00** |",
        "|  |  |  | dequantize_then_gemm | 30.0 · 3.75 | 40.0 · 1.60 |",
        "|  |  |  | cuBLAS float16 | 8.0 | 25.0 |",
        "|  |  |  | `linear` / fastest | 1.00 | 1.25 |",
    ]


@pytest.fixture
def _pretended(monkeypatch):
    monkeypatch.setattr(type(backend_named("cuda")), "reason", lambda self: None)
    monkeypatch.setattr(s, "sweep", lambda **options: iter([{**LIMITS, **options}, *RECORDS]))


@pytest.mark.usefixtures("_pretended")
def test_the_command_prints_a_table_markdown_or_json(capsys):
    assert main(["bench", "--device", "cuda", "--sweep"]) == 0
    out = capsys.readouterr().out
    assert "linear takes" in out
    assert "1.25" in out
    assert main(["bench", "--device", "cuda", "--sweep", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == list(s.markdown([LIMITS, *RECORDS]))
    assert main(["bench", "--device", "cuda", "--sweep", "--json", "--jobs", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{**LIMITS, "jobs": 3}, *RECORDS]


@pytest.mark.usefixtures("_pretended")
def test_the_worst_cell_comes_first(capsys):
    assert main(["bench", "--device", "cuda", "--sweep"]) == 0
    out = capsys.readouterr().out
    assert out.index("2.00") < out.index("0.50")
    unserved = record("square", 16, "fused", dequantize_then_gemm=3.0, cublas=8.0)
    assert sorted([unserved, *RECORDS], key=s.of_cublas) == [unserved, *RECORDS]


@pytest.mark.usefixtures("_pretended")
def test_shape_format_and_m_choose_the_cells(capsys):
    assert main(["bench", "--device", "cuda", "--sweep", "--json", "--shape", "64,256", "--format", "mxfp4", "--m", "17"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["cases"], first["tokens"]) == ([["64 outputs, 256 inputs", "mxfp4", 64, 256]], [17])


def test_tokens_have_every_kind_of_residue():
    """Of the width of every tile that is a power of two: 0, 1, half and one less; and others."""
    for width in (16, 32, 64, 128, 256):
        assert {0, 1, width // 2, width - 1} < {m % width for m in s.TOKENS if m > width}
    assert s.residues(20) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17)
    assert max(s.TOKENS) == 4096


def test_without_a_gpu_it_says_what_is_missing(capsys):
    why = backend_named("cuda").reason()
    if why is None:
        pytest.skip("a GPU is here")
    assert main(["bench", "--device", "cuda", "--sweep"]) == 2
    assert f"[bench] --device cuda: {why}" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The sweep with CPU tensors, launches bound only: what was timed (calls, each made twice), and
    what would be compiled.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="Triton is not installed")
    from halfbyte.backends.cuda.wgmma import schedule as fused
    from halfbyte.bench.cuda import timing
    from support.ptx_launch import bound

    monkeypatch.setattr(fused, "FEW_INPUTS", 0)  # the weights here are small on purpose
    monkeypatch.setattr(fused, "FEW_ROWS", 0)
    timed = []

    def graph_time_us(calls, replays):
        for call in calls[:2]:
            call()
        timed.append(len(calls))
        return 10.0 + len(timed)

    monkeypatch.setattr(s, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "limits", lambda: {"read_gbps": 4000.0, "gflops": 8e5})
    monkeypatch.setattr(timing, "graph_time_us", graph_time_us)
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1e6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    with bound() as seen, mock.patch.object(torch.cuda, "current_device", return_value=None):
        yield timed, seen


TIMES = {
    # m: what is timed of a weight in fragment order
    16: {"fragments", "fused", "dequantize_then_gemm"}, 64: {"fragments", "fused", "dequantize_then_gemm"},
    1024: {"fused", "dequantize_then_gemm"},
}  # fmt: skip


def test_each_schedule_that_serves_is_timed_on_weights_past_the_cache(on_the_cpu):
    timed, _ = on_the_cpu
    records = list(s.sweep(SMALL, (16, 64, 1024), jobs=1))
    assert records[0]["record"] == "limits"
    rows = [r for r in records if r["record"] == "sweep"]
    assert [(r["why"], r["m"]) for r in rows] == [(c.why, m) for c in SMALL for m in (16, 64, 1024)]
    for r in rows:
        tiled = r["why"] != "three bits"
        assert set(r["time_us"]) == (TIMES[r["m"]] if tiled else {"dequantize_then_gemm"}) | {s.CUBLAS}
        few = "fragments" if tiled else "matmul"
        assert r["taken"] == (few if r["m"] == 16 else "fused" if tiled else "dequantize_then_gemm")
        assert r["fastest"] == min(set(r["time_us"]) - {s.CUBLAS}, key=r["time_us"].get)
    times = [r for r in records if r["record"] == "time"]
    assert len(times) == len([r for r in rows if r["taken"] in r["time_us"]]) == 14
    for r in times:
        one = next(o for o in rows if all(o[key] == r[key] for key in ("m", "n", "k", "format")))
        assert r["schedule"] == one["taken"]
        assert r["ratio"] == r["time_us"] / one["time_us"][s.CUBLAS]
    # One dense weight serves the two cases of its shape; each measurement passes a megabyte of
    # weights, or has the most.
    assert len(timed) == sum(len(r["time_us"]) - 1 for r in rows) + 3 * len({(c.n, c.k) for c in SMALL})
    assert set(timed) <= {4, *range(5, s.MOST_WEIGHTS + 1)}
    assert 1e6 / (64 * 256 * 4.125 / 8) < max(timed) <= s.MOST_WEIGHTS


def test_what_is_compiled_before_is_all_that_is_launched(on_the_cpu):
    _, seen = on_the_cpu
    cases, tokens = SMALL[:4], (16, 32, 64, 128, 256, 1024)
    jobs = s.jobs_for(cases, tokens)
    assert len(jobs) == len(set(jobs))
    for job in jobs:
        s.compile_one(job)
    before = set(seen)
    assert {name for name, *_ in before} == {"fragment_kernel", "wgmma_kernel", "dequantize_kernel"}
    assert len(jobs) <= len(before)  # a job may have two tiles
    list(s.sweep(cases, tokens, jobs=1))
    assert seen == before


def test_a_tile_that_does_not_fit_is_left_out_by_name(on_the_cpu, monkeypatch, capsys):
    from halfbyte.bench.cuda import timing

    def refuse(calls, replays):
        if "fused" in str(calls[0].func):
            raise timing.OutOfResources(300000, 232448, "shared memory")
        return 5.0

    monkeypatch.setattr(timing, "graph_time_us", refuse)
    (row,) = [r for r in s.sweep(SMALL[:1], (64,), jobs=1) if r["record"] == "sweep"]
    assert row["taken"] == "fused"
    assert "fused" not in row["time_us"]
    assert "fused is left out at 64x256, m = 64: " in capsys.readouterr().err


@pytest.mark.parametrize(("word", "dtype", "wanted"), [
    ("mxfp4", "float16", {1: "fragments", 16: "fragments", 17: "fused", 512: "fused", 513: "dequantize_then_gemm"}),
    ("mxfp4", "float32", {1: "matvec", 8: "matvec", 9: "dequantize_then_gemm"}),
    ("mxfp8_e4m3", "bfloat16", {1: "fragments", 16: "fragments", 17: "fused"}),
    ("int2:g64", "float16", {1: "matvec", 2: "matvec", 3: "matmul", 16: "matmul", 17: "fused"}),
    ("int3:g64", "float16", {1: "matvec", 2: "matvec", 3: "matmul", 16: "matmul", 17: "dequantize_then_gemm"}),
])  # fmt: skip
def test_what_linear_takes_is_what_it_does(monkeypatch, word, dtype, wanted):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="Triton is not installed")
    from halfbyte.backends import Prepared
    from halfbyte.backends.cuda import CUDABackend, launch
    from halfbyte.backends.cuda.weight import to_device
    from halfbyte.backends.cuda.wgmma import schedule as fused
    from halfbyte.bench.weights import random_weight
    from halfbyte.errors import BackendError

    names = {"fragments": "fragments", "matvec": "matvec", "matmul": "matmul", "dense_matmul": "dequantize_then_gemm"}
    for name, way in names.items():
        monkeypatch.setattr(launch, name, lambda x, w, bias, way=way: way)
    monkeypatch.setattr(fused, "fused", lambda x, w, bias: "fused")
    monkeypatch.setattr(launch, "tiled", lambda x, w, bias, schedule: schedule)
    w = to_device(random_weight(word, 16, 2048, 0), "cpu")
    monkeypatch.setattr(CUDABackend, "_same_device", staticmethod(lambda *_: None))
    linear, held = CUDABackend().linear, Prepared("cuda", w.format, w.shape, w, 0)
    for m, way in wanted.items():
        x = torch.zeros(m, 128, dtype=getattr(torch, dtype))
        assert CUDABackend.schedule_of(x, w) == linear(x, held, None) == way
        for schedule in ("single-stage", "double-buffered", "striped", "dequantize_then_gemm"):
            assert linear(x, held, None, schedule=schedule) == schedule
        if fused.refusal(x, w) is None:
            assert linear(x, held, None, schedule="fused") == "fused"
        else:
            with pytest.raises(BackendError, match=r"\[linear\] schedule 'fused' takes"):
                linear(x, held, None, schedule="fused")
