"""Gluon kernels' own source, run by NumPy: every lane, every register, no GPU and no compiler.

The functions of mma/{kernel,accumulate,operands,epilogue}.py are executed as they stand, and with
`Source` those of other modules; only `gl` is another. Tensors are arrays of their logical shape;
inline assembly is read and executed instruction by instruction, mma.m16n8k16 over axis 2 as the 32
lanes of each warp, with the fragments of the PTX manual. Layouts are not looked at: they place
values, they do not change them.
A load or store outside its tensor raises.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

import ml_dtypes
import numpy as np
import triton

import torch
from halfbyte.backends.cuda.mma import accumulate, epilogue, kernel, operands
from support import ptx

DTYPES = {
    "int32": np.int32, "int64": np.int64, "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "float16": np.float16,
    "float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip


class T:
    """An array with the operators that kernels use."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)

    @property
    def shape(self) -> list[int]:
        return list(self.a.shape)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

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
        self.lanes: tuple[int, ...] = (8, 2, 2, 1, 1, 1, 1, 1)
        """Where lanes lie in a tensor that ends so: wgmma's operands [R, W, g, t / 2, t mod 2, …]."""
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
    def convert_layout(t: T, layout: Any, assert_trivial: bool = False) -> T:
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
        if isinstance(a, int) and isinstance(b, int):
            a, b = np.int32(a), np.int32(b)
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

    def inline_asm_elementwise(self, asm: Any, constraints: str, args: list[T], dtype: Any, is_pure: bool, pack: int) -> Any:
        text = getattr(asm, "value", asm)
        if "%laneid" in text:
            return T(np.arange(32, dtype=np.int32).reshape(self.lanes))
        return assembly(text, args, dtype) if pack == 1 else packed_assembly(text, args, dtype, pack)


def _bits(a: Any) -> np.ndarray[Any, Any]:
    a = np.ascontiguousarray(a)
    return a.view(np.uint16).astype(np.uint32) if a.dtype.itemsize == 2 else a.view(np.uint32)


def _mma(registers: list[np.ndarray[Any, Any]], half: bool) -> list[np.ndarray[Any, Any]]:
    """c + a · b for every warp: the lanes are axis 2."""
    r = np.stack([np.moveaxis(v, 2, -1) for v in np.broadcast_arrays(*registers)], -2)  # [..., register, lane]
    pairs = np.stack(ptx.halves(r[..., :6, :], np.dtype(np.float16) if half else ptx.BF16), -1)
    c = np.ascontiguousarray(r[..., 6:, :]).view(np.float32).astype(np.float64)
    d = ptx.products_of_warps(pairs[..., :4, :, :], pairs[..., 4:, :, :], c)
    return [np.moveaxis(d[..., i, :], -1, 2).copy() for i in range(4)]


def assembly(asm: str, args: list[T], dtype: Any) -> Any:
    """Executes PTX on registers that are arrays of bits."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    count = len(dtypes)
    if asm.startswith("mma.sync"):
        return tuple(T(d) for d in _mma([_bits(t.a) for t in args], ".f16.f16." in asm))
    given = np.broadcast_arrays(*(t.a for t in args))
    each = given[0].shape[3] if given[0].ndim == 4 else 1  # [input warps, row warps, 32, row tiles]
    env = ptx.run(asm, {f"${count + i}": _bits(a) for i, a in enumerate(given)}, each)
    out = tuple(T(np.ascontiguousarray(env[f"${i}"]).astype(np.uint32).view(d)) for i, d in enumerate(dtypes))
    return out if isinstance(dtype, tuple) else out[0]


def packed_assembly(asm: str, args: list[T], dtype: Any, pack: int) -> T:
    """Assembly that makes registers of two 16-bit results or four of 8 bits: elements are the last
    axes in order, one input register an element.
    """
    shape = np.broadcast_shapes(*(t.a.shape for t in args))
    given = [_bits(np.broadcast_to(t.a, shape)).reshape(-1, pack) for t in args]
    inputs = [column for a in given for column in a.T]
    count = pack * np.dtype(dtype).itemsize // 4
    each = int(np.prod(shape[5:])) // pack  # of a lane, where axes 2 to 4 are the lanes
    env = ptx.run(asm, {f"${count + i}": column.copy() for i, column in enumerate(inputs)}, max(1, each))
    out = np.stack([env[f"${i}"].astype(np.uint32) for i in range(count)], -1)
    return T(np.ascontiguousarray(out).view(dtype).reshape(shape))


def _value(x: Any) -> Any:
    """Constants as numbers, kernels' functions as functions of NumPy."""
    return x.value if isinstance(x, triton.language.constexpr) else x


class Source:
    """The functions of some modules with `gl` on NumPy; `function(name)` is the last one's of that
    name.
    """

    def __init__(self, *modules: types.ModuleType) -> None:
        self.gl = Language()
        made: dict[int, Any] = {}
        spaces = []
        for module in modules:
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
        self._spaces = [space for _, space in spaces]

    def function(self, name: str) -> Any:
        return next(space[name] for space in reversed(self._spaces) if name in space)

    @staticmethod
    def _range(*bounds: Any) -> Any:
        return (T(np.int32(v)) for v in builtins.range(*(int(b) for b in bounds)))


class Kernel(Source):
    """Stands for fragment_kernel: `Kernel()[grid](…)` runs every program."""

    def __init__(self) -> None:
        super().__init__(operands, accumulate, epilogue, kernel)
        self.gl.lanes = (32, 1)  # [input warps, row warps, 32, row tiles]
        self.run = self.function("fragment_kernel")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, plan: Any, **options: Any) -> None:
            assert not enable_fp_fusion
            assert plan.input_warps * plan.row_warps == num_warps
            assert not options
            arguments = [self._argument(a) for a in args]
            self.gl.grid = (grid[0], grid[1] if len(grid) > 1 else 1)
            with np.errstate(all="ignore"):
                for program in np.ndindex(*self.gl.grid):
                    self.gl.program = program
                    self.run(*arguments, plan)

        return launch

    @staticmethod
    def _argument(a: Any) -> Any:
        if a is None:
            return None
        if isinstance(a, tuple):
            return type(a)(*(Kernel._argument(v) for v in a))
        if isinstance(a, torch.Tensor):
            assert a.is_contiguous()
            if a.dtype == torch.bfloat16:
                return Pointer(a.reshape(-1).view(torch.int16).numpy().view(ml_dtypes.bfloat16))
            return Pointer(a.reshape(-1).numpy())
        return T(np.float32(a)) if isinstance(a, float) else T(np.int32(a))
