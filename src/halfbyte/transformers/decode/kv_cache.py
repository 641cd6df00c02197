"""A KV cache that grows in place: a decoding step appends one token, where transformers' cache
copies all earlier tokens.

    cache = growing_cache(model)      transformers' DynamicCache with its full and sliding layers
                                      replaced; None for other models

Values equal those of transformers' own layers. For inference only: writes in place record no
gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...backends.cpu import aligned_empty
from ..compat import DynamicLayer, DynamicSlidingWindowLayer

SPARE = 256
"""Free tokens behind the data after a reallocation."""


class GrowingBuffer:
    """A tensor (..., tokens, d) with spare capacity behind it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._kept: Tensor | None = None
        self._end = 0

    def append(self, old: Tensor, new: Tensor) -> Tensor:
        """`old` and then `new` along the tokens; copies `old` only if `keep` did not return it or
        the buffer is full.
        """
        count = old.shape[-2] if old.dim() > 1 else 0  # an empty cache is one-dimensional
        more = new.shape[-2]
        buffer = self._with_room(old, count, new, more)
        buffer[..., self._end : self._end + more, :] = new
        self._end += more
        return buffer[..., self._end - count - more : self._end, :]

    def _with_room(self, old: Tensor, count: int, like: Tensor, more: int) -> Tensor:
        """The buffer, `old`'s `count` tokens at its end and capacity for `more` behind it."""
        if self._buffer is None or old is not self._kept or self._end + more > self._buffer.shape[-2]:
            self._buffer = _empty((*like.shape[:-2], count + more + SPARE, like.shape[-1]), like.dtype)
            if count:
                self._buffer[..., :count, :] = old
            self._end = count
        return self._buffer

    def open(self, old: Tensor) -> tuple[Tensor, int]:
        """(`old` in the buffer, free tokens behind it): at least one."""
        buffer = self._with_room(old, old.shape[-2], old, 1)
        return self.keep(self.close(old, 0)), buffer.shape[-2] - self._end

    def close(self, old: Tensor, more: int) -> Tensor:
        """`old` and the `more` tokens that were written behind it since `open`."""
        assert self._buffer is not None
        self._end += more
        return self._buffer[..., self._end - old.shape[-2] - more : self._end, :]

    def keep(self, full: Tensor, tokens: int | None = None) -> Tensor:
        """The last `tokens` of what `append` returned, all when None: the `old` of the next call."""
        self._kept = full if tokens is None else full[..., -tokens:, :]
        return self._kept


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on huge pages, as weights have: a step reads all of it."""
    raw = torch.from_numpy(aligned_empty(math.prod(shape) * dtype.itemsize))
    return raw.view(dtype).view(shape)


class Growing:
    """Base of both kinds of layer: the native step writes tokens by address between `open` and
    `close`.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool
    cumulative_length: int
    window: int | None
    """Tokens that one token sees, itself included; None for all."""
    _buffers: tuple[GrowingBuffer, GrowingBuffer]

    def open(self) -> int:
        """Free tokens behind `keys` and `values`, at least one; both may have been reallocated."""
        k, v = self._buffers
        self.keys, room = k.open(self.keys)
        self.values, _ = v.open(self.values)
        return room

    def close(self, more: int) -> None:
        """`more` tokens were written behind."""
        kept = None if self.window is None else self.window - 1
        k, v = self._buffers
        self.keys, self.values = k.keep(k.close(self.keys, more), kept), v.keep(v.close(self.values, more), kept)
        if self.window is not None:
            self.cumulative_length += more


class GrowingLayer(Growing, DynamicLayer):  # type: ignore[misc] # transformers is not type-checked
    """A layer that attends to everything."""

    window = None

    def __init__(self) -> None:
        super().__init__()
        self._buffers = GrowingBuffer(), GrowingBuffer()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v = self._buffers
        self.keys = k.keep(k.append(self.keys, key_states))
        self.values = v.keep(v.append(self.values, value_states))
        return self.keys, self.values


class GrowingSlidingLayer(Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer that attends to the last `sliding_window` tokens."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.window = sliding_window
        self._buffers = GrowingBuffer(), GrowingBuffer()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if getattr(self, "record_past", False):  # assisted decoding, which takes tokens back
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        k, v = self._buffers
        keys, values = k.append(self.keys, key_states), v.append(self.values, value_states)
        self.keys = k.keep(keys, self.sliding_window - 1)
        self.values = v.keep(values, self.sliding_window - 1)
        return keys, values


def growing_cache(model: Any) -> DynamicCache | None:
    """An empty cache for one text; None for a model that is not transformers' or makes a cache of
    its own kind, and off the CPU, where the copy does not limit a step.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "_is_stateful", False) or model.device.type != "cpu":
        return None
    if model.config.is_encoder_decoder:
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
