"""A mixture of experts on the device: sort the routed rows, two products, combine. No count travels
to the host.
"""

from __future__ import annotations

from typing import Any

from ...errors import BackendError
from . import kernels
from .kernels import MATVEC_ROWS, TILE
from .launch import ceil_div, weight_arrays
from .runtime import Runtime
from .weight import MetalWeight

FEW_ROUTED = 64
"""Routed rows up to which each has threadgroups of its own; above, rows are sorted by expert and
share tiles. Computed, not measured: with fewer rows than a tile holds, a tile would be mostly
padding.
"""


def refuse_two_stacks(up: Any | None) -> None:
    """Raises BackendError where gates and ups are two stacks: these kernels read them from one."""
    if up is not None:
        raise BackendError("[experts] the metal backend takes gates and ups in one stack; halfbyte.torch loops over the rest")


def experts(
    runtime: Runtime,
    x: Any,
    gate_up: MetalWeight,
    down: MetalWeight,
    topk_ids: Any,
    topk_weights: Any,
    *,
    gate: str = "swiglu",
    interleaved: bool = False,
    gate_up_bias: Any | None = None,
    down_bias: Any | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Any:
    """y[i] = Σ_t topk_weights[i, t] · down_e(act(gate_up_e(x[i]))), e = topk_ids[i, t]; sums over t
    in order, float32 throughout.

    x (m, k); gate_up (e, 2f, k), or (e, f, k) with gate "none"; down (e, h, f); topk_ids and
    topk_weights (m, top_k); biases (e, 2f) and (e, h) or None. Returns (m, h) in x's dtype.
    """
    m, top_k = (int(d) for d in topk_ids.shape)
    dtype = runtime.dtype_of(x)
    h = down.shape[1]
    if m == 0 or top_k == 0 or h == 0:
        return runtime.zeros((m, h), dtype)
    index = runtime.cast(topk_ids.reshape(-1), "int32")
    place = _Place(runtime, index, gate_up.shape[0], m * top_k, top_k)
    gated = gate != "none"
    half = 0 if interleaved or not gated else gate_up.shape[1] // 2
    hidden = place.product(x, gate_up, gate_up_bias, gate, half, False, limit, alpha)
    routed = place.product(hidden, down, down_bias, "none", 0, True, limit, alpha)
    kernel = kernels.experts_combine(dtype)
    across, rows, _ = kernel.group
    (y,) = runtime.run(
        kernel,
        [routed, runtime.cast(topk_weights, "float32")],
        [m, h, top_k],
        [],
        [(m, h)],
        (ceil_div(h, across) * across, ceil_div(m, rows) * rows, 1),
    )
    return y


class _Place:
    """Order of the routed rows: unchanged for few, sorted by expert for many."""

    def __init__(self, runtime: Runtime, index: Any, experts: int, rows: int, top_k: int) -> None:
        self.runtime, self.index, self.experts, self.rows, self.top_k = runtime, index, experts, rows, top_k
        self.few = rows <= FEW_ROUTED
        if not self.few:
            self.order, self.offsets = runtime.by_expert(index, experts)

    def product(
        self, x: Any, w: MetalWeight, bias: Any | None, gate: str, half: int, down: bool, limit: float, alpha: float
    ) -> Any:
        """One of the two products over all routed rows -> float32 (rows, outputs)."""
        runtime, dtype = self.runtime, self.runtime.dtype_of(x)
        n = w.shape[1]
        outputs = n if gate == "none" else n // 2
        tokens, stride = runtime.rows(x, 8 * w.units, w.order)
        codes = weight_arrays(runtime, w)
        last = [w.factors if bias is None else runtime.cast(bias, "float32"), w.factors]
        has_bias, floats = int(bias is not None), [w.format.divisor, limit, alpha]
        shapes = [(self.rows, outputs)]
        if self.few:
            kernel = kernels.experts_matvec(w.format, dtype, gate, down)
            ints = [w.units, w.groups, n, stride, self.top_k, half, has_bias]
            threads = (ceil_div(n, MATVEC_ROWS) * kernel.group[0], self.rows, 1)
            return runtime.run(kernel, [*codes, tokens, self.index, *last], ints, floats, shapes, threads)[0]
        kernel = kernels.experts_gemm(w.format, dtype, gate, down)
        ints = [w.units, w.groups, n, stride, self.experts, self.top_k, half, has_bias]
        tiles = ceil_div(self.rows, TILE) + self.experts  # one short tile an expert at most
        threads = (ceil_div(n, TILE) * kernel.group[0], tiles, 1)
        return runtime.run(kernel, [*codes, tokens, self.order, self.offsets, *last], ints, floats, shapes, threads)[0]
