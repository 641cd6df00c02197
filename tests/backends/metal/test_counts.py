"""The counts in docs/design/metal.md are those of the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte.backends.metal.source import shared_source
from support.metal_counts import table
from support.metal_cpu.machine import available
from support.metal_cpu.planted import FAULTS


def constant(name: str) -> int:
    return int(re.search(rf"\b{name} = (\d+)\b", shared_source())[1])


def banks(first: int) -> list[int]:
    """Of 32 banks, four bytes each in turn, those that a float4 at float `first` lies in."""
    return [(first + j) % 32 for j in range(4)]


def test_staging_and_tiles_of_32_inputs_have_no_bank_conflicts():
    """Eight lanes write eight float4 at a time; each 8 × 8 piece lies in every bank twice, which is the least for 64 numbers."""
    column, row = constant("WIDE_COLUMN"), 32 + constant("TILE_PAD")
    staged = [lane // 16 * 16 * column + lane % 16 * column for lane in range(32)]
    tile = [i // 4 * row + 8 * (i % 4) for i in range(128)]
    for addresses in (staged, tile):
        for at in range(0, len(addresses), 8):
            for half in (0, 4):
                assert sorted(b for a in addresses[at : at + 8] for b in banks(a + half)) == list(range(32))
    for stride in (column, row):
        piece = [(stride * c + k) % 32 for c in range(8) for k in range(8)]
        assert all(piece.count(b) == 2 for b in range(32))


@pytest.mark.skipif(not available(), reason="clang-19 is not installed")
def test_the_page_has_the_counts_of_the_kernels():
    page = (Path(__file__).parents[3] / "docs" / "design" / "metal.md").read_text(encoding="utf-8")
    assert table() in page


def test_the_page_counts_the_planted_faults_and_says_what_never_ran():
    page = (Path(__file__).parents[3] / "docs" / "design" / "metal.md").read_text(encoding="utf-8")
    assert "**No kernel here has run on Apple hardware yet.**" in page
    assert f"{len(FAULTS)} planted faults are each caught" in page
