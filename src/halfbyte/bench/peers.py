"""Other libraries' products on the CPU, set up as their own users set them up, for timing beside ours in the same run.

A peer makes calls from dense weights: `calls(weights, x)` returns one argument-less function a weight. What is not installed
is a sentence.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Calls = list[Callable[[], Any]]


class Peer(ABC):
    """One way of another library to multiply by a weight.

    name         what `--peers` and reports call it
    kind         `exact`, `int8` or `half`: only results of one kind are compared
    bits         bits a weight it reads, scales included, at groups of 32 or 128
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    bits: ClassVar[float]
    modules: ClassVar[tuple[str, ...]]

    def reason(self) -> str | None:
        """None when it can run, else the sentence that says what is missing."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    @abstractmethod
    def calls(self, weights: list[F32], x: F32, threads: int) -> Calls:
        """One product a weight, x (m, k) · wᵀ, ready to be called."""


class TorchDense(Peer):
    """torch's float32 linear: what a dense model costs."""

    name, kind, bits, modules = "torch-dense", "exact", 32.0, ("torch",)

    def calls(self, weights: list[F32], x: F32, threads: int) -> Calls:
        import torch

        torch.set_num_threads(threads)
        tx = torch.from_numpy(x)
        tensors = [torch.from_numpy(w) for w in weights]
        return [partial(torch.nn.functional.linear, tx, w) for w in tensors]


class TorchInt4(Peer):
    """torch's int4pack product: uint4 in groups of 32, bfloat16 activations."""

    name, kind, bits, modules = "torch-int4pack", "half", 5.0, ("torch",)

    def calls(self, weights: list[F32], x: F32, threads: int) -> Calls:
        import torch

        torch.set_num_threads(threads)
        tx = torch.from_numpy(x).bfloat16()
        out: Calls = []
        for w in weights:
            n, k = w.shape
            codes = np.clip(np.round(w / 0.01) + 8, 0, 15).astype(np.int32)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes), 1)
            scales = torch.zeros((k // 32, n, 2), dtype=torch.bfloat16)  # scale, then what is added
            scales[..., 0] = 0.01
            out.append(partial(torch.ops.aten._weight_int4pack_mm_for_cpu, tx, packed, 32, scales))
        return out


class OnnxRuntime(Peer):
    """onnxruntime's MatMulNBits, 4 bits in blocks of 128, a session a weight (equal weights would share one prepacked buffer)."""

    modules = ("onnxruntime", "onnx")
    accuracy: ClassVar[int]

    def calls(self, weights: list[F32], x: F32, threads: int) -> Calls:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads == 1 else "1")
        out: Calls = []
        for w in weights:
            session = ort.InferenceSession(_matmul_nbits(w, self.accuracy), options, providers=["CPUExecutionProvider"])
            out.append(partial(session.run, None, {"x": x}))
        return out


class OnnxRuntimeInt8(OnnxRuntime):
    """accuracy_level 4: activations rounded to 8 bits."""

    name, kind, bits, accuracy = "onnxruntime-4", "int8", 4.25, 4


class OnnxRuntimeExact(OnnxRuntime):
    """accuracy_level 0: float32 products."""

    name, kind, bits, accuracy = "onnxruntime-0", "exact", 4.25, 0


def _matmul_nbits(w: F32, accuracy: int) -> bytes:
    """A model of one MatMulNBits node that holds `w` rounded to 4 bits in blocks of 128."""
    from onnx import TensorProto, helper, numpy_helper

    n, k = w.shape
    blocks = k // 128
    grouped = w.reshape(n, blocks, 128)
    scales = (np.abs(grouped).max(-1) / 7).astype(np.float32)
    codes = np.clip(np.round(grouped / scales[..., None]) + 8, 0, 15).astype(np.uint8)
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).reshape(n, blocks, 64)
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=128, accuracy_level=accuracy
    )
    graph = helper.make_graph(
        [node], "product", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(packed, "b"), numpy_helper.from_array(scales.reshape(-1), "s")],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return bytes(model.SerializeToString())


PEERS: dict[str, Peer] = {p.name: p for p in (OnnxRuntimeInt8(), OnnxRuntimeExact(), TorchDense(), TorchInt4())}
"""Peers by name."""


def peers_named(words: list[str]) -> list[Peer]:
    """Peers for `--peers`: a name, or the beginning of several ("onnxruntime", "torch"). KeyError lists the names."""
    chosen: list[Peer] = []
    for word in words:
        found = [p for name, p in PEERS.items() if name == word or name.startswith(word + "-")]
        if not found:
            raise KeyError(f"{word!r} is not a peer; known: {', '.join(PEERS)}")
        chosen += found
    return chosen
