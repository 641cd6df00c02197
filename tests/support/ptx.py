"""The few PTX instructions of inline assembly, run on NumPy arrays, so that it is tested without a
GPU.

16-bit pairs are computed in float64, which holds every product and sum of them exactly, and rounded
once.
"""

from __future__ import annotations

import operator
import re

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift}
FORMULA = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "fma": lambda x, y, z: x * y + z}


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


def selected(table, a, b, c):
    """lop3.b32: bit 4 a + 2 b + c of the table, for every bit."""
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def products_of_warps(a, b, c):
    """mma.m16n8k16, c + a · b rounded to float32 once: a [..., 4, 32, 2], b [..., 2, 32, 2] and c
    [..., 4, 32] are float64 numbers by register, lane and half of a register -> [..., 4, 32]
    float32.

    Lane 4 g + t: a_i row g + 8 (i % 2), inputs 2 t + 8 (i // 2) and the next; b_i inputs 2 t + 8 i
    and the next, column g; c_i row g + 8 (i // 2), column 2 t + i % 2.
    """
    lead = a.shape[:-3]
    a, b, c = a.reshape(-1, 2, 2, 8, 4, 2), b.reshape(-1, 2, 8, 4, 2), c.reshape(-1, 2, 2, 8, 4)
    rows = a.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 16, 16)
    columns = b.transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)
    y = (rows @ columns + c.transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)).astype(np.float32)
    return y.reshape(-1, 2, 8, 4, 2).transpose(0, 1, 4, 2, 3).reshape(*lead, 4, 32)


def run(text, registers, each=1):
    """Execute `text`; `registers` maps $0, $1, ... to uint32 arrays and receives the results. For
    shuffles the arrays are warps of 32 lanes, `each` elements a lane.
    """
    size = next(iter(registers.values())).shape
    assert text.count("{") == text.count("}"), text
    for statement in text.split(";"):
        statement = statement.lstrip("{} \n").strip()  # scopes; names are told apart anyway
        if statement and not statement.startswith(".reg"):
            _execute(statement, registers, size, each)
    return registers


def _execute(statement, registers, size, each):
    operation, rest = statement.split(None, 1)
    kind, dtype = operation.partition(".")[0], BF16 if "bf16" in operation else np.dtype(np.float16)
    target, *names = re.findall(r"\{[^}]*\}|[^,{}\s]+", rest)
    parts = [name.strip() for name in target.strip("{}").split(",")]

    def value(name):
        if name.startswith("{"):
            low, high = (value(n.strip()) for n in name[1:-1].split(","))
            return low & np.uint32(0xFFFF) | high << np.uint32(16)
        if name in registers:
            return registers[name]
        return np.full(size, np.float32(name).view(np.uint32) if "." in name else int(name, 0), np.uint32)

    a = [value(n) for n in names]
    if operation == "mov.b32" and len(parts) == 2:
        registers[parts[0]], registers[parts[1]] = a[0] & np.uint32(0xFFFF), a[0] >> np.uint32(16)
        return
    if operation in ("mov.b32", "cvt.u32.u16"):
        out = a[0]
    elif operation == "cvt.u16.u32":
        out = a[0] & np.uint32(0xFFFF)
    elif kind in BITWISE:
        out = BITWISE[kind](*a)
    elif operation in ("add.u32", "sub.u32", "mul.lo.u32"):
        out = FORMULA[kind](*(v.astype(np.uint64) for v in a)).astype(np.uint32)
    elif operation == "prmt.b32":
        both = a[0].astype(np.uint64) | (a[1].astype(np.uint64) << np.uint64(32))
        out = np.zeros(size, np.uint64)
        for i in range(4):
            pick = (a[2] >> np.uint32(4 * i)).astype(np.uint64)
            byte = (both >> (np.uint64(8) * (pick & np.uint64(7)))) & np.uint64(255)
            sign = np.where(byte > 127, np.uint64(255), np.uint64(0))  # bit 3 of a selector spreads the sign
            out |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * i)
        out = out.astype(np.uint32)
    elif operation == "shf.r.wrap.b32":
        both = a[0].astype(np.uint64) | (a[1].astype(np.uint64) << np.uint64(32))
        out = (both >> (a[2] & np.uint32(31)).astype(np.uint64)).astype(np.uint32)
    elif operation == "shfl.sync.idx.b32":
        assert [int(v.flat[0]) for v in a[2:]] == [31, 0xFFFFFFFF]
        lanes, index = a[0].reshape(-1, 32, each), (a[1] & np.uint32(31)).reshape(-1, 32, each)
        out = np.take_along_axis(lanes, index.astype(np.int64), 1).reshape(size)
    elif operation == "cvt.rn.f16x2.e4m3x2":
        low, high = ((a[0] >> np.uint32(s)).astype(np.uint8).view(E4M3).astype(np.float64) for s in (0, 8))
        out = joined(low, high, np.dtype(np.float16))
    elif operation == "lop3.b32":
        out = selected(int(names[3], 0), *a[:3])
    elif operation.endswith("16x2"):
        pairs = [halves(v, dtype) for v in a]
        out = joined(*(FORMULA[kind](*(p[i] for p in pairs)) for i in (0, 1)), dtype)
    elif operation == "cvt.f32.f16":
        out = a[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    elif operation in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
        high, low = (v.view(np.float32).astype(np.float64) for v in a)
        out = joined(low, high, dtype)
    elif operation.endswith(".f32") and kind in FORMULA:
        out = FORMULA[kind](*(v.view(np.float32).astype(np.float64) for v in a)).astype(np.float32).view(np.uint32)
    else:
        raise NotImplementedError(statement)
    registers[target] = out
