"""Compiled PTX of the CUDA kernels, run on the CPU: what the assembler is given, thread by thread,
without a GPU.

Registers are NumPy arrays over all threads of all blocks of a launch. The threads with the lowest
program counter run first, so that branches meet again. Global memory is the host memory of the
tensors that were passed: an access outside them, or across its alignment, is an error. Shared
memory begins as NaN, and it is an error when two warps meet at a word, one of them to write,
without a barrier between them. Sums of `mma` are made in float64 and rounded once, fused
multiply-adds as well. What the machine does not know raises NotImplementedError with its text. It
says nothing about time, and little about the order of blocks.
"""

from __future__ import annotations

import ctypes
import re
import struct

import numpy as np

from support.ptx_instructions import BITS, TYPES, Instructions

GRAIN = 2
"""Bytes of shared memory that are watched together."""
RUNNING, WAITING, DONE = 0, 1, 2


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
    """One kernel: parameters, registers by index, and instructions as (guard, its sense, operation,
    operands).
    """

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
                sense, guard, operation, rest = re.match(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.S).groups()
                names = {name: index for scope in scopes for name, index in scope.items()}
                operands = [self.operand(o, names) for o in split(rest)]
                self.code.append((None if guard is None else names[guard], not sense, operation, operands, statement))
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


class Machine(Instructions):
    """Blocks of a launch side by side. `run` executes an entry over them."""

    def __init__(self, entry, threads, room, blocks, grid, arguments, memory):
        self.entry, self.threads, self.memory, self.arguments = entry, threads, memory, arguments
        self.size = threads * len(blocks)
        self.r = [np.zeros(self.size, w) for w in entry.widths]
        tid = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        index = [np.repeat(np.array(b, np.uint32), threads) for b in zip(*blocks, strict=True)]
        zero = np.zeros(self.size, np.uint32)
        self.special = {
            "%tid.x": tid,
            "%tid.y": zero,
            "%tid.z": zero,
            "%ntid.x": zero + np.uint32(threads),
            "%laneid": tid % np.uint32(32),
            "%warpid": tid // np.uint32(32),
        }
        for axis, i, n in zip("xyz", index, grid, strict=True):
            self.special[f"%ctaid.{axis}"], self.special[f"%nctaid.{axis}"] = i, zero + np.uint32(n)
        self.block = np.arange(self.size) // threads
        self.warp = np.arange(self.size) // 32
        self.room = -(-room // 16) * 16
        self.shared = np.full(len(blocks) * self.room, 0xFF, np.uint8)
        self.wrote = np.full(len(self.shared) // GRAIN, -1, np.int64)  # interval · 2^20 + warp of the last writer
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
            return v if dtype.kind == "b" else v.view(dtype)
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
            return np.array(int(text[2:], 16), np.uint32).view(dtype)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return np.array(int(text[2:], 16), np.uint64).view(dtype)
        if dtype.kind == "b":
            return bool(int(text))
        if "." in text:
            return np.array(float(text), dtype)
        return np.array(int(text.rstrip("U"), 0) & ((1 << (8 * dtype.itemsize)) - 1), BITS[8 * dtype.itemsize]).view(dtype)

    def pair(self, operand, dtype):
        """Two numbers a register, flat."""
        return self.get(operand, np.dtype(np.uint32)).view(dtype)

    def put(self, target, value, mask):
        """Into a register, for the threads of the mask (None: all); narrower values extended by
        their own sign.
        """
        if target == "_":
            return
        held = self.r[target]
        if held.dtype.kind != "b":
            bits = 8 * value.dtype.itemsize
            if value.dtype.kind in "fV":
                value = value.view(BITS[bits])
            if value.dtype.itemsize < held.dtype.itemsize and value.size == held.size:
                value = value.astype(held.dtype)
            value = value.view(held.dtype)
        self.r[target] = value if mask is None else np.where(mask, value, held)

    # Control and memory

    def decode(self, guard, sense, operation, operands, text):
        name, *rest = operation.split(".")
        make = getattr(self, f"do_{name}", None)
        if make is None:
            raise NotImplementedError(text)
        step = make(rest, operands, text)
        return guard, sense, step if isinstance(step, tuple) else (step, None), text

    def places(self, place, mask, shared):
        """Addresses of the active threads."""
        _, base, offset = place
        at = self.get(base, TYPES["u32" if shared else "u64"]).astype(np.uint64) + np.uint64(offset & (1 << 64) - 1)
        return at if mask is None else at[mask]

    def shared_places(self, at, size, mask, values=None):
        """Byte positions of the active threads' accesses in the blocks' shared memory; two warps at
        a word, where one stores another value than is there, raise.
        """
        mine = slice(None) if mask is None else mask
        if (at % np.uint64(size)).any() or (at + np.uint64(size) > self.room).any():
            raise IndexError(f"{size} bytes of shared memory at {int(at.max())} of {self.room}")
        place = at.astype(np.int64) + self.block[mine] * self.room
        count = -(-size // GRAIN)
        word = (place[:, None] // GRAIN + np.arange(count)).reshape(-1)
        warp, now = np.repeat(self.warp[mine], count), np.repeat(self.interval[self.block[mine]], count)
        new, low = now << 20 | warp, now << 20 | ((1 << 20) - 1 - warp)
        wrote = self.wrote[word]
        race = (wrote >> 20 == now) & (wrote != new)
        if values is None:
            np.maximum.at(self.read_high, word, new)
            np.maximum.at(self.read_low, word, low)
        else:
            race |= (self.read_high[word] >> 20 == now) & (self.read_high[word] != new)
            race |= (self.read_low[word] >> 20 == now) & (self.read_low[word] != low)
            held, index = self.shared.view(values.dtype), place[:, None] // values.itemsize + np.arange(values.shape[1])
            race &= np.repeat((held[index] != values).any(1), count)
            held[index] = values
            race |= np.repeat((held[index] != values).any(1), count)  # two threads of this instruction
            self.wrote[word] = new
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
                place = self.shared_places(at, size, mask)
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
                self.shared_places(at, size, mask, values.view(BITS[8 * dtype.itemsize]))
            else:
                for mine, held, index in self.memory.pieces(at, size, dtype):
                    held[index[:, None] + np.arange(count)] = values[mine]

        return step

    def do_ldmatrix(self, rest, o, text):
        count = {"x1": 1, "x2": 2, "x4": 4}[rest[3]]
        if rest[:3] != ["sync", "aligned", "m8n8"] or rest[-1] != "b16":
            raise NotImplementedError(text)

        def step(mask):
            self.whole_warps(mask, text)
            lanes = self.special["%laneid"] < 8 * count  # they give the addresses of rows
            lanes = lanes if mask is None else lanes & mask
            place = self.shared_places(self.places(o[1], lanes, True), 16, lanes)
            rows = self.shared.view(np.uint16)[place[:, None] // 2 + np.arange(8)].reshape(-1, count, 8, 8)
            rows = np.ascontiguousarray(rows.swapaxes(2, 3) if "trans" in rest else rows)
            for i, target in enumerate(o[0]):
                whole = np.zeros(self.size, np.uint32)
                whole[slice(None) if mask is None else mask] = rows[:, i].copy().view(np.uint32).reshape(-1)
                self.put(target, whole, mask)

        return step

    def do_stmatrix(self, rest, o, text):
        count = {"x1": 1, "x2": 2, "x4": 4}[rest[3]]
        if rest[:3] != ["sync", "aligned", "m8n8"] or rest[-1] != "b16":
            raise NotImplementedError(text)

        def step(mask):
            self.whole_warps(mask, text)
            lanes = self.special["%laneid"] < 8 * count
            lanes = lanes if mask is None else lanes & mask
            rows = np.stack([self.pair(source, TYPES["u16"]).reshape(-1, 8, 8) for source in o[1]], 1)
            rows = rows.swapaxes(2, 3) if "trans" in rest else rows
            rows = rows if mask is None else rows[mask[::32]]
            self.shared_places(self.places(o[0], lanes, True), 16, lanes, rows.reshape(-1, 8))

        return step

    def do_cp(self, rest, o, text):
        """cp.async: done at once, which a wait and a barrier make no difference to."""
        if rest[:1] != ["async"] or "bulk" in rest:
            raise NotImplementedError(text)
        if rest[1] not in ("ca", "cg"):
            return lambda mask: None
        size = int(o[2], 0)

        def step(mask):
            to, of = self.places(o[0], mask, True), self.places(o[1], mask, False)
            count = self.get(o[3], TYPES["u32"]) if len(o) > 3 else np.full(self.size, size)
            whole = (count if mask is None else count[mask]) == size
            if (count if mask is None else count[mask])[~whole].any():
                raise NotImplementedError(text)
            values = np.zeros((len(to), size // 4), np.uint32)
            at = np.nonzero(whole)[0]
            for mine, held, index in self.memory.pieces(of[at], size, values.dtype):
                values[at[mine]] = held[index[:, None] + np.arange(size // 4)]
            if len(to):
                self.shared_places(to, size, mask, values)

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


def execute(entry, threads, room, grid, arguments, together=64):
    """An entry over a grid, `together` blocks of `threads` with `room` bytes of shared memory side
    by side.

    Arguments: tensors and numbers, one a parameter; the last ones, where absent, are null.
    """
    memory = Memory([span(a) for a in arguments if hasattr(a, "data_ptr") and a.numel()])
    given = [*arguments, *[0] * (len(entry.parameters) - len(arguments))]
    held = {name: bytes_of(kind, a) for (kind, name), a in zip(entry.parameters, given, strict=True)}
    grid = (*grid, 1, 1)[:3]
    blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    for i in range(0, len(blocks), together):
        Machine(entry, threads, room, blocks[i : i + together], grid, held, memory).run()
