"""Edges on adversarial tensors: exact ones keep every byte of zeros, scales and codes whatever they
are; rarer conditions on both sides.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import QTensor, format_named, quantize
from halfbyte.conversion import convert_tensor, convert_weight, goal_named
from halfbyte.numerics.bits import pack
from support.conversion_weights import attempt, reread, same, two_levels

SCALES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 1 / 3, 65504.0, -65504.0)
"""Zeros, the least and the largest float16 numbers, of both signs."""
ZEROS = ("none", "top", "ends", "any", "middle")


def drawn(codec: str, n: int, k: int, zeros: str, seed: int) -> QTensor:
    """Random codes under scales of `SCALES` and zero points of one kind."""
    rng = np.random.default_rng(seed)
    fmt = format_named(codec, scale_dtype="float16")
    groups, top = fmt.groups(k), (1 << fmt.bits) - 1
    parts = {
        "codes": pack(rng.integers(0, top + 1, (n, k)).astype(np.uint8), fmt.bits),
        "scales": rng.choice(np.array(SCALES, np.float16), (n, groups)),
    }
    if fmt.zero == "int":
        kinds = {
            "none": np.zeros((n, groups)), "top": np.full((n, groups), top), "ends": rng.choice([0, top], (n, groups)),
            "any": rng.integers(0, top + 1, (n, groups)), "middle": np.full((n, groups), 1 << (fmt.bits - 1)),
        }  # fmt: skip
        parts["zeros"] = kinds[zeros].astype(np.int16)
    return QTensor(fmt, (n, k), parts)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("to", ["gptq-v2", "awq", "compressed-tensors", "halfbyte"])
@given(
    zeros=st.sampled_from(ZEROS),
    group=st.sampled_from(["g32", "g64", "g128", "channel"]),
    n=st.integers(1, 3),
    groups=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=25, deadline=None)
def test_every_byte_of_zeros_scales_and_codes_comes_back(bits, to, zeros, group, n, groups, seed):
    """uint to a layout and back through its own reader: exact, though a scale is 0, subnormal,
    negative or the largest.
    """
    q = drawn(f"uint{bits}:{group}", 8 * n, 128 * groups, zeros, seed)
    goal = goal_named(to)
    outcome = convert_weight(q, goal, "w")
    assert outcome.kind == "exact"
    back = convert_tensor(reread(outcome, goal) if to != "halfbyte" else outcome.weight, f"halfbyte:uint{bits}:{group}")
    for part, array in q.parts.items():
        assert np.array_equal(back.parts[part], array), part
        assert back.parts[part].tobytes() == array.tobytes(), part


@pytest.mark.parametrize("zeros", [*ZEROS])
@pytest.mark.parametrize("to", ["gguf:q4_1", "mlx:affine4", "gguf:q4_0", "compressed-tensors:int4", "gptq-v1"])
def test_conditional_edges_never_change_a_value(to, zeros):
    """Whatever zeros and scales are: kept and said to be, or lossy and said to be."""
    for seed in range(8):
        q = drawn("uint4:g32", 8, 64, zeros, seed)
        outcome = attempt(q, goal_named(to))
        if isinstance(outcome, str):
            assert "cannot be stored as" in outcome
            continue
        assert same(q, outcome.weight) == (outcome.kind in ("exact", "exact-if"))


INTO = [(2.0, 0x40, True), (3.0, 0x40, True), (3.0, 0x41, False), (0.3, 0x40, False)]


@pytest.mark.parametrize(("factor", "byte", "goes"), INTO)
def test_a_tensor_scale_that_goes_into_the_block_scales_and_one_that_does_not(factor, byte, goes):
    """Block scales 2 (0x40) and 2.25 (0x41) times 2 or 3: 4, 6 are E4M3 numbers and 6.75 is not."""
    outcome = convert_weight(two_levels("multiply", factor, byte), goal_named("mlx:nvfp4"), "w")
    said = "the tensor scale is multiplied into the block scales"
    assert (outcome.why == said and outcome.kind == "exact-if") == goes
    if goes:
        assert same(outcome.weight, two_levels("multiply", factor, byte))


@pytest.mark.parametrize(("byte", "kind"), [(0x40, "equal"), (0xC0, "lossy")])
def test_a_rounded_reciprocal_under_block_scales_of_either_sign(byte, kind):
    """1/3 is no float32; GGUF's block scales have no sign to be compared with."""
    assert convert_weight(two_levels("divide", 3.0, byte), goal_named("gguf"), "w").kind == kind


@pytest.mark.parametrize(("axis", "said"), [(1, ""), (0, "its groups are strided, and the target's run along rows")])
def test_groups_along_rows_and_groups_that_stride(axis, said):
    fmt = format_named("hqq4", axis=axis)
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    q = quantize(x, fmt)
    whole = {**q.parts, "zeros": np.rint(q.parts["zeros"].astype(np.float32)).astype(q.parts["zeros"].dtype)}
    outcome = convert_weight(QTensor(q.format, q.shape, whole), goal_named("compressed-tensors"), "w")
    if said:
        assert outcome.kind == "lossy"
        assert outcome.why.startswith(said)
    else:
        assert outcome.kind in ("exact", "exact-if")
