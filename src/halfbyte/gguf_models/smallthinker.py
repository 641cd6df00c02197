"""SmallThinker, which transformers does not have, from SmolLM3's attention and Qwen 3's experts.

    x' = x + attention(norm(x))
    y  = x' + Σ_e w_e(x) · down_e(relu(gate_e(norm(x'))) · up_e(norm(x')))

The router reads what enters the layer, before its attention (Song et al., arXiv:2507.20984). Layers
0, 4, 8, ... attend to every token and do not rotate; the others see a window.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.smollm3.configuration_smollm3 import SmolLM3Config
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer, SmolLM3ForCausalLM

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM


class SmallThinkerConfig(SmolLM3Config):  # type: ignore[misc] # transformers is not type-checked
    """SmolLM3's fields, and those of the experts.

    router_scores  "softmax" or "sigmoid"; the weights of the chosen experts add up to 1
    """

    model_type = "smallthinker"
    hidden_act: str = "relu"
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 768
    router_scores: str = "softmax"


class SmallThinkerMoE(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """Experts whose router has an input of its own."""

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.top_k, self.scores = config.num_experts_per_tok, config.router_scores
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Qwen3MoeExperts(config)

    def forward(self, x: Tensor, routed_by: Tensor) -> Tensor:
        """x and routed_by (batch, tokens, width) -> the same shape."""
        logits = self.gate(routed_by.reshape(-1, routed_by.shape[-1])).float()
        scores = logits.sigmoid() if self.scores == "sigmoid" else functional.softmax(logits, dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y: Tensor = self.experts(x.reshape(-1, x.shape[-1]), chosen, weights)
        return y.reshape(x.shape)


class SmallThinkerDecoderLayer(SmolLM3DecoderLayer):  # type: ignore[misc]
    """A layer whose experts are chosen before its attention."""

    def __init__(self, config: SmallThinkerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = SmallThinkerMoE(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        between = hidden_states + attended
        y: Tensor = between + self.mlp(self.post_attention_layernorm(between), hidden_states)
        return y


class SmallThinkerForCausalLM(SmolLM3ForCausalLM):  # type: ignore[misc]
    """The language model."""

    config_class = SmallThinkerConfig

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__(config)
        for i in range(config.num_hidden_layers):
            self.model.layers[i] = SmallThinkerDecoderLayer(config, i)
        self.post_init()


def register() -> None:
    """Makes transformers' automatic classes find the model."""
    AutoConfig.register(SmallThinkerConfig.model_type, SmallThinkerConfig, exist_ok=True)
    AutoModelForCausalLM.register(SmallThinkerConfig, SmallThinkerForCausalLM, exist_ok=True)
