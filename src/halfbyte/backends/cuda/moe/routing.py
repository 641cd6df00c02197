"""Which expert serves which token, on the device: top-k of the router's logits, and the routing
table of a grouped product.

Pairs (token, slot) are put in order of expert, stably, and cut into blocks of at most `tokens`
pairs of one expert. Nothing here waits for the host, so a CUDA graph replays with other experts.

    rank of a pair = pairs of lower experts + earlier pairs of its own expert

Up to COMPARED pairs one kernel compares every pair with every other (no sort, no atomics, no second
pass); above, torch sorts.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import torch

from .. import device as gpu
from ..launch import Routing
from ..mma.plan import TokenBlocks
from ..tuning.wgmma_tiles import most_blocks

COMPARED = 4096
"""Pairs up to which one kernel makes the table: n² comparisons, 17 million here."""


@triton.jit
def top_kernel(LOGITS, SHARE, INDEX, m, experts, stride, TOP: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr):
    """SHARE, INDEX [m, TOP]: the largest logits of a row, in falling order, softmax over those
    alone. A program a row.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    v = tl.load(LOGITS + row * stride + e, mask=e < experts, other=float("-inf")).to(tl.float32)
    best = tl.max(v, 0)
    total = 0.0
    for t in tl.static_range(TOP):
        high = tl.max(v, 0)
        at = tl.min(tl.where(v == high, e, E), 0)  # the lowest index of equal logits
        total += tl.exp(high - best)
        tl.store(SHARE + row * TOP + t, high)
        tl.store(INDEX + row * TOP + t, at)
        v = tl.where(e == at, float("-inf"), v)
    tl.debug_barrier()
    for t in tl.static_range(TOP):
        tl.store(SHARE + row * TOP + t, tl.exp(tl.load(SHARE + row * TOP + t) - best) / total)


@triton.jit(do_not_specialize=["pairs", "count", "tokens"])
def routing_kernel(
    IDS,
    blocks,
    pairs,
    count,
    experts,
    tokens,
    TOP: tl.constexpr,
    E: tl.constexpr,
    SOME: tl.constexpr,
    MINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 fills the table of `count` blocks (mma.plan.TokenBlocks) of at most `tokens` pairs;
    each other program ranks MINE pairs. A step compares with SOME pairs.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) == 0:
        e = tl.arange(0, E)
        counts = tl.zeros((E,), tl.int32)
        for start in range(0, pairs, SOME):
            q = start + tl.arange(0, SOME)
            ids = tl.load(IDS + q, mask=q < pairs, other=-1).to(tl.int32)
            counts += tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
        each = tl.where(e < experts, (counts + tokens - 1) // tokens, 0)
        edges, ends = tl.cumsum(counts, 0), tl.cumsum(each, 0)
        tl.store(blocks.count, tl.sum(each, 0))
        for start in range(0, count, SOME):
            b = start + tl.arange(0, SOME)
            expert = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), 1)
            mine = e[None, :] == expert[:, None]
            inside = b - tl.sum(tl.where(mine, (ends - each)[None, :], 0), 1)
            first = tl.sum(tl.where(mine, (edges - counts)[None, :], 0), 1) + inside * tokens
            last = tl.minimum(first + tokens, tl.sum(tl.where(mine, edges[None, :], 0), 1))
            tl.store(blocks.expert + b, expert, mask=b < count)
            tl.store(blocks.first + b, first, mask=b < count)
            tl.store(blocks.last + b, last, mask=b < count)
    else:
        p = (tl.program_id(0) - 1) * MINE + tl.arange(0, MINE)
        mine = tl.load(IDS + p, mask=p < pairs, other=-1).to(tl.int32)
        rank = tl.zeros((MINE,), tl.int32)
        for start in range(0, pairs, SOME):
            q = start + tl.arange(0, SOME)
            other = tl.load(IDS + q, mask=q < pairs, other=2147483647).to(tl.int32)
            lower = other[None, :] < mine[:, None]
            earlier = (other[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
            rank += tl.sum((lower | earlier).to(tl.int32), 1)
        tl.store(blocks.x_row + rank, p // TOP, mask=p < pairs)
        tl.store(blocks.y_row + rank, p, mask=p < pairs)


@triton.jit(do_not_specialize_on_alignment=["WHERE", "WEIGHTS"])
def combine_kernel(ROUTED, WHERE, WEIGHTS, Y, h, T: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Y[i, j] = sum over t of WEIGHTS[i, t] · ROUTED[p, j], in order; p is the pair i · T + t, or
    WHERE[i, t] with GATHER. Grid (tokens, h / BLOCK).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        p = i * T + t
        if GATHER:
            p = tl.load(WHERE + p).to(tl.int64)
        acc += tl.load(WEIGHTS + i * T + t).to(tl.float32) * tl.load(ROUTED + p * h + j, mask=j < h, other=0)
    tl.store(Y + i * h + j, acc.to(Y.dtype.element_ty), mask=j < h)


def top_k(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits (m, e) -> shares (m, top) float32 that sum to 1, and experts (m, top) int32."""
    m, experts = logits.shape
    share = torch.empty((m, top), dtype=torch.float32, device=logits.device)
    index = torch.empty((m, top), dtype=torch.int32, device=logits.device)
    if m:
        with gpu.use(logits.device):
            top_kernel[(m,)](
                logits,
                share,
                index,
                m,
                experts,
                logits.stride(0),
                TOP=top,
                E=triton.next_power_of_2(experts),
                num_warps=1,
                **gpu.overlap_options(logits.device),
            )
    return share, index


def weighted_sum(routed: torch.Tensor, where: torch.Tensor | None, shares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ_t shares[i, t] · routed[row of the pair] -> (m, h) of `dtype`; `where` gives each pair its
    row, None its own number.
    """
    (m, top), h = shares.shape, routed.shape[1]
    y = torch.empty((m, h), dtype=dtype, device=routed.device)
    with gpu.use(routed.device):
        combine_kernel[(m, triton.cdiv(h, 1024))](
            routed,
            routed if where is None else where,
            shares.contiguous(),
            y,
            h,
            top,
            GATHER=where is not None,
            BLOCK=1024,
            num_warps=4,
            **gpu.overlap_options(routed.device),
        )
    return y


def pairs_a_step(pairs: int, experts: int) -> int:
    """Pairs that `routing_kernel` compares with in a step: a power of two, so that few kernels
    serve all m; 0 where torch sorts.
    """
    if pairs > COMPARED:
        return 0
    return max(16, min(256, 8192 // triton.next_power_of_2(experts), triton.next_power_of_2(pairs)))


def route(topk_ids: torch.Tensor, experts: int, tokens: int) -> Routing:
    """Blocks of at most `tokens` pairs of one expert; topk_ids (m, top) of any integer type.
    `x_row` of a pair is its token, `y_row` its number, so results come back in order.
    """
    m, top = topk_ids.shape
    flat = topk_ids.reshape(-1)
    pairs = flat.numel()
    if m == 1:  # every pair its own block: the routing is the table
        count = counting(pairs, flat.device)
        return Routing(TokenBlocks(count[pairs:], flat, count, count[1:], torch.zeros_like(count), count[:-1]), tokens)
    blocks = most_blocks(pairs, experts, tokens)
    if pairs > COMPARED:
        return _sorted(flat, top, experts, tokens, blocks)
    # Every part begins on 16 bytes: a kernel would be compiled anew for another alignment.
    sizes = [4, *[-(-blocks // 4) * 4] * 3, *[-(-pairs // 4) * 4] * 2]
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=flat.device).split(sizes)
    table = TokenBlocks(parts[0][:1], *(part[:blocks] for part in parts[1:4]), *(part[:pairs] for part in parts[4:]))
    some = pairs_a_step(pairs, experts)
    with gpu.use(flat.device):
        routing_kernel[(1 + triton.cdiv(pairs, 32),)](
            flat,
            table,
            pairs,
            blocks,
            experts,
            tokens,
            TOP=top,
            E=triton.next_power_of_2(experts),
            SOME=some,
            MINE=32,
            num_warps=4,
            **gpu.overlap_options(flat.device),
        )
    return Routing(table, tokens)


def _sorted(flat: torch.Tensor, top: int, experts: int, tokens: int, blocks: int) -> Routing:
    """The same table by torch's sort, for many pairs."""
    ids, order = torch.sort(flat, stable=True)
    edges = torch.searchsorted(ids, counting(experts, flat.device).to(ids.dtype))
    each = (edges.diff() + (tokens - 1)) // tokens
    ends = each.cumsum(0)
    block = counting(blocks - 1, flat.device)
    expert = torch.searchsorted(ends, block, right=True).clamp(max=experts - 1)
    first = edges[expert] + (block - (ends - each)[expert]) * tokens
    last = torch.minimum(first + tokens, edges[expert + 1])
    table = [t.to(torch.int32) for t in (ends[-1:], expert, first, last, order // top, order)]
    return Routing(TokenBlocks._make(table), tokens)


@functools.cache
def _counting(count: int, device: torch.device) -> torch.Tensor:
    """0 … count, kept: never made while a graph is recorded, which would leave it empty until the
    replay.
    """
    return torch.arange(count + 1, device=device, dtype=torch.int32)


def counting(count: int, device: torch.device) -> torch.Tensor:
    """0 … count − 1 and count, int32."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(count + 1, device=device, dtype=torch.int32)
    return _counting(count, device)
