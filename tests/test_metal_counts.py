"""The counts in docs/metal.md are those of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from metal_counts import table
from metal_cpu.machine import available
from metal_cpu.planted import FAULTS


@pytest.mark.skipif(not available(), reason="clang-19 is not installed")
def test_the_page_has_the_counts_of_the_kernels():
    page = (Path(__file__).parent.parent / "docs" / "metal.md").read_text(encoding="utf-8")
    assert table() in page


def test_the_page_counts_the_planted_faults_and_says_what_never_ran():
    page = (Path(__file__).parent.parent / "docs" / "metal.md").read_text(encoding="utf-8")
    assert "**No kernel here has run on Apple hardware yet.**" in page
    assert f"{len(FAULTS)} planted faults are each caught" in page
