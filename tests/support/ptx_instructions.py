"""Instructions of ptx_machine that compute: of one thread, and of the threads of a warp together."""

from __future__ import annotations

import operator

import ml_dtypes
import numpy as np

from support.ptx import BF16, products_of_warps, rounded, selected

BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES = {
    **{f"{letter}{bits}": np.dtype(BITS[bits]) for letter in "bu" for bits in BITS},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in BITS},
    "f16": np.dtype(np.float16), "bf16": BF16, "f16x2": np.dtype(np.float16), "bf16x2": BF16,
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "pred": np.dtype(bool),
}  # fmt: skip
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def wide(a):
    """Numbers of any type as float64; 16-bit patterns of bfloat16 quickly."""
    if a.dtype == BF16:
        return (a.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return a.astype(np.float64)


def doubled(dtype):
    """The integer type of twice the width."""
    return np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")


class Instructions:
    """`do_NAME(modifiers, operands, text)` makes the step that runs an instruction for a mask of
    threads (None: all).
    """

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
        """add, sub, mul, fma, min, max: wraparound integers; floats exact in float64 and rounded
        once.
        """
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
            out = doubled(dtype)
            return self.elementwise(lambda a, b: a.astype(out) * b.astype(out), dtype, o[0], o[1:])
        if rest[0] == "hi":
            dtype = TYPES[rest[1]]
            if dtype.itemsize == 8:
                raise NotImplementedError(text)
            out, shift = doubled(dtype), 8 * dtype.itemsize

            def high(a, b):
                return (a.astype(out) * b.astype(out) >> out.type(shift)).astype(dtype)

            return self.elementwise(high, dtype, o[0], o[1:])
        return self.arithmetic(rest, o, text, operator.mul, operator.mul)

    def do_mad(self, rest, o, text):
        dtype = TYPES[rest[1]]
        if rest[0] == "lo":
            return self.elementwise(lambda a, b, c: a * b + c, dtype, o[0], o[1:])
        out = doubled(dtype)
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
            bits = 8 * dtype.itemsize
            if (at.astype(np.int64) + count > bits).any():
                raise NotImplementedError(text)
            up, down = (bits - at - count).astype(dtype), np.minimum(bits - count, bits - 1).astype(dtype)
            return np.where(count == 0, 0, (a << up) >> down).astype(dtype)

        return self.elementwise(function, [dtype, TYPES["u32"], TYPES["u32"]], o[0], o[1:])

    def do_popc(self, rest, o, text):
        if rest != ["b32"]:
            raise NotImplementedError(text)
        return self.elementwise(
            lambda a: np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=np.uint32), TYPES["u32"], o[0], o[1:]
        )

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
        table = int(o[4].rstrip("U"), 0)

        return self.elementwise(lambda a, b, c: selected(table, a, b, c), TYPES["u32"], o[0], o[1:4])

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
            return lambda mask: self.put(o[0], self.get(o[1], TYPES["u16"]).view(eight).astype(np.float16).view(np.uint32), mask)
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

    def do_redux(self, rest, o, text):
        function = {"add": np.sum, "min": np.min, "max": np.max}.get(rest[1])
        if function is None:
            raise NotImplementedError(text)
        dtype = TYPES[rest[-1]]

        def step(mask):
            self.whole_warps(mask, text)
            v = function(self.get(o[1], dtype).reshape(-1, 32), 1).astype(dtype)
            self.put(o[0], np.repeat(v, 32), mask)

        return step

    def do_vote(self, rest, o, text):
        if rest[:2] != ["sync", "ballot"]:
            raise NotImplementedError(text)

        def step(mask):
            self.whole_warps(mask, text)
            v = np.packbits(self.get(o[1], TYPES["pred"]).reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)
            self.put(o[0], np.repeat(v, 32), mask)

        return step

    def do_mma(self, rest, o, text):
        if "m16n8k16" not in rest or rest[-4:] not in (["f32", "f16", "f16", "f32"], ["f32", "bf16", "bf16", "f32"]):
            raise NotImplementedError(text)
        half = TYPES[rest[-2]]
        d, a, b, c = o

        def step(mask):
            self.whole_warps(mask, text)
            av, bv = (np.stack([wide(self.pair(v, half)).reshape(-1, 32, 2) for v in operand], 1) for operand in (a, b))
            cv = np.stack([self.get(v, TYPES["f32"]).reshape(-1, 32) for v in c], 1).astype(np.float64)
            y = products_of_warps(av, bv, cv)
            for i, target in enumerate(d):
                self.put(target, np.ascontiguousarray(y[:, i]).reshape(-1), mask)

        return step
