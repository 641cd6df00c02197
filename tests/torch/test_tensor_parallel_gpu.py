"""Two GPUs of one machine, a process each, over NCCL: what two gloo processes do on the CPU
(`tests/tensor/test_shard.py`).
"""

from __future__ import annotations

import pytest

from halfbyte.backends import backend_named
from support.sharding_runs import MODELS, check_model, check_products, run_two, write_models

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

WORDS = ["mxfp4", "nvfp4", "int4:g128", "uint4:g32", "affine4:g64", "fp8_e4m3", "nf4:g64", "q4_K", "q8_0"]


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    reason = backend_named("cuda").reason()
    if reason:
        pytest.skip(reason)
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are wanted; this machine has {torch.cuda.device_count()}")
    folders = write_models(tmp_path_factory)
    return run_two(tmp_path_factory.mktemp("store") / "store", "cuda", WORDS, list(folders.values())), folders


@pytest.mark.parametrize("word", WORDS)
def test_two_gpus_multiply_as_one_does(two_gpus, word):
    check_products([rank[word] for rank in two_gpus[0]], word)


@pytest.mark.parametrize("name", [f"{a} {p}" for a, p, _ in MODELS])
def test_two_gpus_compute_what_one_process_does(two_gpus, name):
    check_model(two_gpus[1][name])
