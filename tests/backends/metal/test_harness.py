"""The CPU build of MSL proves itself: every planted fault is caught and named, clean kernels pass,
what MSL lacks is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.metal_cpu.lint import MetalLintError, check_source
from support.metal_cpu.machine import MetalCompileError, MetalFaultError, available, compile_source
from support.metal_cpu.planted import ASIDE, FAULTS, HEADER, NOT_COMPILED, REFUSED, kernel, source
from support.metal_cpu.signature import signatures
from support.metal_formats import SIX, backend, stand
from support.metal_products import MAKERS, product, tokens
from support.random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
CLEAN = {
    "copy": ("y[i] = x[i];", lambda x: x),
    "through threadgroup memory": (
        "threadgroup float t[64]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[63 - i];",
        lambda x: x[::-1],
    ),
    "within a simdgroup": (
        "threadgroup float t[64]; t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i ^ 31];",
        lambda x: x.reshape(2, 32)[:, ::-1].reshape(-1),
    ),
    "sums": ("y[i] = simd_sum(x[i]);", lambda x: np.repeat(x.reshape(2, 32).sum(1), 32)),
    "maxima": ("y[i] = simd_max(x[i]);", lambda x: np.repeat(x.reshape(2, 32).max(1), 32)),
    "shuffles": (
        "y[i] = simd_shuffle(x[i], 5) + simd_shuffle_xor(x[i], 3) + simd_broadcast(x[i], 1);",
        lambda x: (x.reshape(2, 32)[:, 5:6] + x.reshape(2, 32)[:, np.arange(32) ^ 3] + x.reshape(2, 32)[:, 1:2]).reshape(-1),
    ),
    "a loop of barriers": (
        (
            "threadgroup float t[64]; t[i] = x[i]; for (uint s = 32; s > 0; s /= 2) { B if (i < s) t[i] = t[i] + t[i + s]; }"
            " B y[i] = t[0];"
        ).replace("B ", BARRIER),
        lambda x: np.full(64, x.sum()),
    ),
}


SUBNORMAL = "y[i] = x[i] * 1.0e-38f * 0.125f;"
BODIES = [*(f.body for f in FAULTS.values()), *(body for body, _ in CLEAN.values()), SUBNORMAL]


@pytest.fixture(scope="module")
def library():
    """Every body of this file as one library: k0, k1, ..."""
    return compile_source(HEADER + "".join(kernel(body, f"k{j}") for j, body in enumerate(BODIES)))


def run(library, body, groups=1, **options):
    x, y = np.arange(64, dtype=np.float32), np.empty(64 * groups, np.float32)
    library.run(f"k{BODIES.index(body)}", [x, y, 64], (64 * groups,), (64,), **options)
    return x, y


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_caught_and_named(library, name):
    planted = FAULTS[name]
    with pytest.raises(MetalFaultError) as fault:
        run(library, planted.body, planted.groups)
    assert planted.fault in str(fault.value)


@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernels_pass_with_the_right_values(library, name):
    body, right = CLEAN[name]
    x, y = run(library, body)
    np.testing.assert_array_equal(y, right(x))


MATRIX = """
kernel void product(const device {T}* a [[buffer(0)]], const device {T}* b [[buffer(1)]], device {T}* c [[buffer(2)]]) {
  simdgroup_matrix<{T}, 8, 8> left, right, sum = make_filled_simdgroup_matrix<{T}, 8, 8>({T}(1.0f));
  simdgroup_load(left, a, 16);
  simdgroup_load(right, b, 8, ulong2(0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, c, 8);
}
"""


@pytest.mark.parametrize("dtype", ["half", "float"])
def test_matrices_multiply(dtype):
    rng = np.random.default_rng(5)
    library = compile_source(HEADER + MATRIX.replace("{T}", dtype))
    a, b = (rng.integers(-4, 5, s).astype(np.float16 if dtype == "half" else np.float32) for s in ((8, 16), (8, 8)))
    c = np.empty((8, 8), a.dtype)
    library.run("product", [a, b, c], (32,), (32,))
    np.testing.assert_array_equal(c, 1 + a[:, :8].astype(np.float32) @ b.T.astype(np.float32))


def test_float32_subnormals_are_zero_unless_asked_otherwise(library):
    assert not run(library, SUBNORMAL)[1].any()
    assert (run(library, SUBNORMAL, flush=False)[1][1:] > 0).all()


def test_half_and_bfloat_round_each_operation_to_nearest_even():
    library = compile_source(
        HEADER
        + "kernel void k(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], device bfloat* z [[buffer(2)]],\n"
        + "  uint i [[thread_position_in_grid]]) { y[i] = x[i] * x[i] + x[i]; z[i] = bfloat(float(x[i])); }"
    )
    import ml_dtypes

    x = np.random.default_rng(2).standard_normal(256).astype(np.float16)
    y, z = np.empty_like(x), np.empty(256, ml_dtypes.bfloat16)
    library.run("k", [x, y, z], (256,), (32,))
    np.testing.assert_array_equal(y, x * x + x)
    np.testing.assert_array_equal(z, x.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_grids_that_groups_do_not_divide_run_every_thread():
    library = compile_source(
        HEADER + "kernel void k(device uint* y [[buffer(0)]], uint3 i [[thread_position_in_grid]], uint3 n [[threads_per_grid]])"
        " { y[i.y * n.x + i.x] = i.y * 100 + i.x; }"
    )
    y = np.empty((3, 70), np.uint32)
    library.run("k", [y], (70, 3), (32, 2))
    np.testing.assert_array_equal(y, np.arange(3)[:, None] * 100 + np.arange(70))


@pytest.mark.parametrize("name", REFUSED)
def test_what_msl_lacks_is_refused_with_the_line(name):
    body, why = REFUSED[name]
    with pytest.raises(MetalLintError, match=why):
        check_source(HEADER + ASIDE.get(name, "") + source(body).removeprefix(HEADER))


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_the_compiler_refuses_by_itself(name):
    body, why = NOT_COMPILED[name]
    with pytest.raises(MetalCompileError, match=why):
        compile_source(HEADER + ASIDE.get(name, "") + source(body).removeprefix(HEADER))


def test_the_lint_lets_plain_msl_through():
    for planted in FAULTS.values():
        check_source(source(planted.body))


def test_buffer_indices_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"buffer indices \[1, 0\]"):
        signatures("kernel void k(device float* a [[buffer(1)]], device float* b [[buffer(0)]]) {}")


def test_what_is_loaded_together_is_what_products_use(monkeypatch):
    """Nothing is compiled again, one kernel at a time: that takes four times as long."""
    q = finite_tensor(SIX["int4"], (3, 32), 1)
    stand().load([MAKERS[schedule](SIX["int4"], "float16") for schedule in ("single-stage", "matvec")])
    assert backend().runtime is backend(True).runtime is stand(flush=True)
    monkeypatch.setattr(stand(), "compile_shader", lambda source: pytest.fail(f"compiled again: {source[-400:]}"))
    for schedule, m in (("single-stage", 5), ("matvec", 1)):
        assert product(schedule, tokens(m, 32), q).shape == (m, 3)
