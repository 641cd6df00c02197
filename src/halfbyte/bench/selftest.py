"""Check a device's kernels against `backends.reference`, and time them: `halfbyte selftest`.

For each format and schedule two checks. One-hot activations must return the decoded weight exactly:
y = I · wᵀ is w. Random activations must stay within the bound of float32 sums: |error| ≤ ulp · |y|
+ 2^−24 (k + 8) Σ|x·w|, reported as the largest share of it (1 is the bound). Then the time of the
given shape, the median of several runs, beside `mx.quantized_matmul` where MLX has the format and
beside the dense product of the device. On a Mac the kernels run under both runtimes, torch and MLX,
each with its own arrays.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import SCHEDULES, Backend, Call, Prepared, backends_for
from ..errors import BackendError, HalfbyteError
from ..formats import format_named
from ..numerics.bits import pack
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize as quantize_weight

DEVICES = ("mps", "cuda", "cpu")
FORMATS = (
    "mxfp4", "nvfp4", "fp4:g32", "int4:g128", "uint4:g128", "affine4:g64", "affine2:g64", "affine3:g64", "affine5:g64",
    "affine6:g64", "affine8:g64", "int8:g128", "mxfp8_e4m3", "q4_0",
)  # fmt: skip
Product = Callable[[Any, Prepared], Any]
"""Activations on the device and a prepared weight -> a product."""
GATES = ("swiglu", "swiglu_clamped", "geglu")
"""Gates of experts. Each has kernels of its own, the only ones that compute exp or tanh.
"""
CHECKED_SHAPE = (70, 256)
"""n of no whole tile, k of a few groups of every size."""
ROTATED_BYTES = 256 << 20
"""Bytes of distinct weights that a timing cycles through: more than the last cache of any chip."""
ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """One kernel checked, and timed when its results were right.

    framework  whose arrays the kernel ran on: numpy, torch, mlx
    one_hot    every decoded weight was returned exactly (not checked for gates)
    worst      largest error as a share of its bound
    time_us    of the timed shape; None when not timed
    peer_us    of `mx.quantized_matmul`, where it has the format
    """

    format: str
    framework: str
    op: str
    schedule: str
    dtype: str
    one_hot: bool
    worst: float
    m: int = 0
    n: int = 0
    k: int = 0
    time_us: float | None = None
    gbps: float | None = None
    peer_us: float | None = None
    dense_us: float | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.one_hot and self.worst <= 1

    def record(self) -> dict[str, Any]:
        """As a JSON record."""
        return {"record": "selftest", **asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Bench:
    """Access to a device: its backend, copies of arrays to and from it, and waiting for results."""

    framework: str
    backend: Backend
    to_device: Callable[[NDArray[Any], str], Any]
    to_numpy: Callable[[Any], NDArray[Any]]
    wait: Callable[[list[Any]], object]
    dense: Callable[[Any, Any], Any] | None = None


def benches_for(device: str) -> list[Bench]:
    """The first backend that runs on `device`, and MLX on Metal. Raises BackendError with the
    reasons when none does.
    """
    if device not in DEVICES:
        raise BackendError(f"[selftest] device {device!r}; allowed: {', '.join(DEVICES)}")
    found: list[Bench] = []
    refused = []
    for backend in backends_for(device):
        why = backend.reason()
        if why is None:
            found.append(_numpy_bench(backend) if device == "cpu" else _torch_bench(backend, device))
            break
        refused.append(f"{backend.name}: {why}")
    if device == "mps":
        why = _without_mlx()
        if why is None:
            found.append(mlx_bench())
        else:
            refused.append(f"mlx: {why}")
    if not found:
        raise BackendError(f"[selftest] nothing computes on {device!r} here: {'; '.join(refused)}")
    return found


def _without_mlx() -> str | None:
    """Why MLX cannot run here, as a sentence, or None."""
    if importlib.util.find_spec("mlx") is None:
        return "MLX is not installed: pip install 'halfbyte[mlx]'"
    from ..mlx.backend import MLXBackend

    return MLXBackend().reason()


def _numpy_bench(backend: Backend) -> Bench:
    from ..numerics.exact import dtype_named

    return Bench("numpy", backend, lambda a, dtype: a.astype(dtype_named(dtype)), lambda y: y.astype(np.float32), lambda _: None)


def mlx_bench(backend: Backend | None = None) -> Bench:
    """MLX arrays on halfbyte's kernels, never on MLX's own; tests pass their own `backend`."""
    import mlx.core as mx

    from ..mlx.backend import MLXBackend

    return Bench(
        "mlx",
        backend or MLXBackend(),
        lambda a, dtype: mx.array(np.ascontiguousarray(a, np.float32)).astype(getattr(mx, dtype)),
        lambda y: np.array(y.astype(mx.float32)),
        mx.eval,
        lambda x, w: x @ w.T,
    )


def _torch_bench(backend: Backend, device: str) -> Bench:
    import torch

    synchronize = torch.mps.synchronize if device == "mps" else torch.cuda.synchronize
    return Bench(
        "torch",
        backend,
        lambda a, dtype: torch.from_numpy(np.ascontiguousarray(a, np.float32)).to(getattr(torch, dtype)).to(device),
        lambda y: y.float().cpu().numpy(),
        lambda _: synchronize(),
        torch.nn.functional.linear,
    )


def run(
    bench: Bench,
    formats: tuple[str, ...] = FORMATS,
    dtypes: tuple[str, ...] = ("float16",),
    shape: tuple[int, int] | None = (4096, 4096),
    tokens: tuple[int, ...] = (1, 64),
) -> Iterator[Outcome]:
    """Every format, schedule and dtype the backend serves, checked; then timed at (n, k) = shape
    for each m of `tokens`.

    shape None: no timing. A kernel that raises gives an outcome with the message as its failure.
    """
    for codec in formats:
        weight = random_weight(codec, *CHECKED_SHAPE)
        large = None if shape is None else _copies(bench.backend, random_weight(codec, *shape))
        for dtype in dtypes:
            for op, schedule, product in _calls(bench, weight, dtype):
                checked = _checked(bench, weight, codec, op, schedule, dtype, _bound(product, bench.backend.prepare(weight)))
                if large is None or not checked.passed or op not in ("linear", "variant"):
                    yield checked
                    continue
                for m in tokens:
                    yield _timed(bench, checked, weight, large, m, product)


def random_weight(codec: str, n: int, k: int) -> QTensor:
    """A weight drawn from a normal distribution and quantized."""
    rng = np.random.default_rng(n * 7919 + k)
    return quantize_weight(rng.standard_normal((n, k)).astype(np.float32) / np.float32(np.sqrt(k)), codec)


def _copies(backend: Backend, w: QTensor) -> list[Prepared]:
    """Copies of the weight, together several times the size of the last cache, 32 at most: a call
    whose weight is in the cache reads no memory.
    """
    first = backend.prepare(w)
    return [first, *(backend.prepare(w) for _ in range(min(32, ROTATED_BYTES // max(1, first.nbytes) + 1) - 1))]


def _calls(bench: Bench, w: QTensor, dtype: str) -> Iterator[tuple[str, str | None, Product]]:
    """(op, schedule, product) for what the backend serves."""
    backend = bench.backend
    for schedule in (None, *SCHEDULES):
        if backend.refuses(Call("linear", w.format, dtype, "exact", schedule)) is None:
            yield "linear", schedule, _scheduled(backend, schedule)
    if backend.name == "metal":
        yield from _metal_variants(backend, w)
        yield from _metal_others(bench, backend, w, dtype)
    if backend.refuses(Call("dequantize", w.format, dtype)) is None:
        yield "dequantize", None, lambda x, prepared: backend.dequantize(prepared, dtype)


def _scheduled(backend: Backend, schedule: str | None) -> Product:
    return lambda x, prepared: backend.linear(x, prepared, None, schedule=schedule)


def _metal_variants(backend: Any, w: QTensor) -> Iterator[tuple[str, str | None, Product]]:
    """Kernels kept for comparison, which no schedule picks: the simple fused kernel, and the other
    decoders of E2M1.
    """
    from ..backends.metal import launch
    from ..backends.metal.kernels import E2M1_DECODERS
    from ..backends.metal.weight import fused_refusal

    def of(x: Any, prepared: Prepared) -> launch.Product:
        return launch.Product(backend.runtime, x, prepared.data, None)

    def decoded(decoder: str) -> tuple[Product, Product]:
        return (
            lambda x, prepared: launch.matvec(of(x, prepared), decoder),
            lambda x, prepared: launch.fused(of(x, prepared), "wide", decoder),
        )

    if fused_refusal(w.format) is None:
        yield "variant", "fused, plain", lambda x, prepared: launch.fused(of(x, prepared), "")
    for decoder in (d for d in E2M1_DECODERS if d and w.format.element == "e2m1"):
        matvec, fused = decoded(decoder)
        yield "variant", f"matvec, {decoder}", matvec
        yield "variant", f"fused, {decoder}", fused


def _metal_others(bench: Bench, backend: Any, w: QTensor, dtype: str) -> Iterator[tuple[str, str | None, Product]]:
    """The kernels of the other functions, with arguments that make them return x · wᵀ: experts with
    an identity as down projection, rmsnorm with an eps that makes it the identity.
    """
    from ..backends.metal import launch

    n = w.shape[0]
    up = backend.prepare(QTensor(w.format, (1, *w.shape), {name: np.asarray(a)[None] for name, a in w.parts.items()}))

    def experts(gate: str, f: int) -> Product:
        codes, scales = pack(8 + np.eye(f, dtype=np.uint8), 4), np.ones((f, 1), np.float16)
        identity = backend.prepare(QTensor(format_named("int4", -1), (1, f, f), {"codes": codes[None], "scales": scales[None]}))

        def product(x: Any, prepared: Prepared) -> Any:
            routing = np.zeros((x.shape[0], 1), np.float32)
            index, share = bench.to_device(routing, "int32"), bench.to_device(routing + 1, "float32")
            return backend.experts(x, up, identity, index, share, gate=gate)

        return product

    def rmsnorm(x: Any, prepared: Prepared) -> Any:
        eps = 1.0 - (bench.to_numpy(x).astype(np.float64) ** 2).mean(1)
        gain = bench.to_device(np.ones(x.shape[1], np.float32), dtype)
        return [launch.rmsnorm_matvec(backend.runtime, row, gain, prepared.data, float(e)) for row, e in zip(x, eps, strict=True)]

    def embedding(_: Any, prepared: Prepared) -> Any:
        return backend.embedding(bench.to_device(np.arange(n, dtype=np.float32), "int32"), prepared, dtype)

    yield "embedding", None, embedding
    yield "experts", None, experts("none", n)
    for gate in GATES:
        yield "experts", gate, experts(gate, n // 2)
    yield "rmsnorm_matvec", None, rmsnorm


def _numbers(bench: Bench, y: Any) -> NDArray[np.float32]:
    """A result on the host; a list is one row a product."""
    return np.stack([bench.to_numpy(row) for row in y]) if isinstance(y, list) else bench.to_numpy(y)


def _bound(product: Product, prepared: Prepared) -> Callable[[Any], Any]:
    return lambda x: product(x, prepared)


def _checked(
    bench: Bench, w: QTensor, codec: str, op: str, schedule: str | None, dtype: str, call: Callable[[Any], Any]
) -> Outcome:
    n, k = w.shape
    word = schedule or ("automatic" if op == "linear" else "")
    exact = w.dequantize(dtype).astype(np.float32)
    try:
        if op in ("dequantize", "embedding"):
            return Outcome(codec, bench.framework, op, word, dtype, bool(np.array_equal(_numbers(bench, call(None)), exact)), 0.0)
        if schedule in GATES:
            worst = max(_gated_error(bench, w, m, dtype, call, word) for m in (2, 67))
            return Outcome(codec, bench.framework, op, word, dtype, True, worst, n=n, k=k)
        y = np.concatenate(
            [_numbers(bench, call(bench.to_device(block, dtype))) for block in np.split(np.eye(k, dtype=np.float32), 2)]
        )
        one_hot = _is_decoded(y.T, w, exact)
        # Eight tokens, and more than a tile of them: a schedule may have a kernel for each.
        rounds = schedule == "dequantize_then_gemm"
        worst = max(_error(bench, w, m, dtype, call, rounds) for m in (1, 2, 8, 67))
        return Outcome(codec, bench.framework, op, word, dtype, one_hot, worst, n=n, k=k)
    except (HalfbyteError, RuntimeError, TypeError, ValueError, SyntaxError) as e:
        return Outcome(codec, bench.framework, op, word, dtype, False, float("nan"), failure=" ".join(str(e).split())[:400])


def _is_decoded(y: NDArray[np.float32], w: QTensor, once: NDArray[np.float32]) -> bool:
    """Whether y is the weight's exact values rounded once.

    A value that float32 does not hold may be rounded to float32 first, by the kernel's own sum:
    there the other neighbour passes too where the exact value is within 2^-24 of the middle of
    both.
    """
    exact = w.dequantize("float64")
    with np.errstate(invalid="ignore", over="ignore"):
        middle = (y.astype(np.float64) + once) / 2
        seam = (exact != exact.astype(np.float32)) & (np.abs(exact - middle) <= 2.0**-24 * np.abs(exact))
    return bool(np.array_equal(np.where(seam, once, y), once))


def _rounded(a: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    from ..numerics.exact import dtype_named

    with np.errstate(over="ignore"):
        return a.astype(dtype_named(dtype)).astype(np.float32)


def _error(bench: Bench, w: QTensor, m: int, dtype: str, call: Callable[[Any], Any], rounds: bool) -> float:
    """Largest error as a share of its bound; `rounds`: the schedule rounds the weight to x's dtype
    first, as its name says.
    """
    x = _rounded(np.random.default_rng(m).standard_normal((m, w.shape[1])).astype(np.float32), dtype)
    y = _numbers(bench, call(bench.to_device(x, dtype))).astype(np.float64)
    exact, size, error = _sums(w, x.astype(np.float64))
    return _share(y, exact, ULP[dtype] * np.abs(exact) + error + 2.0**-24 + (ULP[dtype] * size if rounds else 0))


def _sums(w: QTensor, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """x · wᵀ, the sizes of what it adds up, and the bound of a float32 sum's error."""
    k, dense = w.shape[1], w.dequantize("float32").astype(np.float64)
    size = np.abs(x) @ np.abs(dense).T
    if w.format.bias:  # code · scale and bias cancel
        spread = np.repeat(np.abs(w.parts["biases"].astype(np.float64)), k // w.parts["biases"].shape[1], 1)
        size = size + 2 * np.abs(x) @ spread.T
    return x @ dense.T, size, 2.0**-24 * (k + 8) * size


def _share(y: NDArray[np.float64], exact: NDArray[np.float64], bound: NDArray[np.float64]) -> float:
    share = np.abs(y - exact) / bound
    return float(np.inf if np.isnan(share).any() else share.max())


def _gated_error(bench: Bench, w: QTensor, m: int, dtype: str, call: Callable[[Any], Any], kind: str) -> float:
    """The same of act(gate) · up, gates the first half of the outputs. Every second token is so
    large that exp overflows.
    """
    wide = np.random.default_rng(m).standard_normal((m, w.shape[1])) * np.where(np.arange(m) % 2, 64, 1)[:, None]
    x = _rounded(wide.astype(np.float32), dtype)
    y = _numbers(bench, call(bench.to_device(x, dtype))).astype(np.float64)
    exact, _, error = _sums(w, x.astype(np.float64))
    (g, u), (dg, du) = (np.split(a, 2, 1) for a in (exact, error))
    if kind == "swiglu_clamped":
        g, u = np.minimum(g, 7.0), np.clip(u, -7.0, 7.0) + 1
    with np.errstate(over="ignore"):
        curve = g / (1 + np.exp(-(1.702 if kind == "swiglu_clamped" else 1.0) * g))
    if kind == "geglu":
        curve = g * (1 + np.tanh(0.7978845608028654 * (g + 0.044715 * g**3))) / 2
    dcurve = 1.13 * dg + 2.0**-20 * np.abs(g) * (1 + np.abs(g))  # 1.13: the steepest slope; then exp or tanh, rounded
    return _share(y, curve * u, dcurve * (np.abs(u) + du) + np.abs(curve) * du + ULP[dtype] * np.abs(curve * u) + 2.0**-22)


def _timed(bench: Bench, checked: Outcome, w: QTensor, large: list[Prepared], m: int, product: Product) -> Outcome:
    n, k = large[0].shape
    x = bench.to_device(np.random.default_rng(0).standard_normal((m, k)).astype(np.float32), checked.dtype)
    us = median_us(lambda i: product(x, large[i % len(large)]), bench.wait)
    peer = _mlx_us(w, (m, n, k), checked.dtype) if bench.backend.device == "mps" else None
    dense = None
    if bench.dense is not None:
        multiply = bench.dense
        count = min(32, ROTATED_BYTES // (2 * n * k) + 1)
        copies = [bench.to_device(np.zeros((n, k), np.float32), checked.dtype) for _ in range(count)]
        dense = median_us(lambda i: multiply(x, copies[i % len(copies)]), bench.wait)
    return replace(checked, m=m, n=n, k=k, time_us=us, gbps=large[0].nbytes / us / 1e3, peer_us=peer, dense_us=dense)


def median_us(call: Callable[[int], Any], wait: Callable[[list[Any]], object], repeats: int = 7) -> float:
    """Median time of a call in µs: each sample is as many calls as fill 5 ms, then one wait. `call`
    is given its number.
    """
    wait([call(0)])
    start = time.perf_counter()
    wait([call(1)])
    inner = max(1, int(0.005 / max(1e-7, time.perf_counter() - start)))
    samples, count = [], 2
    for _ in range(repeats):
        start = time.perf_counter()
        wait([call(count + i) for i in range(inner)])
        samples.append((time.perf_counter() - start) / inner * 1e6)
        count += inner
    return statistics.median(samples)


def _mlx_us(w: QTensor, size: tuple[int, int, int], dtype: str) -> float | None:
    """Time of `mx.quantized_matmul` at (m, n, k), when MLX is installed and has the format."""
    if importlib.util.find_spec("mlx") is None:
        return None
    import mlx.core as mx

    from ..mlx.backend import MLXBackend
    from ..mlx.verbs import native_mode

    mode = native_mode(w.format, dtype)
    if mode is None:
        return None
    m, n, k = size
    prepared = [p.data for p in _copies(MLXBackend(), random_weight(str(format_named(w.format.name, w.format.group_size)), n, k))]
    words = [h.codes.view(mx.uint32) for h in prepared]
    x = mx.array(np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)).astype(getattr(mx, dtype))
    mx.eval(words, x, [h.scales for h in prepared])

    def call(i: int) -> Any:
        h = prepared[i % len(prepared)]
        return mx.quantized_matmul(x, words[i % len(prepared)], h.scales, h.addends, transpose=True, **mode)

    return median_us(call, mx.eval)
