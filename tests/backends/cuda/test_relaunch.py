"""Launches past Triton's binder hand its C function what Triton itself hands to it."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
torch = pytest.importorskip("torch")

from triton import knobs  # noqa: E402 # after the skips
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from halfbyte.backends.cuda import relaunch  # noqa: E402

Record = namedtuple("Record", "pointer number absent")
METAS = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [16, 64], "fp4_padded": False},
    {"swizzle": 2, "elem_size": 4, "elem_type": 8, "block_size": [8, 4, 32], "fp4_padded": False},
]
SIGNATURE = {0: "tensordesc<fp16[16, 64],...>", 1: "tensordesc<i32[8, 4, 32],...>", 2: ("*fp16", "i32", "*fp16"), 3: "i32"}


class Kernel:
    """A compiled kernel with Triton's own launcher around a C function that keeps its arguments."""

    def __init__(self, signature, metas):
        self.calls = []
        self.function, self.packed_metadata = "function", (4, 1, 100)
        launch = nvidia.wrap_handle_tensordesc(lambda *arguments: self.calls.append(arguments), signature, metas)
        scratch = dict.fromkeys(
            ("global_scratch_size", "profile_scratch_size", "global_scratch_align", "profile_scratch_align"), 0
        )
        self.run = object.__new__(nvidia.CudaLauncher)
        vars(self.run).update(launch=launch, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, **scratch)

    def __getitem__(self, grid):
        return lambda *given: self.run(*grid, 7, self.function, self.packed_metadata, None, None, None, *given)


@pytest.fixture
def stream(monkeypatch):
    """A current stream, and tensor maps that are the arguments of their encoder."""
    relaunch._encode.cache_clear()
    utils = SimpleNamespace(
        fill_tma_descriptor=lambda *given: ("map", *[list(v) if isinstance(v, list | tuple) else v for v in given])
    )
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with mock.patch.object(driver, "_active", active):
        yield
    relaunch._encode.cache_clear()


@pytest.mark.usefixtures("stream")
def test_tensor_maps_and_records_are_what_triton_makes_of_them():
    x, w = torch.zeros(40, 128, dtype=torch.float16), torch.zeros(24, 8, 32, dtype=torch.int32)
    kernel, record = Kernel(SIGNATURE, METAS), Record(x, 3, None)
    again = relaunch.Relaunch(kernel, maps=2)
    assert again.direct
    maps = relaunch.TensorMap(x[:33], (16, 64)), relaunch.TensorMap(w, (8, 4, 32))
    kernel[5, 1, 1](*[m.descriptor() for m in maps], relaunch.addresses(record), 9)
    again((5, 1, 1), (*maps, record), (9,))
    kept = relaunch.KeptMaps(maps[1:])
    again((5, 1, 1), (maps[0], kept, record), (9,))
    encoded = kept.encoded
    again((5, 1, 1), (maps[0], kept, record), (9,))
    first, *others = kernel.calls
    assert others == [first] * 3
    assert kept.encoded is encoded
    assert (x.data_ptr(), 3, None) in first
    assert ("map", w.data_ptr(), 2, 4, nvidia.TMA_DTYPE_DEVICE_TO_HOST[8], [8, 4, 32], [24, 8, 32], [256, 32, 1], 0) in first


@pytest.mark.usefixtures("stream")
def test_a_cached_launch_repeats_with_other_first_arguments():
    kernel = Kernel({0: "*fp16", 1: "*fp16", 2: "i32"}, None)
    x, y, w = (torch.zeros(4) for _ in range(3))
    again = relaunch.cached(kernel, (6,), (w, 5))
    again(x)
    again(y)
    assert [call[:5] for call in kernel.calls] == [(6, 1, 1, 7, "function")] * 2
    assert [call[-3:] for call in kernel.calls] == [(x.data_ptr(), w.data_ptr(), 5), (y.data_ptr(), w.data_ptr(), 5)]
    assert again.tensors[0][0] is w


@pytest.mark.usefixtures("stream")
def test_where_a_profiler_listens_or_the_launcher_is_another_triton_launches(monkeypatch):
    kernel = Kernel(SIGNATURE, METAS)
    maps = relaunch.TensorMap(torch.zeros(16, 64).half(), (16, 64)), relaunch.TensorMap(torch.zeros(8, 4, 32).int(), (8, 4, 32))
    record = (1, 2, 3)
    calls = []
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *given: calls.append(given))
    again = relaunch.Relaunch(kernel, maps=2)
    listener = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(listener)
    try:
        again((1, 1, 1), (*maps, record), (9,))
    finally:
        knobs.runtime.launch_enter_hook.remove(listener)
    assert calls == [(maps[0].descriptor(), maps[1].descriptor(), record, 9)]
    knobs.runtime.launch_enter_hook.add(listener)
    try:
        again((1, 1, 1), (maps[0], relaunch.KeptMaps(maps[1:]), record), (9,))
    finally:
        knobs.runtime.launch_enter_hook.remove(listener)
    assert calls.pop() == calls[0]
    again((1, 1, 1), (*maps, record), (9,))
    assert len(calls) == len(kernel.calls) == 1
    kernel.run.launch = lambda *given: None
    relaunch.Relaunch(kernel, maps=2)((1, 1, 1), (*maps, record), (9,))
    kernel.run.launch, kernel.run.global_scratch_size = Kernel(SIGNATURE, METAS).run.launch, 64
    relaunch.Relaunch(kernel, maps=2)((1, 1, 1), (*maps, record), (9,))
    assert len(calls) == 3
