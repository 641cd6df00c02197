"""The fragment kernel's own source, run by NumPy: every lane, every register, no GPU and no compiler.

The functions of fragments.py, accumulate.py, operands.py and outputs.py are executed as they stand; only `gl` is another.
Tensors are arrays of their logical shape; inline assembly is read and executed instruction by instruction, mma.m16n8k16 over
axis 2 as the 32 lanes of each warp, with the fragments of the PTX manual. Layouts are not looked at: they place values, they do
not change them. A load or store outside its tensor raises.
"""

from __future__ import annotations

import builtins
import re
import types
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton

from halfbyte.backends.cuda import accumulate, fragments, operands, outputs

DTYPES = {
    "int32": np.int32, "int64": np.int64, "int16": np.int16, "uint8": np.uint8, "float16": np.float16, "float32": np.float32,
    "float64": np.float64,
}  # fmt: skip


class T:
    """An array with the operators that kernels use."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)

    @property
    def shape(self) -> list[int]:
        return list(self.a.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> T:
        return T(self.a.view(dtype) if bitcast else self.a.astype(dtype))

    def __index__(self) -> int:
        return int(self.a)

    def __bool__(self) -> bool:
        return bool(self.a)

    def __neg__(self) -> T:
        return T(-self.a)

    def __invert__(self) -> T:
        return T(~self.a)


def _raw(x: Any) -> Any:
    return x.a if isinstance(x, T) else x


def _operator(name: str) -> None:
    def forward(self: T, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return T(getattr(np.asarray(self.a), name)(_raw(other)))

    setattr(T, name, forward)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "and", "or", "xor", "lshift", "rshift"):
    _operator(f"__{_name}__")
    _operator(f"__r{_name}__")
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(f"__{_name}__")


class Pointer:
    """A flat tensor and offsets into it."""

    def __init__(self, base: np.ndarray[Any, Any], at: Any = 0) -> None:
        self.base, self.at = base, np.asarray(at, np.int64)
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.at + np.asarray(_raw(other), np.int64))

    __radd__ = __add__


class Language:
    """`gl` on NumPy."""

    def __init__(self) -> None:
        self.program = (0, 0)
        self.grid = (1, 1)
        for name, dtype in DTYPES.items():
            setattr(self, name, dtype)

    def program_id(self, axis: int) -> T:
        return T(np.int32(self.program[axis]))

    def num_programs(self, axis: int) -> T:
        return T(np.int32(self.grid[axis]))

    @staticmethod
    def static_range(n: int) -> Any:
        return builtins.range(n)

    @staticmethod
    def BlockedLayout(*_: Any) -> None:
        return None

    @staticmethod
    def SliceLayout(*_: Any) -> None:
        return None

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> T:
        return T(np.arange(start, end, dtype=np.int32))

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any = None) -> T:
        return T(np.zeros(shape, dtype))

    @staticmethod
    def full_like(t: T, value: Any) -> T:
        return T(np.full_like(t.a, value))

    @staticmethod
    def expand_dims(t: T, axis: int) -> T:
        return T(np.expand_dims(t.a, axis))

    @staticmethod
    def reshape(t: T, shape: Any) -> T:
        return T(t.a.reshape(shape))

    @staticmethod
    def permute(t: T, order: Any) -> T:
        return T(t.a.transpose(order))

    @staticmethod
    def convert_layout(t: T, layout: Any) -> T:
        return t

    @staticmethod
    def broadcast(a: T, b: T) -> tuple[T, T]:
        x, y = np.broadcast_arrays(a.a, b.a)
        return T(x), T(y)

    @staticmethod
    def split(t: T) -> tuple[T, T]:
        assert t.a.shape[-1] == 2
        return T(t.a[..., 0]), T(t.a[..., 1])

    @staticmethod
    def join(a: T, b: T) -> T:
        return T(np.stack(np.broadcast_arrays(a.a, b.a), -1))

    @staticmethod
    def sum(t: T, axis: int) -> T:
        return T(t.a.sum(axis, dtype=t.a.dtype))

    @staticmethod
    def where(c: T, a: Any, b: Any) -> T:
        return T(np.where(c.a, _raw(a), _raw(b)))

    @staticmethod
    def minimum(a: Any, b: Any) -> T:
        return T(np.minimum(_raw(a), _raw(b)))

    @staticmethod
    def maximum(a: Any, b: Any) -> T:
        return T(np.maximum(_raw(a), _raw(b)))

    @staticmethod
    def exp(t: T) -> T:
        return T(np.exp(t.a))

    @staticmethod
    def fma(a: T, b: T, c: T) -> T:
        return T((a.a.astype(np.float64) * _raw(b) + _raw(c)).astype(np.float32))

    @staticmethod
    def load(p: Pointer, mask: Any = True, other: Any = 0) -> T:
        at, live = np.broadcast_arrays(p.at, _raw(mask))
        assert not live.any() or 0 <= at[live].min() <= at[live].max() < p.base.size, "a load outside its tensor"
        return T(np.where(live, p.base[np.where(live, at, 0)], np.asarray(_raw(other)).astype(p.base.dtype)))

    @staticmethod
    def store(p: Pointer, value: T, mask: Any = True) -> None:
        at, live, v = np.broadcast_arrays(p.at, _raw(mask), value.a)
        assert not live.any() or 0 <= at[live].min() <= at[live].max() < p.base.size, "a store outside its tensor"
        p.base[at[live]] = v[live]

    @staticmethod
    def inline_asm_elementwise(asm: Any, constraints: str, args: list[T], dtype: Any, is_pure: bool, pack: int) -> Any:
        return assembly(getattr(asm, "value", asm), args, dtype)


def _bits(a: Any) -> np.ndarray[Any, Any]:
    a = np.ascontiguousarray(a)
    return a.view(np.uint16).astype(np.uint32) if a.dtype.itemsize == 2 else a.view(np.uint32)


def _f16(register: Any) -> np.ndarray[Any, Any]:
    return np.stack([register & 0xFFFF, register >> 16], -1).astype(np.uint16).view(np.float16)


def _packed(halves: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    h = np.ascontiguousarray(halves).view(np.uint16).astype(np.uint32)
    return h[..., 0] | h[..., 1] << np.uint32(16)


def _to_bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float64 or float32 to the bits of bfloat16, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _bf16(register: Any) -> np.ndarray[Any, Any]:
    return (np.stack([register << np.uint32(16), register & np.uint32(0xFFFF0000)], -1)).view(np.float32)


def _e4m3(byte: Any) -> np.ndarray[Any, Any]:
    return torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).to(torch.float16).numpy()


def _mma(a: list[Any], b: list[Any], c: list[Any], half: bool) -> list[np.ndarray[Any, Any]]:
    """c + a · b for every warp: the lanes are axis 2, g = lane / 4 and t = lane % 4 (PTX manual, mma.m16n8k16)."""
    parts = np.broadcast_arrays(*a, *b, *c)
    lanes = [np.moveaxis(p, 2, -1).reshape(*p.shape[:2], *p.shape[3:], 8, 4) for p in parts]  # [..., g, t]
    read = _f16 if half else _bf16
    A = np.zeros((*lanes[0].shape[:-2], 16, 16))
    B = np.zeros((*lanes[0].shape[:-2], 16, 8))
    C = np.zeros((*lanes[0].shape[:-2], 16, 8))
    for i in range(4):  # a0: row g, columns 2 t; a1: row g + 8; a2, a3: the same, columns 2 t + 8
        v = read(lanes[i])
        for k in range(2):
            A[..., 8 * (i % 2) : 8 * (i % 2) + 8, 8 * (i // 2) + k : 8 * (i // 2) + 8 : 2] = v[..., k]
    for i in range(2):  # b0: rows 2 t, column g; b1: rows 2 t + 8
        v = read(lanes[4 + i])
        for k in range(2):
            B[..., 8 * i + k : 8 * i + 8 : 2, :] = np.swapaxes(v[..., k], -1, -2)
    for i in range(4):  # c0, c1: row g, columns 2 t and 2 t + 1; c2, c3: row g + 8
        C[..., 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] = lanes[6 + i].view(np.float32)
    D = (C + A @ B).astype(np.float32)
    out = []
    for i in range(4):
        d = np.ascontiguousarray(D[..., 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2])
        out.append(np.moveaxis(d.reshape(*d.shape[:-2], 32), -1, 2).copy())
    return out


def assembly(asm: str, args: list[T], dtype: Any) -> Any:
    """Executes PTX on registers that are arrays of bits."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    count = len(dtypes)
    if asm.startswith("mma.sync"):
        r = [_bits(t.a) for t in args]
        return tuple(T(d) for d in _mma(r[:4], r[4:6], r[6:], ".f16.f16." in asm))
    given = np.broadcast_arrays(*(t.a for t in args))
    env: dict[str, Any] = {f"${count + i}": _bits(a) for i, a in enumerate(given)}
    body = asm.strip()
    body = body[1:-1] if body.startswith("{") else body
    for line in body.split(";"):
        _step(line.strip(), env)
    out = tuple(T(np.ascontiguousarray(env[f"${i}"]).astype(np.uint32).view(d)) for i, d in enumerate(dtypes))
    return out if isinstance(dtype, tuple) else out[0]


def _step(line: str, env: dict[str, Any]) -> None:
    if not line or line.startswith(".reg"):
        return
    op, rest = line.split(None, 1)
    names = [n.strip() for n in re.findall(r"\{[^}]*\}|[^,{}\s]+", rest)]

    def value(name: str) -> Any:
        if name.startswith("{"):
            low, high = (value(n.strip()) for n in name[1:-1].split(","))
            return low & np.uint32(0xFFFF) | high << np.uint32(16)
        if name in env:
            return env[name]
        return np.float32(name).view(np.uint32) if "." in name else np.uint32(int(name, 0))

    d, s = names[0], [value(n) for n in names[1:]]
    kind = op.split(".")
    one = np.uint32
    if op == "mov.b32" and d.startswith("{"):
        low, high = (n.strip() for n in d[1:-1].split(","))
        env[low], env[high] = s[0] & one(0xFFFF), s[0] >> one(16)
        return
    if kind[0] in ("and", "or"):
        r = s[0] & s[1] if kind[0] == "and" else s[0] | s[1]
    elif kind[0] in ("shl", "shr"):
        r = s[0] << s[1] if kind[0] == "shl" else s[0] >> s[1]
    elif op in ("add.u32", "sub.u32", "mul.lo.u32"):
        r = (s[0] + s[1] if kind[0] == "add" else s[0] - s[1] if kind[0] == "sub" else s[0] * s[1]).astype(np.uint32)
    elif op == "lop3.b32":
        r = one(0)
        for i in range(8):
            if int(s[3]) >> i & 1:
                r = r | (s[0] if i & 4 else ~s[0]) & (s[1] if i & 2 else ~s[1]) & (s[2] if i & 1 else ~s[2])
    elif op == "prmt.b32":
        both = [(x >> one(8 * i)) & one(255) for x in s[:2] for i in range(4)]
        picks = [int(s[2]) >> 4 * i & 15 for i in range(4)]
        assert max(picks) < 8
        r = both[picks[0]] | both[picks[1]] << one(8) | both[picks[2]] << one(16) | both[picks[3]] << one(24)
    elif op in ("sub.f16x2", "sub.rn.f16x2"):
        r = _packed(_f16(s[0]) - _f16(s[1]))
    elif op == "mul.rn.f16x2":
        r = _packed(_f16(s[0]) * _f16(s[1]))
    elif op == "fma.rn.f16x2":
        x, y, z = (_f16(v).astype(np.float64) for v in s)
        r = _packed((x * y + z).astype(np.float16))
    elif op == "fma.rn.bf16x2":
        x, y, z = (_bf16(v).astype(np.float64) for v in s)
        r = _packed(_to_bf16(x * y + z))
    elif op == "sub.f32":
        r = (s[0].view(np.float32) - s[1].view(np.float32)).view(np.uint32)
    elif op == "cvt.rn.f16x2.f32":
        r = _packed(np.stack([s[1].view(np.float32), s[0].view(np.float32)], -1).astype(np.float16))
    elif op == "cvt.rn.bf16x2.f32":
        r = _packed(_to_bf16(np.stack([s[1].view(np.float32), s[0].view(np.float32)], -1)))
    elif op == "cvt.f32.f16":
        r = np.ascontiguousarray(s[0].astype(np.uint16)).view(np.float16).astype(np.float32).view(np.uint32)
    elif op == "cvt.rn.f16x2.e4m3x2":
        r = _packed(np.stack([_e4m3(s[0] & one(255)), _e4m3(s[0] >> one(8) & one(255))], -1))
    elif op in ("mov.b32", "cvt.u32.u16"):
        r = s[0]
    else:
        raise NotImplementedError(op)
    env[d] = r


def _value(x: Any) -> Any:
    """Constants as numbers, kernels' functions as functions of NumPy."""
    return x.value if isinstance(x, triton.language.constexpr) else x


class Kernel:
    """Stands for fragment_kernel: `Kernel()[grid](…)` runs every program."""

    def __init__(self) -> None:
        self.gl = Language()
        made: dict[int, Any] = {}
        spaces = []
        for module in (operands, accumulate, outputs, fragments):
            space: dict[str, Any] = dict(vars(module))
            space.update(gl=self.gl, range=self._range, gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
            spaces.append((module, space))
            for value in vars(module).values():
                if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                    folded = isinstance(value, triton.runtime.jit.ConstexprFunction)  # these run in Python anyway
                    where = value.fn.__globals__ if folded else space
                    made[id(value)] = types.FunctionType(value.fn.__code__, where, value.fn.__name__, value.fn.__defaults__)
        for _, space in spaces:
            for name, value in list(space.items()):
                space[name] = made.get(id(value), _value(value))
        self.run = made[id(fragments.fragment_kernel)]

    @staticmethod
    def _range(*bounds: Any) -> Any:
        return (T(np.int32(v)) for v in builtins.range(*(int(b) for b in bounds)))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **options: Any) -> None:
            assert not enable_fp_fusion
            assert options["WK"] * options["WN"] == num_warps
            held = [self._argument(a) for a in args]
            self.gl.grid = (grid[0], grid[1] if len(grid) > 1 else 1)
            with np.errstate(all="ignore"):
                for program in np.ndindex(*self.gl.grid):
                    self.gl.program = program
                    self.run(*held, **options)

        return launch

    @staticmethod
    def _argument(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            assert a.is_contiguous()
            if a.dtype == torch.bfloat16:
                return Pointer(a.reshape(-1).view(torch.int16).numpy().view(ml_dtypes.bfloat16))
            return Pointer(a.reshape(-1).numpy())
        return T(np.float32(a)) if isinstance(a, float) else T(np.int32(a))

