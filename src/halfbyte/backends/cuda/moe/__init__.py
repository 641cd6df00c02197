"""A mixture of experts without asking the device: route, gate · up, activation, down, weighted sum.

Pairs (token, expert) lie in order of expert (routing.py), in blocks of a few pairs of one expert.
The tiles of all blocks are dealt out evenly to the programs of one launch, which read from a table
on the device which expert and pairs a block has. Nothing depends on the host knowing the routing,
so a CUDA graph replays with other tokens.

    hidden[p] = act(gate_up_e · x[token p])      float32 sums, activation in float32, rounded once
                                                 to x's dtype
    y[i]      = Σ_t weight[i, t] · (down_e · hidden)      float32, in order of t
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ....errors import BackendError
from ..launch import fragments
from ..tuning import wgmma_tiles as fused_tiles
from ..tuning.mma_tiles import FragmentTile
from ..weight import CudaWeight
from . import wgmma as fused_experts
from .activation import gated
from .routing import pairs_a_step, route, weighted_sum

Projection = tuple[CudaWeight, torch.Tensor | None]
"""A stack and its bias (e, n)."""

INVARIANT_TOKENS, INVARIANT_TILE = 8, FragmentTile(2, 1, 2, 1, 4, 6)
"""Tokens a block and the tile of the batch-invariant mode where the fused schedule does not serve."""

GATES = {"none": 0, "swiglu": 1, "swiglu_clamped": 2, "geglu": 3}


def tokens_a_block(m: int) -> int:
    """Tokens a block takes: no expert gets more than m pairs of distinct experts."""
    return 1 if m == 1 else 4 if m <= 4 else 8 if m <= 32 else 16


def kernels(m: int, top: int, experts: int, fused: bool, invariant: bool = False) -> frozenset[tuple[Any, ...]]:
    """The compile-time arguments that depend on m: pairs a step of the plan; the fused tile, or
    tokens a block. `fused`: that schedule takes the weights.
    """
    pairs = m * top
    step = ("table",) if m == 1 else ("plan", pairs_a_step(pairs, experts))
    if invariant:
        return frozenset({step, ("fused", _invariant_tile(pairs, experts)) if fused else ("fragments", INVARIANT_TOKENS)})
    if fused and fused_experts.enough(pairs, experts):
        return frozenset({step, ("fused", fused_tiles.expert_tile(pairs, experts))})
    return frozenset({step, ("fragments", tokens_a_block(m))})


def _invariant_tile(pairs: int, experts: int) -> fused_tiles.FusedTile:
    """The fused tile of the batch-invariant mode: that of many rows."""
    return fused_tiles.INVARIANT_TILES[min(most for most in fused_tiles.INVARIANT_TILES if pairs <= most * experts)][0]


@functools.lru_cache
def warming_tokens(tokens: tuple[int, ...], top: int, experts: int, invariant: bool = False) -> tuple[int, ...]:
    """`tokens`, and what it takes between the least and the most of them that every kernel of every
    m there is called.
    """
    steps = set(tokens)
    for fused in (False, True):
        called = {key for m in steps for key in kernels(m, top, experts, fused, invariant)}
        for m in range(max(1, min(tokens, default=1)), max(tokens, default=0)):
            needed = kernels(m, top, experts, fused, invariant)
            if not needed <= called:
                steps.add(m)
                called |= needed
    return tuple(sorted(steps))


def mixture(
    x: torch.Tensor,
    ups: tuple[Projection, ...],
    down: CudaWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: str,
    interleaved: bool,
    down_bias: torch.Tensor | None,
    invariant: bool = False,
) -> torch.Tensor:
    """x (m, k) through stacks of experts in fragment or lane order -> (m, h) in x's dtype. `ups` is
    one stack of gates and ups, or one of each, (e, f, k). Gates and ups that lie side by side meet
    where they are summed; else a kernel of its own brings them together. `invariant`: the schedule
    and what orders a token's sums depend on no other token.
    """
    kind, stacks, pairs = GATES[gate], tuple(w for w, _ in ups), topk_ids.numel()
    many = invariant or fused_experts.enough(pairs, down.shape[0])
    if many and fused_experts.serves(x, stacks, down, kind, interleaved):
        one = _invariant_tile(pairs, down.shape[0]) if invariant else None
        return fused_experts.mixture(x, ups, down, topk_ids, topk_weights, kind, interleaved, down_bias, one)
    tile = INVARIANT_TILE if invariant else None
    routing = route(topk_ids, down.shape[0], INVARIANT_TOKENS if invariant else tokens_a_block(x.shape[0]))
    if kind == 0 or interleaved:
        hidden = fragments(x, *ups[0], tile, routing, gate=kind)
    else:
        hidden = gated([fragments(x, w, bias, tile, routing, torch.float32) for w, bias in ups], kind, x.dtype)
    in_order = routing._replace(blocks=routing.blocks._replace(x_row=routing.blocks.y_row))
    routed = fragments(hidden, down, down_bias, tile, in_order, torch.float32)
    return weighted_sum(routed, None, topk_weights, hidden.dtype)


def refusal(w: CudaWeight, x: Any) -> str | None:
    """The sentence why the kernels above cannot serve, or None."""
    if not w.fragments:
        return f"experts on CUDA take codes of up to 6 and of 8 bits in groups of 16, 32 or whole 64s, not {w.format.name}"
    if x.element_size() != 2:
        return f"experts on CUDA take float16 and bfloat16 activations, not {x.dtype}"
    return None


def require(w: CudaWeight, x: Any) -> None:
    """Raise that sentence."""
    why = refusal(w, x)
    if why:
        raise BackendError(f"[experts] {why}")
