"""halfbyte's functions on MLX arrays: prepare, linear, embedding, dequantize, experts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx

from ..backends.base import SCHEDULES
from ..backends.metal import launch
from ..backends.metal.experts import experts as metal_experts
from ..backends.metal.kernels import GATES
from ..backends.metal.mlx_runtime import DTYPES, MLXRuntime
from ..backends.metal.weight import MetalWeight, metal_weight
from ..errors import BackendError, ShapeError
from ..spec import Format
from ..tensor.qtensor import QTensor
from .decode import rows_float32

BLOCK_ELEMENTS = 1 << 20
"""Elements decoded at a time where there is no Metal."""
_FLOATS = ("float32", "float16", "bfloat16")
_MODES = {"mxfp4": ("mxfp4", 32), "mxfp8_e4m3": ("mxfp8", 32), "nvfp4": ("nvfp4", 16)}
_AFFINE_BITS, _AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@cache
def _runtime() -> MLXRuntime:
    return MLXRuntime()


def on_metal() -> bool:
    """True when halfbyte's Metal kernels run: MLX has Metal and its default device is the GPU."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def prepare(q: QTensor) -> MetalWeight:
    """The weight as MLX arrays in the order that the kernels (and `mx.quantized_matmul`) read: the
    same bits, without another copy.

    Raises BackendError, with the reason, for formats without a Metal kernel.
    """
    return metal_weight(q, _runtime().array)


def native_mode(fmt: Format, dtype: str) -> dict[str, Any] | None:
    """Arguments of `mx.quantized_matmul` for a format MLX has with this dtype of x, or None for the
    others.
    """
    if fmt.family == "affine":
        # MLX computes in the scales' dtype: another dtype of x would round them.
        plain = fmt.bits in _AFFINE_BITS and fmt.group_size in _AFFINE_GROUPS and fmt.scale == dtype
        return {"mode": "affine", "bits": fmt.bits, "group_size": fmt.group_size} if plain else None
    if fmt.name in _MODES and not fmt.global_op and fmt.scale in ("e8m0", "e4m3"):
        mode, group = _MODES[fmt.name]
        return {"mode": mode, "bits": fmt.bits, "group_size": group} if fmt.group_size == group else None
    return None


def _dtype(op: str, x: Any) -> str:
    if not isinstance(x, mx.array):
        raise ShapeError(f"[{op}] x is {type(x).__name__}; an mx.array is wanted (NumPy and torch go through halfbyte.linear)")
    word = str(x.dtype).removeprefix("mlx.core.")
    if word not in _FLOATS:
        raise ShapeError(f"[{op}] x is {word}; allowed: {', '.join(_FLOATS)}")
    return word


def _integers(op: str, name: str, a: mx.array) -> None:
    if not mx.issubdtype(a.dtype, mx.integer):
        raise ShapeError(f"[{op}] {name} are {str(a.dtype).removeprefix('mlx.core.')}; integers are allowed")


def linear(x: mx.array, w: MetalWeight, bias: mx.array | None = None, *, schedule: str | None = None) -> mx.array:
    """y = x · wᵀ + bias, (..., k) -> (..., n) in x's dtype.

    schedule  None: `mx.quantized_matmul` for the formats that MLX has, else halfbyte's choice.
              "mlx" requires the former, a name of `backends.base.SCHEDULES` that kernel of halfbyte
    Raises ShapeError when shapes or dtypes do not fit, BackendError when the schedule cannot serve
    the format here.
    """
    dtype = _dtype("linear", x)
    if len(w.shape) != 2:
        raise ShapeError(f"[linear] the weight has shape {w.shape}; (n, k) is allowed, stacks go through experts()")
    n, k = w.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(f"[linear] x has shape {tuple(x.shape)}; its last axis must be k = {k} of the weight")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(f"[linear] bias has shape {tuple(bias.shape)}; the weight has n = {n} outputs, so ({n},) is allowed")
    if schedule not in (None, "mlx", *SCHEDULES):
        raise BackendError(f"[linear] schedule={schedule!r}; allowed: mlx, {', '.join(SCHEDULES)}")
    mode = native_mode(w.format, dtype) if w.order is None else None
    if schedule == "mlx" and mode is None:
        raise BackendError(f"[linear] mx.quantized_matmul has no {w.format} for x in {dtype}; halfbyte's own schedules do")
    lead = tuple(int(d) for d in x.shape[:-1])
    flat = x.reshape(math.prod(lead), k)
    if schedule in (None, "mlx") and mode is not None and n and k and flat.shape[0]:
        words = _runtime().aligned(w.codes, 4).view(mx.uint32)
        y = mx.quantized_matmul(flat, words, w.scales, w.addends, transpose=True, **mode)
        return (y if bias is None else y + bias.astype(x.dtype)).reshape(*lead, n)
    if on_metal():
        return launch.linear(_runtime(), flat, w, bias, schedule).reshape(*lead, n)
    if schedule is not None:
        raise BackendError(f"[linear] schedule={schedule!r} is a Metal kernel, and MLX has no Metal here")
    return _decoded_linear(flat, w, bias).reshape(*lead, n)


def _decoded_linear(x: mx.array, w: MetalWeight, bias: mx.array | None) -> mx.array:
    """Blocks of rows decoded, multiplied in float32 and dropped."""
    n, k = w.shape
    wide, step = x.astype(mx.float32), max(1, BLOCK_ELEMENTS // max(1, k))
    parts = [wide @ rows_float32(w, i, min(i + step, n)).T for i in range(0, n, step)]
    y = mx.concatenate(parts, axis=-1) if parts else mx.zeros((x.shape[0], 0))
    return (y if bias is None else y + bias.astype(mx.float32)).astype(x.dtype)


def dequantize(w: MetalWeight, dtype: str = "float32") -> mx.array:
    """The dense weight, exact values rounded once to `dtype` ("float32", "float16", "bfloat16");
    without Metal to float32 first.
    """
    if dtype not in _FLOATS:
        raise ShapeError(f"[dequantize] dtype {dtype!r}; allowed: {', '.join(_FLOATS)}")
    if len(w.shape) == 3:
        return mx.stack([dequantize(w.expert(e), dtype) for e in range(w.shape[0])])
    if on_metal():
        dense: mx.array = launch.dequantize(_runtime(), w, dtype)
        return dense
    return rows_float32(w, 0, w.shape[0]).astype(DTYPES[dtype])


def embedding(ids: mx.array, w: MetalWeight, *, dtype: str = "float32") -> mx.array:
    """Rows of w by index, decoded: (*ids.shape, k) of `dtype`.

    Raises ShapeError for what is no matrix, no index or no float dtype. The indices are not
    checked: reading them would evaluate MLX's lazy graph.
    """
    if dtype not in _FLOATS:
        raise ShapeError(f"[embedding] dtype {dtype!r}; allowed: {', '.join(_FLOATS)}")
    if len(w.shape) != 2:
        raise ShapeError(f"[embedding] the weight has shape {w.shape}; (n, k) is allowed")
    _integers("embedding", "ids", ids)
    flat = ids.reshape(-1)
    if on_metal():
        out = launch.dequantize(_runtime(), w, dtype, flat)
    else:
        count = int(flat.size)
        codes, scales, addends = (None if a is None else mx.take(a, flat, axis=0) for a in (w.codes, w.scales, w.addends))
        some = replace(w, shape=(count, w.shape[1]), codes=codes, scales=scales, addends=addends)
        out = rows_float32(some, 0, count).astype(DTYPES[dtype])
    return out.reshape(*ids.shape, w.shape[1])


def experts(
    x: mx.array,
    gate_up: MetalWeight,
    down: MetalWeight,
    topk_ids: mx.array,
    topk_weights: mx.array,
    *,
    gate: str = "swiglu",
    interleaved: bool = False,
    gate_up_bias: mx.array | None = None,
    down_bias: mx.array | None = None,
) -> mx.array:
    """`halfbyte.experts` on MLX arrays: x (..., k), topk_ids and topk_weights (m, top_k) -> (...,
    h) in x's dtype.
    """
    _dtype("experts", x)
    lead, k = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, k)
    if gate not in GATES:
        raise ShapeError(f"[experts] gate {gate!r}; allowed: {', '.join(GATES)}")
    if len(gate_up.shape) != 3 or len(down.shape) != 3:
        raise ShapeError(f"[experts] gate_up {gate_up.shape}, down {down.shape}; stacks (e, 2 f, k) and (e, h, f) are allowed")
    f, odd = (gate_up.shape[1], 0) if gate == "none" else divmod(gate_up.shape[1], 2)
    if odd or gate_up.shape[2] != k or down.shape != (gate_up.shape[0], down.shape[1], f):
        raise ShapeError(
            f"[experts] x {tuple(x.shape)}, gate_up {gate_up.shape}, down {down.shape}, gate {gate!r}; allowed: "
            f"x (m, k), gate_up (e, {'f' if gate == 'none' else '2 f'}, k), down (e, h, f)"
        )
    if tuple(topk_ids.shape) != tuple(topk_weights.shape) or topk_ids.ndim != 2 or topk_ids.shape[0] != flat.shape[0]:
        raise ShapeError(
            f"[experts] topk_ids {tuple(topk_ids.shape)}, topk_weights {tuple(topk_weights.shape)} for {flat.shape[0]} tokens; "
            "(m, top_k) twice is allowed"
        )
    _integers("experts", "topk_ids", topk_ids)
    for name, bias, stack in (("gate_up_bias", gate_up_bias, gate_up), ("down_bias", down_bias, down)):
        if bias is not None and tuple(bias.shape) != stack.shape[:2]:
            raise ShapeError(f"[experts] {name} has shape {tuple(bias.shape)}; {stack.shape[:2]} is allowed")
    if on_metal():
        y = metal_experts(
            _runtime(),
            flat,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            gate=gate,
            interleaved=interleaved,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
        return y.reshape(*lead, down.shape[1])
    total = mx.zeros((flat.shape[0], down.shape[1]))
    wide = flat.astype(mx.float32)
    for e in range(gate_up.shape[0]):
        share = mx.where(topk_ids == e, topk_weights.astype(mx.float32), 0.0).sum(axis=1)
        hidden = _decoded_linear(wide, gate_up.expert(e), None if gate_up_bias is None else gate_up_bias[e])
        out = _decoded_linear(apply_gate(gate, hidden, interleaved), down.expert(e), None if down_bias is None else down_bias[e])
        # An expert must not contribute to tokens that are not routed to it, not even 0 · NaN.
        total = total + mx.where((topk_ids == e).any(axis=1)[:, None], share[:, None] * out, 0.0)
    return total.astype(x.dtype).reshape(*lead, down.shape[1])


def apply_gate(kind: str, h: mx.array, interleaved: bool, limit: float = 7.0, alpha: float = 1.702) -> mx.array:
    """`ops.apply_gate` in MLX: float32 (m, 2f) -> (m, f)."""
    if kind == "none":
        return h
    half = h.shape[-1] // 2
    g, u = (h[..., ::2], h[..., 1::2]) if interleaved else (h[..., :half], h[..., half:])
    if kind == "swiglu":
        return g * mx.sigmoid(g) * u
    if kind == "swiglu_clamped":
        g, u = mx.minimum(g, limit), mx.clip(u, -limit, limit)
        return g * mx.sigmoid(alpha * g) * (u + 1)
    return 0.5 * g * (1 + mx.tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u
