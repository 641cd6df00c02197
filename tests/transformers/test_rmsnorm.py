"""Norms in one call: put only where they give the same bits, and still the model's own parameters
to everybody else.
"""

from __future__ import annotations

import copy

import pytest

import torch
from halfbyte.transformers.decode.rmsnorm import RMSNorm, replace_rmsnorms, replacement
from support.gguf_models import VOCABULARY, dense_model
from torch import nn


def ready(name):
    return dense_model(name).requires_grad_(False)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen2"])
def test_a_model_keeps_its_logits_bit_for_bit(name):
    model = ready(name)
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids).logits
        keys = list(model.state_dict())
        assert replace_rmsnorms(model) == sum(isinstance(m, RMSNorm) for m in model.modules()) > 0
        assert torch.equal(model(ids).logits, wanted)
    assert list(model.state_dict()) == keys
    assert replace_rmsnorms(model) == 0


class OddRMSNorm(nn.Module):
    """A norm that forgets eps."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16), requires_grad=False), 0.5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight


def test_what_differs_or_is_trained_or_is_no_norm_stays():
    assert replacement(OddRMSNorm()) is None
    assert replacement(nn.RMSNorm(16, eps=1e-6)) is None  # its weight is trained
    assert replacement(nn.LayerNorm(16)) is None
    assert replacement(nn.RMSNorm(16, eps=1e-6).requires_grad_(False).bfloat16()) is None


def plain(weight):
    norm = nn.RMSNorm(weight.shape[0], eps=1e-6)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


@pytest.mark.parametrize("plus_one", [False, True])
def test_weights_that_change_are_seen(plus_one):
    norm = RMSNorm(plain(torch.rand(8)), 1e-6, plus_one)
    x = torch.randn(3, 8)
    new = torch.rand(8)
    want = RMSNorm(plain(new.clone()), 1e-6, plus_one)(x)
    other = copy.deepcopy(norm)
    norm.load_state_dict({"weight": new})
    assert torch.equal(norm(x), want)
    other.weight.copy_(new)
    assert torch.equal(other(x), want)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, norm(x.bfloat16().float()).bfloat16())


def test_case_51_on_another_device_the_models_own_norm_computes():
    """A model moved to a GPU gives what one loaded there gives: the same operations."""
    seen = []

    class OwnRMSNorm(nn.RMSNorm):
        def forward(self, x):
            seen.append((self.weight.device.type, x.device.type))
            return super().forward(x)

    own = OwnRMSNorm(8, eps=1e-6).requires_grad_(False)
    norm = replacement(own)
    assert isinstance(norm, RMSNorm)
    assert norm.plain is own
    seen.clear()
    norm(torch.randn(2, 8))
    assert seen == []
    moved = copy.deepcopy(norm).to("meta")
    assert moved(torch.empty(2, 8, device="meta")).shape == (2, 8)
    assert seen == [("meta", "meta")]
    assert moved.plain.weight is moved.weight
    assert norm.plain.weight is norm.weight
    assert norm.weight.device.type == "cpu"
    assert list(norm.state_dict()) == ["weight"]
    assert [n for n, _ in norm.named_modules()] == [""]
