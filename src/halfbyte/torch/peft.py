"""LoRA of the `peft` package on packed linear layers and experts. Imports peft.

    config = with_packed_layers(LoraConfig(r=8, target_modules=["q_proj", "v_proj", "experts"]))
    model = peft.get_peft_model(hb.load_model(path)[0], config)
    again = PeftModel.from_pretrained(
        base, folder, config=with_packed_layers(LoraConfig.from_pretrained(folder)))

y = linear(x, packed) + B · (A · x) · scaling: A and B train, the packed weight does not, and the
gradient passes through it to x. A merge rounds packed + B · A · scaling to the packed weight's own
format and reports what that costs; `merge_dense` rounds to no format.

Of experts each has an A and a B of its own for gate and up together, and for down. Their tensors
have the names and shapes that peft gives to `target_parameters` of the dense model's experts.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor, nn

from ..errors import FormatError, UnsupportedError
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .composite_linear import CompositeLinear
from .experts import UNGATED, DenseExperts, QExperts
from .modules import QLinear
from .packed_weight import PackedWeight

try:
    from peft import LoraConfig
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which halfbyte.torch.peft needs; pip install peft", name=e.name) from e

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
        _check_plain(config)
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
        self._before.append(base.weight)
        base.replace("", base.weight.of_same_kind(rounded))
        self.rounding_errors.append(_report(names, [values], [rounded]))
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """The packed weight as it was before the first merge, bit for bit."""
        if self._before:
            self.get_base_layer().replace("", self._before[0])
        self._before, self.rounding_errors = [], []
        self.merged_adapters: list[str] = []


class LoraQExperts(nn.Module, LoraLayer):  # type: ignore[misc] # torch and peft are not type-checked
    """LoRA on one projection of a `QExperts`: on down_proj, around one on gate_up_proj. Built by
    peft.

    Expert e gains x · (B_e · A_e · scaling)ᵀ, A_e (r, k) and B_e (n, r): `lora_A` is (e·r, k), the
    rows of an expert together, and `lora_B` (n, r·e), a column of every expert after another.

    rounding_errors  as of `LoraQLinear`, of all experts together
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: Any,
        r: int = 0,
        lora_alpha: int = 1,
        *,
        projection: str = "",
        **kwargs: Any,
    ) -> None:
        _check_plain(config)
        if config.lora_dropout:
            raise UnsupportedError(f"[peft] lora_dropout {config.lora_dropout} on packed experts; allowed: 0")
        experts = base_layer
        if type(experts) is not QExperts and not projection:
            raise UnsupportedError(f"[peft] LoRA on {type(experts).__name__}; allowed on experts: QExperts itself")
        if not projection:
            first = "up_proj" if experts.gate == UNGATED else "gate_up_proj"
            base_layer = LoraQExperts(experts, adapter_name, config, r, lora_alpha, projection=first, **kwargs)
        super().__init__()
        self.projection = projection or "down_proj"
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._before: dict[str, PackedWeight] = {}
        self.rounding_errors: list[float] = []
        self._add(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        sizes = [self._experts.shape_of(piece)[-2:] for piece, expert in self._pieces() if not expert]
        return sizes[0][1], sum(n for n, _ in sizes)

    @property
    def _experts(self) -> QExperts:
        found: QExperts | LoraQExperts = self.base_layer
        return found._experts if isinstance(found, LoraQExperts) else found

    def _pieces(self) -> list[tuple[str, int | None]]:
        """Names of the packed weights of the projection, and of which expert each is, None of all;
        an expert's rows in the order of gate_up_proj.
        """
        q = self._experts
        both = self.projection == "gate_up_proj" and not q.joined
        names = ("gate_proj", "up_proj") if both else (self.projection,)
        return [
            (name if q.stacked[name] else f"{e}.{name}", None if q.stacked[name] else e)
            for name in names
            for e in range(1 if q.stacked[name] else q.num_experts)
        ]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """A further adapter, for both projections."""
        if isinstance(self.base_layer, LoraQExperts):
            self.base_layer.update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        self._add(adapter_name, r, lora_alpha, config)

    def _add(self, name: str, r: int, alpha: int, config: Any) -> None:
        if r <= 0:
            raise UnsupportedError(f"[peft] r = {r} on packed experts; allowed: 1 and more")
        e = self._experts.num_experts
        self.r[name], self.lora_alpha[name] = r, alpha
        self.scaling[name] = alpha / (r**0.5 if config.use_rslora else r)
        self.lora_dropout.update(nn.ModuleDict({name: nn.Identity()}))
        device = self._experts.device
        self.lora_A[name] = nn.Linear(self.in_features, r * e, bias=False, device=device)
        self.lora_B[name] = nn.Linear(r * e, self.out_features, bias=False, device=device)
        self.lora_bias[name], self.use_rslora[name], self.use_dora[name] = False, config.use_rslora, False
        self.reset_lora_parameters(name, config.init_lora_weights)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """A (e, r, k) and B · scaling (e, n, r) in float32."""
        e = self._experts.num_experts
        a, b = self.lora_A[adapter].weight.float(), self.lora_B[adapter].weight.float()
        return a.reshape(e, -1, a.shape[1]), b.reshape(b.shape[0], -1, e).permute(2, 0, 1) * self.scaling[adapter]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
            self.base_layer.unmerge()
        factors: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for layer in (self, self.base_layer):
            if not (layer.disable_adapters or layer.merged):
                factors[layer.projection] = [layer.factors(name) for name in layer.active_adapters if name in layer.lora_A]
        if not any(factors.values()):
            y: Tensor = self._experts(x, topk_ids, topk_weights)
            return y

        def added(projection: str, x: Tensor, expert: int) -> Tensor | None:
            each = [x @ a[expert].T @ b[expert].T for a, b in factors.get(projection, ())]
            return sum(each[1:], each[0]) if each else None

        return self._experts.with_added(x, topk_ids, topk_weights, added)

    def merged_values(self, adapters: list[str]) -> dict[str, NDArray[np.float32]]:
        """The packed values and the adapters' in float32, by packed weight."""
        out: dict[str, NDArray[np.float32]] = {}
        deltas = [(b @ a).detach().cpu().numpy() for a, b in map(self.factors, adapters)]
        row: dict[int | None, int] = {}
        for piece, expert in self._pieces():
            values: NDArray[np.float32] = self._experts.canonical(piece).dequantize("float32")
            first, rows = row.get(expert, 0), values.shape[-2]
            row[expert] = first + rows
            for delta in deltas:
                part = delta[:, first : first + rows]
                values = values + (part if expert is None else part[expert])
            if not np.isfinite(values).all():
                raise UnsupportedError(f"[merge] {', '.join(adapters)}: NaN or infinity in the merged weight")
            out[piece] = values
        return out

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As `LoraQLinear.merge`, of this projection."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        values = self.merged_values(names)
        rounded = {piece: _rounded(v, self._experts.canonical(piece)) for piece, v in values.items()}
        for piece, weight in rounded.items():
            before = self._experts.packed[piece]
            self._before.setdefault(piece, before)
            self._experts.replace(piece, before.of_same_kind(weight))
        self.rounding_errors.append(_report(names, list(values.values()), list(rounded.values())))
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """The packed weights as they were before the first merge, bit for bit."""
        for piece, weight in self._before.items():
            self._experts.replace(piece, weight)
        self._before, self.rounding_errors = {}, []
        self.merged_adapters: list[str] = []

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """The packed experts, both projections merged where asked."""
        if merge:
            self.merge(safe_merge, adapter_names)
            self.base_layer.merge(safe_merge, adapter_names)
        return self._experts


def with_packed_layers(config: LoraConfig) -> LoraConfig:
    """The same configuration, by which peft finds packed linear layers and experts too, by the
    names of their modules ("q_proj", "experts").
    """
    config._register_custom_module({QLinear: LoraQLinear, QExperts: LoraQExperts})
    return config


def merge_dense(model: Any) -> Any:
    """The model of a PeftModel, whose layers with adapters are dense, `nn.Linear` or `DenseExperts`
    of the merged values, in the dtype of the adapters. Adapters that are merged stay so; where none
    is, the active ones are merged.
    """
    base = model.get_base_model()
    for path, layer in list(base.named_modules()):
        if isinstance(layer, LoraQExperts) and isinstance(layer.base_layer, LoraQExperts):
            base.set_submodule(path, _dense_experts(layer))
        elif isinstance(layer, LoraQLinear):
            names = _undone(layer)
            packed = layer.get_base_layer()
            if isinstance(packed, CompositeLinear):
                raise UnsupportedError(
                    f"[merge_dense] {path} is {packed.canonical().format}, which multiplies dense parts besides"
                )
            like = next(iter(layer.lora_A.values())).weight
            dense = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
            values = torch.from_numpy(layer.merged_values(names))
            dense.weight = nn.Parameter(values.to(like.device, like.dtype), requires_grad=False)
            dense.bias = packed.bias
            base.set_submodule(path, dense)
    return base


def _undone(layer: LoraQLinear | LoraQExperts) -> list[str]:
    """The adapters to merge, once none of them is in the packed weight."""
    merged = list(layer.merged_adapters)
    layer.unmerge()
    return merged or [name for name in layer.active_adapters if name in layer.lora_A]


def _dense_experts(layer: LoraQExperts) -> DenseExperts:
    """Both projections, merged."""
    experts = layer._experts
    values: dict[str, NDArray[np.float32]] = {}
    for part in (layer.base_layer, layer):
        values |= part.merged_values(_undone(part))
    like = next(iter(layer.lora_A.values())).weight

    def whole(name: str) -> Tensor:
        """All experts' values of a projection, (e, n, k)."""
        array = values[name] if name in values else np.stack([values[f"{e}.{name}"] for e in range(experts.num_experts)])
        return torch.from_numpy(array).to(like.device, like.dtype)

    first = "up_proj" if experts.gate == UNGATED else "gate_up_proj"
    joined = experts.joined or experts.gate == UNGATED
    rows = whole(first) if joined else torch.cat([whole("gate_proj"), whole("up_proj")], 1)
    return DenseExperts({first: rows, "down_proj": whole("down_proj")}, experts)


def _check_plain(config: Any) -> None:
    """UnsupportedError for a configuration of another product than plain LoRA's."""
    asked = [name for name in OTHER_PRODUCTS if getattr(config, name, None)]
    if asked:
        raise UnsupportedError(f"[peft] {', '.join(asked)} on a packed layer; allowed: LoRA without it")
    start = getattr(config, "init_lora_weights", True)
    if isinstance(start, str) and start.startswith(OTHER_STARTS):
        raise UnsupportedError(f"[peft] init_lora_weights={start!r} changes the base weight, which is packed; allowed: True")


def _report(names: list[str], values: list[NDArray[np.float32]], rounded: list[QTensor]) -> float:
    """‖rounded - values‖ / ‖values‖ of the weights together, which a warning names unless it is 0."""
    exact = [v.astype(np.float64) for v in values]
    size = sum(float((v**2).sum()) for v in exact) ** 0.5
    off = sum(float(((q.dequantize("float32") - v) ** 2).sum()) for q, v in zip(rounded, exact, strict=True)) ** 0.5
    error = off / size if size else 0.0
    if off == 0:
        return error
    warnings.warn(
        f"[merge] {', '.join(names)} rounded to {rounded[0].format}: relative error {error:.3g} of a weight "
        f"{list(values[0].shape)}{f' and {len(values) - 1} more' if len(values) > 1 else ''}; merge_dense merges "
        "without rounding to a format",
        RuntimeWarning,
        stacklevel=3,
    )
    return error


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
