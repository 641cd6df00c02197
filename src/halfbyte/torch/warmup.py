"""warmup: every kernel that a model's layers need is compiled before the first request.

Kernels are compiled when they are first called; which one serves a call depends on the layer's
format and shape and, in a few steps, on the number of tokens. Each kind of layer is called once at
each step, on zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .experts import QExperts
from .modules import Packed, QEmbedding, packed_modules

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens of a call; `_steps` has what layers on CUDA add."""


def warmup(model: nn.Module, *, tokens: Sequence[int] = TOKENS, dtype: Any = None, top: int | None = None) -> int:
    """Call each kind of packed layer of a model once for each number of tokens; layers on CUDA at
    a few between them too.

    tokens  numbers of tokens a call; requests between two of the default ones need no kernel that
            neither needs
    dtype   of the activations; None takes the model's parameters', float16 without any
    top     experts a token; None takes the model's configuration
    Returns the number of calls. Two layers are of one kind when format, shapes, biases and device
    agree.
    """
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float16)
    seen: set[Any] = set()
    calls = 0
    with torch.inference_mode():
        for module in packed_modules(model).values():
            kind = _kind(module)
            if kind in seen:
                continue
            seen.add(kind)
            each = top or _top(model)
            for m, topk_dtype in _steps(module, tokens, each, dtype):
                module(*_inputs(module, m, dtype, each, topk_dtype))
                calls += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return calls


def _steps(module: Packed, tokens: Sequence[int], top: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Numbers of tokens to call a layer with, and the dtype of the experts' shares then.

    A matrix on CUDA takes other tiles at numbers of tokens that depend on its shape.
    Experts on CUDA change kernels where the pairs an expert gets on average pass a limit, which is
    at another m for every number of experts. Routers return weights in the activations' dtype
    or in float32, and the kernel that sums has one version for each.
    """
    if not module.device.startswith("cuda") or isinstance(module, QEmbedding):
        return [(m, dtype) for m in tokens]
    from ..backends.cuda import warming_tokens, warming_tokens_of

    if not isinstance(module, QExperts):
        some = set(tokens)
        for weight in module.packed.values():
            if weight.prepared.backend == "cuda" and dtype in (torch.float16, torch.bfloat16):
                some.update(warming_tokens_of(weight.prepared, tuple(tokens), dtype == torch.float16, module.activations))
        return [(m, dtype) for m in sorted(some)]
    steps = warming_tokens(tuple(tokens), top, module.num_experts, any(w.invariant for w in module.packed.values()))
    ends = sorted({*steps[:1], *steps[-1:]}) if dtype != torch.float32 else []
    return [*((m, dtype) for m in steps), *((m, torch.float32) for m in ends)]


def _kind(module: Packed) -> Any:
    """What two layers topk_dtype that need the same kernels."""
    weights = tuple((name, h.format, h.shape, h.invariant) for name, h in module.packed.items())
    biases = tuple(name for name, _ in module.named_parameters())
    return type(module), weights, biases, module.device, module.activations, getattr(module, "gate", None)


def _inputs(module: Packed, m: int, dtype: Any, top: int, topk_dtype: Any) -> tuple[Any, ...]:
    """Zeros that a layer takes."""
    device = module.device
    if isinstance(module, QEmbedding):
        return (torch.zeros(m, dtype=torch.int64, device=device),)
    if isinstance(module, QExperts):
        name = next(n for n in module.packed if n.rpartition(".")[2] in ("gate_up_proj", "gate_proj"))
        x = torch.zeros(m, module.shape_of(name)[-1], dtype=dtype, device=device)
        index = torch.arange(m * top, device=device).reshape(m, top) % module.num_experts
        return x, index, torch.full((m, top), 1.0 / top, dtype=topk_dtype, device=device)
    return (torch.zeros(m, module.in_features, dtype=dtype, device=device),)


def _top(model: nn.Module) -> int:
    """Experts a token in a transformers configuration; 2 where it does not say."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    return int(getattr(config, "num_experts_per_tok", None) or 2)
