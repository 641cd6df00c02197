"""The portable CUDA kernels, run by Triton's interpreter on the CPU: one format of each way to
store codes and scales.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

HERE = Path(__file__).parents[2] / "support"
FEW = ("nvfp4", "affine4:g64", "q6_K", "uint3:g64", "uint8:g64")
REST = ("mxfp4", "int4:g128", "q4_K", "uint2:g32", "uint4:g32", "mxfp8_e4m3", "nf4:g64", "int8:g32")


@pytest.mark.parametrize("formats", [FEW, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rest"])
def test_decode_and_products_without_a_gpu(formats):
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "cuda_interpreter.py"), *formats],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [f"{word} ok" for word in formats]
