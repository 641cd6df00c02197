"""ggml's product of a quantized weight on the CPU, llama.cpp's and ik_llama.cpp's: activations are
rounded to 8 bits in blocks.

Their shared libraries are called directly, so that a build for another instruction set is measured
by naming its folder in HALFBYTE_LLAMA_CPP or HALFBYTE_IK_LLAMA_CPP. Without the first, llama.cpp's
is that of the installed llama_cpp package. llama.cpp interleaves the rows of a type where it has
code for that, as it does when it loads a model; ik_llama.cpp's interleaved types are peers of their
own (`-R4`, `-R8`), since the others are interleaved in the call from some tokens on.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import weakref
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BackendError
from ....formats.ggml.types import GGMLType, ggml_type
from ....layouts.gguf.layout import GGUF
from .base import F32, Calls, Peer, Ready

CHECKED_ROWS = 64
LARGEST_ERROR = 0.02
"""Largest root mean square error of the first result, as a share of that result; activations of 8
bits make 0.004 to 0.008.
"""
_P, _SIZE, _I64, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class _Params(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_Params,)),
    "ggml_free": (None, (_P,)),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_new_tensor_2d": (_P, (_P, _INT, _I64, _I64)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_get_data": (_P, (_P,)),
    # ik_llama.cpp's takes one more argument than llama.cpp's, which does not read it.
    "ggml_quantize_chunk": (_SIZE, (_INT, _P, _P, _I64, _I64, _I64, _P, _P)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _INT)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_graph_compute": (_INT, (_P, _P)),
    "ggml_backend_cpu_reg": (_P, ()),
    "ggml_backend_reg_dev_get": (_P, (_P, _SIZE)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
}
_TENSORS_BYTES = 1 << 18
"""For the descriptions of a context's tensors."""


@dataclass(frozen=True)
class Engine:
    """Where an engine's libraries are: in the folder that an environment variable names, or in
    `folder` of an installed package.
    """

    name: str
    variable: str
    package: str = ""
    folder: str = ""

    def libraries(self) -> list[Path]:
        """ggml's shared libraries, each after those it needs; BackendError where there are none."""
        named = os.environ.get(self.variable, "")
        spec = importlib.util.find_spec(self.package) if self.package and not named else None
        if named:
            folder = Path(named)
        elif spec and spec.origin:
            folder = Path(spec.origin).parent / self.folder
        else:
            also = f"{self.package} is not installed and " if self.package else ""
            raise BackendError(f"[bench] {also}{self.variable} names no folder with the libggml libraries of {self.name}")
        parts = [sorted(folder.rglob(f"lib{part}.*")) for part in ("ggml-base", "ggml-cpu")]
        found = [p[0] for p in parts if p] or sorted(folder.rglob("libggml.*"))[:1]
        if not found:
            raise BackendError(f"[bench] {folder} holds no libggml-cpu and no libggml, the libraries of {self.name}")
        return found


ENGINES = {
    "llama.cpp": Engine("llama.cpp", "HALFBYTE_LLAMA_CPP", "llama_cpp", "lib"),
    "ik_llama.cpp": Engine("ik_llama.cpp", "HALFBYTE_IK_LLAMA_CPP"),
}


class Library:
    """An engine's functions, loaded once in a process; they keep apart from another engine's of the
    same names.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.parts = [ctypes.CDLL(str(path)) for path in engine.libraries()]
        for name, (result, arguments) in _FUNCTIONS.items():
            found = next((getattr(part, name) for part in self.parts if hasattr(part, name)), None)
            if found is not None:
                found.restype, found.argtypes = result, arguments
                setattr(self, name, found)
        self.backend = self.ggml_backend_cpu_init()
        self.plain = self.ggml_backend_cpu_buffer_type()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"[bench] {self.name}: its libraries have no function {name}")

    def interleaved(self) -> list[Any]:
        """The kinds of buffers whose tensors are stored in another order."""
        if not hasattr(self, "ggml_backend_cpu_reg"):
            return []
        registry = self.ggml_backend_cpu_reg()
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self.ggml_backend_reg_dev_get(registry, 0))
        out: list[Any] = []
        while listed and listed[len(out)]:
            out.append(listed[len(out)])
        return out


@cache
def library(name: str) -> Library:
    """The library of an engine."""
    return Library(ENGINES[name])


class Memory:
    """A context of ggml for some graphs, and the buffers of its tensors; freed with this object."""

    def __init__(self, lib: Library, graphs: int = 1) -> None:
        self.lib = lib
        self.context = lib.ggml_init(_Params(_TENSORS_BYTES + graphs * lib.ggml_graph_overhead(), None, True))
        if not self.context:  # ik_llama.cpp has 64 in a process
            raise BackendError(f"[bench] {lib.name} gives no further context; name fewer --peers of it")
        weakref.finalize(self, lib.ggml_free, self.context)

    def allocate(self, kind: Any) -> None:
        """Memory of a kind of buffer for the tensors that have none."""
        buffer = self.lib.ggml_backend_alloc_ctx_tensors_from_buft(self.context, kind)
        if not buffer:
            raise BackendError(f"[bench] {self.lib.name}: no memory for a weight")
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
        expected = self.decoded(lib, weights[0][:CHECKED_ROWS])

        def calls(x: F32) -> Calls:
            memory = Memory(lib, len(tensors))
            inputs = memory.tensor(0, k, len(x))
            results = [lib.ggml_mul_mat(memory.context, tensor, inputs) for tensor in tensors]
            memory.allocate(lib.plain)
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
        done = lib.ggml_quantize_chunk(number, dense.ctypes.data, out.ctypes.data, 0, n, k, None, None)
        if done != out.nbytes:
            raise BackendError(
                f"[bench] {self.name}: {done} bytes of {n} x {k} weights, {out.nbytes} are a {self.type.name} weight"
            )
        return out

    def stored(self, lib: Library, weights: list[F32]) -> tuple[Memory, list[Any]]:
        """The weights as tensors of the library, interleaved where it multiplies those."""
        n, k = weights[0].shape
        for kind in [*lib.interleaved(), lib.plain]:
            memory = Memory(lib)
            tensors = [memory.tensor(self.number, k, n) for _ in weights]
            memory.allocate(kind)
            trial = Memory(lib)
            product = lib.ggml_mul_mat(trial.context, tensors[0], trial.tensor(0, k, 1))
            if kind == lib.plain or lib.ggml_backend_supports_op(lib.backend, product):
                break
        for tensor, w in zip(tensors, weights, strict=True):
            blocks = self.quantized(lib, w, self.number)
            lib.ggml_backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
        return memory, tensors

    def decoded(self, lib: Library, w: F32) -> F32:
        """The values the library's rounding of `w` stands for."""
        blocks = self.quantized(lib, w, self.type.id)
        return np.asarray(GGUF().unpack({"weight": blocks}, {"type": self.type.name}).dequantize("float32"))


def compute(lib: Library, graph: Any, y: F32, kept: Any) -> F32:
    """One product, which the graph's next one overwrites; `kept` is the memory it uses.
    BackendError where ggml refuses.
    """
    status = lib.ggml_backend_graph_compute(lib.backend, graph)
    if status:
        raise BackendError(f"[bench] {lib.name} ended a product with status {status}")
    return y


def check_values(name: str, found: F32, wanted: F32) -> None:
    """BackendError for a result that is not the product, 8-bit activations allowed for."""
    error = float(np.sqrt(np.mean((found.astype(np.float64) - wanted) ** 2) / np.mean(wanted.astype(np.float64) ** 2)))
    if not error <= LARGEST_ERROR:
        raise BackendError(
            f"[bench] {name}: its result differs from the product by {error:.3g} of it, {LARGEST_ERROR} is allowed; "
            "leave it out of --peers"
        )


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
