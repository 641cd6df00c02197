"""halfbyte bench: its records, its refusals, and a race that counts what it should. Speeds are not tested: such tests lie."""

from __future__ import annotations

import json

import numpy as np
import pytest

from halfbyte.bench import cpu_linear
from halfbyte.bench.peers import PEERS, TorchDense, TorchInt4, peers_named
from halfbyte.bench.weights import random_weight
from halfbyte.cli import main
from halfbyte.formats import format_named, words


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(cpu_linear, "ROTATE_BYTES", 1e5)
    monkeypatch.setattr(cpu_linear, "limits", lambda threads: cpu_linear.Limits(10.0, 50.0))


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
        (["--peers", "numpy"], "known: onnxruntime-4, onnxruntime-0, torch-dense, torch-int4pack"),
        (["--device", "tpu"], "cpu and cuda are allowed here"),
        (["--format", "int44"], "not a codec"),
    ],
)
def test_refusals_say_what_is_allowed(capsys, arguments, message):
    assert main(["bench", "--shape", "32,64", "--m", "1", "--peers", "", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_race_is_interleaved_and_takes_medians():
    order = []
    a = cpu_linear.Contender({}, 1, [lambda i=i: order.append(("a", i)) for i in range(2)])
    b = cpu_linear.Contender({}, 1, [lambda: order.append(("b", 0))])
    seconds = cpu_linear.race([a, b], rounds=2)
    assert len(seconds) == 2
    assert order[2:] == [("a", 0), ("b", 0), ("a", 1), ("b", 0)] * 2


def test_peers_multiply_right():
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    w = np.random.default_rng(1).integers(-8, 8, (32, 256)).astype(np.float32) * np.float32(0.01)
    np.testing.assert_allclose(TorchDense().calls([w], x, 1)[0]().numpy(), x @ w.T, rtol=1e-4, atol=1e-5)
    half = TorchInt4().calls([w], x, 1)[0]().float().numpy()
    assert np.linalg.norm(half - x @ w.T) <= 0.02 * np.linalg.norm(x @ w.T)
    assert [p.name for p in peers_named(["onnxruntime"])] == ["onnxruntime-4", "onnxruntime-0"]
    assert all(p.reason() is None or "not installed" in p.reason() for p in PEERS.values())


@pytest.mark.parametrize("word", [w for w in words() if not format_named(w).opaque])
def test_random_weights_are_valid_and_distinct(word):
    fmt = format_named(word)
    k = max(fmt.super_size, fmt.group_size, 64)
    q = random_weight(fmt, 4, k, 0)
    again = random_weight(fmt, 4, k, 1)
    assert q != again
