"""The fused schedule compiles for Hopper without a GPU, and its weight is the register operand of
wgmma.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

ROUNDED = ("mxfp4/fp8", "int4:g128/fp8-wide", "mxfp4/fp8-deep", "int4:g128/int8-deep", "mxfp4/int8")
"""Activations of 8 bits: scales in the operand, or applied to sums; warpgroups along the inputs."""
FEW = ("int4:g128/linear", "mxfp4/experts", "int4:g128/two", "uint8:g16/deep", "uint2:g16/narrow", "q6_K/linear")
"""Every shape, and 2, 4, 6 and 8 bits."""
REST = (
    "nvfp4/linear", "mxfp4/few", "affine4:g32/deep", "uint4:g64/narrow", "q8_0/deep", "uint8:g16/linear", "affine8:g64/linear",
    "mxfp8_e4m3/experts", "mxfp8_e5m2/narrow", "int2:g64/linear", "uint2:g16/deep", "affine2:g64/experts",
    "q2_K/deep", "q3_K/linear", "q4_K/experts", "q5_K/narrow", "uint3:g64/linear", "q5_0/few", "nf4:g64/two", "iq4_xs/experts",
    "mxfp6_e2m3/deep", "mxfp6_e3m2/linear", "affine1:g64/linear", "affine6:g64/deep",
)  # fmt: skip
"""With FEW every format that this kernel multiplies."""


@pytest.mark.parametrize("kernels", [FEW, ROUNDED, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rounded", "rest"])
def test_every_family_compiles(tmp_path, kernels):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "support" / "cuda_compile.py"), *kernels],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(kernels)
