"""Your own Metal kernel from Python: 4-bit weights decoded in registers while they are multiplied,
one token.

    y[n] = Σ_k x[k] · (q[n, k] − 8) · scale[n, k / G]

`python examples/metal_fused_dequantize_matvec.py` on a Mac with MLX (pip install 'halfbyte[mlx]').
Copy it and change the body: a kernel is a string, and everything it needs from the host is on this
page. The result is checked against the referee, which decodes on the CPU and knows nothing of
Metal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

import halfbyte as hb

SIMDGROUPS = 4  # of a threadgroup, 32 threads each: they share a row's inputs
GROUP = 32  # inputs that share a scale

# What goes before the kernel: functions. Pointers carry their address space, there is no other
# memory to point to.
HEADER = """
#include <metal_stdlib>
using namespace metal;

// Nibble j of a word as a float: 0 to 15, less the 8 that int4 means by zero.
inline float int4_at(uint word, uint j) { return float(int((word >> (4 * j)) & 15) - 8); }
"""

# The body of the kernel. MLX writes the signature: `codes`, `scales`, `x` are `const device`
# pointers of the arrays' dtypes (those of fewer than 8 elements would be `constant`), `y` is
# `device`, and built-in values are there because they are named. T, G and SIMDGROUPS are template
# arguments.
BODY = """
  const uint row = threadgroup_position_in_grid.x;  // a threadgroup makes one output
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint words = uint(k) / 8;  // of eight codes, in a row

  // Neighbouring lanes take neighbouring words: a simdgroup reads 128 consecutive bytes.
  float sum = 0.0f;
  for (uint w = simdgroup * 32 + lane; w < words; w += 32 * SIMDGROUPS) {
    const uint word = codes[row * words + w];
    float products = 0.0f;
    for (uint j = 0; j < 8; ++j) products = fma(float(x[8 * w + j]), int4_at(word, j), products);
    sum = fma(products, float(scales[row * (uint(k) / G) + 8 * w / G]), sum);  // eight codes never straddle a group
  }

  // 32 lanes add up without memory; the simdgroups meet in threadgroup memory, behind a barrier that all threads reach.
  threadgroup float partial[SIMDGROUPS];
  sum = simd_sum(sum);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane == 0) {
    float total = 0.0f;
    for (uint s = 0; s < SIMDGROUPS; ++s) total += partial[s];
    y[row] = T(total);
  }
"""


def matvec(x: mx.array, codes: mx.array, scales: mx.array, metal_kernel: Callable[..., Any] = mx.fast.metal_kernel) -> mx.array:
    """y (n,) of x (k,), codes uint32 (n, k/8) and scales (n, k/G)."""
    n, k = codes.shape[0], codes.shape[1] * 8
    kernel = metal_kernel(
        name="example_matvec", input_names=["codes", "scales", "x", "k"], output_names=["y"], header=HEADER, source=BODY
    )
    (y,) = kernel(
        inputs=[codes, scales, x, mx.array(k, mx.int32)],
        template=[("T", x.dtype), ("G", GROUP), ("SIMDGROUPS", SIMDGROUPS)],
        grid=(n * 32 * SIMDGROUPS, 1, 1),  # threads, not threadgroups
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(n,)],
        output_dtypes=[x.dtype],
    )
    return y


def main(n: int = 96, k: int = 1056, metal_kernel: Callable[..., Any] = mx.fast.metal_kernel) -> float:
    """Quantize a random weight, run the kernel, compare. Returns the largest error as a share of
    its bound.
    """
    rng = np.random.default_rng(0)
    w = hb.quantize(rng.standard_normal((n, k)).astype(np.float32), f"int4:g{GROUP}")
    x = rng.standard_normal(k).astype(np.float16)

    codes = mx.array(np.ascontiguousarray(w.parts["codes"]).view(np.uint32))  # eight codes a word, low nibble first
    y = np.array(matvec(mx.array(x), codes, mx.array(w.parts["scales"]), metal_kernel).astype(mx.float32))

    dense = w.dequantize("float32").astype(np.float64)
    exact, size = dense @ x.astype(np.float64), np.abs(dense) @ np.abs(x.astype(np.float64))
    bound = 2.0**-11 * np.abs(exact) + k * 2.0**-24 * size  # one rounding of float16, k of float32
    worst = float((np.abs(y - exact) / bound).max())
    print(f"{n} × {k}: largest error {worst:.2f} of its bound")
    if worst > 1:
        raise SystemExit("the kernel is wrong")
    return worst


if __name__ == "__main__":
    if not mx.metal.is_available():
        raise SystemExit("MLX has no Metal here: this example needs a Mac (the tests run it on the CPU)")
    main()
