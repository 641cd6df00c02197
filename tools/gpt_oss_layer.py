"""gpt-oss at its real layer sizes with random packed weights: load time, memory and tokens a
second, as JSON lines.

    python tools/gpt_oss_layer.py FOLDER [--layers 1] [--device cpu] [--threads 1] [--activations
    exact] [--prompt 512]

FOLDER is written when it holds no config.json yet: the layout of the published checkpoints (experts
as blocks and scales, biases, attention and router in bfloat16), 423 MB of experts and 53 MB of
attention a layer. The vocabulary is cut to 2,048 tokens, whose table and head would otherwise weigh
more than the layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

HIDDEN, EXPERTS, TOP, VOCAB, HEADS, KV, HEAD = 2880, 32, 4, 2048, 64, 8, 64
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": TOP,
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "head_dim": HEAD, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "sliding_window": 128, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip


def write(folder: Path, layers: int) -> None:
    """The checkpoint."""
    from halfbyte.checkpoints import SafetensorsWriter

    rng = np.random.default_rng(0)

    def dense(*shape: int, size: float = 0.02) -> Any:
        return (rng.standard_normal(shape, dtype=np.float32) * np.float32(size)).astype(ml_dtypes.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    with SafetensorsWriter(folder / "model.safetensors", {"format": "pt"}) as out:
        for i in range(layers):
            at = f"model.layers.{i}."
            for name, rows in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
                blocks = (EXPERTS, rows, HIDDEN // 32, 16)
                out.add(f"{at}mlp.experts.{name}_blocks", rng.integers(0, 256, blocks, dtype=np.uint8))
                out.add(f"{at}mlp.experts.{name}_scales", rng.integers(117, 121, blocks[:3], dtype=np.uint8))
                out.add(f"{at}mlp.experts.{name}_bias", dense(EXPERTS, rows))
            out.add(f"{at}mlp.router.weight", dense(EXPERTS, HIDDEN))
            out.add(f"{at}mlp.router.bias", dense(EXPERTS))
            for name, n, k in (("q", HEADS * HEAD, HIDDEN), ("k", KV * HEAD, HIDDEN), ("v", KV * HEAD, HIDDEN),
                               ("o", HIDDEN, HEADS * HEAD)):  # fmt: skip
                out.add(f"{at}self_attn.{name}_proj.weight", dense(n, k))
                out.add(f"{at}self_attn.{name}_proj.bias", dense(n))
            out.add(f"{at}self_attn.sinks", dense(HEADS))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out.add(f"{at}{norm}.weight", np.ones(HIDDEN, ml_dtypes.bfloat16))
        out.add("model.norm.weight", np.ones(HIDDEN, ml_dtypes.bfloat16))
        out.add("model.embed_tokens.weight", dense(VOCAB, HIDDEN, size=1.0))
        out.add("lm_head.weight", dense(VOCAB, HIDDEN))
    kinds = ["sliding_attention", "full_attention"] * layers
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers, "layer_types": kinds[:layers]}))


def peak_resident() -> int:
    """Bytes this process has held at most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def seconds(step: Any, count: int, synchronize: Any) -> tuple[float, float]:
    """Medians of `count` calls, each waited for: by the clock, and of processor time (a machine
    that others use too).
    """
    times, processor = [], []
    for _ in range(count):
        start, busy = time.perf_counter(), time.process_time()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return statistics.median(times), statistics.median(processor)


def graph_of(step: Any) -> Any:
    """A CUDA graph of one call; what replays it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def one_token(model: Any) -> Any:
    """A step of one token without a cache, mask and place given, so that nothing waits for the
    device.
    """
    import torch

    ids, place = torch.full((1, 1), 7, device=model.device), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    masks = {"full_attention": mask, "sliding_attention": mask}
    return lambda: model(input_ids=ids, position_ids=place, attention_mask=masks, use_cache=False)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """One line of figures."""
    import torch
    from halfbyte.generation.memory_plan import Planner
    from halfbyte.generation.single import keeps_scores, prompt_chunk
    from halfbyte.transformers import load_model, model_size
    from halfbyte.transformers.load import import_model_code

    torch.set_num_threads(given.threads)
    import_model_code(given.folder)
    on_gpu = given.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    context = given.prompt + given.decode
    plan = Planner(given.folder, device="cuda" if on_gpu else "cpu").plan(context)
    start, busy = time.perf_counter(), time.process_time()
    model, _ = load_model(given.folder, device=given.device, activations=given.activations)
    wait()
    loaded, loaded_busy = time.perf_counter() - start, time.process_time() - busy
    ids = np.random.default_rng(1).integers(3, VOCAB, given.prompt).tolist()
    token = torch.full((1, 1), 7, device=given.device)

    def read_prompt() -> dict[str, Any]:
        """The prompt as `Generation` reads it."""
        state: dict[str, Any] = {"use_cache": True}
        chunk = prompt_chunk(len(ids), keeps_scores(model))
        for first in range(0, len(ids), chunk):
            piece = torch.tensor([ids[first : first + chunk]], device=given.device)
            out = model(input_ids=piece, logits_to_keep=1, **state)
            state |= {name: out[name] for name in ("cache", "past_key_values") if name in out}
        return state

    with torch.inference_mode():
        prefill = seconds(read_prompt, 3, wait)
        state = read_prompt()
        step = seconds(lambda: model(input_ids=token, **state), given.decode, wait)
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident()
        captured = seconds(graph_of(one_token(model)), 50, wait) if on_gpu else None
    size = model_size(model)
    return {
        "record": "gpt-oss layer", "layers": model.config.num_hidden_layers, "device": torch.cuda.get_device_name() if on_gpu
        else "cpu", "threads": given.threads, "activations": given.activations, "dtype": str(model.dtype).removeprefix("torch."),
        "load_seconds": loaded, "load_processor_seconds": loaded_busy,
        "bytes": size.nbytes, "bits_per_weight": size.bits_per_weight,
        "prompt_tokens": given.prompt, "prompt_tokens_per_s": given.prompt / prefill[0],
        "prompt_tokens_per_processor_s": given.prompt / prefill[1],
        "tokens_per_s": 1 / step[0], "tokens_per_processor_s": 1 / step[1],
        "tokens_per_s_graph": None if captured is None else 1 / captured[0],
        "peak_memory_bytes": peak,
        "planned_bytes": plan.total, "planned_overhead": plan.overhead,
        "planned_above_overhead": plan.total - plan.overhead,
    }  # fmt: skip


def main() -> None:
    """Write the checkpoint if it is not there, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    given = parser.parse_args()
    if not (given.folder / "config.json").exists():
        write(given.folder, given.layers)
    print(json.dumps(measure(given)), flush=True)


if __name__ == "__main__":
    main()
