"""OpenVINO's compressed weights: u4 with zero points and i8, groups of 128, float32 products or
activations of 8 bits.

OpenVINO compiles a kernel at each new number of tokens, at the first inference with it: that one is
not timed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ....errors import BackendError
from .base import F32, Calls, Peer, Ready, grid_of


class OpenVINO(Peer):
    """`openvino-u4-g128`, and `openvino-int8-...` with its dynamic quantization of the activations."""

    modules = ("openvino",)

    def __init__(self, width: int, group: int, dynamic: bool) -> None:
        self.width, self.group, self.dynamic = width, group, dynamic
        name = f"openvino-{'int8-' if dynamic else ''}u{width}-g{group}"
        super().__init__(name, "int8" if dynamic else "exact", width + (16 + width) / group)  # a float16 scale, a zero point

    def pack(self, weights: list[F32], threads: int) -> Ready:
        import openvino as ov

        core = ov.Core()
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32 if self.dynamic else 0,
        }
        compiled = [core.compile_model(self.model(w), "CPU", settings) for w in weights]
        requests = [c.create_infer_request() for c in compiled]

        def calls(x: F32) -> Calls:
            for request in requests:
                request.set_input_tensor(ov.Tensor(x, shared_memory=True))
            check_result(self.name, np.shape(infer(requests[0])), (len(x), len(weights[0])))
            return [partial(infer, request) for request in requests]

        return calls

    def model(self, w: F32) -> Any:
        """x · ((codes − zero) · scale)ᵀ, the subgraph OpenVINO's own weight compression writes."""
        import openvino as ov
        from openvino import opset13 as op

        n, k = w.shape
        codes, scales = grid_of(w, self.group, self.width)
        shape = [n, k // self.group, self.group]
        kind = ov.Type.u4 if self.width == 4 else ov.Type.u8
        packed = codes
        if self.width == 4:
            packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
        stored = op.constant(_copied(packed, shape, kind))
        half = np.full((n, k // self.group), 1 << (self.width - 1), np.uint8).reshape(-1)
        if self.width == 4:
            half = (half[::2] | (half[1::2] << 4)).astype(np.uint8)
        zero = op.constant(_copied(half, [n, k // self.group, 1], kind))
        x = op.parameter([-1, k], ov.Type.f32, name="x")
        centred = op.subtract(op.convert(stored, "f16"), op.convert(zero, "f16"))
        scaled = op.multiply(centred, op.constant(scales[..., None].astype(np.float16)))
        dense = op.convert(op.reshape(scaled, [n, k], special_zero=False), "f32")
        return ov.Model([op.result(op.matmul(x, dense, transpose_a=False, transpose_b=True))], [x])


def _copied(array: Any, shape: list[int], kind: Any) -> Any:
    """A tensor that owns its bytes: one made over NumPy's memory does not keep it alive."""
    import openvino as ov

    tensor = ov.Tensor(kind, ov.Shape(shape))
    tensor.data.reshape(-1)[:] = array.reshape(-1)
    return tensor


def check_result(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """BackendError for a result of another shape. With dynamic quantization OpenVINO 2026.4 returns
    no rows where ONEDNN_MAX_CPU_ISA keeps it from AVX-512.
    """
    if found != wanted:
        raise BackendError(f"[bench] {name} returned {found}, {wanted} is its result's shape; leave it out of --peers")


def infer(request: Any) -> Any:
    """One inference on the tensor that is set; the output, which the next inference overwrites."""
    request.infer()
    return request.get_output_tensor().data


OPENVINO = tuple(OpenVINO(width, group, dynamic) for dynamic in (False, True) for width, group in ((4, 64), (4, 128), (8, 128)))
