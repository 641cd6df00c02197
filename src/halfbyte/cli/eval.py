"""halfbyte eval: perplexity of a packed model, and what its bits cost beside another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UnsupportedError, plural
from .engine import ActivationsOption
from .generate import peak_memory
from .opening import (
    AllowUnknown,
    BackendOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    check_report,
    config_of,
    downloaded,
    open_with,
)
from .terminal import Column, human_bytes, print_json, print_table, print_wrapped, progress

_LAYERS = (Column("after"), Column("cosine", True), Column("smallest", True), Column("rel. RMS", True))
SHOWN = 5
"""Layers that the text output lists."""


def eval(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Checkpoints: folders, .safetensors or .gguf; each on the same text.")
    ],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text, or .jsonl with a `text` a line.")] = None,
    dataset: Annotated[str | None, typer.Option(help="NAME, NAME/CONFIG or either with :SPLIT, of the datasets package.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    chunks: Annotated[int | None, typer.Option(help="Most windows; all of the text by default.")] = None,
    protocol: Annotated[str, typer.Option(help="llama.cpp, or sliding.")] = "llama.cpp",
    stride: Annotated[int | None, typer.Option(help="Tokens between sliding windows; half the context by default.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Another checkpoint, of any format, to compare with.")] = None,
    against: Annotated[str | None, typer.Option(help="llama.cpp: its tokens, greedy text and logits of the same GGUF.")] = None,
    requantize: Annotated[str | None, typer.Option(help="Evaluate the model with its packed matrices in this codec.")] = None,
    max_ppl_increase: Annotated[str | None, typer.Option(help="1% or 0.01, over the baseline's perplexity.")] = None,
    min_agreement: Annotated[str | None, typer.Option(help="95% or 0.95 equal greedy tokens.")] = None,
    min_cosine: Annotated[str | None, typer.Option(help="0.99 for every layer and the embedding.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots here.")] = None,
    activations: ActivationsOption = "exact",
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    baseline_config: Annotated[str | None, typer.Option(help="As --config, for the baseline.")] = None,
    baseline_allow_unknown: Annotated[list[str] | None, typer.Option(help="As --allow-unknown, for the baseline.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: the evaluation, then every layer and limit.")] = False,
) -> int:
    """Perplexity; with --baseline (or --requantize) also equal tokens, KL divergence and cosines by
    layer, of one checkpoint or several; with --against llama.cpp the same file's tokens, greedy
    text and divergence there.

    Exit status: 0 when every limit is kept, 1 when one is not, 2 when there is no answer.
    """
    paths = [downloaded(path) for path in paths]
    for path in paths:
        open_with(path, config, allow_unknown).close()  # what is damaged is reported before torch is imported
    if baseline is not None:
        baseline = downloaded(baseline)
        open_with(baseline, baseline_config, baseline_allow_unknown).close()
    from ..checkpoints.io.safe_files import replace_text
    from ..evaluation import Thresholds, compare, perplexity, windows_of
    from ..evaluation.llama_cpp import against_llama_cpp
    from ..evaluation.protocols import EvaluationError
    from ..evaluation.requantize import requantized
    from ..evaluation.texts import dataset_text, read_text, tokens_of
    from ..evaluation.thresholds import fraction
    from ..reports.evaluation import Evaluated
    from ..reports.evaluation import report as page
    from ..transformers import load_model, model_size

    if against is not None:
        for path in paths:
            _check_against(against, path, (baseline, requantize, report))
    given = {"max_ppl_increase": max_ppl_increase, "min_agreement": min_agreement, "min_cosine": min_cosine}
    if baseline is None and (baseline_config is not None or baseline_allow_unknown):
        raise EvaluationError("[eval] --baseline-config and --baseline-allow-unknown are for --baseline; give that too")
    limits = Thresholds(**{k: fraction(v, f"--{k.replace('_', '-')}") for k, v in given.items() if v is not None})
    if limits and baseline is None and requantize is None:
        raise EvaluationError("[eval] a limit needs something to compare with; give --baseline, or --requantize")
    if (text is None) == (dataset is None):
        raise EvaluationError("[eval] give --text FILE or --dataset NAME, one of them")
    check_report(report, "eval")
    words = read_text(text) if text is not None else dataset_text(dataset or "")
    options: dict[str, Any] = {"activations": activations, "backend": backend, "device": device, "dtype": dtype}
    other = None
    if baseline is not None:
        reading: dict[str, Any] = {"config": config_of(baseline_config), "allow_unknown": baseline_allow_unknown or ()}
        other = load_model(baseline, **options, **reading)[0]
    evaluated = []
    for path in paths:
        model, tokenizer = load_model(path, **options, config=config_of(config), allow_unknown=allow_unknown or ())
        if tokenizer is None:
            raise UnsupportedError(f"[eval] {path} has no tokenizer; put its tokenizer.json beside the weights")
        ids, bos = tokens_of(tokenizer, words)
        windows = windows_of(ids, protocol, context, stride=stride, bos=bos, chunks=chunks)
        beside = model if other is None and requantize is not None else other
        if requantize is not None:
            model = requantized(model, requantize)
        start = time.perf_counter()
        with progress("evaluating") as update:
            theirs = (
                None
                if against is None
                else against_llama_cpp(path, model, tokenizer, words, windows, update, _other_class(path, options))
            )
            comparison = None if beside is None else compare(model, beside, windows, update)
            found = comparison or theirs
            measured = perplexity(model, windows, update) if found is None else found.model
        seconds = time.perf_counter() - start
        size = model_size(model)
        record: dict[str, Any] = {
            "path": str(path), "text": str(text or dataset), "protocol": protocol, "context": context, "chunks": len(windows),
            "tokens": measured.tokens, "perplexity": measured.value, "perplexity_error": measured.error, "nll": measured.nll,
            "activations": activations, "device": device, "dtype": str(model.dtype).removeprefix("torch."),
            "requantized": requantize, "bytes": size.nbytes, "bits_per_weight": round(size.bits_per_weight, 4),
            "seconds": round(seconds, 3), "tokens_per_s": round(sum(len(w.tokens) for w in windows) / seconds, 2),
            "peak_memory_bytes": peak_memory(),
        }  # fmt: skip
        if theirs is not None:
            record |= {"against": against, **theirs.record()}
        if comparison is not None:
            base = model_size(beside)
            record |= {
                "baseline": str(baseline or path), "baseline_perplexity": comparison.baseline.value,
                "baseline_bytes": base.nbytes, "perplexity_increase": comparison.perplexity_increase,
                "agreement": comparison.agreement, "kl_mean": comparison.kl_mean, "kl_median": comparison.kl_median,
                "kl_p99": comparison.kl_p99, "embedding_cosine": comparison.embedding.cosine,
                "pooled_cosine": comparison.pooled, "least_cosine": comparison.least_cosine,
            }  # fmt: skip
        verdicts = [] if comparison is None else limits.verdicts(comparison)
        evaluated.append(Evaluated(record, comparison, verdicts))
        if json:
            print_json({"record": "evaluation", **record})
            for drift in () if comparison is None else comparison.worst():
                measures = {"cosine": drift.cosine, "least_cosine": drift.least, "relative_rms": drift.relative_rms}
                print_json({"record": "layer", "layer": drift.layer, "name": drift.name, **measures})
            for verdict in verdicts:
                print_json({"record": "limit", **asdict(verdict)})
        else:
            if len(evaluated) > 1:
                print()
            _print(record, comparison, verdicts)
        del model, beside
    if report is not None:
        replace_text(report, page(evaluated))
    return int(not all(v.kept for one in evaluated for v in one.verdicts))


def _print(record: dict[str, Any], comparison: Any, verdicts: list[Any]) -> None:
    windows = f"{plural(record['chunks'], 'window')} of {record['context']} tokens, {record['protocol']} protocol"
    print_wrapped(f"{record['path']}: {windows}, {plural(record['tokens'], 'token')} scored")
    print_wrapped(f"perplexity {record['perplexity']:.4f} ± {record['perplexity_error']:.4f}")
    print_wrapped(
        f"{human_bytes(record['bytes'])}, {record['bits_per_weight']:.2f} bits/weight; {record['tokens_per_s']:.1f} tokens/s"
    )
    if record.get("against"):
        _print_against(record)
    if comparison is None:
        return
    print()
    print_wrapped(f"beside {record['baseline']} ({human_bytes(record['baseline_bytes'])}):")
    print_wrapped(f"perplexity {record['baseline_perplexity']:.4f} there, {100 * record['perplexity_increase']:+.2f} %")
    print_wrapped(f"equal greedy tokens {100 * record['agreement']:.2f} %")
    kl = f"mean {record['kl_mean']:.4g}, median {record['kl_median']:.4g}, 99th percentile {record['kl_p99']:.4g}"
    print_wrapped(f"KL divergence, nats: {kl}")
    print_wrapped(f"cosine: embedding {record['embedding_cosine']:.6f}, pooled {record['pooled_cosine']:.6f}")
    print()
    worst = comparison.worst()
    rows = [[d.name, f"{d.cosine:.6f}", f"{d.least:.6f}", f"{d.relative_rms:.4g}"] for d in worst[:SHOWN]]
    print_table(_LAYERS, rows)
    if len(worst) > SHOWN:
        print_wrapped(f"and {len(worst) - SHOWN} better ones; --json and --report list all")
    for v in verdicts:
        print_wrapped(f"{v.words} {v.measured} ({v.allowed} wanted): {'kept' if v.kept else 'missed'}")


def _other_class(path: Path, options: dict[str, Any]) -> Callable[[], Any] | None:
    """Loads the model in the other class of activations, where there is one."""
    classes = {"exact": "int8", "int8": "exact"}
    if options["device"] != "cpu" or options["activations"] not in classes:
        return None
    from ..transformers import load_model

    return lambda: load_model(path, **options | {"activations": classes[options["activations"]]})[0]


def _check_against(against: str, path: Path, others: tuple[object, ...]) -> None:
    """What --against takes: llama.cpp, a GGUF, and no other comparison."""
    from ..evaluation.protocols import EvaluationError

    if against != "llama.cpp":
        raise EvaluationError(f"[eval] --against {against}; allowed: llama.cpp")
    if path.suffix != ".gguf":
        raise EvaluationError(f"[eval] --against llama.cpp reads the same file, a .gguf; {path} is none. Give --baseline instead")
    if any(o is not None for o in others):
        raise EvaluationError("[eval] --against is a comparison of its own; give no --baseline, --requantize or --report with it")


def _print_against(record: dict[str, Any]) -> None:
    at = record["tokens_differ_at"]
    print()
    print_wrapped(f"beside {record['against']}, from the same file:")
    print_wrapped(
        "tokens of the text: all equal" if at is None else f"tokens of the text: the first {at:,} equal, the next is not"
    )
    print_wrapped(f"perplexity {record['llama_cpp_perplexity']:.4f} there; equal greedy tokens {100 * record['agreement']:.2f} %")
    print_wrapped(f"KL divergence, nats: mean {record['kl_mean']:.4g}, 99th percentile {record['kl_p99']:.4g}")
    equal, ties, tokens = (record[f"greedy_{key}"] for key in ("equal", "ties", "tokens"))
    near = f", {ties} within {record['gap_error']:.2g}, by which rounded activations move the gap" if ties else ""
    rest = f", {tokens - equal - ties} others" if equal + ties < tokens else ""
    print_wrapped(f"greedy text: {equal} of {tokens} tokens equal{near}{rest}")
