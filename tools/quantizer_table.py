"""Divergence, perplexity and bits of every quantizer on one model: the tables of
benchmarks/quantize.md.

    python tools/quantizer_table.py gemma-3-270m-q4_k_m.gguf --text eval.txt \
        --calibration own.{seed}.txt --seeds 0,1,2 --out table.jsonl --device cuda --workers 12

The dense stand-in is what the file's own blocks decode to. The seven projections of each layer are
quantized, embedding, head and norms kept. `llama.cpp` and `mlx` round as those do. A method may
have options: "gptq act-order", "learned steps=50 distill=200". A line of --out is a cell, with the
sums of each chunk; what --out has already is not measured again. {seed} in --calibration becomes
the seed, which also decides learned's order of sequences. Each worker is a process of one thread;
the model runs on --device.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

import torch
from halfbyte import QTensor, format_named, quantize
from halfbyte.calibration import LearningOptions, calibrate
from halfbyte.calibration import walk as walking
from halfbyte.calibration.sources import layer_source
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.conversion.quantize import model_to_round
from halfbyte.conversion.recipe import recipe_of
from halfbyte.evaluation import llama_cpp
from halfbyte.evaluation.compare import paired
from halfbyte.evaluation.perplexity import Perplexity, scored_logits, targets_of
from halfbyte.quantizers import mse
from halfbyte.tensor.concat import take_rows
from halfbyte.torch.modules import QEmbedding, QLinear
from halfbyte.transformers import load_model
from torch import nn

FORMATS = ("mxfp4", "nvfp4", "int4:g128", "uint4:g64", "affine4:g64", "q4_0")
PRODUCERS = {"llama.cpp": ("gguf", ("mxfp4", "q4_0")), "mlx": ("mlx", ("mxfp4", "nvfp4", "affine4:g64"))}
"""Method that is a producer's own rounding -> its policy, and the codecs it has."""
SECONDS = {
    "learned": 200, "awq": 100, "gptq": 60, "mse calibrated": 25, "mse": 25, "llama.cpp": 9, "mlx": 9, "rtn": 5, "none": 5,
}  # fmt: skip
"""Method -> about what a cell takes, NVFP4 twice that: long ones go first, unless --as-given."""
UNCALIBRATED = ("rtn", "mse", "none", *PRODUCERS)


def main() -> None:
    """Measure what is asked for, a line of JSON each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--calibration", required=True)
    arguments.add_argument("--seeds", default="0")
    arguments.add_argument("--name", default="", help="of the text, for the lines")
    arguments.add_argument("--as-given", action="store_true", help="cells by seed, format and method in the order given")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--chunks", type=int, default=40)
    arguments.add_argument("--sequences", type=int, default=32)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--walk", help="where calibration runs; --device unless given")
    arguments.add_argument("--rounding", choices=("cpu", "walk"), default="cpu", help="on the CPU, or where calibration runs")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--formats", default=",".join(FORMATS))
    arguments.add_argument("--methods", default=",".join(SECONDS))
    a = arguments.parse_args()
    held = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    done = {(d["codec"], d["method"], d["seed"], d["text"]) for d in held if len(d["losses"]) == a.chunks}
    cells = []
    for seed in map(int, a.seeds.split(",")):
        for codec in a.formats.split(","):
            for method in a.methods.split(","):
                if method not in PRODUCERS or codec in PRODUCERS[method][1]:
                    key = ("none" if method == "none" else codec, method, 0 if method in UNCALIBRATED else seed)
                    cells += [key] if key not in cells and (*key, a.name) not in done else []
    if not a.as_given:
        cells.sort(key=lambda cell: -SECONDS.get(cell[1], SECONDS[cell[1].split()[0]]) * (2 if cell[0] == "nvfp4" else 1))
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    given = (a.model, a.text, a.calibration, a.context, a.sequences, a.chunks, a.device, a.walk or a.device, a.rounding)
    failed = []
    with ProcessPoolExecutor(min(a.workers, len(cells)) or 1, multiprocessing.get_context("spawn"), begin, given) as pool:
        futures = {pool.submit(cell, *c): c for c in cells}
        for future in as_completed(futures):
            if future.exception() is not None:
                failed.append(futures[future])
                traceback.print_exception(future.exception())
                continue
            line = future.result()
            with a.out.open("a") as f:
                f.write(json.dumps(line | {"text": a.name}) + "\n")
            print({k: v for k, v in line.items() if k not in ("losses", "chunk_kl")}, flush=True)
    if failed:
        raise SystemExit(f"without a result: {failed}")


def begin(*given: Any) -> None:
    """Load the model, once a process."""
    global TABLE  # what a worker keeps between cells
    *given, rounding = given
    torch.set_num_threads(1)
    if rounding == "cpu":
        walking.on_tensors = lambda fmt: False  # one GPU is slower than the cores for many small models at a time
    TABLE = Table(*given)


def cell(codec: str, method: str, seed: int) -> dict[str, Any]:
    """The line of a configuration."""
    return TABLE.cell(codec, method, seed)


def dense_in_place(model: nn.Module, everywhere: bool) -> dict[str, nn.Linear]:
    """Packed linear modules inside layers (the head and the embedding too: `everywhere`) become
    dense ones of the same values.
    """
    out = {}
    for path, module in list(model.named_modules()):
        inside = ".layers." in path
        if isinstance(module, QLinear) and (inside or everywhere):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(torch.from_numpy(module.weight.canonical().dequantize("float32")), requires_grad=False)
            model.set_submodule(path, plain)
            if inside:
                out[path] = plain
        elif isinstance(module, QEmbedding) and everywhere:
            table = torch.from_numpy(module.weight.canonical().dequantize("float32"))
            model.set_submodule(path, nn.Embedding.from_pretrained(table if module.scale is None else table * module.scale))
    return out


class Table:
    """The model with dense projections, and what its cells need."""

    def __init__(
        self, path: Path, text: Path, calibration: str, context: int, sequences: int, chunks: int, device: str, walk: str
    ) -> None:
        self.path, self.calibration, self.context, self.sequences = path, calibration, context, sequences
        self.device, self.walk = device, walk
        self.model, tokenizer = load_model(path)
        ids = tokenizer(text.read_text(encoding="utf-8")[: chunks * 4000], add_special_tokens=False)["input_ids"]
        self.windows = llama_cpp(ids, 512, tokenizer.bos_token_id, chunks)
        assert len(self.windows) == chunks, f"{text} has {len(self.windows)} chunks"
        self.linear = dense_in_place(self.model, everywhere=device != "cpu")
        self.original = {p: m.weight.numpy().copy() for p, m in self.linear.items()}
        self.model.to(device)
        self.dense = deepcopy(self.model)
        self.norms = {n: p.detach().clone() for n, p in self.model.named_parameters() if "norm" in n}
        with open_checkpoint(path) as checkpoint:
            # Calibration for a folder walks a GGUF under the folder's names, too.
            self.source = layer_source(model_to_round(checkpoint, recipe_of("halfbyte:int4:g128")), "cpu")
        self.path_of = {key: slot.path for key, slot in self.source.slots.items()}

    def in_model_order(self, key: str, q: QTensor) -> QTensor:
        """Rows of a GGUF's query and key may lie in another order than the model's."""
        order = self.source.rows(key, q.shape[0])
        return q if order is None else take_rows(q, order)

    def put(self, name: str, value: Any) -> None:
        """Another value of a parameter, written in place: a norm that is computed in one call looks
        at the version.
        """
        with torch.no_grad():
            self.model.get_parameter(name).copy_(torch.as_tensor(value))

    def cell(self, codec: str, method: str, seed: int) -> dict[str, Any]:
        """The line of a configuration; of each chunk Σ −ln p, Σ (ln p)², and the mean divergence
        from the dense model.
        """
        start = time.perf_counter()
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        weights, replaced, seconds = ({}, {}, 0.0) if method == "none" else self.weights(codec, method, seed)
        wall = time.perf_counter() - start
        errors, bits = [0.0, 0.0], [0, 0]
        for path, q in weights.items():
            value, was = q.dequantize("float32"), self.original[path]
            errors[0] += float(np.square(value - was, dtype=np.float64).sum())
            errors[1] += float(np.square(was, dtype=np.float64).sum())
            bits[0], bits[1] = bits[0] + 8 * q.nbytes, bits[1] + q.size
            self.put(path + ".weight", value)
        for key, array in replaced.items():
            # GGUF holds Gemma's norms as 1 + w.
            self.put(self.path_of[key] + ".weight", np.asarray(array, np.float32) - np.float32(self.source.offset(key)))
        losses, kl = [], []
        for window in self.windows:
            target = targets_of(window, self.device)
            pair = paired(scored_logits(self.dense, window)[0], scored_logits(self.model, window)[0], target)
            losses.append([float(pair.model.sum()), float(pair.model.square().sum())])
            kl.append(float(pair.kl.mean()))
        for path, w in self.original.items():
            self.put(path + ".weight", w)
        for name, p in self.norms.items():
            self.put(name, p)
        tokens = sum(len(w.tokens) - w.first for w in self.windows)
        result = Perplexity(tokens, sum(x for x, _ in losses), sum(x for _, x in losses))
        return {
            "codec": codec, "method": method, "seed": seed, "kl": float(np.mean(kl)),
            "kl_error": float(np.std(kl, ddof=1) / math.sqrt(len(kl))) if len(kl) > 1 else 0.0, "perplexity": result.value,
            "error": result.error, "tokens": tokens, "sequences": self.sequences, "context": self.context,
            "bits_per_weight": bits[0] / bits[1] if bits[1] else 0.0,
            "relative_rms": math.sqrt(errors[0] / errors[1]) if errors[1] else 0.0, "cpu_s": round(seconds, 1),
            "wall_s": round(wall, 1), "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),  # 0 on the CPU
            "device": self.device, "losses": losses, "chunk_kl": kl,
        }  # fmt: skip

    def weights(self, codec: str, method: str, seed: int) -> tuple[dict[str, QTensor], dict[str, Any], float]:
        """(packed weights by path, dense tensors that change, processor seconds)."""
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
            word, *options = method.split()
            learning = LearningOptions(seed=seed, **{k: int(v) for k, _, v in (o.partition("=") for o in options) if v})
            with open_checkpoint(self.path) as checkpoint:
                found = calibrate(
                    checkpoint,
                    recipe_of(f"halfbyte:{codec}"),
                    self.calibration.replace("{seed}", str(seed)),
                    word,
                    context=self.context,
                    sequences=self.sequences,
                    act_order="act-order" in options,
                    device=self.walk,
                    learning=learning,
                    from_packed=True,
                )
            weights = {self.path_of[key]: self.in_model_order(key, q) for key, q in found.weights.items()}
            replaced = found.replaced
        return weights, replaced, time.process_time() - start


if __name__ == "__main__":
    main()
