"""The Metal matrix-vector product: every format, every unit of both simdgroups, odd tails, few
tokens and few outputs.
"""

from __future__ import annotations

import numpy as np
import pytest

import torch
from halfbyte.backends.metal import MetalBackend, kernels
from halfbyte.backends.metal.torch_runtime import TorchRuntime
from halfbyte.formats import format_named
from support.metal_cpu.machine import available
from support.metal_cpu.torch_stand_in import compile_shader
from support.metal_formats import FORMATS, SIX, as_float, on_device, stand
from support.metal_products import assert_one_hot, assert_product, numbers, product, tokens, whole_numbers
from support.random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")


@pytest.mark.parametrize("part", range(4))
def test_matvec_of_every_format(part):
    """One-hot in float32 for equality, random for the bound. k = 768: a turn of both simdgroups and
    half a turn more.
    """
    names = list(FORMATS)[part::4]
    stand().load([kernels.matvec(on_device(FORMATS[f]), "float32", 4) for f in names])
    for name in names:
        q = numbers(FORMATS[name], (6, 768), 3)
        y = product("matvec", torch.eye(768)[::29], q)
        np.testing.assert_array_equal(as_float(y), q.dequantize("float32").T[::29], name)
        x, bias = tokens(5, 768, "float32"), torch.randn(6, generator=torch.Generator().manual_seed(3))
        assert_product(product("matvec", x, q, bias), x, q, "float32", bias)


AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


def test_matvec_of_every_affine_width_and_group():
    formats = [format_named(f"affine{bits}", group) for bits, group in AFFINE]
    stand().load([kernels.matvec(f, "float16", 1) for f in formats])
    for fmt in formats:
        q = finite_tensor(fmt, (5, 256), 3)
        x = torch.zeros(1, 256).half()
        x[0, 77] = 1
        assert_one_hot(as_float(product("matvec", x, q)), q, "float16", slice(77, 78))
        x = tokens(1, 256)
        assert_product(product("matvec", x, q), x, q, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_matvec_tokens(m, dtype):
    q = finite_tensor(SIX["mxfp4"], (13, 160), 5)
    x = tokens(m, 160, dtype)
    assert_product(product("matvec", x, q), x, q, dtype)


LONG = 8 * (64 + 64 + 4)
"""Inputs past two turns of both simdgroups of a matrix-vector product: units 0 to 31 and 64 to 95
are the first's, 32 to 63 and 96 to 127 the second's, and the last four the first's again.
"""


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("name", SIX)
def test_matvec_one_hot_in_every_unit_of_both_simdgroups(name, m):
    q = finite_tensor(SIX[name], (5, LONG), 7)
    at = 8 * np.arange(LONG // 8) + np.arange(LONG // 8) % 8
    x = torch.zeros(LONG // 8, LONG).half()
    x[torch.arange(LONG // 8), torch.from_numpy(at)] = 1
    y = torch.cat([product("matvec", rows, q) for rows in x.split(m)])
    assert_one_hot(as_float(y), q, "float16", at)


@pytest.mark.parametrize("k", [250, 257, 511, 517, 1029, LONG - 3])
def test_matvec_with_odd_tails(k):
    q = finite_tensor(format_named("int4", -1), (5, k), 7)
    at = np.array([0, 255, 256, k - 9, k - 8, k - 2, k - 1]) % k
    y = product("matvec", torch.eye(k)[torch.from_numpy(at)], q)
    assert_one_hot(as_float(y), q, "float32", at)
    x = tokens(3, k)
    assert_product(product("matvec", x, q), x, q, "float16")


@pytest.mark.parametrize("m", [1, 2, 4])
def test_each_simdgroups_share_is_in_the_sum(m):
    q = whole_numbers(LONG)
    owner = np.arange(LONG) // 8 // 32 % kernels.MATVEC_SIMDGROUPS
    x = np.random.default_rng(0).integers(-3, 4, (m, LONG)).astype(np.float32)
    for only in (*range(kernels.MATVEC_SIMDGROUPS), None):
        part = x if only is None else np.where(owner == only, x, 0)
        right = part @ q.dequantize("float32").T
        assert (right != 0).any()
        np.testing.assert_array_equal(as_float(product("matvec", torch.from_numpy(part), q)), right)


def test_a_reduction_that_leaves_a_simdgroup_out_is_seen():
    def broken(source):
        assert "s < MATVEC_SIMDGROUPS; ++s) sum +=" in source
        return compile_shader(source.replace("s < MATVEC_SIMDGROUPS; ++s) sum +=", "s < 1; ++s) sum +="))

    b = MetalBackend(TorchRuntime(broken, "cpu"))
    q, x = whole_numbers(LONG), torch.ones(1, LONG)
    short = whole_numbers(256)
    assert torch.equal(b.linear(x[:, :256], b.prepare(short), None), product("matvec", x[:, :256], short))
    assert not torch.equal(b.linear(x, b.prepare(q), None), product("matvec", x, q))


@pytest.mark.parametrize("n", [1, 3, 4, 7, 33, 65])
def test_case_17_small_and_odd_n(n):
    q = finite_tensor(SIX["mxfp4"], (n, 1024), 1)
    x = tokens(1, 1024)
    assert_product(product("matvec", x, q), x, q, "float16")
