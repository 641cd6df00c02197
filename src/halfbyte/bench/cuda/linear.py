"""`linear`, `dequantize` and `experts` on an NVIDIA GPU beside cuBLAS and the other libraries that
are installed, in one run.

    python -m halfbyte.bench.cuda.linear --shape 14336,4096 --m 1,4,16,64 \\
        --format int4:g128,mxfp4 --experts 1,16

Protocol: every call of a measurement uses another random weight, together at least 256 MB, so that
no weight is still in the last-level cache; all calls are captured in one CUDA graph; the result is
the median of nine replays. The limit is the best of several read kernels in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import triton

import torch

from ...backends import ACTIVATIONS, Call, Prepared
from ...backends.cuda import CUDABackend, launch
from ...backends.cuda.moe import mixture
from ...backends.cuda.moe.routing import top_k
from ...backends.cuda.tuning.mma_tiles import FragmentTile, Tile
from ...backends.cuda.weight import CudaWeight, nbytes, to_device
from ..records import rates
from ..weights import random_weight
from .peers import PEERS, TritonKernels, TritonKernelsExperts
from .timing import ROTATE_BYTES, UNFIT, copies, graph_time_us, lane_order, limits, read_kernel, stack_of


def candidates(kind: str, words: int, m: int) -> list[Any]:
    """Tiles worth trying for `--tune`."""
    if kind == "fragments":
        # At k = 4096 sixteen warps by four units, or eight by eight, give a warp its inputs in one
        # step.
        if m <= 8:
            return [FragmentTile(*t) for t in ((1, 1, 16, 1, 4, 1), (2, 1, 16, 1, 4, 1), (1, 1, 8, 1, 8, 2), (1, 1, 8, 1, 8, 3))]
        if m <= 16:
            some: list[Any] = [(1, 2, 16, 1, 4, 1), (1, 2, 4, 1, 4, 0), (2, 2, 4, 2, 2, 0), (2, 2, 8, 1, 4, 0)]
            return [replace(FragmentTile(*t), scaled=scaled) for t in some for scaled in (False, True)]
        wide: list[Any] = [(2, 8, 4, 1, 1), (4, 4, 4, 1, 1), (2, 4, 4, 2, 2), (2, 4, 4, 1, 2), (1, 8, 4, 1, 1), (1, 8, 8, 1, 1)]
        wide += [(2, 8, 8, 1, 1), (4, 8, 4, 1, 1), (2, 8, 2, 2, 1)]
        scaled = [replace(FragmentTile(*t), scaled=True) for t in wide]
        return [*scaled, FragmentTile(2, 8, 4, 1, 1), FragmentTile(2, 4, 4, 2, 2)]
    if kind == "matvec":
        widths = sorted({min(b, 1 << max(5, (words - 1).bit_length())) for b in (128, 256, 512, 1024)})
        return [
            Tile(r, c, w)
            for r in (2, 4, 8, 16)
            for c in widths
            for w in (1, 2, 4, 8)
            if 1024 <= r * c * 32 // w // 32 * 32 <= 65536
        ]
    tokens = 16 if m <= 16 else 32
    return [
        Tile(r, c, w, tokens, st, sp)
        for r in (16, 32, 64, 128)
        for c in (8, 16, 32)
        for w in (4, 8)
        for st in (2, 3, 4)
        for sp in (1, 2, 4, 8)
        if r * c <= 2048 and sp <= max(1, words // c // 2)
    ]


def compile_tile(job: tuple[str, int, int, str, Any, str]) -> None:
    """Compile one kernel into Triton's cache; run by many processes at once before anything is
    timed.
    """
    codec, k, m, kind, tile, dtype = job
    with contextlib.suppress(*UNFIT):  # reported when it is timed
        x = torch.zeros(m, k, device="cuda", dtype=getattr(torch, dtype))
        if kind == "experts":
            block_of(codec, k, 2, 2, x.dtype)[0](x, torch.zeros(m, 2, device="cuda"))
            return
        w = to_device(random_weight(codec, 256, k, 0), "cuda")
        product(x, w) if kind == "linear" else getattr(launch, kind)(x, w, None, tile)


def product(x: torch.Tensor, w: CudaWeight, activations: str = "exact") -> torch.Tensor:
    """What `halfbyte.linear` does on this device."""
    y: torch.Tensor = CUDABackend().linear(x, Prepared("cuda", w.format, w.shape, w, 0), None, activations=activations)
    return y


def time_rounded(
    mode: str, xs: dict[int, torch.Tensor], ws: list[CudaWeight], row: dict[str, Any], limit: dict[str, float]
) -> None:
    """Report products with activations rounded in the call, for each m; a refusal once, on standard
    error.
    """
    w = ws[0]
    why = CUDABackend().refuses(Call("linear", w.format, "float16", mode))
    if why:
        print(f"{w.format} with activations={mode!r} is left out: {why}", file=sys.stderr)
        return
    size = nbytes(w)
    for m, x in xs.items():
        us = graph_time_us([partial(product, x, w, mode) for w in ws], 5)
        full = {**row, "kind": mode, "peer": "halfbyte", "bits": 8 * size / (w.shape[0] * w.shape[1]), "m": m}
        report(**rates(full, size, us / 1e6, limit), dtype=str(x.dtype)[6:])


def kinds_of(w: CudaWeight, m: int) -> list[str]:
    """Schedules with tiles of their own that serve a weight at m tokens."""
    return ["fragments"] if w.fragments else (["matvec"] if m <= 8 else []) + (["matmul"] if m > 1 else [])


Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def block_of(codec: str, hidden: int, experts: int, top: int, dtype: torch.dtype) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """The mixture of experts of gpt-oss as a function (x, router logits) -> y, and its two biases:
    top-k, hidden -> 2 hidden, clamped swiglu, -> hidden.
    """
    up = stack_of(to_device(random_weight(codec, 2 * hidden, hidden, 0), "cuda"), experts)
    down = stack_of(to_device(random_weight(codec, hidden, hidden, 1), "cuda"), experts)
    bu, bd = (torch.randn(experts, n, device="cuda", dtype=dtype) for n in (2 * hidden, hidden))

    def block(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        share, index = top_k(logits, top)
        return mixture(x, ((up, bu),), down, index, share, "swiglu_clamped", True, bd)

    return block, bu, bd


def time_experts(codec: str, tokens: list[int], dtype: torch.dtype, experts: int = 32, top: int = 4, hidden: int = 2880) -> None:
    """Time the mixture of experts of gpt-oss-20b (32 experts, top 4, 2880), each call with other
    logits, and triton_kernels' one where it is installed, on the same weights, with scales laid
    out for 4 and for 8 warps.
    """
    block, bu, bd = block_of(codec, hidden, experts, top, dtype)
    peers = []
    if codec == "mxfp4" and TritonKernels().reason() is None:
        codes = [torch.randint(0, 256, (experts, n, hidden // 2), device="cuda", dtype=torch.uint8) for n in (2 * hidden, hidden)]
        scales = [torch.randint(115, 122, (*c.shape[:2], hidden // 32), device="cuda", dtype=torch.uint8) for c in codes]
        pairs = list(zip(codes, scales, strict=True))
        peers = [(warps, TritonKernelsExperts(pairs[0], pairs[1], bu, bd, top, warps)) for warps in (4, 8)]

    for m in tokens:
        logits = [torch.randn(m, experts, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
        row = {"record": "experts", "op": "experts", "device": "cuda", "experts": experts, "top": top, "k": hidden, "m": m}
        times = {}
        for warps, peer in peers:
            wide = torch.randn(m, hidden, device="cuda", dtype=torch.bfloat16) * 0.1
            times[warps] = graph_time_us([partial(peer, wide, one) for one in logits], 5)
            report(**row, peer=TritonKernelsExperts.name, format=codec, warps=warps, dtype="bfloat16", time_us=times[warps])
        x = torch.randn(m, hidden, device="cuda", dtype=dtype) * 0.1
        us = graph_time_us([partial(block, x, one) for one in logits], 5)
        ratio = {"ratio": us / min(times.values()), "best_peer": TritonKernelsExperts.name} if times else {}
        report(**row, peer="halfbyte", format=codec, dtype=str(dtype)[6:], time_us=us, **ratio)


def time_peers(
    names: list[str], n: int, k: int, ms: list[int], limit: dict[str, float], common: dict[str, Any]
) -> dict[int, float]:
    """Report a record for each peer and m; returns the least time for each m. What is not installed
    is reported once, on standard error.
    """
    best: dict[int, float] = {}
    for name in names:
        peer = PEERS[name]
        why = peer.reason() or peer.refuses(n, k)
        if why:
            print(f"{name} is left out at {n}x{k}: {why}", file=sys.stderr)
            continue
        size = n * k * peer.bits / 8
        weights = [peer.weight(n, k) for _ in range(max(2, min(64, int(ROTATE_BYTES // size) + 1)))]
        for m in ms:
            us = graph_time_us(peer.calls(torch.randn(m, k, device="cuda").to(peer.dtype), weights), 5)
            best[m] = min(us, best.get(m, us))
            row = {**common, "peer": name, "format": peer.format, "bits": peer.bits, "m": m, "n": n, "k": k}
            report(**rates(row, size, us / 1e6, limit))
    return best


def print_line(row: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


_sink: ContextVar[Callable[[dict[str, Any]], None]] = ContextVar("_sink", default=print_line)


def report(**row: Any) -> None:
    """Pass one record to the caller of `main`."""
    _sink.get()(row)


def main(arguments: Sequence[str] | None = None, sink: Callable[[dict[str, Any]], None] = print_line) -> None:
    """Command line; each record goes to `sink`. Records "limits" and "time" have the keys of
    `records`.
    """
    _sink.set(sink)
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shape", default="14336,4096;4096,4096")
    p.add_argument("--m", default="1,4,16,64")
    p.add_argument("--format", default="int4:g128,uint4:g128,mxfp4,nvfp4,affine4:g64")
    p.add_argument("--tune", action="store_true")
    p.add_argument("--all", action="store_true", help="a line for every tile tried, not the best alone")
    p.add_argument("--experts", default="", help="tokens, such as 1,4,16,64,256: time the expert block too")
    p.add_argument("--peers", default=",".join(name for name in PEERS if name != "cublas-fp16"), help="beside cuBLAS")
    p.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    p.add_argument("--dequantize", action="store_true")
    p.add_argument("--activations", default="exact", help=f"modes with commas between: {', '.join(ACTIVATIONS)}")
    p.add_argument("--jobs", type=int, default=1, help="processes that compile before the timing starts")
    args = p.parse_args(arguments)
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shape.split(";")]
    ms = [int(v) for v in args.m.split(",")]
    formats = [f for f in args.format.split(",") if f]
    dtype = getattr(torch, args.dtype)
    peers = [name for name in args.peers.split(",") if name]
    if args.jobs > 1:
        jobs = []
        for codec in formats:
            for k in sorted({k for _, k in shapes}):
                one = to_device(random_weight(codec, 16, k, 0), "cpu", lane_order())
                for m in ms:
                    for kind in kinds_of(one, m) if args.tune else ["linear"]:
                        tiles = candidates(kind, one.words, m) if args.tune else [None]
                        jobs += [(codec, k, m, kind, tile, args.dtype) for tile in tiles]
            if args.experts:
                jobs += [(codec, 2880, int(m), "experts", None, args.dtype) for m in args.experts.split(",")]
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            pool.map(compile_tile, jobs, chunksize=1)
    limit = limits()
    name = torch.cuda.get_device_name()
    report(
        record="limits",
        device="cuda",
        name=name,
        torch=torch.__version__,
        triton=triton.__version__,
        gflops_of="bfloat16 product",
        **limit,
    )
    common = {"record": "time", "op": "linear", "device": "cuda", "kind": "half"}
    for n, k in shapes:
        dense = [
            torch.randn(n, k, device="cuda", dtype=torch.float16) for _ in range(max(2, int(ROTATE_BYTES // (2 * n * k)) + 1))
        ]
        xs = {m: torch.randn(m, k, device="cuda", dtype=dtype) for m in ms}
        slabs = [
            torch.randint(0, 1 << 30, (n * k // 8192 * 1024,), device="cuda", dtype=torch.int32)
            for _ in range(int(ROTATE_BYTES * 2 // (n * k)) + 1)
        ]
        sink = torch.zeros(4, device="cuda", dtype=torch.int32)
        plain = min(
            graph_time_us([partial(read_kernel[(len(s) // b,)], s, sink, BLOCK=b, num_warps=4) for s in slabs])
            for b in (1024, 2048, 4096)
        )
        report(peer="read alone, n·k/2 bytes", n=n, k=k, time_us=plain, gbps=n * k / 2e3 / plain)
        del slabs
        base = {}
        for m in ms:
            base[m] = graph_time_us([partial(torch.nn.functional.linear, xs[m].half(), w) for w in dense])
            report(
                **rates(
                    {**common, "peer": "cublas-fp16", "format": "float16", "bits": 16, "m": m, "n": n, "k": k},
                    2 * n * k,
                    base[m] / 1e6,
                    limit,
                )
            )
        del dense
        best = time_peers(peers, n, k, ms, limit, common)
        for codec in formats:
            one = to_device(random_weight(codec, n, k, 0), "cuda")
            size = nbytes(one)
            ws = copies(one, max(4, min(64, int(ROTATE_BYTES // size) + 1)))
            if args.dequantize:
                for to in (torch.float16, torch.bfloat16):
                    us = graph_time_us([partial(launch.dequantize, w, to) for w in ws[:8]])
                    gbps = (size + 2 * n * k) / us / 1e3
                    report(
                        op="dequantize",
                        format=codec,
                        n=n,
                        k=k,
                        dtype=str(to)[6:],
                        time_us=us,
                        gbps=gbps,
                        fraction=gbps / limit["copy_gbps"],
                    )
            for mode in args.activations.split(","):
                if mode != "exact":
                    time_rounded(mode, xs, ws, {**common, "format": codec, "n": n, "k": k}, limit)
            for m in ms if "exact" in args.activations else []:
                for kind in kinds_of(one, m) if args.tune else ["linear"]:
                    run = product if kind == "linear" else getattr(launch, kind)
                    results = []
                    for tile in candidates(kind, one.words, m) if args.tune else [None]:
                        options = () if kind == "linear" else (None, tile)
                        try:
                            us = graph_time_us([partial(run, xs[m], w, *options) for w in ws], 5)
                        except UNFIT as error:
                            results.append((1e9, tile, repr(error)[:120]))
                            continue
                        results.append((us, tile, ""))
                    results.sort(key=lambda r: r[0])
                    for us, tile, note in results if args.all else results[:1]:
                        row = {**common, "peer": "halfbyte", "format": codec, "bits": 8 * size / (n * k), "m": m, "n": n, "k": k}
                        if m in best:
                            row["ratio_packed"] = us / best[m]
                        report(
                            **rates(row, size, us / 1e6, limit),
                            dtype=args.dtype,
                            schedule=kind,
                            ratio=us / base[m],
                            best_peer="cublas-fp16",
                            tile=str(tile),
                            note=note,
                        )
                    if results[-1][0] >= 1e9:
                        report(
                            failed=sum(r[0] >= 1e9 for r in results),
                            of=len(results),
                            example=results[-1][2],
                            tile=str(results[-1][1]),
                        )
    for codec in formats if args.experts else []:
        time_experts(codec, [int(v) for v in args.experts.split(",")], dtype)


if __name__ == "__main__":
    main()
