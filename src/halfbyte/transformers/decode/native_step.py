"""A decoding step of one sequence as one list of native operations, without transformers' Python
code between the products.

    step = native_step(model, cache)      None for a model it does not support, and where a hook or
                                          option would be ignored
    hidden = step(embedded)           after the last norm, before the head

For models whose layers are those of `LAYERS`, packed on the CPU, in float32. The operations are the
model's own: products by the same kernels, norms, rotation, attention and gates in float32. Sums run
in another order than torch's, so logits differ by float32 rounding (1e-6 of the largest), and with
8-bit activations where an activation rounds to the neighbouring code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

import torch
from torch import Tensor

from ...backends.cpu import activations_named, follow_torch, native
from ...generation.decoder_layer import DecoderLayer, Norm, Product, append_layer, append_norm
from ...torch.modules import QLinear
from .kv_cache import SPARE, Growing
from .rmsnorm import RMSNorm

LAYERS: dict[str, tuple[str, str | None, str, str | None]] = {
    "LlamaDecoderLayer": ("input_layernorm", None, "post_attention_layernorm", None),
    "MistralDecoderLayer": ("input_layernorm", None, "post_attention_layernorm", None),
    "Qwen2DecoderLayer": ("input_layernorm", None, "post_attention_layernorm", None),
    "Qwen3DecoderLayer": ("input_layernorm", None, "post_attention_layernorm", None),
    "Gemma3DecoderLayer": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Layer -> its norms before and after attention, before and after the feed-forward part; None where
there is none.
"""
GATES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
"""Activation class -> the member of the native `Gate`."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the sequence length."""
SCALARS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Options that the step does not compute; a configuration must not set them."""
ATTENTIONS = ("eager", "sdpa")
"""Attention implementations with the standard result; a registered one may compute anything."""


def native_step(model: Any, cache: Any) -> Step | None:
    """The step for one sequence whose prompt is in `cache`; None when the model's own forward must
    be called.
    """
    layers = getattr(cache, "layers", ())  # another kind of model has another kind of state
    grows = len(layers) > 0 and all(isinstance(layer, Growing) and layer.is_initialized for layer in layers)
    return Step(model, layers) if grows and supports(model) and len(layers) == len(model.model.layers) else None


def supports(model: Any) -> bool:
    """True for a model that consists only of what `Step` computes, without hooks or other modules."""
    if model.training or model.dtype != torch.float32 or set(dict(model.named_children())) != {"model", "lm_head"}:
        return False
    body, parts = model.model, {"embed_tokens", "layers", "norm", "rotary_emb"}
    if set(dict(body.named_children())) != parts or any(getattr(model.config, name, None) for name in SCALARS):
        return False
    kinds = body.rotary_emb.rope_type
    if not set(kinds.values() if isinstance(kinds, dict) else [kinds]) <= set(ROTATIONS):
        return False
    if _global_forward_hooks or _global_forward_pre_hooks or model.config._attn_implementation not in ATTENTIONS:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        return False
    if not all(_is_transformers(m) for m in (model, body, body.rotary_emb)) or not isinstance(body.norm, RMSNorm):
        return False
    return all(_supports_layer(layer) and layer.self_attn.layer_idx == i for i, layer in enumerate(body.layers))


def _is_transformers(m: Any) -> bool:
    """True for a module whose class is defined in transformers, not derived or of the same name."""
    return type(m).__module__.startswith("transformers.models.")


def _supports_layer(layer: Any) -> bool:
    norms = LAYERS.get(type(layer).__name__)
    if norms is None or set(dict(layer.named_children())) != {"self_attn", "mlp", *filter(None, norms)}:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    own = {name: m for name, m in attention.items() if name in ("q_norm", "k_norm")}
    products = [*(m for name, m in attention.items() if name not in own), *(m for name, m in mlp.items() if name != "act_fn")]
    return (
        all(_is_transformers(m) for m in (layer, layer.self_attn, layer.mlp))
        and set(attention) - set(own) == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and set(mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and type(mlp["act_fn"]).__name__ in GATES
        and all(isinstance(m, RMSNorm) for m in (*own.values(), *(getattr(layer, name) for name in norms if name)))
        and all(_supports_product(m) for m in products)
    )


def _supports_product(m: Any) -> bool:
    bias = m.bias if type(m) is QLinear else None
    plain = bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    return type(m) is QLinear and plain and m.weight.prepared.backend == "cpu" and 0 not in m.weight.shape


class Step:
    """The layers and the last norm of one model for one sequence; call it with one token's
    embedding at a time.

    Between two calls of the model's own forward, `commit` appends the written tokens to the cache.
    """

    def __init__(self, model: Any, cache_layers: Sequence[Any]) -> None:
        body = model.model
        self.layers, self.rotary = cache_layers, body.rotary_emb
        by_kind = "layer_type" in inspect.signature(body.rotary_emb.forward).parameters
        kinds = [(layer.self_attn.layer_type,) if by_kind else () for layer in body.layers]
        self.kinds = list(dict.fromkeys(kinds))  # arguments of the model's rotary embedding, by layer
        self.x, self.out = torch.empty(model.config.hidden_size), torch.empty(1, 1, model.config.hidden_size)
        self._operations = native().Step()
        self.rows: dict[tuple[str, int], Tensor] = {}  # buffers shared by layers of one width, so that they stay in the L1 cache
        for index, layer in enumerate(body.layers):
            append_layer(self._operations, index, self._layer(layer, self.kinds.index(kinds[index])), self.x, self._row)
        append_norm(self._operations, _norm(body.norm), self.x, self.out)
        self.windows = np.array([layer.window or np.iinfo(np.int64).max for layer in cache_layers])
        self.written = self.room = 0

    def __call__(self, embedded: Tensor) -> Tensor:
        """(1, 1, hidden) -> (1, 1, hidden), which the next call overwrites."""
        if self.written == self.room:
            self.commit()
            self._open()
        self.x[:] = embedded.view(-1)
        end = self._kept_tokens + self.written + 1
        count = np.minimum(end, self.windows)
        follow_torch()
        self._operations.run(end - count, count, self.written, self._start + self.written)
        self.written += 1
        return self.out

    def commit(self) -> None:
        """Leave the cache as the model's own forward would."""
        for layer in self.layers if self.written else ():
            layer.close(self.written)
        self.written = self.room = 0

    def _open(self) -> None:
        self.room = min(SPARE, *(layer.open() for layer in self.layers))
        start = self._start = self.layers[0].get_seq_length()
        self._kept_tokens = np.array([layer.keys.shape[-2] for layer in self.layers])
        positions = torch.arange(start, start + self.room)[None]
        tables = [self.rotary(self.x, positions, *kind) for kind in self.kinds]
        self._operations.bind(
            [_with_room(layer.keys, self.room) for layer in self.layers],
            [_with_room(layer.values, self.room) for layer in self.layers],
            [cosines[0].contiguous() for cosines, _ in tables],
            [sines[0].contiguous() for _, sines in tables],
        )

    def _layer(self, layer: Any, rotation: int) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        before, after, before_mlp, after_mlp = LAYERS[type(layer).__name__]
        return DecoderLayer(
            q=_product(attention.q_proj),
            k=_product(attention.k_proj),
            v=_product(attention.v_proj),
            o=_product(attention.o_proj),
            gate=_product(mlp.gate_proj),
            up=_product(mlp.up_proj),
            down=_product(mlp.down_proj),
            before=_norm(getattr(layer, before)),
            before_mlp=_norm(getattr(layer, before_mlp)),
            after=_norm(getattr(layer, after)) if after else None,
            after_mlp=_norm(getattr(layer, after_mlp)) if after_mlp else None,
            q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            gate_function=GATES[type(mlp.act_fn).__name__],
            rotation=rotation,
        )

    def _row(self, name: str, width: int) -> Tensor:
        return self.rows.setdefault((name, width), torch.empty(width))


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.current_scale(), norm.eps)


def _product(layer: QLinear) -> Product:
    weight = layer.weight.prepared.data
    return Product(weight.native, layer.out_features, layer.bias, activations_named(layer.activations))


def _with_room(cached: Tensor, room: int) -> Tensor:
    """The tokens [1, kv_heads, tokens, d] of a cache and the `room` free ones behind them, as
    [kv_heads, tokens + room, d].
    """
    _, kv_heads, tokens, d = cached.shape
    return cached.as_strided((kv_heads, tokens + room, d), cached.stride()[1:])
