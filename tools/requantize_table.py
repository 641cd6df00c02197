"""What other codecs would cost a model: a Markdown table of perplexity, agreement, divergence,
cosine and bytes.

    python tools/requantize_table.py MODEL --text FILE [--chunks 8] [--codecs mxfp4,nvfp4]
    [--activations int8] [--out FILE]

The model as it is is the baseline; each codec takes its packed matrices, embedding and head
included, rounded to nearest from their exact values. `--out` keeps each row as a JSON line, and a
run that finds it there does not compute it again. The baseline runs beside every codec, for to keep
its logits over 40 chunks of 512 would take 11 GB.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from halfbyte.evaluation import Thresholds, compare, windows_of
from halfbyte.evaluation.requantize import requantized
from halfbyte.evaluation.texts import read_text, tokens_of
from halfbyte.transformers import load_model, model_size

LIMITS = Thresholds(max_ppl_increase=0.01, min_agreement=0.95, min_cosine=0.99)
HEAD = "| codec | bytes, MB | perplexity | ± | change, % | equal tokens, % | KL mean | median | 99 % | least cosine | within |"


def measure(model: Any, windows: Any, codec: str) -> dict[str, Any]:
    """One codec's figures, and the baseline's."""
    start = time.process_time()
    other = requantized(model, codec)
    measured = compare(other, model, windows)
    worst = measured.worst()[0]
    return {
        "codec": codec, "bytes": model_size(other).nbytes, "perplexity": measured.model.value,
        "perplexity_error": measured.model.error, "perplexity_increase": measured.perplexity_increase,
        "agreement": measured.agreement, "kl_mean": measured.kl_mean, "kl_median": measured.kl_median, "kl_p99": measured.kl_p99,
        "least_cosine": measured.least_cosine, "worst": worst.name,
        "kept": [v.name.split("_")[1] for v in LIMITS.verdicts(measured) if v.kept], "baseline_bytes": model_size(model).nbytes,
        "baseline_perplexity": measured.baseline.value, "baseline_error": measured.baseline.error,
        "cpu_seconds": time.process_time() - start,
    }  # fmt: skip


def row(r: dict[str, Any]) -> str:
    """A line of the table."""
    return (
        f"| {r['codec']} | {r['bytes'] / 1e6:.1f} | {r['perplexity']:.3f} | {r['perplexity_error']:.2f} "
        f"| {100 * r['perplexity_increase']:+.1f} | {100 * r['agreement']:.1f} | {r['kl_mean']:.3f} | {r['kl_median']:.3f} "
        f"| {r['kl_p99']:.2f} | {r['least_cosine']:.4f} ({r['worst']}) | {', '.join(r['kept']) or 'none'} |"
    )


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--codecs", default="mxfp4,nvfp4,int4:g64,affine4:g64,q4_0")
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    setting = {"context": given.context, "chunks": given.chunks, "activations": given.activations}
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out and given.out.exists() else []
    known = {r["codec"]: r for r in lines if all(r[k] == v for k, v in setting.items())}
    model, tokenizer = load_model(given.model, activations=given.activations)
    ids, bos = tokens_of(tokenizer, read_text(given.text))
    windows = windows_of(ids, "llama.cpp", given.context, bos=bos, chunks=given.chunks)
    print(HEAD)
    print("|---" * (HEAD.count("|") - 1) + "|", flush=True)
    for i, codec in enumerate(given.codecs.split(",")):
        r = known.get(codec) or measure(model, windows, codec) | setting
        if given.out and codec not in known:
            with given.out.open("a") as out:
                out.write(json.dumps(r) + "\n")
        if i == 0:
            was = f"{r['baseline_bytes'] / 1e6:.1f} | {r['baseline_perplexity']:.3f} | {r['baseline_error']:.2f}"
            print(f"| as it is | {was} |" + " |" * 7)
        print(row(r), flush=True)


if __name__ == "__main__":
    main()
