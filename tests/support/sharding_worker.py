"""One of two processes, or `both`, forked behind the imports: python sharding_worker.py RANK STORE
DEVICE WORDS FOLDERS

What it computes goes to files that the test reads: STORE.RANK.pt for the formats, rankR.pt and
textR.pt in each model's folder. DEVICE is cpu (gloo) or cuda (NCCL, a GPU a rank). WORDS and
FOLDERS are lists with commas, "" for none.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch.distributed as dist

import halfbyte as hb
import torch
from halfbyte.formats import family_of
from halfbyte.tensor.shard import input_unit, split
from halfbyte.torch import QExperts, QLinear
from halfbyte.torch.tensor_parallel import cut_experts, cut_inputs, cut_rows
from support.memory_checkpoint import packed

N, K, EXPERTS, F = 32, 1024, 4, 256


@cache
def ordinary_blocks(word: str) -> np.ndarray:
    """Of 4096 random blocks of a raw ggml format, those that hold ordinary numbers."""
    fmt = hb.format_named(word)
    spec = family_of(fmt).geometry(fmt, (1, 256))["blocks"]
    drawn = np.random.default_rng(0).integers(0, 256, (4096, spec.shape[-1])).astype(np.uint8)
    with np.errstate(all="ignore"):
        values = hb.QTensor(fmt, (4096, 256), {"blocks": drawn}).dequantize()
    return drawn[(np.abs(values) < 100).all(axis=1)]


def weight(word: str, shape: tuple[int, ...] = (N, K), seed: int = 0) -> hb.QTensor:
    """Random bits of a format; of a raw ggml one, random blocks that hold ordinary numbers;
    eight-bit floats without NaN.
    """
    fmt = hb.format_named(word)
    if fmt.opaque:
        good = ordinary_blocks(word)
        blocks = good[np.random.default_rng(seed).integers(0, len(good), (shape[0], shape[1] // 256))]
        return hb.QTensor(fmt, shape, {"blocks": blocks.reshape(shape[0], -1)})
    ordinary = fmt.grouping == "row" and not fmt.super_size and fmt.scale != "nested"
    if ordinary and fmt.element not in ("e4m3", "e5m2"):
        return packed(word, shape, seed)
    return hb.quantize(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), word)


def tokens(m: int, k: int = K) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((m, k)).astype(np.float32))


def outcome(word: str, rank: int, device: str) -> dict[str, Any]:
    """Products of a whole weight, of its rows on two ranks and of its inputs on two ranks; the same
    of experts.
    """
    found: dict[str, Any] = {}
    layer, x = QLinear(weight(word), device=device), tokens(3).to(device)
    found["whole"] = layer(x).cpu()
    part = cut_rows(layer, [split(N, 2)[rank]])(x).contiguous()
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part)
    found["rows"] = torch.cat(parts, dim=-1).cpu()
    bounds = split(K, 2, input_unit(layer.canonical()))[rank]
    found["inputs"] = cut_inputs(layer, bounds)(x[:, bounds[0] : bounds[1]].contiguous()).cpu()
    stacks = [{"gate_up_proj": weight(word, (2 * F, F), e), "down_proj": weight(word, (N, F), 9 + e)} for e in range(EXPERTS)]
    x = tokens(3, F).to(device) * 0.1
    experts = QExperts({name: [s[name] for s in stacks] for name in stacks[0]}, device=device)
    index = torch.tensor([[0, 3], [1, 2], [2, 0]], device=device)
    share = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]], device=device)
    found["experts"] = experts(x, index, share).cpu()
    found["experts cut"] = cut_experts(experts, rank, 2, None)(x, index, share).cpu()
    return found


def main() -> None:
    store, device, words, folders = sys.argv[2:]
    if sys.argv[1] != "both":
        work(int(sys.argv[1]), store, device, words, folders)
        return
    if folders:
        for name in ("halfbyte.torch.tensor_parallel", "halfbyte.transformers", "tiny_models"):
            importlib.import_module(name)
    child = os.fork()
    work(0 if child else 1, store, device, words, folders)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def work(rank: int, store: str, device: str, words: str, folders: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    backend = "nccl" if device != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    torch.save({word: outcome(word, rank, device) for word in words.split(",") if word}, f"{store}.{rank}.pt")
    if folders:
        from halfbyte.torch.tensor_parallel import parallelize
        from halfbyte.transformers import load_model
        from support.tiny_models import ids, logits

        for folder in folders.split(","):
            model = parallelize(load_model(folder, device=device, dtype="float32")[0])
            torch.save(logits(model, ids().to(device)).cpu(), f"{folder}/rank{rank}.pt")
            text = model.generate(ids(4, 1).to(device), max_new_tokens=4, do_sample=False, eos_token_id=None)
            torch.save(text.cpu(), f"{folder}/text{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
