"""What other codecs would cost a model: a Markdown table of perplexity, agreement, divergence, cosine and bytes.

    python tools/requantize_table.py MODEL --text FILE [--context 512] [--chunks 8] [--codecs mxfp4,nvfp4,int4:g64]

The model as it is is the baseline, run once; each codec takes its packed matrices, embedding and head included, rounded to
nearest from their exact values.
"""

from __future__ import annotations

import argparse
from typing import Any

from halfbyte.evaluation import Thresholds, compare, windows_of
from halfbyte.evaluation.requantize import requantized
from halfbyte.evaluation.texts import read_text, tokens_of
from halfbyte.transformers import load_model, model_size

LIMITS = Thresholds(max_ppl_increase=0.01, min_agreement=0.95, min_cosine=0.99)
HEAD = "| codec | bytes, MB | perplexity | ± | change, % | equal tokens, % | KL mean | median | 99 % | least cosine | within |"


class Remembered:
    """A model that runs once for each window."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.answers = model, model.config, {}

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def __call__(self, input_ids: Any, **options: Any) -> Any:
        key = tuple(input_ids[0].tolist())
        if key not in self.answers:
            self.answers[key] = self.model(input_ids=input_ids, **options)
        return self.answers[key]


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--codecs", default="mxfp4,nvfp4,int4:g64,affine4:g64,q4_0")
    given = parser.parse_args()
    model, tokenizer = load_model(given.model)
    ids, bos = tokens_of(tokenizer, read_text(given.text))
    windows = windows_of(ids, "llama.cpp", given.context, bos=bos, chunks=given.chunks)
    baseline = Remembered(model)
    print(HEAD)
    print("|---" * (HEAD.count("|") - 1) + "|", flush=True)
    for i, codec in enumerate(given.codecs.split(",")):
        other = requantized(model, codec)
        measured = compare(other, baseline, windows)
        if i == 0:
            was = measured.baseline
            print(f"| as it is | {model_size(model).nbytes / 1e6:.1f} | {was.value:.3f} | {was.error:.2f} |" + " |" * 7)
        kept = [v.name.split("_")[1] for v in LIMITS.verdicts(measured) if v.kept]
        print(
            f"| {codec} | {model_size(other).nbytes / 1e6:.1f} | {measured.model.value:.3f} | {measured.model.error:.2f} "
            f"| {100 * measured.perplexity_increase:+.1f} | {100 * measured.agreement:.1f} | {measured.kl_mean:.3f} "
            f"| {measured.kl_median:.3f} | {measured.kl_p99:.2f} | {measured.least_cosine:.4f} | {', '.join(kept) or 'none'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
