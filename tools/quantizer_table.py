"""Perplexity and bits of every quantizer on Gemma 3 270M: the table of docs/quantize.md.

    python tools/quantizer_table.py gemma-3-270m-q4_k_m.gguf --text eval.txt --calibration other.txt --out table.jsonl

The dense stand-in is what the file's own blocks decode to. The seven projections of each layer are quantized, embedding, head
and norms kept. `llama.cpp` and `mlx` round as those do. What --out has already is not measured again:
each line holds the sums of each chunk.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from halfbyte import QTensor, format_named, quantize
from halfbyte.calibration import calibrate
from halfbyte.calibration.sources import source_of
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.converting.recipe import recipe_of
from halfbyte.evaluation import llama_cpp
from halfbyte.evaluation.perplexity import Perplexity, losses_of, scored_logits, targets_of
from halfbyte.quantizers import mse
from halfbyte.torch.modules import QLinear
from halfbyte.transformers import load_model

FORMATS = ("mxfp4", "nvfp4", "int4:g128", "uint4:g64", "affine4:g64", "q4_0")
PRODUCERS = {"llama.cpp": ("gguf", ("mxfp4", "q4_0")), "mlx": ("mlx", ("mxfp4", "nvfp4", "affine4:g64"))}
"""Method that is a producer's own rounding -> its policy, and the codecs it has."""
METHODS = ("none", *PRODUCERS, "rtn", "mse", "gptq", "awq", "mse calibrated", "gptq act-order")


def dense_projections(model: nn.Module) -> dict[str, nn.Linear]:
    """The packed linear modules inside layers, replaced by dense ones with the same values."""
    out = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, QLinear) and ".layers." in path:
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(torch.from_numpy(module.weight.canonical().dequantize("float32")), requires_grad=False)
            model.set_submodule(path, plain)
            out[path] = plain
    return out


def main() -> None:
    """Measure what is asked for, a line of JSON each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--calibration", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--keep", type=Path, required=True, help="folder for the packed weights of each configuration")
    arguments.add_argument("--chunks", default="8", help="one or more, growing: 10,20,40 measures all on 10 first")
    arguments.add_argument("--sequences", type=int, default=16)
    arguments.add_argument("--context", type=int, default=256)
    arguments.add_argument("--formats", default=",".join(FORMATS))
    arguments.add_argument("--methods", default=",".join(METHODS))
    a = arguments.parse_args()
    a.keep.mkdir(parents=True, exist_ok=True)
    table = Table(a.model, a.text, a.calibration, a.keep, a.context, a.sequences, [int(c) for c in a.chunks.split(",")])
    cells = [("none", "none")] if "none" in a.methods.split(",") else []
    for method in a.methods.split(","):
        known = PRODUCERS[method][1] if method in PRODUCERS else FORMATS if method != "none" else ()
        cells += [(c, method) for c in a.formats.split(",") if c in known]
    for chunks in table.stages:
        for codec, method in cells:
            lines = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
            held = {(d["codec"], d["method"]): d for d in lines}
            line = held.get((codec, method), {"losses": []})
            if len(line["losses"]) >= chunks:
                continue
            held[codec, method] = table.cell(codec, method, line["losses"], chunks)
            a.out.write_text("".join(json.dumps(d) + "\n" for d in held.values()))
            print({k: v for k, v in held[codec, method].items() if k != "losses"}, flush=True)


class Table:
    """The model with dense projections, and what its cells need."""

    def __init__(
        self, path: Path, text: Path, calibration: Path, keep: Path, context: int, sequences: int, stages: list[int]
    ) -> None:
        self.path, self.calibration, self.keep, self.context, self.sequences = path, calibration, keep, context, sequences
        self.stages = stages
        self.model, tokenizer = load_model(path)
        ids = tokenizer(text.read_text(encoding="utf-8")[: max(stages) * 4000], add_special_tokens=False)["input_ids"]
        self.windows = llama_cpp(ids, 512, tokenizer.bos_token_id, max(stages))
        self.linear = dense_projections(self.model)
        self.original = {p: m.weight.numpy().copy() for p, m in self.linear.items()}
        self.norms = {n: p.detach().clone() for n, p in self.model.named_parameters() if "norm" in n}
        with open_checkpoint(path) as checkpoint:
            self.path_of = {key: p.removesuffix(".weight") for p, key in source_of(checkpoint, "cpu").keys.items()}

    def cell(self, codec: str, method: str, losses: list[list[float]], chunks: int) -> dict[str, Any]:
        """The line of a configuration, with the chunks that `losses` lacks measured; a pair a chunk: Σ −ln p, Σ (ln p)²."""
        weights, replaced, seconds = ({}, {}, 0.0) if method == "none" else self.weights(codec, method)
        errors, bits = [0.0, 0.0], [0, 0]
        for path, q in weights.items():
            value, was = q.dequantize("float32"), self.original[path]
            errors[0] += float(np.square(value - was, dtype=np.float64).sum())
            errors[1] += float(np.square(was, dtype=np.float64).sum())
            bits[0], bits[1] = bits[0] + 8 * q.nbytes, bits[1] + q.size
            self.linear[path].weight.data = torch.from_numpy(value)
        for key, array in replaced.items():
            # GGUF holds Gemma's norms as 1 + w.
            new = torch.from_numpy(np.asarray(array, np.float32) - np.float32(1))
            self.model.get_parameter(self.path_of[key] + ".weight").data = new
        for window in self.windows[len(losses) : chunks]:
            x = losses_of(scored_logits(self.model, window)[0], targets_of(window, "cpu"))
            losses = [*losses, [float(x.sum()), float((x * x).sum())]]
        for path, w in self.original.items():
            self.linear[path].weight.data = torch.from_numpy(w)
        for name, p in self.norms.items():
            self.model.get_parameter(name).data = p.clone()
        tokens = sum(len(w.tokens) - w.first for w in self.windows[: len(losses)])
        result = Perplexity(tokens, sum(x for x, _ in losses), sum(x for _, x in losses))
        return {
            "codec": codec, "method": method, "perplexity": result.value, "error": result.error, "tokens": tokens,
            "bits_per_weight": bits[0] / bits[1] if bits[1] else 0.0,
            "relative_rms": math.sqrt(errors[0] / errors[1]) if errors[1] else 0.0, "seconds": round(seconds, 1),
            "losses": losses,
        }  # fmt: skip

    def weights(self, codec: str, method: str) -> tuple[dict[str, QTensor], dict[str, Any], float]:
        """(packed weights by path, dense tensors that change, processor seconds), from --keep where they are there."""
        kept = self.keep / f"{codec} {method}.pickle".replace(":", "-")
        if kept.exists():
            with kept.open("rb") as f:
                return pickle.load(f)  # written below
        start, replaced = time.process_time(), {}
        fmt = format_named(codec)
        if method in PRODUCERS:
            # MLX's scales have the weight's dtype; llama.cpp's are float16 whatever it is.
            half = method == "mlx"
            policy = PRODUCERS[method][0]
            weights = {p: quantize(w.astype(np.float16) if half else w, codec, policy) for p, w in self.original.items()}
        elif method in ("rtn", "mse"):
            weights = {p: quantize(w, fmt) if method == "rtn" else mse(w, fmt) for p, w in self.original.items()}
        else:
            with open_checkpoint(self.path) as checkpoint:
                found = calibrate(
                    checkpoint, recipe_of(f"halfbyte:{codec}"), self.calibration, method.split()[0], context=self.context,
                    sequences=self.sequences, act_order="act-order" in method, device="cpu", from_packed=True,
                )  # fmt: skip
            weights, replaced = {self.path_of[m]: q for m, q in found.weights.items()}, found.replaced
        out = weights, replaced, time.process_time() - start
        with kept.open("wb") as f:
            pickle.dump(out, f)
        return out


if __name__ == "__main__":
    main()
