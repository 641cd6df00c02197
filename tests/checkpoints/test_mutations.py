"""The generated matrix: damaged checkpoints give the right values or an error that names the
culprit, in every command.

A sample by a fixed seed runs here; all of it under the marker `slow`, with the counts in
benchmarks/trust.md.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("transformers")

import halfbyte as hb
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.cli import main
from halfbyte.conversion import convert
from halfbyte.layouts import LAYOUTS, config_readers
from halfbyte.numerics.bits import unpack
from halfbyte.verification.compare import verify
from support import damage_cases
from support.mutations import COMMANDS, MORE, Mutation, config_key, holds, mutations, outcome, paths, values, write

KINDS = ("drop", "retype", "reshape")
SAMPLE = 7
"""Mutations of each case that always run."""
LOADED = 2
"""Of these, in `quantize`, `plan` and `load_model` too."""


def restated(producer: str, weight: hb.QTensor) -> np.ndarray:
    """The values of a packed weight as the file of `OTHER_FILES` states them, from its parts."""
    codes = unpack(np.asarray(weight.parts["codes"]), weight.format.bits, weight.shape[-1]).astype(np.float64)
    scales = np.repeat(weight.parts["scales"].astype(np.float64), weight.format.group_size, axis=-1)
    if producer == "gptq3":
        return (codes - np.repeat(weight.parts["zeros"].astype(np.float64) + 1, weight.format.group_size, axis=-1)) * scales
    return (codes - 8) * scales


@pytest.mark.parametrize("case", damage_cases.OTHER_FILES, ids="-".join)
def test_a_file_of_another_meaning_has_the_values_that_it_states(case, tmp_path):
    """No exemption: the changed file is a valid one, and its values are checked against the formula
    of what it says, in each command; inspect names the key that is not there.
    """
    producer, kind, key = case
    folder = damage_cases.checkpoint(tmp_path, "llama", producer)
    config = json.loads((folder / "config.json").read_text())
    path = next(p for p in paths(config[config_key(config)]) if p[-1] == key)
    damaged = tmp_path / "damaged"
    write(folder, Mutation("key", kind, path), damaged)
    with hb.open(folder) as whole:
        weights = {k: whole[k] for k in whole}
        want = {k: restated(producer, w) if isinstance(w, hb.QTensor) else w.astype(np.float64) for k, w in weights.items()}
        assert any(not np.array_equal(want[k], whole[k].dequantize("float64")) for k in whole if whole.info(k).quantized)
    convert(damaged, tmp_path / "own", to="halfbyte")
    with hb.open(damaged) as changed, hb.open(tmp_path / "own") as own, hb.open(folder) as whole:
        assert [f.message for f in changed.findings() if f.code == "assumed-key" and key in f.message]
        assert verify(changed, own).verdict == "identical"
        assert verify(changed, whole).verdict == "different"
        assert holds(values(changed), {k.removesuffix(".weight"): v for k, v in want.items()})


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
        faults += result.faults(mutation)
    assert not faults, f"{arch} {producer}: {len(faults)} faults\n" + "\n".join(faults[:20])
    return counts


@pytest.mark.parametrize(("arch", "producer"), damage_cases.ROWS)
def test_a_sample_of_damage_is_right_or_refused_by_name(arch, producer, tmp_path):
    folder = damage_cases.checkpoint(tmp_path, arch, producer)
    every = [m for m in mutations(folder) if not damage_cases.exempt(producer, m)]
    chosen = random.Random(f"{arch} {producer}").sample(every, SAMPLE)
    counts = run(tmp_path, arch, producer, chosen[:LOADED], load=True)
    counts += run(tmp_path, arch, producer, chosen[LOADED:], load=False)
    assert counts["wrong"] == 0
    assert counts["refused"] + counts["right"] == len(COMMANDS) * SAMPLE + len(MORE) * LOADED


@pytest.mark.parametrize(("arch", "producer"), damage_cases.ROWS)
def test_each_tensor_of_a_weight_dropped_retyped_or_reshaped_is_found_by_inspect(arch, producer, tmp_path):
    """Of one weight a row; every weight and every command in the slow test."""
    folder = damage_cases.checkpoint(tmp_path, arch, producer)
    with hb.open(folder) as checkpoint:
        key = max(checkpoint.packed_keys())
    every = [m for m in mutations(folder) if m.subject == "tensor" and m.target[0].startswith(key) and m.kind in KINDS]
    assert len(every) >= 2 * len(KINDS)
    faults = []
    for mutation in every:
        write(folder, mutation, tmp_path / "damaged")
        faults += outcome(tmp_path / "damaged", folder, tmp_path / "work", False, ("inspect",)).faults(mutation)
    assert faults == []


BESIDE = {
    "lora_A.weight": ((8, 64), np.float32), "smooth": ((64,), np.float32), "rotation": ((64, 64), np.float16),
    "weight_offset": ((64, 1), ml_dtypes.bfloat16), "outliers": ((64, 4), ml_dtypes.float8_e4m3fn),
    "codes2": ((64, 32), np.uint8),
}  # fmt: skip
"""Tensors that would change a weight, if anything read them."""


@pytest.mark.parametrize(("arch", "producer"), damage_cases.ROWS)
def test_a_tensor_beside_a_weight_that_no_layout_knows_is_found_by_inspect(arch, producer, tmp_path, capsys):
    folder = damage_cases.checkpoint(tmp_path, arch, producer)
    with hb.open(folder) as checkpoint:
        key = max(checkpoint.packed_keys())
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: np.array(file.array(name)) for name in file.entries}
    file.close()
    for suffix, (shape, dtype) in BESIDE.items():
        with SafetensorsWriter(folder / "model.safetensors", file.metadata) as out:
            for name, array in {**tensors, f"{key}.{suffix}": np.ones(shape, np.float32).astype(dtype)}.items():
                out.add(name, array)
        assert main(["inspect", str(folder), "--json"]) == 1
        assert f"{key}.{suffix}" in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "producer"), damage_cases.ROWS)
def test_all_damage_is_right_or_refused_by_name(arch, producer, tmp_path):
    folder = damage_cases.checkpoint(tmp_path, arch, producer)
    counts = run(tmp_path, arch, producer, [m for m in mutations(folder) if not damage_cases.exempt(producer, m)], load=True)
    print(f"{arch} {producer}: {dict(counts)}")
    assert counts["wrong"] == 0


def test_every_layout_and_every_reader_of_a_config_has_a_row(tmp_path):
    """But GGUF's, whose damage is test_gguf_damage.py's."""
    layouts, readers = {"gguf"}, set()
    for arch, producer in damage_cases.ROWS:
        with hb.open(damage_cases.checkpoint(tmp_path / f"{arch}-{producer}", arch, producer)) as checkpoint:
            layouts |= {checkpoint.reading(key).layout.name for key in checkpoint.packed_keys()}
            readers.add(type(checkpoint.scheme))
    assert layouts == set(LAYOUTS)
    assert readers == {*config_readers(), type(None)}


def test_the_comparison_of_values_can_fail():
    want = {"a": np.ones((2, 2)), "b": np.zeros(2)}
    assert holds({"a": np.ones((2, 2)), "b": np.zeros(2), "c": np.ones(1)}, want)
    assert not holds({"a": np.ones((2, 2))}, want)
    assert not holds({"a": np.ones((2, 2)), "b": np.array([0.0, 1e-9])}, want)
