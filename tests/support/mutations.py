"""Generated damage to whole checkpoints: each tensor and each config key dropped, renamed,
duplicated, retyped, reshaped in turn.

    for mutation in mutations(folder): write(folder, mutation, out); outcome(out, original)

The rule: every command gives the right values, or an error that names the culprit. `outcome`
reports what happened.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import halfbyte as hb
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.generation.memory_plan import Planner
from halfbyte.verification.compare import verify

TENSOR_KINDS = ("drop", "rename", "duplicate", "retype", "reshape")
KEY_KINDS = ("drop", "rename", "retype", "duplicate")
WIDER = {
    "float16": np.float32, "bfloat16": np.float32, "float32": np.float64, "int32": np.int64, "uint32": np.int64, "int8": np.int16,
    "uint8": np.int16, "int16": np.int32, "int64": np.float64,
}  # fmt: skip
"""dtype -> one that holds the same values; float8 becomes its bytes."""


@dataclass(frozen=True)
class Mutation:
    """One change. subject: "tensor" or "key"; target: name of the tensor, or path of the key in the
    quantization config.
    """

    subject: str
    kind: str
    target: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} {'.'.join(self.target)}"


def config_key(config: dict[str, Any]) -> str:
    """Where config.json has the quantization config."""
    return "quantization_config" if "quantization_config" in config else "quantization"


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys, of objects too."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from paths(inner, (*path, key))


def mutations(folder: Path) -> list[Mutation]:
    """Every change of a folder with one model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = SafetensorsFile(folder / "model.safetensors").entries
    keys = list(paths(config.get(config_key(config)) or {}))
    return [Mutation("tensor", k, (t,)) for t in tensors for k in TENSOR_KINDS] + [
        Mutation("key", k, p) for p in keys for k in KEY_KINDS
    ]


def write(folder: Path, mutation: Mutation, out: Path) -> bool:
    """The changed checkpoint; False when the change leaves the file as it was (a reshape to the
    same shape).
    """
    config = json.loads((folder / "config.json").read_text())
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: np.array(file.array(name)) for name in file.entries}
    twice = ""
    if mutation.subject == "tensor":
        (name,) = mutation.target
        array = tensors[name]
        if mutation.kind == "drop":
            del tensors[name]
        elif mutation.kind == "rename":
            tensors = {(f"{n}_renamed" if n == name else n): a for n, a in tensors.items()}
        elif mutation.kind == "duplicate":
            tensors[f"{name}_copy"] = array
        elif mutation.kind == "retype":
            wider = WIDER.get(array.dtype.name)
            tensors[name] = array.view(np.uint8) if wider is None else array.astype(wider)
        else:
            shape = array.shape[::-1] if array.ndim > 1 and array.shape != array.shape[::-1] else (1, *array.shape)
            tensors[name] = array.reshape(shape)
    else:
        inner = config[config_key(config)]
        *path, key = mutation.target
        for step in path:
            inner = inner[step]
        if mutation.kind == "drop":
            del inner[key]
        elif mutation.kind == "rename":
            inner[f"{key}_renamed"] = inner.pop(key)
        elif mutation.kind == "retype":
            value = inner[key]
            inner[key] = [value] if isinstance(value, str | dict) else str(value) if not isinstance(value, list) else {"0": "x"}
        else:
            twice = json.dumps(key)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config)
    if twice:
        at = text.index(f"{twice}: ", text.index(config_key(config)))
        text = f"{text[:at]}{twice}: 0, {text[at:]}"
    (out / "config.json").write_text(text)
    with SafetensorsWriter(out / "model.safetensors", file.metadata) as f:
        for n, a in tensors.items():
            f.add(n, a)
    return True


@dataclass
class Outcome:
    """What the commands made of a changed checkpoint.

    right   commands that gave the right values
    refused command -> the error
    wrong   commands that gave other values without an error
    """

    right: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def faults(self, mutation: Mutation) -> list[str]:
        """What breaks the rule, a sentence each."""
        found = [f"{mutation}: other values without an error in {', '.join(self.wrong)}"] if self.wrong else []
        for command, message in self.refused.items():
            if not names(message, mutation):
                found.append(f"{mutation}: {command} does not name the culprit: {message[:300]}")
        if "inspect" in self.right and any(c in self.refused for c in ("dequantize", "convert", "quantize", "plan")):
            found.append(f"{mutation}: inspect finds nothing, {sorted(self.refused)} refuse")
        return found


def values(checkpoint: hb.Checkpoint) -> dict[str, np.ndarray]:
    """Every tensor as float64, names without `.weight`."""
    out = {}
    for key in checkpoint:
        w = checkpoint[key]
        out[key.removesuffix(".weight")] = (
            w.dequantize("float64") if isinstance(w, hb.QTensor) else np.asarray(w).astype(np.float64)
        )
    return out


@lru_cache(maxsize=1)
def _wanted(original: Path, _when: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of the whole checkpoint, exact and rounded to float32."""
    with hb.open(original) as checkpoint:
        want = values(checkpoint)
    return want, {n: w.astype(np.float32).astype(np.float64) for n, w in want.items()}


def holds(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    """True when everything that the model needs is there with its values; copies beside it do no
    harm.
    """
    return all(n in found and np.array_equal(np.squeeze(found[n]), np.squeeze(w), equal_nan=True) for n, w in want.items())


COMMANDS = ("inspect", "dequantize", "convert", "verify")
MORE = ("quantize", "plan", "load_model", "eval")
"""Commands that `outcome` runs with `every`."""
TOKENS = tuple(range(3, 67))
"""What `eval` reads; it scores the second half."""


def outcome(folder: Path, original: Path, work: Path, every: bool, commands: tuple[str, ...] = COMMANDS) -> Outcome:
    """Runs `commands`, and with `every` `MORE`, on a changed checkpoint."""
    result = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, rounded = _wanted(original, _written(original))
        for command in (*commands, *(MORE if every else ())):
            try:
                right = _run(command, folder, original, work, want, rounded)
            except HalfbyteError as error:
                result.refused[command] = str(error)
                continue
            (result.right if right else result.wrong).append(command)
    return result


def _run(command: str, folder: Path, original: Path, work: Path, want: dict[str, Any], rounded: dict[str, Any]) -> bool:
    """True when the command's answer is right. HalfbyteError when it refuses, or its answer is no."""
    if command == "load_model":
        from support.tiny_models import agree

        return agree(_scored(folder), _whole(original, work, command, _written(original)))
    if command == "eval":
        from support.tiny_models import BOUND

        right, largest = _whole(original, work, command, _written(original))
        # A logit, and the logarithm of the sum of their exponentials, differ by BOUND each.
        return abs(_evaluated(folder)[0] - right) <= 2 * BOUND * largest
    if command == "plan":
        Planner(folder).plan(64)
        with hb.open(folder) as checkpoint:
            return holds(values(checkpoint), want)
    with hb.open(folder) as checkpoint:
        if command == "quantize":
            found = _requantized(checkpoint, work / command)
            whole = _whole(original, work, command, _written(original))
            return holds(found, whole | _restored(checkpoint, want, found))
        if command == "inspect":
            errors = [f for f in checkpoint.findings() if f.severity == "error"]
            if errors:
                raise HalfbyteError("; ".join(map(str, errors)))
            return holds(values(checkpoint), want)
        if command == "verify":
            with hb.open(original) as other:
                report = verify(checkpoint, other)
            if report.verdict != "identical":
                raise HalfbyteError(
                    "; ".join(f"{c.key} {c.status} {c.note}" for c in report.comparisons if c.status != "identical")
                )
            return holds(values(checkpoint), want)
        out = work / command
        if command == "dequantize":
            dequantize_checkpoint(checkpoint, out, dtype="float32", overwrite=True)
            with hb.open(out) as written:
                found = values(written)
            if any(n.endswith(".w13") for n in want):  # vLLM's experts get the model's own names
                return holds(found, _whole(original, work, command, _written(original)))
            return holds({n: _untransposed(a, rounded.get(n)) for n, a in found.items()}, rounded)
        convert_checkpoint(checkpoint, out, "halfbyte", overwrite=True, workers=1)
        with hb.open(out) as written:
            return holds(values(written), want)


def _written(original: Path) -> int:
    """When the whole checkpoint was written: what is remembered of it holds until then."""
    return (original / "model.safetensors").stat().st_mtime_ns


def _scored(folder: Path) -> Any:
    """The logits of the model, which perplexity is computed from."""
    from support.tiny_models import ids, logits

    return logits(hb.load_model(folder, dtype="float32")[0], ids())


def _evaluated(folder: Path) -> tuple[float, float]:
    """(mean of -ln p, the largest logit) of what `halfbyte eval` computes."""
    from halfbyte.evaluation import perplexity
    from halfbyte.evaluation.perplexity import scored_logits
    from halfbyte.evaluation.protocols import Window

    model, window = hb.load_model(folder, dtype="float32")[0], Window(TOKENS, 32)
    return perplexity(model, [window]).nll, float(scored_logits(model, window)[0].abs().max())


def _restored(checkpoint: hb.Checkpoint, want: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What dense weights of the right values, but of another dtype, are quantized to: scales have
    the dtype of the weight. By `hb.quantize` of the file's tensor.
    """
    out = {}
    for key in checkpoint:
        name = key.removesuffix(".weight")
        weight = checkpoint[key]
        if isinstance(weight, hb.QTensor) or weight.ndim != 2 or name not in want:
            continue
        if np.array_equal(np.asarray(weight).astype(np.float64), want[name]) and not np.array_equal(found.get(name), want[name]):
            out[name] = hb.quantize(np.asarray(weight), "int8:g32").dequantize("float64")
    return out


def _requantized(checkpoint: hb.Checkpoint, out: Path) -> dict[str, np.ndarray]:
    quantize_checkpoint(checkpoint, out, recipe_of("halfbyte:int8:g32"), from_packed=True, overwrite=True, workers=1)
    with hb.open(out) as written:
        return values(written)


@lru_cache(maxsize=5)
def _whole(original: Path, work: Path, command: str, _when: int) -> Any:
    """What the command makes of the whole checkpoint."""
    if command == "quantize":
        with hb.open(original) as checkpoint:
            return _requantized(checkpoint, work / "whole")
    if command == "dequantize":
        with hb.open(original) as checkpoint:
            dequantize_checkpoint(checkpoint, work / "whole-dense", dtype="float32", overwrite=True)
        with hb.open(work / "whole-dense") as written:
            return values(written)
    return _evaluated(original) if command == "eval" else _scored(original)


def _untransposed(array: np.ndarray, want: np.ndarray | None) -> np.ndarray:
    """A stack of experts as the packed layouts have it: transformers keeps the transpose."""
    if want is not None and array.ndim == 3 and array.shape == (want.shape[0], *want.shape[:0:-1]):
        return array.swapaxes(1, 2)
    return array


def names(message: str, mutation: Mutation) -> bool:
    """True when an error names the culprit: the tensor or its weight, the key or a weight that it
    makes unreadable.
    """
    if mutation.subject == "key":
        return mutation.target[-1] in message or "model.layers.0." in message
    (name,) = mutation.target
    path = name.rpartition(".")[0]
    module, _, rest = name.partition(".weight.")  # bitsandbytes: x.weight.quant_state.bitsandbytes__nf4
    stems = {name, path, name.removesuffix("_blocks").removesuffix("_scales"), module if rest else ""}
    return any(stem and stem in message for stem in stems)
