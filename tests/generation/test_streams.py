"""Stop texts: what is given, what is held back, whatever the pieces."""

from __future__ import annotations

from itertools import product

import pytest

from halfbyte.generation.streams import StopTexts, until_stop

STOPS = (["###", "END"], ["b", "abc"], ["abc", "bc"], ["aab"], ["ab", "abab", "c"], ["aa"], [])


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_stop_text_ends_the_text_however_it_is_cut(stop):
    """Every text of five letters, in every way to cut it into pieces."""
    for letters in product("abc", repeat=5):
        text = "".join(letters)
        ends = [(end, -len(s)) for s in stop for end in range(len(text) + 1) if text[:end].endswith(s)]
        want = text if not ends else text[: min(ends)[0] + min(ends)[1]]
        assert until_stop(text, stop) == want
        for cuts in product((False, True), repeat=4):
            until, pieces = StopTexts(stop), [letters[0]]
            for letter, cut in zip(letters[1:], cuts, strict=True):
                pieces = [*pieces, letter] if cut else [*pieces[:-1], pieces[-1] + letter]
            given = ""
            for count, piece in enumerate(pieces, 1):
                given += until(piece)
                held = "".join(pieces[:count])[len(given) :]
                assert until.stopped or not held or any(s != held and s.startswith(held) for s in stop)
            assert (given + until.rest(), until.stopped) == (want, bool(ends))
