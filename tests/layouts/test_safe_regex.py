"""Regular expressions from a config: the same answers as `re`, and never more than a moment."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.errors import CheckpointError
from halfbyte.layouts.quant_config import safe_regex as patterns
from halfbyte.layouts.quant_config.module_rules import covered
from halfbyte.layouts.quant_config.safe_regex import compiled, compiled_glob
from support.cpu_time import cpu_time

ATOMS = st.sampled_from(
    ["a", "b", ".", "A", "[ab]", "[^a]", "[a-c_]", r"\w", r"\W", r"\d", r"\.", r"\s", r"\b", r"\B", "^", "$", "()",
     "(?=a)", "(?!b)", "(?<=a)", "(?<!ab)", "(?i:A)", "{", "a{1", "b{12", "}", "x{a}", "{,}"]
)  # fmt: skip
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, REPEATS).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=8,
)
EXPLOSIVE = [
    "(a|a)*b", "(a|aa)+b", "(a?){40}a{40}b", ".*.*.*.*.*.*.*.*b", "a*a*a*a*a*a*a*a*b", "(?=a*a*a*a*a*b)c", "((a|b)|a)*c",
    "(?:a{0,9}){9}b", "(?:a.?|a)*b", "(a+)+$", "(.*a){20}", "(a|a)*" * 9, "(?:(a*)*)*b", "(?!(a|a)*b)c", "((((a?)+)+)+)+b",
]  # fmt: skip


@given(PATTERNS, st.text("abcABx._1 ", min_size=1, max_size=8))
@settings(max_examples=150)
def test_the_answers_are_those_of_re(pattern, name):
    try:
        want = re.match(pattern, name) is not None
    except re.error:
        reject()
    assert compiled(pattern).match(name) is want
    assert compiled(pattern).fullmatch(name) is (re.fullmatch(pattern, name) is not None)
    assert compiled(pattern).search(name) is (re.search(pattern, name) is not None)


LETTERS = "abcx.-]![^\\w"
GLOB_PARTS = st.one_of(
    st.sampled_from("ab.x-]![^\\").map(lambda c: (c, c)),
    st.tuples(st.sampled_from(["?", "[ab]", "[!a]", "[a-c]", "[]]", "[!]", "[^a]", "[\\w]", "a"]), st.sampled_from(LETTERS)),
    st.tuples(st.just("*"), st.text(LETTERS, max_size=3)),
)
"""(part of a shell pattern, part of a name that it often matches)"""


@given(st.lists(GLOB_PARTS, max_size=7))
@settings(max_examples=300)
def test_shell_patterns_have_the_answers_of_fnmatch(parts):
    glob, name = ("".join(texts) for texts in zip(*parts, strict=True)) if parts else ("", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested sets
        want = fnmatch.fnmatchcase(name, glob)
    try:
        got = compiled_glob(glob).fullmatch(name)
    except CheckpointError:  # fnmatch takes a range whose ends are exchanged for an empty one
        assert re.search(r"\[.*(.)-(.).*\]", glob)
        reject()
    assert got is want


@pytest.mark.parametrize("glob", ["*a" * 200 + "b", "*" * 300 + "b", "*?" * 100 + "b", "*[a-b]" * 100 + "c"])
def test_shell_patterns_that_explode_elsewhere_take_a_moment(glob):
    with cpu_time() as spent:
        assert not compiled_glob(glob).fullmatch("a" * 256)
        assert not covered((glob,), ".".join(["a" * 60] * 4))
    assert spent.seconds < 0.5
    with pytest.raises(CheckpointError, match=r"shell pattern '\[z-a\]': pattern '\[z-a\]' is not .* bad character range"):
        compiled_glob("[z-a]")


@pytest.mark.parametrize(
    ("pattern", "name", "want"),
    [("(?i)MLP", "x.mlp", False), ("(?i).*MLP$", "x.mlp", True), ("K", "k", False), ("(?i:m)LP", "MLP", True),
     ("(?i:m)LP", "Mlp", False), ("(?i:a(?-i:b))", "AB", False), ("(?i:a(?-i:b))", "Ab", True), ("(?i)[^A]", "a", False)],
)  # fmt: skip
def test_letters_in_either_case(pattern, name, want):
    assert compiled(pattern).match(name) is want
    assert (re.match(pattern, name) is not None) is want


@pytest.mark.parametrize(
    "pattern",
    [r"a{2}", r"a{,2}b", r"a{2,}", r"a{2,3}?b", r"a{x}", r"a{", r"{", r"a{1", r"[]a]", r"[^]a]", r"[a-]", r"[-a]", r"[\]]",
     r"[\d_]+", r"[^\d]+$", r"\x61", r"\u0061b", r"(?P<layer>a)b", r"a|b|", r"(|a)b", r"\Aab\Z", r"(a(b(c)))", r"a\.b", r"\-",
     r"[\w.]+", r"(?:a|b){3}", r"(?:ab?){2,}", r"x*$", r"(?<=a)b", r"a(?<=a)b", r"a(?<!b)b", r"(?!ab)a", r".*\bb",
     r"a(?<=^a)b", r"ab(?<=a\bb|ab)c"],
)  # fmt: skip
def test_each_construct_of_the_subset_means_what_re_means(pattern):
    names = ["a", "b", "ab", "aab", "aaab", "abc", "a{x}", "a{", "{", "a{1", "]", "a-", "-a", "a.b", "_1", "1", "a b", "abab", ""]
    wanted = [re.match(pattern, name) is not None for name in names]
    assert [compiled(pattern).match(name) for name in names] == wanted
    assert True in wanted or pattern in (r"(?<=a)b",)


@pytest.mark.parametrize("pattern", ["({}|{})", "({}|{}|c)a", "(?=b?({}|{})).*", ".*(?<=({}|{}))$", ".*(?<!({}|{}))b"])
def test_alternatives_that_share_their_first_or_last_letters_mean_what_re_means(pattern):
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)]
    names = [*words, "abca", "bbab", "aabb", ""]
    for one, other in itertools.combinations(words, 2):
        written = pattern.format(one, other)
        if "(?<" in pattern and len(one) != len(other):
            continue
        got = [compiled(written).match(name) for name in names]
        assert got == [re.match(written, name) is not None for name in names], written


PIECES = ["a", "[ab]", "^", r"\b", "(?=a)", "(?:a|b)", "(?:a|bb)", "(?:^|b)", "ab", "()", "a{2}", "a?", "b*", "a+"]
TIMES = ["", "{2}", "{0}", "{2,2}", "{1,2}", "{0,1}", "{2,}", "*", "+", "?"]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("piece", PIECES)
def test_a_look_behind_has_the_width_that_re_gives_it(piece, times):
    names = ["".join(w) for n in range(4) for w in itertools.product("ab", repeat=n)]
    for form in ("(?<=(?:{}){})b", "(?<!c(?:{}){})b", "(?<=(?:(?:{}){}){{2}})b", "(?<=(?:a|(?:{}){}))b"):
        pattern = form.format(piece, times)
        try:
            wanted = [re.search(pattern, name) is not None for name in names]
        except re.error:
            with pytest.raises(CheckpointError, match="look-behind requires fixed-width pattern"):
                compiled(pattern)
            continue
        assert [compiled(pattern).search(name) for name in names] == wanted, pattern


@pytest.mark.parametrize("pattern", ["[b-d]", "[^b-d]", "[b-dx-z]", "[b-b]", r"[\x62-\x64]", "[0-9]", "(?i:[b-d])"])
def test_ranges_have_both_ends(pattern):
    for c in "abcdeABDExyz_0189":
        assert compiled(pattern).match(c) is (re.match(pattern, c) is not None), c


LONG = {
    "optional letters": ("(?:a?){1000}" * 5 + "a" * 4000, True),
    "nested stars": ("(?:(?:a*)*)*" * 800 + "b", False),
    "pairs": ("(?:aa|a|aaa)*b", False),
    "branches": ("(?:" + "|".join(f"a{chr(98 + i % 3)}{i}" for i in range(2000)) + "|a)*b", False),
    "look-ahead": ("(?!.*" + "a" * 5000 + "b).*a", True),
    "look-aheads within": ("(?:(?=a*a)a)*" * 300 + "b", False),
    "letters": ("a" * 10_000, True),
    "anything": (".*a" * 3000 + "b", False),
    "look-behind": ("(?:a(?<=" + "a" * 1000 + "))*b", False),
}


def test_alternatives_by_the_thousand_are_refused_within_a_moment():
    """Sets cannot be factored: positions times alternatives is more than is executed."""
    pattern = "(?:" + "|".join(f"[a{chr(98 + i % 24)}][a{i % 10}]{i}" for i in range(1000)) + "|a)*b"
    with cpu_time() as spent, pytest.raises(CheckpointError, match=r"takes more than 131,072 steps for a name of 10,000 letters"):
        compiled(pattern).match("a" * 10_000)
    assert spent.seconds < 3


@pytest.mark.parametrize("case", LONG)
def test_long_patterns_and_long_names_take_a_moment(case):
    """Patterns and names of ten thousand letters."""
    pattern, want = LONG[case]
    with cpu_time() as spent:
        assert compiled(pattern).match("a" * 10_000) is want
    assert spent.seconds < 1.5


@pytest.mark.parametrize("length", [60, 256])
@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_patterns_that_explode_elsewhere_take_a_moment(pattern, length):
    name = "a" * length
    want = {"(a+)+$": True, "(.*a){20}": True, "(a|a)*" * 9: True}.get(pattern, False)
    with cpu_time() as spent:
        assert compiled(pattern).match(name) is want
    assert spent.seconds < 0.25


def test_what_would_still_take_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_STEPS", 50)
    with pytest.raises(CheckpointError, match=r"pattern '\(\(a\|b\)\*\|a\)\*c' takes more than 50 steps for a name of 200"):
        compiled("((a|b)*|a)*c").match("ab" * 100)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "is not a regular expression"), ("x" * 20000, "has 20,000 characters; up to 16,384"),
        (r"(a)\1", "has a back-reference; patterns without one are read"), ("(?P<x>a)(?P=x)", "has a back-reference"),
        ("(a)?(?(1)b|c)", "has a conditional"), ("(?>a)", "has an atomic group"), ("a*+", "has a possessive repeat"),
        ("(?s:a)", "has a group with other flags"), ("a{2000}", "repeats more than 1000 times"),
        ("(" * 100 + ")" * 100, "has groups more than 64 deep"), ("(" * 4000, "has groups more than 64 deep"),
        ("a**", "multiple repeat"), ("*a", "nothing to repeat"), (r"\q", r"bad escape \q"), ("[z-a]", "bad character range"),
        ("[a", "ends early"), ("a)", "unbalanced parenthesis"), ("(?<=a*)b", "look-behind requires fixed-width"),
        ("((a{999}){999}){999}", "needs more than 32,768 instructions; patterns without counted repeats within repeats"),
        ("a{3,2}", "min repeat greater than max"),
    ],
)  # fmt: skip
def test_patterns_that_are_not_read_say_why(pattern, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        compiled(pattern)


def test_groups_are_read_to_a_depth_of_64():
    assert compiled("(" * 64 + "a" + ")" * 64).match("a")
    with pytest.raises(CheckpointError, match="has groups more than 64 deep; read up to that"):
        compiled("(" * 65 + "a" + ")" * 65)


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [
        (r".*\.(?:1[0-9]|2[0-9])\..*(?:gate|up)_proj.*", (True, False, False)),
        (r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj", (True, True, False)),
        (".*self_attn.*", (False, False, True)),
        (r".*mlp\.(gate|up|gate_up|down)_proj.*", (True, True, False)),
        (r".*block_sparse_moe\.gate$", (False, False, False)),
        (r"^(?!.*gate).*$", (False, True, True)),
    ],
)
def test_patterns_as_producers_write_them_cover_these_modules(pattern, covers):
    names = ("model.layers.12.mlp.gate_proj", "model.layers.3.mlp.down_proj", "model.layers.3.self_attn.q_proj")
    assert tuple(compiled(pattern).match(name) for name in names) == covers


def test_a_hostile_pattern_does_not_hold_up_opening(tmp_path: Path):
    name = "a" * 60
    save_file(
        {f"{name}.weight_packed": np.zeros((8, 16), np.int32), f"{name}.weight_scale": np.ones((8, 4), np.float16)},
        tmp_path / "model.safetensors",
    )
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
    hostile = [f"re:{p}!" for p in EXPLOSIVE if p[-1] in "bc"]  # "b" alone begins a name under "backbone."
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": hostile,
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with cpu_time() as spent:
        checkpoint = hb.open(tmp_path)
        assert checkpoint.info(name).shape == (8, 128)
        assert checkpoint.findings() == []
    assert spent.seconds < 1


def test_hundreds_of_listed_modules_cost_a_look_up_each():
    rules = tuple(f"model.vision.layers.{i}.attn.q_proj" for i in range(500))
    with cpu_time() as spent:
        assert not any(covered(rules, f"model.layers.{i}.mlp.down_proj") for i in range(1000))
        assert covered(rules, "model.vision.layers.499.attn.q_proj")
        assert covered(rules, "vision.layers.499.attn.q_proj")
        assert not covered(rules, "model.vision.layers.499.attn.q_proj_2")
    assert spent.seconds < 1
