"""CUDA kernels compile for every target without a GPU: Triton brings its own assembler.

`make test` compiles some formats for each target, `make test-slow` every format of
`cuda_compile.FORMATS` through every schedule for every target. The wgmma kernel is in
test_wgmma_compile.py.
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


TARGETS = ("80", "89", "90", "100", "120")


@pytest.mark.parametrize("targets", [TARGETS, *(pytest.param(("all", t), marks=pytest.mark.slow) for t in TARGETS)], ids=" ".join)
def test_kernels_compile(targets, tmp_path):
    """Case 34 among them: NVFP4 for compute 8.0, which has no float of eight bits, decodes its
    scales by integer operations (that every byte comes out right is
    `test_gpu_values.test_one_hot_activations_return_the_weight`'s).
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "cuda_compile.py"), *targets], env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(targets) - {"all"}
