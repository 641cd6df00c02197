"""The order in which the formats of a target are tried."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.conversion.edges import convert_tensor
from halfbyte.conversion.recipe import format_for
from halfbyte.conversion.targets import candidates, codecs_of, goal_named
from halfbyte.formats import codec_names, format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.quantize import quantize
from support.memory_checkpoint import packed

INPUTS = 512
TARGETS = [
    f"{layout}:{word}"
    for layout, found in LAYOUTS.items()
    if found.holds
    for word in codecs_of(layout)
    if format_named(word).float_scale and not format_named(word).family.startswith("ggml")
]


def sizes(own: int, target: str, act_order: bool = False) -> list[int]:
    """Group sizes of the formats tried for an int4 weight with groups of `own`, in order."""
    q = packed(f"int4:g{own}" if own > 0 else "int4:channel", (4, INPUTS))
    if act_order:
        index = np.random.default_rng(0).permutation(np.arange(INPUTS, dtype=np.int32) // max(own, 1) * (own > 0))
        q = type(q)(q.format, q.shape, {**q.parts, "group_index": index.astype(np.int32)})
    word = format_named(target.partition(":")[2])
    return list(dict.fromkeys(f.group_size for f in candidates(q, goal_named(target)) if f.name == word.name))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("own", [-1, 16, 32, 48, 64, 128, 256])
def test_groups_that_divide_the_weights_own_come_before_others(own, act_order):
    """Its own groups first, then smaller ones that divide them, in which the values stay, then all
    others that the layout has, the smallest first.
    """
    for target in TARGETS:
        check_order(target, sizes(own, target, act_order), own, act_order)


def check_order(target: str, found: list[int], own: int, act_order: bool) -> None:
    allowed = LAYOUTS[target.partition(":")[0]].holds.groups
    whole = INPUTS if own == -1 else own
    smaller = [s for s in found if s not in (own, -1) and s < whole and whole % s == 0]
    others = [s for s in found if s != own and s not in smaller]
    assert found == [s for s in found if s == own] + smaller + others
    assert others == sorted(others)
    if allowed:
        assert set(found) - {own} == set(allowed) - {own}
        assert (own in found) == (own in allowed)
    else:
        assert found[0] == own
        assert smaller == sorted(smaller, reverse=True)
        assert set(smaller) == ({s for s in (16, 32, 64, 128) if s < whole and whole % s == 0} if act_order else set())
        assert others == []


@pytest.mark.parametrize("layout", [name for name, found in LAYOUTS.items() if found.holds])
@pytest.mark.parametrize("word", ["int4:g32", "uint4:g32", "affine4:g32", "int8:channel", "uint3:g64"])
def test_an_integer_weight_tries_integers_under_one_level_of_scales(layout, word):
    """Codebooks, small floats and super-blocks only where the layout has no such format."""
    q = packed(word, (4, INPUTS))
    tried = [f for f in candidates(q, goal_named(layout)) if f != q.format]
    plain = [f for f in map(format_named, codecs_of(layout)) if f.element in ("int", "uint") and not f.super_size]
    if plain:
        assert all(f.element in ("int", "uint") and not f.super_size for f in tried)


@pytest.mark.parametrize(
    ("layout", "bits"),
    [("gptq", [3, 4, 8]), ("gguf", [4, 5, 8]), ("mlx", [3, 4, 5, 6, 8]), ("compressed-tensors", [3, 4, 8]), ("onnx", [4, 8])],
)
def test_a_weight_of_3_bits_goes_to_its_own_width_and_to_those_that_engines_read(layout, bits):
    tried = candidates(packed("uint3:g32", (4, INPUTS)), goal_named(layout))
    assert sorted({f.bits for f in tried if f.name in codecs_of(layout)}) == bits


def test_groups_of_matmulnbits_are_powers_of_two():
    assert sizes(512, "onnx:uint4") == [256, 128, 64, 32, 16]


@pytest.mark.parametrize("word", [w for w in codec_names() if not w.startswith(("iq1", "iq2", "iq3", "tq"))])
def test_every_codec_that_can_be_written_is_a_target(word):
    """Of `convert` and of `quantize`, whatever options its format takes."""
    dense = np.random.default_rng(0).standard_normal((8, INPUTS)).astype(np.float32)
    q = convert_tensor(quantize(dense, "q8_0"), f"halfbyte:{word}", lossy=True)
    assert q.format.name == word
    fmt, why = format_for(goal_named(f"halfbyte:{word}"), "float32", dense.shape)
    assert fmt.name == word, why
