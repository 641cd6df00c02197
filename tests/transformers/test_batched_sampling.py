"""Requests that are computed together are drawn each under its own settings."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

import torch
from halfbyte.transformers.batched_sampling import (
    OwnSettings,
    Sampled,
    TopKRows,
    TopPRows,
    settings_of,
    shared_config,
    sort_few_rows,
)
from transformers import GenerationConfig

WORDS = 50
LOGITS = torch.randn(6, WORDS, generator=torch.Generator().manual_seed(0))


def as_int32(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.int32)


def test_rows_are_cut_as_transformers_cuts_them_one_by_one():
    """Each row under its own top_k and top_p, as the plain warpers do it; greedy rows keep one."""
    top_k, top_p = [1, 5, WORDS, 1, 12, WORDS + 9], [1.0, 0.3, 1.0, 0.9, 0.95, 0.01]
    cut = TopKRows(TopKLogitsWarper(7))(LOGITS, torch.tensor(top_k, dtype=torch.int32))
    for row, k, got in zip(LOGITS, top_k, cut, strict=True):
        assert torch.equal(got.isfinite(), TopKLogitsWarper(min(k, WORDS))(None, row[None])[0].isfinite())
        if k > 1:
            assert torch.equal(got, TopKLogitsWarper(min(k, WORDS))(None, row[None])[0])
        else:
            assert got.isfinite().nonzero().tolist() == [[int(row.argmax())]]
    cut = TopPRows(TopPLogitsWarper(0.5))(LOGITS, as_int32(top_p))
    for row, p, got in zip(LOGITS, top_p, cut, strict=True):
        assert torch.equal(got, TopPLogitsWarper(p)(None, row[None])[0] if p < 1 else row)


def test_equal_largest_logits_leave_the_first():
    scores = torch.zeros(2, 4)
    scores[0, 2:] = 1
    kept = TopKRows(TopKLogitsWarper(1))(scores, torch.ones(2, dtype=torch.int32)).softmax(-1)
    assert kept.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


def test_rows_that_need_no_cut_are_not_touched():
    k, p = torch.full((6,), WORDS, dtype=torch.int32), as_int32([1.0] * 6)
    assert torch.equal(TopKRows(TopKLogitsWarper(3))(LOGITS, k), LOGITS)
    assert TopPRows(TopPLogitsWarper(0.5))(LOGITS, p) is LOGITS


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"do_sample": False, "temperature": 0.3, "top_p": 0.2}, (1.0, 1, 1.0)),
        ({"do_sample": True}, (1.0, 50, 1.0)),  # transformers' own default of top_k
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}, (0.7, 1000, 0.9)),
    ],
)
def test_settings_of_a_request(given, wanted):
    config = GenerationConfig(**{"top_k": 50, **given})
    assert tuple(settings_of(config, 1000).values()) == wanted
    shared = shared_config(config)
    assert shared.do_sample
    assert 0 < shared.top_p < 1
    assert shared.temperature not in (None, 1.0)
    assert shared.top_k
    assert config.to_dict() == GenerationConfig(**{"top_k": 50, **given}).to_dict()


def test_the_processors_of_transformers_are_replaced():
    listed = ContinuousBatchingLogitsProcessorList(
        LogitsProcessorList([TopKLogitsWarper(3), TopPLogitsWarper(0.5)]), per_request_processors=True
    )
    assert [type(p) for p in listed.logits_processor] == [ContinuousBatchingTopKLogitsWarper, ContinuousBatchingTopPLogitsWarper]
    sort_few_rows(listed.logits_processor)
    assert [type(p) for p in listed.logits_processor] == [TopKRows, TopPRows]


def test_a_request_is_added_under_its_settings_once():
    added = []
    manager = SimpleNamespace(add_request=lambda ids, **options: added.append((ids, options)), other=3)
    settings = {"a": {"temperature": 0.5}}
    own = OwnSettings(manager, settings)
    own.add_request([1], request_id="a", streaming=True)
    assert added == [([1], {"request_id": "a", "streaming": True, "temperature": 0.5})]
    assert settings == {}
    assert own.other == 3


def test_settings_of_a_request_that_is_never_added_are_forgotten():
    cancelled, handlers, settings = [], {"a": print, "b": print}, {"a": {}, "b": {}}
    router = SimpleNamespace(_lock=contextlib.nullcontext(), result_handlers=handlers)
    OwnSettings(SimpleNamespace(cancel_request=cancelled.append, output_router=router), settings).forget("a")
    assert (cancelled, list(handlers), list(settings)) == (["a"], ["b"], ["b"])


@pytest.mark.parametrize(
    ("body", "drawn"),
    [({}, False), ({"temperature": 0}, False), ({"temperature": 0, "top_p": 0.5}, False), ({"temperature": 0.8}, True),
     ({"temperature": 1.0}, True), ({"top_p": 0.5}, True)],
)  # fmt: skip
def test_a_temperature_is_not_passed_over_where_the_model_is_greedy(body, drawn):
    class Theirs:
        def _build_generation_config(self, body, defaults):
            return SimpleNamespace(do_sample=False)

    class Handler(Sampled, Theirs):
        pass

    assert Handler()._build_generation_config(body, None).do_sample == drawn
