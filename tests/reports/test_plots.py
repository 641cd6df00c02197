"""Plots are well-formed pictures whatever their numbers are."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest

from halfbyte.reports.plots import LEFT, LETTER, NARROW, WIDE, Axes, bars, histogram, points, ranges

AXES = Axes("x < y", "a & b")
NUMBERS = [[], [0.0], [1e-9, 3.0, 0.2], [math.nan, 1.0], [math.inf], [0.0, 0.0], [-1.0, 1e300]]


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("values", NUMBERS)
def test_marks_lie_inside(values, size):
    names = [f"layer {i}" for i in range(len(values))]
    marks = {"median": values[0]} if values else {}
    drawings = [
        bars(names, [abs(v) for v in values], AXES, size),
        histogram(np.array(values, np.float64), AXES, size, marks),
        ranges(names, [(v, 10 * v) for v in values], AXES, size),
        points(names, [abs(v) for v in values], [abs(v) for v in reversed(values)], AXES, size),
    ]
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        texts = [t.text for t in tree.iter("text")]
        assert {"↑ a & b", "x < y →"} <= set(texts)
        for rect in tree.iter("rect"):
            x, y, width, height = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
            assert min(x, y, width, height) >= 0
            assert x + width <= size.width
            assert y + height <= size.height
        for point in tree.iter("circle"):
            assert 0 <= float(point.get("cx")) <= size.width
            assert 0 <= float(point.get("cy")) <= size.height
    assert len(list(ElementTree.fromstring(drawings[0]).iter("rect"))) == len(values)


def test_a_histogram_counts_every_value():
    values = np.array([0.0, 1e-12, 1e-3, 2e-3, 0.5])
    titles = [r.findtext("title") for r in ElementTree.fromstring(histogram(values, AXES)).iter("rect")]
    assert sum(int(t.rpartition(": ")[2]) for t in titles) == len(values)


def test_a_long_name_of_a_point_is_cut():
    [word] = [
        t.text for t in ElementTree.fromstring(points(["a" * 400], [1.0], [1.0], AXES)).iter("text") if "name" in t.get("class")
    ]
    assert word.endswith("a…")
    assert len(word) < 110


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("x", [0.0, 0.3, 1.0])
def test_the_name_of_a_point_covers_no_axis(x, size):
    tree = ElementTree.fromstring(points(["a-model-with-a-rather-long-name-q5", "b"], [x, 1.0], [1.0, 0.5], AXES, size))
    name = next(t for t in tree.iter("text") if "name" in t.get("class"))
    half = len(name.text) * LETTER / 2
    assert float(name.get("x")) - half >= LEFT - 0.1
    assert float(name.get("x")) + half <= size.width


@pytest.mark.parametrize("top", [0.0021, 0.11, 0.15, 0.24, 0.3, 1, 3.9, 5, 55, 72, 99])
def test_levels_have_two_digits(top):
    tree = ElementTree.fromstring(bars(["a"], [top], AXES))
    labels = [float(t.text or "") for t in tree.iter("text") if t.get("class") == "level"]
    assert labels[0] == 0
    assert labels[-1] >= top
    assert all(len(f"{v:.10f}".replace(".", "").strip("0")) <= 2 for v in labels)
    assert np.allclose(np.diff(labels), labels[1])
