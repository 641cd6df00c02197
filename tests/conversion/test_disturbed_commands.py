"""A sample of `make fuzz-second`, and a writer with a planted fault that it must notice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.second_fuzz import tracer

pytestmark = pytest.mark.skipif(not tracer.AVAILABLE, reason="ptrace as it is on Linux and x86-64")


def test_a_sample_breaks_no_promise():
    command = [sys.executable, "-m", "support.second_fuzz", "--cases", "12", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, done.stdout.count("\n"), summary["cases"]) == (0, 1, 12), done.stdout + done.stderr


def output_of(planted: str) -> str:
    """What a program with a planted fault prints to standard output."""
    return subprocess.run([sys.executable, "-c", planted], capture_output=True, text=True, timeout=300).stdout


def test_an_output_that_is_copied_in_place_of_renamed_is_noticed():
    assert "the output is neither the old nor the new one" in output_of(
        "import pathlib, sys\n"
        "pathlib.Path.replace = lambda self, to: (to.write_bytes(self.read_bytes()), self.unlink()) if self.is_file() else None\n"
        "from support.second_fuzz import cases, __main__\n"
        "sys.exit(min(99, __main__.run(60, 0, 12, kinds=(cases.interruption,))))"
    )


def test_a_reader_that_gives_other_values_is_noticed():
    assert "has other values" in output_of(
        "import sys, halfbyte as hb\n"
        "right = hb.QTensor.dequantize\n"
        "hb.QTensor.dequantize = lambda self, *a, **k: right(self, *a, **k) + (self.shape[0] > 40)\n"
        "from support.second_fuzz import __main__, readers\n"
        "sys.exit(min(99, __main__.run(60, 0, 2, kinds=(readers.reading,))))"
    )
