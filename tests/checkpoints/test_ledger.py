"""Entries of the ledger: which absent name is reported, and shapes that config.json contradicts."""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.architecture import Requirement
from halfbyte.checkpoints.ledger import MISSING, SHAPE, requirement_entries


@pytest.mark.parametrize(
    ("names", "there", "reported"),
    [
        ((("a.q", "a.k"), ("a.qkv",)), (), "a.q"),  # none is there: the usual names
        ((("a.q", "a.k"), ("a.qkv",)), ("a.q",), "a.k"),
        ((("a.qkv",), ("a.q", "a.k")), ("a.k",), "a.q"),  # a part of the second
        ((("a.q", "a.k", "a.v"), ("b.q", "b.k")), ("a.q", "b.q"), "b.k"),  # the larger part
        ((("n.gate", "m.w"), ("m.gate.w", "other.w")), ("m.gate.x",), "m.gate.w"),  # the path of the first name is in use
        ((("n.gate", "m.gate.w"), ("o.w", "m.gate.v")), ("m.gate.x",), "n.gate"),  # those of later names do not count
        ((("lm_head",), ("model.lm_head",)), ("model.norm",), "lm_head"),
        ((("x.lm_head",), ("model.lm_head",)), ("model.norm",), "model.lm_head"),
    ],
)
def test_the_absent_name_is_of_the_alternative_most_in_use(names, there, reported) -> None:
    (entry,) = requirement_entries([Requirement(names)], dict.fromkeys(there, (4, 4)), {})
    assert (entry.name, entry.status) == (reported, MISSING)


@pytest.mark.parametrize(
    ("shape", "expected", "wrong"),
    [
        ((8, 16), (8, 16), False), ((8, 16), (8, None), False), ((8, 16), (None, None), False), ((8, 16), (9, 16), True),
        ((8, 16), (None, 15), True), ((8, 16), (16, 8), True), ((128,), (8, 16), True), ((128,), (None, None), False),
        ((2, 8, 16), (9, 17), False),
    ],
)  # fmt: skip
def test_shapes_that_config_json_contradicts(shape, expected, wrong) -> None:
    entries = requirement_entries([Requirement((("a.w",),))], {"a.w": shape}, {"a.w": expected})
    assert [(e.name, e.status) for e in entries] == [("a.w", SHAPE)] * wrong


@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        ({"a.norm": (8,)}, []),
        ({"a.norm": (9,)}, ["a.norm"]),
        ({"b.norm": (9,)}, []),
        ({"a.norm": (9,), "b.norm": (8,)}, ["a.norm"]),
    ],
)
def test_a_vectors_shape_is_that_of_its_usual_name(shapes, wrong) -> None:
    entries = requirement_entries([Requirement((("a.norm",), ("b.norm",)), (8,))], shapes, {})
    assert [e.name for e in entries] == wrong
