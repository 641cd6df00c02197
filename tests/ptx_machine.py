"""Compiled PTX of the CUDA kernels, run on the CPU: what the assembler is given, thread by thread, without a GPU.

Registers are NumPy arrays over all threads of all blocks of a launch. The threads furthest behind run first (those with the lowest
program counter), so that branches meet again. Global memory is the host memory of the tensors that were passed: an access outside
them, or across its alignment, is an error. Shared memory begins as NaN, and an access that another warp's of the same interval
between barriers contradicts is an error too. Sums of `mma` are made in float64 and rounded once, fused multiply-adds as well.
What it does not know raises NotImplementedError with its text. It says nothing about time, and nothing about the order in which
blocks run.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
from collections import defaultdict

import ml_dtypes
import numpy as np

from ptx import BF16, rounded

BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES = {
    **{f"{letter}{bits}": np.dtype(BITS[bits]) for letter in "bu" for bits in BITS},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in BITS},
    "f16": np.dtype(np.float16), "bf16": BF16, "f16x2": np.dtype(np.float16), "bf16x2": BF16,
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "pred": np.dtype(bool),
}  # fmt: skip
SHARED = 1 << 18
RUNNING, WAITING, DONE = 0, 1, 2
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def wide(a):
    """Numbers of any type as float64; 16-bit patterns of bfloat16 quickly."""
    if a.dtype == BF16:
        return (a.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return a.astype(np.float64)


def split(text):
    """Operands at the top level of braces and brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


class Entry:
    """One kernel: parameters, registers by index, and instructions as (guard, its sense, operation, operands)."""

    def __init__(self, text):
        text = text.split("// -- End function")[0]
        self.name = re.search(r"\.entry\s+(\w+)", text).group(1)
        head, body = text[text.index(".entry") :].split("{", 1)
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,)]*?(\w+)\s*(?:[,)]|$)", head.split("(", 1)[1], re.M)
        body = re.sub(r"//[^\n]*|^\s*\.(?:loc|pragma|file|section)[^\n]*", "", body, flags=re.M)
        self.widths, self.code, self.labels, scopes, self.statics = [], [], {}, [{}], {}
        for name in re.findall(r"\.shared[^;]*?(\w+)\[", text[: text.index(".entry")]):
            self.statics[name] = 0
        for statement in body.split(";"):
            statement = statement.strip()
            while statement and (label := re.match(r"([{}])|(\$?[\w.$]+):(?!:)", statement)):
                if label[1]:
                    scopes = [*scopes, {}] if label[1] == "{" else scopes[:-1]
                else:
                    self.labels[label[2]] = len(self.code)
                statement = statement[label.end() :].strip()
            if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S):
                for name in declared[2].split(","):
                    if many := re.match(r"\s*(%\w+)<(\d+)>", name):
                        scopes[-1].update({f"{many[1]}{i}": self.register(declared[1]) for i in range(int(many[2]))})
                    else:
                        scopes[-1][name.strip()] = self.register(declared[1])
            elif statement:
                guard, sense, operation, rest = re.match(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.S).group(2, 1, 3, 4)
                names = {name: index for scope in scopes for name, index in scope.items()}
                operands = [self.operand(o, names) for o in split(rest)]
                self.code.append((None if guard is None else names[guard], sense == "", operation, operands, statement))
        self.code.append((None, True, "ret", [], "ret"))

    def register(self, kind):
        self.widths.append(TYPES[kind])
        return len(self.widths) - 1

    def operand(self, text, names):
        """int: a register; list: a vector; ("[", base, offset): a place; others: text."""
        if text.startswith("{"):
            return [self.operand(o, names) for o in split(text[1:-1])]
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return ("[", self.operand(base.strip(), names), int(offset or "0", 0))
        if "|" in text:
            return [self.operand(o.strip(), names) for o in text.split("|")]
        return names.get(text, text)


class Memory:
    """Host memory of the tensors passed, by address."""

    def __init__(self, spans):
        merged = []
        for low, high in sorted(set(spans)):
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.lows = np.array([low for low, _ in merged], np.uint64)
        self.highs = np.array([high for _, high in merged], np.uint64)
        self.bytes = [np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8) for low, high in merged]

    def pieces(self, at, size, dtype):
        """(which threads, a span's elements of dtype, their indices) for accesses of `size` bytes."""
        which = np.searchsorted(self.lows, at, "right") - 1
        bad = (which < 0) | (at + np.uint64(size) > self.highs[which]) | (at % np.uint64(size) != 0)
        if bad.any():
            i = int(bad.argmax())
            where = int(at[i]) - int(self.lows[max(which[i], 0)])
            raise IndexError(f"{size} bytes at {where} of a span of {len(self.bytes[max(which[i], 0)])} bytes")
        for one in np.unique(which):
            mine = np.nonzero(which == one)[0]
            low = int(self.lows[one])
            skew = -low % dtype.itemsize  # spans of views may begin anywhere; accesses are aligned
            held = self.bytes[one][skew : skew + (len(self.bytes[one]) - skew) // dtype.itemsize * dtype.itemsize]
            yield mine, held.view(dtype), ((at[mine] - np.uint64(low + skew)) // np.uint64(dtype.itemsize)).astype(np.int64)


class Machine:
    """Blocks of a launch side by side. `run` executes an entry over them."""

    def __init__(self, entry, threads, blocks, grid, arguments, memory):
        self.entry, self.threads, self.memory, self.arguments = entry, threads, memory, arguments
        self.size = threads * len(blocks)
        self.r = [np.zeros(self.size, w) for w in entry.widths]
        tid = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        index = [np.repeat(np.array(b, np.uint32), threads) for b in zip(*blocks, strict=True)]
        zero = np.zeros(self.size, np.uint32)
        self.special = {"%tid.x": tid, "%tid.y": zero, "%tid.z": zero, "%ntid.x": zero + np.uint32(threads),
                        "%laneid": tid % np.uint32(32), "%warpid": tid // np.uint32(32)}  # fmt: skip
        for axis, i, n in zip("xyz", index, grid, strict=True):
            self.special[f"%ctaid.{axis}"], self.special[f"%nctaid.{axis}"] = i, zero + np.uint32(n)
        self.block = np.arange(self.size) // threads
        self.warp = np.arange(self.size) // 32
        self.shared = np.full((len(blocks), SHARED), 0xFF, np.uint8).reshape(-1)
        words = len(self.shared) // 4
        self.wrote = np.full(words, -1, np.int64)  # interval · 2^20 + warp of the last writer
        self.read_high, self.read_low = self.wrote.copy(), self.wrote.copy()  # the same of readers, and with 2^20 − 1 − warp
        self.interval = np.zeros(len(blocks), np.int64)
        self.state = np.zeros(self.size, np.int8)
        self.barrier = np.full(self.size, -1)
        self.pc = np.zeros(self.size, np.int64)
        self.constants = {}
        self.steps = [self.decode(*c) for c in entry.code]

    # Values

    def get(self, operand, dtype):
        """An operand as dtype, over all threads: the low bits of a register, or a constant."""
        if isinstance(operand, int):
            v = self.r[operand]
            if v.dtype.itemsize > dtype.itemsize and not (v.dtype.itemsize == 4 and dtype.itemsize == 2 and dtype.kind in "fV"):
                v = v.astype(BITS[8 * dtype.itemsize])
            return v if dtype == bool else v.view(dtype)
        if operand in self.special:
            return self.special[operand].view(dtype)
        key = operand, dtype
        if key not in self.constants:
            self.constants[key] = np.full(self.size, self.number(operand, dtype))
        return self.constants[key]

    def number(self, text, dtype):
        if text in self.entry.statics:
            return np.array(self.entry.statics[text], BITS[8 * dtype.itemsize]).view(dtype)
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return np.array(int(text[2:], 16), np.uint32).view(np.float32).view(dtype if dtype.itemsize == 4 else np.float32).astype(dtype)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return np.array(int(text[2:], 16), np.uint64).view(np.float64).astype(dtype)
        if dtype == bool:
            return bool(int(text))
        return np.array(int(text, 0) & ((1 << (8 * dtype.itemsize)) - 1), BITS[8 * dtype.itemsize]).view(dtype)

    def pair(self, operand, dtype):
        """Two numbers a register, flat."""
        return self.get(operand, np.dtype(np.uint32)).view(dtype)

    def put(self, target, value, mask):
        """Into a register, for the threads of the mask (None: all); narrower values extended by their own sign."""
        if target == "_":
            return
        held = self.r[target]
        if held.dtype != bool:
            bits = 8 * value.dtype.itemsize
            if value.dtype.kind in "fV":
                value = value.view(BITS[bits])
            if value.dtype.itemsize < held.dtype.itemsize and value.size == held.size:
                value = value.astype(held.dtype)
            value = value.view(held.dtype)
        self.r[target] = value if mask is None else np.where(mask, value, held)

    # Instructions

    def decode(self, guard, sense, operation, operands, text):
        name, *rest = operation.split(".")
        make = getattr(self, f"do_{name}", None)
        if make is None:
            raise NotImplementedError(text)
        step = make(rest, operands, text)
        return guard, sense, step if isinstance(step, tuple) else (step, None), text

    def elementwise(self, function, dtype, target, sources, out=None, two=False):
        """A step that computes in dtype (`two` numbers a register) and stores what comes out."""
        get = self.pair if two else self.get
        types = dtype if isinstance(dtype, list) else [dtype] * len(sources)

        def step(mask):
            v = function(*(get(s, t) for s, t in zip(sources, types, strict=True)))
            v = v.astype(out, copy=False) if out is not None else v
            self.put(target, v, mask)

        return step

    def arithmetic(self, rest, o, text, integers, floats):
        """add, sub, mul, fma, min, max: wraparound integers; floats exact in float64 and rounded once."""
        kind = rest[-1]
        dtype, two = TYPES[kind], kind.endswith("x2")
        if "ftz" in rest or "sat" in rest:
            raise NotImplementedError(text)
        if dtype.kind in "iu":
            return self.elementwise(integers, dtype, o[0], o[1:])
        if dtype in (np.float32, np.float64) and integers is not None:
            return self.elementwise(integers, dtype, o[0], o[1:])
        return self.elementwise(lambda *a: rounded(floats(*map(wide, a)), dtype), dtype, o[0], o[1:], two=two)

    def do_add(self, rest, o, text):
        return self.arithmetic(rest, o, text, operator.add, operator.add)

    def do_sub(self, rest, o, text):
        return self.arithmetic(rest, o, text, operator.sub, operator.sub)

    def do_fma(self, rest, o, text):
        return self.arithmetic(rest, o, text, None, lambda a, b, c: a * b + c)

    def do_min(self, rest, o, text):
        f = np.minimum if "NaN" in rest or rest[-1][0] in "us" else np.fmin
        return self.arithmetic([rest[-1]], o, text, f, f)

    def do_max(self, rest, o, text):
        f = np.maximum if "NaN" in rest or rest[-1][0] in "us" else np.fmax
        return self.arithmetic([rest[-1]], o, text, f, f)

    def do_mul(self, rest, o, text):
        if rest[0] == "wide":
            dtype = TYPES[rest[1]]
            out = np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")
            return self.elementwise(lambda a, b: a.astype(out) * b.astype(out), dtype, o[0], o[1:])
        if rest[0] == "hi":
            dtype = TYPES[rest[1]]
            if dtype.itemsize == 8:
                raise NotImplementedError(text)
            out, shift = np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}"), 8 * dtype.itemsize
            return self.elementwise(lambda a, b: (a.astype(out) * b.astype(out) >> out.type(shift)).astype(dtype), dtype, o[0], o[1:])
        return self.arithmetic(rest, o, text, operator.mul, operator.mul)

    def do_mad(self, rest, o, text):
        dtype = TYPES[rest[1]]
        if rest[0] == "lo":
            return self.elementwise(lambda a, b, c: a * b + c, dtype, o[0], o[1:])
        out = np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")
        return self.elementwise(lambda a, b, c: a.astype(out) * b.astype(out) + c, [dtype, dtype, out], o[0], o[1:])

    def do_div(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        if dtype.kind == "f":
            return self.elementwise(np.divide, dtype, o[0], o[1:])

        def divided(a, b):
            q = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
            return np.where((a < 0) != (b < 0), -q, q).astype(dtype)

        return self.elementwise(divided, dtype, o[0], o[1:])

    def do_rem(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        return self.elementwise(lambda a, b: np.fmod(a, np.where(b == 0, 1, b).astype(dtype)), dtype, o[0], o[1:])

    def unary(self, function, kind, o):
        return self.elementwise(function, TYPES[kind], o[0], o[1:], two=kind.endswith("x2"))

    def do_neg(self, rest, o, text):
        return self.unary(operator.neg, rest[-1], o)

    def do_abs(self, rest, o, text):
        return self.unary(np.abs, rest[-1], o)

    def do_ex2(self, rest, o, text):
        return self.unary(lambda a: np.exp2(a.astype(np.float64)).astype(np.float32), rest[-1], o)

    def do_rcp(self, rest, o, text):
        return self.unary(lambda a: (1 / a.astype(np.float64)).astype(a.dtype), rest[-1], o)

    def do_and(self, rest, o, text):
        return self.elementwise(operator.and_, TYPES[rest[-1]], o[0], o[1:])

    def do_or(self, rest, o, text):
        return self.elementwise(operator.or_, TYPES[rest[-1]], o[0], o[1:])

    def do_xor(self, rest, o, text):
        return self.elementwise(operator.xor, TYPES[rest[-1]], o[0], o[1:])

    def do_not(self, rest, o, text):
        return self.elementwise(np.invert, TYPES[rest[-1]], o[0], o[1:])

    def shifted(self, rest, o, left):
        dtype = TYPES[rest[-1]]
        most = 8 * dtype.itemsize

        def function(a, by):
            over = by >= most
            by = np.minimum(by, most - 1).astype(dtype)
            if left:
                return np.where(over, 0, a << by).astype(dtype)
            return np.where(over, a >> dtype.type(most - 1) if dtype.kind == "i" else 0, a >> by).astype(dtype)

        return self.elementwise(function, [dtype, TYPES["u32"]], o[0], o[1:])

    def do_shl(self, rest, o, text):
        return self.shifted(rest, o, True)

    def do_shr(self, rest, o, text):
        return self.shifted(rest, o, False)

    def do_shf(self, rest, o, text):
        def function(low, high, by):
            by = (by & 31 if rest[1] == "wrap" else np.minimum(by, 32)).astype(np.uint64)
            both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
            return ((both << by) >> np.uint64(32) if rest[0] == "l" else both >> by).astype(np.uint32)

        return self.elementwise(function, TYPES["u32"], o[0], o[1:])

    def do_bfe(self, rest, o, text):
        dtype = TYPES[rest[-1]]

        def function(a, at, count):
            if dtype.itemsize == 8 or (at + count > 32).any():
                raise NotImplementedError(text)
            a = a.astype(np.int64) >> at.astype(np.int64) & ((np.int64(1) << count.astype(np.int64)) - 1)
            if dtype.kind == "i":
                top = np.int64(1) << np.maximum(count.astype(np.int64) - 1, 0)
                a = (a ^ top) - top
            return a.astype(dtype)

        return self.elementwise(function, [dtype, TYPES["u32"], TYPES["u32"]], o[0], o[1:])

    def do_bfi(self, rest, o, text):
        dtype = TYPES[rest[-1]]

        def function(a, b, at, count):
            keep = (((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)) << at.astype(np.uint64)).astype(dtype)
            return (b & ~keep) | ((a << at.astype(dtype)) & keep)

        return self.elementwise(function, [dtype, dtype, TYPES["u32"], TYPES["u32"]], o[0], o[1:])

    def do_prmt(self, rest, o, text):
        if rest != ["b32"]:
            raise NotImplementedError(text)

        def function(a, b, how):
            both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
            out = np.zeros_like(a)
            for i in range(4):
                pick = (how >> np.uint32(4 * i)) & np.uint32(15)
                byte = ((both >> ((pick & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
                byte = np.where(pick > 7, np.where(byte > 127, 255, 0).astype(np.uint32), byte)
                out |= byte << np.uint32(8 * i)
            return out

        return self.elementwise(function, TYPES["u32"], o[0], o[1:])

    def do_lop3(self, rest, o, text):
        table = int(o[4], 0)

        def function(a, b, c):
            out = np.zeros_like(a)
            for i in range(8):
                if table >> i & 1:
                    out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return out

        return self.elementwise(function, TYPES["u32"], o[0], o[1:4])

    def do_selp(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        return self.elementwise(lambda a, b, p: np.where(p, a, b), [dtype, dtype, TYPES["pred"]], o[0], o[1:])

    def do_setp(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        how, negated = rest[0], rest[0][-1] == "u" and dtype.kind == "f"
        if isinstance(o[0], list) or len(rest) > 2 or (how not in COMPARE and not negated and how not in ("num", "nan")):
            raise NotImplementedError(text)

        def function(a, b):
            odd = np.isnan(a) | np.isnan(b) if dtype.kind == "f" else None
            if how in ("num", "nan"):
                return odd if how == "nan" else ~odd
            if negated:  # true where unordered
                return COMPARE[how[:-1]](a, b) | odd
            return COMPARE[how](a, b) & ~odd if dtype.kind == "f" else COMPARE[how](a, b)

        return self.elementwise(function, dtype, o[0], o[1:])

    def do_mov(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        if isinstance(o[0], list):  # a register to its pieces
            part = BITS[8 * dtype.itemsize // len(o[0])]

            def apart(mask):
                for i, target in enumerate(o[0]):
                    self.put(target, np.ascontiguousarray(self.get(o[1], dtype).view(part)[i :: len(o[0])]), mask)

            return apart
        if isinstance(o[1], list):
            part = np.dtype(BITS[8 * dtype.itemsize // len(o[1])])
            return lambda mask: self.put(o[0], np.stack([self.get(s, part) for s in o[1]], -1).reshape(-1).view(dtype), mask)
        return self.elementwise(lambda a: a, dtype, o[0], o[1:])

    def do_cvt(self, rest, o, text):
        target, source = rest[-2:]
        modes = set(rest[:-2])
        if modes - {"rn", "rz", "rzi", "rni", "rmi", "rpi", "satfinite"} or ("rz" in modes and target != source):
            raise NotImplementedError(text)
        if source in ("e4m3x2", "e5m2x2") and target == "f16x2":
            eight = np.dtype(ml_dtypes.float8_e4m3fn if source[1] == "4" else ml_dtypes.float8_e5m2)
            return lambda mask: self.put(
                o[0], self.get(o[1], TYPES["u16"]).view(eight).astype(np.float16).view(np.uint32), mask
            )
        into = TYPES[target]
        if target.endswith("x2") and source == "f32":

            def both(mask):
                high, low = (self.get(s, TYPES["f32"]).astype(np.float64) for s in o[1:])
                self.put(o[0], rounded(np.stack([low, high], -1), into).reshape(-1).view(np.uint32), mask)

            return both
        if target.endswith("x2") or source.endswith("x2"):
            raise NotImplementedError(text)
        of = TYPES[source]

        def function(a):
            if of.kind in "iu" and into.kind in "iu":
                return a.astype(into)
            if of.kind in "iu":
                return a.astype(into) if into in (np.float32, np.float64) else rounded(a.astype(np.float64), into)
            v = wide(a)
            if into.kind in "iu":
                step = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rest[0]]
                low, high = np.iinfo(into).min, np.iinfo(into).max
                return np.clip(np.nan_to_num(step(v)), low, high).astype(into)
            step = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}.get(rest[0], lambda v: v)
            return rounded(step(v), into)

        return self.elementwise(function, of, o[0], o[1:])

    # Memory

    def places(self, place, mask, shared):
        """Addresses of the active threads."""
        _, base, offset = place
        at = self.get(base, TYPES["u32" if shared else "u64"]).astype(np.uint64) + np.uint64(offset & (1 << 64) - 1)
        return at if mask is None else at[mask]

    def access(self, at, size, kind, mask, store):
        """(threads among the active ones, array, indices) of each part of memory that is reached."""
        if not kind:
            yield from self.memory.pieces(at, size, store[0].dtype if store else np.dtype(np.uint8))
            return

    def shared_words(self, at, size, mask, store):
        """Byte positions in the blocks' shared memory of the active threads; races raise."""
        mine = slice(None) if mask is None else mask
        if (at % np.uint64(size)).any() or (at + np.uint64(size) > SHARED).any():
            raise IndexError("shared memory: alignment or bounds")
        place = at.astype(np.int64) + self.block[mine] * SHARED
        words = np.unique(np.stack([place // 4, self.warp[mine], self.interval[self.block[mine]]]), axis=1) if size <= 4 else None
        if words is None:
            steps = np.arange(0, size, 4)
            words = np.stack([(place[:, None] + steps).reshape(-1) // 4, np.repeat(self.warp[mine], len(steps)),
                              np.repeat(self.interval[self.block[mine]], len(steps))])  # fmt: skip
        word, warp, now = words
        new, low = now << 20 | warp, now << 20 | ((1 << 20) - 1 - warp)
        wrote = self.wrote[word]
        race = (wrote >> 20 == now) & (wrote != new)
        if store:
            race |= ((self.read_high[word] >> 20 == now) & (self.read_high[word] != new))
            race |= ((self.read_low[word] >> 20 == now) & (self.read_low[word] != low))
            self.wrote[word] = new
            race |= self.wrote[word] != new
        else:
            np.maximum.at(self.read_high, word, new)
            np.maximum.at(self.read_low, word, low)
        if race.any():
            raise RuntimeError("shared memory: two warps meet at a word without a barrier between them")
        return place

    def vector(self, rest, operand):
        """(type, registers) of a load or a store."""
        return TYPES[rest[-1]], operand if isinstance(operand, list) else [operand]

    def do_ld(self, rest, o, text):
        dtype, targets = self.vector(rest, o[0])
        if rest[0] == "param":
            raw = self.arguments[o[1][1]]
            value = np.frombuffer(raw[o[1][2] :].ljust(8, b"\0")[: dtype.itemsize], dtype)
            held = np.full(self.size, value[0])
            return lambda mask: self.put(targets[0], held, mask)
        if not {"global", "shared"} & set(rest):
            raise NotImplementedError(text)
        shared, count = "shared" in rest, len(targets)

        def step(mask):
            at = self.places(o[1], mask, shared)
            if not len(at):
                return
            out = np.empty((len(at), count), dtype)
            size = count * dtype.itemsize
            if shared:
                place = self.shared_words(at, size, mask, False)
                held = self.shared.view(dtype)
                out[:] = held[(place // dtype.itemsize)[:, None] + np.arange(count)]
            else:
                for mine, held, index in self.memory.pieces(at, size, dtype):
                    out[mine] = held[index[:, None] + np.arange(count)]
            for i, target in enumerate(targets):
                whole = np.ascontiguousarray(out[:, i])
                if mask is not None:
                    whole = np.zeros(self.size, dtype)
                    whole[mask] = out[:, i]
                self.put(target, whole, mask)

        return step

    def do_st(self, rest, o, text):
        dtype, sources = self.vector(rest, o[1])
        if not {"global", "shared"} & set(rest):
            raise NotImplementedError(text)
        shared, count = "shared" in rest, len(sources)

        def step(mask):
            at = self.places(o[0], mask, shared)
            if not len(at):
                return
            values = np.stack([self.get(s, dtype) for s in sources], -1)
            values = values if mask is None else values[mask]
            size = count * dtype.itemsize
            if shared:
                place = self.shared_words(at, size, mask, True)
                self.shared.view(dtype)[(place // dtype.itemsize)[:, None] + np.arange(count)] = values
            else:
                for mine, held, index in self.memory.pieces(at, size, dtype):
                    held[index[:, None] + np.arange(count)] = values[mine]

        return step

    def do_atom(self, rest, o, text):
        dtype = TYPES[rest[-1]]
        if "add" not in rest or "global" not in rest:
            raise NotImplementedError(text)

        def step(mask):
            at = self.places(o[1], mask, False)
            by = self.get(o[2], dtype) if mask is None else self.get(o[2], dtype)[mask]
            old = np.empty(len(at), dtype)
            for mine, held, index in self.memory.pieces(at, dtype.itemsize, dtype):
                for thread, i in zip(mine, index, strict=True):  # one after another
                    old[thread] = held[i]
                    held[i] = held[i] + by[thread]
            whole = np.zeros(self.size, dtype)
            whole[slice(None) if mask is None else mask] = old
            self.put(o[0], whole, mask)

        return step

    def do_red(self, rest, o, text):
        return self.do_atom(rest, ["_", *o], text)

    # Warps

    def whole_warps(self, mask, text):
        if mask is not None:
            warps = mask.reshape(-1, 32)
            if (warps.any(1) != warps.all(1)).any():
                raise RuntimeError(f"part of a warp at {text}")

    def do_shfl(self, rest, o, text):
        how = rest[1]
        target, valid = o[0] if isinstance(o[0], list) else (o[0], "_")

        def step(mask):
            self.whole_warps(mask, text)
            lane = self.special["%laneid"].astype(np.int64)
            by, c = (self.get(s, TYPES["u32"]).astype(np.int64) for s in o[2:4])
            by, segment, clamp = by & 31, c >> 8 & 31, c & 31
            high, low = (lane & segment) | (clamp & ~segment), lane & segment
            j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (by & ~segment)}[how]
            good = j >= high if how == "up" else j <= high
            j = np.where(good, j, lane)
            self.put(target, self.get(o[1], TYPES["b32"])[self.warp * 32 + j], mask)
            self.put(valid, good, mask)

        return step

    def do_mma(self, rest, o, text):
        if "m16n8k16" not in rest or rest[-4:] not in (["f32", "f16", "f16", "f32"], ["f32", "bf16", "bf16", "f32"]):
            raise NotImplementedError(text)
        half = TYPES[rest[-2]]
        d, a, b, c = o

        def step(mask):
            self.whole_warps(mask, text)
            warps = self.size // 32
            # Lane 4 g + t: a_i rows g + 8 (i % 2), inputs 2 t + 8 (i // 2) and the next; b_i inputs 2 t + 8 i and the next,
            # column g; c_i row g + 8 (i // 2), column 2 t + i % 2.
            av = np.stack([wide(self.pair(v, half)).reshape(warps, 8, 4, 2) for v in a], 1).reshape(warps, 2, 2, 8, 4, 2)
            av = av.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, 16)
            bv = np.stack([wide(self.pair(v, half)).reshape(warps, 8, 4, 2) for v in b], 1)
            bv = bv.transpose(0, 1, 3, 4, 2).reshape(warps, 16, 8)
            cv = np.stack([self.get(v, TYPES["f32"]).reshape(warps, 8, 4) for v in c], 1).reshape(warps, 2, 2, 8, 4)
            cv = cv.transpose(0, 1, 3, 4, 2).reshape(warps, 16, 8).astype(np.float64)
            y = (av @ bv + cv).astype(np.float32).reshape(warps, 2, 8, 4, 2).transpose(0, 1, 4, 2, 3).reshape(warps, 4, 32)
            for i, target in enumerate(d):
                self.put(target, np.ascontiguousarray(y[:, i]).reshape(-1), mask)

        return step

    # Control

    def nothing(self, rest, o, text):
        return lambda mask: None

    do_griddepcontrol = do_prefetch = do_fence = do_membar = do_nothing = nothing

    def do_bra(self, rest, o, text):
        return "branch", self.entry.labels[o[0]]

    def do_ret(self, rest, o, text):
        return "done", None

    do_exit = do_ret

    def do_bar(self, rest, o, text):
        if "sync" not in rest:
            raise NotImplementedError(text)
        if rest[0] == "warp":
            return lambda mask: self.whole_warps(mask, text)
        return "wait", (int(o[0], 0), int(o[1], 0) if len(o) > 1 else 0)

    do_barrier = do_bar

    def arrive(self, here, number, count):
        """Threads wait until `count` of their block, or all that still run, have come."""
        self.state[here], self.barrier[here] = WAITING, number
        self.release()

    def release(self):
        state, barrier = self.state.reshape(-1, self.threads), self.barrier.reshape(-1, self.threads)
        for block in np.nonzero((state == WAITING).any(1))[0]:
            for number in np.unique(barrier[block][state[block] == WAITING]):
                there = (state[block] == WAITING) & (barrier[block] == number)
                count = self.counts[int(number)] or int((state[block] != DONE).sum())
                if there.sum() >= count:
                    state[block][there] = RUNNING
                    self.interval[block] += 1

    def run(self):
        self.counts = {v[0]: v[1] for _, _, (kind, v), _ in self.steps if kind == "wait"}
        with np.errstate(all="ignore"):
            while True:
                running = self.state == RUNNING
                if not running.any():
                    if (self.state == DONE).all():
                        return
                    raise RuntimeError("threads wait at a barrier that the others do not reach")
                p = int(self.pc[running].min())
                here = running & (self.pc == p)
                ahead = self.pc[running & ~here]
                self.straight(p, here, int(ahead.min()) if len(ahead) else len(self.steps))

    def straight(self, p, here, limit):
        """Run the threads `here` from p until they part, wait, end, or meet others at `limit`."""
        everyone = bool(here.all())
        while p < limit:
            guard, sense, (step, detail), text = self.steps[p]
            mask = None if everyone else here
            if guard is not None:
                held = self.r[guard] if sense else ~self.r[guard]
                mask = held if everyone else held & here
                if not mask.any():
                    p += 1
                    continue
                mask = None if mask.all() else mask
            try:
                if callable(step):
                    step(mask)
                    p += 1
                    continue
            except Exception as error:
                raise type(error)(f"{error}\n  {self.entry.name}: {text.strip()}") from error
            go = here if mask is None else mask
            self.pc[here] = p + 1
            if step == "branch":
                self.pc[go] = detail
            elif step == "done":
                self.state[go] = DONE
                self.release()
            else:
                self.arrive(go, *detail)
            return
        self.pc[here] = p


def bytes_of(kind, value):
    """An argument as a parameter's bytes."""
    if hasattr(value, "data_ptr"):
        return struct.pack("<Q", value.data_ptr())
    if kind == "f32":
        return struct.pack("<f", value)
    if kind == "f64":
        return struct.pack("<d", value)
    return struct.pack("<Q", int(value) & (1 << 64) - 1)


def span(t):
    """First and last address of a tensor's elements."""
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + reach * t.element_size()


def execute(entry, threads, grid, arguments, together=64):
    """An entry over a grid, `together` blocks side by side. Arguments: tensors and numbers, one a parameter; the last ones absent
    are null."""
    memory = Memory([span(a) for a in arguments if hasattr(a, "data_ptr") and a.numel()])
    given = [*arguments, *[0] * (len(entry.parameters) - len(arguments))]
    held = {name: bytes_of(kind, a) for (kind, name), a in zip(entry.parameters, given, strict=True)}
    grid = (*grid, 1, 1)[:3]
    blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    for i in range(0, len(blocks), together):
        Machine(entry, threads, blocks[i : i + together], grid, held, memory).run()
