"""Every case of the manifest is claimed by exactly one golden test, and its file is the one the
producer wrote.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from support.golden_case import GOLDEN

MANIFEST = {c["file"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))["cases"]}
HERE = Path(__file__).parents[1]
MODULES = [
    *sorted(f"layouts.{p.stem}" for p in HERE.glob("layouts/test_golden_*.py") if "\nCASES = " in p.read_text(encoding="utf-8")),
    "tensor.test_quantize_golden",  # microxcaling, whose files are encoders' answers
    "numerics.test_minifloat",  # ml_dtypes, whose files are tables and casts
]
"""Golden tests: each declares the files it covers as `CASES`, relative to the golden folder."""


def test_there_are_233_cases_and_no_stray_files() -> None:
    assert len(MANIFEST) == 233
    here = {str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob("*") if p.is_file()}
    assert here - {"MANIFEST.json"} == set(MANIFEST)


def test_every_case_is_claimed_by_exactly_one_golden_test() -> None:
    claims = {name: list(importlib.import_module(name).CASES) for name in MODULES}
    counts = Counter(case for cases in claims.values() for case in cases)
    assert sorted(set(MANIFEST) - set(counts)) == []
    assert sorted(set(counts) - set(MANIFEST)) == []
    twice = {c: [m for m, cases in claims.items() if c in cases] for c, n in counts.items() if n > 1}
    assert twice == {}


@pytest.mark.parametrize("producer", sorted({f.partition("/")[0] for f in MANIFEST}))
def test_the_files_are_the_producers_byte_for_byte(producer: str) -> None:
    for file, case in MANIFEST.items():
        if file.startswith(producer + "/"):
            raw = (GOLDEN / file).read_bytes()
            assert (len(raw), hashlib.sha256(raw).hexdigest()) == (case["size"], case["sha256"]), file
