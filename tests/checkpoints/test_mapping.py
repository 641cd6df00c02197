"""A checkpoint is a mapping from keys to weights: `in`, `[]`, `get`, `items`, iteration over keys;
and the arrays that the verbs take.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import HalfbyteError
from support.conversion_models import write_model

FILES = ["folder", "gguf/tiny_mixed.gguf"]


@pytest.fixture(params=FILES)
def checkpoint(request, golden, tmp_path):
    path = write_model(tmp_path / "in", "int4:g64") if request.param == "folder" else golden / request.param
    with hb.open(path) as opened:
        yield opened


def test_it_is_a_mapping(checkpoint):
    assert isinstance(checkpoint, Mapping)
    assert list(checkpoint) == list(checkpoint.keys()) == [key for key, _ in checkpoint.items()]
    assert len(checkpoint) == len(checkpoint.items()) == len(list(checkpoint.values()))
    for key, weight in checkpoint.items():
        assert key in checkpoint
        assert isinstance(weight, hb.QTensor) == checkpoint.info(key).quantized
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(checkpoint[key]))
    assert checkpoint.get("no.such.key") is None
    assert dict(checkpoint).keys() == set(checkpoint)


def test_items_read_one_weight_at_a_time(checkpoint, monkeypatch):
    read = []
    get = type(checkpoint).__getitem__
    monkeypatch.setattr(type(checkpoint), "__getitem__", lambda self, key: (read.append(key), get(self, key))[1])
    pairs = iter(checkpoint.items())
    assert read == []
    next(pairs)
    next(pairs)
    assert read == list(checkpoint)[:2]


def test_equality_and_hash_are_of_the_object_and_read_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr(type(checkpoint), "__getitem__", lambda self, key: pytest.fail("a weight was read"))
    with hb.open(checkpoint.path) as again:
        assert checkpoint != again
        assert len({checkpoint, again, checkpoint}) == 2


def verbs(x):
    w = hb.quantize(np.ones((8, 32), np.float32), "int4:g32")
    stack = hb.quantize(np.ones((2, 8, 32), np.float32), "int4:g32")
    return {
        "linear": lambda: hb.linear(x, w),
        "quantize": lambda: hb.quantize(x, "int4:g32"),
        "experts": lambda: hb.experts(x, stack, stack, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)),
    }


ONES = {"list": [[1.0] * 32], "integers": ((1,) * 32,), "float64": np.ones((1, 32)), "int64": np.ones((1, 32), np.int64)}
TAKEN = [("quantize", "list"), ("quantize", "float64")]


@pytest.mark.parametrize(("verb", "kind"), TAKEN)
def test_lists_and_float64_are_quantized(verb, kind):
    assert verbs(ONES[kind])[verb]() == verbs(np.ones((1, 32), np.float32))[verb]()


@pytest.mark.parametrize(("verb", "kind"), [(v, k) for v in verbs(None) for k in ONES if (v, k) not in TAKEN])
def test_what_is_not_taken_is_refused_with_the_fix(verb, kind):
    with pytest.raises(HalfbyteError, match=rf"^\[{verb}\] .*np\.float32"):
        verbs(ONES[kind])[verb]()
