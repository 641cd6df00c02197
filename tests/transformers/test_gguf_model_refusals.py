"""GGUF files that are not the model they claim: refused by name, before anything large is
allocated.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedError
from halfbyte.transformers import load_model
from support.cpu_time import cpu_time
from support.gguf_models import dense_model, write
from support.gguf_writer import F32, GGUF, Q8_0, Tensor


def without(tensor: str) -> Any:
    def change(file: GGUF) -> None:
        file.tensors = [t for t in file.tensors if t.name != tensor]

    return change


def with_pair(key: str, kind: str, value: Any) -> Any:
    def change(file: GGUF) -> None:
        file.pairs = [p for p in file.pairs if p[0] != key]
        if kind:
            file.pairs.append((key, kind, value))

    return change


def with_tensor(tensor: Tensor) -> Any:
    def change(file: GGUF) -> None:
        file.tensors = [*(t for t in file.tensors if t.name != tensor.name), tensor]

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("blk.1.ffn_up.weight"), CheckpointError, "blk.1.ffn_up: missing"),
        (without("token_embd.weight"), CheckpointError, "tensor 'token_embd.weight' is missing"),
        (
            with_tensor(Tensor("blk.0.moon.weight", (4,), F32, bytes(16))),
            UnsupportedError,
            "blk.0.moon.weight have no counterpart in LlamaForCausalLM; this variant of llama is not built",
        ),
        (
            with_tensor(Tensor("blk.2.ffn_up.weight", (64, 96), F32, bytes(64 * 96 * 4))),
            CheckpointError,
            r"llama.block_count: unknown \(2; there are tensors of block 2\)",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.weight", (64, 95), F32, bytes(64 * 95 * 4))),
            CheckpointError,
            r"'blk.0.ffn_up.weight' is \[95, 64\]; the model wants \[96, 64\]",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.weight", (64, 97), Q8_0, bytes(2 * 97 * 34))),
            CheckpointError,
            r"'blk.0.ffn_up' is \[97, 64\]; the model wants \[96, 64\]",
        ),
        (
            with_tensor(Tensor("blk.0.attn_norm.weight", (64,), Q8_0, bytes(68))),
            CheckpointError,
            "'blk.0.attn_norm' is quantized, and model.layers.0.input_layernorm.weight of a LlamaRMSNorm cannot be",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.bias", (96,), F32, bytes(384))),
            CheckpointError,
            r"blk.1.ffn_up.bias: missing \(the header requires it\)",
        ),
        (
            with_tensor(Tensor("rope_freqs.weight", (7,), F32, bytes(28))),
            CheckpointError,
            r"'rope_freqs.weight' is \[7\]; the model wants \[16\]",
        ),
        (with_pair("llama.block_count", "", None), CheckpointError, "key 'llama.block_count' is missing; the model needs it"),
        (with_pair("llama.block_count", "string", "2"), CheckpointError, "key 'llama.block_count' is string; integer is needed"),
        (
            with_pair("llama.attention.head_count", "uint32", 0),
            CheckpointError,
            "head_count' is 0; 1 or more is allowed",
        ),
        (
            with_pair("llama.attention.head_count", "array[uint32]", [4, 4]),
            CheckpointError,
            r"is array\[uint32\]; integer is needed",
        ),
        (with_pair("llama.rope.dimension_count", "uint32", 16), UnsupportedError, "a llama model that rotates part of each head"),
        (
            with_pair("llama.attention.value_length", "uint32", 16),
            UnsupportedError,
            "a llama model whose keys and values differ in length",
        ),
        (with_pair("llama.expert_count", "uint32", 8), CheckpointError, "key 'llama.expert_used_count' is missing"),
        (
            with_pair("llama.rope.scaling.type", "string", "longrope"),
            UnsupportedError,
            "with rope scaling 'longrope'; none, linear and yarn are read, and longrope with its factors",
        ),
        (
            with_pair("general.architecture", "string", "rwkv7"),
            UnsupportedError,
            "architecture 'rwkv7': .*; models that can be built: afmoe, apertus, arcee",
        ),
        (with_pair("general.architecture", "", None), UnsupportedError, "architecture ''"),
    ],
)
def test_files_that_are_not_the_model_they_claim(tmp_path, monkeypatch, change, error, message):
    path = tmp_path / "m.gguf"
    whole = GGUF.bytes

    def changed(file: GGUF) -> bytes:
        change(file)
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", changed)
    write(path, "llama", dense_model("llama"), packed=False)
    with pytest.raises(error, match=message) as caught:
        load_model(path)
    assert isinstance(caught.value, HalfbyteError)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("arch", ["llama-3", "gemma3", "qwen2-yarn"])
def test_numbers_of_the_header_at_random(tmp_path, monkeypatch, arch):
    """Whatever the sizes, ids and frequencies claim: a model, or an error of ours, at once and in
    little memory.
    """
    rng = np.random.default_rng(len(arch))
    wild = {
        "uint32": [0, 1, 2, 3, 7, 31, 33, 64, 2**16, 2**31, 2**32 - 1],
        "float32": [0.0, -1.0, 1e-30, 3e38, float("inf"), float("nan")],
        "string": ["", "none", "linear", "yarn", "llama", "gemma3", "\x00"],
    }  # fmt: skip
    whole = GGUF.bytes

    def changed(file: GGUF) -> bytes:
        for _ in range(int(rng.integers(1, 3))):
            at = int(rng.integers(len(file.pairs)))
            key, kind, _ = file.pairs[at]
            if kind in wild:
                file.pairs[at] = (key, kind, wild[kind][int(rng.integers(len(wild[kind])))])
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", changed)
    model = dense_model(arch)
    outcomes = {True: 0, False: 0}
    for _ in range(24):
        path = write(tmp_path / "m.gguf", arch, model, packed=False)
        with cpu_time() as spent:
            tracemalloc.start()
            try:
                load_model(path)
                outcomes[True] += 1
            except HalfbyteError:  # anything else fails the test
                outcomes[False] += 1
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert spent.seconds < 1
        assert peak < 50_000_000
    assert min(outcomes.values()) > 2, outcomes
