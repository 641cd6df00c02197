"""A mixture of experts over packed weights, in place of transformers' experts module.

    y[i] = Σ_t topk_weights[i, t] · down_e(act(gate_e(x[i]), up_e(x[i]))),   e = topk_ids[i, t]

A weight is a stack (e, n, k), gate and up in one (`gate_up_proj`) or separate (`gate_proj`,
`up_proj`, where their formats or global scales differ), or one matrix for each expert
(`3.down_proj`, where formats differ or groups run over a flattened matrix). Stacks of one backend
are multiplied by `ops.experts`; all others, and those that it refuses, by a loop over the experts
that have tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from torch.nn.functional import gelu, silu

import torch
from torch import Tensor, nn

from .. import ops
from ..backends import Prepared, backend_named
from ..errors import BackendError, ShapeError
from ..numerics.array_interop import check_storage, check_tensor
from ..ops import GATES
from . import custom_ops, functional
from .modules import Packed, Weight
from .packed_weight import PackedWeight

PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
UNGATED = "relu2"
"""The activation of experts without a gate."""
REGLU = "reglu"
"""relu(gate) · up, a gate that `ops.experts` does not have."""
Added = Callable[[str, Tensor, int], Tensor | None]
"""(gate_up_proj, up_proj or down_proj; input; expert) -> what the product gains, or None."""


class _Loop:
    """One expert after another; `_project` multiplies by one matrix of one of them."""

    gate: str
    interleaved: bool
    limit: float | None
    num_experts: int
    joined: bool
    out_features: int

    def _project(self, name: str, x: Tensor, expert: int) -> Tensor:
        raise NotImplementedError

    def _each(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, added: Added | None = None) -> Tensor:
        """Products summed in float32 in the order of their slots."""
        routed = x.new_zeros((*topk_ids.shape, self.out_features), dtype=torch.float32)
        x32 = x.to(torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            if expert >= self.num_experts:
                continue
            rows, slots = torch.where(topk_ids == expert)
            routed[rows, slots] = self._expert(x32[rows], expert, added)
        y = x32.new_zeros((len(x), self.out_features))
        for t in range(topk_ids.shape[1]):
            y += topk_weights[:, t, None].to(torch.float32) * routed[:, t]
        return y.to(x.dtype)

    def _expert(self, x: Tensor, expert: int, added: Added | None = None) -> Tensor:
        def gained(projection: str, x: Tensor, y: Tensor) -> Tensor:
            more = None if added is None else added(projection, x, expert)
            return y if more is None else y + more

        if self.gate == UNGATED:
            hidden = torch.relu(gained("up_proj", x, self._project("up_proj", x, expert))).square()
            return gained("down_proj", hidden, self._project("down_proj", hidden, expert))
        if self.joined:
            h = self._project("gate_up_proj", x, expert)
        else:
            h = torch.cat([self._project("gate_proj", x, expert), self._project("up_proj", x, expert)], dim=-1)
        h = gained("gate_up_proj", x, h)
        gate, up = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        hidden = apply_gate(self.gate, gate, up).contiguous()
        return gained("down_proj", hidden, self._project("down_proj", hidden, expert))


class QExperts(Packed, _Loop):
    """Packed experts.

    weights      projection name ("gate_up_proj", or "gate_proj" and "up_proj"; "down_proj") -> a
                 stack (e, n, k), or e matrices
    biases       projection name -> (e, n)
    gate         one of `ops.GATES` but "none"; "reglu", relu(gate) · up, whose experts are
                 multiplied one after another; "relu2" for experts without a gate, weights "up_proj"
                 and "down_proj": y = down(relu(up(x))²)
    interleaved  rows of gate_up_proj, or of gate_proj followed by up_proj, alternate gate, up, gate,
                 up, … (gpt-oss); else gate's rows come first
    limit        swiglu clamps the gate to at most this and up to ±this before it (DeepSeek-V4);
                 experts are then multiplied one after another
    """

    def __init__(
        self,
        weights: Mapping[str, Weight | list[Weight]],
        biases: Mapping[str, Tensor] | None = None,
        *,
        gate: str = "swiglu",
        interleaved: bool = False,
        limit: float | None = None,
        activations: str = "exact",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        packed: dict[str, PackedWeight] = {}
        counts: dict[str, int] = {}
        for name, weight in weights.items():
            each = {f"{i}.{name}": w for i, w in enumerate(weight)} if isinstance(weight, list) else {name: weight}
            prepared = {
                key: PackedWeight.of(w, device=device, backend=backend, activations=activations) for key, w in each.items()
            }
            packed |= prepared
            counts[name] = len(weight) if isinstance(weight, list) else prepared[name].shape[0]
        super().__init__(packed, activations, backend)
        _check(counts, gate)
        if limit is not None and (gate != "swiglu" or not limit > 0):
            raise ShapeError(f"[QExperts] limit {limit} with gate {gate!r}; allowed: a number above 0 with swiglu")
        self.num_experts = counts["down_proj"]
        self.joined = "gate_up_proj" in counts
        self.stacked = {name: not isinstance(w, list) for name, w in weights.items()}
        self.gate, self.interleaved, self.limit = gate, interleaved, limit
        self._looped: set[tuple[str, torch.dtype]] = set()  # device types and dtypes that `ops.experts` refused
        for name in PROJECTIONS:
            bias = (biases or {}).get(name)
            setattr(self, f"{name}_bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> PackedWeight:
        """One of the packed weights: `peft` reads the device of an adapted module from its weight."""
        return next(iter(self.packed.values()))

    @property
    def at_once(self) -> bool:
        """True where `ops.experts` takes the weights: stacks of one backend with a gate and without
        a limit, gate and up in one stack or not interleaved.
        """
        unfit = self.gate in (UNGATED, REGLU) or self.limit is not None
        if unfit or not all(self.stacked.values()) or (self.interleaved and not self.joined):
            return False
        return len({prepared.prepared.backend for prepared in self.packed.values()}) == 1

    def extra_repr(self) -> str:
        order = ", interleaved" if self.interleaved else ""
        return f"experts={self.num_experts}, {self.gate}{order}; {super().extra_repr()}"

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x (m, k), topk_ids and topk_weights (m, top_k) -> (m, h) in x's dtype. Index e (a masked
        slot) contributes nothing.
        """
        if custom_ops.needs_dispatch(x, topk_ids, topk_weights):
            y: Tensor = custom_ops.experts(x, topk_ids, topk_weights, self.handle)
            return y
        return self.compute(x, topk_ids, topk_weights)

    def compute(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`forward` without the custom operation: the sum over the routed experts."""
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            check_tensor("experts", name, tensor)
        check_storage("experts", x, topk_ids, topk_weights)
        masked = topk_ids >= self.num_experts
        taped = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)  # `ops.experts` has no gradient
        if taped or not self.at_once or (x.device.type, x.dtype) in self._looped:
            return self._each(x, topk_ids, topk_weights)
        if x.device.type == "cpu":
            # `ops.experts` takes no masked slots; the loop skips them.
            return self._each(x, topk_ids, topk_weights) if bool(masked.any()) else self._together(x, topk_ids, topk_weights)
        try:
            # Reading a tensor here would synchronize with the device and end the capture of a
            # graph, so a masked slot becomes expert 0 with weight 0.
            return self._together(x, topk_ids.masked_fill(masked, 0), topk_weights.masked_fill(masked, 0))
        except BackendError as error:
            warnings.warn(f"{error}; one expert after another instead, slower", RuntimeWarning, stacklevel=2)
            self._looped = {*self._looped, (x.device.type, x.dtype)}
            return self._each(x, topk_ids, topk_weights)

    def gradient(self, g: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `compute` with respect to x and topk_weights, from that of its result:
        the products are computed again, since a compiled graph keeps none of them.
        """
        # A custom operator computes with autograd's key excluded, which `enable_grad` leaves so.
        recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        with recording, torch.enable_grad():
            inputs = x.detach().requires_grad_(), topk_weights.detach().requires_grad_()
            y = self._each(inputs[0], topk_ids, inputs[1])
            back, share = torch.autograd.grad(y, inputs, g, materialize_grads=True)
        return back.contiguous(), share.contiguous()

    def _together(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        first, last = "gate_up_proj" if self.joined else "gate_proj", "down_proj"
        y: Tensor = ops.experts(
            x,
            self.packed[first].prepared,
            self.packed[last].prepared,
            topk_ids,
            topk_weights,
            gate=self.gate,
            interleaved=self.interleaved,
            gate_up_bias=getattr(self, f"{first}_bias"),
            down_bias=self.down_proj_bias,
            up=None if self.joined else self.packed["up_proj"].prepared,
            up_bias=self.up_proj_bias,
            activations=self.activations,
        )
        return y

    def with_added(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, added: Added) -> Tensor:
        """`forward` where each projection's product gains `added(projection, input, expert)`; gate
        and up are one projection, its rows in the order of gate_up_proj.
        """
        return self._each(x, topk_ids, topk_weights, added)

    @property
    def out_features(self) -> int:  # type: ignore[override] # of the packed weight
        """Outputs of an expert."""
        return int(self.packed["down_proj" if self.stacked["down_proj"] else "0.down_proj"].shape[-2])

    def _project(self, name: str, x: Tensor, expert: int) -> Tensor:
        bias = getattr(self, f"{name}_bias")
        return functional.compute(x, self._weight(name, expert), None if bias is None else bias[expert], self.activations)

    def _weight(self, name: str, expert: int) -> Prepared:
        if not self.stacked[name]:
            return self.packed[f"{expert}.{name}"].prepared
        stack = self.packed[name].prepared
        return backend_named(stack.backend).expert(stack, expert)


class DenseExperts(nn.Module, _Loop):  # type: ignore[misc] # torch is not type-checked
    """What `QExperts` computes, of dense weights: gate and up are one projection.

    weights  "gate_up_proj" (e, 2·h, k) and "down_proj" (e, n, h), rows in the order of `like`;
             "up_proj" (e, h, k) without a gate
    like     the packed experts whose gate, biases and order of rows these have
    """

    def __init__(self, weights: Mapping[str, Tensor], like: QExperts) -> None:
        super().__init__()
        self.gate, self.interleaved, self.limit = like.gate, like.interleaved, like.limit
        self.num_experts, self.out_features, self.joined = like.num_experts, like.out_features, True
        biases = {name: getattr(like, f"{name}_bias") for name in PROJECTIONS}
        if biases["gate_proj"] is not None and biases["up_proj"] is not None:
            biases["gate_up_proj"] = torch.cat([biases["gate_proj"], biases["up_proj"]], 1)
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            bias = biases[name]
            self.register_parameter(
                f"{name}_bias", None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
            )

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """As `QExperts.forward`."""
        return self._each(x, topk_ids, topk_weights)

    def _project(self, name: str, x: Tensor, expert: int) -> Tensor:
        bias = getattr(self, f"{name}_bias")
        weight = getattr(self, name)[expert].to(x.dtype)
        return nn.functional.linear(x, weight, None if bias is None else bias[expert].to(x.dtype))


def apply_gate(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """`ops.apply_gate` on torch tensors, gate and up as two tensors; and "reglu"."""
    if kind == "swiglu":
        return silu(gate) * up
    if kind == "swiglu_clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if kind == REGLU:
        return torch.relu(gate) * up
    return gelu(gate, approximate="tanh") * up


def _check(counts: Mapping[str, int], gate: str) -> None:
    separate, joined = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}
    allowed_sets = ({"up_proj", "down_proj"},) if gate == UNGATED else (separate, joined)
    if set(counts) not in allowed_sets or len(set(counts.values())) != 1:
        raise ShapeError(
            f"[QExperts] projections {counts} with gate {gate!r}; allowed: down_proj with gate_up_proj, or with gate_proj and "
            f"up_proj, or for {UNGATED!r} with up_proj alone, of as many experts"
        )
    known = (*(a for a in GATES if a != "none"), REGLU, UNGATED)
    if gate not in known:
        allowed = ", ".join(known)
        raise ShapeError(f"[QExperts] gate {gate!r}; allowed: {allowed}")
