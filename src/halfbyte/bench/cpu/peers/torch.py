"""torch's own products on the CPU: dense float32, and its int4pack kernel with bfloat16
activations.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .base import F32, Calls, Peer, Ready, grid_of


class TorchDense(Peer):
    """torch's float32 linear, the product of a dense model."""

    modules = ("torch",)

    def __init__(self) -> None:
        super().__init__("torch-dense", "exact", 32.0)

    def pack(self, weights: list[F32], threads: int) -> Ready:
        import torch

        torch.set_num_threads(threads)
        tensors = [torch.from_numpy(w) for w in weights]

        def calls(x: F32) -> Calls:
            tx = torch.from_numpy(x)
            return [partial(torch.nn.functional.linear, tx, w) for w in tensors]

        return calls


class TorchInt4(Peer):
    """torch's int4pack product: uint4, a bfloat16 scale and zero a group, bfloat16 activations."""

    modules = ("torch",)

    def __init__(self, group: int) -> None:
        self.group = group
        super().__init__(f"torch-int4pack-g{group}", "half", 4 + 32 / group)

    def pack(self, weights: list[F32], threads: int) -> Ready:
        import torch

        torch.set_num_threads(threads)
        packed_weights = []
        for w in weights:
            n, k = w.shape
            codes, scales = grid_of(w, self.group, 4)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
            both = torch.zeros((k // self.group, n, 2), dtype=torch.bfloat16)  # scale, then what is added
            both[..., 0] = torch.from_numpy(np.ascontiguousarray(scales.T))
            packed_weights.append((packed, both))

        def calls(x: F32) -> Calls:
            tx = torch.from_numpy(x).bfloat16()
            return [
                partial(torch.ops.aten._weight_int4pack_mm_for_cpu, tx, packed, self.group, both)
                for packed, both in packed_weights
            ]

        return calls


TORCH = (TorchDense(), TorchInt4(32), TorchInt4(128))
