"""Apple GPUs through Metal: shaders/ run by torch (this backend) or by MLX (`halfbyte.mlx`). See
docs/design/metal.md.

No kernel has run on Apple hardware yet; the tests run the same sources on the CPU. The module
imports without torch; `reason()` says what is missing.
"""

from __future__ import annotations

import importlib.util
import platform
from typing import TYPE_CHECKING, Any

from ...errors import BackendError, ShapeError
from ...tensor.qtensor import QTensor
from ..base import SCHEDULES, Backend, Call, Prepared
from .weight import MetalWeight, canonical_parts, fused_refusal, metal_weight, refusal

if TYPE_CHECKING:
    from .torch_runtime import TorchRuntime


class MetalBackend(Backend):
    """MSL kernels through `torch.mps.compile_shader`, on torch tensors of the `mps` device."""

    name = "metal"
    device = "mps"

    def __init__(self, runtime: TorchRuntime | None = None) -> None:
        self._runtime = runtime

    def reason(self) -> str | None:
        if self._runtime is not None:
            return None
        if platform.system() != "Darwin":
            return f"Metal needs an Apple GPU; this machine runs {platform.system()}"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'halfbyte[torch]' (MLX arrays go through halfbyte.mlx)"
        import torch

        if not torch.backends.mps.is_available():
            return "torch finds no Metal device (torch.backends.mps.is_available() is False)"
        if not hasattr(torch.mps, "compile_shader"):
            return f"torch {torch.__version__} has no torch.mps.compile_shader; 2.6 or later has"
        if int(platform.mac_ver()[0].partition(".")[0] or 0) < 14:
            return f"the shaders need macOS 14 or later (MSL 3.1); this is {platform.mac_ver()[0]}"
        return None

    def refuses(self, call: Call) -> str | None:
        if call.activations != "exact":
            return f"the Metal backend computes exact activations only, not {call.activations!r}"
        if call.schedule not in (None, *SCHEDULES):
            return f"schedule {call.schedule!r} has no Metal kernel; there are {', '.join(SCHEDULES)}"
        why = refusal(call.format)
        return fused_refusal(call.format) if why is None and call.schedule == "fused" else why

    @property
    def runtime(self) -> TorchRuntime:
        """The torch runtime, made on first use."""
        if self._runtime is None:
            import torch

            from .torch_runtime import TorchRuntime

            self._runtime = TorchRuntime(torch.mps.compile_shader)
        return self._runtime

    def prepare(self, w: QTensor) -> Prepared:
        packed = metal_weight(w, self.runtime.array)
        return Prepared(self.name, w.format, w.shape, packed, _nbytes(packed))

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        return canonical_parts(w.data, w.format, self.runtime.to_numpy)

    def linear(self, x: Any, w: Prepared, bias: Any | None, *, activations: str = "exact", schedule: str | None = None) -> Any:
        from . import launch

        self._same_device("linear", x)
        return launch.linear(self.runtime, x, w.data, bias, schedule)

    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        from . import launch

        self._same_device("embedding", ids)
        flat = ids.reshape(-1)
        if flat.is_floating_point():
            raise ShapeError(f"[embedding] ids are {ids.dtype}; integers are allowed")
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= w.shape[0]):
            raise ShapeError(f"[embedding] ids run from {int(flat.min())} to {int(flat.max())}; rows are 0 to {w.shape[0] - 1}")
        return launch.dequantize(self.runtime, w.data, dtype, flat).reshape(*ids.shape, w.shape[1])

    def dequantize(self, w: Prepared, dtype: str) -> Any:
        import torch

        from . import launch

        if len(w.shape) == 2:
            return launch.dequantize(self.runtime, w.data, dtype)
        return torch.stack([launch.dequantize(self.runtime, w.data.expert(e), dtype) for e in range(w.shape[0])])

    def experts(
        self,
        x: Any,
        gate_up: Prepared,
        down: Prepared,
        topk_ids: Any,
        topk_weights: Any,
        *,
        gate: str = "swiglu",
        interleaved: bool = False,
        gate_up_bias: Any | None = None,
        down_bias: Any | None = None,
        up: Prepared | None = None,
        up_bias: Any | None = None,
    ) -> Any:
        from .experts import experts, refuse_two_stacks

        refuse_two_stacks(up)
        self._same_device("experts", x)
        e = gate_up.shape[0]
        if topk_ids.numel() and (int(topk_ids.min()) < 0 or int(topk_ids.max()) >= e):
            low, high = int(topk_ids.min()), int(topk_ids.max())
            raise ShapeError(f"[experts] topk_ids run from {low} to {high}; there are experts 0 to {e - 1}")
        return experts(
            self.runtime,
            x,
            gate_up.data,
            down.data,
            topk_ids,
            topk_weights,
            gate=gate,
            interleaved=interleaved,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    def expert(self, w: Prepared, index: int) -> Prepared:
        packed = w.data.expert(index)
        return Prepared(self.name, w.format, w.shape[1:], packed, w.nbytes // w.shape[0])

    def describe(self) -> str:
        import torch

        return f"{platform.processor() or 'Apple GPU'}, torch {torch.__version__}; its kernels are tested on the CPU only"

    def _same_device(self, op: str, x: Any) -> None:
        if x.device.type != self.runtime.device:
            raise ShapeError(f"[{op}] x is on {x.device}, the weight on {self.runtime.device}; move one of them")


def _nbytes(w: MetalWeight) -> int:
    tensors = (w.codes, w.scales, w.addends, w.factors, w.order)
    return sum(t.nbytes for t in tensors if t is not None)


__all__ = ["BackendError", "MetalBackend"]
