"""Text that a model draws itself, for calibration: each token from the model's own distribution at
temperature 1, from its first token on, end tokens left out.

    python tools/own_text.py gemma-3-270m-q4_k_m.gguf --sequences 4096 --device cuda --out own.0.txt

One text, the sequences one after another with a blank line between them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from halfbyte.transformers import load_model
from transformers import GenerationConfig


def main() -> None:
    """Draw the text and write it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--sequences", type=int, default=256)
    arguments.add_argument("--tokens", type=int, default=512, help="of a sequence")
    arguments.add_argument("--batch", type=int, default=1024, help="sequences drawn at once")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--out", type=Path, required=True)
    a = arguments.parse_args()
    model, tokenizer = load_model(a.model)
    model.to(a.device)
    torch.manual_seed(a.seed)
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    drawing = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=a.tokens, max_new_tokens=a.tokens,
        suppress_tokens=ends or None, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    first = list(tokenizer("")["input_ids"])[:1] or [tokenizer.bos_token_id]
    texts: list[str] = []
    while len(texts) < a.sequences:
        rows = min(a.batch, a.sequences - len(texts))
        start = torch.tensor([first] * rows, device=a.device)
        with torch.inference_mode():
            drawn = model.generate(start, attention_mask=torch.ones_like(start), generation_config=drawing)
        texts += tokenizer.batch_decode(drawn[:, len(first) :], skip_special_tokens=True)
        print(f"{len(texts)} sequences", flush=True)
    a.out.write_text("\n\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
