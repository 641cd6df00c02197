"""Two processes that each hold half of a weight or model (sharding_worker.py), and the comparison
with one that holds all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import torch
from support.sharding_worker import tokens, weight

MODELS = [
    ("llama", "gptq3", {}), ("llama", "modelopt", {"num_key_value_heads": 4}), ("gemma3_text", "mlx-mxfp4", {}),
    ("phi3", "ct-int4", {}), ("mixtral", "gptq", {}), ("qwen3_moe", "ct-nvfp4", {}), ("gpt_oss", "gpt-oss", {}),
]  # fmt: skip


def run_two(store: Path, device: str, words: list[str], folders: list[Path]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Two processes over the formats and models; what each computed of the formats."""
    arguments = [str(store), device, ",".join(words), ",".join(map(str, folders))]
    worker = str(Path(__file__).with_name("sharding_worker.py"))
    apart = ["both"] if device == "cpu" else ["0", "1"]  # a fork imports once; CUDA wants no forks
    started = [subprocess.Popen([sys.executable, worker, r, *arguments], stderr=subprocess.PIPE, text=True) for r in apart]
    errors = [p.communicate(timeout=240)[1][-2000:] for p in started]
    assert not any(p.returncode for p in started), "".join(errors)
    return [torch.load(f"{store}.{r}.pt") for r in (0, 1)]


def write_models(tmp_path_factory) -> dict[str, Path]:
    from support.tiny_models import write_tiny

    folders = {}
    for arch, producer, changes in MODELS:
        folder = tmp_path_factory.mktemp("model")
        # Heads of 16 and groups of 32 inputs: two query heads make a group, so each rank's heads
        # end where a group does.
        write_tiny(folder, arch, producer, **{"num_key_value_heads": 2, **changes})
        folders[f"{arch} {producer}"] = folder
    return folders


def check_products(ranks: list[dict[str, torch.Tensor]], word: str) -> None:
    """Both ranks have the same, and it is the whole's within float32's rounding of the sums."""
    for name in ("whole", "rows", "inputs", "experts", "experts cut"):
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert bool(ranks[0][name].isfinite().all())
    found = ranks[0]
    size = tokens(3).abs().double() @ torch.from_numpy(np.abs(weight(word).dequantize("float64"))).T
    for cut in ("rows", "inputs"):
        assert bool(((found[cut] - found["whole"]).abs() <= 1e-6 * size).all()), cut
    scale = float(found["experts"].abs().max())
    assert scale > 0
    assert bool(((found["experts cut"] - found["experts"]).abs() <= 1e-6 * scale).all())


def check_model(folder: Path) -> None:
    """Logits and greedy text of both ranks are those of one process on the CPU."""
    from halfbyte.transformers import load_model
    from support.tiny_models import agree, ids, logits

    model = load_model(folder)[0]
    outs = [torch.load(folder / f"rank{r}.pt") for r in (0, 1)]
    assert torch.equal(*outs)
    assert agree(outs[0], logits(model, ids()))
    texts = [torch.load(folder / f"text{r}.pt") for r in (0, 1)]
    assert torch.equal(*texts)
    assert torch.equal(texts[0], model.generate(ids(4, 1), max_new_tokens=4, do_sample=False, eos_token_id=None))
