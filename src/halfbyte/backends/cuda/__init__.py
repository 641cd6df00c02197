"""NVIDIA GPUs through Triton: codes decoded in registers, weights read once (docs/design/cuda.md).

The module imports without torch and Triton; `reason()` says what is missing.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ...errors import BackendError, ShapeError
from ...tensor.qtensor import QTensor
from ..base import Backend, Call, Prepared
from .fallback import weight as plain
from .fallback.weight import PlainWeight
from .weight import elements_of, even_groups, nbytes, refusal, to_device

SMALL_M = 64
"""Tokens up to which the weight stays packed; above, it is decoded once and cuBLAS multiplies."""
TILED = ("single-stage", "double-buffered", "striped")
"""Schedules that decode a tile of the weight at a time; every format, any m."""
SCHEDULES = (None, *TILED, "fused", "dequantize_then_gemm")


class CUDABackend(Backend):
    """Triton kernels on the GPU that holds x."""

    name = "cuda"
    device = "cuda"

    def reason(self) -> str | None:
        for module in ("torch", "triton"):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed: pip install 'halfbyte[cuda]'"
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
            return f"the CUDA backend computes exact activations only, not {call.activations!r}"
        if call.schedule not in SCHEDULES:
            return f"schedule {call.schedule!r} has no CUDA kernel yet; there are {', '.join(s for s in SCHEDULES if s)}"
        why = refusal(call.format)
        if why and call.schedule not in (None, "dequantize_then_gemm"):
            return f"{why}: it is decoded as a whole, then multiplied; schedule {call.schedule!r} needs a packed product"
        return plain.refusal(call.format) if why else None

    def prepare(self, w: QTensor) -> Prepared:
        return self.prepare_on(w, "cuda")

    def prepare_on(self, w: QTensor, device: str) -> Prepared:
        if refusal(w.format) is None and even_groups(w):
            held = to_device(w, device)
            return Prepared(self.name, w.format, w.shape, held, nbytes(held))
        why = plain.refusal(w.format)
        if why:
            raise BackendError(f"[cuda] {why}")
        whole = plain.to_device(w, device)
        return Prepared(self.name, w.format, w.shape, whole, plain.nbytes(whole))

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        from .canonical import canonical_parts

        return plain.canonical_parts(w.data) if isinstance(w.data, PlainWeight) else canonical_parts(w.data)

    def linear(self, x: Any, w: Prepared, bias: Any | None, *, activations: str = "exact", schedule: str | None = None) -> Any:
        from . import launch

        held = w.data
        self._same_device("linear", x, held)
        m = x.shape[0]
        if m == 0 or elements_of(w.shape) == 0:
            y = x.new_zeros((m, w.shape[0]))
            return y if bias is None else y + bias.to(y.dtype)
        if isinstance(held, PlainWeight):
            from .fallback import kernel as plain_kernel

            if schedule not in (None, "dequantize_then_gemm"):
                raise BackendError(f"[linear] {w.format} is decoded as a whole, then multiplied; schedule {schedule!r} cannot")
            return plain_kernel.linear(x, held, bias)
        if schedule in TILED:
            return launch.tiled(x, held, bias, schedule)
        route = schedule or self.route_of(x, held)
        if route == "fused":
            from .wgmma import schedule as fused

            if schedule and (why := fused.refusal(x, held)):
                raise BackendError(f"[linear] {why}")
            return fused.fused(x, held, bias)
        if route == "dequantize_then_gemm":
            return launch.dense_matmul(x, held, bias)
        return (launch.fragments if route == "fragments" else launch.matvec if route == "matvec" else launch.matmul)(
            x, held, bias
        )

    @staticmethod
    def route_of(x: Any, held: Any) -> str:
        """What `linear` does with x (m, k) and a packed weight where no schedule is asked for:
        fused, dequantize_then_gemm, or a kernel for few tokens: fragments, matvec, matmul.
        """
        from . import launch

        m, wide = x.shape[0], x.element_size() == 4
        if m > 16:
            from .wgmma import schedule as fused

            if fused.refusal(x, held) is None and fused.pays(m, held):
                return "fused"
        if m > (8 if wide else SMALL_M):
            return "dequantize_then_gemm"
        if held.fragments and not wide:
            return "fragments"
        return "matvec" if m == 1 or wide or launch.exceeds_float16(x, held) else "matmul"

    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        from . import launch

        self._same_device("embedding", ids, w.data)
        flat = ids.reshape(-1).long().contiguous()
        if flat.numel() and not (flat.is_cuda and _capturing()) and (int(flat.min()) < 0 or int(flat.max()) >= w.shape[0]):
            raise ShapeError(f"[embedding] ids run from {int(flat.min())} to {int(flat.max())}; rows are 0 to {w.shape[0] - 1}")
        return self._dense(w.data, launch.TORCH_DTYPES[dtype], flat).reshape(*ids.shape, w.shape[1])

    def dequantize(self, w: Prepared, dtype: str) -> Any:
        import torch

        from . import launch

        if len(w.shape) == 2:
            return self._dense(w.data, launch.TORCH_DTYPES[dtype])
        each = [self.expert(w, e).data for e in range(w.shape[0])]
        return torch.stack([self._dense(one, launch.TORCH_DTYPES[dtype]) for one in each])

    @staticmethod
    def _dense(held: Any, dtype: Any, ids: Any | None = None) -> Any:
        """A matrix, or rows of it, decoded."""
        from . import launch
        from .fallback import kernel as plain_kernel

        return (plain_kernel if isinstance(held, PlainWeight) else launch).dequantize(held, dtype, ids)

    def expert(self, w: Prepared, index: int) -> Prepared:
        if isinstance(w.data, PlainWeight):
            return plain.expert(w, index)
        held = w.data.expert(index)
        return Prepared(self.name, w.format, w.shape[1:], held, nbytes(held))

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

        for name, t in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if t.device != gate_up.data.device:
                raise ShapeError(f"[experts] {name} is on {t.device}, the weight on {gate_up.data.device}; move one of them")
        for one in (gate_up, down) if up is None else (gate_up, up, down):
            experts.require(one.data, x)
        if x.shape[0] == 0:
            return x.new_zeros((0, down.shape[1]))
        first, second, last = (None if b is None else b.to(x.dtype).contiguous() for b in (gate_up_bias, up_bias, down_bias))
        ups = ((gate_up.data, first),) if up is None else ((gate_up.data, first), (up.data, second))
        return experts.mixture(x, ups, down.data, topk_ids, topk_weights, gate, interleaved, last)

    def describe(self) -> str:
        import triton

        import torch

        return f"{torch.cuda.get_device_name()}, Triton {triton.__version__}"

    @staticmethod
    def _same_device(op: str, x: Any, held: Any) -> None:
        if x.device != held.device:
            raise ShapeError(f"[{op}] x is on {x.device}, the weight on {held.device}; move one of them")


def _capturing() -> bool:
    """True while a CUDA graph is recorded, when the host may not wait for the device."""
    import torch

    return bool(torch.cuda.is_current_stream_capturing())
