"""MXFP4 stacks of experts under the names that vLLM gives its fused parameters.

    experts.w13_weight, experts.w2_weight               uint8 [e, n, k/2], low nibble even
    experts.w13_weight_scale, experts.w2_weight_scale   uint8 [e, n, k/32], E8M0 bytes       value = e2m1 · 2^(b − 127)

The rows of `w13` are those of the gate (w1), then those of the up projection (w3). Source: vLLM's
MXFP4 experts and the checkpoints saved from them under `quant_method: mxfp4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..formats import format_named
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, cannot_hold, require
from .common.float8 import E8M0, U8, bytes_of, view_as
from .gpt_oss import GptOssConfig

MXFP4 = format_named("mxfp4", 32)


class VLLMExperts(Layout):
    """`w13` and `w2` as stacks."""

    name = "vllm-experts"
    config_reader = GptOssConfig
    required = ("weight", "weight_scale")
    parts: ClassVar[dict[str, str]] = {"weight": "codes", "weight_scale": "scales"}
    separator = "_"

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        return self.matches(headers) and headers["weight"].dtype == U8 and len(headers["weight"].shape) == 3

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        experts, n, half = require(self.name, tensors, "weight", name, (U8,), (None, None, None))
        scales = (experts, n, -(-2 * half // 32))
        require(self.name, tensors, "weight_scale", name, (U8, E8M0), scales, f"for {2 * half} inputs in groups of 32")
        return Described(MXFP4, (experts, n, 2 * half))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        scale = tensors["weight_scale"]
        details: dict[str, Any] = {"layout": self.name, "scale_dtype": scale.dtype.name}
        return QTensor(fmt, shape, {"codes": tensors["weight"], "scales": bytes_of(scale)}, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        fits = fmt == MXFP4 and len(shape) == 3 and shape[-1] % 2 == 0
        return "" if fits else "this layout holds stacks (e, n, k) in mxfp4:g32, k even"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        if "group_index" in q.parts:
            raise cannot_hold(self.name, q, "it has no group index (act-order)")
        dtype = str(self.own_details(q).get("scale_dtype", "uint8"))
        return {"weight": q.parts["codes"], "weight_scale": view_as(q.parts["scales"], dtype)}

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_method": "mxfp4"}
