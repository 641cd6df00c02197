"""Shards have exactly the values of the whole weight; two processes compute what one does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
import torch
from halfbyte.errors import HalfbyteError, ShapeError, UnsupportedError
from halfbyte.formats import FAMILIES
from halfbyte.tensor.shard import input_unit, shard_experts, shard_inputs, shard_rows, split
from support.memory_checkpoint import packed
from support.sharding_runs import MODELS, check_model, check_products, run_two, write_models
from support.sharding_worker import weight

WORDS = [w for f in FAMILIES.values() for w in f.codecs]
MULTIPLIED = ["mxfp4", "mxint8", "nvfp4", "int4", "uint3", "bnb_int8", "affine4", "fp8_e4m3", "nf4", "hqq4", "q4_1", "q8_0",
              "q2_K", "q4_K", "iq4_nl", "iq2_xs", "tq1_0"]  # fmt: skip
"""A format of each family and each kind of scale; `make test-slow` multiplies the others too."""
REST = [pytest.param(w, marks=pytest.mark.slow) for w in WORDS if w not in MULTIPLIED]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=True)


@given(st.integers(1, 2000), st.integers(1, 9), st.integers(1, 200))
def test_split_covers_everything_once(size, ranks, unit):
    if -(-size // unit) < ranks:
        with pytest.raises(ShapeError, match="each rank needs at least one unit"):
            split(size, ranks, unit)
        return
    bounds = split(size, ranks, unit)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert [b for _, b in bounds[:-1]] == [a for a, _ in bounds[1:]]
    assert all(a < b and a % unit == 0 for a, b in bounds)
    units = [-(-(b - a) // unit) for a, b in bounds]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_are_the_wholes(word, ranks):
    """Case 46: each rank has other rows, and side by side they are the whole."""
    w = weight(word, (6, 1024))
    pieces = [shard_rows(w, a, b).dequantize() for a, b in split(6, ranks)]
    assert same(np.concatenate(pieces), w.dequantize())
    assert not same(pieces[0], pieces[1])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_inputs_are_the_wholes(word, ranks):
    w = weight(word, (6, 1024))
    unit = input_unit(w)
    pieces = [shard_inputs(w, a, b) for a, b in split(1024, ranks, unit)]
    for piece in pieces:
        piece.validate()
    assert same(np.concatenate([p.dequantize() for p in pieces], axis=1), w.dequantize())
    stack = hb.QTensor(w.format, (2, 6, 1024), {p: np.stack([a, a]) for p, a in w.parts.items()})
    assert same(shard_inputs(stack, unit, 2 * unit)[1].dequantize(), shard_inputs(w, unit, 2 * unit).dequantize())
    assert same(shard_experts(stack, 1, 2).dequantize()[0], w.dequantize())


@given(st.integers(3, 40), st.sampled_from([2, 3, 4, 5, 8]), st.sampled_from([8, 16, 24, 32]), st.booleans(), st.data())
def test_case_47_act_order_is_sharded_anywhere(units, bits, group, zeros, data):
    """Groups scattered over the inputs: every piece keeps the scales of the groups it has an input
    of.
    """
    k = units * 8
    word = f"{'u' if zeros else ''}int{bits}:g{group}"
    w = packed(word, (5, k), seed=units)
    groups = w.format.groups(k)
    index = np.random.default_rng(units).permutation(np.arange(k) % groups).astype(np.int32)
    w = hb.QTensor(w.format, w.shape, {**w.parts, "group_index": index})
    at = data.draw(st.integers(0, units)) * 8
    pieces = [shard_inputs(w, 0, at), shard_inputs(w, at, k)]
    for piece in pieces:
        piece.validate()
    assert same(np.concatenate([p.dequantize() for p in pieces], axis=1), w.dequantize())


def test_case_47_the_sum_of_two_halves_is_the_whole():
    index = np.random.default_rng(0).permutation(np.arange(256) // 32).astype(np.int32)
    w = packed("uint4:g32", (7, 256))
    w = hb.QTensor(w.format, w.shape, {**w.parts, "group_index": index})
    x = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    whole = hb.linear(x, w)
    halves = hb.linear(x[:, :128].copy(), shard_inputs(w, 0, 128)) + hb.linear(x[:, 128:].copy(), shard_inputs(w, 128, 256))
    assert np.abs(whole - halves).max() < 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize(
    ("word", "start", "stop", "unit"), [("int4:g32", 16, 64, 32), ("q4_K", 0, 128, 256), ("iq2_s", 128, 256, 256)]
)
def test_other_positions_are_refused(word, start, stop, unit):
    with pytest.raises(ShapeError, match=f"inputs {start}:{stop} of 1024; .* is cut at multiples of {unit}"):
        shard_inputs(weight(word, (6, 1024)), start, stop)


@pytest.mark.parametrize("word", ["nf4:g4096", "bnb_fp4:g4096"])
def test_groups_over_the_flattened_matrix_cannot_be_sharded(word):
    w = hb.quantize(np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32), word)
    with pytest.raises(UnsupportedError, match="cannot be cut along its inputs; cut its rows"):
        shard_inputs(w, 0, 128)
    assert same(shard_rows(w, 3, 9).dequantize(), w.dequantize()[3:9])


def test_what_has_no_experts():
    with pytest.raises(ShapeError, match=r"a stack \(e, n, k\) has experts"):
        shard_experts(weight("int4"), 0, 1)


def test_tiles_of_rows():
    w = hb.quantize(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32), "fp8_e4m3:g64", rows=16)
    pieces = [shard_rows(w, a, b) for a, b in split(64, 3, 16)]
    assert all(p.window is None for p in pieces)
    assert same(np.concatenate([p.dequantize() for p in pieces]), w.dequantize())


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, request):
    """What two gloo processes computed of the formats that are asked for, and in every model's
    folder.
    """
    folders = write_models(tmp_path_factory)
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    words = [word for word in WORDS if any(p.get("word") == word for p in parameters)]
    return run_two(tmp_path_factory.mktemp("store") / "store", "cpu", words, list(folders.values())), folders


@pytest.mark.parametrize("word", [*MULTIPLIED, *REST])
def test_two_processes_multiply_as_one_does(two_processes, word):
    """Column, row and expert sharding of every format: equal by rows, the sums of two halves within
    float32's rounding.
    """
    ranks = [rank[word] for rank in two_processes[0]]
    check_products(ranks, word)
    assert torch.equal(ranks[0]["rows"], ranks[0]["whole"])


@pytest.mark.parametrize("name", [f"{a} {p}" for a, p, _ in MODELS])
def test_two_processes_compute_what_one_does(two_processes, name):
    check_model(two_processes[1][name])


def test_each_rank_holds_half(tmp_path):
    """Cut without a process group: two ranks hold as many weights each, other ones, and together
    the whole.
    """
    from halfbyte.torch import packed_modules
    from halfbyte.torch.tensor_parallel import parallelize
    from halfbyte.transformers import load_model
    from support.tiny_models import write_tiny

    write_tiny(tmp_path, "mixtral", "ct-int4")
    whole = packed_modules(load_model(tmp_path)[0])
    pieces = [packed_modules(parallelize(load_model(tmp_path)[0], rank, 2)) for rank in (0, 1)]
    counts = [sum(math.prod(h.shape) for m in p.values() for h in m.packed.values()) for p in (whole, *pieces)]
    assert counts[1] == counts[2] == counts[0] / 2
    q = "model.layers.0.self_attn.q_proj"
    a, b, both = (p[q].weight.canonical().dequantize() for p in (*pieces, whole))
    assert same(np.concatenate([a, b]), both)


def test_case_46_each_rank_has_its_own_part_of_a_fused_projection(tmp_path):
    """phi3's q·k·v and gate·up: a rank holds its share of each part, not the first rows; side by
    side they are the whole.
    """
    from halfbyte.torch import packed_modules
    from halfbyte.torch.tensor_parallel import parallelize
    from halfbyte.transformers import load_model
    from support.tiny_models import write_tiny

    write_tiny(tmp_path, "phi3", "ct-int4")
    whole = packed_modules(load_model(tmp_path)[0])
    ranks = [packed_modules(parallelize(load_model(tmp_path)[0], rank, 2)) for rank in (0, 1)]
    for name, sizes in (("self_attn.qkv_proj", (64, 32, 32)), ("mlp.gate_up_proj", (128, 128))):
        path = f"model.layers.1.{name}"
        values = whole[path].canonical().dequantize()
        halves = [rank[path].canonical().dequantize() for rank in ranks]
        assert values.shape[0] == sum(sizes)
        assert halves[0].shape == halves[1].shape == (sum(sizes) // 2, 64)
        assert not same(*halves)
        ends = np.cumsum(sizes)[:-1]
        parts = [np.split(half, ends // 2) for half in halves]
        assert same(np.concatenate([np.concatenate(pair) for pair in zip(*parts, strict=True)]), values)
        assert not same(halves[1], values[: len(halves[1])]), "rank 1 holds the first rows"


@pytest.mark.parametrize(
    ("arch", "producer", "ranks", "message"),
    [
        ("llama", "ct-int4", 3, r"model.layers.0.self_attn over 3 ranks: .* 2 in units of 1 over 3 ranks"),
        ("llama", "bitsandbytes", 2, r"model.layers.0.self_attn over 2 ranks: .* 2 in units of 2 over 2 ranks"),
    ],
)
def test_what_cannot_be_sharded_is_refused(tmp_path, arch, producer, ranks, message):
    from halfbyte.torch.tensor_parallel import parallelize
    from halfbyte.transformers import load_model
    from support.tiny_models import write_tiny

    write_tiny(tmp_path, arch, producer)
    with pytest.raises(HalfbyteError, match=message):
        parallelize(load_model(tmp_path)[0], 0, ranks)
