"""docs/adding-a-format.md is true: its example, run as it stands, gives a format that everything
else finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfbyte import QTensor, ops
from halfbyte.backends import Call, backends_for
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.checkpoints import save
from halfbyte.cli import main
from halfbyte.errors import BackendError, FormatError
from halfbyte.formats import FAMILIES, format_named
from halfbyte.numerics.bits import pack, unpack
from halfbyte.numerics.minifloat import TABLES, add_table, element_significant_bits
from halfbyte.tensor.quantize import quantize

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-format.md"


@pytest.fixture
def pow2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's family in the registry, for one test."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S) if "class" in block)
    scope: dict[str, type] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    monkeypatch.setitem(FAMILIES, "pow2", scope["Pow2"]())
    yield
    del TABLES["pow2"]


def weight(n: int = 24, k: int = 96, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.02).astype(np.float32)


def test_the_registry_finds_it(pow2):
    assert str(format_named("pow2")) == "pow2:g32"
    assert format_named("pow2:g64").group_size == 64
    with pytest.raises(FormatError, match=r"pow2 with group size 7; allowed: 16, 32, 64"):
        format_named("pow2:g7")


def test_every_code_decodes_exactly(pow2):
    """Each code under scales from the smallest float16 to the largest, against the definition."""
    fmt = format_named("pow2:g16")
    scales = np.array([2.0**-24, 2.0**-14, 0.1, 1.0, 3.14159, 65504.0], np.float16)
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(scales), 1))
    q = QTensor(fmt, codes.shape, {"codes": pack(codes, 4), "scales": scales[:, None]})
    sign = np.where(codes & 8, -1.0, 1.0)
    want = sign * np.ldexp(1.0, -(codes & 7).astype(int)) * scales.astype(np.float64)[:, None]
    for dtype in ("float64", "float32", "float16"):
        np.testing.assert_array_equal(q.dequantize(dtype), want.astype(dtype))


def test_quantize_takes_the_nearest_code(pow2):
    w = weight()
    q = quantize(w, "pow2:g32")
    assert q.shape == w.shape
    scale = np.repeat(q.parts["scales"].astype(np.float64), 32, axis=1)
    values = TABLES["pow2"][None, None, :] * scale[:, :, None]
    chosen = np.take_along_axis(values, unpack(np.asarray(q.parts["codes"]), 4, 96)[:, :, None].astype(int), axis=2)[..., 0]
    np.testing.assert_array_equal(np.abs(chosen - w), np.abs(values - w[:, :, None]).min(axis=2))


def test_it_is_saved_and_read_back(pow2, tmp_path):
    q = quantize(weight(), "pow2:g32")
    save(tmp_path / "w.safetensors", {"w": q})
    with open_checkpoint(tmp_path / "w.safetensors") as ckpt:
        assert ckpt["w"] == q
        assert ckpt.info("w").format == q.format


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_backends_multiply_it(pow2, name):
    backend = next(b for b in backends_for("cpu") if b.name == name)
    q = quantize(weight(), "pow2:g32")
    absent = backend.reason()
    if absent is not None:
        with pytest.raises(BackendError, match=re.escape(absent)):
            ops.linear(np.eye(96, dtype=np.float32), q, backend=name)
        return
    assert backend.refuses(Call("linear", q.format)) is None
    eye = np.eye(96, dtype=np.float32)
    np.testing.assert_array_equal(ops.linear(eye, q, backend=name).T, q.dequantize("float32"))
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    exact = x.astype(np.float64) @ q.dequantize("float64").T
    bound = 1e-5 * (np.abs(x).astype(np.float64) @ np.abs(q.dequantize("float64")).T)
    assert (np.abs(ops.linear(x, q, backend=name) - exact) <= bound).all()


def test_the_command_line_finds_it(pow2, tmp_path, capsys):
    save(tmp_path / "w.safetensors", {"w": quantize(weight(), "pow2:g32")})
    path, dense = str(tmp_path / "w.safetensors"), str(tmp_path / "dense.safetensors")
    assert main(["inspect", path]) == 0
    assert "pow2:g32" in capsys.readouterr().out
    assert main(["dequantize", path, dense]) == 0
    assert main(["verify", path, dense]) == 0
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    assert main(["quantize", dense, str(again), "--to", "halfbyte:pow2:g16"]) == 0
    assert main(["convert", path, str(other), "--to", "halfbyte:int8:g32", "--lossy"]) == 0
    assert main(["convert", str(other), str(tmp_path / "back.safetensors"), "--to", "halfbyte:pow2", "--lossy"]) == 0
    for file, fmt in ((again, "pow2:g16"), (tmp_path / "back.safetensors", "pow2:g32")):
        with open_checkpoint(file) as ckpt:
            assert str(ckpt["w"].format) == fmt


def test_it_is_gone_afterwards():
    with pytest.raises(FormatError, match="'pow2' is not a codec"):
        format_named("pow2")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("e2m1", [0.0] * 16, "'e2m1' is taken"),
        ("nf4", [0.0] * 16, "'nf4' is taken"),
        ("int", [0.0] * 16, "'int' is taken"),
        ("odd", [0.0] * 15, r"has 15 values; allowed: 2\^bits"),
        ("long", [0.1] * 16, "has values that float32 does not hold"),
    ],
)
def test_tables_that_are_refused(name, values, message):
    with pytest.raises(FormatError, match=message):
        add_table(name, values)
    assert name not in TABLES or len(TABLES[name]) == 16


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([0.0, 1.0], 1),
        ([0.0, 3.0], 2),
        ([1.0, 1 + 2.0**-16], 17),
        ([1.0, 1 + 2.0**-17], 24),
        ([1.0, 2.0**-17], 24),
        ([0.0, np.inf], 1),
        ([0.0, np.nan], 1),
    ],
)
def test_significant_bits_of_a_table(values, bits):
    """Fine values count as 24 bits: their products with the smallest scales may not be float32
    numbers.
    """
    add_table("probe", values)
    try:
        assert element_significant_bits("probe", 1) == bits
    finally:
        del TABLES["probe"]
