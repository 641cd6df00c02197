"""NVIDIA GPUs through Triton: codes decoded in registers, weights read once (docs/design/cuda.md).

    mma/        products of 1 to 64 tokens, on Hopper too: one token above all
    wgmma/      products on Hopper from 17 tokens on, where they are faster than those of mma/
    portable/   every format and any GPU: products, dequantize
    fallback/   formats without a packed product
    rounded/    products of activations of 8 bits: int8, fp8
    invariant   products whose rows have the same bits for any m
    moe/        experts        tuning/     tiles of each kernel and GPU
    decoders    codes to values: the assembly that mma/ and wgmma/ execute

The module needs torch and Triton; without them `backend_named` gives an absent backend that says
so.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import BackendError, ShapeError
from ...numerics.activations import refusal as activations_refusal
from ...tensor.qtensor import QTensor
from ..base import Backend, Call, Prepared
from .fallback import weight as fallback_weight
from .fallback.weight import CanonicalWeight
from .tuning.wgmma_tiles import FEW_ROWS_MOST
from .weight import call_key, elements_of, even_groups, nbytes, refusal, to_device

SMALL_M = 64
"""Tokens up to which weights in fragment order stay packed where no other schedule takes them."""
PLANES_SMALL_M, VECTOR_M = 16, 2
"""Tokens up to which the other formats stay packed, and up to which a matrix-vector product a token
is faster than the matrix unit; above, rows are decoded and cuBLAS multiplies (measured on an H200).
"""
TILED = ("single-stage", "double-buffered", "striped")
"""Schedules that decode a tile of the weight at a time; every format, any m."""
ROUNDED = ("int8", "fp8")
"""Modes of rounded activations."""
SCHEDULES = (None, *TILED, "fused", "dequantize_then_gemm")


class CUDABackend(Backend):
    """Triton kernels on the GPU that holds x."""

    name = "cuda"
    device = "cuda"
    batch_invariant = True

    def reason(self) -> str | None:
        import torch

        if not torch.cuda.is_available():
            return "torch finds no NVIDIA GPU (torch.cuda.is_available() is False)"
        import triton

        if tuple(int(v) for v in triton.__version__.split(".")[:2]) < (3, 6):
            return f"Triton {triton.__version__} is installed; the kernels need 3.6 or more"
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return f"the GPU has compute capability {major}.{minor}; the kernels need 8.0 or more"
        return None

    def refuses(self, call: Call) -> str | None:
        if call.activations != "exact":
            return _refuses_rounded(call)
        if call.schedule not in SCHEDULES:
            return f"schedule {call.schedule!r} has no CUDA kernel yet; there are {', '.join(s for s in SCHEDULES if s)}"
        why = refusal(call.format)
        if why and call.schedule not in (None, "dequantize_then_gemm"):
            return f"{why}: it is decoded as a whole, then multiplied; schedule {call.schedule!r} needs a packed product"
        return fallback_weight.refusal(call.format) if why else None

    def prepare(self, w: QTensor) -> Prepared:
        return self.prepare_on(w, "cuda")

    def prepare_on(self, w: QTensor, device: str) -> Prepared:
        if refusal(w.format) is None and even_groups(w):
            packed = to_device(w, device)
            return Prepared(self.name, w.format, w.shape, packed, nbytes(packed))
        why = fallback_weight.refusal(w.format)
        if why:
            raise BackendError(f"[cuda] {why}")
        whole = fallback_weight.to_device(w, device)
        return Prepared(self.name, w.format, w.shape, whole, fallback_weight.nbytes(whole))

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        from .canonical import canonical_parts

        return fallback_weight.canonical_parts(w.data) if isinstance(w.data, CanonicalWeight) else canonical_parts(w.data)

    def linear(self, x: Any, w: Prepared, bias: Any | None, *, activations: str = "exact", schedule: str | None = None) -> Any:
        packed = w.data
        if bias is not None and bias.stride(0) != 1:
            bias = bias.contiguous()
        calls = packed.launches.calls
        usual = schedule is None and activations == "exact" and not w.invariant
        if calls and usual:
            y = packed.launches.again(call_key(x, packed, bias), x, bias)
            if y is not None:
                return y
        self._same_device("linear", x, packed, bias)
        m = x.shape[0]
        if m == 0 or elements_of(w.shape) == 0:
            y = x.new_zeros((m, w.shape[0]))
            return y if bias is None else y + bias.to(y.dtype)
        launch, fallback, fused = _modules()
        if activations != "exact":
            from .rounded import launch as rounded

            if isinstance(packed, CanonicalWeight):
                raise BackendError(f"[linear] {w.format} is decoded as a whole; activations={activations!r} need packed codes")
            return rounded.linear(x, packed, bias, activations, invariant=w.invariant)
        if w.invariant:
            from . import invariant

            return invariant.linear(x, packed, bias)
        if isinstance(packed, CanonicalWeight):
            if schedule not in (None, "dequantize_then_gemm"):
                raise BackendError(f"[linear] {w.format} is decoded as a whole, then multiplied; schedule {schedule!r} cannot")
            return fallback.linear(x, packed, bias)
        if schedule in TILED:
            return launch.tiled(x, packed, bias, schedule)
        if schedule == "fused" and (why := fused.refusal(x, packed)):
            raise BackendError(f"[linear] {why}")
        chosen = schedule or self.schedule_of(x, packed)
        if calls and usual and packed.order is None:  # else x is not what the kernel reads
            key = call_key(x, packed, bias)
            packed.launches.keep(key, calls.get((chosen, *key)))
        if chosen == "fused":
            return fused.fused(x, packed, bias)
        if chosen == "dequantize_then_gemm":
            return launch.dense_matmul(x, packed, bias)
        return getattr(launch, chosen)(x, packed, bias)

    @staticmethod
    def schedule_of(x: Any, packed: Any) -> str:
        """What `linear` does with x (m, k) and a packed weight where no schedule is requested:
        "fused" (wgmma/), "dequantize_then_gemm", "fragments" (mma/), or "matvec" or "matmul"
        (portable/). The choice is cached in `packed.launches`.
        """
        key = "schedule", min(x.shape[0], FEW_ROWS_MOST + 1), x.dtype, x.device  # no choice changes above it
        chosen: str | None = packed.launches.get(key)
        if chosen is None:
            chosen = packed.launches[key] = _schedule_of(x, packed)
        return chosen

    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        launch = _modules()[0]
        self._same_device("embedding", ids, w.data)
        flat = ids.reshape(-1).long().contiguous()
        if flat.numel() and not (flat.is_cuda and _capturing()) and (int(flat.min()) < 0 or int(flat.max()) >= w.shape[0]):
            raise ShapeError(f"[embedding] ids run from {int(flat.min())} to {int(flat.max())}; rows are 0 to {w.shape[0] - 1}")
        return self._dense(w.data, launch.TORCH_DTYPES[dtype], flat).reshape(*ids.shape, w.shape[1])

    def dequantize(self, w: Prepared, dtype: str) -> Any:
        import torch

        launch = _modules()[0]
        if len(w.shape) == 2:
            return self._dense(w.data, launch.TORCH_DTYPES[dtype])
        each = [self.expert(w, e).data for e in range(w.shape[0])]
        return torch.stack([self._dense(one, launch.TORCH_DTYPES[dtype]) for one in each])

    @staticmethod
    def _dense(packed: Any, dtype: Any, ids: Any | None = None) -> Any:
        """A matrix, or rows of it, decoded."""
        launch, fallback, _ = _modules()
        return (fallback if isinstance(packed, CanonicalWeight) else launch).dequantize(packed, dtype, ids)

    def expert(self, w: Prepared, index: int) -> Prepared:
        if isinstance(w.data, CanonicalWeight):
            return fallback_weight.expert(w, index)
        packed = w.data.expert(index)
        return Prepared(self.name, w.format, w.shape[1:], packed, nbytes(packed), invariant=w.invariant)

    def experts(
        self,
        x: Any,
        gate_up: Prepared,
        down: Prepared,
        topk_ids: Any,
        topk_weights: Any,
        *,
        gate: str,
        interleaved: bool,
        gate_up_bias: Any | None,
        down_bias: Any | None,
        up: Prepared | None = None,
        up_bias: Any | None = None,
    ) -> Any:
        from . import moe as experts

        biases = (("gate_up_bias", gate_up_bias), ("up_bias", up_bias), ("down_bias", down_bias))
        for name, t in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights), *biases):
            if t is not None and t.device != gate_up.data.device:
                raise ShapeError(f"[experts] {name} is on {t.device}, the weight on {gate_up.data.device}; move one of them")
        for one in (gate_up, down) if up is None else (gate_up, up, down):
            experts.require(one.data, x)
        if x.shape[0] == 0:
            return x.new_zeros((0, down.shape[1]))
        first, second, last = (None if b is None else b.to(x.dtype).contiguous() for b in (gate_up_bias, up_bias, down_bias))
        ups = ((gate_up.data, first),) if up is None else ((gate_up.data, first), (up.data, second))
        return experts.mixture(x, ups, down.data, topk_ids, topk_weights, gate, interleaved, last, gate_up.invariant)

    def describe(self) -> str:
        import triton

        import torch

        return f"{torch.cuda.get_device_name()}, Triton {triton.__version__}"

    @staticmethod
    def _same_device(op: str, x: Any, packed: Any, bias: Any | None = None) -> None:
        where = packed.device
        if x.device != where:
            raise ShapeError(f"[{op}] x is on {x.device}, the weight on {where}; move one of them")
        if bias is not None and bias.device != where:
            raise ShapeError(f"[{op}] bias is on {bias.device}, the weight on {where}; move one of them")


def _refuses_rounded(call: Call) -> str | None:
    """`CUDABackend.refuses` of activations that are rounded."""
    if call.op == "experts":
        return f"experts on CUDA compute exact activations only, not {call.activations!r}"
    if call.activations not in ROUNDED:
        return f"{call.activations} activations are computed on the CPU; rounded here: {', '.join(ROUNDED)}"
    if call.schedule is not None:
        return f"activations={call.activations!r} choose their own kernel; leave schedule={call.schedule!r} out"
    return refusal(call.format) or activations_refusal(call.format, call.activations)


def _capturing() -> bool:
    """True while a CUDA graph is recorded, when the host may not wait for the device."""
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The modules that launch kernels, which import torch and Triton."""
    from . import launch
    from .fallback import kernel
    from .wgmma import schedule

    return launch, kernel, schedule


def _schedule_of(x: Any, packed: Any) -> str:
    """`CUDABackend.schedule_of` without its cache."""
    launch, _, fused = _modules()
    m, single = x.shape[0], x.element_size() == 4
    if m > 4 and fused.refusal(x, packed) is None and fused.pays(m, packed):
        return "fused"
    if m > (8 if single else SMALL_M if packed.fragments and not packed.lanes else PLANES_SMALL_M):
        return "dequantize_then_gemm"
    if packed.fragments and not single:
        return "fragments"
    return "matvec" if m <= VECTOR_M or single or launch.exceeds_float16(x, packed) else "matmul"


def padded_rows(pairs: int, experts: int) -> int | None:
    """Rows of x that a block of experts copies for so many (token, expert) pairs in 16 bits on
    Hopper, whole tiles for each expert; None for few pairs, whose rows are not copied.
    """
    from .tuning.wgmma_tiles import LEAST_PAIRS, expert_tile, most_blocks

    if pairs < LEAST_PAIRS * experts:
        return None
    tile = expert_tile(pairs, experts).tokens
    return most_blocks(pairs, experts, tile) * tile


def warming_tokens(tokens: tuple[int, ...], top: int, experts: int, invariant: bool = False) -> tuple[int, ...]:
    """`tokens` and the numbers between them at which a block of experts must be called too, so that
    every kernel for any number in their range has run.
    """
    from . import moe

    return moe.warming_tokens(tokens, top, experts, invariant)


def warming_tokens_of(w: Prepared, tokens: tuple[int, ...], half: bool, activations: str = "exact") -> tuple[int, ...]:
    """`tokens` and the numbers between them at which a matrix must be called too, so that every
    kernel for any number in their range has run: the tiles of the fused schedule, or of products
    with rounded activations.
    """
    import torch

    packed, schedule = w.data, _modules()[2]
    x = torch.empty((1, w.shape[-1]), dtype=torch.float16 if half else torch.bfloat16, device=packed.device)
    if not tokens or isinstance(packed, CanonicalWeight):
        return tokens
    if activations != "exact":
        from .rounded import launch as rounded

        return tuple(sorted({*tokens, *rounded.warming_tokens(tokens, x, packed, activations, w.invariant)}))
    if schedule.refusal(x, packed):
        return tokens
    if w.invariant:
        from . import invariant

        return tuple(sorted({*tokens, *invariant.warming_tokens(tokens, packed)}))
    return tuple(sorted({*tokens, *schedule.warming_tokens(tokens, packed, half)}))


def write_tiles(card: str, entries: list[dict[str, Any]], measured: str, path: Path | None = None) -> Path:
    """Measured tiles to `path`, or to the user's file for this card, which calls read from then on;
    the path.
    """
    from .tuning.table import user_file, write

    path = path or user_file(card)
    write(path, card, measured, entries)
    return path
