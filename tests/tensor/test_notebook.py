"""What a packed weight shows in a notebook: facts, a histogram whose counts are right, and a cost
that does not grow.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.numerics.bits import pack
from halfbyte.tensor.notebook import SAMPLED, sample_codes

RNG = np.random.default_rng(11)


def int4(codes: np.ndarray, origin: str = "") -> QTensor:
    """An int4 weight of given codes [*lead, n, k] in groups of 32."""
    fmt = format_named("int4:g32")
    scales = np.ones((*codes.shape[:-1], fmt.groups(codes.shape[-1])), np.float16)
    return QTensor(fmt, codes.shape, {"codes": pack(codes, 4), "scales": scales}, origin=origin)


def counts(q: QTensor) -> list[int]:
    """Numbers in the titles of the bars."""
    return [int(t.replace(",", "")) for t in re.findall(r"<title>codes? [^:]*: ([\d,]+)</title>", q._repr_html_())]


def test_the_facts_are_shown():
    shown = int4(np.zeros((2, 6, 64), np.uint8), origin="mlx")._repr_html_()
    for fact in ("int4:g32", "2 × 6 × 64", "4.5", "432", "mlx"):
        assert f"<td>{fact}</td>" in shown


def test_the_counts_are_those_of_the_codes():
    codes = RNG.integers(0, 16, (5, 96), dtype=np.uint8)
    assert counts(int4(codes)) == np.bincount(codes.reshape(-1), minlength=16).tolist()


def test_a_wrong_count_would_be_seen():
    codes = RNG.integers(0, 16, (5, 96), dtype=np.uint8)
    q = int4(codes)
    codes[3, 7] ^= 1
    assert counts(q) != np.bincount(codes.reshape(-1), minlength=16).tolist()


def test_bars_name_the_value_of_their_code():
    shown = quantize(np.ones((1, 32), np.float32), "mxfp4")._repr_html_()
    assert "code 7, value 6:" in shown
    assert "code 8, value -0:" in shown


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8:g32", "mxfp6_e2m3"])
def test_many_codes_share_64_bars(codec):
    q = quantize(RNG.standard_normal((4, 64)).astype(np.float32), codec)
    assert len(counts(q)) == 64
    assert sum(counts(q)) == 256


@pytest.mark.parametrize("codec", ["mxfp4", "int3:g32", "nf4", "affine5:g64", "q6_K", "fp8_e5m2"])
def test_it_is_small_well_formed_and_self_contained(codec):
    shown = quantize(RNG.standard_normal((8, 256)).astype(np.float32), codec)._repr_html_()
    assert len(shown) < 12_000
    assert {e.tag for e in ET.fromstring(shown).iter()} <= {"div", "table", "tr", "th", "td", "svg", "rect", "title"}
    assert "http" not in shown


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((4096, 64), 1024), ((3, 500, 128), 512), ((2, 200_000), 1), ((1, SAMPLED + 8), 1), ((40, 64), 40)],
)
def test_large_weights_are_sampled(shape, rows):
    sampled = sample_codes(int4(np.full(shape, 5, np.uint8)))
    assert sampled.shape == (rows, min(shape[-1], SAMPLED))
    assert (sampled == 5).all()


def test_sampled_rows_are_spread_over_all_rows():
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 1024, axis=0).reshape(16 * 1024, 1)
    sampled = sample_codes(int4(np.repeat(codes, 64, axis=1)))
    assert np.array_equal(np.unique(sampled), np.arange(16))
    assert f"{SAMPLED:,} of {16 * 1024 * 64:,}" in int4(np.repeat(codes, 64, axis=1))._repr_html_()


def test_a_slice_shows_its_own_rows():
    codes = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 32, axis=1)
    assert counts(int4(codes)[2:4]) == [0, 0, 32, 32] + [0] * 12


@pytest.mark.parametrize("q", [int4(np.zeros((0, 32), np.uint8)), int4(np.zeros((3, 0), np.uint8))])
def test_an_empty_weight_has_no_histogram(q):
    assert "<svg" not in q._repr_html_()


def test_raw_blocks_have_no_histogram():
    fmt = format_named("tq2_0")
    q = QTensor(fmt, (1, 256), {"blocks": np.zeros((1, 66), np.uint8)})
    assert "tq2_0" in q._repr_html_()
    assert "<svg" not in q._repr_html_()
