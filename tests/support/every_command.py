"""Every command on every checkpoint that a test opens.

`recorded(folder)` keeps a copy of each as it was when it was opened; `faults(path, work)` runs all
commands on one and says where they disagree: values of `dequantize` and `convert` are those of
`open`, which the recording test compares with the right ones; a checkpoint that `open` refuses is
refused by each command with the same tensor, key or file; no command crashes. `completed(path)`
makes a whole llama of a checkpoint of single weights, so that `load_model`, `eval`, `generate` and
`serve` have one to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import halfbyte as hb
from halfbyte.checkpoints.ledger import ACTIVATION_SCALES, AUXILIARY_NAMES
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.checkpoints.safetensors.writer import SafetensorsWriter
from halfbyte.cli.app import main
from halfbyte.cli.failures import FAULT
from halfbyte.errors import HalfbyteError
from support.mutations import holds, values

LARGEST = 20_000_000
"""Bytes of a folder that is recorded."""
Values = dict[str, np.ndarray]
NO_MODEL = re.compile(r"config\.json|needs fastapi")
"""What commands that need a model say of single weights, before they read one."""
NAMES = re.compile(r"[\w/-]+(?:[._-][\w-]+)+")
"""What looks like the name of a tensor, a key or a file in a message."""


@contextlib.contextmanager
def recorded(folder: Path, most: int) -> Iterator[list[Path]]:
    """The first `most` different checkpoints that are opened in the block, as copies in `folder`."""
    module = sys.modules["halfbyte.checkpoints.open"]
    original, seen, found = module._open, set(), []

    def opened(path: Any, config: Any) -> Any:
        source = Path(path)
        root = source if source.is_dir() else source.parent
        if config is None and source.exists() and len(found) < most and not root.is_relative_to(folder):
            files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
            if sum(p.stat().st_size for p in files) < LARGEST:
                digest = hashlib.sha256(source.name.encode() if root != source else b"")
                for p in files:
                    digest.update(f"{p.relative_to(root)}\0".encode() + p.read_bytes())
                if digest.digest() not in seen:
                    seen.add(digest.digest())
                    copy = folder / str(len(found)) / "m"
                    shutil.copytree(root, copy, symlinks=True)
                    found.append(copy if root == source else copy / source.name)
        return original(path, config)

    with mock.patch.object(module, "_open", opened):
        yield found


def run(*arguments: object) -> tuple[int, str]:
    """(exit status, all that is printed) of a command line; a server returns at its start."""
    out = io.StringIO()
    server = mock.patch("uvicorn.run", return_value=None) if SERVER else contextlib.nullcontext()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), server:
        status = main([str(a) for a in arguments])
    return status, " ".join(out.getvalue().split())


def contents(path: Path) -> Values | str:
    """Every value; or why the checkpoint is refused."""
    try:
        with hb.open(path) as checkpoint:
            checkpoint.check("dequantize")
            return values(checkpoint)
    except HalfbyteError as error:
        return str(error)


def commands(path: Path, work: Path) -> dict[str, tuple[object, ...]]:
    """Name -> command line."""
    text = work / "text.txt"
    text.write_text("<tok7> <tok8> <tok9> " * 12, "utf-8")
    return {
        "inspect": ("inspect", path),
        "dequantize": ("dequantize", path, work / "dense", "--dtype", "float32"),
        "convert": ("convert", path, work / "own", "--to", "halfbyte"),
        "verify": ("verify", path, path),
        "quantize": ("quantize", path, work / "rounded", "--to", "halfbyte:int8:g32", "--from-packed"),
        "plan": ("plan", path),
        "eval": ("eval", path, "--text", text, "--context", 16, "--chunks", 1),
        "generate": ("generate", path, "-p", "<tok7>", "--max-tokens", 2),
        "sample": ("sample", path, work / "own.txt", "--sequences", 1, "--tokens", 2),
        "serve": ("serve", path),
    }


INPUTS, PROJECTOR = ".pre_quant_scale", "vision projector"
REFUSALS = (("dequantize", INPUTS), ("quantize", "no weight to quantize"), ("quantize", "NaN or infinite"))
"""(command, what it says) of checkpoints that `open` reads: a factor of a layer's inputs is in no
dense weight, a file may have no matrix, and integers hold no infinity. `inspect` and `verify` take
a projector, and say so.
"""
RUN = ("plan", "eval", "generate", "sample", "serve")
"""Commands that need a whole model."""
SERVER = importlib.util.find_spec("fastapi") is not None and importlib.util.find_spec("uvicorn") is not None
"""Without it `serve` says what to install, once the checkpoint is read."""


def faults(path: Path, work: Path, whole: bool = False) -> list[str]:
    """What is wrong with the commands' answers.

    whole  the checkpoint is a whole model with a tokenizer
    """
    work.mkdir(parents=True, exist_ok=True)
    want = contents(path)
    found = []
    for name, line in commands(path, work).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status, said = run(*line)
        where = f"{path}: {name}: {said[-400:]}"
        if status == FAULT or "Traceback" in said:
            found.append(f"{where}: ends with status {status}")
        elif isinstance(want, str) and status == 0:
            if PROJECTOR not in want or name not in ("inspect", "verify"):
                found.append(f"{where}: succeeds, and open says {want[:300]}")
        elif isinstance(want, str):
            if not set(NAMES.findall(want)) & set(NAMES.findall(said)) and (name not in RUN or not NO_MODEL.search(said)):
                found.append(f"{where}: names nothing of {want[:300]}")
        elif status and any(name == command and text in said for command, text in REFUSALS):
            continue
        elif status and (name not in RUN or (whole and (SERVER or name != "serve"))):
            found.append(f"{where}: status {status}, and open reads it")
        elif status and not re.search(r"halfbyte: \[\w+\]|error", said):
            found.append(f"{where}: status {status} without a reason")
    for out in ("dense", "own"):
        if isinstance(want, str):
            found += [f"{path}: {out} was written"] if (work / out).exists() else []
            continue
        renamed = any(key.endswith((".w13", ".w2")) for key in want)  # vLLM's names of experts become the model's
        if out == "dense" and (renamed or any(INPUTS in key for key in want)):
            continue
        have = contents(work / out) if (work / out).exists() else {}
        narrow = {
            n: w.astype(np.float32).astype(np.float64) for n, w in want.items() if n.rpartition(".")[2] not in ACTIVATION_SCALES
        }
        same = not isinstance(have, str) and holds(have, narrow if out == "dense" else want)
        other_form = path.suffix == ".gguf" or any(w.ndim == 3 for w in want.values())  # other names or orientations
        if not same and not (other_form and run("verify", path, work / out)[0] == 0):
            found.append(f"{path}: {out} has other values" + (f": {have[:200]}" if isinstance(have, str) else ""))
    return found


# ------------------------------------------------------------------------------- a whole model

PROJECTIONS = {
    "mlp.down_proj": ("hidden", "inner"), "mlp.gate_proj": ("inner", "hidden"), "mlp.up_proj": ("inner", "hidden"),
    "self_attn.q_proj": ("heads", "hidden"), "self_attn.k_proj": ("few", "hidden"), "self_attn.v_proj": ("few", "hidden"),
    "self_attn.o_proj": ("hidden", "heads"),
}  # fmt: skip
"""Module of a llama's layer -> what its rows and its inputs are as many as."""
HEAD = 16


def completed(path: Path, out: Path) -> tuple[Path, Any] | None:
    """(a folder of a llama that has the weights of a folder of one file, its dense model); None
    where the weights are not those of a llama, or their sizes contradict each other.
    """
    from support.tiny_configs import dense_model

    want = contents(path)
    files = list(path.glob("*.safetensors")) if path.is_dir() else []
    if isinstance(want, str) or len(files) != 1 or list(path.glob("*.index.json")):
        return None
    sizes: dict[str, int] = {}
    layers = 0
    for key, value in want.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
        if key == "lm_head":
            pairs = [("vocabulary", value.shape[0]), ("hidden", value.shape[1])]
        elif match and match[2] in PROJECTIONS and value.ndim == 2:
            layers = max(layers, int(match[1]) + 1)
            pairs = list(zip(PROJECTIONS[match[2]], value.shape, strict=True))
        elif key.rpartition(".")[2] in AUXILIARY_NAMES:
            continue
        else:
            return None
        for name, size in pairs:
            if sizes.setdefault(name, size) != size:
                return None
    hidden = sizes.get("hidden", 64)
    heads = sizes.get("heads", hidden)
    few = sizes.get("few", heads)
    if any(n % HEAD for n in (hidden, heads, few)) or heads % few or not 0 < layers <= 4:
        return None
    model = dense_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=sizes.get("inner", 128),
        num_hidden_layers=layers,
        head_dim=HEAD,
        num_attention_heads=heads // HEAD,
        num_key_value_heads=few // HEAD,
        vocab_size=max(96, sizes.get("vocabulary", 96)),
    )
    if sizes.get("vocabulary", 96) != 96:
        return None
    _write(path, files[0], model, want, out)
    return out, model


def _write(path: Path, file: Path, model: Any, want: Values, out: Path) -> None:
    """The folder with the model's other tensors, its configuration and a tokenizer; the weights of
    the file become the model's.
    """
    import torch
    from support.tiny_tokenizer import write_tokenizer

    shutil.copytree(path, out)
    have = SafetensorsFile(file)
    tensors = {name: np.array(have.array(name)) for name in have.entries}
    for name, parameter in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in want:
            parameter.copy_(torch.from_numpy(want[module].astype(np.float32)))
        else:
            tensors[name] = parameter.numpy()
    (out / file.name).unlink()
    with SafetensorsWriter(out / file.name, have.metadata) as written:
        for name, array in tensors.items():
            written.add(name, array)
    stated = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    (out / "config.json").write_text(json.dumps({**own, **{k: v for k, v in stated.items() if k not in own}}))
    write_tokenizer(out, "{% for m in messages %}{{ m.content }}{% endfor %}")


def model_faults(path: Path, model: Any, work: Path) -> list[str]:
    """What is wrong with a completed model: each command runs it, and its logits are those of the
    dense model with the same values.
    """
    from support.tiny_models import agree, ids, logits

    found = faults(path, work, whole=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = logits(hb.load_model(path, dtype="float32")[0], ids())
        except HalfbyteError as error:
            return [*found, f"{path}: load_model: {error}"]
    return found if agree(ours, logits(model, ids())) else [*found, f"{path}: load_model gives other logits"]
