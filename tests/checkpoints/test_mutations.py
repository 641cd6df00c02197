"""The generated matrix: damaged checkpoints give the right values or an error that names the
culprit, in every command.

A sample by a fixed seed runs here; all of it under the marker `slow`, with the counts in
benchmarks/trust.md.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from support.mutations import Mutation, holds, mutations, names, outcome, write
from support.tiny_models import write_tiny

CASES = [
    *[("llama", p) for p in ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4",
      "bitsandbytes", "hqq", "torchao", "onnx", "metal-marlin", "metal-marlin-fp4", "fp8", "halfbyte")],
    ("gpt_oss", "gpt-oss"), ("mixtral", "gptq"), ("qwen2", "gptq"),
]  # fmt: skip
SAMPLE = 7
"""Mutations of each case that always run."""

OTHER_FILES: dict[tuple[str, str, str], str] = {
    ("metal-marlin-fp4", "drop", "codec"): "buffers without the key are int4, as docs of the layout say",
    ("gptq3", "drop", "checkpoint_format"): "AutoGPTQ's files without the key are v1: nothing in the headers says otherwise",
}
"""(producer, kind, key) -> why the changed file is a valid one of another meaning."""


def checkpoint(tmp_path: Path, arch: str, producer: str) -> Path:
    changes = {"num_hidden_layers": 1}
    if arch == "gpt_oss":
        changes["layer_types"] = ["full_attention"]
    return write_tiny(tmp_path / "whole", arch, producer, **changes).folder


def exempt(producer: str, mutation: Mutation) -> bool:
    return mutation.subject == "key" and (producer, mutation.kind, mutation.target[-1]) in OTHER_FILES


def run(tmp_path: Path, arch: str, producer: str, chosen: list[Mutation], load: bool) -> Counter[str]:
    """Counts of outcomes; asserts the rule for each mutation."""
    whole = tmp_path / "whole"
    counts: Counter[str] = Counter()
    faults = []
    for mutation in chosen:
        damaged = tmp_path / "damaged"
        write(whole, mutation, damaged)
        result = outcome(damaged, whole, tmp_path / "work", load)
        counts["right"] += len(result.right)
        counts["refused"] += len(result.refused)
        counts["wrong"] += len(result.wrong)
        if result.wrong:
            faults.append(f"{mutation}: other values without an error in {', '.join(result.wrong)}")
        for command, message in result.refused.items():
            if not names(message, mutation):
                counts["unnamed"] += 1
                faults.append(f"{mutation}: {command} does not name the culprit: {message[:300]}")
        if "inspect" in result.right and any(c in result.refused for c in ("dequantize", "convert")):
            faults.append(f"{mutation}: inspect finds nothing, {sorted(result.refused)} refuse")
    assert not faults, f"{arch} {producer}: {len(faults)} faults\n" + "\n".join(faults[:20])
    return counts


@pytest.mark.parametrize(("arch", "producer"), CASES)
def test_a_sample_of_damage_is_right_or_refused_by_name(arch, producer, tmp_path):
    folder = checkpoint(tmp_path, arch, producer)
    every = [m for m in mutations(folder) if not exempt(producer, m)]
    chosen = random.Random(f"{arch} {producer}").sample(every, SAMPLE)
    counts = run(tmp_path, arch, producer, chosen, load=False)
    assert counts["wrong"] == 0
    assert counts["refused"] + counts["right"] == 4 * SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "producer"), CASES)
def test_all_damage_is_right_or_refused_by_name(arch, producer, tmp_path):
    folder = checkpoint(tmp_path, arch, producer)
    counts = run(tmp_path, arch, producer, [m for m in mutations(folder) if not exempt(producer, m)], load=True)
    print(f"{arch} {producer}: {dict(counts)}")
    assert counts["wrong"] == 0


def test_the_comparison_of_values_can_fail():
    want = {"a": np.ones((2, 2)), "b": np.zeros(2)}
    assert holds({"a": np.ones((2, 2)), "b": np.zeros(2), "c": np.ones(1)}, want)
    assert not holds({"a": np.ones((2, 2))}, want)
    assert not holds({"a": np.ones((2, 2)), "b": np.array([0.0, 1e-9])}, want)
