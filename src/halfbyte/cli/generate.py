"""halfbyte generate: text from a packed model, streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .drawing import MinP, RepeatPenalty, Seed, Stop, Temperature, TopK, TopP
from .engine import ActivationsOption, Engine, EngineOption, text_model
from .opening import AllowUnknown, BackendOption, ConfigOption, DeviceOption, DtypeOption
from .terminal import human_bytes, human_count, print_json, print_wrapped


def generate(
    path: Annotated[Path, typer.Argument(help="A folder, a .safetensors or .gguf file, or any shard of a split one.")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="The text to continue; - reads it from standard input. Several at once.")
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repeat_penalty: RepeatPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    activations: ActivationsOption = "exact",
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    engine: EngineOption = Engine.auto,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every piece as it comes, then the summary.")] = False,
) -> int:
    """Continue a text, or several at once. The weights stay packed; text goes to standard output,
    summaries to standard error.
    """
    from ..generation.single import Generation, Sampling

    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repeat_penalty)
    loaded = text_model(
        path,
        "generate",
        engine,
        activations=activations,
        backend=backend,
        device=device,
        dtype=dtype,
        prompts=len(prompt),
        config=config,
        allow_unknown=allow_unknown,
    )
    model, tokenizer, size, ready_s = loaded.model, loaded.tokenizer, loaded.size, loaded.ready_s
    facts = {"path": str(loaded.path), "activations": activations, "engine": loaded.engine}
    texts = [sys.stdin.read() if p == "-" else p for p in prompt]
    if len(texts) > 1:
        from ..generation.batch import BatchGeneration

        batch = BatchGeneration(model, tokenizer, texts, max_tokens=max_tokens, sampling=sampling, stop=stop or ())
        _several(batch, texts, facts, size, ready_s, json)
        return 0
    generation = Generation(model, tokenizer, texts[0], max_tokens=max_tokens, sampling=sampling, stop=stop or ())
    for piece in generation:
        if json:
            print_json({"record": "piece", "token": piece.token, "text": piece.text})
        else:
            print(piece.text, end="")
        sys.stdout.flush()
    record = summary(generation, size, ready_s)
    if json:
        print_json({"record": "summary", **facts, **record})
    else:
        print(flush=True)
        print_wrapped(sentence(record), stream=sys.stderr)
    return 0


def _several(batch: Any, texts: list[str], facts: dict[str, str], size: Any, ready_s: float, json: bool) -> None:
    """Pieces of every text as they come with --json, else each text whole when all are done."""
    for index, piece in batch:
        if json:
            print_json({"record": "piece", "prompt": index, "token": piece.token, "text": piece.text})
            sys.stdout.flush()
    for index, generation in enumerate(batch.texts):
        record = summary(generation, size, ready_s)
        if json:
            print_json({"record": "summary", "prompt": index, **facts, **record})
        else:
            print(f"{texts[index]}{generation.text}\n", flush=True)
            print_wrapped(sentence(record), stream=sys.stderr)


def summary(generation: Any, size: Any, ready_s: float) -> dict[str, Any]:
    """What a generation cost, in the words of `--json`."""
    prompt_tokens, new = len(generation.prompt_ids), len(generation.tokens)
    return {
        "text": generation.text, "stopped": generation.stopped, "prompt_tokens": prompt_tokens, "tokens": new,
        "bytes": size.nbytes, "weights": size.weights, "bits_per_weight": round(size.bits_per_weight, 4),
        "ready_s": round(ready_s, 3), "prompt_s": round(generation.prompt_seconds, 3),
        "seconds": round(generation.prompt_seconds + generation.decode_seconds, 3),
        "prompt_tokens_per_s": round(prompt_tokens / generation.prompt_seconds, 2) if generation.prompt_seconds else 0.0,
        "tokens_per_s": round(generation.tokens_per_s, 2), "peak_memory_bytes": peak_memory(),
    }  # fmt: skip


def sentence(record: dict[str, Any]) -> str:
    """The summary in one line."""
    peak = f", peak memory {human_bytes(record['peak_memory_bytes'])}" if record["peak_memory_bytes"] else ""
    return (
        f"{human_bytes(record['bytes'])} in memory for {human_count(record['weights'])} weights, {record['bits_per_weight']:.2f} "
        f"bits/weight; ready in {record['ready_s']:.1f} s; {record['prompt_tokens']} + {record['tokens']} tokens in "
        f"{record['seconds']:.1f} s, {record['tokens_per_s']:.2f} tokens/s{peak}"
    )


def peak_memory() -> int:
    """Largest resident memory so far in bytes, mapped files included (VmHWM); 0 where the system
    does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
