"""Reported failures of other libraries' kernels, by the numbers of the list they were collected in,
on every instruction set.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from halfbyte import ops
from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support.cpu_weights import CPU, SETS, each_set, instruction_set, needs_native, ordinary_tensor  # noqa: F401

pytestmark = needs_native
MODES = ("exact", "int8")


def product(q: QTensor, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ q.dequantize("float32").astype(np.float64).T


def close(y: np.ndarray, true: np.ndarray, tolerance: float) -> bool:
    return bool(np.sqrt(((y - true) ** 2).mean()) <= tolerance * np.sqrt((true**2).mean()))


@each_set
@pytest.mark.parametrize("n", [1, 3, 4, 7, 33, 65])
def test_case_17_few_or_odd_outputs(instruction_set, n):  # noqa: F811
    q = ordinary_tensor(format_named("uint4:g128"), (n, 4096), n)
    x = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32)
    y = CPU.linear(x, CPU.prepare(q), None)
    assert (np.abs(y - product(q, x)) <= 1e-5 * np.abs(x).astype(np.float64) @ np.abs(q.dequantize("float32")).T).all()


@each_set
@pytest.mark.parametrize("k", [528, 1040])
@pytest.mark.parametrize("m", [1, 50])
def test_case_18_nvfp4_with_half_a_tile_left(instruction_set, k, m):  # noqa: F811
    q = ordinary_tensor(format_named("nvfp4"), (128, k), k)
    x = np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)
    assert close(CPU.linear(x, CPU.prepare(q), None), product(q, x), 2e-6)


@each_set
@pytest.mark.parametrize("activations", MODES)
def test_case_19_outputs_that_are_half_a_tile(instruction_set, activations):  # noqa: F811
    q = ordinary_tensor(format_named("uint4:g64"), (64, 128), 3)
    y = CPU.linear(np.eye(128, dtype=np.float32), CPU.prepare(q), None, activations=activations)
    assert np.array_equal(y.T, q.dequantize("float32"))


@each_set
@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("group", [16, 32])
def test_case_20_groups_shorter_than_a_tile(instruction_set, activations, group):  # noqa: F811
    q = ordinary_tensor(format_named(f"uint4:g{group}"), (33, 96), 3)
    for m in (1, 2, 5, 96):
        y = CPU.linear(np.eye(96, dtype=np.float32)[:m], CPU.prepare(q), None, activations=activations)
        assert np.array_equal(y.T, q.dequantize("float32")[:, :m])


@pytest.mark.parametrize("activations", MODES)
def test_case_24_strided_activations(activations):
    q = ordinary_tensor(format_named("q4_0"), (40, 64), 3)
    prepared = CPU.prepare(q)
    big = np.random.default_rng(1).standard_normal((9, 256)).astype(np.float32)
    for x in (big[:, 64:128], big[:, ::4], big[::2, 3:67], np.ascontiguousarray(big[:, :64].T).T, big[::-1, 127:63:-1]):
        for cast in (np.float32, np.float16):
            view = x if cast is np.float32 else big.astype(cast)[:, 64:128]
            assert np.array_equal(
                CPU.linear(view, prepared, None, activations=activations),
                CPU.linear(np.ascontiguousarray(view), prepared, None, activations=activations),
            )


def test_case_25_batches_of_any_rank():
    q = ordinary_tensor(format_named("q5_0"), (24, 64), 3)
    x = np.random.default_rng(1).standard_normal((4, 7, 64)).astype(np.float32)
    y = ops.linear(x, q, backend="cpu")
    for b in range(4):
        assert np.array_equal(y[b], ops.linear(x[b], q, backend="cpu"))
    assert ops.linear(x.reshape(2, 2, 1, 7, 64)[..., 0, :], q, backend="cpu").shape == (2, 2, 1, 24)
    assert np.array_equal(ops.linear(x[0, 0], q, backend="cpu"), y[0, 0])


def test_case_26_more_rows_than_a_grid_holds():
    q = ordinary_tensor(format_named("mxfp4"), (64, 64), 3)
    x = np.random.default_rng(1).standard_normal((92029, 64)).astype(np.float32)
    y = CPU.linear(x, CPU.prepare(q), None, activations="int8")
    for start in (0, 65530, 92028):
        assert np.array_equal(y[start : start + 8], CPU.linear(x[start : start + 8], CPU.prepare(q), None, activations="int8"))


@each_set
@pytest.mark.parametrize("activations", MODES)
def test_case_29_sums_past_float16(instruction_set, activations):  # noqa: F811
    # Code 184 less 128 is 56; half the sum, 64 · 32 · 56 = 114688, is past float16's 65504.
    parts = {"codes": np.full((16, 128), 184, np.uint8), "scales": np.ones((16, 1), np.float16)}
    q = QTensor(format_named("int8:g128"), (16, 128), parts)
    x = np.concatenate([np.full(64, 32), np.full(64, -32)]).astype(np.float16)[None]
    assert (CPU.linear(x, CPU.prepare(q), None, activations=activations) == 0).all()


@pytest.mark.parametrize("activations", MODES)
def test_case_32_no_tokens(activations):
    prepared = CPU.prepare(ordinary_tensor(format_named("q4_K"), (40, 256), 3))
    for dtype in (np.float32, np.float16):
        y = CPU.linear(np.zeros((0, 256), dtype), prepared, None, activations=activations)
        assert y.shape == (0, 40)
        assert y.dtype == dtype


@pytest.mark.parametrize("starve", ["one", "all but one"])
def test_case_32_experts_without_tokens(starve):
    up = ordinary_tensor(format_named("mxfp4"), (4, 48, 64), 3, scale=0.1)
    down = ordinary_tensor(format_named("mxfp4"), (4, 32, 24), 4, scale=0.1)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((10, 64)).astype(np.float32)
    index = rng.integers(0, 3, (10, 2)) if starve == "one" else np.full((10, 2), 2)
    share = rng.random((10, 2)).astype(np.float32)
    y = ops.experts(x, up, down, index, share, backend="cpu")
    z = ops.experts(x, up, down, index, share, backend="reference")
    assert close(y, z, 1e-5)
    for row in (0, 9):
        one = slice(row, row + 1)
        assert np.array_equal(ops.experts(x[one], up, down, index[one], share[one], backend="cpu")[0], y[row])


def test_case_33_many_threads_at_once():
    q = ordinary_tensor(format_named("q4_0"), (256, 256), 3)
    xs = [np.random.default_rng(m).standard_normal((m, 256)).astype(np.float32) for m in range(1, 9)]
    wanted = [CPU.linear(x, CPU.prepare(q), None, activations="int8") for x in xs]
    for same_m in (True, False):
        fresh = ordinary_tensor(format_named("q4_0"), (256, 256), 3)  # a cold cache of prepared weights
        failures: list[int] = []
        start = threading.Barrier(8)

        def work(i: int, fresh=fresh, failures=failures, start=start, same_m=same_m) -> None:
            start.wait()
            at = 3 if same_m else i
            for _ in range(10):
                if not np.array_equal(ops.linear(xs[at], fresh, activations="int8", backend="cpu"), wanted[at]):
                    failures.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures


def _in_child(queue) -> None:
    q = ordinary_tensor(format_named("q4_0"), (256, 256), 3)
    x = np.random.default_rng(1).standard_normal((20, 256)).astype(np.float32)
    queue.put(CPU.linear(x, CPU.prepare(q), None))


def test_a_forked_child_computes():
    from halfbyte.backends.cpu import set_threads

    set_threads(2)
    try:
        q = ordinary_tensor(format_named("q4_0"), (256, 256), 3)
        x = np.random.default_rng(1).standard_normal((20, 256)).astype(np.float32)
        wanted = CPU.linear(x, CPU.prepare(q), None)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue,))
        child.start()
        assert np.array_equal(queue.get(timeout=60), wanted)
        child.join(60)
        assert child.exitcode == 0
    finally:
        set_threads(0)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_do_not_change_the_result(threads):
    from halfbyte.backends.cpu import set_threads

    q = ordinary_tensor(format_named("q6_K"), (200, 512), 3)
    x = np.random.default_rng(1).standard_normal((33, 512)).astype(np.float32)
    wanted = CPU.linear(x, CPU.prepare(q), None, activations="int8")
    set_threads(threads)
    try:
        assert np.array_equal(CPU.linear(x, CPU.prepare(q), None, activations="int8"), wanted)
    finally:
        set_threads(0)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with some environment variables set."""
    env = dict(os.environ) | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", SETS)
def test_case_52_an_instruction_set_by_name(name):
    done = run_python("from halfbyte.backends import backend_named as b; print(b('cpu').describe())", HALFBYTE_CPU=name)
    assert done.stdout.startswith(name + ", "), done.stderr


@pytest.mark.parametrize("name", ["avx9", "AVX2", "neon" if "neon" not in SETS else "avx2"])
def test_case_52_an_unknown_or_unsupported_set_raises_and_lists(name):
    done = run_python("from halfbyte.backends import backend_named as b; b('cpu').reason()", HALFBYTE_CPU=name)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert "BackendError: [cpu] HALFBYTE_CPU=" in message
    assert "scalar" in message
    from halfbyte.backends.cpu import use_instruction_set

    with pytest.raises(BackendError, match="scalar"):
        use_instruction_set(name)


def test_threads_by_environment():
    code = "from halfbyte.backends import backend_named as b; print(b('cpu').describe())"
    assert ", 1 thread " in run_python(code, HALFBYTE_THREADS="1").stdout + " "
    assert "HALFBYTE_THREADS='no'" in run_python(code, HALFBYTE_THREADS="no").stderr
