"""The merges of a vocabulary that states none, found by the native core and found word by word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.gguf_models import bpe_merges as module
from halfbyte.gguf_models.bpe_merges import merges
from support.cpu_weights import needs_native

WORDS = st.lists(st.text("aab\u2581é\U0001f600\ud800", max_size=6), max_size=40, unique=True)


def by_words(words, rank):
    """Without a core."""
    found = module._joined
    module._joined = lambda words: None
    try:
        return merges(words, rank)
    finally:
        module._joined = found


@needs_native
@given(words=WORDS, ranks=st.lists(st.integers(-3, 3), min_size=40, max_size=40))
def test_the_core_finds_what_words_find(words, ranks):
    for rank in ({w: i for i, w in enumerate(words)}, {w: r / 2 for w, r in zip(words, ranks, strict=False)}):
        assert merges(words, rank) == by_words(words, rank)


def test_the_better_token_then_the_longer_left_part_without_a_core():
    words = ["a", "b", "c", "ab", "bc", "abc"]
    assert by_words(words, {w: i for i, w in enumerate(words)}) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    assert by_words(words, dict.fromkeys(words, 0)) == [("ab", "c"), ("a", "bc"), ("a", "b"), ("b", "c")]


@needs_native
def test_a_long_token_takes_time_in_its_length():
    """Hashes of all prefixes and suffixes, each from the one before: 20 million characters would
    else take hours.
    """
    word = "a" * 10_000_000 + "b" * 10_000_000
    assert merges([word], {word: 0}) == []
    half = word[: len(word) // 2]
    assert merges([], {half: 0, word[len(half) :]: 1, word: 2}) == [(half, word[len(half) :])]
