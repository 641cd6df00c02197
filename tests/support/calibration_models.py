"""Random models with a word tokenizer, calibration texts for them, and the error of a packed
model's logits.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

import halfbyte
import torch
from support.gguf_models import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = 80
COMMON = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 1,
}  # fmt: skip


def write_model(folder, kind: str, seed: int = 0, **more):
    """A random model of `kind` with a word tokenizer; returns the dense model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **more})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn_like(p) * (0.3 / p.shape[-1] ** 0.5 * 3))
            elif "norm" in name:
                # Inputs of very different magnitudes.
                p.copy_(torch.exp(torch.randn_like(p)) - (1 if "gemma" in kind else 0))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i:02d}": i for i in range(WORDS)}, unk_token="w02"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w02").save_pretrained(folder)
    return model


def write_text(path, tokens: int = 600, seed: int = 1):
    rng = np.random.default_rng(seed)
    path.write_text(" ".join(f"w{i:02d}" for i in rng.integers(3, WORDS, tokens)), encoding="utf-8")
    return path


def logits(path) -> torch.Tensor:
    model, _ = halfbyte.load_model(path)
    ids = torch.tensor(np.random.default_rng(9).integers(3, WORDS, (4, 48)))
    with torch.no_grad():
        return model(ids).logits.double()


def gguf_drift(path, dense) -> float:
    """Squared distance of a GGUF file's logits from the dense model's, over their squares."""
    test = torch.tensor(np.random.default_rng(7).integers(3, VOCABULARY, (8, 48)))
    other, _ = halfbyte.load_model(path)
    with torch.no_grad():
        want, got = dense(test).logits.double(), other(test).logits.double()
    return float(((got - want) ** 2).sum() / (want**2).sum())


def drift(path, dense) -> float:
    ids = torch.tensor(np.random.default_rng(9).integers(3, WORDS, (4, 48)))
    with torch.no_grad():
        want = dense(ids).logits.double()
    return float(((logits(path) - want) ** 2).sum() / (want**2).sum())
