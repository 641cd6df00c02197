"""Which parameter of transformers' model a tensor of a GGUF file is, and how its rows are ordered
there.

    slot(ARCHITECTURES["llama"], "blk.3.attn_q.weight")   ("model.layers.3.self_attn.q_proj",
                                                          "weight")

The names themselves are tables in `architectures.py`; a new architecture is added there. Here they
are read from GGUF to transformers, in `to_gguf.py` from transformers to GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, plural
from .architecture import PARAMETER, PART, Architecture
from .architectures import ARCHITECTURES

LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.(\d+)\.(.+)")
SIDES = {"enc": "encoder.", "dec": "decoder."}
"""Beginning of a tensor's name -> that of its module's path, in a model of two sides."""
ROTATION_FACTORS = "rope_freqs.weight"
"""Llama 3's stretched rotation: one divisor for each frequency."""
LONG_ROTATION = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors that the configuration has, one list for short texts and one for long ones."""
INPUTS_FIRST = {"gpt2": frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})}
"""transformers' model type -> stems of matrices that it stores as (inputs, outputs)."""
ONE_ROW = "ffn_gate_inp_shexp"
"""Stem of a matrix of one row, which a file stores as a vector."""


def slot(architecture: Architecture, name: str) -> tuple[str, str] | None:
    """(module path, parameter) of a tensor of the file, None when the architecture does not know
    it.

    Some tensors of recurrent layers end without "weight".
    """
    stem, _, leaf = name.rpartition(".")
    if (known := next((n for n in (name, stem) if n in architecture.top), None)) is not None:
        path, parameter, own = architecture.top[known].partition(PARAMETER)
        return path, own if parameter else leaf
    match = LAYER.fullmatch(stem)
    if match is None and (match := LAYER.fullmatch(name)):
        leaf = "weight"
    if match:
        side = name[:3] if name[:3] in SIDES else ""
        names, known = architecture.names, f"{side}.{match[2]}" if side else match[2]
        within = names.get(f"{known}.{leaf}", names.get(known))
        if within is None:
            return None
        path, parameter, own = within.partition(PARAMETER)
        layers = SIDES.get(side, "") + architecture.layers
        return ".".join(p for p in (layers, match[1], path) if p), own if parameter else leaf
    return None


def stem_of(name: str) -> str:
    """The stem of a tensor of a layer, "" for one outside the layers."""
    match = LAYER.fullmatch(name)
    return match[2].removesuffix(".weight").removesuffix(".bias") if match else ""


def row_order(
    architecture: Architecture, settings: Any, stem: str, rows: int, heads: int, head_dim: int, where: object
) -> NDArray[np.int64] | None:
    """Rows of a stem's tensor in the file, in transformers' order; None where both are the same.

    stem   or the path, in its layer, of a parameter that several tensors make
    heads, head_dim   of rows that are no order of the architecture's own
    Rotated pairs: head h, half j, pair i lies at head h, pair i, half j. Fused heads: head h of
    projection j lies at j, h. CheckpointError, naming the file `where`, for rows that the sizes in
    `settings` do not order.
    """
    own = architecture.orders.get(stem)
    order = partial(_head_order, architecture, stem, rows, heads, head_dim) if own is None else partial(own, settings, rows)
    return _fitting(order, rows, f"{where}: {stem} has {plural(rows, 'row')}")


def input_order(architecture: Architecture, settings: Any, stem: str, width: int, where: object) -> NDArray[np.int64] | None:
    """The same of a matrix's inputs."""
    if (order := architecture.columns.get(stem)) is None:
        return None
    return _fitting(partial(order, settings, width), width, f"{where}: {stem} has {plural(width, 'input')}")


def _fitting(order: Callable[[], NDArray[np.int64] | None], count: int, what: str) -> NDArray[np.int64] | None:
    """An order that has each of `count` indices once, None for the one that changes nothing."""
    try:
        index = order()
    except (IndexError, ValueError, ZeroDivisionError):  # of sizes that do not divide, or reach past the end
        index = np.empty(0, np.int64)
    if index is None or np.array_equal(index, np.arange(count)):
        return None
    if not np.array_equal(np.sort(index), np.arange(count)):
        raise CheckpointError(f"[gguf] {what}; heads and widths of the configuration put another number in order")
    return index


def _head_order(architecture: Architecture, stem: str, rows: int, heads: int, head_dim: int) -> NDArray[np.int64] | None:
    """`row_order` of fused heads and of rotated pairs."""
    if architecture.fused_heads and stem == "attn_qkv":
        return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    if not architecture.interleaved or stem not in ("attn_q", "attn_k"):
        return None
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def class_name(model_type: str, task: str = "text") -> str:
    """transformers' class of a model type for an `Architecture.task`: the causal language model,
    the encoder, or the model of both.
    """
    if task != "text":
        return _ENCODERS[model_type, task]
    return _CLASSES.get(model_type) or "".join(w[:1].upper() + w[1:] for w in model_type.split("_")) + "ForCausalLM"


def task_of_class(model_type: str, classes: Sequence[str]) -> str:
    """The `Architecture.task` of a configuration with these `architectures`."""
    return next((task for (kind, task), name in _ENCODERS.items() if kind == model_type and name in classes), "text")


_CLASSES = {
    "bitnet": "BitNetForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM", "deepseek_v4": "DeepseekV4ForCausalLM",
    "dots3_note_text": "Dots3NoteForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM", "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gemma3n_text": "Gemma3nForCausalLM", "gemma4_text": "Gemma4ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "gpt_bigcode": "GPTBigCodeForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM", "granitemoe": "GraniteMoeForCausalLM", "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM", "hy_v3": "HYV3ForCausalLM", "hy_v4": "HYV4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM", "mimo_v2_flash": "MiMoV2FlashForCausalLM", "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM", "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "smallthinker": "SmallThinkerForCausalLM", "smollm3": "SmolLM3ForCausalLM", "stablelm": "StableLmForCausalLM",
}  # fmt: skip
"""Classes whose names do not follow from the model type."""
_ENCODERS = {
    ("gemma3_text", "encoder"): "Gemma3TextModel", ("jina_embeddings_v3", "encoder"): "JinaEmbeddingsV3Model",
    ("llama", "encoder"): "LlamaModel", ("nomic_bert", "encoder"): "NomicBertModel",
    ("bert", "encoder"): "BertModel", ("eurobert", "encoder"): "EuroBertModel", ("modernbert", "encoder"): "ModernBertModel",
    ("t5", "encoder"): "T5EncoderModel", ("t5", "encoder-decoder"): "T5ForConditionalGeneration",
}  # fmt: skip
"""(model type, task) -> class of what is no causal language model."""


def unsupported(architecture: Architecture) -> str:
    """The feature of an architecture that keeps its tensors from being renamed one by one, "" where
    there is none.
    """
    if architecture.task != "text":
        return architecture.task
    for feature in ("splits", "joins", "columns", "changes", "orders", "parameters", "plain_norms", "absent"):
        default = getattr(ARCHITECTURES["qwen2"], feature, None)
        if getattr(architecture, feature, None) != default:
            return feature
    if any(PART in path for path in architecture.names.values()):
        return "joins"
    return OTHER_FORMS.get(architecture.model_type, "")


OWN_MODEL = "smallthinker"
"""Model type whose class is in this package; transformers has none."""
OTHER_FORMS = {
    OWN_MODEL: "a model that transformers does not have",
    "dbrx": "experts",
    "deepseek_v4": "experts",
    "granitemoe_swa": "experts",
    "llama4_text": "experts",
    "minimax_m2": "experts",
    "ministral3": "temperature of attention",
    "phimoe": "experts",
}
"""Model types whose checkpoints have other names or shapes of experts, or state a number in another
place.
"""
