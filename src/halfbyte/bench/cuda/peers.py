"""Other libraries' products on an NVIDIA GPU, set up as their own users set them up, for timing
beside ours in the same run.

A peer makes weights of random bits and returns for each a call without arguments. `reason` says
what is not installed; nothing is imported before it is used.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

Calls = list[Callable[[], Any]]
GROUP = 128


class CudaPeer(ABC):
    """One product of another library.

    name     what reports call it       format  of its weight
    bits     bits a weight it reads, scales included
    dtype    of its activations
    modules  what must be importable
    """

    name: ClassVar[str]
    format: ClassVar[str] = "uint4:g128"
    bits: ClassVar[float]
    dtype: ClassVar[torch.dtype]
    modules: ClassVar[tuple[str, ...]] = ()

    def reason(self) -> str | None:
        """None when it can run, else what is missing, as a sentence."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    def refuses(self, n: int, k: int) -> str | None:
        """None when it takes the shape, else why not, as a sentence."""
        return None if k % GROUP == 0 else f"k = {k} is not whole groups of {GROUP}"

    @abstractmethod
    def weight(self, n: int, k: int) -> Any:
        """A weight of random bits on the current device."""

    @abstractmethod
    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        """x (m, k) · wᵀ."""

    @abstractmethod
    def dense(self, w: Any) -> torch.Tensor:
        """The weight's values, float32 (n, k), to check the set-up against."""

    def calls(self, x: torch.Tensor, weights: list[Any]) -> Calls:
        """One call a weight."""
        return [partial(self.product, x, w) for w in weights]

    def error(self, n: int, k: int, m: int) -> float:
        """Relative error of one product against float64."""
        w = self.weight(n, k)
        x = torch.randn(m, k, device="cuda").to(self.dtype)
        want = x.double() @ self.dense(w).double().T
        return float((self.product(x, w).double() - want).norm() / want.norm())


class Dense(CudaPeer):
    """cuBLAS through torch, the product of a dense float16 model."""

    name, format, bits, dtype = "cublas-fp16", "float16", 16.0, torch.float16

    def weight(self, n: int, k: int) -> Any:
        return torch.randn(n, k, device="cuda", dtype=torch.float16)

    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, w)

    def dense(self, w: Any) -> torch.Tensor:
        return w.float()


class TinyGemm(CudaPeer):
    """torch's int4 product: uint4 in groups of 128, bfloat16 activations, scale and zero a group."""

    name, bits, dtype = "tinygemm-u4", 4.25, torch.bfloat16

    def weight(self, n: int, k: int) -> Any:
        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4) | codes[:, 1::2], 8)
        shape = (k // GROUP, n)
        scales = torch.stack([torch.rand(shape, device="cuda") * 0.02 + 0.01, torch.randn(shape, device="cuda")], -1)
        return packed, scales.to(torch.bfloat16), codes

    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, w[0], GROUP, w[1])

    def dense(self, w: Any) -> torch.Tensor:
        scale, zero = (w[1][..., i].float().T.repeat_interleave(GROUP, 1) for i in (0, 1))
        return (w[2].float() - 8) * scale + zero


class GemLite(CudaPeer):
    """gemlite's A16Wn: uint4 in groups of 128 with scale and zero, float16; kernel and tuning as
    the library chooses.
    """

    name, bits, dtype, modules = "gemlite-u4", 4.25, torch.float16, ("gemlite",)

    def weight(self, n: int, k: int) -> Any:
        from gemlite.helper import A16Wn

        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        scales = torch.rand(n * k // GROUP, 1, device="cuda", dtype=torch.float16) * 0.02 + 0.01
        zeros = torch.full_like(scales, 8)
        prepared = A16Wn(device="cuda:0", dtype=torch.float16).from_weights(codes, scales, zeros, 4, GROUP)
        return prepared, codes, scales

    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        return w[0](x)

    def dense(self, w: Any) -> torch.Tensor:
        n, k = w[1].shape
        return ((w[1].reshape(-1, GROUP).float() - 8) * w[2].float()).reshape(n, k)


class TritonKernels(CudaPeer):
    """OpenAI's triton_kernels as vllm's wheel contains it: mxfp4, bfloat16, its layouts for Hopper,
    scales for 4 or 8 warps.
    """

    name, format, bits, dtype = "triton_kernels-mxfp4", "mxfp4", 4.25, torch.bfloat16
    modules = ("triton_kernels",)

    def __init__(self, warps: int = 4) -> None:
        self.warps = warps

    def refuses(self, n: int, k: int) -> str | None:
        return None if k % 32 == 0 else f"k = {k} is not whole groups of 32"

    def weight(self, n: int, k: int) -> Any:
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(115, 122, (n, k // 32), device="cuda", dtype=torch.uint8)
        return (*mxfp4_operands(codes, scales, self.warps), codes, scales)

    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        from triton_kernels.matmul_ogs import matmul_ogs

        return matmul_ogs(x, w[0], None, precision_config=w[1])

    def dense(self, w: Any) -> torch.Tensor:
        return mxfp4_values(w[2], w[3])


def mxfp4_operands(codes: torch.Tensor, scales: torch.Tensor, warps: int = 8) -> tuple[Any, Any]:
    """triton_kernels' weight and precision for uint8 codes [..., n, k/2] and E8M0 scales [..., n,
    k/32], in its layouts.
    """
    from triton_kernels.matmul_ogs import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    axis = codes.ndim - 2
    value, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=axis)
    scale, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=axis, num_warps=warps)
    w = convert_layout(wrap_torch_tensor(codes.mT, dtype=FP4), value, **value_options)
    s = convert_layout(wrap_torch_tensor(scales.mT), scale, **scale_options)
    return w, PrecisionConfig(weight_scale=s)


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values of packed E2M1 codes (low nibble first) under E8M0 scales."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    table = torch.cat([table, -table])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


class TritonKernelsExperts:
    """triton_kernels' mixture of experts: top-k and softmax of logits, two grouped products,
    clamped swiglu; bfloat16.

    up (e, 2f, k/2) and down (e, h, f/2): codes and scales as in `mxfp4_operands`, gate and up rows
    interleaved; float32 biases.
    """

    name = "triton_kernels-mxfp4"

    def __init__(self, up: Any, down: Any, up_bias: torch.Tensor, down_bias: torch.Tensor, top: int, warps: int = 8) -> None:
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
        from triton_kernels.swiglu import swiglu_fn

        if torch.cuda.get_device_capability()[0] == 9:
            update_opt_flags_constraints({"split_k": 1})
        self.up, self.up_precision = mxfp4_operands(up[0], up[1], warps)
        self.down, self.down_precision = mxfp4_operands(down[0], down[1], warps)
        self.up_bias, self.down_bias = up_bias.float(), down_bias.float()
        self.top = top
        self.activation = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0))

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx, matmul_ogs
        from triton_kernels.tensor import make_ragged_tensor_metadata
        from triton_kernels.topk import topk

        chosen = topk(logits, self.top, apply_softmax=True)
        there, back = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        ragged = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, there.shape[0])
        gate = chosen.vals.flatten()[back]
        routing = RoutingData(gate, ragged.slice_sizes, logits.shape[1], self.top, ragged)
        hidden = matmul_ogs(
            x,
            self.up,
            self.up_bias,
            routing,
            gather_indx=GatherIndx(back, there),
            precision_config=self.up_precision,
            fused_activation=self.activation,
        )
        return matmul_ogs(
            hidden,
            self.down,
            self.down_bias,
            routing,
            scatter_indx=ScatterIndx(there, back),
            precision_config=self.down_precision,
            gammas=gate,
        )


class HummingInt4(CudaPeer):
    """humming-kernels' layer: int4 in groups of 128, float16; kernel and tile as the library
    chooses. It compiles with the CUDA compiler on first use and caches.
    """

    name, format, bits, dtype, modules = "humming-int4", "int4:g128", 4.125, torch.float16, ("humming",)
    config: ClassVar[dict[str, Any]] = {"dtype": "int4", "group_size": 128}
    inputs: ClassVar[dict[str, Any] | None] = None
    """Of the activations, where they are rounded to 8 bits in the call."""

    def refuses(self, n: int, k: int) -> str | None:
        return super().refuses(n, k) or (None if n % 64 == 0 else f"n = {n} is not whole tiles of 64")

    def weight(self, n: int, k: int) -> Any:
        from humming.layer import HummingLayer

        inputs = None if self.inputs is None else dict(self.inputs)
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(self.config), input_config=inputs, torch_dtype=self.dtype)
        words = torch.randint(-(2**31), 2**31, (n, k // 8), device="cuda", dtype=torch.int32)
        scales = self.scales(n, k)
        layer = layer.cuda()
        layer.load_from_tensors({"weight": words, "weight_scale": scales})
        layer.transform()
        return layer, words, scales

    def scales(self, n: int, k: int) -> torch.Tensor:
        """Random scales as the library takes them."""
        return (torch.rand(n, k // 128, device="cuda") * 0.02 + 0.01).half()

    def product(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        y: torch.Tensor = w[0](x)
        return y

    def dense(self, w: Any) -> torch.Tensor:
        return (_nibbles(w[1]).float() - 8) * w[2].float().repeat_interleave(128, 1)


class HummingMXFP4(HummingInt4):
    """The same with mxfp4, bfloat16."""

    name, format, bits, dtype = "humming-mxfp4", "mxfp4", 4.25, torch.bfloat16
    config: ClassVar[dict[str, Any]] = {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}

    def scales(self, n: int, k: int) -> torch.Tensor:
        return torch.randint(115, 122, (n, k // 32), device="cuda", dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def dense(self, w: Any) -> torch.Tensor:
        return mxfp4_values(w[1].view(torch.uint8), w[2].view(torch.uint8))


class HummingInt4Int8(HummingInt4):
    """int4 with activations rounded to int8, a scale a token, in the call."""

    name, inputs = "humming-int4-int8", {"dtype": "int8"}


class HummingMXFP4FP8(HummingMXFP4):
    """mxfp4 with activations rounded to E4M3, a scale a token, in the call."""

    name, inputs = "humming-mxfp4-fp8", {"dtype": "float8e4m3"}


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 of int32 words, the lowest first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).reshape(words.shape[0], -1)


HUMMING = (HummingInt4(), HummingMXFP4(), HummingInt4Int8(), HummingMXFP4FP8())
PEERS: dict[str, CudaPeer] = {p.name: p for p in (Dense(), TinyGemm(), GemLite(), TritonKernels(), *HUMMING)}
"""Peers by name."""
