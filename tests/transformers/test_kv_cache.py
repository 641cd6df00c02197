"""A cache that grows in place returns what transformers' own returns, token by token, whatever came
before.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import torch
from halfbyte.transformers.compat import cache_name
from halfbyte.transformers.decode import kv_cache as module
from halfbyte.transformers.decode.kv_cache import GrowingLayer, GrowingSlidingLayer, growing_cache
from support.gguf_models import VOCABULARY, dense_model
from transformers import DynamicCache


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), window=st.integers(2, 12), spare=st.integers(0, 7))
def test_layers_return_what_transformers_layers_return(lengths, window, spare):
    old, module.SPARE = module.SPARE, spare
    try:
        pairs = [(DynamicLayer(), GrowingLayer()), (DynamicSlidingWindowLayer(window), GrowingSlidingLayer(window))]
        for step, n in enumerate(lengths):
            k, v = torch.randn(2, 3, n, 4), torch.randn(2, 3, n, 4)
            for theirs, ours in pairs:
                if step == 3:  # what is put there from outside is taken up
                    for layer in (theirs, ours):
                        layer.keys, layer.values = layer.keys * 2, layer.values * 2
                for a, b in zip(theirs.update(k, v), ours.update(k, v), strict=True):
                    assert torch.equal(a, b)
                assert torch.equal(theirs.keys, ours.keys)
                assert theirs.get_seq_length() == ours.get_seq_length()
                assert theirs.get_mask_sizes(1) == ours.get_mask_sizes(1)
    finally:
        module.SPARE = old


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_logits_are_equal_step_by_step(name, monkeypatch):
    monkeypatch.setattr(module, "SPARE", 3)
    model = dense_model(name)
    ids = torch.randint(0, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=model.config), growing_cache(model)]
    with torch.inference_mode():
        for tokens in (ids, *torch.randint(0, VOCABULARY, (12, 1, 1), generator=torch.Generator().manual_seed(1))):
            a, b = (model(tokens, use_cache=True, **{cache_name(model): cache}).logits for cache in caches)
            assert torch.equal(a, b)
    kinds = {type(layer) for layer in caches[1].layers}
    assert kinds <= {GrowingLayer, GrowingSlidingLayer}


def test_a_step_moves_no_memory_until_the_buffer_is_full(monkeypatch):
    monkeypatch.setattr(module, "SPARE", 4)
    layer, one = GrowingLayer(), torch.randn(1, 1, 1, 2)
    places = []
    for _ in range(10):
        layer.update(one, one)
        places.append(layer.keys.data_ptr())
    assert len(set(places)) == 2


def test_other_models_make_their_own_cache():
    assert growing_cache(object()) is None
