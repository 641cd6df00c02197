"""Attention of a prompt: the bits of the same tokens one by one, whatever the call begins with, and
softmax's values.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.backends.cpu import native, set_threads
from halfbyte.errors import ShapeError
from support.cpu_weights import each_set, instruction_set, needs_native  # noqa: F401

pytestmark = needs_native
ALL = np.iinfo(np.int64).max


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prompt(q, keys, values, count, begin, window, scale):
    heads, tokens, d = q.shape
    y = np.full((tokens, heads * d), np.nan, np.float32)
    native().attend(q, keys, values, count, begin, window, scale, y)
    return y


def one_token(q, keys, values, at, begin, window, scale):
    """A decoding step's attention of token `at` of the cache, whose first token is token `begin`."""
    heads, d = q.shape
    keys, values, y = keys.copy(), values.copy(), np.empty((heads, d), np.float32)
    step, seen = native().Step(), min(at + 1, window)
    step.attend(0, q, np.ascontiguousarray(keys[:, at]), np.ascontiguousarray(values[:, at]), d, scale, y)
    step.bind([keys], [values], [], [])
    step.run(np.array([at + 1 - seen]), np.array([seen]), 0, begin + at)
    return y


CACHES = {
    "group": st.integers(1, 5),
    "kv_heads": st.integers(1, 3),
    "d": st.sampled_from([2, 6, 16, 40, 64, 80, 256]),
    "tokens": st.integers(1, 150),
    "before": st.integers(0, 140),
    "begin": st.integers(0, 200),
    "window": st.sampled_from([1, 4, 63, 64, 65, 100, ALL]),
    "seed": st.integers(0, 99),
}


@each_set
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**CACHES)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    instruction_set, group, kv_heads, d, tokens, before, begin, window, seed,  # noqa: F811
):  # fmt: skip
    heads, count, scale = group * kv_heads, before + tokens, d**-0.5
    q, keys, values = (
        normal(seed, heads, tokens, d),
        normal(seed + 1, kv_heads, count + 2, d),
        normal(seed + 2, kv_heads, count + 2, d),
    )
    y = prompt(q, keys, values, count, begin, window, scale)
    for t in {0, 1, tokens // 2, tokens - 1} & set(range(tokens)):
        one = one_token(np.ascontiguousarray(q[:, t]), keys, values, before + t, begin, window, scale)
        assert np.array_equal(y[t], one.reshape(-1)), t
    positions = np.arange(count)
    own = positions[before:, None]
    hidden = (positions > own) | (positions <= own - min(window, count + 1))
    scores = np.einsum("hgtd,hsd->hgts", q.reshape(kv_heads, group, tokens, d).astype(np.float64), keys[:, :count]) * scale
    scores[..., hidden] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hgts,hsd->thgd", p / p.sum(-1, keepdims=True), values[:, :count]).reshape(tokens, -1)
    assert np.abs(y - wanted).max() <= 4e-6 * np.abs(values).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["keys", "values", "q"])
def test_a_token_that_is_no_number_is_seen_by_later_ones_alone(bad, where):
    q, keys, values = normal(0, 2, 90, 16), normal(1, 1, 90, 16), normal(2, 1, 90, 16)
    plain = prompt(q, keys, values, 90, 0, ALL, 0.25)
    {"keys": keys, "values": values, "q": q}[where][:, 70] = bad
    y = prompt(q, keys, values, 90, 0, ALL, 0.25)
    assert np.array_equal(y[:70], plain[:70])
    assert not np.isfinite(y[70]).all()
    assert np.array_equal(y[71:], plain[71:]) == (where == "q")


def test_threads_change_nothing():
    q, keys, values = normal(0, 6, 200, 64), normal(1, 2, 300, 64), normal(2, 2, 300, 64)
    found = []
    for threads in (1, 2, 5):
        set_threads(threads)
        found.append(prompt(q, keys, values, 300, 0, 128, 0.1))
    set_threads(0)
    assert all(np.array_equal(found[0], y) for y in found[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"q": normal(0, 3, 4, 8)}, {"q": normal(0, 4, 4, 6)}, {"q": normal(0, 4, 0, 8)}, {"q": normal(0, 4, 8)},
        {"keys": normal(0, 2, 9, 8)}, {"values": normal(0, 2, 10, 7)},
        {"keys": normal(0, 0, 10, 8), "values": normal(0, 0, 10, 8)},
        {"count": 3}, {"count": 11}, {"count": -1}, {"begin": -1}, {"begin": 1 << 48}, {"begin": ALL}, {"window": 0},
        {"y": np.empty((4, 31), np.float32)}, {"y": np.empty((4, 32))},
        {"y": np.frombuffer(bytes(512), np.float32).reshape(4, 32)},
        {"q": normal(0, 4, 8, 8)[:, ::2]},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change):
    given = {"q": normal(0, 4, 4, 8), "keys": normal(1, 2, 10, 8), "values": normal(2, 2, 10, 8), "count": 6, "begin": 0,
             "window": 5, "scale": 1.0, "y": np.empty((4, 32), np.float32)}  # fmt: skip
    native().attend(**given)
    with pytest.raises(ShapeError, match=r"\[attend\]"):
        native().attend(**(given | change))


def test_no_operation_writes_to_a_read_only_array():
    """Where the file of a mapped array is read-only, to write to it ends the process."""

    def fixed(*shape):
        array = np.ones(shape, np.float32)
        array.flags.writeable = False
        return array

    step, row, heads = native().Step(), fixed(8), np.ones((2, 8), np.float32)
    calls = [
        lambda: step.norm(row, row, 1e-6, fixed(8)),
        lambda: step.rotate(fixed(2, 8), 8, 0),
        lambda: step.attend(0, heads, row, row, 8, 1.0, fixed(2, 8)),
        lambda: step.gate(native().Gate.silu, row, row, fixed(8)),
        lambda: step.add(row, fixed(8)),
        lambda: step.bind([fixed(1, 4, 8)], [np.ones((1, 4, 8), np.float32)], [], []),
        lambda: step.bind([np.ones((1, 4, 8), np.float32)], [fixed(1, 4, 8)], [], []),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match="read-only"):
            call()
