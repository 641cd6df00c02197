"""The merges of a vocabulary that states none: every pair of its tokens that joins into a token.

    pairs = merges(vocabulary, rank)      the lowest rank of the joined token first, then the longest left part

A vocabulary of 262,144 tokens has 1.2 million places to cut one. Both sides of each are looked up at once, by 64-bit hashes of
all parts; what is found is compared character by character, and a vocabulary in which two parts share a hash is searched again
in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BASE = 0x9E3779B97F4A7C15
"""An odd number, so that it has an inverse among 64-bit words."""
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SPREAD = 3
"""Bits that the table of hashes has beyond those its entries need."""

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


def merges(vocabulary: Iterable[str], rank: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens of the vocabulary (the keys of `rank`) that joins into one, in the order merges are tried."""
    words = list(rank)
    found = _joined(words, np.fromiter(rank.values(), np.float64, len(words)))
    if found is None:
        return merges_by_words(vocabulary, rank)
    names = np.array([*words, ""], object)  # with one string of another length, or NumPy would look into them
    left, right = (names[places].tolist() for places in found)
    return list(zip(left, right, strict=True))


def _joined(words: list[str], rank: NDArray[np.float64]) -> tuple[Places, Places] | None:
    """Left and right tokens of every merge in order; None when two of the vocabulary's parts have one hash."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    characters = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), "<u4")
    hash_of = Parts(characters)
    table = Table(hash_of(starts, ends))
    if not np.array_equal(table.find(table.hashes), np.arange(len(words))):
        return None
    whole = np.repeat(np.arange(len(words)), lengths)
    cuts = np.arange(len(characters))
    left = table.find(hash_of(starts[whole], cuts))
    left[cuts == starts[whole]] = -1  # nothing before it
    cuts, whole, left = (a[left >= 0] for a in (cuts, whole, left))
    right = table.find(hash_of(cuts, ends[whole]))
    cuts, whole, left, right = (a[right >= 0] for a in (cuts, whole, left, right))
    for part, token in ((starts[whole], left), (cuts, right)):
        if not _same(characters, part, starts[token], lengths[token]):
            return None
    order = np.lexsort((-lengths[right], -lengths[left], rank[whole]))
    return left[order], right[order]


class Parts:
    """Hashes of parts of a text: Σ (cᵢ + 1) · BASE^(i − start) modulo 2^64, from sums over the whole."""

    def __init__(self, characters: NDArray[np.uint32]) -> None:
        self._back = _powers(pow(BASE, -1, 1 << 64), len(characters) + 1)
        self._sums = np.zeros(len(characters) + 1, np.uint64)
        np.cumsum((characters + np.uint64(1)) * _powers(BASE, len(characters)), out=self._sums[1:])

    def __call__(self, starts: Places, ends: Places) -> Hashes:
        hashes: Hashes = (self._sums[ends] - self._sums[starts]) * self._back[starts]
        return hashes


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)


class Table:
    """Where each of many hashes stands, by open addressing: all that meet an occupied slot try the next one together."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        self._bits = max(len(hashes), 1).bit_length() + _SPREAD
        self._slots = np.full(1 << self._bits, -1, np.int64)
        at, left = self._first(hashes), np.arange(len(hashes))
        while len(left):
            free = self._slots[at] < 0
            self._slots[at[free]] = left[free]
            again = self._slots[at] != left
            at, left = self._next(at[again]), left[again]

    def find(self, wanted: Hashes) -> Places:
        """The place of each among `hashes`, -1 where it is not."""
        found = np.full(len(wanted), -1, np.int64)
        at, left = self._first(wanted), np.arange(len(wanted))
        while len(left):
            here = self._slots[at]
            equal = (here >= 0) & (self.hashes[here] == wanted[left])
            found[left[equal]] = here[equal]
            again = (here >= 0) & ~equal
            at, left = self._next(at[again]), left[again]
        return found

    def _first(self, hashes: Hashes) -> Places:
        return (((hashes ^ (hashes >> np.uint64(29))) * _MIX) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _next(self, at: Places) -> Places:
        return (at + 1) & ((1 << self._bits) - 1)


def _same(characters: NDArray[Any], a: Places, b: Places, lengths: Places) -> bool:
    """True when the parts from a and those from b have the same characters."""
    first = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(first, lengths)
    return np.array_equal(characters[np.repeat(a, lengths) + within], characters[np.repeat(b, lengths) + within])


def merges_by_words(vocabulary: Iterable[str], rank: Mapping[str, float]) -> list[tuple[str, str]]:
    """The same pairs in the same order, one cut after the other."""
    known = set(vocabulary)
    pairs = [
        (token[:cut], token[cut:])
        for token in sorted(rank, key=rank.__getitem__)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    # Tokens of one rank: the longest left part decides among all their pairs.
    pairs.sort(key=lambda p: (rank[p[0] + p[1]], -len(p[0]), -len(p[1])))
    return pairs
