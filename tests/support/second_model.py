"""A small GGUF with the header of SmolLM2-135M-Instruct: its keys, pre-tokenizer, end-of-turn
tokens and chat template; tensors of its types, random.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

from support.gguf_pretokenizers import recorded
from support.gguf_writer import F32, GGUF, Tensor, f32

HIDDEN, WIDTH, HEADS, KV, LAYERS = 128, 256, 4, 2, 2
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_smollm2(path: Path) -> Path:
    """The file, at `path`."""
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
    path.write_bytes(GGUF(pairs=pairs, tensors=tensors).bytes())
    return path
