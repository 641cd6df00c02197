"""The few PTX instructions of the register decode, run on NumPy arrays, so that its assembly is tested without a GPU.

16-bit pairs are computed in float64, which holds every product and sum of them exactly, and rounded once.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def rounded(v, dtype):
    """float64 to the nearest of dtype, once: float32 on the way to bfloat16 is rounded to odd."""
    if dtype != BF16:
        return v.astype(dtype)
    w = v.astype(np.float32)
    w = np.where(np.abs(w.astype(np.float64)) > np.abs(v), np.nextafter(w, np.float32(0)), w)
    odd = w.view(np.uint32) | (w.astype(np.float64) != v).astype(np.uint32)
    return odd.view(np.float32).astype(BF16)


def halves(word, dtype):
    """Both 16-bit floats of 32-bit words as float64."""
    return [np.asarray(word >> np.uint32(s)).astype(np.uint16).view(dtype).astype(np.float64) for s in (0, 16)]


def joined(low, high, dtype):
    """Two float64 arrays, rounded once, as 32-bit words."""
    low, high = (np.ascontiguousarray(rounded(v, dtype)).view(np.uint16).astype(np.uint32) for v in (low, high))
    return low | (high << np.uint32(16))


def run(text, registers):
    """Execute `text`; `registers` maps $0, $1, ... to uint32 arrays and receives the results."""
    size = next(iter(registers.values())).shape

    def value(name):
        name = name.strip()
        if re.fullmatch(r"0x[0-9a-f]+|\d+", name):
            return np.full(size, int(name, 0), np.uint32)
        return registers[name]

    for statement in re.sub(r"[{}](?=\s|$)|^\{", " ", text).replace("{l, h}", "l|h").split(";"):
        statement = statement.strip().strip("{}").strip()
        if not statement or statement.startswith(".reg"):
            continue
        operation, _, rest = statement.partition(" ")
        target, *sources = (part.strip() for part in rest.split(","))
        dtype = BF16 if "bf16" in operation else np.dtype(np.float16)
        a = [value(s) for s in sources]
        if operation == "mov.b32" and "|" in target:
            registers["l"], registers["h"] = a[0] & np.uint32(0xFFFF), a[0] >> np.uint32(16)
        elif operation == "mov.b32":
            registers[target] = a[0]
        elif operation == "and.b32":
            registers[target] = a[0] & a[1]
        elif operation == "shr.u32":
            registers[target] = a[0] >> a[1]
        elif operation == "mul.lo.u32":
            registers[target] = (a[0].astype(np.uint64) * a[1].astype(np.uint64)).astype(np.uint32)
        elif operation == "prmt.b32":
            both = a[0].astype(np.uint64) | (a[1].astype(np.uint64) << np.uint64(32))
            picks = [(int(sources[2], 0) >> (4 * i)) & 7 for i in range(4)]
            moved = [((both >> np.uint64(8 * pick)) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks)]
            registers[target] = (moved[0] | moved[1] | moved[2] | moved[3]).astype(np.uint32)
        elif operation == "cvt.rn.f16x2.e4m3x2":
            low, high = ((a[0] >> np.uint32(s)).astype(np.uint8).view(E4M3).astype(np.float64) for s in (0, 8))
            registers[target] = joined(low, high, np.dtype(np.float16))
        elif operation == "lop3.b32":
            assert sources[3] == "0xea"
            registers[target] = (a[0] & a[1]) | a[2]
        elif operation.endswith("16x2"):
            pairs = [halves(v, dtype) for v in a]
            formula = {"mul": lambda x, y: x * y, "sub": lambda x, y: x - y, "fma": lambda x, y, z: x * y + z}[operation[:3]]
            registers[target] = joined(*(formula(*(p[i] for p in pairs)) for i in (0, 1)), dtype)
        elif operation == "cvt.f32.f16":
            registers[target] = a[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif operation.startswith("cvt.rn"):
            high, low = (v.view(np.float32).astype(np.float64) for v in a)
            registers[target] = joined(low, high, dtype)
        else:
            f = [v.view(np.float32).astype(np.float64) for v in a]
            formula = {"mul": lambda x, y: x * y, "sub": lambda x, y: x - y, "fma": lambda x, y, z: x * y + z}[operation[:3]]
            registers[target] = formula(*f).astype(np.float32).view(np.uint32)
    return registers
