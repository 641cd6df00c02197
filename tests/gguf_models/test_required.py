"""A GGUF without a tensor that its architecture needs is refused by the tensor's name: generated
over every architecture that runs here and every kind of tensor of its file.

`make test` drops a sample of each architecture's kinds by a fixed seed, the marker `slow` all of
them, there in each command.
"""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest

import halfbyte as hb
from halfbyte.conversion import convert
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.generation.memory_plan import Planner
from halfbyte.verification.compare import verify
from support import gguf_families, gguf_models
from support.gguf_families import FAMILIES, family_model, write_family
from support.gguf_writer import GGUF

SAMPLE = 3
OPTIONAL = {
    ("", "output.weight"): "without a head the embedding is one",
    ("granitehybrid", "blk.*.ssm_conv1d.bias"): "its convolutions may have none",
    ("nemotron_h", "blk.*.ssm_conv1d.bias"): "its convolutions may have none",
    ("llama", "rope_freqs.weight"): "its rotations may be plain",
    ("llama", "blk.*.attn_output.bias"): "beside biases of q, k and v there may be none",
}
"""(beginning of the case, kind) of tensors of which a file may have none, and reads as another
valid model: nothing else of the file implies them.
"""


def kind(name: str) -> str:
    return re.sub(r"(?<=blk\.)\d+", "*", name)


def whole(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> GGUF:
    """The file of a case as its writer has it, also at `folder`/whole.gguf."""
    made: list[GGUF] = []

    def keep(**given: object) -> GGUF:
        made.append(GGUF(**given))  # type: ignore[arg-type]
        return made[-1]

    module = gguf_families if case in FAMILIES else gguf_models
    monkeypatch.setattr(module, "GGUF", keep)
    if case in FAMILIES:
        write_family(folder / "whole.gguf", case, family_model(case))
    else:
        gguf_models.write(folder / "whole.gguf", case, gguf_models.dense_model(case), packed=False)
    return made[0]


def without(file: GGUF, name: str, path: Path) -> Path:
    path.write_bytes(GGUF(pairs=list(file.pairs), tensors=[t for t in file.tensors if t.name != name]).bytes())
    return path


def answer(command: str, path: Path, original: Path, work: Path) -> None:
    """Runs a command. HalfbyteError when it refuses, or its answer is no."""
    if command == "load_model":
        hb.load_model(path)
    elif command == "convert":
        convert(path, work / "converted", to="halfbyte", overwrite=True)
    elif command == "plan":
        Planner(path).plan(64)
    else:
        with hb.open(path) as checkpoint:
            if command == "check":
                checkpoint.check("dequantize")
            elif command == "inspect":
                if errors := [f for f in checkpoint.findings() if f.severity == "error"]:
                    raise HalfbyteError("; ".join(map(str, errors)))
            elif command == "dequantize":
                dequantize_checkpoint(checkpoint, work / "dense", overwrite=True)
            else:
                with hb.open(original) as other:
                    report = verify(checkpoint, other)
                if report.verdict != "identical":
                    raise HalfbyteError("; ".join(f"{c.key} {c.status} {c.note}" for c in report.comparisons))


COMMANDS = ("inspect", "dequantize", "convert", "verify", "plan", "load_model")


def faults(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None, commands: tuple[str, ...]) -> list[str]:
    """What breaks the rule, over `count` kinds of tensors or all."""
    file = whole(case, tmp_path, monkeypatch)
    with hb.open(tmp_path / "whole.gguf") as checkpoint:
        ledger = checkpoint.ledger()
        assert not ledger.modules, "the model is compared"
        assert not ledger.problems
    optional = {stem for start, stem in OPTIONAL if case.startswith(start)}
    names = list({kind(t.name): t.name for t in reversed(file.tensors) if kind(t.name) not in optional}.values())
    if count is not None:
        names = random.Random(case).sample(names, count)
    found = []
    for name in names:
        path = without(file, name, tmp_path / "damaged.gguf")
        for command in commands:
            try:
                answer(command, path, tmp_path / "whole.gguf", tmp_path)
            except HalfbyteError as error:
                if name.removesuffix(".weight") not in str(error):
                    found.append(f"{name}: {command} does not name it: {error}")
            else:
                found.append(f"{name}: {command} takes the file without it")
    return found


@pytest.mark.parametrize("case", [*FAMILIES, *gguf_models.MODELS])
def test_a_missing_tensor_is_named(case, tmp_path, monkeypatch):
    assert faults(case, tmp_path, monkeypatch, SAMPLE, ("check",)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FAMILIES, *gguf_models.MODELS])
def test_each_missing_tensor_is_named_by_every_command(case, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert faults(case, tmp_path, monkeypatch, None, COMMANDS) == []


@pytest.mark.parametrize("name", ["blk.0.ssm_conv1d.bias", "blk.0.ffn_gate_inp.weight", "blk.0.attn_k_b.weight"])
def test_every_command_names_it(name, tmp_path, monkeypatch):
    case = {"blk.0.ssm_conv1d.bias": "mamba", "blk.0.ffn_gate_inp.weight": "mixtral"}.get(name, "deepseek2")
    path = without(whole(case, tmp_path, monkeypatch), name, tmp_path / "damaged.gguf")
    for command in COMMANDS:
        with pytest.raises(HalfbyteError, match=re.escape(name.removesuffix(".weight"))):
            answer(command, path, tmp_path / "whole.gguf", tmp_path)
