"""One sequence in a model: tokens in, logits of the last one out.

    session = DecodeSession(model)
    logits = session(prompt_ids)      all tokens in one pass of the model
    logits = session([token])         one more token

Of a model with an encoder (T5) the first call's tokens are the encoder's text.

Single tokens go through `native_step` where it supports the model, else through the model's own
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..compat import DynamicLayer, DynamicSlidingWindowLayer, cache_name, keeps_states
from .kv_cache import GrowingLayer, GrowingSlidingLayer, growing_cache
from .native_step import Step, native_step


class DecodeSession:
    """A model with the cache of one sequence.

    tokens  so far
    state   the model's cache, None before the first call for a model that makes its own
    step    the native step for single tokens; None where the model's own forward is called
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.state: Any = growing_cache(model)
        self.step: Step | None = None
        self._two_sides = bool(getattr(model.config, "is_encoder_decoder", False))
        self._encoded: Any = None  # what the decoder of a model of two sides attends to
        self._name = cache_name(model)
        self._started = self._chosen = False

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits (vocabulary,) after these tokens, which follow those of earlier calls."""
        logits = self._logits(ids)
        self.tokens += ids
        return logits

    def rewind(self, count: int) -> bool:
        """Forget all tokens but the first `count`; several may follow. False, and nothing is
        forgotten, where the cache does not allow it: other states than keys and values, a window
        that has moved on, a model with an encoder.
        """
        back = len(self.tokens) - count
        if not self._has_keys_alone() or (back and not self._crop(back)):
            return False
        del self.tokens[count:]
        return True

    def _has_keys_alone(self) -> bool:
        """Whether what the model has of earlier tokens is in its cache, as keys and values. Other
        states are for one token at a time: of several, Mamba and others compute the first as if
        nothing preceded it.
        """
        if type(self.state) is not DynamicCache or keeps_states(self.model):  # MiniMax derives from it
            return False
        return not any(hasattr(layer, "conv_states") for layer in self.state.layers)

    def _crop(self, back: int) -> bool:
        if self.step is not None:
            self.step.commit()
        if not all(_can_crop(layer) for layer in self.state.layers):
            return False
        self.state.crop(-back)  # a number above 0 is of tokens that stay in some versions, refused in others
        return True

    def _logits(self, ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor([ids], device=getattr(self.model, "device", "cpu"))
        with torch.inference_mode():
            if len(ids) == 1 and self._started:
                if not self._chosen:
                    self.step, self._chosen = native_step(self.model, self.state), True
                if self.step is not None:
                    logits: Tensor = self.model.lm_head(self.step(self.model.model.embed_tokens(tokens)))
                    return logits[0, -1]
            if self.step is not None:
                self.step.commit()
            if self._two_sides:
                out = self._decode(tokens)
            else:
                out = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self._name: self.state})
            self.state, self._started = out[self._name], True
            last: Tensor = out.logits[0, -1]
            return last

    def _decode(self, tokens: Tensor) -> Any:
        """A pass of a model of two sides. The first tokens go to the encoder, the decoder begins
        with its own.
        """
        if self._encoded is None:
            self._encoded = self.model.get_encoder()(input_ids=tokens)
            tokens = torch.full((1, 1), self.model.config.decoder_start_token_id, device=tokens.device)
        given = {self._name: self.state, "encoder_outputs": self._encoded}
        return self.model(decoder_input_ids=tokens, use_cache=True, **given)


def _can_crop(layer: Any) -> bool:
    """Whether a layer of a cache has keys and values of all tokens."""
    if type(layer) in (DynamicLayer, GrowingLayer):
        return bool(layer.is_initialized)
    sliding = type(layer) in (DynamicSlidingWindowLayer, GrowingSlidingLayer)
    return sliding and layer.cumulative_length < layer.sliding_window
