"""A small sweep over the CUDA kernels, to be run under compute-sanitizer (docs/design/cuda.md):

    compute-sanitizer --tool racecheck python tests/support/gpu_sweep.py

Every schedule on odd shapes, strided x, act-order and a mixture of experts; each result is compared
with the referee.
"""

from __future__ import annotations

import sys

import numpy as np

import torch
from halfbyte import QTensor, format_named, ops
from support.gpu_weights import make, random_parts

SHAPES = ((37, 3, 1), (37, 3, 3), (65, 5, 17), (65, 5, 40))
WORDS = ("int4:g128", "mxfp4", "nvfp4", "affine4:g64", "uint4:g32", "q6_K", "int8:g32", "uint3:g64")
SCHEDULES = (None, "single-stage", "double-buffered", "striped", "fused", "dequantize_then_gemm")


def check(word: str, n: int, groups: int, m: int) -> int:
    """Every schedule that takes the call; the number that did."""
    from halfbyte.errors import BackendError

    q = make(word, n, groups, np.random.default_rng(1))
    p = ops.prepare(q, device="cuda")
    big = torch.randn(m, q.shape[1] + 24, device="cuda", dtype=torch.float16) * 1e-2
    x = big[:, 8 : 8 + q.shape[1]]
    want = x.double().cpu().numpy() @ q.dequantize("float64").T
    done = 0
    for schedule in SCHEDULES:
        try:
            y = ops.linear(x, p, schedule=schedule)
        except BackendError:
            continue
        np.testing.assert_allclose(y.double().cpu().numpy(), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())
        done += 1
    return done


def experts() -> None:
    """Routing, both grouped products, activation and sum."""
    rng = np.random.default_rng(2)
    fmt = format_named("mxfp4")
    up, down = (QTensor(fmt, s, random_parts(fmt, s, rng)) for s in ((6, 128, 160), (6, 80, 64)))
    held = [ops.prepare(w, device="cuda") for w in (up, down)]
    for m in (1, 3, 20):
        x = torch.randn(m, 160, device="cuda", dtype=torch.float16) * 0.1
        index = torch.stack([torch.randperm(6)[:2] for _ in range(m)]).cuda()
        share = torch.rand(m, 2, device="cuda")
        y = ops.experts(x, *held, index, share)
        want = ops.experts(x.float().cpu().numpy(), up, down, index.cpu().numpy(), share.cpu().numpy(), backend="reference")
        np.testing.assert_allclose(y.float().cpu().numpy(), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


def main() -> None:
    words = sys.argv[1:] or WORDS
    done = sum(check(word, *shape) for word in words for shape in SHAPES)
    experts()
    print(done, "products and the experts", flush=True)


if __name__ == "__main__":
    main()
