"""Relative squared error of every scale rule, on Gemma 3 270M and on a Gaussian: a table of
docs/formats/policies.md.

    python tools/measure_policies.py gemma-3-270m-q4_k_m.gguf

Error is sum (x − q)² / sum x² over a tensor. The weights are what the file's Q8_0, Q6_K and Q5_0
blocks decode to, so they already lie on a fine grid (8 and 6 bits) or a coarse one (5 bits).
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

from halfbyte.tensor.quantize import quantize

TENSORS = ("token_embd.weight", "blk.0.ffn_down.weight", "blk.8.attn_v.weight", "blk.0.ffn_up.weight", "blk.17.attn_q.weight")
ROWS = 1024
MX = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8")
INT = ((2, 32), (3, 128), (4, 32), (4, 128), (8, 128))
CANDIDATES: list[tuple[str, list[dict]]] = (
    [(w, [{"scale": s} for s in ("floor", "even", "ceil")]) for w in MX]
    + [("mxfp8_e4m3", [{"scale": "even", "even_bits": 1}])]
    + [("nvfp4", [{}, {"scale_floor": 2.0**-6}, {"policy": "modelopt"}, {"policy": "compressed-tensors"}, {"policy": "mlx"}])]
    + [(f"int{b}:g{g}", [{"scale": s} for s in ("max", "half", "edge", "no_clip")]) for b, g in INT]
    + [(f"uint{b}:g{g}", [{"zero": s} for s in ("range", "edge")]) for b, g in INT]
    + [(f"affine{b}:g64", [{"scale": s} for s in ("minmax", "edge")] + [{"policy": "mlx"}]) for b in (2, 3, 4, 8)]
    + [("nf4", [{}, {"nested": True}, {"nested": True, "policy": "bitsandbytes"}])]
    + [(f"hqq{b}:g64", [{"rule": s} for s in ("range", "edge")] + [{"policy": "hqq"}]) for b in (2, 3, 4)]
    + [("fp4:g32", [{}]), ("fp4:g16", [{}]), ("fp8_e4m3", [{}])]
)  # fmt: skip


def weights(path: str) -> dict[str, np.ndarray]:
    """Name and type -> float32 rows."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name in TENSORS:
        t = tensors[name]
        out[f"{name} ({t.tensor_type.name})"] = np.ascontiguousarray(gguf.quants.dequantize(t.data[:ROWS], t.tensor_type))
    out["Gaussian"] = np.random.default_rng(0).standard_normal((ROWS, 1024)).astype(np.float32)
    return out


def relative_error(x: np.ndarray, codec: str, options: dict) -> float:
    """sum (x − q)² / sum x²."""
    q = quantize(x, codec, **options).dequantize("float32").astype(np.float64)
    return float(((x - q) ** 2).sum() / (x.astype(np.float64) ** 2).sum())


def main() -> None:
    """Print the table."""
    tensors = weights(sys.argv[1])
    print("| format | rule | " + " | ".join(tensors) + " |")
    print("|---|---|" + "---|" * len(tensors))
    for codec, rules in CANDIDATES:
        for options in rules:
            rule = ", ".join(f"{k}={v}" for k, v in options.items()) or "default"
            errors = " | ".join(f"{relative_error(x, codec, options):.4e}" for x in tensors.values())
            print(f"| {codec} | {rule} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
