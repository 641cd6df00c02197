"""Streams of codes that end within a row, and what fills the rest of it."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.layouts.common.words import join_stream, split_stream


@pytest.mark.parametrize(("rows", "k"), [(1, 6), (3, 6), (4, 8), (4, 5), (3, 0), (0, 5)])
def test_the_filling_after_the_codes_comes_back(rows: int, k: int) -> None:
    """Four bytes a row, k codes of 4 bits. Three rows of 6 codes: as many bytes down as along."""
    raw = np.random.default_rng(k).integers(1, 256, (rows, 4), dtype=np.uint8)
    codes, filling = split_stream(raw, 4, k)
    assert codes.shape == (rows, -(-k // 2))
    assert (filling is None) == (k == 8 or rows == 0)
    assert np.array_equal(join_stream(codes, 4, 4, k, filling), raw)
