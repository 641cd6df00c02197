"""docs/adding-a-kernel.md is true: its decoder row gives exact values and reaches the kernels, and
its kernel runs, compiled for Hopper, on the PTX machine.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")

from halfbyte import QTensor, format_named  # noqa: E402
from halfbyte.backends.cuda import decoders, launch  # noqa: E402
from halfbyte.backends.cuda.weight import FRAGMENT_ELEMENTS, to_device  # noqa: E402
from halfbyte.numerics.minifloat import element_table  # noqa: E402
from support import ptx  # noqa: E402
from support.ptx_launch import hopper  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-kernel.md"
ROW, KERNEL = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
KEY = 4, "mxint", decoders.PLANES


@pytest.fixture
def row(monkeypatch):
    """The page's row in the table, for one test."""
    monkeypatch.setattr(decoders, "WORDS", dict(decoders.WORDS))
    monkeypatch.setattr(launch, "WORDS", decoders.WORDS)
    exec(compile(ROW, str(PAGE), "exec"), {})
    return decoders.WORDS[KEY]


@pytest.fixture
def row_sums(tmp_path):
    """The page's kernel: Triton reads the source of a kernel from its file."""
    path = tmp_path / "row_sums.py"
    path.write_text(KERNEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("row_sums", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.row_sums


def weight(n=3, k=64, seed=0):
    """MXINT4 with every code, under scales 2^-1 to 2^2."""
    rng = np.random.default_rng(seed)
    parts = {"codes": rng.integers(0, 256, (n, k // 2), dtype=np.uint8)}
    return QTensor(format_named("mxint4"), (n, k), {**parts, "scales": rng.integers(126, 130, (n, k // 32), dtype=np.uint8)})


def test_the_row_decodes_every_code_in_every_position(row):
    codes = np.stack([np.roll(np.arange(16), 3 * i) for i in range(8)], 1).astype(np.uint32)
    registers = {"$8": (codes << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)}
    ptx.run(decoders.assembly(row, 8, "w0"), registers)
    values = np.stack([registers[f"${i}"].view(np.float32) for i in range(8)], 1)
    np.testing.assert_array_equal(values / row.low, element_table("mxint", 4)[codes])


def test_dequantize_uses_the_row(row, tmp_path):
    q = weight()
    w = to_device(q, "cpu")
    form = launch.format_of(w)
    assert "xor.b32 n, $8, 0x88888888" in form.decoder
    assert form.power == 0.25
    with hopper(cache=tmp_path):
        np.testing.assert_array_equal(launch.dequantize(w, torch.float32).numpy(), q.dequantize())


def test_without_the_row_codes_are_decoded_one_by_one():
    assert launch.format_of(to_device(weight(), "cpu")).decoder == ""


def test_the_kernel_sums_rows(row, row_sums, tmp_path):
    q = weight(seed=1)
    with hopper(cache=tmp_path):
        got = row_sums(to_device(q, "cpu")).numpy()
    np.testing.assert_array_equal(got, q.dequantize("float64").sum(1))  # quarters: no sum is rounded


def test_elements_in_fragment_order_have_both_rows():
    for bits, element, _ in decoders.WORDS:
        if element in FRAGMENT_ELEMENTS.get(bits, ()):
            first, second = (decoders.WORDS[bits, element, order] for order in (decoders.PLANES, decoders.FRAGMENTS))
            assert first.low == second.low
