"""What a quantization config is written from: which dense modules it names, which values most
modules have.
"""

from __future__ import annotations

import pytest

from halfbyte.formats import format_named
from halfbyte.layouts.quant_config.writer import EMBEDDINGS, DenseTensor, PackedModule, dense_modules, differing, most_common

FMT = format_named("int4", 32)


def packed(name: str, **params: object) -> PackedModule:
    return PackedModule(name, FMT, (64, 64), params)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("a.q_proj.weight", (64, 64), "a.q_proj"),
        ("a.q_proj", (64, 64), "a.q_proj"),
        ("a.experts.down_proj", (8, 64, 64), "a.experts.down_proj"),
        ("lm_head.weight", (64, 64), "lm_head"),
        ("a.router.weight", (8, 64), "a.router"),
        ("a.router", (8, 64), None),
        ("a.q_proj.bias", (64,), None),
        ("a.q_proj.weight", (64,), None),
        ("a.conv.weight", (4, 1, 3), "a.conv"),
        ("a.input_layernorm.weight", (64, 64), None),
        ("a.norm.weight", (64, 64), None),
        ("a.norms.q.weight", (64, 64), "a.norms.q"),
        *((f"model.{word}.weight", (64, 64), None) for word in EMBEDDINGS),
        ("embed_tokens.weight", (64, 64), None),
        ("embed_tokens.q.weight", (64, 64), "embed_tokens.q"),
    ],
)
def test_a_dense_matrix_that_looks_like_a_linear_layer_is_named(name: str, shape: tuple[int, ...], named: str | None):
    other = DenseTensor("z.o_proj.weight", (2, 2))
    assert dense_modules([DenseTensor(name, shape), other]) == [*([] if named is None else [named]), "z.o_proj"]


def test_the_values_that_most_modules_have_together():
    modules = [
        packed("a", bits=4, group=32),
        packed("b", bits=8, group=32),
        packed("c", bits=4, group=64),
        packed("d", bits=4, group=32),
    ]
    assert most_common(modules, ("bits", "group")) == {"bits": 4, "group": 32}
    assert most_common(modules[1:], ("bits",)) == {"bits": 4}
    assert most_common(modules[:2], ("group",)) == {"group": 32}
    assert most_common(modules, ("bits", "sym")) == {"bits": 4}
    assert most_common([], ("bits",)) == {}


def test_modules_that_differ_in_any_value():
    modules = [packed("a", bits=4, group=32), packed("b", bits=8, group=32), packed("c", bits=4, group=64), packed("d", bits=4)]
    names = lambda keys: [p.name for p in differing(modules, {"bits": 4, "group": 32}, keys)]  # noqa: E731
    assert names(("bits", "group")) == ["b", "c", "d"]
    assert names(("bits",)) == ["b"]
    assert names(()) == []
