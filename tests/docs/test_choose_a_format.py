"""The page on choosing a format: its bits a weight are the library's, its perplexities those of the
measured tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

import halfbyte as hb

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "choose-a-format.md").read_text("utf-8")
ROWS = re.findall(r"^\| `([\w:]+)` \| ([\d.]+) \| (\d+) weights", PAGE, re.M)
PERPLEXITY = re.compile(r"([\d.]+) \(`([\w:]+)`\)")


@pytest.mark.parametrize(("codec", "bits", "length"), ROWS, ids=[row[0] for row in ROWS])
def test_bits_and_scales_are_those_of_a_packed_weight(codec, bits, length):
    """Bits are those of a file: of a ggml type its blocks', which memory may hold in wider fields."""
    weight = hb.quantize(np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float16), codec)
    types = {kind.name.lower(): kind for kind in gguf.GGMLQuantizationType}
    if codec.lower() in types and codec not in ("mxfp4", "nvfp4"):
        count, size = gguf.GGML_QUANT_SIZES[types[codec.lower()]]
        stored = 8 * size / count
    else:
        stored = 8 * weight.nbytes / weight.size
    assert bits == f"{stored:.{len(bits.partition('.')[2])}f}"
    assert re.search(r":g(\d+)", repr(weight)).group(1) == length


def table(page: str, row: str) -> dict[str, str]:
    """Codec -> the cell of `row` in the first table of a benchmark page that has such a row."""
    lines = (ROOT / "benchmarks" / page).read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {row} |"))
    head = max(i for i in range(at) if lines[i].startswith("| | ") or lines[i].startswith("|---"))
    while lines[head].startswith("|---"):
        head -= 1
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in (lines[head], lines[at])]
    return {name.split(",")[0]: cell for name, cell in zip(cells[0][-len(cells[1]) + 1 :], cells[1][1:], strict=True)}


def test_perplexities_are_measured_ones():
    nearest, calibrated = PAGE.split("Keeping embedding and head in 8 bits")
    rounded = dict(re.findall(r"^\| ([\w:]+) \| [\d.]+ \| ([\d.]+) \|", (ROOT / "benchmarks/models.md").read_text("utf-8"), re.M))
    said = PERPLEXITY.findall(nearest)
    assert len(said) == 5
    for value, codec in said:
        assert f"{float(rounded[codec]):.1f}" == value, codec
    gptq = {name: cell.strip("*").split("*")[0].split(" ")[0] for name, cell in table("quantize.md", "`gptq`").items()}
    said = PERPLEXITY.findall(calibrated)
    assert len(said) == 2
    for value, codec in said:
        assert f"{float(gptq[codec]):.1f}" == value, codec
