"""halfbyte bench: its records, its refusals, and a race that counts what it should. Speeds are not
tested: such tests lie.
"""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest

from halfbyte import ops
from halfbyte.backends import backend_named
from halfbyte.bench import roofline, tables
from halfbyte.bench.cpu import limits as cpu_limits
from halfbyte.bench.cpu import linear as cpu_linear
from halfbyte.bench.cpu import sweep
from halfbyte.bench.cpu.peers.base import grid_of
from halfbyte.bench.cpu.peers.ggml import check_values, libraries, library
from halfbyte.bench.cpu.peers.openvino import check_result
from halfbyte.bench.cpu.peers.registry import all_peers, peers_named
from halfbyte.bench.model import race as model
from halfbyte.bench.model.run_one import prompt_ids
from halfbyte.bench.records import peers_of, rates, with_ratios
from halfbyte.bench.roofline import draw, intensity
from halfbyte.bench.weights import random_weight
from halfbyte.cli import main
from halfbyte.errors import BackendError
from halfbyte.formats import codec_names, format_named
from support.gguf_models import dense_model, write
from support.gguf_writer import Q8_0


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(cpu_linear, "ROTATE_BYTES", 1e5)
    monkeypatch.setattr(cpu_linear, "last_cache_bytes", lambda: 0)
    monkeypatch.setattr(cpu_linear, "limits", lambda threads, clock: {"read_gbps": 10.0, "gflops": 50.0, "gops": 200.0})


def test_json_lines_in_the_fields_words(capsys):
    arguments = ["bench", "--shape", "64,256", "--m", "1,16", "--format", "mxfp4,q4_0", "--peers", "torch-dense", "--rounds", "1"]
    assert main([*arguments, "--activations", "exact", "--backend", "reference", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[0]["record"] == "limits"
    times = [r for r in records if r["record"] == "time"]
    assert {(r["peer"], r["m"]) for r in times} == {(p, m) for p in ("halfbyte", "torch-dense") for m in (1, 16)}
    for r in times:
        assert {"time_us", "gbps", "peer", "m", "n", "k", "format", "device", "threads", "activations", "fraction"} <= set(r)
        assert r["fraction"] == pytest.approx(r["gbps"] / 10 if r["m"] <= 8 else r["gflops"] / 50)
        assert r["time_us"] > 0


def test_a_table(capsys):
    assert main(["bench", "--shape", "32,64", "--m", "1", "--format", "mxfp4", "--peers", "", "--rounds", "1", "--backend",
                 "reference", "--activations", "exact"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "halfbyte mxfp4:g32" in out
    assert "of limit" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "N,K is allowed"),
        (["--m", "0"], "whole numbers above 0"),
        (["--peers", "numpy"], "known: onnxruntime-4-b32, onnxruntime-4-b64"),
        (["--clock", "sun"], "allowed: wall, processor"),
        (["--clock", "processor", "--threads", "2"], "--threads 1 is allowed"),
        (["--activations", "int7"], "allowed: exact, int8"),
        (["--device", "tpu"], "cpu and cuda are allowed here"),
        (["--format", "int44"], "not a codec"),
    ],
)
def test_refusals_say_what_is_allowed(capsys, arguments, message):
    assert main(["bench", "--shape", "32,64", "--m", "1", "--peers", "", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "option", "mode"),
    [
        (["--device", "cuda", "--rounds", "3"], "rounds", "cuda"),
        (["--device", "cuda", "--sweep", "--activations", "int8"], "activations", "cuda --sweep"),
        (["--device", "cuda", "--threads", "1"], "threads", "cuda"),
        (["--device", "cuda", "--backend", "cpu"], "backend", "cuda"),
        (["--device", "cuda", "--seconds", "0"], "seconds", "cuda"),
        (["--device", "cuda", "--clock", "wall"], "clock", "cuda"),
        (["--device", "cuda", "--sweep", "--peers", ""], "peers", "cuda --sweep"),
        (["--sweep", "--m", "1"], "m", "cpu --sweep"),
        (["--jobs", "8"], "jobs", "cpu"),
        (["--model", "x.gguf", "--plot", "x.png"], "plot", "cpu --model"),
    ],
)
def test_an_option_that_does_nothing_is_refused(capsys, arguments, option, mode):
    """Given with its default value too."""
    assert main(["bench", *arguments]) == 2
    assert f"[bench] --{option} does nothing with --device {mode};" in " ".join(capsys.readouterr().err.split())


def test_modes_that_exclude_each_other_are_refused(capsys):
    assert main(["bench", "--device", "cuda", "--model", "x.gguf"]) == 2
    assert "--device cuda --model; allowed together" in " ".join(capsys.readouterr().err.split())


def test_options_of_a_gpu_reach_the_measurement(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from halfbyte.bench.cuda import linear

    seen = []
    monkeypatch.setattr(type(backend_named("cuda")), "reason", lambda self: None)
    monkeypatch.setattr(linear, "main", lambda arguments, sink: seen.append(arguments))
    monkeypatch.setattr("halfbyte.cli.bench._finish", lambda *records: None)
    assert main(["bench", "--device", "cuda", "--shape", "64,128", "--m", "7", "--peers", "", "--jobs", "2"]) == 0
    assert main(["bench", "--device", "cuda", "--peers", "marlin9"]) == 2
    formats = "int4:g128,mxfp4,q4_0,q4_K"
    assert seen == [["--shape", "64,128", "--m", "7", "--format", formats, "--jobs", "2", "--peers", ""]]


def test_the_race_is_interleaved_and_takes_medians():
    order = []
    a = [lambda i=i: order.append(("a", i)) for i in range(2)]
    b = [lambda: order.append(("b", 0))]
    seconds = cpu_linear.race([a, b], rounds=2)
    assert len(seconds) == 2
    assert order == [("a", 0), ("a", 1), ("b", 0), *[("a", 0), ("b", 0), ("a", 1), ("b", 0)] * 2]


def test_the_race_goes_on_until_its_seconds_have_passed():
    ticks = itertools.count()
    assert cpu_linear.race([[lambda: None]], rounds=1, seconds=0.01, clock=lambda: next(ticks)) == [1]
    assert next(ticks) > 4


def _time(peer, kind, bits, us, m=1):
    return {"record": "time", "peer": peer, "format": peer, "kind": kind, "bits": bits, "m": m, "n": 64, "k": 64, "time_us": us}


def test_the_ratio_is_to_the_best_peer_of_the_kind_within_five_percent_in_bits():
    mine = _time("halfbyte", "int8", 4.5, 6.0)
    peers = [
        _time("near", "int8", 4.25 * 1.01, 8.0), _time("nearer", "int8", 4.5, 10.0), _time("far", "int8", 4.25, 1.0),
        _time("other kind", "exact", 4.5, 1.0), _time("other m", "int8", 4.5, 1.0, m=4),
    ]  # fmt: skip
    assert [r["peer"] for r in peers_of(mine, [mine, *peers])] == ["near", "nearer"]
    first = with_ratios([mine, *peers])[0]
    assert (first["ratio"], first["best_peer"]) == (0.75, "near")
    assert "ratio" not in with_ratios([mine, peers[2]])[0]


def test_few_tokens_are_held_against_the_read_limit_and_more_against_the_arithmetic():
    limits = {"read_gbps": 10.0, "gflops": 50.0, "gops": 200.0}
    assert rates(_time("p", "int8", 4.0, 0.0, m=8), 1e6, 1e-3, limits)["fraction"] == pytest.approx(0.1)
    assert rates(_time("p", "int8", 4.0, 0.0, m=9), 1e6, 1e-3, limits)["fraction"] == pytest.approx(2 * 9 * 64 * 64 * 1e-6 / 200)
    assert rates(_time("p", "exact", 4.0, 0.0, m=9), 1e6, 1e-3, limits)["fraction"] == pytest.approx(2 * 9 * 64 * 64 * 1e-6 / 50)
    assert "fraction" not in rates(_time("p", "exact", 4.0, 0.0, m=9), 1e6, 1e-3, {"read_gbps": 10.0})


PEERS = all_peers()


ELSEWHERE = {"openvino": "applications", "llama.cpp": "llama-cpp-python"}
"""Peers that are no part of the test environment, and the environment of `make test-ecosystem` that
has them.
"""


def peers_for_tests():
    """Each peer under its environment; ik_llama.cpp's, of which there is no package, only where a
    variable names its libraries.
    """
    for name in PEERS:
        engine = name.partition("-")[0]
        if engine != "ik_llama.cpp" or "HALFBYTE_IK_LLAMA_CPP" in os.environ:
            yield pytest.param(name, marks=pytest.mark.ecosystem(ELSEWHERE[engine]) if engine in ELSEWHERE else ())


@pytest.mark.parametrize("name", list(peers_for_tests()))
def test_peers_multiply_right(name):
    """On a weight that lies on a symmetric 4-bit grid: others have a grid of their own, and its
    error.
    """
    peer = PEERS[name]
    if peer.reason():
        pytest.skip(peer.reason())
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    codes = np.random.default_rng(1).integers(1, 16, (32, 256))
    codes[:, ::32] = 1  # every group's largest magnitude is 7 steps
    w = (codes - 8).astype(np.float32) * np.float32(2**-6)
    calls = peer.pack([w, -w], 1)(x)  # some results lie in memory that goes with the call
    y = calls[1]()
    y = np.asarray(y[0] if isinstance(y, list) else y.float() if hasattr(y, "float") else y)
    eight = any(word in name for word in ("8bit", "u8", "affine8", "mxfp8"))
    own_grid = 0.04 if eight else 0.2 if name.startswith("mlx") or "llama.cpp" in name else 0.0
    bound = 2e-3 + own_grid + (0.02 if peer.kind != "exact" else 0)
    assert np.linalg.norm(y + x @ w.T) <= bound * np.linalg.norm(x @ w.T)


def test_a_name_or_its_beginning_chooses_peers():
    assert [p.name for p in peers_named(["onnxruntime-4", "torch-dense"])] == [
        *(f"onnxruntime-4{width}-b{block}" for width in ("", "-8bit") for block in (32, 64, 128)),
        "torch-dense",
    ]
    assert PEERS["onnxruntime-4-b64"].bits == 4.5
    assert [p.name for p in peers_named(["ik_llama.cpp-Q4_0"])] == ["ik_llama.cpp-Q4_0", "ik_llama.cpp-Q4_0-R8"]
    assert PEERS["ik_llama.cpp-Q6_K-R4"].bits == PEERS["llama.cpp-Q6_K"].bits == 6.5625
    words = ("not installed", "cannot start", "HALFBYTE_IK_LLAMA_CPP names no folder")
    assert all(p.reason() is None or any(word in p.reason() for word in words) for p in PEERS.values())


def test_a_folder_of_ggml_libraries_is_named_by_a_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_IK_LLAMA_CPP", str(tmp_path))
    with pytest.raises(BackendError, match="holds no libggml-cpu and no libggml, the libraries of ik_llama"):
        libraries("ik_llama.cpp")
    (tmp_path / "libggml.so").touch()
    assert libraries("ik_llama.cpp") == [tmp_path / "libggml.so"]
    (tmp_path / "src").mkdir()
    for name in ("libggml-cpu.so", "libggml-base.so", "libggml-cpu.so.0"):
        (tmp_path / "src" / name).touch()
    found = [path.name for path in libraries("ik_llama.cpp")]
    assert found == ["libggml-base.so", "libggml-cpu.so"]  # those that the others need first


def test_a_peers_wrong_result_is_no_time():
    right = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    check_values("peer", right * np.float32(1.01), right)
    for wrong in (np.zeros_like(right), right * np.float32(1.03), right * np.float32(np.nan)):
        with pytest.raises(BackendError, match="peer: its result differs from the product by"):
            check_values("peer", wrong, right)


def test_peers_that_lack_the_same_thing_are_named_together(monkeypatch, capsys):
    monkeypatch.delenv("HALFBYTE_IK_LLAMA_CPP", raising=False)
    library.cache_clear()
    arguments = ["--format", "q4_0", "--rounds", "1", "--backend", "reference", "--activations", "exact"]
    assert main(["bench", "--shape", "16,32", "--m", "1", "--peers", "ik_llama.cpp-Q4_0", *arguments]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "ik_llama.cpp-Q4_0, ik_llama.cpp-Q4_0-R8 are left out: [bench] HALFBYTE_IK_LLAMA_CPP names no folder with the "
        "libggml libraries of ik_llama.cpp"
    )


def test_the_grid_of_a_peer_keeps_what_lies_on_it():
    w = np.array([[-7, 3, 0, 7, 1, -1, 7, 2]], np.float32)
    codes, scales = grid_of(w, 4, 4)
    np.testing.assert_array_equal((codes.astype(np.float32) - 8) * np.repeat(scales, 4, 1), w)


def test_limits_are_measured(monkeypatch):
    monkeypatch.setattr(cpu_limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(cpu_limits, "SECONDS", 1e-4)
    monkeypatch.setattr(cpu_limits, "last_cache_bytes", lambda: 1000)
    measured = cpu_limits.limits(2)
    assert measured["read_gbps"] > 0
    assert measured["gflops"] > 0
    assert cpu_limits.machine_name()


def test_markdown_has_a_table_a_kind_with_the_best_peers_letter(capsys):
    assert main(["bench", "--shape", "64,256", "--m", "1,4", "--format", "mxfp4", "--peers", "torch-dense", "--rounds", "1",
                 "--backend", "reference", "--activations", "exact", "--markdown"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert "reads 10.0 GB/s" in lines[0]
    assert lines[2] == "| exact, n = 64, k = 256 | bits | m = 1 | 4 |"
    assert lines[4].startswith("| A: torch-dense | 32 |")
    assert lines[5].startswith("| `mxfp4:g32` | 4.25 |")
    mine = {**_time("halfbyte", "int8", 4.5, 500.0), "fraction": 0.5}
    rows = list(tables.markdown(with_ratios([mine, _time("near", "int8", 4.5, 1000.0)])))
    assert rows[-1] == "| `halfbyte` | 4.5 | 0.50, 0.50 A, 50 % |"


def test_the_roofline_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    limits = {"device": "cpu", "read_gbps": 10.0, "gflops": 50.0, "gops": 200.0}
    times = [
        rates(_time(p, kind, 4.5, 0.0, m=m), 64 * 64 * 4.5 / 8, 1e-5 * m, limits)
        for p in ("halfbyte", "other")
        for kind in ("exact", "int8")
        for m in (1, 16)
    ]
    draw(limits, times, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert intensity(times[1]) == pytest.approx(2 * 16 / (4.5 / 8))


def test_a_picture_without_matplotlib_is_refused_before_anything_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(roofline.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_an_absent_gpu_is_a_sentence(capsys):
    if backend_named("cuda").reason() is None:
        pytest.skip("there is a GPU")
    assert main(["bench", "--device", "cuda"]) == 2
    assert f"[bench] --device cuda: {backend_named('cuda').reason()}" in capsys.readouterr().err


@pytest.mark.parametrize("word", [w for w in codec_names() if not format_named(w).opaque])
def test_random_weights_are_valid_and_distinct(word):
    fmt = format_named(word)
    k = max(fmt.super_size, fmt.group_size, 64)
    q = random_weight(fmt, 4, k, 0)
    again = random_weight(fmt, 4, k, 1)
    assert q != again


def test_a_model_beside_llama_takes_turns_and_medians(tmp_path, monkeypatch, capsys):
    file, order = tmp_path / "m.gguf", []
    file.write_bytes(b"GGUF")
    speed = {"exact": 10.0, "int8": 20.0, "llama.cpp": 16.0}

    def run_one(what, path, threads, prompt, decode, clock):
        order.append(what)
        late = len(order) > 6  # the third round is twice as fast: medians do not see it
        return {
            "engine": "native",
            "ready_s": 1.0,
            "peak_mb": 500.0,
            "prompt_tokens_per_s": 100 * speed[what] * (1 + late),
            "decode_tokens_per_s": speed[what],
        }

    monkeypatch.setattr(model, "run_one", run_one)
    monkeypatch.setattr(model, "llama_reason", lambda: None)
    assert main(["bench", "--model", str(file), "--rounds", "3", "--json"]) == 0
    assert order == ["exact", "int8", "llama.cpp", "int8", "llama.cpp", "exact", "llama.cpp", "exact", "int8"]
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["peer"], r["activations"]) for r in records[:2]] == [("halfbyte", "exact"), ("halfbyte", "int8")]
    assert (records[2]["peer"], records[2]["activations"]) == ("llama.cpp", "int8")
    assert [r.get("decode_ratio") for r in records] == [0.625, 1.25, None]
    assert records[0]["prompt_tokens_per_s"] == 1000
    assert main(["bench", "--model", str(file), "--rounds", "1", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| llama.cpp | 1.00 | 500 | 3200 | 16.0 |  |  |"


def test_a_model_without_llama_says_what_is_missing(tmp_path, monkeypatch, capsys):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    monkeypatch.setattr(model, "run_one", lambda *_: {"engine": "native"} | dict.fromkeys(model.MEASURED, 1.0))
    assert main(["bench", "--model", str(file), "--rounds", "1", "--activations", "int8"]) == 0
    shown = capsys.readouterr()
    assert "llama.cpp is left out: llama_cpp is not installed" in shown.err
    assert "halfbyte int8" in shown.out
    assert main(["bench", "--model", str(tmp_path / "absent.gguf")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_contender_that_fails_is_named_with_its_last_words(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(BackendError, match=r"\[bench\] int8 ended with status 1: .*m\.gguf"):
        model.run_one("int8", file, 1, 8, 8, "wall")


@pytest.mark.parametrize(("name", "engine"), [("llama", "native"), ("phi3", "transformers")])
def test_a_tiny_model_in_a_process_of_its_own(tmp_path, name, engine):
    """By the engine that `generate` takes."""
    file = write(tmp_path / "m.gguf", name, dense_model(name), packed=True, kinds=(Q8_0,))
    found = model.run_one("int8", file, 1, 8, 4, "wall")
    assert found.pop("engine") == engine
    assert set(found) == set(model.MEASURED)
    assert min(found.values()) > 0


def test_everybody_reads_the_same_tokens():
    assert prompt_ids(3, 100) == [2, 37, 74]
    assert len(prompt_ids(512, 262_144)) == 512
    assert max(prompt_ids(512, 64)) < 64


@pytest.mark.skipif(backend_named("cpu").reason() is not None, reason="no native core")
def test_a_sweep_says_where_each_schedule_wins(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "last_cache_bytes", lambda: 0)
    monkeypatch.setattr(sweep, "limits", lambda threads, clock: {"read_gbps": 10.0, "gflops": 50.0, "gops": 200.0})
    monkeypatch.setattr(sweep, "ROTATE_BYTES", 1e4)
    small = (sweep.Case("small k", "int4:g32", 48, 32), sweep.Case("short groups", "nvfp4", 32, 64))
    records = list(sweep.sweep(small, (1, 3), rounds=1))
    assert [r["record"] for r in records] == ["limits", *["time", "time", "sweep"] * 4]
    assert all(set(r["time_us"]) == {"fused", "fused, int8", "dequantize_then_gemm"} for r in records if r["record"] == "sweep")
    monkeypatch.setattr(sweep.sweep, "__defaults__", (small, (1, 3)))
    assert main(["bench", "--sweep", "--rounds", "1", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| dense / fused, int8 / fused | format | weight | m = 1 | m = 3 |"
    assert lines[2].startswith("| small k | `int4:g32` | 48x32 | ")
    assert main(["bench", "--sweep", "--rounds", "1"]) == 0
    assert "short groups" in capsys.readouterr().out


def test_the_dense_schedule_is_the_same_product():
    q = random_weight("q4_0", 16, 64, 0)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    y = np.asarray(sweep.dense_product(1)(x, ops.prepare(q, backend="reference")))
    np.testing.assert_allclose(y, x @ q.dequantize().T, rtol=1e-5, atol=1e-5)


def test_modes_share_weights_and_never_follow_each_other_on_one(monkeypatch):
    seen = []
    monkeypatch.setattr(cpu_linear.ops, "linear", lambda x, w, activations: seen.append((activations, id(w))))
    field = cpu_linear.ours("mxfp4", 32, 64, ("exact", "int8"), "reference", 6)
    cpu_linear.race([c.ready(np.zeros((1, 64), np.float32)) for c in field], rounds=1)
    turns = seen[12:]  # after the first call of each
    assert {w for mode, w in turns if mode == "exact"} == {w for mode, w in turns if mode == "int8"}
    last: dict[int, int] = {}
    for at, (_, w) in enumerate(turns):
        assert at - last.get(w, -99) >= 5
        last[w] = at


def test_a_peer_that_computes_nothing_is_not_timed():
    check_result("openvino-u4-g64", (4, 64), (4, 64))
    with pytest.raises(BackendError, match=r"openvino-int8-u4-g64 returned \(0, 64\), \(4, 64\) is its result's shape"):
        check_result("openvino-int8-u4-g64", (0, 64), (4, 64))
