"""A mixture of experts without asking the device: route, gate · up, activation, down, weighted sum.

Pairs (token, expert) lie in order of expert (routing.py), in blocks of a few pairs of one expert. The tiles of all blocks are
dealt out evenly to the programs of one launch, which read from a table on the device which expert and pairs a block has. Nothing
depends on the host knowing the routing, so a CUDA graph replays with other tokens.

    hidden[p] = act(gate_up_e · x[token p])      float32 sums, activation in float32, rounded once to x's dtype
    y[i]      = Σ_t weight[i, t] · (down_e · hidden)      float32, in order of t
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import BackendError
from . import fused_experts
from .launch import Route, _on, _overlap, fragments
from .routing import route, weighted_sum
from .weight import CudaWeight

Projection = tuple[CudaWeight, torch.Tensor | None]
"""A stack and its bias (e, n)."""

ACTIVATIONS = {"none": 0, "swiglu": 1, "swiglu_clamped": 2, "geglu": 3}


@triton.jit
def gate_kernel(G, U, OUT, f, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """OUT[p, j] = act(G[p, j], U[p, j]), float32 until the store; outputs.gated is its twin. Rows of G and U are `stride` apart.
    Grid (pairs, f / BLOCK)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = j < f
    g = tl.load(G + p * stride + j, mask=keep, other=0)
    u = tl.load(U + p * stride + j, mask=keep, other=0)
    if KIND == 1:
        out = g / (1 + tl.exp(-g)) * u
    elif KIND == 2:  # gpt-oss: limit 7, alpha 1.702
        g = tl.where(g > 7.0, 7.0, g)
        u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
        out = g / (1 + tl.exp(-1.702 * g)) * (u + 1)
    else:  # gelu by tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        out = 0.5 * g * (2 - 2 / (tl.exp(2 * z) + 1)) * u
    tl.store(OUT + p * f + j, out.to(OUT.dtype.element_ty), mask=keep)


def tokens_a_block(m: int) -> int:
    """Tokens a block takes: no expert gets more than m pairs of distinct experts."""
    return 1 if m == 1 else 4 if m <= 4 else 8 if m <= 32 else 16


def mixture(
    x: torch.Tensor,
    up: CudaWeight,
    down: CudaWeight,
    indices: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    interleaved: bool,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """x (m, k) through a stack of experts in fragment order -> (m, h) in x's dtype. Gates and ups that lie side by side meet
    where they are summed; else a kernel of its own brings them together."""
    kind = ACTIVATIONS[activation]
    if fused_experts.pays(indices.numel(), up.shape[0]) and fused_experts.serves(x, up, down, kind, interleaved):
        return fused_experts.mixture(x, up, down, indices, weights, kind, up_bias, down_bias)
    plan = route(indices, up.shape[0], tokens_a_block(x.shape[0]))
    if kind == 0 or interleaved:
        hidden = fragments(x, up, up_bias, None, plan, gate=kind)
    else:
        wide = fragments(x, up, up_bias, None, plan, torch.float32)
        f = up.shape[1] // 2
        hidden = _gated(wide[:, :f], wide[:, f:], kind, x.dtype)
    return _combined(hidden, down, down_bias, plan, weights)


def apart(
    x: torch.Tensor,
    gate: Projection,
    up: Projection,
    down: CudaWeight,
    indices: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """`mixture` with gates and ups in stacks (e, f, k) of their own: one plan, a product each."""
    plan = route(indices, down.shape[0], tokens_a_block(x.shape[0]))
    gates, ups = (fragments(x, w, bias, None, plan, torch.float32) for w, bias in (gate, up))
    return _combined(_gated(gates, ups, ACTIVATIONS[activation], x.dtype), down, down_bias, plan, weights)


def _gated(gates: torch.Tensor, ups: torch.Tensor, kind: int, dtype: torch.dtype) -> torch.Tensor:
    """act(gate) · up of float32 products (pairs, f) -> (pairs, f) in `dtype`."""
    pairs, f = gates.shape
    hidden = torch.empty((pairs, f), dtype=dtype, device=gates.device)
    with _on(gates.device):
        gate_kernel[(pairs, triton.cdiv(f, 1024))](
            gates, ups, hidden, f, gates.stride(0), kind, BLOCK=1024, **_overlap(gates.device)
        )
    return hidden


def _combined(
    hidden: torch.Tensor, down: CudaWeight, bias: torch.Tensor | None, plan: Route, weights: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Σ_t weight[i, t] · (down_e · hidden) in hidden's dtype."""
    routed = fragments(hidden, down, bias, None, dataclasses.replace(plan, x_rows=plan.y_rows), torch.float32)
    return weighted_sum(routed, None, weights, hidden.dtype)


def refusal(w: CudaWeight, x: Any) -> str | None:
    """The sentence why the kernels above cannot serve, or None."""
    if not w.fragments:
        return f"experts on CUDA take 4- and 8-bit codes in groups of 16, 32 or whole 64s, not {w.format.name}"
    if x.element_size() != 2:
        return f"experts on CUDA take float16 and bfloat16 activations, not {x.dtype}"
    return None


def require(w: CudaWeight, x: Any) -> None:
    """Raise that sentence."""
    why = refusal(w, x)
    if why:
        raise BackendError(f"[experts] {why}")
