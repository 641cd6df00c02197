"""Launches of a compiled kernel past Triton's binder.

Binding the arguments, looking the kernel up and describing five tensors again takes the host longer
than the GPU needs for a layer. What is kept here calls the C function that Triton made for the
kernel, with addresses in place of tensors and with tensor maps that were encoded before. Where a
profiler's launch hooks are set, and where Triton's launcher is not the one that this file knows, a
kernel is launched by Triton's own call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

import torch


@functools.cache
def _layout(width: int, rank: int, bits: int) -> Any:
    """Boxes whose rows are `width` elements, swizzled as far as they are wide."""
    return gl.NVMMASharedLayout(min(128, width * bits // 8), bits, rank=rank)


class TensorMap:
    """What the copy engine reads or writes of a tensor: boxes of `box` elements. The tensor's inner
    stride is 1, its other strides and its address are multiples of 16 bytes.
    """

    __slots__ = ("_descriptor", "box", "tensor")

    def __init__(self, tensor: torch.Tensor, box: tuple[int, ...]) -> None:
        self.tensor, self.box = tensor, box
        self._descriptor: TensorDescriptor | None = None

    def descriptor(self) -> TensorDescriptor:
        """Triton's description, without the checks that it makes on every call."""
        if self._descriptor is not None:
            return self._descriptor
        t, d = self.tensor, object.__new__(TensorDescriptor)
        d.base, d.shape, d.strides, d.block_shape, d.padding = t, t.shape, t.stride(), list(self.box), "zero"
        d.layout = _layout(self.box[-1], len(self.box), 8 * t.element_size())
        self._descriptor = d
        return d

    def encode(self, kind: _MapKind) -> tuple[Any, ...]:
        """What the C function takes for it."""
        return _encode(self.tensor.data_ptr(), self.tensor.shape, self.tensor.stride(), kind)


class _MapKind(NamedTuple):
    """What a kernel was compiled for: swizzle, bytes and type of an element, box."""

    swizzle: int
    element_bytes: int
    element_type: int
    box: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _encode(address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: _MapKind) -> tuple[Any, ...]:
    """A tensor map, and the shape and strides that the C function takes after it."""
    encode = driver.active.utils.fill_tma_descriptor
    encoded = encode(address, kind.swizzle, kind.element_bytes, kind.element_type, list(kind.box), shape, strides, 0)
    return (encoded, *shape, *strides)


def addresses(value: Any) -> Any:
    """Tensors as their addresses, in records too."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if not isinstance(value, tuple):
        return value
    return tuple([v if v is None else v.data_ptr() if type(v) is torch.Tensor else addresses(v) for v in value])


class KeptMaps(tuple[TensorMap, ...]):
    """Maps of tensors that do not change; what the C function takes for them is made once."""

    encoded: tuple[Any, ...] = ()


def hooked() -> bool:
    """True while a profiler wants to be called with every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Relaunch:
    """A compiled kernel. Called with a grid of three numbers and the arguments of its first launch,
    in order: `first` TensorMaps, then KeptMaps, `maps` maps in all; tensors, numbers and records of
    them; then `rest`, numbers and addresses.
    """

    __slots__ = ("_device", "_function", "_kinds", "_launch", "_metadata", "_run", "compiled")

    def __init__(self, compiled: Any, maps: int = 0) -> None:
        self.compiled = compiled
        self._run = getattr(compiled, "run", None)
        self._launch: Callable[..., None] | None = None
        self._kinds: tuple[_MapKind, ...] = ()
        if self._run is None:
            return
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        self._device = torch.cuda.current_device()
        if maps:
            self._launch, self._kinds = _behind(self._run)
            if len(self._kinds) != maps:
                self._run = None

    @property
    def direct(self) -> bool:
        """True where launches go past Triton's own call."""
        return self._run is not None

    def __call__(self, grid: tuple[int, int, int], first: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        if self._run is None or hooked():
            self.compiled[grid](*_described(first), *rest)
            return
        stream = driver.active.get_current_stream(self._device)
        if self._launch is None:
            values = [addresses(a) for a in first]
            self._run(*grid, stream, self._function, self._metadata, None, None, None, *values, *rest)
            return
        values, kinds = [], iter(self._kinds)
        for a in first:
            if type(a) is TensorMap:
                values += a.encode(next(kinds))
            elif type(a) is KeptMaps:
                a.encoded = a.encoded or tuple(chain.from_iterable(one.encode(next(kinds)) for one in a))
                values += a.encoded
            else:
                values.append(addresses(a))
        run = self._run
        self._launch(
            *grid,
            stream,
            self._function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,
            None,
            self._metadata,
            None,
            None,
            None,
            *values,
            *rest,
        )

    def plain(self, grid: tuple[int, int, int]) -> Callable[..., None] | None:
        """The launch of a kernel without maps, likewise."""
        run, function, metadata = self._run, getattr(self, "_function", None), getattr(self, "_metadata", None)
        if run is None or self._launch is not None:
            return None
        return lambda stream, *values: run(*grid, stream, function, metadata, None, None, None, *values)

    def repeat(
        self, grid: tuple[int, int, int], first: tuple[TensorMap, TensorMap, KeptMaps], rest: tuple[Any, ...]
    ) -> Repeat | None:
        """A launch that was just made, for other addresses; None where Triton launches."""
        if self._launch is None or self._run is None:
            return None
        y, x, kept = first
        head = self._run.launch_cooperative_grid, self._run.launch_pdl, None, None, self._metadata, None, None, None
        maps = [(tuple(m.tensor.shape), m.tensor.stride(), kind) for m, kind in zip((y, x), self._kinds, strict=False)]
        return Repeat(self._launch, grid, (self._function, *head), y is x, maps, kept.encoded, rest)


MAPS_KEPT = 8
"""Pairs of addresses whose tensor maps a `Repeat` keeps."""


class Repeat:
    """A launch of which all but the stream and addresses is known; tensor maps of y and x are kept
    by address. `joined`: the map of y is x's.
    """

    __slots__ = ("_grid", "_head", "_joined", "_known", "_launch", "_maps", "_tail")

    def __init__(
        self, launch: Callable[..., None], grid: tuple[int, int, int], head: tuple[Any, ...], joined: bool,
        maps: list[tuple[Any, ...]], kept: tuple[Any, ...], rest: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self._launch, self._grid, self._head, self._joined, self._maps = launch, grid, head, joined, maps
        self._tail = kept, rest
        self._known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def __call__(self, stream: int, y: int, x: int, pointers: tuple[int | None, ...]) -> None:
        maps = self._known.get((y, x))
        if maps is None:
            of_y, of_x = (_encode(at, *one) for at, one in zip((x if self._joined else y, x), self._maps, strict=True))
            if len(self._known) >= MAPS_KEPT:
                self._known.clear()
            maps = self._known[y, x] = (*of_y, *of_x, *self._tail[0])
        self._launch(*self._grid, stream, *self._head, *maps, pointers, *self._tail[1])


def _described(first: tuple[Any, ...]) -> Iterator[Any]:
    """Arguments of Triton's own call: maps as its descriptions."""
    for a in first:
        if type(a) is KeptMaps:
            yield from (one.descriptor() for one in a)
        else:
            yield a.descriptor() if type(a) is TensorMap else a


def _behind(run: Any) -> tuple[Callable[..., None] | None, tuple[_MapKind, ...]]:
    """The C function that a launcher of Triton calls with encoded maps, and the kinds of the maps;
    (None, ()) for a kernel without maps, one that needs scratch memory of Triton's, and a launcher
    that is made in another way.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    inside = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(getattr(run, "launch", None)) else {}
    launch, metas = inside.get("launcher"), inside.get("tensordesc_meta")
    if launch is None or not metas or any(meta is None or meta["fp4_padded"] for meta in metas):
        return None, ()
    if run.global_scratch_size or run.profile_scratch_size:
        return None, ()
    return launch, tuple(
        _MapKind(m["swizzle"], m["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], tuple(m["block_size"])) for m in metas
    )


class CachedLaunch(NamedTuple):
    """A launch that differs from an earlier one by its first arguments alone. `rest` are the others
    and `weight` tensors of the weight among the first ones, as addresses where Triton's call is
    passed by; `tensors` keeps them alive.
    """

    launch: Relaunch
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]
    weight: tuple[Any, ...]
    tensors: Any

    def __call__(self, *first: Any) -> None:
        self.launch(self.grid, first, self.rest)


def cached(compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...], weight: tuple[Any, ...] = ()) -> CachedLaunch:
    """Of a kernel that was just launched on `grid`; `rest` are the arguments that stay the same."""
    launch = Relaunch(compiled)
    x, y, z = (*grid, 1, 1)[:3]
    if not launch.direct:
        return CachedLaunch(launch, (x, y, z), rest, weight, None)
    return CachedLaunch(launch, (x, y, z), addresses(rest), addresses(weight), (rest, weight))
