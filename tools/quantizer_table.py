"""Perplexity and bits of every quantizer on Gemma 3 270M: the table of docs/quantize.md.

    python tools/quantizer_table.py gemma-3-270m-q4_k_m.gguf --text eval.txt --calibration other.txt --out table.jsonl

The dense stand-in is what the file's own blocks decode to. The seven projections of each layer are quantized, embedding, head
and norms kept. `producer` rounds as llama.cpp (q4_0, mxfp4) or MLX (affine4) does. A configuration that --out already has is
skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from halfbyte import format_named, quantize
from halfbyte.calibration import calibrate
from halfbyte.calibration.sources import source_of
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.converting.recipe import recipe_of
from halfbyte.evaluation import llama_cpp, perplexity
from halfbyte.quantizers import mse
from halfbyte.torch.modules import QLinear
from halfbyte.transformers import load_model

FORMATS = {"mxfp4": "gguf", "q4_0": "gguf", "nvfp4": "", "int4:g128": "", "affine4:g64": "mlx", "uint4:g64": ""}
"""Codec -> the producer whose own rounding stands beside ours."""
METHODS = ("rtn", "mse", "mse calibrated", "gptq", "gptq act-order", "awq")


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
    arguments.add_argument("--chunks", type=int, default=8)
    arguments.add_argument("--sequences", type=int, default=16)
    arguments.add_argument("--context", type=int, default=256)
    arguments.add_argument("--formats", default=",".join(FORMATS))
    arguments.add_argument("--methods", default=",".join(("none", "producer", *METHODS)))
    a = arguments.parse_args()
    done = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    have = {(d["codec"], d["method"]) for d in done}

    model, tokenizer = load_model(a.model)
    ids = tokenizer(a.text.read_text(encoding="utf-8")[: a.chunks * 4000], add_special_tokens=False)["input_ids"]
    windows = llama_cpp(ids, 512, tokenizer.bos_token_id, a.chunks)
    linear = dense_projections(model)
    original = {path: m.weight.numpy().copy() for path, m in linear.items()}
    norms = {n: p.detach().clone() for n, p in model.named_parameters() if "norm" in n}
    with open_checkpoint(a.model) as checkpoint:
        source = source_of(checkpoint, "cpu")
    path_of = {key: path.removesuffix(".weight") for path, key in source.keys.items()}

    def record(codec: str, method: str, weights: dict, replaced: dict, seconds: float) -> None:
        errors, bits = [0.0, 0.0], [0, 0]
        for path, q in weights.items():
            value = q.dequantize("float32")
            errors[0] += float(np.square(value - original[path], dtype=np.float64).sum())
            errors[1] += float(np.square(original[path], dtype=np.float64).sum())
            bits[0], bits[1] = bits[0] + 8 * q.nbytes, bits[1] + q.size
            linear[path].weight.data = torch.from_numpy(value)
        for key, array in replaced.items():
            # GGUF holds Gemma's norms as 1 + w.
            model.get_parameter(path_of[key] + ".weight").data = torch.from_numpy(np.asarray(array, np.float32) - np.float32(1))
        result = perplexity(model, windows)
        line = {
            "codec": codec, "method": method, "perplexity": result.value, "error": result.error, "tokens": result.tokens,
            "bits_per_weight": bits[0] / bits[1] if bits[1] else 0.0,
            "relative_rms": math.sqrt(errors[0] / errors[1]) if errors[1] else 0.0, "seconds": round(seconds, 1),
        }  # fmt: skip
        with a.out.open("a") as f:
            f.write(json.dumps(line) + "\n")
        print(line, flush=True)
        for path, w in original.items():
            linear[path].weight.data = torch.from_numpy(w)
        for name, p in norms.items():
            model.get_parameter(name).data = p.clone()

    for method in a.methods.split(","):
        for codec in a.formats.split(","):
            producer = FORMATS[codec]
            if method == "none":
                if ("none", "none") not in have:
                    record("none", "none", {}, {}, 0.0)
                    have.add(("none", "none"))
                continue
            if (codec, method) in have or (method == "producer" and not producer):
                continue
            start, replaced = time.perf_counter(), {}
            fmt = format_named(codec)
            if method == "producer":
                half = producer == "mlx"
                weights = {p: quantize(w.astype(np.float16) if half else w, codec, producer) for p, w in original.items()}
            elif method in ("rtn", "mse"):
                weights = {p: quantize(w, fmt) if method == "rtn" else mse(w, fmt) for p, w in original.items()}
            else:
                with open_checkpoint(a.model) as checkpoint:
                    found = calibrate(
                        checkpoint, recipe_of(f"halfbyte:{codec}"), a.calibration, method.split()[0], context=a.context,
                        sequences=a.sequences, act_order="act-order" in method, device="cpu", from_packed=True,
                    )  # fmt: skip
                weights, replaced = {path_of[m]: q for m, q in found.weights.items()}, found.replaced
            record(codec, method, weights, replaced, time.perf_counter() - start)


if __name__ == "__main__":
    main()
