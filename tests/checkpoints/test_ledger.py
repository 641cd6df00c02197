"""Entries of the ledger: which absent name is reported, shapes that config.json contradicts, and
what is refused.
"""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.architecture import Requirement
from halfbyte.checkpoints.ledger import (
    ACTIVATION_SCALES,
    AUXILIARY_NAMES,
    MISSING,
    SHAPE,
    Ledger,
    key_entries,
    requirement_entries,
    sort_tensor,
)
from halfbyte.errors import CheckpointError
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.claims import CONSUMED, HARMLESS, UNKNOWN, KeyUse


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
    ("names", "by", "why"),
    [
        ((("a",), ("b",), ("c",), ("d",)), "the header", "the header requires it or b or c"),  # two others at most
        ((("a",), ("b", "c"), ("d",)), "the header", "the header requires it or d"),  # of one name each
        ((("a",),), "the header", "the header requires it"),
        ((("a",), ("b",)), "config.json", "config.json requires it"),
    ],
)
def test_an_absent_name_of_a_header_comes_with_other_names_for_it(names, by, why) -> None:
    (entry,) = requirement_entries([Requirement(names)], {}, {}, by)
    assert (entry.name, entry.why) == ("a", why)


@pytest.mark.parametrize(
    ("shape", "expected", "wrong"),
    [
        ((8, 16), (8, 16), False), ((8, 16), (8, None), False), ((8, 16), (None, None), False), ((8, 16), (9, 16), True),
        ((8, 16), (None, 15), True), ((8, 16), (16, 8), True), ((128,), (8, 16), True), ((128,), (None, None), False),
        ((128,), (8, None), True), ((128,), (None, 16), True), ((), (8, None), True),
        ((1, 8, 16), (8, None), True), ((1, 8, 16), (None, 16), True), ((1, 8, 16), (None, None), False),
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


USES = (KeyUse("bits", 4, CONSUMED), KeyUse("rotation", "spin", UNKNOWN), KeyUse("dataset", "c4", HARMLESS, "a note"))
LEDGER = Ledger(
    (
        *key_entries(USES),
        *(sort_tensor(name, "uint8", (4, 4), "", {}) for name in ("m.extra.a", "m.extra.b")),
        sort_tensor("m.norm", "float32", (4,), "", {}),
    )
)


def test_unknown_keys_and_tensors_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError) as caught:
        LEDGER.require("convert", "model")
    assert str(caught.value).startswith(
        "[convert] model: not everything in it is accounted for: config key rotation: unknown ('spin': no reader knows it); "
        "m.extra.a: unknown (uint8 [4, 4], which no layout reads); m.extra.b: unknown"
    )
    assert not {"bits", "dataset", "m.norm"} & {e.name for e in LEDGER.problems}


def test_what_is_allowed_by_name_is_let_through_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"^\[open\] let through unaccounted for: rotation, m.extra.a, m.extra.b$"):
        LEDGER.require("open", "model", ["rotation", "m.extra.*"])
    with pytest.raises(CheckpointError, match=r"m\.extra\.b: unknown") as caught:
        LEDGER.require("open", "model", ["rotation", "m.extra.a"])
    assert "rotation" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"allow-unknown 'm.norm' matches nothing that is unknown or missing"):
        LEDGER.require("open", "model", ["m.norm"])


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("bias", True), ("expert_bias", True), ("tid2eid", True), ("input_scale", True),
        ("lora_A.default.weight", False), ("lora_magnitude_vector", False),
        ("parametrizations.weight.original0", False), ("smooth_scale", False), ("weight_g", False),
        ("rotation", False), ("zero_points", False), ("adapter.down.weight", False),
        ("adapter.down", False),
    ],
)  # fmt: skip
def test_what_lies_beside_or_below_a_dense_matrix_is_its_bias_or_is_unknown(name, known) -> None:
    tensors = {"m.x.weight": (4, 4), f"m.x.{name}": (4,), "m.norm.weight": (4,), "m.norm.scale_shift": (4,)}
    assert (sort_tensor(f"m.x.{name}", "float16", (4,), "", tensors).status != UNKNOWN) == known
    assert sort_tensor("m.norm.scale_shift", "float16", (4,), "", tensors).status != UNKNOWN, "a norm has no matrix"


def test_what_a_layout_calls_harmless_is_no_weight_to_any_command() -> None:
    """`load_model`, `dequantize`, `verify` and the findings go by the ledger's names."""
    named = {part.rpartition(".")[2] for layout in LAYOUTS.values() for part in layout.harmless}
    assert "input_scale_2" in named
    assert named <= set(AUXILIARY_NAMES)
    assert {name for name in named if name.startswith(("input_", "activation_"))} <= set(ACTIVATION_SCALES)


@pytest.mark.parametrize("matrix", ["m.x.weight", "weight"])
def test_a_tensor_named_as_a_module_and_one_beside_no_module_belong_to_no_matrix(matrix: str) -> None:
    assert sort_tensor("m.x", "float16", (4,), "", {matrix: (4, 4), "m.x": (4,)}).status != UNKNOWN


@pytest.mark.parametrize(
    ("name", "matrix", "unknown"),
    [
        ("m.q_input.weight", "m.q.weight", True),  # a transform's matrix
        ("m.q_other.weight", "m.q.weight", False),
        ("m.y.weight", "m.y", False),
        ("m.gate_up_proj_scale", "m.gate_up_proj", True),
        ("m.gate_up_proj_scale", "m.gate_up_proj.weight", True),
        ("m.gate_up_proj_blocks", "m.gate_up_proj", True),
        ("m.gate_up_proj_scale", "m.down_proj", False),
    ],
)
def test_a_name_that_ends_as_scales_and_transforms_do_is_of_the_matrix_before_its_ending(name, matrix, unknown) -> None:
    assert (sort_tensor(name, "float16", (4,), "", {matrix: (4, 4), name: (4,)}).status == UNKNOWN) == unknown
