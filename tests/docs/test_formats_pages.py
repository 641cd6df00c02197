"""The pages of formats and policies name every word and policy; the policies' table covers each
producer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.formats import FAMILIES

DOCS = Path(__file__).parents[2] / "docs" / "formats"
OWN = [f for f in FAMILIES.values() if not f.name.startswith("ggml")]


@pytest.mark.parametrize("family", OWN, ids=lambda f: f.name)
def test_every_codec_has_its_row(family):
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    for word in family.codecs:
        numbered = word.rstrip("12345678")
        assert f"`{word}`" in text or f"`{numbered}1` …" in text, word


@pytest.mark.parametrize("family", OWN, ids=lambda f: f.name)
def test_every_policy_has_its_row(family):
    rows = [line for line in (DOCS / "policies.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for producer in family.policies:
        words = {w.rstrip("12345678") for w in family.codecs if producer in family.policies_of(w)}
        named = [r for r in rows if f"`{producer}`" in r.split("|")[1]]
        assert named, producer
        assert any(family.name in r.split("|")[2] or any(w in r.split("|")[2] for w in words) for r in named), (producer, words)


@pytest.mark.parametrize("family", OWN, ids=lambda f: f.name)
def test_policies_name_codecs_that_exist(family):
    assert set(family.policy_codecs) <= set(family.policies)
    assert {w for words in family.policy_codecs.values() for w in words} <= set(family.codecs)
    assert {(p, w) for p, w in family.exceptions if w not in family.policies_of(p) and p not in family.policies_of(w)} == set()
