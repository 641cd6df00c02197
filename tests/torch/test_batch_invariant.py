"""The switch for a model's batch-invariant products: what it changes, what carries it, and which
backends refuse it.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import torch
from halfbyte import ops
from halfbyte.errors import BackendError
from halfbyte.torch import QEmbedding, QLinear, batch_invariant, fuse, packed_modules, unfuse
from support.cpu_weights import formats, ordinary_tensor


def flags(model):
    return [weight.invariant for module in packed_modules(model).values() for weight in module.packed.values()]


def small(seed=0):
    return ordinary_tensor(next(f for f in formats() if f.name == "mxfp4"), (16, 64), seed)


class Attention(torch.nn.Module):
    """Three layers that `fuse` joins."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (QLinear(small(i)) for i in range(3))


def test_the_switch_is_carried_by_copies_pickles_states_and_fused_layers():
    table = QEmbedding(small(3))
    model = torch.nn.ModuleDict({"attention": Attention(), "table": table, "head": QLinear(table.packed[""])})
    assert not any(flags(model))
    batch_invariant(model)
    assert all(flags(model))
    assert model["head"].packed[""] is model["table"].packed[""]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(flags(other))
        other.load_state_dict(model.state_dict())
        assert all(flags(other))
        assert fuse(other) == 1
        assert all(flags(other))
        unfuse(other)
        assert all(flags(other))
    batch_invariant(model, False)
    assert not any(flags(model))


def test_layers_of_both_kinds_are_not_joined():
    layers = Attention()
    layers.k_proj.packed[""] = layers.k_proj.packed[""].batch_invariant()
    assert fuse(layers) == 0


@pytest.mark.parametrize("fmt", formats(), ids=str)
def test_rows_on_the_cpu_have_the_same_bits_for_any_number(fmt):
    q = ordinary_tensor(fmt, (24, 512), 5)
    p = ops.prepare(q)
    x = np.random.default_rng(6).standard_normal((33, q.shape[1]), np.float32)
    whole = ops.linear(x, p, invariant=True)
    for m in (1, 2, 5, 17):
        np.testing.assert_array_equal(ops.linear(x[7 : 7 + m], p, invariant=True), whole[7 : 7 + m])
    np.testing.assert_array_equal(ops.linear(x, replace(p, invariant=True)), whole)


def test_the_reference_and_a_schedule_are_refused():
    x, q = np.zeros((1, 64), np.float32), small()
    with pytest.raises(BackendError, match="depend on the number of rows; leave invariant=True out"):
        ops.linear(x, q, backend="reference", invariant=True)
    with pytest.raises(BackendError, match=r"\[linear\] schedule='fused' of an invariant product"):
        ops.linear(x, q, schedule="fused", invariant=True)
