"""Sampling of requests that are computed together: each row of a batch has a temperature, top_k and
top_p of its own.

transformers' continuous batching samples all of them under the settings of the first request unless
it is given processors of logits that take settings of each request. Greedy is top_k = 1: one token
is left, and drawing finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

import torch

Settings = dict[str, Any]
"""temperature, top_k and top_p of a request."""


def settings_of(config: Any, vocabulary: int) -> Settings:
    """What a request of a generation config is drawn by.

    vocabulary  number of the model's tokens, for a config without top_k
    """
    if not config.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    temperature, top_p = config.temperature, config.top_p
    return {
        "temperature": 1.0 if temperature is None else float(temperature),
        "top_k": int(config.top_k or vocabulary),
        "top_p": 1.0 if top_p is None else float(top_p),
    }


def shared_config(config: Any) -> Any:
    """A generation config with which transformers makes a processor of each of the three settings.
    Their values are those of no request: each gives its own.
    """
    shared = deepcopy(config)
    shared.do_sample, shared.temperature, shared.top_k, shared.top_p = True, 0.5, 1, 0.5
    return shared


class TopKRows(ContinuousBatchingTopKLogitsWarper):  # type: ignore[misc] # transformers is not type-checked
    """Sorts only the rows that need it; greedy rows keep their first largest logit."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        top_k = tensor_arg[: scores.shape[0]]
        greedy, cut = top_k == 1, (top_k > 1) & (top_k < scores.shape[1])
        out = scores.clone()
        if bool(greedy.any()):
            kept = scores[greedy].argmax(-1, keepdim=True)
            out[greedy] = torch.full_like(scores[greedy], self.filter_value).scatter(-1, kept, 0.0)
        if bool(cut.any()):
            out[cut] = super().__call__(scores[cut], top_k[cut])
        return out


class TopPRows(ContinuousBatchingTopPLogitsWarper):  # type: ignore[misc] # as above
    """Sorts only the rows that need it."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        cut = tensor_arg[: scores.shape[0]].view(torch.float32) < 1
        if not bool(cut.any()):
            return scores
        out = scores.clone()
        out[cut] = super().__call__(scores[cut], tensor_arg[: scores.shape[0]][cut])
        return out


def sort_few_rows(processors: Any) -> None:
    """Replaces transformers' top_k and top_p, which sort the vocabulary twice for every token, in a
    list of processors. Not on a GPU, whose graphs know no number of rows.
    """
    rows = {ContinuousBatchingTopKLogitsWarper: TopKRows, ContinuousBatchingTopPLogitsWarper: TopPRows}
    for i, processor in enumerate(processors):
        if type(processor) in rows:
            processors[i] = rows[type(processor)](processor)


class OwnSettings:
    """transformers' manager of a batch, whose requests are added under their own settings.

    settings  request id -> its settings, taken when it is added
    """

    def __init__(self, manager: Any, settings: dict[str, Settings]) -> None:
        self._manager, self._settings = manager, settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, input_ids: Any, *, request_id: str, **options: Any) -> Any:
        return self._manager.add_request(input_ids, request_id=request_id, **options, **self._settings.pop(request_id))

    def forget(self, request_id: str) -> None:
        """Frees the request's place in the batch, and who waits for it; one that has ended, or was
        never added, is passed over.
        """
        self._settings.pop(request_id, None)
        self._manager.cancel_request(request_id)
        router = self._manager.output_router
        with router._lock:
            router.result_handlers.pop(request_id, None)


def at_the_end_of_this_task(call: Callable[[], None]) -> None:
    """Calls `call` when the task that handles the request has ended, however it does: a stream
    whose client leaves before its first token is never begun, and cannot cancel itself.
    """
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(lambda _: call())


class Sampled:
    """For transformers' handlers: a request that gives a temperature or top_p is drawn by it.
    Theirs passes over both where the model's own generation config is greedy.
    """

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        if body.get("temperature") or (body.get("temperature") is None and body.get("top_p") is not None):
            config.do_sample = True
        return config
