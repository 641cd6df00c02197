"""The merges of a vocabulary that states none: every pair of its tokens that joins into a token.

    pairs = merges(vocabulary, rank)      the lowest rank of the joined token first, then the
                                          longest left part

The tokens of a vocabulary of 262,144 can be cut at 1.2 million positions; the native core looks up
both sides of each, and Python does where there is no core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..numerics.transpose import native

Pairs = list[tuple[str, str]]


def merges(vocabulary: Iterable[str], rank: Mapping[str, float]) -> Pairs:
    """Every pair of tokens of the vocabulary (the keys of `rank`) that joins into one, in the order
    merges are tried.
    """
    words = sorted(rank, key=rank.__getitem__)
    found = _joined(words)
    if found is None:
        pairs = _joined_by_words(words, set(vocabulary))
    else:
        names = np.array([*words, ""], object)
        left, right = (names[places].tolist() for places in found)
        pairs = list(zip(left, right, strict=True))
    if len(set(rank.values())) < len(rank):
        # Tokens of one rank: the longest left part decides among all their pairs.
        pairs.sort(key=lambda p: (rank[p[0] + p[1]], -len(p[0]), -len(p[1])))
    return pairs


def _joined(words: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Left and right parts as indices of words, word after word, the longest left part first;
    None without a core.
    """
    core = native()
    if core is None:
        return None
    characters = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), "<u4")
    ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
    left, right = np.empty((2, max(len(characters), 1)), np.int32)
    count = core.merges(characters, ends, left, right)
    return left[:count], right[:count]


def _joined_by_words(words: list[str], known: set[str]) -> Pairs:
    """The pairs themselves, in the same order."""
    return [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(len(word) - 1, 0, -1)
        if word[:cut] in known and word[cut:] in known
    ]
