"""Weights of no outputs, of no inputs, of one of either, and stacks of no experts, through
`quantize`, `convert` and `dequantize`: each layout holds the same values and shape when it is read
again, or refuses with a sentence before it writes.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.cli import main
from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS, written_layouts
from halfbyte.tensor.qtensor import QTensor
from support.random_tensors import finite_tensor

SHAPES = ((0, 64), (64, 0), (1, 64), (64, 1), (0, 256), (0, 8, 64), (2, 0, 64))
KEY = "model.layers.0.mlp.experts.up_proj"
CODECS = ("int4", "affine4", "mxfp4", "nvfp4", "fp8_e4m3", "hqq4", "fp4", "q4_K")
"""One of each kind."""
GROUPINGS = ({}, {"global_scale": "divide"}, {"rows": -1, "group_size": -1}, {"rows": 16, "group_size": 16})
"""Options of codecs, where they have them."""


def formats_of(codec: str) -> list:
    found = {}
    for options in GROUPINGS:
        try:
            fmt = format_named(codec, **options)
        except (HalfbyteError, TypeError):
            continue
        found[repr(fmt)] = fmt
    return list(found.values())


def values_of(path) -> np.ndarray:
    """The values of all weights of a checkpoint, stacked where there are several; none of them is
    left out, and none complained of.
    """
    with hb.open(path) as checkpoint:
        found = [f for f in checkpoint.findings(data=True) if f.severity != "note"]
        # One value a group is its offset under a scale of 0, of which `inspect` warns.
        assert [f for f in found if f.code != "zero-scale"] == []
        weights = [checkpoint[key] for key in checkpoint]
    arrays = [w.dequantize("float64") if isinstance(w, QTensor) else np.asarray(w, np.float64) for w in weights]
    return np.stack(arrays) if len(arrays) > 1 else arrays[0]


def check(tmp_path, command: str, source, layout: str, capsys, *options: str) -> np.ndarray | None:
    """Values of `source` in this layout; None where it is refused, with nothing left behind."""
    out, dense = tmp_path / ("out.gguf" if layout == "gguf" else "out"), tmp_path / "dense"
    for old in (out, dense):
        shutil.rmtree(old, ignore_errors=True)
        old.unlink(missing_ok=True)
    capsys.readouterr()
    status = main([command, str(source), str(out), "--workers", "1", *options])
    said = capsys.readouterr().err
    if status:
        assert status == 2, said
        assert "halfbyte: [" in said, said
        assert not out.exists()
        return None
    found = values_of(out)
    assert main(["dequantize", str(out), str(dense), "--dtype", "float32"]) == 0
    plain = values_of(dense)
    if layout == "gpt-oss" and plain.ndim == 3:  # transformers has the experts of this model as (experts, k, n)
        plain = plain.swapaxes(-1, -2)
    with np.errstate(over="ignore"):
        assert np.array_equal(plain.astype(np.float32), found.astype(np.float32), equal_nan=True)
    return found


def sources(codec: str) -> Iterator[QTensor]:
    """Weights of every shape and grouping that the codec has."""
    for fmt, shape in itertools.product(formats_of(codec), SHAPES):
        try:
            q = finite_tensor(fmt, shape, 1)
        except HalfbyteError:
            continue
        if "global_scale" in q.parts:  # a power of two, of which each convention has one
            half = np.full_like(q.parts["global_scale"], 0.5)
            q = QTensor(q.format, shape, {**q.parts, "global_scale": half})
        yield q


@pytest.mark.parametrize("layout", written_layouts())
@pytest.mark.parametrize("codec", CODECS)
def test_each_format_converts(tmp_path, capsys, codec, layout):
    reached = 0
    for q in sources(codec):
        with np.errstate(all="ignore"):
            wanted = q.dequantize("float64")
            hb.save(tmp_path / "in.safetensors", {KEY: q})
            found = check(tmp_path, "convert", tmp_path / "in.safetensors", layout, capsys, "--to", layout)
        if found is None:
            continue
        reached += 1
        assert found.shape == wanted.shape, q
        assert np.array_equal(found, wanted, equal_nan=True), q
    assert reached or layout != "halfbyte"


@pytest.mark.parametrize("layout", written_layouts())
def test_each_shape_is_quantized(tmp_path, capsys, layout):
    rng = np.random.default_rng(0)
    holds = LAYOUTS[layout].holds
    codecs = [codec for codec in CODECS if holds is None or codec in holds.codecs]
    for shape in SHAPES:
        dense = rng.standard_normal(shape).astype(np.float32)
        with SafetensorsWriter(tmp_path / "in.safetensors") as out:
            out.add(f"{KEY}.weight", dense)
        for codec in codecs:
            options = ("--to", f"{layout}:{codec}", "--rule", f".*={codec}")
            found = check(tmp_path, "quantize", tmp_path / "in.safetensors", layout, capsys, *options)
            if found is not None:
                assert found.shape == shape or found.shape == shape[1:], (shape, codec)
                assert found.size == dense.size, (shape, codec)
