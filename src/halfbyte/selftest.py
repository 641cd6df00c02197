"""Check a device's kernels against the referee, and time them: what the owner of a machine runs and pastes into a report.

For each format and schedule two checks. One-hot activations must return the decoded weight exactly: y = I · wᵀ is w. Random
activations must stay within the bound of float32 sums: |error| ≤ ulp · |y| + 2^−24 (k + 8) Σ|x·w|, reported as the largest share
of it (1 is the bound). Then the time of the wanted shape, median of several, beside `mx.quantized_matmul` where MLX has the
format and beside the dense product of the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backends import SCHEDULES, Backend, Call, Prepared, backends_for
from .bits import pack
from .errors import BackendError, HalfbyteError
from .formats import format_named
from .formats.encode import quantize as quantize_weight
from .qtensor import QTensor

DEVICES = ("mps", "cuda", "cpu")
FORMATS = (
    "mxfp4", "nvfp4", "fp4:g32", "int4:g128", "uint4:g128", "affine4:g64", "affine2:g64", "affine3:g64", "affine5:g64",
    "affine6:g64", "affine8:g64", "int8:g128", "mxfp8_e4m3", "q4_0",
)  # fmt: skip
Product = Callable[[Any, Prepared], Any]
"""Activations on the device and a prepared weight -> a product."""
CHECKED_SHAPE = (70, 256)
"""n of no whole tile, k of a few groups of every size."""
ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """One kernel checked, and timed when its answers were right.

    one_hot   every decoded weight came back exactly        worst  largest error as a share of its bound
    time_us   of the timed shape; None when not timed       peer_us  `mx.quantized_matmul`, where it has the format
    """

    format: str
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
    """How a device is spoken to: its backend, arrays there and back, and waiting for it."""

    backend: Backend
    to_device: Callable[[NDArray[Any], str], Any]
    to_numpy: Callable[[Any], NDArray[Any]]
    wait: Callable[[], None]
    dense: Callable[[Any, Any], Any] | None = None


def bench_for(device: str) -> Bench:
    """The first backend that runs on `device`. Raises BackendError with the reason when none does."""
    if device not in DEVICES:
        raise BackendError(f"[selftest] device {device!r}; allowed: {', '.join(DEVICES)}")
    refused = []
    for backend in backends_for(device):
        why = backend.reason()
        if why is None:
            return _numpy_bench(backend) if device == "cpu" else _torch_bench(backend, device)
        refused.append(f"{backend.name}: {why}")
    raise BackendError(f"[selftest] nothing computes on {device!r} here: {'; '.join(refused)}")


def _numpy_bench(backend: Backend) -> Bench:
    from .exact import dtype_named

    return Bench(backend, lambda a, dtype: a.astype(dtype_named(dtype)), lambda y: y.astype(np.float32), lambda: None)


def _torch_bench(backend: Backend, device: str) -> Bench:
    import torch

    wait = torch.mps.synchronize if device == "mps" else torch.cuda.synchronize
    return Bench(
        backend,
        lambda a, dtype: torch.from_numpy(np.ascontiguousarray(a, np.float32)).to(getattr(torch, dtype)).to(device),
        lambda y: y.float().cpu().numpy(),
        wait,
        torch.nn.functional.linear,
    )


def run(
    bench: Bench,
    formats: tuple[str, ...] = FORMATS,
    dtypes: tuple[str, ...] = ("float16",),
    shape: tuple[int, int] | None = (4096, 4096),
    tokens: tuple[int, ...] = (1, 64),
) -> Iterator[Outcome]:
    """Every format, schedule and dtype the backend serves, checked; then timed at (n, k) = shape for each m of `tokens`.

    shape None: no timing. A kernel that raises is an outcome too, with the message as its failure.
    """
    for codec in formats:
        weight = random_weight(codec, *CHECKED_SHAPE)
        large = None if shape is None else bench.backend.prepare(random_weight(codec, *shape))
        for dtype in dtypes:
            for op, schedule, product in _calls(bench.backend, weight, dtype):
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


def _calls(backend: Backend, w: QTensor, dtype: str) -> Iterator[tuple[str, str | None, Product]]:
    """(op, schedule, product) for what the backend serves."""
    for schedule in (None, *SCHEDULES):
        if backend.refuses(Call("linear", w.format, dtype, "exact", schedule)) is None:
            yield "linear", schedule, _scheduled(backend, schedule)
    if backend.name == "metal":
        yield from _metal_variants(backend, w, dtype)
        yield from _metal_others(backend, w, dtype)
    if backend.refuses(Call("dequantize", w.format, dtype)) is None:
        yield "dequantize", None, lambda x, held: backend.dequantize(held, dtype)


def _scheduled(backend: Backend, schedule: str | None) -> Product:
    return lambda x, held: backend.linear(x, held, None, schedule=schedule)


def _metal_variants(backend: Any, w: QTensor, dtype: str) -> Iterator[tuple[str, str | None, Product]]:
    """Kernels kept for comparison, which no schedule picks: the plain fused design, decoding without staging, the table."""
    from .backends.metal import launch

    def with_variant(variant: str) -> Product:
        return lambda x, held: launch.fused(launch.Product(backend.route, x, held.data, None), variant)

    if backend.prepare(w).data.fused_refusal(dtype) is None:
        yield "variant", "fused, plain", with_variant("")
        yield "variant", "fused, registers", with_variant("registers")
    if w.format.element == "e2m1":
        yield (
            "variant",
            "matvec, table",
            lambda x, held: launch.matvec(launch.Product(backend.route, x, held.data, None), table=True),
        )


def _metal_others(backend: Any, w: QTensor, dtype: str) -> Iterator[tuple[str, str | None, Product]]:
    """The other verbs' kernels, made to give x · wᵀ: experts by way of an identity, the norm with an eps that undoes it."""
    import torch

    from .backends.metal import launch

    n, device = w.shape[0], backend.route.device
    up = backend.prepare(QTensor(w.format, (1, *w.shape), {name: np.asarray(a)[None] for name, a in w.parts.items()}))
    codes, scales = pack(8 + np.eye(n, dtype=np.uint8), 4), np.ones((n, 1), np.float16)
    identity = backend.prepare(QTensor(format_named("int4", -1), (1, n, n), {"codes": codes[None], "scales": scales[None]}))

    def experts(x: Any, held: Prepared) -> Any:
        index = torch.zeros((x.shape[0], 1), dtype=torch.int32, device=device)
        return backend.experts(x, up, identity, index, torch.ones(index.shape, device=device), activation="none")

    def rmsnorm(x: Any, held: Prepared) -> Any:
        eps = [1.0 - s for s in (x.float().cpu().double() ** 2).mean(1).tolist()]
        gain = torch.ones_like(x[0])
        rows = [launch.rmsnorm_matvec(backend.route, row, gain, held.data, e) for row, e in zip(x, eps, strict=True)]
        return torch.stack(rows)

    yield "embedding", None, lambda x, held: backend.embedding(torch.arange(n, device=device), held, dtype)
    yield "experts", None, experts
    yield "rmsnorm_matvec", None, rmsnorm


def _bound(product: Product, held: Prepared) -> Callable[[Any], Any]:
    return lambda x: product(x, held)


def _checked(
    bench: Bench, w: QTensor, codec: str, op: str, schedule: str | None, dtype: str, call: Callable[[Any], Any]
) -> Outcome:
    n, k = w.shape
    word = schedule or ("automatic" if op == "linear" else "")
    exact = w.dequantize(dtype).astype(np.float32)
    by_float32 = _rounded(w.dequantize("float32"), dtype)  # biases and wide scales: the kernel's own sum rounds first
    try:
        if op in ("dequantize", "embedding"):
            return Outcome(codec, op, word, dtype, bool(np.array_equal(bench.to_numpy(call(None)), exact)), 0.0)
        y = np.concatenate(
            [bench.to_numpy(call(bench.to_device(block, dtype))) for block in np.split(np.eye(k, dtype=np.float32), 2)]
        )
        one_hot = bool(np.array_equal(y.T, exact) or np.array_equal(y.T, by_float32))
        # Eight tokens, and more than a tile of them: a schedule may have a kernel for each.
        rounds = schedule == "dequantize_then_gemm"
        worst = max(_error(bench, w, m, dtype, call, rounds) for m in (1, 2, 8, 67))
        return Outcome(codec, op, word, dtype, one_hot, worst, n=n, k=k)
    except (HalfbyteError, RuntimeError, TypeError, ValueError, SyntaxError) as e:
        return Outcome(codec, op, word, dtype, False, float("nan"), failure=" ".join(str(e).split())[:400])


def _rounded(a: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    from .exact import dtype_named

    with np.errstate(over="ignore"):
        return a.astype(dtype_named(dtype)).astype(np.float32)


def _error(bench: Bench, w: QTensor, m: int, dtype: str, call: Callable[[Any], Any], rounds: bool) -> float:
    """Largest error as a share of its bound; `rounds`: the schedule rounds the weight to x's dtype first, as its name says."""
    k = w.shape[1]
    x = _rounded(np.random.default_rng(m).standard_normal((m, k)).astype(np.float32), dtype)
    y = bench.to_numpy(call(bench.to_device(x, dtype))).astype(np.float64)
    x64, w64 = x.astype(np.float64), w.dequantize("float32").astype(np.float64)
    size = np.abs(x64) @ np.abs(w64).T
    if w.format.bias:  # code · scale and bias cancel
        spread = np.repeat(np.abs(w.parts["biases"].astype(np.float64)), k // w.parts["biases"].shape[1], 1)
        size = size + 2 * np.abs(x64) @ spread.T
    exact = x64 @ w64.T
    bound = ULP[dtype] * np.abs(exact) + 2.0**-24 * (k + 8) * size + 2.0**-24 + (ULP[dtype] * size if rounds else 0)
    share = np.abs(y - exact) / bound
    return float(np.inf if np.isnan(share).any() else share.max())


def _timed(bench: Bench, checked: Outcome, w: QTensor, large: Prepared, m: int, product: Product) -> Outcome:
    n, k = large.shape
    x = bench.to_device(np.random.default_rng(0).standard_normal((m, k)).astype(np.float32), checked.dtype)
    us = median_us(lambda: product(x, large), bench.wait)
    peer = _mlx_us(w, (m, n, k), checked.dtype) if bench.backend.device == "mps" else None
    dense = None
    if bench.dense is not None:
        multiply, d = bench.dense, bench.to_device(np.zeros((n, k), np.float32), checked.dtype)
        dense = median_us(lambda: multiply(x, d), bench.wait)
    return Outcome(
        checked.format, checked.op, checked.schedule, checked.dtype, checked.one_hot, checked.worst, m, n, k, us,
        large.nbytes / us / 1e3, peer, dense,
    )  # fmt: skip


def median_us(call: Callable[[], Any], wait: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a call in µs: each sample is as many calls as fill 5 ms, then one wait."""
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    inner = max(1, int(0.005 / max(1e-7, time.perf_counter() - start)))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        wait()
        samples.append((time.perf_counter() - start) / inner * 1e6)
    return statistics.median(samples)


def _mlx_us(w: QTensor, size: tuple[int, int, int], dtype: str) -> float | None:
    """Time of `mx.quantized_matmul` at (m, n, k), when MLX is installed and has the format."""
    try:
        import mlx.core as mx

        from .mlx.verbs import native_mode, prepare
    except ModuleNotFoundError:
        return None
    mode = native_mode(w.format, dtype)
    if mode is None or not mx.metal.is_available():
        return None
    m, n, k = size
    held = prepare(random_weight(str(format_named(w.format.name, w.format.group_size)), n, k))
    x = mx.zeros((m, k), getattr(mx, dtype))
    words = held.codes.view(mx.uint32)
    mx.eval(words, held.scales, x)
    return median_us(
        lambda: mx.eval(mx.quantized_matmul(x, words, held.scales, held.addends, transpose=True, **mode)), lambda: None
    )
