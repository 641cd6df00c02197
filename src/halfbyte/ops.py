"""The verbs: dequantize, linear, embedding and experts on packed weights, on whatever backend
serves the call.

`linear(x, w)` is x · wᵀ with w decoded in place, never as a dense copy. A weight is a `QTensor` or,
to keep only one order of it in memory, what `prepare(w)` returned.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .backends import ACTIVATIONS, SCHEDULES, X_DTYPES, Backend, Call, Prepared, backend_named, backends_for
from .backends.cpu import ACTIVATIONS as ON_CPU
from .backends.cpu import at_once as at_once_on_cpu
from .errors import BackendError, ShapeError
from .numerics.array_interop import (
    as_array,
    as_matrix,
    check_memory,
    check_storage,
    device_of,
    dtype_of,
    fits_storage,
    is_torch,
    layout_of,
    like,
    records_gradient,
    to_numpy,
    torch_state,
)
from .numerics.exact import DTYPES
from .numerics.opaque_call import call, constant, is_recordable, name_of, recall, record
from .spec import Format
from .tensor.qtensor import QTensor

if TYPE_CHECKING:
    import torch

Weight = QTensor | Prepared
"""A packed weight as the verbs take it."""

ArrayT = TypeVar("ArrayT", NDArray[Any], "torch.Tensor")
"""NumPy array or torch tensor: a verb returns what it was given."""

_lock = threading.Lock()
_prepared: dict[int, dict[str, Prepared]] = {}
_warned: set[str] = set()


def choose(call: Call, device: str = "cpu", backend: str | None = None) -> Backend:
    """The backend that serves `call` on a torch device ("cpu", "cuda:1"), or the one named.

    Raises BackendError with the reason of each candidate when none does. A warning, once for each
    reason, names better backends that were not used.
    """
    if backend is not None:
        chosen = backend_named(backend)
        why = _reason(chosen, call)
        if why:
            raise BackendError(f"[{call.op}] backend {backend!r} cannot serve {call.format} in {call.dtype}: {why}")
        return chosen
    refused: list[str] = []
    for candidate in backends_for(device.partition(":")[0]):
        why = _reason(candidate, call)
        if why is None:
            if refused:
                _warn_once(call, candidate, refused)
            return candidate
        refused.append(f"{candidate.name}: {why}")
    raise BackendError(
        f"[{call.op}] no backend serves {call.format} in {call.dtype} with activations={call.activations!r} on {device!r}: "
        + ("; ".join(refused) or "none computes there")
    )


def _reason(candidate: Backend, call: Call) -> str | None:
    """None where the backend runs here and serves the call, else why not."""
    if call.invariant and not candidate.batch_invariant:
        return "the bits of a row depend on the number of rows; leave invariant=True out"
    return candidate.reason() or candidate.refuses(call)


def _warn_once(call: Call, chosen: Backend, refused: list[str]) -> None:
    """Warn of reasons not given before; one that applies to every format is given once."""
    new = [reason for reason in refused if reason not in _warned]
    if new:
        _warned.update(new)
        message = f"[{call.op}] {call.format} runs on the {chosen.name} backend, slowly: {'; '.join(new)}"
        warnings.warn(message, RuntimeWarning, stacklevel=_frames_of_this_package() + 1)


def _frames_of_this_package() -> int:
    """Innermost frames, from the caller's on, that run code of halfbyte."""
    count, frame = 0, inspect.currentframe()
    frame = frame and frame.f_back
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "halfbyte":
        count, frame = count + 1, frame.f_back
    return count


def prepare(w: QTensor, *, device: str = "cpu", backend: str | None = None, activations: str = "exact") -> Prepared:
    """The weight in the chosen backend's own order. Drop `w` afterwards and only that order stays
    in memory.
    """
    call = Call("linear" if w.ndim == 2 else "experts", w.format, activations=activations)
    return choose(call, device, backend).prepare_on(w, device)


def _resolve(
    w: Weight,
    op: str,
    at: Any,
    backend: str | None,
    dtype: str,
    activations: str = "exact",
    schedule: str | None = None,
    invariant: bool = False,
) -> tuple[Backend, Prepared]:
    """Backend and prepared weight for a call; a QTensor is prepared once a backend and device and
    remembered while it lives.

    at  an array on the device of the call, or the device's name
    """
    if isinstance(w, Prepared):
        if backend not in (None, w.backend):
            raise BackendError(f"[{op}] the weight is prepared for {w.backend!r}, the call asks for {backend!r}")
        invariant = invariant or w.invariant
        if invariant and schedule is not None:
            raise BackendError(f"[{op}] schedule={schedule!r} of an invariant product, which has its own; leave one of them out")
        question = (op, dtype, activations, schedule, invariant)
        serving = w.served.get(question)
        if serving is None:
            serving = w.served[question] = choose(Call(op, w.format, dtype, activations, schedule, invariant), backend=w.backend)
        return serving, w if invariant is w.invariant else replace(w, invariant=True)
    if invariant:
        chosen, prepared = _resolve(w, op, at, backend, dtype, activations)
        return _resolve(prepared, op, at, None, dtype, activations, schedule, True)
    call, device = Call(op, w.format, dtype, activations, schedule), at if isinstance(at, str) else device_of(at)
    chosen = choose(call, device, backend)
    key = id(w)
    with _lock:
        table = _prepared.get(key, {})
        place = f"{chosen.name} {device}"
        if place not in table:
            prepared = chosen.prepare_on(w, device)
            if prepared.data is w:  # the reference computes on the canonical order itself: nothing to remember
                return chosen, prepared
            if key not in _prepared:
                _prepared[key] = table
                weakref.finalize(w, _prepared.pop, key, None)
            table[place] = prepared
        return chosen, table[place]


def _remembered(w: Any, x: Any) -> Prepared | None:
    """What a call before has prepared of w in the first backend of a torch tensor's device."""
    table = _prepared.get(id(w)) if type(w) is QTensor else None
    return None if table is None else table.get(f"{x.device.type} {x.device}")


def _check_w(op: str, w: Any, axes: int) -> tuple[int, ...]:
    """The weight's shape, of the number of axes the verb takes."""
    if not isinstance(w, (QTensor, Prepared)):
        raise ShapeError(f"[{op}] the weight is {type(w).__name__}; allowed: QTensor, or what halfbyte.prepare returned")
    if len(w.shape) != axes:
        allowed = "(n, k); a stack of experts goes through experts()" if axes == 2 else "(e, n, k)"
        raise ShapeError(f"[{op}] the weight has shape {w.shape}; allowed: {allowed}")
    return w.shape


def _has_axes(axes: int, *weights: Any) -> bool:
    """True for packed weights of so many axes: what the checked path refuses is not recorded."""
    return all(isinstance(w, (QTensor, Prepared)) and len(w.shape) == axes for w in weights)


def _check_mode(op: str, activations: str, schedule: str | None) -> None:
    if activations not in ACTIVATIONS:
        raise BackendError(f"[{op}] activations={activations!r}; allowed: {', '.join(ACTIVATIONS)}")
    if schedule is not None and schedule not in SCHEDULES:
        raise BackendError(f"[{op}] schedule={schedule!r}; allowed: {', '.join(SCHEDULES)}")


def _check_dtype(op: str, x: Any) -> str:
    """Name of x's dtype, one of those that backends compute."""
    dtype = dtype_of(x)
    if dtype not in X_DTYPES:
        raise ShapeError(f"[{op}] x is {dtype}; allowed: {', '.join(X_DTYPES)}; convert it, as x.astype(np.float32) does")
    return dtype


def _check_integers(op: str, name: str, ids: Any) -> None:
    if not dtype_of(ids).startswith(("int", "uint")):
        raise ShapeError(f"[{op}] {name} are {dtype_of(ids)}; integers are allowed")


def _check_x(op: str, x: Any) -> Any:
    if isinstance(x, (list, tuple, int, float)):
        raise ShapeError(
            f"[{op}] x is a {type(x).__name__}; NumPy arrays and torch tensors are allowed: give np.asarray(x, np.float32)"
        )
    x = as_array(op, "x", x)
    _check_dtype(op, x)
    if records_gradient(x):
        raise BackendError(
            f"[{op}] x requires a gradient, and this verb passes none on; halfbyte.torch's linear and modules do; or give "
            "x.detach()"
        )
    if is_torch(x):
        if layout_of(x) != "strided":
            raise ShapeError(f"[{op}] x is laid out as {x.layout}; torch.strided is allowed: give x.to_dense()")
        x = x.resolve_neg()  # a view whose sign is one bit of the tensor has no memory of its own
        check_memory(op, x)
    return x


def _check_on_cpu(op: str, *arrays: Any) -> None:
    for a in arrays:
        if is_torch(a) and not a.is_cpu:
            raise ShapeError(f"[{op}] a tensor on {a.device}, the weight on cpu; move one of them")


def _check_bias(op: str, bias: Any, n: int) -> None:
    if tuple(bias.shape) != (n,):
        raise ShapeError(f"[{op}] bias has shape {tuple(bias.shape)}; the weight has n = {n} outputs, so ({n},) is allowed")


_PLAIN_DTYPES = frozenset(np.dtype(DTYPES[name]) for name in X_DTYPES)


def _is_plain(x: Any, w: Any) -> bool:
    """True for a NumPy matrix that fits a weight prepared by the native core: nothing to convert
    and no backend to choose.
    """
    if type(x) is not np.ndarray or type(w) is not Prepared or w.backend != "cpu":
        return False
    return x.ndim == 2 == len(w.shape) and x.shape[1] == w.shape[1] and x.dtype in _PLAIN_DTYPES


def at_once(x: Any, w: Prepared, bias: Any | None, activations: str) -> Any | None:
    """`linear` for tensors of torch's own classes that record no gradient, without its checks one
    by one: by address on the CPU, and on an NVIDIA GPU. None for all else, which the checked path
    computes or refuses.
    """
    if w.backend == "cpu":
        return at_once_on_cpu(x, w, bias, activations)
    if w.backend != "cuda" or activations != "exact" or len(w.shape) != 2:
        return None
    torch = torch_state()
    if type(x) is not torch.kind or (bias is not None and type(bias) is not torch.kind and type(bias) is not torch.parameter):
        return None
    if torch.observed() or torch.forward_ad._current_level >= 0 or not torch.readable(x, bias) or x.dtype not in torch.floats:
        return None
    if not fits_storage(x) or (bias is not None and not fits_storage(bias)):
        return None
    if (x.requires_grad or (bias is not None and bias.requires_grad)) and torch.grad_enabled():
        return None
    (n, k), shape = w.shape, x.shape
    if not shape or shape[-1] != k or not x.numel() or (bias is not None and bias.shape != (n,)):
        return None
    if len(shape) == 2:
        return backend_named("cuda").linear(x, w, bias)
    return backend_named("cuda").linear(x.reshape(-1, k), w, bias).view(*shape[:-1], n)


def linear(
    x: ArrayT,
    w: Weight,
    bias: NDArray[Any] | torch.Tensor | None = None,
    *,
    activations: str = "exact",
    backend: str | None = None,
    schedule: str | None = None,
    invariant: bool = False,
) -> ArrayT:
    """y = x · wᵀ + bias without a dense copy of w.

    x            (..., k) NumPy array or torch tensor: float32, float16 or bfloat16, any strides,
                 any number of tokens including 0
    w            packed (n, k)
    bias         (n,) or None
    activations  "exact": float32 products and sums. "int8": x rounded to 8 bits a group at a time,
                 faster, error near 5e-3. "int8_token", on the CPU: under one scale for each token,
                 as W8A8 checkpoints say, where the weight has one scale a row; else as "int8".
                 "fp8": x rounded to E4M3 under a power of two for each token, on NVIDIA GPUs, error
                 near 2.6e-2
    backend      None picks by x's device; a name forces one
    schedule     None picks; a name forces one where the backend has it
    invariant    a row of y has the same bits whatever the number of rows and whatever the others
                 hold: always so on the CPU; on CUDA by kernels of their own, slower for few rows
    Returns (..., n) in x's dtype, on x's device. Raises ShapeError when shapes or dtypes do not
    fit, BackendError with the reason when no backend serves the call. A transposed (k, n)
    weight is refused unless it is square.
    """
    plain_bias = bias is None or (type(bias) is np.ndarray and bias.shape == w.shape[:1])
    if backend is None and schedule is None and plain_bias and activations in ON_CPU and _is_plain(x, w):
        y: ArrayT = backend_named("cpu").linear(x, w, bias, activations=activations)  # type: ignore[arg-type] # `_is_plain`
        return y
    if is_recordable(x, bias) and _has_axes(2, w):
        return call(_linear_call(name_of(w), activations, backend, schedule, invariant), x, bias)  # type: ignore[no-any-return]
    if backend is None and schedule is None and not invariant and is_torch(x):
        prepared = w if type(w) is Prepared else _remembered(w, x)
        direct: ArrayT | None = None if prepared is None else at_once(x, prepared, bias, activations)
        if direct is not None:
            return direct
    _check_mode("linear", activations, schedule)
    x = _check_x("linear", x)
    if bias is not None:
        bias = as_array("linear", "bias", bias)
        check_memory("linear", bias)
    y = product(x, w, bias, activations, backend, schedule, invariant)
    return y


@constant
def _linear_call(name: str, activations: str, backend: str | None, schedule: str | None, invariant: bool) -> str:
    w = recall(int(name))

    def computed(w: Weight, x: Any, bias: Any) -> Any:
        return linear(x, w, bias, activations=activations, backend=backend, schedule=schedule, invariant=invariant)

    n = w.shape[0]
    return record(computed, lambda x, bias: x.new_empty((*x.shape[:-1], n)), w)


def product(
    x: Any,
    w: Weight,
    bias: Any | None,
    activations: str = "exact",
    backend: str | None = None,
    schedule: str | None = None,
    invariant: bool = False,
) -> Any:
    """`linear` for a caller that has checked that x and bias are arrays with memory of their own
    and record no gradient.
    """
    _check_mode("linear", activations, schedule)
    dtype = _check_dtype("linear", x)
    n, k = _check_w("linear", w, 2)
    flat, lead = as_matrix("linear", x, k)
    if bias is not None:
        _check_bias("linear", bias, n)
    chosen, prepared = _resolve(w, "linear", x, backend, dtype, activations, schedule, invariant)
    if chosen.device == "cpu":
        _check_on_cpu("linear", x, bias)
        b = None if bias is None else to_numpy(bias)
        y = chosen.linear(to_numpy(flat), prepared, b, activations=activations, schedule=schedule)
        return like(y, x).reshape(*lead, n)
    check_storage("linear", bias)
    return chosen.linear(flat, prepared, bias, activations=activations, schedule=schedule).reshape(*lead, n)


def embedding(ids: ArrayT, w: Weight, *, dtype: Any = "float32", backend: str | None = None) -> ArrayT:
    """Rows of w by index, rounded to `dtype` as `dequantize` rounds.

    ids  integers of any shape, NumPy or torch, each in 0 … n−1
    Returns (*ids.shape, k) of `dtype`, in ids' framework and on its device. Raises ShapeError for
    an index out of range.
    """
    if is_recordable(ids) and _has_axes(2, w):
        return call(_embedding_call(name_of(w), dtype, backend), ids)  # type: ignore[no-any-return]
    n, k = _check_w("embedding", w, 2)
    word = str(dtype).removeprefix("torch.")
    check_memory("embedding", ids)
    if not is_torch(ids):
        ids = as_array("embedding", "ids", ids)
        ids = ids if ids.size else ids.astype(np.int64)  # an empty list comes as floats
    _check_integers("embedding", "ids", ids)
    chosen, prepared = _resolve(w, "embedding", ids, backend, word)
    rows: ArrayT
    if chosen.device != "cpu":
        rows = chosen.embedding(ids, prepared, word)
        return rows
    index = to_numpy(ids)
    flat = np.ascontiguousarray(index, dtype=np.int64).reshape(-1)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= n):
        raise ShapeError(f"[embedding] ids run from {flat.min()} to {flat.max()}; the table has rows 0 to {n - 1}")
    rows = like(chosen.embedding(flat, prepared, word), ids).reshape(*index.shape, k)
    return rows


@constant
def _embedding_call(name: str, dtype: Any, backend: str | None) -> str:
    w = recall(int(name))
    known = getattr(sys.modules["torch"], str(dtype).removeprefix("torch."), None)
    k = w.shape[1]
    return record(
        lambda w, ids: embedding(ids, w, dtype=dtype, backend=backend),
        lambda ids: ids.new_empty((*ids.shape, k), dtype=known),
        w,
    )


@overload
def dequantize(w: QTensor, dtype: Any = ..., *, arithmetic: str = ..., backend: None = ...) -> NDArray[Any]: ...
@overload
def dequantize(w: Weight, dtype: Any = ..., *, arithmetic: str = ..., backend: str | None = ...) -> Any: ...
def dequantize(w: Weight, dtype: Any = "float32", *, arithmetic: str = "exact", backend: str | None = None) -> Any:
    """The dense weight: exact values rounded once to `dtype`, or the producer's own arithmetic (see
    `QTensor.dequantize`).

    On NVIDIA GPUs 16-bit values are rounded to float32 first: where that is not exact (float32
    scales, zero points, biases and minimums, tables of float32) and falls on the midpoint of two
    numbers of `dtype`, the result is the other of the two.
    """
    word = str(dtype).removeprefix("torch.")
    if isinstance(w, QTensor) and (backend in (None, "reference") or arithmetic != "exact"):
        return w.dequantize(dtype, arithmetic)
    if arithmetic != "exact":
        raise BackendError(f"[dequantize] arithmetic={arithmetic!r} needs the QTensor, not a prepared weight")
    device = backend_named(w.backend if isinstance(w, Prepared) else backend or "reference").device
    chosen, prepared = _resolve(w, "dequantize", device, backend, word)
    return chosen.dequantize(prepared, word)


GATES = ("swiglu", "swiglu_clamped", "geglu", "none")


def apply_gate(kind: str, h: Any, *, interleaved: bool = False, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """The gated activation of an expert's first product, float32 (m, 2f) -> (m, f).

    swiglu          silu(gate) · up
    swiglu_clamped  gpt-oss: gate ≤ limit, |up| ≤ limit; gate · sigmoid(alpha · gate) · (up + 1)
    geglu           gelu_tanh(gate) · up
    none            h unchanged
    interleaved     gate and up are even and odd columns (gpt-oss), else the first and second half
    """
    if kind == "none":
        return h
    half = h.shape[-1] // 2
    g, u = (h[..., ::2], h[..., 1::2]) if interleaved else (h[..., :half], h[..., half:])
    with np.errstate(over="ignore"):
        if kind == "swiglu":
            return g / (1 + np.exp(-g)) * u
        if kind == "swiglu_clamped":
            g, u = np.minimum(g, np.float32(limit)), np.clip(u, np.float32(-limit), np.float32(limit))
            return g / (1 + np.exp(-np.float32(alpha) * g)) * (u + 1)
        if kind == "geglu":
            c = np.float32(0.7978845608028654)
            return np.float32(0.5) * g * (1 + np.tanh(c * (g + np.float32(0.044715) * g * g * g))) * u
    raise ShapeError(f"[experts] gate {kind!r}; allowed: {', '.join(GATES)}")


def _check_routing(ids: tuple[int, ...], weights: tuple[int, ...], m: int) -> None:
    if ids != weights or len(ids) != 2 or ids[0] != m:
        raise ShapeError(f"[experts] topk_ids {ids}, topk_weights {weights} for {m} tokens; (m, top_k) twice is allowed")


def experts(
    x: ArrayT,
    gate_up: Weight,
    down: Weight,
    topk_ids: ArrayT,
    topk_weights: ArrayT,
    *,
    gate: str = "swiglu",
    interleaved: bool = False,
    gate_up_bias: Any | None = None,
    down_bias: Any | None = None,
    up: Weight | None = None,
    up_bias: Any | None = None,
    activations: str = "exact",
    backend: str | None = None,
    invariant: bool = False,
) -> ArrayT:
    """A mixture of experts over packed weights: y[i] = Σ_t topk_weights[i, t] ·
    down_e(gate(gate_up_e(x[i]))), e = topk_ids[i, t].

    x             (m, k) NumPy array or torch tensor
    gate_up       packed (e, 2f, k); down packed (e, h, f)
    topk_ids      (m, t) integers, each in 0 … e−1
    topk_weights  (m, t) floats
    gate          one of GATES, see `apply_gate`; with "none" gate_up is (e, f, k)
    interleaved   gate and up are even and odd rows of gate_up, else its first and second half
    biases        (e, 2f) and (e, h) or None
    up            packed (e, f, k) where gate and up cannot share a stack, as NVFP4 with a global
                  scale each: `gate_up` then has the gates alone, (e, f, k), and its bias is (e, f),
                  as `up_bias` is
    activations   "exact" or, on the CPU, "int8" and "int8_token", as in `linear`
    invariant     a token's result has the same bits whatever the other tokens, as in `linear`
    Tokens are grouped by expert; none is dropped, an expert without tokens costs nothing. Sums run
    in float32, in order of t. Returns (m, h) in x's dtype. Raises ShapeError when shapes or
    topk_ids do not fit.
    """
    biases = (gate_up_bias, down_bias, up_bias)
    if is_recordable(x, topk_ids, topk_weights, *biases) and _has_axes(3, gate_up, down, gate_up if up is None else up):
        third = None if up is None else name_of(up)
        name = _experts_call(name_of(gate_up), name_of(down), third, gate, interleaved, activations, backend, invariant)
        return call(name, x, topk_ids, topk_weights, *biases)  # type: ignore[no-any-return]
    _check_mode("experts", activations, None)
    x = _check_x("experts", x)
    e, n, k = _check_w("experts", gate_up, 3)
    if _check_w("experts", down, 3)[0] != e:
        raise ShapeError(f"[experts] gate_up {gate_up.shape}, down {down.shape}; both stacks need one number of experts")
    f = n if gate == "none" or up is not None else n // 2
    if up is not None and (_check_w("experts", up, 3) != (e, n, k) or gate == "none" or interleaved):
        order = ", interleaved" if interleaved else ""
        raise ShapeError(
            f"[experts] gates {gate_up.shape}, up {up.shape}, {gate!r}{order}; with up, two stacks of one shape, gated and "
            "not interleaved, are allowed"
        )
    if down.shape[2] != f or (up is None and gate != "none" and n % 2):
        raise ShapeError(
            f"[experts] gate_up {gate_up.shape} gives f = {f} after {gate!r}; down {down.shape} wants {down.shape[2]}"
        )
    check_memory("experts", x, topk_ids, topk_weights, gate_up_bias, down_bias, up_bias)
    topk_ids, topk_weights = as_array("experts", "topk_ids", topk_ids), as_array("experts", "topk_weights", topk_weights)
    _check_integers("experts", "topk_ids", topk_ids)
    if dtype_of(topk_weights) not in (*X_DTYPES, "float64"):
        raise ShapeError(f"[experts] topk_weights are {dtype_of(topk_weights)}; {', '.join(X_DTYPES)} and float64 are allowed")
    for name, bias, size in (("gate_up_bias", gate_up_bias, n), ("up_bias", up_bias, n), ("down_bias", down_bias, down.shape[1])):
        if bias is not None and tuple(bias.shape) != (e, size):
            raise ShapeError(f"[experts] {name} has shape {tuple(bias.shape)}; ({e}, {size}) is allowed")
    if up is None and up_bias is not None:
        raise ShapeError("[experts] up_bias without up; a bias of gates and ups in one stack is gate_up_bias, (e, 2f)")
    flat, lead = as_matrix("experts", x, k)
    invariant = invariant or any(type(w) is Prepared and w.invariant for w in (gate_up, down, up))
    chosen, first = _resolve(gate_up, "experts", x, backend, dtype_of(x), activations, None, invariant)

    def same(w: Weight) -> Prepared:
        return _resolve(w, "experts", x, chosen.name, dtype_of(x), activations, None, invariant)[1]

    last, second = same(down), None if up is None else same(up)
    if chosen.device != "cpu":
        if gate not in GATES:
            raise ShapeError(f"[experts] gate {gate!r}; allowed: {', '.join(GATES)}")
        _check_routing(tuple(topk_ids.shape), tuple(topk_weights.shape), flat.shape[0])
        summed: ArrayT = chosen.experts(
            flat,
            first,
            last,
            topk_ids,
            topk_weights,
            gate=gate,
            interleaved=interleaved,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            up=second,
            up_bias=up_bias,
        ).reshape(*lead, down.shape[1])
        return summed
    tokens = np.asarray(to_numpy(flat), dtype=np.float32)
    index, share = to_numpy(topk_ids), np.asarray(to_numpy(topk_weights), dtype=np.float32)
    _check_routing(index.shape, share.shape, tokens.shape[0])
    if index.size and (int(index.min()) < 0 or int(index.max()) >= e):
        raise ShapeError(f"[experts] topk_ids run from {index.min()} to {index.max()}; there are experts 0 to {e - 1}")
    h = down.shape[1]
    routed = np.zeros((index.shape[0], index.shape[1], h), np.float32)

    def product(t: Any, w: Prepared, bias: Any | None, expert: int) -> Any:
        b = None if bias is None else to_numpy(bias)[expert]
        return chosen.linear(t, chosen.expert(w, expert), b, activations=activations)

    for expert in np.unique(index).tolist():
        rows, slots = np.nonzero(index == expert)
        hidden = product(tokens[rows], first, gate_up_bias, expert)
        if second is not None:
            hidden = np.concatenate([hidden, product(tokens[rows], second, up_bias, expert)], axis=1)
        hidden = np.ascontiguousarray(apply_gate(gate, hidden, interleaved=interleaved), dtype=np.float32)
        routed[rows, slots] = product(hidden, last, down_bias, expert)
    y = np.zeros((index.shape[0], h), np.float32)
    for t in range(index.shape[1]):
        y += share[:, t, None] * routed[:, t]
    with np.errstate(over="ignore"):
        out: ArrayT = like(y.astype(to_numpy(flat).dtype), x).reshape(*lead, h)
    return out


@constant
def _experts_call(
    gate_up: str,
    down: str,
    up: str | None,
    gate: str,
    interleaved: bool,
    activations: str,
    backend: str | None,
    invariant: bool,
) -> str:
    weights = tuple(recall(int(name)) for name in (gate_up, down, up) if name is not None)

    def computed(*given: Any) -> Any:
        first, last, *rest = given[: len(weights)]
        x, ids, share, *biases = given[len(weights) :]
        return experts(
            x,
            first,
            last,
            ids,
            share,
            gate=gate,
            interleaved=interleaved,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            up=rest[0] if rest else None,
            up_bias=biases[2],
            activations=activations,
            backend=backend,
            invariant=invariant,
        )

    h = weights[1].shape[1]
    return record(computed, lambda x, *rest: x.new_empty((*x.shape[:-1], h)), *weights)


__all__ = ["Format", "Prepared", "Weight", "apply_gate", "choose", "dequantize", "embedding", "experts", "linear", "prepare"]
