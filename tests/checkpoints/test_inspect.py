"""Rows, totals and records of `inspect`."""

from __future__ import annotations

import ast
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import halfbyte.checkpoints
from halfbyte.checkpoints import Finding
from halfbyte.checkpoints.findings import SEVERITIES
from halfbyte.checkpoints.inspect import FIXES, bits_per_weight, format_word, grouped, pattern_of, records, totals
from halfbyte.cli import main
from support.memory_checkpoint import MemoryCheckpoint, packed


def model() -> MemoryCheckpoint:
    tensors = {f"model.layers.{i}.mlp.{p}_proj": packed("mxfp4", (64, 32), i) for i in range(3) for p in ("up", "down")}
    tensors["model.layers.3.mlp.up_proj"] = packed("int8", (64, 32), group_size=32)
    tensors |= {"model.norm.weight": np.ones(64, np.float32), "model.layers.0.mlp.gate.weight": np.ones((4, 32), np.float16)}
    findings = (
        Finding("note", "one-shard", "", "one of 2 shards"),
        Finding("error", "nan-scale", "model.layers.0.mlp.up_proj", "3 scales are NaN"),
        Finding("warning", "tied-head-twice", "lm_head", "the same bytes twice"),
    )
    return MemoryCheckpoint(tensors, format="mlx", findings=findings, layout="mlx", path="some/model")


def test_bits_a_weight_count_scales():
    m = model()
    assert bits_per_weight(m.info("model.layers.0.mlp.up_proj")) == 4.25
    assert bits_per_weight(m.info("model.layers.3.mlp.up_proj")) == 8.5
    assert bits_per_weight(m.info("model.norm.weight")) == 32
    assert bits_per_weight(MemoryCheckpoint({"x": np.ones((0, 4))}).info("x")) == 0


def test_totals():
    t = totals(model().infos())
    assert (t.packed.tensors, t.packed.weights, t.packed.nbytes) == (7, 7 * 2048, 6 * 1088 + 2176)
    assert (t.dense.tensors, t.dense.weights, t.dense.nbytes) == (2, 64 + 128, 64 * 4 + 128 * 2)
    assert t.all.nbytes == t.packed.nbytes + t.dense.nbytes
    assert {w: s.tensors for w, s in t.formats.items()} == {"mxfp4:g32": 6, "int8:g32": 1, "float32": 1, "float16": 1}
    assert t.files == ["model.safetensors"]


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("model.layers.0.mlp.down_proj", "model.layers.*.mlp.down_proj"),
        ("blk.17.attn_q", "blk.*.attn_q"),
        ("a.experts.3.w1", "a.experts.*.w1"),
        ("conv1d.weight", "conv1d.weight"),
    ],
)
def test_patterns(key, pattern):
    assert pattern_of(key) == pattern


def test_groups_share_pattern_format_and_shape():
    found = [(g.pattern, len(g.infos)) for g in grouped(model().infos())]
    assert found == [
        ("model.layers.*.mlp.up_proj", 3),
        ("model.layers.*.mlp.down_proj", 3),
        ("model.layers.3.mlp.up_proj", 1),
        ("model.norm.weight", 1),
        ("model.layers.0.mlp.gate.weight", 1),
    ]


def test_one_tensor_keeps_its_name_and_two_share_a_pattern():
    for count in (1, 2, 3):
        m = MemoryCheckpoint({f"a.{i}.w": np.ones(2) for i in range(count)} | {"b.0.w": np.ones(2)})
        assert [(g.pattern, len(g.infos)) for g in grouped(m.infos())] == [
            ("a.0.w" if count == 1 else "a.*.w", count),
            ("b.0.w", 1),
        ]


def test_every_tensor_is_in_exactly_one_group():
    m = model()
    assert sorted(i.key for g in grouped(m.infos()) for i in g.infos) == sorted(m.keys())


def test_records_carry_everything():
    m = model()
    found = [json.loads(json.dumps(r)) for r in records(m, m.findings())]
    kinds = [r["record"] for r in found]
    assert kinds == ["checkpoint", *["tensor"] * 9, *["ledger"] * 9, "modules", *["finding"] * 3]
    whole = found[0]
    assert (whole["path"], whole["format"], whole["tensors"], whole["files"]) == ("some/model", "mlx", 9, ["model.safetensors"])
    assert whole["quantized"]["nbytes"] + whole["dense"]["nbytes"] == whole["nbytes"]
    assert found[1] == {
        "record": "tensor", "key": "model.layers.0.mlp.up_proj", "kind": "quantized", "layout": "mlx", "format": "mxfp4:g32",
        "shape": [64, 32], "dtype": "uint8", "nbytes": 1088, "bits_per_weight": 4.25, "files": ["model.safetensors"],
    }  # fmt: skip
    assert [r["severity"] for r in found[-3:]] == ["error", "warning", "note"]


def test_the_command_prints_one_row_a_kind_and_findings_worst_first(monkeypatch, capsys):
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, config, allow: model())
    assert main(["inspect", "some/model"]) == 1, "an error was found"
    out = capsys.readouterr().out
    assert out.startswith("some/model: mlx, 9 tensors in 1 file, 9,216 B\n")
    row = next(line for line in out.splitlines() if line.startswith("model.layers.*.mlp.up_proj"))
    assert row.split() == ["model.layers.*.mlp.up_proj", "3", "mxfp4:g32", "64x32", "4.25", "3,264", "B"]
    assert "packed: 7 tensors, 14.3k weights, 4.857 bits/weight, 8,704 B" in out
    assert "dense:  2 tensors, 192 weights" in out
    errors = [line.split()[0] for line in out.splitlines() if line.startswith(("error [", "warning [", "note ["))]
    assert errors == ["error", "warning", "note"]
    assert "\nerror [nan-scale] fix: quantize again" in out
    assert "\n  model.layers.0.mlp.up_proj: 3 scales are NaN\n" in out


def test_many_findings_of_one_kind_are_shortened(monkeypatch, capsys):
    many = tuple(Finding("note", "equal-zeros", f"layers.{i}", "all the same") for i in range(10))
    monkeypatch.setattr(
        "halfbyte.checkpoints.open", lambda path, config, allow: MemoryCheckpoint({"a": np.ones(2)}, findings=many)
    )
    assert main(["inspect", "x"]) == 0
    out = capsys.readouterr().out
    assert out.count("all the same") == 4
    assert "  and 6 more; --tensors and --json list all\n" in out
    assert main(["inspect", "x", "--tensors"]) == 0
    assert capsys.readouterr().out.count("all the same") == 10


def codes_in(package: Path) -> set[str]:
    """Every finding code in the package: the string after a severity, in a call or a tuple."""
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            for a, b in pairwise(items):
                words = [n.value for n in (a, b) if isinstance(n, ast.Constant)]
                named = isinstance(a, ast.Name) and a.id == "severity" and isinstance(b, ast.Constant)
                if (len(words) == 2 and words[0] in SEVERITIES and words[1] not in SEVERITIES) or named:
                    found.add(words[-1])
    return found


def test_every_code_says_what_would_fix_it():
    found = codes_in(Path(halfbyte.checkpoints.__file__).parent)
    assert {"nan-scale", "unreadable", "unlisted-tensor", "numbers-inferred"} <= found
    found |= {"unknown-tensor", "missing-tensor", "shape-tensor", "unknown-key"}  # status and subject of a ledger entry
    assert found == set(FIXES)


def test_every_tensor_on_request(monkeypatch, capsys):
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, config, allow: model())
    assert main(["inspect", "some/model", "--tensors"]) == 1
    rows = capsys.readouterr().out.splitlines()
    for key in model():
        assert sum(r.split()[:1] == [key] for r in rows) == 1


def test_no_findings_is_said(monkeypatch, capsys):
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, config, allow: MemoryCheckpoint({"a": np.ones(2)}))
    assert main(["inspect", "a"]) == 0
    assert capsys.readouterr().out.endswith("\nNothing looks wrong.\n")


def test_json_lines(monkeypatch, capsys):
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, config, allow: model())
    assert main(["inspect", "some/model", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [json.loads(json.dumps(r)) for r in records(model(), model().findings())]


def test_a_format_that_is_not_understood():
    import dataclasses

    info = dataclasses.replace(model().info("model.layers.0.mlp.up_proj"), format=None, dtype="int32")
    assert format_word(info) == "? (int32)"
