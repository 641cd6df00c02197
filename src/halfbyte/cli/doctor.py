"""halfbyte doctor: versions, CPU, GPUs, backends and known problems of this machine, for a report
or for oneself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from .backends import records as backend_records
from .terminal import Column, print_json, print_table, print_wrapped

PACKAGES = (
    "numpy", "ml_dtypes", "safetensors", "gguf", "typer", "rich", "torch", "transformers", "tokenizers", "triton", "mlx",
    "onnxruntime", "llama-cpp-python",
)  # fmt: skip
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
"""CPU features that kernels or their peers use, as Linux names them."""


class Problem(NamedTuple):
    """A version known not to work. `below` and `at` are versions; None is no bound."""

    package: str
    below: str | None
    at: str | None
    sentence: str


PROBLEMS = (
    Problem("transformers", "5.0", None, "load_model, generate, chat and serve need version 5; other commands do not"),
    Problem("torch", "2.11", None, "halfbyte.torch needs torch 2.11 or later"),
    Problem("triton", "3.6", None, "the CUDA kernels are compiled with Triton 3.6 or later"),
    Problem("numpy", "1.26", None, "halfbyte needs NumPy 1.26 or later"),
    Problem("mlx", "0.30", None, "halfbyte.mlx needs MLX 0.30 or later"),
    Problem("safetensors", "0.5", None, "halfbyte needs safetensors 0.5 or later"),
)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: system, packages, backends, problems.")] = False,
) -> int:
    """Report versions, CPU features, GPUs, backends and combinations known not to work; paste it
    into an issue.

    Exit status: 0 no known problem, 1 at least one.
    """
    installed = {name: v for name in PACKAGES if (v := _version(name)) is not None}
    system, gpus, backends = _system(), _gpus(), list(backend_records())
    found = problems(installed, backends)
    if json:
        print_json({"record": "system", **system, "gpus": gpus, "packages": installed})
        for record in backends:
            print_json(record)
        for sentence in found:
            print_json({"record": "problem", "problem": sentence})
        return int(bool(found))
    print_wrapped(f"halfbyte {system['halfbyte']}, Python {system['python']}, {system['platform']}")
    print_wrapped(f"CPU: {system['cpu']}, {system['cores']} cores; {', '.join(system['features']) or 'features unknown here'}")
    print_wrapped(f"native core: {system['native']}")
    print_wrapped(f"GPUs: {'; '.join(gpus) or 'none found by torch'}")
    print_wrapped(f"packages: {', '.join(f'{name} {v}' for name, v in installed.items())}")
    print()
    columns = (Column("backend"), Column("device"), Column("runs here"), Column("what was detected, or why not"))
    print_table(
        columns,
        [[r["backend"], r["device"], "yes" if r["available"] else "no", r["reason"] or r["description"]] for r in backends],
    )
    print()
    for sentence in found:
        print_wrapped(f"problem: {sentence}")
    if not found:
        print("no known problem")
    return int(bool(found))


def problems(installed: dict[str, str], backends: list[dict[str, Any]]) -> list[str]:
    """A sentence for each known-bad version, and for a backend that failed to load."""
    found = []
    for p in PROBLEMS:
        version = installed.get(p.package)
        if version is None:
            continue
        if (p.below and _order(version) < _order(p.below)) or version == p.at:
            found.append(f"{p.package} {version}: {p.sentence}")
    found += [
        f"backend {r['backend']}: {r['reason']}" for r in backends if str(r["reason"] or "").startswith("it could not be loaded")
    ]
    return found


def _order(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    from halfbyte import __version__

    from ..checkpoints.engines import cpu_flags
    from ..numerics.transpose import native

    model, flags = platform.processor() or platform.machine(), cpu_flags()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = re.search(r"^model name\s*: (.*)$", info.read_text("utf-8", "replace"), re.MULTILINE)
        model = named[1] if named else model
    return {
        "halfbyte": __version__, "python": platform.python_version(), "platform": platform.platform(), "cpu": model,
        "cores": os.cpu_count(), "features": [f for f in FEATURES if f in flags],
        "native": "absent: NumPy decodes, and products run on the reference backend" if native() is None else "loaded",
        "executable": sys.executable,
    }  # fmt: skip


def _gpus() -> list[str]:
    """Name, compute capability and memory of each GPU that torch finds; why it finds none, when it
    fails.
    """
    try:
        import torch

        if torch.cuda.is_available():
            devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            return [f"{d.name}, compute capability {d.major}.{d.minor}, {d.total_memory / 1e9:.0f} GB" for d in devices]
        return ["Apple GPU through Metal"] if torch.backends.mps.is_available() else []
    except ImportError:
        return []
    except Exception as error:  # a driver may raise anything; the report goes on
        return [f"torch could not list them: {type(error).__name__}: {error}"]
