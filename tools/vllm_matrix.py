"""benchmarks/vllm.md and docs/guides/vllm.md: every kind and shape of checkpoint through vLLM's own
OpenAI server, with the plug-in and without it.

    PYTHONPATH=src:tests python tools/vllm_matrix.py write FOLDER
    PYTHONPATH=src:tests python tools/vllm_matrix.py add FOLDER PRODUCED
    PYTHONPATH=src:tests python tools/vllm_matrix.py serve FOLDER [--alone] [SECONDS]
    PYTHONPATH=src:tests python tools/vllm_matrix.py table FOLDER PAGE ...

`write` writes the checkpoints of tests/support/served_models.py and their right answers; `add`
takes one of each kind that the producers wrote below PRODUCED (`engines_matrix.py dense`, then
tests/support/producers), of five shapes by turns, with the answer of a dense model of its values.
For these the plug-in is asked for where vLLM alone ran before, where no method is named, and for
torchao's, which vLLM refuses only while it loads. `serve`, in the environment vllm, starts a server
for each (`api_server`, its engine in a process of its own), asks it over HTTP for the log
probabilities of all tokens at every position of a prompt and for a greedy continuation, and goes on
where it ended. Server and engine are forked from one process that has imported vLLM, which saves
its imports and changes nothing else; tests/vllm starts some from nothing. The plug-in is found by
its entry point: halfbyte is installed, or a folder with its `entry_points.txt` is in PYTHONPATH.
`--alone` loads no plug-in, gives none of its options, and
computes in bfloat16, which vLLM's kernels want; with it float32. `table` writes the tables between
the marks of each PAGE; rows of kinds that were not served stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

GENERIC = ("Engine core initialization failed", "Error parsing config for", "Tokenizer not available")
PATIENCE = 300.0
"""Seconds after which a server that neither answers nor ends has failed."""
ALONE_LIMIT = 0.05
"""Of vLLM's own kernels in bfloat16: largest difference of a log probability over the largest."""


def write(folder: Path) -> None:
    """Every checkpoint, its answer in FOLDER/SHAPE-KIND/answer.npz."""
    from support import served_models as models

    for shape, kind in models.CELLS:
        at = folder / f"{shape}-{kind}"
        rows, text = models.answer(models.write(at, shape, kind))
        np.savez(at / "answer.npz", rows=rows, text=np.array(text))


def add(folder: Path, produced: Path) -> None:
    """A checkpoint of each producer and kind into FOLDER/produced.json, its answer beside those of
    `write`.
    """
    from halfbyte.errors import CheckpointError
    from halfbyte.transformers import load_model
    from support import served_models as models

    kinds: dict[str, dict[str, Path]] = {}
    for path in sorted([*produced.glob("*/*/config.json"), *produced.glob("*/*.gguf")]):
        at = path if path.suffix == ".gguf" else path.parent
        shape, _, kind = at.stem.partition("-")
        if shape in models.SHAPES:
            kinds.setdefault(f"{at.parent.name}-{kind}", {})[shape] = at.absolute()
    names, shapes = {}, list(models.SHAPES)
    for turn, (kind, paths) in enumerate(kinds.items()):
        shape = next(s for s in shapes[turn % len(shapes) :] + shapes if s in paths)
        name = f"{shape}-{kind}"
        names[name] = str(paths[shape])
        (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            model = models.dense_of(paths[shape])
        except CheckpointError:  # inputs are scaled, which no dense model shows
            model = load_model(paths[shape])[0]
        rows, text = models.answer(model)
        np.savez(folder / name / "answer.npz", rows=rows, text=np.array(text))
    (folder / "produced.json").write_text(json.dumps(names, indent=1), encoding="utf-8")


def produced_cells(folder: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """Name of a producer's checkpoint -> its path, what a user must say to have it read."""
    file, ran = folder / "produced.json", folder / "alone.json"
    alone = json.loads(ran.read_text("utf-8")) if ran.exists() else {}
    found = {}
    for name, where in (json.loads(file.read_text("utf-8")) if file.exists() else {}).items():
        path = Path(where)
        options = {"config_format": "halfbyte", "tokenizer_mode": "halfbyte"}
        if path.is_dir():
            stated = json.loads((path / "config.json").read_text("utf-8")).get("quantization_config", {})
            method = stated.get("quant_method") or stated.get("quant_algo")
            asked = not method or method == "torchao" or alone.get(name, [""])[0] == "runs"
            options = {"quantization": "halfbyte"} if asked else {}
        found[name] = (path, options)
    return found


def serve(folder: Path, alone: bool, seconds: float) -> None:
    """The answer of each cell into FOLDER/alone.json or FOLDER/plugin.json."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "" if alone else "halfbyte",
    }
    from support import served_models as models

    preload()
    end, file = time.monotonic() + seconds, folder / ("alone.json" if alone else "plugin.json")
    found: dict[str, list[Any]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    cells = produced_cells(folder)
    for shape, kind in sorted(models.CELLS, key=lambda cell: models.CELLS.index(cell) % len(models.KINDS)):
        if (at := folder / f"{shape}-{kind}").is_dir():
            cells[at.name] = (models.path_of(at, kind), models.ASKED.get(kind, {}))
    for name, (path, asked) in cells.items():
        if name in found:
            continue
        if time.monotonic() > end:
            break
        options = {"dtype": "bfloat16" if alone else "float32", **({} if alone else asked)}
        start = time.monotonic()
        found[name] = served(path, options, folder / name)
        print(f"{name}: {' '.join(map(str, found[name]))[:150]} ({time.monotonic() - start:.1f} s)", flush=True)
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def preload() -> None:
    """Imports what a server and its engine import, and lets both be forked."""
    import importlib
    import multiprocessing

    import vllm.utils.system_utils
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for name in ("entrypoints.launchers.api_server.entry", "v1.engine.core", "v1.engine.async_llm", "v1.worker.cpu_worker"):
        importlib.import_module(f"vllm.{name}")
    for name in ("llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss"):
        importlib.import_module(f"vllm.model_executor.models.{name}")
    for module in (vllm.utils.system_utils, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def served(path: Path, options: dict[str, str], folder: Path) -> list[Any]:
    """["runs", largest difference, the same over the largest log probability, whether the text is
    equal] or ["refused", the engine's words].
    """
    from support.served_models import IDS, TOKENS

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", value)]
    log = folder / "log"
    child = os.fork()
    if child == 0:
        run_server(["--model", str(path), "--port", str(port), *words], log)
    body = {
        "model": "tiny", "prompt": IDS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "prompt_logprobs": -1,
    }  # fmt: skip
    reply, end = None, time.monotonic() + PATIENCE
    try:
        while reply is None and os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                raise TimeoutError(f"{path}: no answer in {PATIENCE:.0f} s; its log is {log}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                reply = post(f"http://127.0.0.1:{port}/v1/completions", body)
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if reply is None:
        return ["refused", refusal_of(log.read_text("utf-8", "replace"))]
    (choice,) = reply["choices"]
    wanted = np.load(folder / "answer.npz")
    rows = np.array([[at[str(token)]["logprob"] for token in range(len(at))] for at in choice["prompt_logprobs"][1:]])
    off = np.abs(rows - wanted["rows"]).max()
    return ["runs", float(off), float(off / np.abs(wanted["rows"]).max()), choice["token_ids"] == wanted["text"].tolist()]


def run_server(arguments: list[str], log: Path) -> None:
    """vLLM's server in this process, which ends with it."""
    try:
        os.setsid()
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        from vllm.entrypoints.launchers.api_server.entry import main

        sys.argv = ["api_server", "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "64", "--max-logprobs", "-1",
                    "--served-model-name", "tiny", *arguments]  # fmt: skip
        main()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
    finally:
        os._exit(1)


def post(url: str, body: dict[str, Any]) -> Any:
    """The server's answer. URLError while there is none, AssertionError with a refusal's text."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from error


def refusal_of(log: str) -> str:
    """The error that ended a server."""
    errors = re.findall(r"(?:^|\] ?)(?:[a-z_.]+\.)?(\w+(?:Error|Exception): .+(?:\n  Value error, .+)?)", log, re.MULTILINE)
    told = [error for error in errors if not any(words in error for words in GENERIC)]
    return (told or errors or [log[-300:]])[-1][:300]


def table(folder: Path) -> dict[str, list[str]]:
    """Mark -> lines: `kinds` has a row for each kind, `cells` one with a column for each shape,
    `produced` one for each producer's checkpoint.
    """
    from support.served_models import BOUND, KINDS, SHAPES

    alone, plugin = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("alone", "plugin"))

    def alone_words(cell: list[Any]) -> str:
        if cell[0] == "refused":
            return f"refused: {short(cell[1])}"
        return "runs" if cell[2] < ALONE_LIMIT else f"runs, log probabilities off by up to {cell[1]:.2g}"

    def with_words(cell: list[Any]) -> str:
        if cell[0] == "refused":
            return f"refused: {short(cell[1])}"
        return f"{cell[1]:.1e}{'' if cell[3] else ', other text'}"

    kinds = ["| checkpoint | vLLM alone | with the plug-in: shapes served, largest difference |", "|---|---|---|"]
    cells = [f"| checkpoint | {' | '.join(SHAPES)} |", f"|---{'|---' * len(SHAPES)}|"]
    for kind in KINDS:
        if not all(f"{shape}-{kind}" in alone.keys() & plugin.keys() for shape in SHAPES):
            continue
        ours = [plugin[f"{shape}-{kind}"] for shape in SHAPES]
        told: dict[str, list[str]] = {}
        for shape in SHAPES:
            told.setdefault(alone_words(alone[f"{shape}-{kind}"]), []).append(shape)
        words = [f"{', '.join(shapes)}: {told_of}" if len(told) > 1 else told_of for told_of, shapes in told.items()]
        good = [cell[1] for cell in ours if cell[0] == "runs" and cell[1] < BOUND and cell[3]]
        kinds.append(f"| {kind} | {'; '.join(words)} | {len(good)} of {len(ours)}, {max(good, default=float('nan')):.1e} |")
        cells.append(f"| {kind} | {' | '.join(map(with_words, ours))} |")
    produced = ["| checkpoint | vLLM alone | the plug-in | with it: largest difference |", "|---|---|---|---|"]
    for name, (_, asked) in produced_cells(folder).items():
        if name in alone.keys() & plugin.keys():
            how = f"`--{next(iter(asked)).replace('_', '-')} halfbyte`" if asked else "by itself"
            produced.append(f"| {name} | {alone_words(alone[name])} | {how} | {with_words(plugin[name])} |")
    return {"kinds": kinds, "cells": cells, "produced": produced}


def short(error: str) -> str:
    """An engine's first sentence, without pydantic's frame, folders, lists and names of classes."""
    words = re.sub(r"^\w+: \d+ validation error.*?Value error, ", "", " ".join(error.split()))
    words = re.sub(r"^\w+(Error|Exception): ", "", words).replace("|", "/")
    words = re.sub(r"'/\S*/([^/']+)'", r"`\1`", re.sub(r"^\[\w+\] /\S+: ", "", words))
    for ending in (
        r" \[type=",
        r", which ",
        r" For further",
        r"\. ",
        r"\.$",
        r" Reasons:",
        r" in \w+(Model|ForCausalLM)\b",
        r" via ",
    ):
        words = re.split(ending, words)[0]
    return re.sub(r"'([^']+)'", r"`\1`", words)


def fill(page: Path, lines: dict[str, list[str]]) -> None:
    """Replaces what stands between `<!-- served MARK -->` and `<!-- end -->`."""
    text = page.read_text("utf-8")
    for mark, rows in lines.items():
        start, found, rest = text.partition(f"<!-- served {mark} -->\n")
        if found:
            before, _, after = rest.partition("<!-- end -->")
            old = {line.split(" | ")[0]: line for line in before.strip().splitlines()}
            merged = list((old | {row.split(" | ")[0]: row for row in rows}).values())
            text = f"{start}{found}\n" + "\n".join(merged) + "\n\n<!-- end -->" + after
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", where]:
            write(Path(where))
        case ["add", where, produced]:
            add(Path(where), Path(produced))
        case ["serve", where, *rest]:
            limits = [float(word) for word in rest if word != "--alone"]
            serve(Path(where).absolute(), "--alone" in rest, *(limits or [float("inf")]))
        case ["table", where, *pages]:
            for page in pages:
                fill(Path(page), table(Path(where)))
        case _:
            sys.exit(__doc__)
