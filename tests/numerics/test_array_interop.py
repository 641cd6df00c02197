"""Which tensors' memory may be read by address."""

from __future__ import annotations

import pytest
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import torch
from halfbyte.numerics.array_interop import torch_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def complex_negative() -> torch.Tensor:
    return torch.complex(torch.ones(3), torch.ones(3)).conj().imag


WITHOUT = {
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "csr": lambda: torch.ones(3, 3).to_sparse_csr(),
    "negated": complex_negative,
    "conjugated": lambda: torch.complex(torch.ones(3), torch.ones(3)).conj(),
    "zero": lambda: torch._efficientzerotensor((3,)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "array": lambda: torch.ones(3).numpy(),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_tensor_without_memory_of_its_own_is_not_readable(kind):
    """Asked twice: the answer for a kind of tensor is kept."""
    state, x = torch_state(), WITHOUT[kind]()
    assert not state.readable(x)
    assert not state.readable(torch.ones(2), None, x)
    assert state.readable(torch.ones(2), None, torch.nn.Parameter(torch.ones(2)), torch.ones(4, 4)[:, 1])


def test_a_dual_number_is_not_readable_and_its_neighbour_is():
    state = torch_state()
    with forward_ad.dual_level():
        assert not state.readable(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
        assert state.readable(torch.ones(3))
        assert not state.readable(torch.ones(3, device="meta"))


def test_a_mode_a_transform_and_a_tracer_observe():
    state, seen = torch_state(), []
    assert not state.observed()
    with FakeTensorMode():
        assert state.observed()
    torch.func.vmap(lambda x: seen.append(state.observed()) or x)(torch.ones(2, 2))
    torch.jit.trace(lambda x: seen.append(state.observed()) or x, torch.ones(2), check_trace=False)
    assert seen == [True, True]
    assert not state.observed()
