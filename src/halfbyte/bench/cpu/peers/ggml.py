"""ggml's product of a quantized weight, llama.cpp's and ik_llama.cpp's; activations have 8 bits.

The folders HALFBYTE_LLAMA_CPP and HALFBYTE_IK_LLAMA_CPP hold the libraries, of any build; without
the first, llama.cpp's are llama_cpp's. llama.cpp interleaves rows where it can; ik_llama.cpp's
interleaved types are peers of their own.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BackendError
from ....formats.ggml.types import GGMLType, ggml_type
from ....layouts.gguf.layout import GGUF
from .base import F32, Calls, Peer, Ready

LARGEST_ERROR = 0.02
"""Relative; 8-bit activations make 0.008."""
_P, _SIZE, _I64, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class _Params(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


_INTERLEAVED = "_Z35ggml_backend_cpu_repack_buffer_typev"
"""llama.cpp's kind of buffer whose tensors have interleaved rows, without which it is no fair peer;
ik_llama.cpp's interleaved types are types of their own.
"""
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_Params,)),
    "ggml_free": (None, (_P,)),
    "ggml_new_tensor_2d": (_P, (_P, _INT, _I64, _I64)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_get_data": (_P, (_P,)),
    # The last argument is ik_llama.cpp's alone.
    "ggml_quantize_chunk": (_SIZE, (_INT, _P, _P, _I64, _I64, _I64, _P, _P)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _INT)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_graph_compute": (_INT, (_P, _P)),
    _INTERLEAVED: (_P, ()),
}


def libraries(engine: str) -> list[Path]:
    """ggml's shared libraries, each after those it needs; BackendError where there are none."""
    variable = f"HALFBYTE_{engine.replace('.', '_').upper()}"
    folder = os.environ.get(variable, "")
    spec = find_spec("llama_cpp") if engine == "llama.cpp" else None
    if not folder and spec and spec.origin:
        folder = str(Path(spec.origin).parent / "lib")
    if not folder:
        also = "llama_cpp is not installed and " if engine == "llama.cpp" else ""
        raise BackendError(f"[bench] {also}{variable} names no folder with the libggml libraries of {engine}")
    parts = [sorted(Path(folder).rglob(f"lib{part}.*")) for part in ("ggml-base", "ggml-cpu")]
    found = [p[0] for p in parts if p] or sorted(Path(folder).rglob("libggml.*"))[:1]
    if not found:
        raise BackendError(f"[bench] {folder} holds no libggml-cpu and no libggml, the libraries of {engine}")
    return found


class Library:
    """An engine's functions."""

    def __init__(self, engine: str) -> None:
        self.name = engine
        parts = [ctypes.CDLL(str(path)) for path in libraries(engine)]
        for name, (result, arguments) in _FUNCTIONS.items():
            found = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
            if found is not None:
                found.restype, found.argtypes = result, arguments
                setattr(self, name, found)
            elif name != _INTERLEAVED or engine == "llama.cpp":
                raise BackendError(f"[bench] {engine}: its libraries have no function {name}")
        self.backend = self.ggml_backend_cpu_init()
        plain = self.ggml_backend_cpu_buffer_type()
        self.buffers = [getattr(self, _INTERLEAVED)(), plain] if hasattr(self, _INTERLEAVED) else [plain]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def library(name: str) -> Library:
    """Loaded once in a process."""
    return Library(name)


class Memory:
    """A context and its tensors' buffers, freed with this object."""

    def __init__(self, lib: Library) -> None:
        self.lib = lib
        self.context = lib.ggml_init(_Params(1 << 23, None, True))
        if not self.context:  # ik_llama.cpp has 64 in a process
            raise BackendError(f"[bench] {lib.name}: no context; name fewer --peers")
        weakref.finalize(self, lib.ggml_free, self.context)

    def allocate(self, kind: Any) -> None:
        """For tensors without a buffer."""
        buffer = self.lib.ggml_backend_alloc_ctx_tensors_from_buft(self.context, kind)
        if not buffer:
            raise BackendError(f"[bench] {self.lib.name}: no memory")
        weakref.finalize(self, self.lib.ggml_backend_buffer_free, buffer)

    def tensor(self, kind: int, k: int, n: int) -> Any:
        """n rows of k elements of a type."""
        return self.lib.ggml_new_tensor_2d(self.context, kind, k, n)


class GGML(Peer):
    """`llama.cpp-Q4_K`, `ik_llama.cpp-Q4_K-R4`: an engine and a type, by its number there."""

    modules = ()

    def __init__(self, engine: str, kind: GGMLType, number: int, suffix: str) -> None:
        self.engine, self.type, self.number = engine, kind, number
        super().__init__(f"{engine}-{kind.name}{suffix}", "int8", 8 * kind.nbytes / kind.block)

    def reason(self) -> str | None:
        try:
            library(self.engine)
        except (BackendError, OSError) as problem:
            return str(problem)
        return None

    def pack(self, weights: list[F32], threads: int) -> Ready:
        lib = library(self.engine)
        lib.ggml_backend_cpu_set_n_threads(lib.backend, threads)
        n, k = weights[0].shape
        kept, tensors = self.stored(lib, weights)
        expected = self.decoded(lib, weights[0][:64])

        def calls(x: F32) -> Calls:
            memory = Memory(lib)
            inputs = memory.tensor(0, k, len(x))
            results = [lib.ggml_mul_mat(memory.context, tensor, inputs) for tensor in tensors]
            memory.allocate(lib.buffers[-1])
            lib.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
            graphs = [lib.ggml_new_graph(memory.context) for _ in results]
            runs: Calls = []
            for graph, result in zip(graphs, results, strict=True):
                lib.ggml_build_forward_expand(graph, result)
                values = (ctypes.c_float * (len(x) * n)).from_address(lib.ggml_get_data(result))
                y = np.frombuffer(values, np.float32).reshape(len(x), n)
                runs.append(partial(compute, lib, graph, y, (kept, memory)))
            check_values(self.name, runs[0]()[:, : len(expected)], x @ expected.T)
            return runs

        return calls

    def quantized(self, lib: Library, w: F32, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The rows of `w` as blocks, by the library's own rounding."""
        n, k = w.shape
        out = np.empty((n, self.type.row_bytes(k)), np.uint8)
        dense = np.ascontiguousarray(w)
        lib.ggml_quantize_chunk(number, dense.ctypes.data, out.ctypes.data, 0, n, k, None, None)
        return out

    def stored(self, lib: Library, weights: list[F32]) -> tuple[Memory, list[Any]]:
        """The weights as tensors of the library, interleaved where it multiplies those."""
        n, k = weights[0].shape
        for kind in lib.buffers:
            memory = Memory(lib)
            tensors = [memory.tensor(self.number, k, n) for _ in weights]
            memory.allocate(kind)
            trial = Memory(lib)
            product = lib.ggml_mul_mat(trial.context, tensors[0], trial.tensor(0, k, 1))
            if kind == lib.buffers[-1] or lib.ggml_backend_supports_op(lib.backend, product):
                break
        for tensor, w in zip(tensors, weights, strict=True):
            blocks = self.quantized(lib, w, self.number)
            lib.ggml_backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
        return memory, tensors

    def decoded(self, lib: Library, w: F32) -> F32:
        """What its blocks of `w` mean."""
        blocks = self.quantized(lib, w, self.type.id)
        return np.asarray(GGUF().unpack({"weight": blocks}, {"type": self.type.name}).dequantize("float32"))


def compute(lib: Library, graph: Any, y: F32, _kept: Any) -> F32:
    """One product, by memory that `_kept` holds; the graph's next one overwrites it."""
    if lib.ggml_backend_graph_compute(lib.backend, graph):
        raise BackendError(f"[bench] {lib.name} refuses a product")
    return y


def check_values(name: str, found: F32, wanted: F32) -> None:
    """BackendError for a result that is not the product, 8-bit activations allowed for."""
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    if not error <= LARGEST_ERROR:
        raise BackendError(f"[bench] {name}: its result differs from the product by {error:.3g} of it; leave it out of --peers")


_LLAMA = ("Q4_0", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "MXFP4", "NVFP4")
_IK = {
    "Q4_0": (202, "R8"), "Q4_K": (212, "R4"), "Q5_0": (206, "R4"), "Q6_K": (214, "R4"), "Q8_0": (208, "R8"), "MXFP4": (353, "R8"),
}  # fmt: skip
"""Types of ik_llama.cpp, and the number and rows together of each one's interleaved type."""

GGML_PEERS = (
    *(GGML("llama.cpp", ggml_type(name), ggml_type(name).id, "") for name in _LLAMA),
    *(GGML("ik_llama.cpp", ggml_type(name), ggml_type(name).id, "") for name in _IK),
    *(GGML("ik_llama.cpp", ggml_type(name), number, f"-{rows}") for name, (number, rows) in _IK.items()),
)
