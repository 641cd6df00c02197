"""benchmarks/vllm.md: the plug-in's linear layers beside vLLM's own kernel on a CPU, on one file.

    PYTHONPATH=src:tests python tools/vllm_linear_speed.py THREADS FOLDER [KIND ...]

In the environment vllm. A Llama of one layer (hidden 2048, feed-forward 8192, 16 heads of 128, 4
for keys) is written into FOLDER/KIND and opened by vLLM twice, alone and with
`quantization="halfbyte"`; then the layer's four products (fused qkv, o, fused gate_up, down) are
called by turns through the layers' own `quant_method`, in bfloat16, at 1, 16 and 256 tokens. The
least of `ROUNDS` times of the sum is printed; the outputs of both sides are compared. Threads are
set before torch is imported: vLLM lets nobody change them later.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if len(sys.argv) > 1 and sys.argv[1].isdigit():
    os.environ |= {"OMP_NUM_THREADS": sys.argv[1], "HALFBYTE_THREADS": sys.argv[1]}
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",  # as in the engine that vLLM starts with the plug-in
}

KINDS = {"gptq": 128, "awq": 128, "ct-int4": 128, "w8a8": 0}
"""Kind -> inputs of a group, 0 for rows."""
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 1,
}
TOKENS, ROUNDS = (1, 16, 256), 15


def write(folder: Path, kind: str) -> None:
    """The checkpoint, in groups of 128."""
    from support.engine_cases import CHANNEL, TOKENS, ct
    from support.tiny_models import PRODUCERS, write_tiny

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = ["LlamaForCausalLM"]

    if kind == "w8a8":
        how = ct("int8:channel", "int-quantized", CHANNEL, TOKENS, scale_dtype="float32")
    else:
        how, group = PRODUCERS[kind], KINDS[kind]
        config = {**how.config}
        if kind == "ct-int4":
            weights = {**config["config_groups"]["group_0"]["weights"], "group_size": group}
            config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
        else:
            config["group_size"] = group
        how = how._replace(codec=f"{how.codec.partition(':')[0]}:g{group}", config=config)
    write_tiny(folder, "llama", how, change_config=named, **SIZES)


def layers(folder: Path, **options: Any) -> list[Any]:
    """The layer's four linear modules as vLLM loads them."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    import vllm

    engine = vllm.LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, **options)
    found: list[Any] = []
    engine.apply_model(lambda model: found.extend(_linear(model.model.layers[0])))
    del engine
    destroy_model_parallel()
    destroy_distributed_environment()
    return found


def _linear(layer: Any) -> Iterator[Any]:
    yield from (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)


def main(folder: Path, kinds: list[str]) -> None:
    """Prints the table."""
    import torch
    from halfbyte.vllm import register

    print("| file | threads | tokens | vLLM's kernel, ms | plug-in, ms | ratio | largest difference |")
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        at = folder / kind
        if not at.exists():
            write(at, kind)
        sides = [layers(at)]
        register()
        sides.append(layers(at, quantization="halfbyte"))
        names = {type(layer.quant_method).__name__ for layer in sides[1]}
        assert names == {"HalfbyteLinearMethod"}, names
        for tokens in TOKENS:
            inputs = [torch.randn(tokens, layer.input_size, dtype=torch.bfloat16) for layer in sides[0]]
            best, outputs = [float("inf")] * 2, [[], []]
            for _ in range(ROUNDS):
                for i, side in enumerate(sides):
                    start = time.perf_counter()
                    outputs[i] = [m.quant_method.apply(m, x, None) for m, x in zip(side, inputs, strict=True)]
                    best[i] = min(best[i], time.perf_counter() - start)
            off = max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in zip(*outputs, strict=True))
            cells = [
                kind,
                torch.get_num_threads(),
                tokens,
                *(f"{1e3 * b:.2f}" for b in best),
                f"{best[0] / best[1]:.2f}",
                f"{off:.1%}",
            ]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[2]), sys.argv[3:] or list(KINDS))
