"""A published model that is no Gemma: the header of SmolLM2-135M-Instruct (its keys, pre-tokenizer,
end-of-turn tokens and chat template), tensors of its types, small and random.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

import torch
from halfbyte.bench.model import race, run_one
from halfbyte.cli import main
from support.gguf_pretokenizers import recorded
from support.gguf_writer import F32, GGUF, Tensor, f32

HIDDEN, WIDTH, HEADS, KV, LAYERS = 96, 192, 3, 1, 2
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    rng = np.random.default_rng(85)
    words = recorded()["bytes"]
    tokens = ENDS + [t for t in words["tokens"] if t not in ENDS]

    def q4_1(name: str, rows: int, columns: int) -> Tensor:
        values = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        packed = quantize(values, gguf.GGMLQuantizationType.Q4_1)
        return Tensor(name, (columns, rows), int(gguf.GGMLQuantizationType.Q4_1), packed.tobytes())

    tensors = [q4_1("token_embd.weight", len(tokens), HIDDEN), f32("output_norm.weight", np.ones(HIDDEN, np.float32))]
    for i in range(LAYERS):
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (32 * KV, HIDDEN), "attn_v": (32 * KV, HIDDEN),
                  "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN),
                  "ffn_down": (HIDDEN, WIDTH)}  # fmt: skip
        tensors += [q4_1(f"blk.{i}.{stem}.weight", *shape) for stem, shape in shapes.items()]
        tensors += [f32(f"blk.{i}.{stem}.weight", np.ones(HIDDEN, np.float32)) for stem in ("attn_norm", "ffn_norm")]
    assert {t.type for t in tensors} == {F32, 3}
    sizes = {"block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": WIDTH,
             "attention.head_count": HEADS, "attention.head_count_kv": KV, "rope.dimension_count": 32,
             "vocab_size": len(tokens)}  # fmt: skip
    pairs = [
        ("general.architecture", "string", "llama"),
        *((f"llama.{k}", "uint32", v) for k, v in sizes.items()),
        ("llama.rope.freq_base", "float32", 1e5), ("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5),
        ("tokenizer.ggml.model", "string", "gpt2"), ("tokenizer.ggml.pre", "string", "smollm"),
        ("tokenizer.ggml.tokens", "array[string]", tokens),
        ("tokenizer.ggml.token_type", "array[int32]", [3] * len(ENDS) + [1] * (len(tokens) - len(ENDS))),
        ("tokenizer.ggml.merges", "array[string]", words["merges"]),
        ("tokenizer.ggml.bos_token_id", "uint32", 1), ("tokenizer.ggml.eos_token_id", "uint32", 2),
        ("tokenizer.ggml.unknown_token_id", "uint32", 0), ("tokenizer.ggml.padding_token_id", "uint32", 2),
        ("tokenizer.ggml.add_bos_token", "bool", 0), ("tokenizer.ggml.add_space_prefix", "bool", 0),
        ("tokenizer.chat_template", "string", TEMPLATE),
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("smollm2") / "SmolLM2-tiny.Q4_1.gguf"
    path.write_bytes(GGUF(pairs=pairs, tensors=tensors).bytes())
    return path


def records(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_case_85_a_second_model_generates_chats_is_evaluated_and_timed(smollm2, tmp_path, capsys, monkeypatch):
    assert main(["inspect", str(smollm2), "--json"]) == 0
    assert not [r for r in records(capsys) if r.get("code") == "cannot-run"]

    assert main(["generate", str(smollm2), "-p", "The quick", "-n", "4", "--json"]) == 0
    summary = records(capsys)[-1]
    assert 0 < summary["tokens"] <= 4

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(smollm2), "-n", "3", "--json"]) == 0
    (reply,) = records(capsys)
    assert reply["stopped"] in ("eos", "length")
    assert reply["prompt_tokens"] > 8  # both turns with their markers

    (tmp_path / "text.txt").write_text("The quick Brown FOX; it's 1234567 o'clock, " * 12)
    assert main(["eval", str(smollm2), "--text", str(tmp_path / "text.txt"), "--context", "64", "--chunks", "2", "--json"]) == 0
    evaluated = records(capsys)[0]
    assert evaluated["chunks"] == 2
    assert 1 < evaluated["perplexity"] < 1e6

    def in_this_process(what: str, path: Path, *options: object) -> dict:
        threads = torch.get_num_threads()
        run_one.main(what, str(path), *options)
        torch.set_num_threads(threads)
        return records(capsys)[-1]

    monkeypatch.setattr(race, "run_one", in_this_process)
    options = ["--threads", "1", "--rounds", "1", "--peers", "", "--activations", "exact", "--json"]
    assert main(["bench", "--model", str(smollm2), *options]) == 0
    measured = records(capsys)
    assert measured
    assert all(r["decode_tokens_per_s"] > 0 for r in measured)


def test_its_decoding_steps_are_native(smollm2):
    from halfbyte.transformers import load_model
    from halfbyte.transformers.decode.native_step import supports

    assert supports(load_model(smollm2)[0])
