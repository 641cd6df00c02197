"""Look-up tables for 4-bit codes, one variant for each memory that a table can be in; decode.py has
the bit operations.

    global   16 float32 in global memory, read through the first-level cache (`decode.element`, TABLE)
    shared   16 float32 in shared memory, in 16 banks; equal entries are broadcast: no bank conflict
    lanes    registers: lane l of a warp has entry l mod 16, read by a shuffle with five bits of the
             word as the lane
    bytes    registers: 16 float16 as four planes of eight bytes, of which `prmt` selects four at a
             time; exact for tables of float16 values (E2M1, integers, IQ4_NL), not for NF4
    tree     registers: 15 selects for each value

Each maps a word of eight nibbles to eight float32, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

SHARED = tl.constexpr(9)
LANES = tl.constexpr(10)
BYTES = tl.constexpr(11)
TREE = tl.constexpr(12)
PLACES = {"shared": SHARED.value, "lanes": LANES.value, "bytes": BYTES.value, "tree": TREE.value}


def byte_planes(table: NDArray[np.float16]) -> NDArray[Any]:
    """16 float16 as eight words: the low bytes of four entries each, then the high bytes."""
    raw = np.ascontiguousarray(table, np.float16).view(np.uint8).reshape(16, 2)
    return np.ascontiguousarray(raw.T).view(np.int32).reshape(8)


@triton.constexpr_function
def _lanes():
    moves = " ".join(f"shr.u32 t, $8, {4 * i}; shfl.sync.idx.b32 ${i}, $9, t, 31, 0xffffffff;" for i in range(1, 8))
    return "{ .reg .b32 t; shfl.sync.idx.b32 $0, $9, $8, 31, 0xffffffff; " + moves + " }"


@triton.constexpr_function
def _shared():
    moves = " ".join(
        f"{'shl' if i == 0 else 'shr'}.b32 t, $8, {abs(4 * i - 2)}; and.b32 t, t, 60; add.u32 t, t, a; ld.shared.b32 ${i}, [t];"
        for i in range(8)
    )
    return "{ .reg .b32 t, a; mov.u32 a, halfbyte_table; " + moves + " }"


@triton.constexpr_function
def _tree():
    lines = []
    for i in range(8):
        bits = " ".join(f"and.b32 t, $8, {1 << (4 * i + b)}; setp.ne.b32 p{b}, t, 0;" for b in range(4))
        lines.append(bits)
        lines += [f"selp.b32 e{j}, ${9 + 2 * j + 1}, ${9 + 2 * j}, p0;" for j in range(8)]
        for bit, count in ((1, 4), (2, 2), (3, 1)):
            to = f"${i}" if count == 1 else "e{0}"
            lines += [f"selp.b32 {to.format(j)}, e{2 * j + 1}, e{2 * j}, p{bit};" for j in range(count)]
    registers = ".reg .b32 t, " + ", ".join(f"e{j}" for j in range(8)) + "; .reg .pred p0, p1, p2, p3;"
    return "{ " + registers + " " + " ".join(lines) + " }"


@triton.constexpr_function
def _bytes():
    """$9 … $16: low bytes of entries 0–3, 4–7, 8–11, 12–15, then high bytes."""
    lines = []
    for half in range(2):
        word = "$8" if half == 0 else "u"
        first = 4 * half
        lines.append("" if half == 0 else "shr.u32 u, $8, 16;")
        lines.append(f"and.b32 s, {word}, 0x7777;")
        # All ones in byte i where nibble i is 8 or more: bit 3 is moved to the byte's sign bit,
        # which prmt replicates over the byte.
        lines.append(f"and.b32 m, {word}, 0x8888; prmt.b32 n, m, 0, 0x4140; shl.b32 t, n, 4; and.b32 t, t, 0x00800080;")
        lines.append("and.b32 n, n, 0x00800080; shl.b32 n, n, 8; or.b32 m, t, n; prmt.b32 m, m, 0, 0xba98;")
        for name, base in (("x", 9), ("y", 13)):
            lines.append(f"prmt.b32 a, ${base}, ${base + 1}, s; prmt.b32 b, ${base + 2}, ${base + 3}, s;")
            lines.append(f"lop3.b32 {name}, m, b, a, 0xca;")
        lines.append("prmt.b32 a, x, y, 0x5140; prmt.b32 b, x, y, 0x7362;")
        lines.append(f"mov.b32 {{l, h}}, a; cvt.f32.f16 ${first}, l; cvt.f32.f16 ${first + 1}, h;")
        lines.append(f"mov.b32 {{l, h}}, b; cvt.f32.f16 ${first + 2}, l; cvt.f32.f16 ${first + 3}, h;")
    return "{ .reg .b32 s, t, u, m, n, a, b, x, y; .reg .b16 l, h; " + " ".join(lines) + " }"


@triton.jit
def hold_table(TABLE, KIND: tl.constexpr):
    """Copy the table to shared memory, once a program before the first look-up. Declares the
    variable for the whole kernel.
    """
    if KIND == SHARED:
        i = tl.arange(0, 32 * tl.extra.cuda.num_warps())
        v = tl.load(TABLE + i % 16)
        tl.inline_asm_elementwise(
            """.shared .align 16 .b32 halfbyte_table[16];
            { .reg .b32 a, o; mov.u32 a, halfbyte_table; shl.b32 o, $1, 2; add.u32 a, a, o; st.shared.b32 [a], $2;
            mov.b32 $0, o; }""",
            "=&r,r,r",
            [i % 16, v.to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def look_up(w, TABLE, KIND: tl.constexpr):
    """A word of eight nibbles -> eight float32 of a table of 16 float32 (BYTES: eight words, see
    `byte_planes`).
    """
    f: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32)
    if KIND == LANES:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        v = tl.load(TABLE + (lane & 15))  # a scalar to Triton, one value for each thread
        return tl.inline_asm_elementwise(_lanes(), "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r", [w, v], dtype=f, is_pure=True, pack=1)
    elif KIND == SHARED:
        return tl.inline_asm_elementwise(_shared(), "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [w], dtype=f, is_pure=False, pack=1)
    elif KIND == BYTES:
        p = TABLE.to(tl.pointer_type(tl.int32))
        return tl.inline_asm_elementwise(
            _bytes(), "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r",
            [w, tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5), tl.load(p + 6),
             tl.load(p + 7)], dtype=f, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _tree(), "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, tl.load(TABLE), tl.load(TABLE + 1), tl.load(TABLE + 2), tl.load(TABLE + 3), tl.load(TABLE + 4),
             tl.load(TABLE + 5), tl.load(TABLE + 6), tl.load(TABLE + 7), tl.load(TABLE + 8), tl.load(TABLE + 9),
             tl.load(TABLE + 10), tl.load(TABLE + 11), tl.load(TABLE + 12), tl.load(TABLE + 13), tl.load(TABLE + 14),
             tl.load(TABLE + 15)], dtype=f, is_pure=True, pack=1,
        )  # fmt: skip
