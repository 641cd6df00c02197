"""Run by test_compile.py and test_wgmma_compile.py in a process of its own: kernels compiled
without a GPU, by the project's own launches with CPU tensors.

    cuda_compile.py [all] TARGET ...     portable and fragment kernels for compute capabilities: the
                                         formats of SHORT, those of DEEP through every schedule
                                         (all: every one of FORMATS through every schedule)
    cuda_compile.py FORMAT/SHAPE ...     the wgmma kernel, whose weight must be the register operand;
                                         with a shape of ROUNDED that of 8-bit activations
"""

import re
import sys
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import torch
from halfbyte.backends.cuda import device as gpu
from halfbyte.backends.cuda import launch
from halfbyte.backends.cuda.mma.plan import TokenBlocks
from halfbyte.backends.cuda.moe import activation, routing
from halfbyte.backends.cuda.rounded import launch as rounded
from halfbyte.backends.cuda.tuning.mma_tiles import BlockTile, FragmentTile, Tile
from halfbyte.backends.cuda.tuning.wgmma_tiles import FusedTile
from halfbyte.backends.cuda.weight import to_device
from halfbyte.backends.cuda.wgmma import schedule
from halfbyte.bench.weights import random_weight
from halfbyte.numerics import activations as definition

FORMATS = ("int4:g128", "mxfp4", "nvfp4", "uint4:g32", "affine4:g64", "q4_K", "q6_K", "mxfp8_e4m3", "q8_0", "affine8:g64",
           "nf4:g64", "uint3:g64")  # fmt: skip
DEEP = ("mxfp4", "uint3:g64")
"""Formats that go through every schedule; the others through dequantize and the fragment kernel."""
SHORT = {80: ("mxfp4", "q6_K"), 89: ("mxfp8_e4m3",), 90: ("nvfp4", "q4_K", "uint3:g64"), 100: ("affine8:g64",),
         120: ("mxfp8_e4m3", "nf4:g64")}  # fmt: skip
SHAPES = {
    "linear": FusedTile(64, 1, 2, 4), "experts": FusedTile(32, 2, 2, 4), "deep": FusedTile(64, 1, 2, 8, deep=2),
    "narrow": FusedTile(32, 1, 1, 8, deep=4), "two": FusedTile(192, 1, 2, 4), "few": FusedTile(160, 1, 2, 4, ahead=0),
}  # fmt: skip
ROUNDED = {
    "fp8": rounded.WgmmaTile(128, 1, 2, 4, 64), "fp8-wide": rounded.WgmmaTile(192, 1, 2, 5, 64),
    "fp8-deep": rounded.WgmmaTile(16, 1, 1, 8, 16, 4), "int8": rounded.WgmmaTile(64, 1, 2, 6, 64),
    "int8-deep": rounded.WgmmaTile(16, 1, 1, 8, 16, 4),
}  # fmt: skip
target = None
binaries = {}


class Target:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return target


class Launched:
    """What the launches keep: later ones compile nothing."""

    def __getitem__(self, grid):
        return lambda *arguments: None


def compile_only(kernel, *args, grid, warmup=False, **options):
    """JITFunction.run: bound, compiled to machine code, not launched."""
    options |= {"debug": False, "instrumentation_mode": ""}
    _, _, _, backend, binder = kernel.device_caches[str(target)]
    bound, specialization, given = binder(*args, **options)
    key = kernel.__name__, str(target), str(specialization), str(given)
    if key not in binaries:
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given)
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        binaries[key] = triton.compile(source, target=target, options=parsed.__dict__)
        assert binaries[key].asm["cubin"]
    return Launched()


def check(word, deep):
    """One format: dequantize and two fragment kernels; deep: every schedule."""
    w = to_device(random_weight(word, 48, 512, 0), "cpu")
    x = torch.zeros(16, 512, dtype=torch.float16)
    launch.dequantize(w, torch.float16)
    if w.fragments:
        for m, tile in ((1, FragmentTile(1, 1, 8, 1, 2, 1, 2)), (16, FragmentTile(2, 2, 2, 1, 1, 1, 1, True))):
            launch.fragments(x[:m], w, None, tile)
    if deep:
        for mode in ("int8", "fp8"):
            if definition.refusal(w.format, mode) is None:
                rounded.linear(x, w, None, mode, rounded.PortableTile(16, 16, 2, 1))
        launch.matvec(x[:1], w, torch.zeros(48).half(), Tile(2, 32, 4))
        launch.matmul(x, w, None, Tile(16, 8, 4, 16, 3, 2))
        for name in ("double-buffered", "striped"):
            launch.tiled(x, w, torch.zeros(48).half(), name, BlockTile(64, 64, 8, 4))


def check_rest():
    """The kernels without a weight."""
    activation.gated([torch.zeros(4, 64), torch.zeros(4, 64)], 2, torch.float16)
    for where in (None, torch.zeros(8, dtype=torch.int32)):
        routing.weighted_sum(torch.zeros(8, 64), where, torch.zeros(2, 4), torch.bfloat16)
    routing.top_k(torch.zeros(3, 32, dtype=torch.bfloat16), 4)
    for dtype in (torch.int32, torch.int64):
        routing.route(torch.zeros(3, 4, dtype=dtype), 32, 8)


def check_wgmma(name):
    """The fused schedule's kernel for a format and shape; the number of products in its PTX."""
    word, _, shape = name.partition("/")
    before = set(binaries)
    tile, k = SHAPES.get(shape), 512
    dtype = torch.bfloat16 if word in ("nvfp4", "affine4:g32", "affine2:g64", "affine8:g64", "mxfp8_e5m2") else torch.float16
    if shape in ROUNDED:
        w = to_device(random_weight(word, 128, k, 0), "cpu")
        rounded.linear(torch.zeros(80, k, dtype=dtype), w, torch.zeros(128, dtype=dtype), shape.partition("-")[0], ROUNDED[shape])
    elif shape == "experts":
        q = random_weight(word, 128, k, 0)
        stack = type(q)(q.format, (2, 128, k), {part: torch.tensor(v).expand(2, *v.shape).numpy() for part, v in q.parts.items()})
        table = TokenBlocks(*(torch.zeros(4, dtype=torch.int32) for _ in range(6)))
        schedule.fused_blocks(torch.zeros(4 * tile.tokens, k, dtype=dtype), to_device(stack, "cpu"), None, table, tile, 2, dtype)
    else:
        w = to_device(random_weight(word, 128, k, 0), "cpu")
        schedule.fused(torch.zeros(80, k, dtype=dtype), w, torch.zeros(128, dtype=dtype), tile)
    ((key),) = (key for key in set(binaries) - before if "wgmma" in key[0])
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", binaries[key].asm["ptx"])
    assert products, "no wgmma"
    assert set(products) == {"{"}, "the weight is not the register operand"
    assert binaries[key].metadata.shared <= 232448, binaries[key].metadata.shared
    return len(products)


def main():
    global target
    names = sys.argv[1:]
    every = names[0] == "all"
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(driver, "_active", Target()),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(gpu, "capability", side_effect=lambda device: divmod(target.arch, 10)),
        mock.patch.object(gpu, "multiprocessors", return_value=132),
    ):
        for name in names[every:]:
            target = GPUTarget("cuda", int(name) if name.isdigit() else 90, 32)
            if not name.isdigit():
                print(name, check_wgmma(name), flush=True)
                continue
            check_rest()
            for word in FORMATS if every else SHORT[target.arch]:
                check(word, every or word in DEEP)
                print(name, word, len(binaries), "kernels", flush=True)


main()
