"""The counts in docs/design/metal.md are those of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.metal_counts import table
from support.metal_cpu.machine import available
from support.metal_cpu.planted import FAULTS


@pytest.mark.skipif(not available(), reason="clang-19 is not installed")
def test_the_page_has_the_counts_of_the_kernels():
    page = (Path(__file__).parents[3] / "docs" / "design" / "metal.md").read_text(encoding="utf-8")
    assert table() in page


def test_the_page_counts_the_planted_faults():
    page = (Path(__file__).parents[3] / "docs" / "design" / "metal.md").read_text(encoding="utf-8")
    assert f"{len(FAULTS)} planted faults are each caught" in page
