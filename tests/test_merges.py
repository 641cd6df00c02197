"""The merges of a vocabulary that states none, found by hashes and found word by word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.transformers import merges as module
from halfbyte.transformers.merges import Table, merges, merges_by_words

WORDS = st.lists(st.text("aab\u2581é\U0001f600", max_size=6), max_size=40, unique=True)


@given(words=WORDS, ranks=st.lists(st.integers(-3, 3), min_size=40, max_size=40))
def test_hashes_find_what_words_find(words, ranks):
    for rank in ({w: i for i, w in enumerate(words)}, {w: r / 2 for w, r in zip(words, ranks, strict=False)}):
        assert merges(dict.fromkeys(words), rank) == merges_by_words(dict.fromkeys(words), rank)


@pytest.mark.parametrize("base", [1, 3])
def test_parts_with_one_hash_are_told_apart(monkeypatch, base):
    """Base 1 adds characters up, so that "ab" is "ba"; then words are compared themselves."""
    monkeypatch.setattr(module, "BASE", base)
    words = ["a", "b", "c", "ab", "ba", "abc", "ca", "aab", "d", "dd"]
    rank = {w: i for i, w in enumerate(words)}
    assert merges(rank, rank) == merges_by_words(rank, rank)


def test_a_part_that_only_looks_like_a_token_is_none(monkeypatch):
    monkeypatch.setattr(module, "BASE", 1)
    words = ["ac", "bb", "aca"]  # with base 1 "ac" is "bb", and "ca" would be "ac"
    assert merges(words, {w: i for i, w in enumerate(words)}) == []
    words = ["ac", "d", "dca"]  # no two tokens share a hash, but "ca" looks like "ac"
    assert merges(words, {w: i for i, w in enumerate(words)}) == []


WORDS_OF_64_BITS = st.lists(st.integers(0, 2**64 - 1), max_size=60, unique=True)


@given(hashes=WORDS_OF_64_BITS, others=WORDS_OF_64_BITS)
def test_a_table_knows_where_each_hash_stands(hashes, others):
    table = Table(np.array(hashes, np.uint64))
    found = table.find(np.array([*hashes, *others], np.uint64))
    assert found.tolist() == [hashes.index(h) if h in hashes else -1 for h in [*hashes, *others]]


def test_a_crowded_table(monkeypatch):
    monkeypatch.setattr(module, "_MIX", np.uint64(0))  # every hash meets in one slot
    table = Table(np.arange(50, dtype=np.uint64))
    assert table.find(np.arange(60, dtype=np.uint64)).tolist() == [*range(50), *[-1] * 10]
