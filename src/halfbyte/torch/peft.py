"""LoRA of the `peft` package on packed linear layers. Needs peft, which is imported here.

    config = with_packed_layers(LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model = peft.get_peft_model(hb.load_model(path)[0], config)
    again = PeftModel.from_pretrained(
        base, folder, config=with_packed_layers(LoraConfig.from_pretrained(folder)))

y = linear(x, packed) + B · (A · x) · scaling: A and B train, the packed weight does not, and the
gradient passes through it to x. A merge rounds packed + B · A · scaling to the packed weight's own
format and reports what that costs; `merge_dense` rounds to no format.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge

import torch
from torch import Tensor, nn

from ..errors import FormatError, UnsupportedError
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .composite_linear import CompositeLinear
from .modules import QLinear
from .packed_weight import PackedWeight

OTHER_PRODUCTS = ("use_dora", "lora_bias", "velora_config", "kasa_config", "alora_invocation_tokens", "use_qalora")
"""Fields of a LoraConfig that compute another product than x · (W + B · A · scaling)ᵀ."""
OTHER_STARTS = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` that change the base weight, which is packed."""


class LoraQLinear(nn.Module, LoraLayer):  # type: ignore[misc] # torch and peft are not type-checked
    """LoRA on one `QLinear`. Built by peft.

    rounding_errors  ‖rounded - merged‖ / ‖merged‖ of each merge that is in the weight, in order
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **kwargs: Any
    ) -> None:
        asked = [name for name in OTHER_PRODUCTS if getattr(config, name, None)]
        if asked:
            raise UnsupportedError(f"[peft] {', '.join(asked)} on a packed layer; allowed: LoRA without it")
        start = getattr(config, "init_lora_weights", True)
        if isinstance(start, str) and start.startswith(OTHER_STARTS):
            raise UnsupportedError(f"[peft] init_lora_weights={start!r} changes the base weight, which is packed; allowed: True")
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._before: list[PackedWeight] = []
        self.rounding_errors: list[float] = []
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise UnsupportedError("[peft] adapter_names, an adapter for each row, on a packed layer; allowed: one for all rows")
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                inner = self.lora_dropout[name](x.to(self.lora_A[name].weight.dtype))
                y = y + (self.lora_B[name](self.lora_A[name](inner)) * self.scaling[name]).to(y.dtype)
        return y

    def get_delta_weight(self, adapter: str) -> Tensor:
        """B · A · scaling in float32, (n, k)."""
        delta: Tensor = self.lora_B[adapter].weight.float() @ self.lora_A[adapter].weight.float()
        return delta * self.scaling[adapter]

    def merged_values(self, adapters: list[str]) -> NDArray[np.float32]:
        """The packed weight's values and the adapters' in float32, (n, k)."""
        values: NDArray[np.float32] = self.get_base_layer().canonical().dequantize("float32")
        for name in adapters:
            values = values + self.get_delta_weight(name).detach().cpu().numpy()
        if not np.isfinite(values).all():
            raise UnsupportedError(f"[merge] {', '.join(adapters)}: NaN or infinity in the merged weight")
        return values

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Rounds the packed weight and the adapters' sum to the packed weight's format, with a
        warning that names the relative error. Raises UnsupportedError for a format that `quantize`
        does not write.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        values = self.merged_values(names)
        rounded = _rounded(values, self.get_base_layer().canonical())
        base = self.get_base_layer()
        size = float(np.linalg.norm(values.astype(np.float64)))
        error = float(np.linalg.norm(rounded.dequantize("float32").astype(np.float64) - values)) / size if size else 0.0
        self._before.append(base.weight)
        base.replace("", base.weight.of_same_kind(rounded))
        self.rounding_errors.append(error)
        self.merged_adapters.extend(names)
        warnings.warn(
            f"[merge] {', '.join(names)} rounded to {rounded.format}: relative error {error:.3g} of a weight "
            f"{list(values.shape)}; merge_dense merges without rounding to a format",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip

    def unmerge(self) -> None:
        """The packed weight as it was before the first merge, bit for bit."""
        if self._before:
            self.get_base_layer().replace("", self._before[0])
        self._before, self.rounding_errors = [], []
        self.merged_adapters: list[str] = []


def with_packed_layers(config: LoraConfig) -> LoraConfig:
    """The same configuration, by which peft finds packed linear layers too, by their names."""
    config._register_custom_module({QLinear: LoraQLinear})
    return config


def merge_dense(model: Any) -> Any:
    """The model of a PeftModel, whose layers with adapters are dense `nn.Linear` of the merged
    values, in the dtype of the adapters. Adapters that are merged stay so; where none is, the
    active ones are merged.
    """
    base = model.get_base_model()
    for path, layer in list(base.named_modules()):
        if isinstance(layer, LoraQLinear):
            merged = list(layer.merged_adapters)
            layer.unmerge()
            packed = layer.get_base_layer()
            if isinstance(packed, CompositeLinear):
                raise UnsupportedError(
                    f"[merge_dense] {path} is {packed.canonical().format}, which multiplies dense parts besides"
                )
            names = merged or [name for name in layer.active_adapters if name in layer.lora_A]
            like = next(iter(layer.lora_A.values())).weight
            dense = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
            values = torch.from_numpy(layer.merged_values(names))
            dense.weight = nn.Parameter(values.to(like.device, like.dtype), requires_grad=False)
            dense.bias = packed.bias
            base.set_submodule(path, dense)
    return base


def _rounded(values: NDArray[np.float32], like: QTensor) -> QTensor:
    """The values in the format of `like`."""
    if "group_index" in like.parts:
        raise UnsupportedError(f"[merge] {like.format} with an order of inputs (act-order); use merge_dense")
    try:
        rounded = quantize(values, like.format)
    except FormatError as error:
        raise UnsupportedError(f"[merge] {like.format} is not written by quantize; use merge_dense") from error
    if rounded.format != like.format:
        raise UnsupportedError(f"[merge] {like.format} would become {rounded.format}; use merge_dense")
    return rounded
