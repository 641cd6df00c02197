"""The inputs that `make fuzz-native` starts from."""

from __future__ import annotations

import tarfile
from pathlib import Path

PACKED = Path(__file__).parents[2] / "data" / "native_fuzz_corpus.tar.xz"


def test_the_packed_corpus_unpacks_into_inputs_of_the_fuzzer():
    with tarfile.open(PACKED) as archive:
        members = archive.getmembers()
        inputs = [archive.extractfile(member).read() for member in members]
    assert all(member.isfile() and "/" not in member.name for member in members)
    assert len(inputs) == len(members) == len(set(inputs)) > 100
    assert max(map(len, inputs)) <= 64
    assert PACKED.stat().st_size < 150_000
