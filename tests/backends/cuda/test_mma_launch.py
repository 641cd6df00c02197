"""What the fragment kernel is handed, without a GPU: every argument in its place, on the first call
and on later ones, which go past Triton.
"""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

import torch
from halfbyte.backends.cuda import launch
from halfbyte.backends.cuda.weight import to_device
from halfbyte.bench.weights import random_weight
from support.cuda_recorder import Recorder

NAMES = launch.fragment_kernel.arg_names


@pytest.fixture
def recorder(monkeypatch):
    held = Recorder(NAMES)
    monkeypatch.setattr(launch, "fragment_kernel", held)
    monkeypatch.setattr(launch.gpu, "multiprocessors", lambda device: 132)
    return held


def same(one, other, new):
    """Equal launches but for the tensors named `new`, which are other ones."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        a, b = one[1][name], other[1][name]
        if name in new:
            assert a.data_ptr() != b.data_ptr(), name
            assert a.shape[0] == b.shape[0], name
            assert (a.nbytes, a.stride(0) * a.itemsize) == (b.nbytes, b.stride(0) * b.itemsize), name  # x: pairs, then halves
        elif isinstance(a, torch.Tensor):
            assert (a.data_ptr(), a.dtype, a.shape) == (b.data_ptr(), b.dtype, b.shape), name
        else:
            assert a == b, name


@pytest.mark.parametrize("word", ["int4:g128", "mxfp4", "nvfp4", "uint4:g64", "affine4:g64", "q4_K", "q8_0", "mxfp8_e4m3"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_later_call_hands_over_what_the_first_did(recorder, word, biased):
    w = to_device(random_weight(word, 48, 512, 0), "cpu")
    kept = []
    for m in (1, 4, 16):
        x, y = (torch.randn(m, 512).half() for _ in range(2))
        bias, other = (torch.randn(48).half() if biased else None for _ in range(2))
        kept += [launch.fragments(x, w, bias), launch.fragments(y, w, other)]
        assert recorder.later[-1][1]["m"] == m
        same(recorder.first[-1], recorder.later[-1], {"y", "x", "weight.bias"} if biased else {"y", "x"})
    assert len(recorder.first) == len(recorder.later) == 3


def test_what_a_kernel_is_compiled_for_is_looked_up_anew(recorder):
    """Another m, stride, type, bias or its alignment, weight, or a copy of it."""
    w = to_device(random_weight("int4:g128", 48, 512, 0), "cpu")
    wide, whole = torch.randn(4, 1024).half(), torch.randn(64).half()
    cases = [
        (wide[:1, :512], w, None), (wide[:2, :512], w, None), (wide[:2, :512].contiguous(), w, None),
        (wide[:2, :512].bfloat16(), w, None), (wide[:2, :512], w, whole[:48]), (wide[:2, :512], w, whole[1:49]),
        (wide[:2, :512], w, whole[:48].float()), (wide[:2, :512], copy.deepcopy(w), None),
        (wide[:2, :512], to_device(random_weight("int4:g128", 48, 512, 1), "cpu"), None),
    ]  # fmt: skip
    for number, case in enumerate(cases, 1):
        launch.fragments(*case)
        assert len(recorder.first) == number
    for case in cases:
        launch.fragments(*case)
    assert (len(recorder.first), len(recorder.later)) == (len(cases), len(cases))


def test_a_tile_of_ones_own_and_routes_are_not_kept(recorder):
    from halfbyte.backends.cuda.tuning.mma_tiles import FragmentTile

    w = to_device(random_weight("int4:g128", 48, 512, 0), "cpu")
    for _ in range(2):
        launch.fragments(torch.randn(1, 512).half(), w, None, FragmentTile(1, 1, 8, 1, 1, 1))
    assert (len(recorder.first), len(recorder.later), len(w.launches)) == (2, 0, 0)


@pytest.mark.parametrize(
    ("word", "n", "served"),
    [
        ("q4_K", 14336, [1, 2, 8, 8, 8, 9, 16]),
        ("q4_K", 4096, [1, 2, 3, 4, 7, 9, 16]),
        ("q6_K", 14336, [1, 2, 3, 4, 7, 9, 16]),  # lane order has tiles of its own
        ("affine4:g64", 14336, [1, 2, 3, 4, 7, 9, 16]),
    ],
)
def test_tall_weights_of_two_levels_take_the_tile_of_eight_tokens_from_three_on(word, n, served):
    w = to_device(random_weight(word, 16, 256, 0), "cpu", lanes=True)
    assert [launch.tile_tokens(w, n, m) for m in (1, 2, 3, 4, 7, 9, 16)] == served
