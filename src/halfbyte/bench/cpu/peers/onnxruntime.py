"""onnxruntime's MatMulNBits: 4 and 8 bits, blocks of 32 to 128, accuracy level 0 (float32 products)
and 4 (8-bit activations).

One session for each weight. Weights are distinct, since sessions share the prepacked buffer of
equal ones.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .base import F32, Calls, Peer, Ready, grid_of


class OnnxRuntime(Peer):
    """`onnxruntime-4-b32`, `onnxruntime-0-8bit-b128`: the accuracy level, the width where it is not
    4, the block.
    """

    modules = ("onnxruntime", "onnx")

    def __init__(self, accuracy: int, width: int, block: int) -> None:
        self.accuracy, self.width, self.block = accuracy, width, block
        middle = "" if width == 4 else f"-{width}bit"
        # A block has a float32 scale; the zero point is implicit.
        super().__init__(f"onnxruntime-{accuracy}{middle}-b{block}", "int8" if accuracy == 4 else "exact", width + 32 / block)

    def pack(self, weights: list[F32], threads: int) -> Ready:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        sessions = [ort.InferenceSession(self.model(w), options, providers=["CPUExecutionProvider"]) for w in weights]

        def calls(x: F32) -> Calls:
            return [partial(session.run, None, {"x": x}) for session in sessions]

        return calls

    def model(self, w: F32) -> bytes:
        """A model of one MatMulNBits node that holds `w`."""
        from onnx import TensorProto, helper, numpy_helper

        n, k = w.shape
        codes, scales = grid_of(w, self.block, self.width)
        if self.width == 4:
            codes = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
        packed = codes.reshape(n, k // self.block, -1)
        node = helper.make_node(
            "MatMulNBits",
            ["x", "b", "s"],
            ["y"],
            domain="com.microsoft",
            K=k,
            N=n,
            bits=self.width,
            block_size=self.block,
            accuracy_level=self.accuracy,
        )
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
            [numpy_helper.from_array(packed, "b"), numpy_helper.from_array(scales.reshape(-1), "s")],
        )
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())


ONNXRUNTIME = tuple(OnnxRuntime(accuracy, width, block) for width in (4, 8) for accuracy in (4, 0) for block in (32, 64, 128))
