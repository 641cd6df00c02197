"""A mixture of experts without asking the device: route, gate · up, activation, down, weighted sum.

Pairs (token, expert) are sorted by expert on the GPU. A grid that is large enough for any routing, min(pairs, pairs / tokens +
experts) blocks, is launched; each block reads from a table which expert it serves and which pairs, and a block too many ends at
once. Nothing depends on the host knowing the routing, so a CUDA graph replays with other tokens.

    hidden[p] = act(gate_up_e · x[token p])      float32 sums, activation in float32, rounded once to x's dtype
    y[i]      = Σ_t weight[i, t] · (down_e · hidden)      float32, in order of t
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import BackendError
from .launch import Route, _on, fragments
from .weight import CudaWeight

ACTIVATIONS = {"none": 0, "swiglu": 1, "swiglu_clamped": 2, "geglu": 3}
LIMIT, ALPHA = 7.0, 1.702  # gpt-oss


@triton.jit
def gate_kernel(
    H, OUT, f, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT_: tl.constexpr, ALPHA_: tl.constexpr, BLOCK: tl.constexpr
):
    """OUT[p, j] = act(H[p, gate j], H[p, up j]), float32 until the store. Grid (pairs, f / BLOCK)."""
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = j < f
    if INTERLEAVED:
        g = tl.load(H + p * 2 * f + 2 * j, mask=keep, other=0)
        u = tl.load(H + p * 2 * f + 2 * j + 1, mask=keep, other=0)
    else:
        g = tl.load(H + p * 2 * f + j, mask=keep, other=0)
        u = tl.load(H + p * 2 * f + f + j, mask=keep, other=0)
    if KIND == 1:
        out = g / (1 + tl.exp(-g)) * u
    elif KIND == 2:
        g = tl.where(g > LIMIT_, LIMIT_, g)
        u = tl.where(u > LIMIT_, LIMIT_, tl.where(u < -LIMIT_, -LIMIT_, u))
        out = g / (1 + tl.exp(-ALPHA_ * g)) * (u + 1)
    else:  # gelu by tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        out = 0.5 * g * (2 - 2 / (tl.exp(2 * z) + 1)) * u
    tl.store(OUT + p * f + j, out.to(OUT.dtype.element_ty), mask=keep)


@triton.jit
def combine_kernel(ROUTED, WEIGHTS, Y, h, T: tl.constexpr, BLOCK: tl.constexpr):
    """Y[i, j] = sum over t of WEIGHTS[i, t] * ROUTED[i, t, j], in order. Grid (tokens, h / BLOCK)."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        acc += tl.load(WEIGHTS + i * T + t).to(tl.float32) * tl.load(ROUTED + (i * T + t) * h + j, mask=j < h, other=0)
    tl.store(Y + i * h + j, acc.to(Y.dtype.element_ty), mask=j < h)


@functools.cache
def _counting(count: int, device: torch.device) -> torch.Tensor:
    """0 … count, kept: never made while a graph is recorded, which would leave it empty until the replay."""
    return torch.arange(count + 1, device=device, dtype=torch.int32)


def counting(count: int, device: torch.device) -> torch.Tensor:
    """0 … count − 1 and count, int32."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(count + 1, device=device, dtype=torch.int32)
    return _counting(count, device)


def route(indices: torch.Tensor, experts: int, tokens: int) -> Route:
    """Blocks of at most `tokens` pairs of one expert. `x_rows` are tokens; `y_rows` the pair's place, so results come back in
    order."""
    m, top = indices.shape
    flat = indices.reshape(-1)
    pairs = flat.numel()
    if m == 1:  # every pair its own block: the routing is the table
        count = counting(pairs, flat.device)
        return Route(flat, count, count[1:], torch.zeros_like(count), count[:-1], tokens)
    ids, order = torch.sort(flat, stable=True)
    blocks = min(pairs, pairs // tokens + experts)
    edges = torch.searchsorted(ids, counting(experts, flat.device).to(ids.dtype))
    each = (edges.diff() + (tokens - 1)) // tokens
    ends = each.cumsum(0)
    block = counting(blocks - 1, flat.device)
    expert = torch.searchsorted(ends, block, right=True)
    inside = expert < experts
    expert = expert.clamp(max=experts - 1)
    first = edges[expert] + (block - (ends - each)[expert]) * tokens
    last = torch.where(inside, torch.minimum(first + tokens, edges[expert + 1]), 0)
    return Route(expert, first, last, order // top, order, tokens)


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
    """x (m, k) through a stack of experts in fragment order -> (m, h) in x's dtype."""
    m, top = indices.shape
    pairs = m * top
    plan = route(indices, up.shape[0], tokens_a_block(m))
    two_f, h = up.shape[1], down.shape[1]
    with _on(x.device):
        if activation == "none":
            hidden = fragments(x, up, up_bias, None, plan)
        else:
            wide = fragments(x, up, up_bias, None, plan, torch.float32)
            f = two_f // 2
            hidden = torch.empty((pairs, f), dtype=x.dtype, device=x.device)
            gate_kernel[(pairs, triton.cdiv(f, 1024))](
                wide, hidden, f, ACTIVATIONS[activation], interleaved, LIMIT, ALPHA, BLOCK=1024
            )
        routed = fragments(hidden, down, down_bias, None, dataclasses.replace(plan, x_rows=plan.y_rows), torch.float32)
        y = torch.empty((m, h), dtype=x.dtype, device=x.device)
        combine_kernel[(m, triton.cdiv(h, 1024))](routed, weights.contiguous(), y, h, top, BLOCK=1024)
    return y


def refusal(up: CudaWeight, down: CudaWeight, x: Any) -> str | None:
    """The sentence why the kernels above cannot serve, or None."""
    if not (up.units and down.units):
        names = f"{up.format.name} and {down.format.name}"
        return f"experts on CUDA take 4-bit integers and E2M1 in groups of 16, 32 or whole 64s, not {names}"
    if x.element_size() != 2:
        return f"experts on CUDA take float16 and bfloat16 activations, not {x.dtype}"
    return None


def require(up: CudaWeight, down: CudaWeight, x: Any) -> None:
    """Raise that sentence."""
    why = refusal(up, down, x)
    if why:
        raise BackendError(f"[experts] {why}")
