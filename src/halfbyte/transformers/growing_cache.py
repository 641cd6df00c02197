"""Keys and values that grow in place: a decoding step writes its own token, where transformers' cache copies all before it.

    cache = growing_cache(model)      transformers' DynamicCache, plain and sliding layers replaced; None for other models

The numbers are those of transformers' own layers. Only for inference: what is written in place has no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

SPARE = 256
"""Tokens for which there is room after a copy."""


class Room:
    """A tensor (..., tokens, d) with room behind it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._kept: Tensor | None = None
        self._end = 0

    def append(self, old: Tensor, new: Tensor) -> Tensor:
        """`old` and then `new` along the tokens; copies `old` only if it is not what `keep` returned, or the room is used up."""
        count = old.shape[-2] if old.dim() > 1 else 0  # an empty cache is one-dimensional
        more = new.shape[-2]
        if self._buffer is None or old is not self._kept or self._end + more > self._buffer.shape[-2]:
            self._buffer = new.new_empty((*new.shape[:-2], count + more + SPARE, new.shape[-1]))
            if count:
                self._buffer[..., :count, :] = old
            self._end = count
        self._buffer[..., self._end : self._end + more, :] = new
        self._end += more
        return self._buffer[..., self._end - count - more : self._end, :]

    def keep(self, full: Tensor, tokens: int | None = None) -> Tensor:
        """The last `tokens` of what `append` returned, all when None: the `old` of the next call."""
        self._kept = full if tokens is None else full[..., -tokens:, :]
        return self._kept


class GrowingLayer(DynamicLayer):  # type: ignore[misc] # transformers is not type-checked
    """A layer that attends to everything."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms = Room(), Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v = self._rooms
        self.keys = k.keep(k.append(self.keys, key_states))
        self.values = v.keep(v.append(self.values, value_states))
        return self.keys, self.values


class GrowingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer that attends to the last `sliding_window` tokens."""

    keys: Tensor
    values: Tensor

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self._rooms = Room(), Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if getattr(self, "record_past", False):  # assisted decoding, which takes tokens back
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        k, v = self._rooms
        keys, values = k.append(self.keys, key_states), v.append(self.values, value_states)
        self.keys = k.keep(keys, self.sliding_window - 1)
        self.values = v.keep(values, self.sliding_window - 1)
        return keys, values


def growing_cache(model: Any) -> DynamicCache | None:
    """An empty cache for one text; None for a model that is not transformers' or makes a cache of its own kind, and off the CPU,
    where a copy is not what a step waits for."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "_is_stateful", False) or model.device.type != "cpu":
        return None
    cache = DynamicCache(config=model.config)
    cache.layers = [_growing(layer) for layer in cache.layers]
    return cache


def _growing(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingSlidingLayer(layer.sliding_window)
    return layer
