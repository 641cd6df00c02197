"""The fuzzer of `make fuzz`: a short run, that its decoders are the producers', and that it notices
what it looks for.
"""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

import halfbyte
from halfbyte.checkpoints.io.journal import Journal
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from support.fuzz import fuzz, fuzz_in_processes, lines_of, packed_case, replay, summary, targets, unpacked_case
from support.fuzz.decoders import PRODUCERS, decode
from support.fuzz.mutators import mutate
from support.golden_case import files, read_case, read_tensors

MODULES = [f"model.layers.0.mlp.{n}" for n in ("down_proj", "experts.down_proj", "experts.gate_up_proj")]
FAST = ("checkpoint", "gguf", "journal", "template", "vocabulary")


def test_a_short_run_finds_nothing():
    found = fuzz(60, seed=1, kinds=FAST, most_cases=150)
    assert found["faults"] == []
    assert found["cases"] == 150
    assert found["places"] > 3
    assert set(found["kinds"]) >= {"checkpoint", "gguf", "template", "compared cases"}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_the_independent_decoders_give_the_producers_numbers(producer):
    """A reference in float32 is equal; the library's values are, for every file."""
    known = exact = 0
    for path in files(producer):
        config = read_case(path).config
        _, tensors = read_tensors(path)
        packed = {n: a for n, a in tensors.items() if "::" not in n}
        module = next((m for m in MODULES if decode(producer, m, packed, config) is not None), None)
        if module is None:
            continue
        values = decode(producer, module, packed, config)
        known += 1
        for name, reference in tensors.items():
            if name.startswith("ref::"):
                reference = reference.transpose(0, 2, 1) if reference.ndim == 3 else reference
                exact += values.size == reference.size and np.array_equal(values.ravel(), reference.ravel(), equal_nan=True)
        with halfbyte.open(path) as checkpoint:
            assert np.array_equal(checkpoint[module].dequantize("float32").ravel(), values.ravel(), equal_nan=True), path
    assert known >= 1
    assert exact or producer == "hqq"  # whose golden references are of half precision


def test_wrong_values_are_noticed(monkeypatch):
    plain = SafetensorsFile.array
    monkeypatch.setattr(SafetensorsFile, "array", lambda self, name: plain(self, name) + (name == "n.weight"))
    with pytest.raises(AssertionError, match=r"a seed fails: checkpoint: n\.weight differs"):
        fuzz(0.1, seed=1, kinds=("checkpoint",))


def test_wrong_values_of_packed_weights_are_noticed(monkeypatch):
    plain = halfbyte.QTensor.dequantize
    monkeypatch.setattr(halfbyte.QTensor, "dequantize", lambda self, *a, **k: -plain(self, *a, **k))
    with pytest.raises(AssertionError, match=r"a seed fails: checkpoint: .* of autogptq has other values"):
        fuzz(0.1, seed=1, kinds=("checkpoint",))


def test_foreign_errors_are_noticed_and_kept(monkeypatch, tmp_path):
    def read(self):
        if self.path.stat().st_size < 100:
            raise KeyError("line")
        return []

    monkeypatch.setattr(Journal, "read", read)
    found = fuzz(1.0, seed=1, crashers=tmp_path, kinds=("journal",))["faults"]
    assert [f for f in found if f.startswith("KeyError at ")]
    assert (tmp_path / "001" / "journal").exists()


def test_a_run_that_is_resumed_with_other_bytes_is_noticed(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    [seed] = [s for s in targets.seeds(home) if s.kind == "resume"]
    assert targets.run_one(seed, seed.files, work, home).outcome == "accepted"
    (home / "fresh" / "config.json").write_text("{}")
    assert "differs from an undisturbed run" in targets.run_one(seed, seed.files, work, home).detail


def fault_of_journals(run):
    """Run a fault in `Journal.read` of mutants: what the seeds' journal holds is read as ever."""
    plain, whole = Journal.read, []

    def read(self):
        data = self.path.read_bytes()
        whole.append(data) if not whole else None
        return plain(self) if data == whole[0] else run()

    return read


def test_workers_that_die_are_logged_with_their_case_and_replaced(tmp_path, monkeypatch):
    import os
    import signal

    monkeypatch.setattr(Journal, "read", fault_of_journals(lambda: os.kill(os.getpid(), signal.SIGSEGV)))
    log = tmp_path / "log.jsonl"
    fuzz_in_processes(6, 1, 1, log, ("journal",))
    assert list(summary(log)["faults"]) == ["a worker ends with signal 11"]
    lines = lines_of(log)
    assert [v["seed"] for v in lines[:2]] == [1, 1001]
    assert all(v["kind"] == "journal" and list(unpacked_case(v["case"])) == ["journal"] for v in lines)
    assert "run_journal" in lines[0]["stack"]


def test_a_worker_that_hangs_is_logged_with_its_case_and_stack(tmp_path, monkeypatch):
    monkeypatch.setattr("support.fuzz.HUNG", 0.5)
    monkeypatch.setattr(Journal, "read", fault_of_journals(lambda: time.sleep(100)))
    log = tmp_path / "log.jsonl"
    fuzz_in_processes(0.5, 1, 1, log, ("journal",))
    [line] = lines_of(log)
    assert line["fault"] == "a worker hangs"
    assert "run_journal" in line["stack"]
    assert unpacked_case(line["case"]).keys() == {"journal"}


def test_the_case_of_a_fault_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr("support.fuzz.seeds", lambda home, kinds: targets.seeds(home, ("journal",)))
    log = tmp_path / "log.jsonl"
    line = {"seed": 1, "kind": "journal", "producer": "", "index": 0, "fault": "?", "case": packed_case({"journal": b"{"})}
    log.write_text(json.dumps(line) + "\n{cut")
    assert [(f["fault"], f["outcome"]) for f in replay(log)] == [("?", "accepted")]


def test_mutants_are_drawn_by_the_seed_and_kept_whole(tmp_path):
    cases = targets.seeds(tmp_path / "home")
    assert {c.kind for c in cases} >= {"checkpoint", "gguf", "journal", "resume", "vocabulary", "template"}
    assert {c.producer for c in cases} >= set(PRODUCERS)
    for case in cases[:20]:
        one, other = (mutate(case.files, random.Random(3)) for _ in range(2))
        assert json.dumps(packed_case(one)) == json.dumps(packed_case(other))
        assert unpacked_case(packed_case(one)).keys() == case.files.keys()
