"""Damage to a GGUF model in two parts: each tensor and each key of the metadata dropped, renamed,
given another type or shape, or there twice. The rule is that of `test_mutations.py`: right values,
or an error that names the culprit.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import halfbyte as hb
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.verification.compare import verify
from support import gguf_models
from support.gguf_writer import F32, GGUF
from support.mutations import holds, values
from support.tiny_models import agree, ids, logits

KINDS = ("drop", "rename", "duplicate", "retype", "reshape")
F64, SAMPLE = 28, 8
COMMANDS = ("inspect", "dequantize", "convert", "verify", "load_model")
OPTIONAL = (
    "attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base", "rope.dimension_count",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens", "vocab_size",
)  # fmt: skip
"""Keys that llama.cpp has defaults for, or that no weight's values depend on: a file without one is
a valid one, of another model where the default differs.
"""


def parts(folder: Path) -> list[GGUF]:
    """The two parts of a llama, as their writer has them."""
    made: list[GGUF] = []
    original = gguf_models.GGUF

    def keep(**given: Any) -> GGUF:
        made.append(original(**given))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "GGUF", keep)
        gguf_models.write(folder / "whole.gguf", "llama", gguf_models.dense_model("llama"), packed=True, shards=2)
    return made[1:]


def mutations(whole: list[GGUF]) -> list[tuple[str, str, int, str]]:
    """(subject, kind, part, name) of each change."""
    tensors = [("tensor", kind, i, t.name) for i, part in enumerate(whole) for t in part.tensors for kind in (*KINDS, "twice")]
    keys = [("key", kind, i, key) for i, part in enumerate(whole) for key, _, _ in part.pairs for kind in KINDS[:4]]
    return tensors + keys


def damaged(whole: list[GGUF], subject: str, kind: str, number: int, name: str) -> list[GGUF]:
    out = [replace(part, pairs=list(part.pairs), tensors=list(part.tensors)) for part in whole]
    part = out[number]
    if subject == "key":
        at = next(i for i, (key, _, _) in enumerate(part.pairs) if key == name)
        key, type_, value = part.pairs[at]
        if kind == "drop":
            del part.pairs[at]
        elif kind == "rename":
            part.pairs[at] = (f"{key}_renamed", type_, value)
        elif kind == "duplicate":
            part.pairs.insert(at, part.pairs[at])
        else:
            part.pairs[at] = (key, "string", str(value)[:40]) if type_ != "string" else (key, "uint32", 7)
        return out
    at = next(i for i, t in enumerate(part.tensors) if t.name == name)
    tensor = part.tensors[at]
    if kind == "drop":
        del part.tensors[at]
    elif kind == "rename":
        part.tensors[at] = replace(tensor, name=f"{name}_renamed")
    elif kind == "duplicate":
        part.tensors.append(replace(tensor, name=f"{name}_copy"))
    elif kind == "twice":
        out[1 - number].tensors.append(tensor)
    elif kind == "reshape":
        dims = tensor.dims[::-1] if len(set(tensor.dims)) > 1 else (*tensor.dims, 1)
        part.tensors[at] = replace(tensor, dims=dims)
    elif tensor.type == F32:
        part.tensors[at] = replace(tensor, type=F64, data=np.frombuffer(tensor.data, "<f4").astype("<f8").tobytes())
    else:
        part.tensors[at] = replace(tensor, type=F32)  # the same bytes, too few of them
    return out


def written(made: list[GGUF], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(made):
        (folder / f"m-{i + 1:05d}-of-{len(made):05d}.gguf").write_bytes(part.bytes())
    return folder / f"m-00001-of-{len(made):05d}.gguf"


def answers(path: Path, whole: Path, want: dict[str, Any], work: Path) -> dict[str, bool | str]:
    """Command -> whether its values are right, or its error."""
    out: dict[str, bool | str] = {}
    for command in COMMANDS:
        try:
            if command == "load_model":
                out[command] = agree(made_by(command, path, work), want[command])
            elif command == "verify":
                with hb.open(path) as checkpoint, hb.open(whole) as other:
                    report = verify(checkpoint, other)
                different = [f"{c.key} {c.status} {c.note}" for c in report.comparisons if c.status != "identical"]
                out[command] = "; ".join(different) if report.verdict != "identical" else True
            else:
                out[command] = holds(made_by(command, path, work), want[command])
        except HalfbyteError as error:
            out[command] = str(error)
    return out


def made_by(command: str, path: Path, work: Path) -> Any:
    """The values that a command reads or writes; the logits of `load_model`."""
    if command == "load_model":
        return logits(hb.load_model(path, dtype="float32")[0], ids() % gguf_models.VOCABULARY)
    with hb.open(path) as checkpoint:
        if command == "inspect":
            if errors := [f for f in checkpoint.findings() if f.severity == "error"]:
                raise HalfbyteError("; ".join(map(str, errors)))
            return values(checkpoint)
        out = work / command
        if command == "convert":
            convert_checkpoint(checkpoint, out, "halfbyte", overwrite=True, workers=1)
        else:
            dequantize_checkpoint(checkpoint, out, dtype="float32", overwrite=True)
    with hb.open(out) as made:
        return values(made)


def check(tmp_path: Path, count: int | None) -> tuple[int, int, int]:
    """`count` changes by a fixed seed, or all: (changes, answers that are right, refusals). Asserts
    the rule.
    """
    whole = parts(tmp_path)
    path = written(whole, tmp_path / "whole")
    right = refused = 0
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = {command: made_by(command, path, tmp_path / "made") for command in COMMANDS if command != "verify"}
        with hb.open(path) as checkpoint:
            own = {name: array.astype(np.float32).astype(np.float64) for name, array in values(checkpoint).items()}
        every = mutations(whole)
        for change in every if count is None else random.Random(0).sample(every, count):
            subject, kind, _, name = change
            broken = written(damaged(whole, *change), tmp_path / "damaged")
            # Without an architecture, which inspect warns of, tensors keep the file's names.
            bare = want | {"dequantize": own, "convert": own} if name == "general.architecture" else want
            for command, answer in answers(broken, path, bare, tmp_path / "work").items():
                right += answer is True
                refused += isinstance(answer, str)
                optional = subject == "key" and name.endswith(OPTIONAL) and kind in ("drop", "rename")
                if answer is False and not (optional and command == "load_model"):
                    faults.append(f"{change}: other values without an error in {command}")
                if (
                    isinstance(answer, str)
                    and name.rpartition(".")[2] not in answer
                    and name.partition(".weight")[0] not in answer
                    and not (subject == "key" and "blk.0." in answer)  # a weight that it makes unreadable
                    and not (name.startswith("split.") and "split." in answer)
                ):
                    faults.append(f"{change}: {command} does not name the culprit: {answer[:300]}")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:40])
    return len(every), right, refused


def test_a_sample_of_damage_to_two_parts_is_right_or_refused_by_name(tmp_path):
    _, right, refused = check(tmp_path, SAMPLE)
    assert right + refused >= SAMPLE * len(COMMANDS) - 2
    assert refused > SAMPLE


@pytest.mark.slow
def test_all_damage_to_two_parts_is_right_or_refused_by_name(tmp_path):
    count, right, refused = check(tmp_path, None)
    print(f"{count} changes, {right} right, {refused} refused")
    assert count > 150
