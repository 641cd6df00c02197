"""Numbers and keys of quantization configs, before any producer's reader uses them."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.layouts.quant_config.reader import (
    GROUPS,
    MAX_DEPTH,
    WIDTHS,
    PlainReader,
    SkipListReader,
    check_numbers,
    leaves,
    path_covers,
)


class Plain(PlainReader):
    method = "plain"
    consumed = ("bits", "groups.*.num_bits")
    harmless = {"how the quantizer searched": ("damp", "search")}  # noqa: RUF012
    unchecked = ("block_size",)
    layouts = ("awq", "gptq")


class Skips(SkipListReader):
    method = "skips"
    skip_keys = ("skip", "ignore")


@pytest.mark.parametrize("key", WIDTHS)
def test_widths_are_1_to_32(key: str) -> None:
    for value in (1, 2, 31, 32, None):
        check_numbers({key: value, "nested": {"deep": {key: value}}}, "config.json")
    for value in (0, -1, 33, 4.0, "4", True, [4]):
        with pytest.raises(CheckpointError, match=rf"config\.json: nested\.{key} is .*; wanted a whole number of bits, 1 to 32"):
            check_numbers({"nested": {key: value}}, "config.json")


@pytest.mark.parametrize("key", GROUPS)
def test_group_sizes_are_minus_1_or_at_least_1(key: str) -> None:
    for value in (-1, 1, 2, (1 << 31) - 1, None):
        check_numbers({key: value}, "config.json")
    for value in (0, -2, 1 << 31, 128.0, "128", False):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*; wanted a whole group size of at least 1, or -1"):
            check_numbers({key: value}, "config.json")


def test_unchecked_keys_take_any_value() -> None:
    assert Plain({"block_size": [1, 32]}, "config.json").parameters("x") == {"block_size": [1, 32]}
    with pytest.raises(CheckpointError, match="group_size is 0"):
        Plain({"group_size": 0}, "config.json")


def test_leaves_are_paths_to_what_has_no_keys() -> None:
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == [(("a", "b"), 1), (("a", "c"), {}), (("d",), [{"e": 2}])]
    assert list(leaves({})) == []
    deep: dict[str, Any] = {"bits": 0}
    for _ in range(MAX_DEPTH + 1):
        deep = {"x": deep}
    ((path, value),) = leaves(deep)
    assert (len(path), value) == (MAX_DEPTH + 1, {"bits": 0})
    assert [len(path) for path, _ in leaves(deep["x"])] == [MAX_DEPTH + 1]


@pytest.mark.parametrize(
    ("pattern", "path", "covers"),
    [
        ("a", "a", True), ("a", "a.b", False), ("a.b", "a", False), ("a.*", "a.b", True), ("a.*", "a.b.c", False),
        ("a.**", "a", True), ("a.**", "a.b.c", True), ("a.b.**", "a", False), ("a.b.**", "a.c.d", False),
        ("gr*.x", "group.x", True), ("*.x", "a.y", False),
    ],
)  # fmt: skip
def test_what_a_dotted_pattern_covers(pattern: str, path: str, covers: bool) -> None:
    assert path_covers(pattern, tuple(path.split("."))) is covers


def test_each_key_is_consumed_harmless_empty_or_unknown() -> None:
    reader = Plain(
        {"quant_method": "plain", "bits": 4, "damp": 0.1, "search": {"grid": {"n": 3}}, "groups": {"g": {"num_bits": 4, "x": 1}},
         "nothing": None, "none": [], "empty": {}, "word": "", "zero": 0, "off": False}, "config.json"
    )  # fmt: skip
    uses = {use.path: (use.use, use.why) for use in reader.key_uses()}
    consumed, harmless, unknown = ("consumed", ""), ("harmless", "how the quantizer searched"), ("unknown", "")
    empty = ("harmless", "it is empty")
    assert uses == {
        "quant_method": consumed, "bits": consumed, "groups.g.num_bits": consumed, "damp": harmless, "search.grid.n": harmless,
        "groups.g.x": unknown, "nothing": empty, "none": empty, "empty": empty, "word": empty, "zero": unknown, "off": unknown,
    }  # fmt: skip


def test_the_layouts_that_a_config_can_mean_in_their_order() -> None:
    reader = Plain({}, "config.json")
    assert reader.order(["gptq", "awq-gemm", "mlx", "awq-gemv", "awqx"]) == ("awq-gemm", "awq-gemv", "gptq")
    assert Skips({}, "config.json").order(["skips", "gptq"]) == ("skips",)


def test_the_first_skip_list_that_is_there_decides() -> None:
    reader = Skips({"skip": None, "ignore": ["lm_head"], "bits": 4}, "config.json")
    assert reader.parameters("lm_head") is None
    assert reader.parameters("up_proj") == {"skip": None, "ignore": ["lm_head"], "bits": 4}
    assert Skips({"skip": "lm_head"}, "config.json").parameters("lm_head") is None
    assert Skips({"skip": ["up_proj"], "ignore": ["lm_head"]}, "config.json").parameters("lm_head") is not None
    assert {use.path: use.use for use in reader.key_uses()} == {"skip": "consumed", "ignore": "consumed", "bits": "unknown"}
    for value in (3, ["a", 3], {"a": 1}):
        with pytest.raises(CheckpointError, match=r"config\.json: skip is .*; wanted a list of module names"):
            Skips({"skip": value}, "config.json")


def test_what_another_file_says_completes_a_config_and_contradictions_are_reported() -> None:
    mine = Plain({"bits": 4, "group_size": None, "version": "GEMM"}, "config.json")
    theirs = Plain({"bits": 8, "group_size": 128, "version": "gemm", "damp": 1}, "quantize_config.json")
    assert mine.complete(theirs) == ["bits is 4 in config.json and 8 in quantize_config.json; the first is used"]
    assert mine.raw == {"bits": 4, "group_size": 128, "version": "GEMM", "damp": 1}
