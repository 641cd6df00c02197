"""Four-bit codes decoded by bit operations and by tables in registers, shared, constant and global
memory, on an NVIDIA GPU.

    python tools/cuda_decoders.py --shape 14336,4096

The same codes with float32 scales in groups of 32, in plane order: dense to float16, a vector
product (m = 1) and a small product (m = 16) by the same kernels; then `dequantize` with 2, 4 and 8
values a thread. Instructions come from the compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl

import torch
from halfbyte.backends.cuda import launch
from halfbyte.backends.cuda.decode import element, scale_f32
from halfbyte.backends.cuda.lookups import PLACES, byte_planes
from halfbyte.backends.cuda.portable.decode_tile import Format, finish
from halfbyte.backends.cuda.portable.dequantize import dequantize_kernel
from halfbyte.backends.cuda.portable.matmul import MatmulTile, matmul_kernel
from halfbyte.backends.cuda.portable.matvec import matvec_kernel
from halfbyte.backends.cuda.weight import CudaWeight, scale_groups, to_device
from halfbyte.bench.cuda.timing import ROTATE_BYTES, copies, graph_time_us
from halfbyte.bench.weights import random_weight
from halfbyte.numerics.minifloat import element_table

DECODERS: dict[str, tuple[int, str]] = {
    "u4 bits, two at a time": (0, "uint"), "u4 bits, one by one": (0, ""),
    "E2M1 bits, two at a time": (2, "e2m1"), "E2M1 bits, one by one": (2, ""),
    "table in memory": (8, ""), **{f"table: {place}": (kind, "") for place, kind in PLACES.items()},
}  # fmt: skip
"""Name -> (element kind, element whose row of backends/cuda/decoders.py is used)."""


@triton.jit
def narrow_kernel(OUT, CODES, S, k, KIND: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0): VALUES neighbours a thread, from one load of 4 · VALUES bits to one store;
    scales in groups of 32.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(CODES + row * (k // VALUES) + i).to(tl.int32)
    s = scale_f32(tl.load(S + row * (k // 32) + i * VALUES // 32), 0)
    v0 = finish(element(w & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
    v1 = finish(element((w >> 4) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
    out = tl.join(v0, v1)
    if VALUES >= 4:
        v2 = finish(element((w >> 8) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        v3 = finish(element((w >> 12) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        out = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    if VALUES == 8:
        v4 = finish(element((w >> 16) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        v5 = finish(element((w >> 20) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        v6 = finish(element((w >> 24) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        v7 = finish(element((w >> 28) & 15, S, KIND, 4), s, s, 1.0, 0).to(tl.float16)
        a = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        out = tl.join(a, tl.join(tl.join(v1, v5), tl.join(v3, v7)))
    at = tl.program_id(1) * BLOCK * VALUES + tl.arange(0, BLOCK * VALUES)
    tl.store(OUT + row * k + at, tl.reshape(out, (BLOCK * VALUES,)))


def instructions(kernel: Any) -> int | None:
    """Instructions of a compiled kernel, no-operations not counted; None where no disassembler is
    at hand.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            text = subprocess.run(["cuobjdump", "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    except (OSError, KeyError, subprocess.CalledProcessError):
        return None
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", text)
    return sum(not name.startswith(("NOP", "BRA")) for name in found)


def weights_for(n: int, k: int, kind: int) -> list[CudaWeight]:
    """Copies of one weight whose table is the one that `kind` reads."""
    q = to_device(random_weight("nf4:g32", n, k, 0), "cuda", lanes=False)
    if kind == PLACES["bytes"]:
        planes = torch.from_numpy(byte_planes(element_table("e2m1", 4).astype(np.float16)))
        q = replace(q, table=planes.cuda().view(torch.float32))
    return copies(q, int(ROTATE_BYTES // (n * k // 2)) + 1)


def time_decoders(n: int, k: int) -> None:
    """One JSON line a decoder: microseconds and instructions a weight, dense, m = 1 and m = 16."""
    x = torch.randn(16, k, device="cuda", dtype=torch.float16)
    out, y = torch.empty(n, k, device="cuda", dtype=torch.float16), torch.empty(16, n, device="cuda", dtype=torch.float16)
    for name, (kind, element_name) in DECODERS.items():
        ws = weights_for(n, k, kind)
        form = launch.format_of(ws[0], packed=False)._replace(kind=kind, **launch.word_decoders(4, element_name))

        def dense(w: CudaWeight, form: Format = form) -> Any:
            return dequantize_kernel[(n // 8, w.words // 64)](
                out,
                w.scales,
                launch.pointers_of(w),
                n,
                k,
                scale_groups(w),
                1.0,
                format=form,
                GATHER=False,
                BN=8,
                BW=64,
                num_warps=4,
                enable_fp_fusion=False,
            )

        def vector(w: CudaWeight, form: Format = form) -> Any:
            return matvec_kernel[(n // 8, 1)](
                y,
                x,
                w.scales,
                launch.pointers_of(w),
                n,
                k,
                scale_groups(w),
                1.0,
                format=form,
                HAS_BIAS=False,
                BN=8,
                BC=512,
                num_warps=4,
                enable_fp_fusion=False,
            )

        def small(w: CudaWeight, form: Format = form) -> Any:
            return matmul_kernel[(n // 32, 1, 1)](
                y,
                x,
                w.scales,
                launch.pointers_of(w),
                (y, y),
                16,
                n,
                k,
                scale_groups(w),
                1.0,
                format=form,
                tile=MatmulTile(False, 1, 16, 32, 16),
                num_warps=4,
                num_stages=3,
                enable_fp_fusion=False,
            )

        row: dict[str, Any] = {"decoder": name, "n": n, "k": k}
        for what, call, values in (("dequantize", dense, 32), ("m1", vector, 8 * 512 * 8 // 128), ("m16", small, 32)):
            count = instructions(call(ws[0]))
            row[f"{what}_us"] = round(graph_time_us([partial(call, w) for w in ws], 5), 2)
            row[f"{what}_instructions"] = None if count is None else round(count / values, 1)
        print(json.dumps(row), flush=True)


def time_widths(n: int, k: int) -> None:
    """`dequantize` with 2, 4 and 8 values a thread, bit operations, one JSON line each."""
    ws = weights_for(n, k, 8)
    out = torch.empty(n, k, device="cuda", dtype=torch.float16)
    for kind, name in ((0, "u4"), (2, "E2M1")):
        for values, dtype in ((2, torch.uint8), (4, torch.int16), (8, torch.int32)):
            best = 1e9
            for block in (128, 256, 512):
                for warps in (4, 8):
                    if (k // values) % block:
                        continue
                    calls: list[Any] = [
                        partial(
                            narrow_kernel[(n, k // values // block)],
                            out,
                            w.planes[4].view(dtype),
                            w.scales,
                            k,
                            kind,
                            values,
                            block,
                            num_warps=warps,
                            enable_fp_fusion=False,
                        )
                        for w in ws
                    ]
                    best = min(best, graph_time_us(calls, 3))
            row = {"op": "dequantize", "decoder": name, "values_a_thread": values, "time_us": round(best, 2)}
            print(json.dumps(row), flush=True)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shape", default="14336,4096")
    n, k = map(int, p.parse_args().shape.split(","))
    row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps(row), flush=True)
    time_decoders(n, k)
    time_widths(n, k)


if __name__ == "__main__":
    main()
