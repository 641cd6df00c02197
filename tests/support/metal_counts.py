"""What each product kernel does for one tile, counted by running it on the CPU build: the table of
docs/design/metal.md.

`PYTHONPATH=src:tests python -m metal_counts` prints it.
"""

from __future__ import annotations

import numpy as np

from halfbyte.backends.metal import kernels
from halfbyte.backends.metal.source import Kernel, whole_source
from halfbyte.formats import format_named
from support.metal_cpu.machine import Library, compile_source

M, N, K = 64, 64, 256
"""One tile of the tiled kernels, eight steps of 32 inputs."""
FORMAT = format_named("fp4", 64)
KERNELS: dict[str, Kernel] = {
    "gemm_fp4_single_stage": kernels.gemm_single_stage(FORMAT, "float16"),
    "gemm_fp4": kernels.gemm_double_buffered(FORMAT, "float16"),
    "gemm_fp4_striped": kernels.gemm_striped(FORMAT, "float16"),
    "gemm_fused_fp4": kernels.gemm_fused(FORMAT, "float16"),
    "gemm_fused_wide_fp4": kernels.gemm_fused(FORMAT, "float16", "wide"),
    "gemm_fused_wide_fp4_threadgroup": kernels.gemm_fused(FORMAT, "float16", "wide", "threadgroup"),
}
HEADINGS = (
    "kernel", "threadgroup bytes", "threadgroup barriers", "simdgroup barriers", "matrix products", "word reads a weight",
    "scale reads a group", "threadgroup accesses a weight",
)  # fmt: skip


def counted() -> list[list[str]]:
    """Rows of the table: barriers and products of a simdgroup per 32 inputs, reads by all lanes
    together.
    """
    library: Library = compile_source(whole_source(*KERNELS.values()))
    rows = []
    for label, kernel in KERNELS.items():
        library.run(kernel.name, _arguments(kernel), (128, 1, 1), (128, 1, 1))
        c, steps = library.counts, K // 32
        shared = sum(v for name, v in c.items() if name.split()[0] in ("tiles", "x_tile", "stages", "table"))
        rows.append([
            label, f"{library.threadgroup_bytes(kernel.name):,}", f"{c['threadgroup_barrier'] / 128 / steps:.3g}",
            f"{c['simdgroup_barrier'] / 128 / steps:.3g}", f"{c['matrix product'] / 128 / steps:.3g}",
            f"{c['codes reads'] / (N * K):.3g}", f"{c['scales reads'] / (N * K / 64):.3g}", f"{shared / (N * K):.3g}",
        ])  # fmt: skip
    return rows


def _arguments(kernel: Kernel) -> list[object]:
    rng = np.random.default_rng(0)
    rows = {"units": K // 8, "groups": K // 64, "m": M, "n": N, "x_row": K, "has_bias": 0, "per_stripe": K // 32}
    strides = {"word_n": K // 8, "word_k": 1, "scale_n": K // 64, "scale_g": 1}
    fused = "word_n" in kernel.ints
    codes = rng.integers(0, 1 << 32, (N, K // 8), dtype=np.uint32)
    scales = rng.random((N, K // 64)).astype(np.float16)
    arrays: dict[str, np.ndarray] = {
        "codes": codes if fused else codes.view(np.uint8), "scales": scales, "addends": scales,
        "x": rng.random((M, K)).astype(np.float16), "bias": np.zeros(8, np.float32), "factors": np.ones(8, np.float32),
        "y": np.empty((M, N), np.float16), "pieces": np.empty((1, M, N), np.float32),
    }  # fmt: skip
    numbers = [(rows | strides)[i] for i in kernel.ints]
    return [
        *(arrays[b.name] for b in kernel.inputs),
        *numbers,
        *(np.ones(1, np.float32) for _ in kernel.floats),
        *(arrays[b.name] for b in kernel.outputs),
    ]


def table() -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in counted())])


if __name__ == "__main__":
    print(table())
