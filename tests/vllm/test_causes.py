"""Why vLLM computes something else of some models: with the named cause mended in vLLM's own code,
its log probabilities are ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.torch.experts import QExperts
from support import served_models
from support.served_models import BOUND
from support.vllm_models import DIFFERS, choose_in_one_group, sizes_for_vllm, write_folders, write_packed

pytestmark = pytest.mark.ecosystem("vllm")
Mend = Callable[[Any], None]


def wide_activation(patch: Any) -> None:
    from vllm.model_executor.models import apertus

    patch.setattr(apertus, "XIELU", functools.partial(apertus.XIELU, dtype=torch.float32))


def tanh_gelu(patch: Any) -> None:
    """transformers' Bloom has the approximation by tanh, as Megatron did."""
    from vllm.model_executor.models import bloom

    patch.setattr(bloom, "get_act_fn", lambda name: torch.nn.GELU(approximate="tanh"))


def biased_choice(patch: Any) -> None:
    """Softmax scores with a bias that only chooses."""
    choose_in_one_group(patch, lambda router: router.e_score_correction_bias is not None)


def embeddings_of_layers(patch: Any) -> None:
    """vLLM's text model gets none, and never multiplies the projection beside them by 1/√width,
    which the epsilon of its norm is relative to.
    """
    from vllm.model_executor.models.gemma3n import Gemma3nSelfDecoder, Gemma3nTextModel

    forward, inputs = Gemma3nTextModel.forward, Gemma3nSelfDecoder.get_per_layer_inputs

    def with_embeddings(model: Any, ids: Any, positions: Any, per_layer_inputs: Any = None, *values: Any, **options: Any) -> Any:
        rows = model.get_per_layer_input_embeddings(ids)
        each = rows.view(-1, model.config.num_hidden_layers, model.config.hidden_size_per_layer_input)
        return forward(model, ids, positions, each, *values, **options)

    def scaled(decoder: Any, hidden: Any, rows: Any) -> Any:
        projection = decoder.per_layer_model_projection
        whole = projection.forward
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(projection, "forward", lambda x: whole(x) * decoder.config.hidden_size**-0.5)
            return inputs(decoder, hidden, rows)

    patch.setattr(Gemma3nTextModel, "forward", with_embeddings)
    patch.setattr(Gemma3nSelfDecoder, "get_per_layer_inputs", scaled)


def one_group(patch: Any) -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated

    init = Mixer2RMSNormGated.__init__
    patch.setattr(
        Mixer2RMSNormGated, "__init__", lambda norm, size, groups, *values, **options: init(norm, size, 1, *values, **options)
    )


def causal(patch: Any) -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import hrm_text

    patch.setattr(hrm_text, "PrefillPrefixLMAttention", Attention)


def short_factors(patch: Any) -> None:
    """The prompt is as long as the original length."""
    from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding as Rotation

    init = Rotation.__init__

    def short(rotation: Any, *values: Any, **options: Any) -> None:
        init(rotation, *values, **options)
        rotation.use_long_rope = False

    patch.setattr(Rotation, "__init__", short)


def bias_of_the_head(patch: Any) -> None:
    from vllm.model_executor.models.phimoe import PhiMoEForCausalLM

    patch.setattr(
        PhiMoEForCausalLM, "compute_logits", lambda model, x: model.logits_processor(model.lm_head, x, model.lm_head.bias)
    )


MENDS: dict[str, Mend] = {
    "apertus": wide_activation,
    "bloom": tanh_gelu,
    "ernie4_5-moe": biased_choice,
    "gemma3n": embeddings_of_layers,
    "granitehybrid": one_group,
    "hrm_text": causal,
    "mamba2": one_group,
    "phi3:long": short_factors,
    "phimoe": bias_of_the_head,
}


def test_every_difference_has_a_cause():
    assert {*MENDS, "minimax-m3"} == set(DIFFERS)


def test_minimax_m3_is_transformers_with_silu(vllm_here, tmp_path):
    """vLLM runs transformers' code with mixtures of its own, of which it asks for SiLU unless the
    model is gpt-oss.
    """
    packed = write_packed(tmp_path, "minimax-m3", 256)
    write_folders(tmp_path, packed)
    model = halfbyte.load_model(packed)[0]
    (experts,) = (module for module in model.modules() if isinstance(module, QExperts))
    assert experts.gate == "swiglu_clamped"
    experts.gate = "swiglu"
    rows, text = served_models.answer(model)
    for form, options in (("dense", {}), ("halfbyte", {"quantization": "halfbyte"})):
        theirs = served_models.vllm_words(tmp_path / form, **options)
        assert not isinstance(theirs, str), theirs
        assert np.abs(theirs[0] - rows).max() < BOUND, form
        assert theirs[1] == text


@pytest.mark.parametrize("name", MENDS)
def test_with_the_cause_mended_the_answer_is_ours(vllm_here, tmp_path, name):
    packed = write_packed(tmp_path, name, sizes_for_vllm(vllm_here, name))
    write_folders(tmp_path, packed)
    rows, text = served_models.answer(halfbyte.load_model(packed)[0])
    MENDS[name](vllm_here)
    for form, options in (("dense", {}), ("halfbyte", {"quantization": "halfbyte"})):
        theirs = served_models.vllm_words(tmp_path / form, **options)
        assert not isinstance(theirs, str), theirs
        assert np.abs(theirs[0] - rows).max() < BOUND, form
        assert theirs[1] == text or name == "phi3:long"  # behind the original length ours has the long factors


def test_hy_4_on_a_cpu_is_transformers_without_what_vllm_lacks_there(vllm_here, tmp_path):
    """Asked for attention to every token: no sinks, all keys, no limit of dense experts (the
    plug-in's have it), and heads whose pairs are a half apart, which vLLM takes for neighbours.
    """
    from vllm.models.hy_v4.nvidia import attention

    packed = write_packed(tmp_path, "hy_v4", 512)
    write_folders(tmp_path, packed)
    rotation = attention.get_rope
    vllm_here.setattr(attention, "get_rope", lambda *values, **o: rotation(*values, **o | {"is_neox_style": True}))
    for form, options in (("dense", {}), ("halfbyte", {"quantization": "halfbyte"})):
        model = halfbyte.load_model(packed)[0]
        for path, module in model.named_modules():
            if hasattr(module, "sinks"):
                module.sinks.data.fill_(-1e4)
            if hasattr(module, "index_topk"):
                module.index_topk = 64
            if form == "dense" and path.endswith(".experts"):
                assert module.limit == 0.5
                module.limit = None
        rows, text = served_models.answer(model)
        everywhere = {"hf_overrides": {"layer_types": ["full_attention"] * 3}}
        theirs = served_models.vllm_words(tmp_path / form, **options, **everywhere)
        assert not isinstance(theirs, str), theirs
        assert np.abs(theirs[0] - rows).max() < BOUND, form
        assert theirs[1] == text
