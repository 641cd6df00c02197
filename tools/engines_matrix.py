"""benchmarks/engines.md: what `inspect --for` predicts of small whole checkpoints against what the
engines do with them.

    python tools/engines_matrix.py write FOLDER               checkpoints and our logits
    python tools/engines_matrix.py run ENGINE FOLDER          in the engine's own environment
    python tools/engines_matrix.py table FOLDER > benchmarks/engines.md

`run` is called once in each environment of tests/support/producers/environments.py that has the
engine; for transformers in several, because the packages that it needs for one kind exclude those
for another. PYTHONPATH=src:tests. An answer that names a package as missing is no answer. Logits
are equal within 5 % of the largest (llama.cpp 10 %, whose activations are int8); models are random,
of two layers.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("transformers", "llama.cpp", "mlx")
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp_python", "mlx": "mlx-lm"}
IDS = [3, 9, 27, 14, 41, 5, 5, 30, 12, 7, 33, 21]
"""Tokens of every model's vocabulary."""
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")
KINDS = ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4", "bitsandbytes", "hqq", "fp8",
         "torchao", "halfbyte", "onnx")  # fmt: skip
GGUF_MODELS = ("llama", "llama-3", "llama-tied-bias", "qwen2", "qwen2-yarn", "qwen3", "mixtral", "qwen3moe", "gemma2", "gemma3",
               "phi3", "gpt-oss")  # fmt: skip
GGUF_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4")
MISSING = re.compile(
    r"install|not found|No module named|Loading .* requires|requires the|not available|accelerate", re.IGNORECASE
)
LIMITS = {"llama.cpp": 0.1}


HEAD = """# Predictions of `inspect --for` against the engines

{count} small whole checkpoints, random models of two layers (`tools/engines_matrix.py`), on a CPU
(x86-64, AVX2). Observed: fine, logits equal to the values' within 5 % of the largest (llama.cpp
10 %: its activations are int8); wrong, other logits; refused, an error; not run, a package that the
engine wants for the kind is not in the environment (for transformers bitsandbytes and torchao
are). A refused torchao folder is one of NVFP4 without torchao's own metadata. Not among the files:
those of the producers themselves. vLLM did not run.

Open: no prediction may say fine of what is refused or wrong; the last table lists where it does.
"""


def changes(family: str) -> dict[str, int]:
    """Gemma 3's pattern of layers has six; mlx-lm builds no model of fewer."""
    return {"num_hidden_layers": 7} if family == "gemma3_text" else {}


def write(folder: Path) -> None:
    """Every checkpoint, with our logits; their names in cases.json."""
    import torch
    from halfbyte.checkpoints import open as open_checkpoint
    from halfbyte.conversion import convert
    from halfbyte.conversion.quantize import quantize_checkpoint
    from halfbyte.conversion.recipe import recipe_of
    from halfbyte.errors import HalfbyteError
    from halfbyte.transformers import load_model
    from support.gguf_models import dense_model
    from support.gguf_models import write as write_gguf
    from support.tiny_models import write_tiny

    paths: dict[str, Path] = {}

    def attempt(name: str, path: Path, make: Callable[[], object]) -> None:
        try:
            make()
            paths[name] = path
        except (HalfbyteError, KeyError) as error:
            print(f"{name} is not written: {error}", file=sys.stderr)

    for family in FAMILIES:
        for kind in KINDS:
            path = folder / f"{family}-{kind}"
            attempt(
                path.name, path, lambda path=path, family=family, kind=kind: write_tiny(path, family, kind, **changes(family))
            )
            if not kind.startswith("mlx") and path.name in paths:
                out = folder / f"{family}-{kind}-as-mlx"
                attempt(out.name, out, lambda path=path, out=out: convert(path, out, to="mlx"))
    attempt("gpt_oss-gpt-oss", folder / "gpt_oss", lambda: write_tiny(folder / "gpt_oss", "gpt_oss", "gpt-oss"))
    attempt(
        "gpt_oss-gpt-oss-as-mlx", folder / "gpt_oss-as-mlx",
        lambda: convert(folder / "gpt_oss", folder / "gpt_oss-as-mlx", to="mlx"),
    )  # fmt: skip
    for name in GGUF_MODELS:
        path = folder / f"{name}.gguf"
        attempt(path.name, path, lambda path=path, name=name: write_gguf(path, name, dense_model(name), True))
        out = folder / f"{name}.gguf-as-mlx"
        attempt(out.name, out, lambda path=path, out=out: convert(path, out, to="mlx"))
    for name in ("llama", "qwen3", "gemma3"):
        source = write_gguf(folder / f"{name}-f32.gguf", name, dense_model(name), False)
        paths[source.name] = source
        for kind in GGUF_TYPES:
            path = folder / f"{name}-{kind}.gguf"
            with open_checkpoint(source) as checkpoint:
                attempt(path.name, path, lambda c=checkpoint, p=path, k=kind: quantize_checkpoint(c, p, recipe_of(f"gguf:{k}")))
    cases = {}
    for name, path in paths.items():
        try:
            model = load_model(path)[0]
        except HalfbyteError as error:
            print(f"{name} has no logits: {error}", file=sys.stderr)
            continue
        with torch.no_grad():
            np.save(folder / f"{name}.npy", model(input_ids=torch.tensor([IDS])).logits[0].numpy())
        cases[name] = {"path": path.name}
    (folder / "cases.json").write_text(json.dumps(cases, indent=1), encoding="utf-8")


def with_transformers(path: Path) -> np.ndarray:
    """The logits of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    where = path.parent if options else path
    model, info = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, output_loading_info=True, **options)
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.tensor([IDS])).logits[0].float().numpy()
    if info["missing_keys"] or info["unexpected_keys"]:
        print(path.name, "missing", sorted(info["missing_keys"])[:3], "unexpected", sorted(info["unexpected_keys"])[:3])
    return logits


def with_llama_cpp(path: Path) -> np.ndarray:
    """The logits of llama.cpp."""
    import llama_cpp

    engine = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    engine.eval(IDS)
    logits = np.array(engine.scores[: len(IDS)])
    engine.close()
    return logits


def with_mlx(path: Path) -> np.ndarray:
    """The logits of mlx-lm, in float32."""
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(path)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([IDS])).astype(mx.float32))[0]


def run(engine: str, folder: Path) -> None:
    """The engine's answer for each checkpoint, into answers-ENGINE.json. An answer of an earlier
    environment is replaced only where that lacked a package.
    """
    read = {"transformers": with_transformers, "llama.cpp": with_llama_cpp, "mlx": with_mlx}[engine]
    file = folder / f"answers-{engine}.json"
    answers: dict[str, list[str]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for name, case in json.loads((folder / "cases.json").read_text("utf-8")).items():
        if answers.get(name, ["not run"])[0] != "not run":
            continue
        answers[name] = ["refused", "the process ended"]
        file.write_text(json.dumps(answers, indent=1), encoding="utf-8")
        try:
            logits = read(folder / case["path"])
        except Exception as error:  # whatever an engine raises is its refusal
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            answers[name] = ["not run" if MISSING.search(text) else "refused", text]
            continue
        wanted = np.load(folder / f"{name}.npy")
        size = np.abs(wanted).max()
        off = float(np.abs(logits - wanted).max() / size) if logits.shape == wanted.shape else float("inf")
        answers[name] = [
            "fine" if off < LIMITS.get(engine, 0.05) else "wrong",
            f"largest difference {off:.2g} of the largest logit",
        ]
    answers["version"] = [importlib.metadata.version(PACKAGES[engine]) if engine != "llama.cpp" else "0.3.36"]
    file.write_text(json.dumps(answers, indent=1), encoding="utf-8")


def table(folder: Path) -> str:
    """The page, with the predictions of the source as it is now."""
    from halfbyte.checkpoints import open as open_checkpoint
    from halfbyte.checkpoints.engines import predictions

    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    for case in cases.values():
        with open_checkpoint(folder / case["path"]) as checkpoint:
            case["said"] = {engine: predictions(checkpoint, engine)[0].verdict for engine in ENGINES}
    lines = [HEAD.format(count=len(cases))]
    wrong: list[str] = []
    for engine in ENGINES:
        file = folder / f"answers-{engine}.json"
        if not file.exists():
            continue
        answers = json.loads(file.read_text("utf-8"))
        count: Counter[tuple[str, str]] = Counter()
        for name, case in cases.items():
            said, seen = case["said"][engine], answers[name][0]
            count[said, seen] += 1
            if seen not in (said, "not run"):
                wrong.append(f"| {engine} | `{name}` | {said} | {seen} | {answers[name][1][:160].replace('|', '/')} |")
        lines += [
            f"## {engine} {answers['version'][0]}",
            "",
            "| predicted | fine | refused | wrong | not run |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {said} | " + " | ".join(str(count[said, seen]) for seen in ("fine", "refused", "wrong", "not run")) + " |"
            for said in ("fine", "refused", "wrong")
        ]
        lines.append("")
    lines += ["## Where they differ", ""]
    head = ["| engine | checkpoint | predicted | observed | the engine's words |", "|---|---|---|---|---|"]
    lines += [*head, *wrong] if wrong else ["Nowhere."]
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", where]:
            Path(where).mkdir(parents=True, exist_ok=True)
            write(Path(where))
        case ["run", engine, where]:
            run(engine, Path(where))
        case ["table", where]:
            print(table(Path(where)))
        case _:
            sys.exit(__doc__)
