"""What a file may import (docs/design/layering.md): its own floor and lower ones, no cycle, no
private name, no backend's inside.

Heavy packages are imported only where the floor may, and late. Each rule is shown to fail on a
planted example.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte
from support.import_graph import FRONT, Package

PACKAGE = Package(Path(halfbyte.__file__).parent)

FLOORS: dict[str, int] = {
    # 0 core
    "errors": 0, "spec": 0, "numerics": 0, "_native": 0,
    # 1 formats
    "formats": 1,
    # 2 tensor
    "tensor": 2, "producers": 2,
    # 3 layouts
    "layouts": 3,
    # 4 checkpoints
    "checkpoints": 4,
    # 5 backends
    "backends": 5,
    # 6 operations
    "ops": 6, "gguf_models": 6, "conversion": 6, "verification": 6, "quantizers": 6,
    # 7 integrations
    "torch": 7, "transformers": 7, "mlx": 7, "vllm": 7, "generation": 7, "evaluation": 7, "calibration": 7, "reports": 7,
    # 8 cli
    "cli": 8, "bench": 8, "__main__": 8,
}  # fmt: skip
"""Floor of each module or subpackage directly under `halfbyte`. The package's own `__init__`
imports from any floor up to 7; only floor 8 imports it.
"""

ALLOWED: dict[int, set[str]] = {
    0: {"numpy", "ml_dtypes"},
    1: {"numpy", "ml_dtypes", "gguf"},
    2: {"numpy", "ml_dtypes"},
    3: {"numpy", "ml_dtypes"},
    4: {"numpy", "ml_dtypes", "safetensors", "gguf", "huggingface_hub", "onnx", "torch", "transformers"},
    5: {"numpy", "ml_dtypes", "torch", "triton", "mlx"},
    6: {"numpy", "ml_dtypes", "safetensors", "gguf", "torch", "transformers", "tokenizers"},
    7: {"numpy", "ml_dtypes", "safetensors", "gguf", "torch", "transformers", "tokenizers", "datasets", "lm_eval", "mlx"}
    | {"jinja2", "vllm", "llama_cpp", "peft"},
}
"""Third-party packages of each floor; floor 8 may use anything."""

LATE = {
    "torch", "transformers", "tokenizers", "triton", "mlx", "matplotlib", "gguf", "onnxruntime", "onnx", "huggingface_hub",
    "llama_cpp",
}  # fmt: skip
"""Packages that are optional or slow to import: only inside functions or under `TYPE_CHECKING`."""

WRITTEN_IN = (
    "backends.cuda.",
    "backends.metal.",
    "gguf_models.tokenizer",
    "gguf_models.partial_tokenizer",
    "gguf_models.smallthinker",
    "torch.",
    "transformers.",
    "mlx.",
    "vllm.",
    "evaluation.",
    "bench.",
    "calibration.",
)
"""Modules inside these packages are written in torch, triton or mlx and import them at the top.
Their `__init__` may not: it reports that they are missing.
"""

BACKENDS = ("backends.reference", "backends.cpu", "backends.cuda", "backends.metal")
"""Modules that must not import each other, and whose insides nobody outside `backends` imports."""

INSIDE_ALLOWED: dict[tuple[str, str], str] = {
    ("mlx.", "backends.metal."): "the Metal backend under MLX: the same kernels and launches, with MLX arrays",
    ("bench.selftest", "backends.metal."): "checks kernels that no schedule picks: the plain one and other decoders of E2M1",
    ("bench.cuda.", "backends.cuda."): "times one kernel, tile or decoder at a time, among which the backend chooses",
}
"""(importing modules, backend) -> why they may import the backend's inside."""


def unit(module: str) -> str:
    """The first component: what the table of floors lists."""
    return module.split(".")[0]


def floor_violations(package: Package, module: str) -> list[str]:
    """Every import of a module that the floors forbid, as a sentence."""
    floor = FLOORS.get(unit(module))
    if floor is None:
        return [f"{module} has no floor; add it to FLOORS and to docs/design/layering.md"]
    out = []
    for item in package.imports(module):
        where = f"{module}:{item.line}"
        target = package.module_of(item.name)
        if target is None:
            root = item.name.split(".")[0]
            if root in sys.stdlib_module_names:
                continue
            if root not in ALLOWED.get(floor, {root}):
                out.append(f"{where} imports {root}, which floor {floor} does not use")
            if root in LATE and item.at_import and not module.startswith(WRITTEN_IN):
                out.append(f"{where} imports {root} at module level; import it inside the function that needs it")
        elif target == FRONT:
            if floor < 8:
                out.append(f"{where} imports the package's front ({item.name}); import the module that defines it")
        elif FLOORS.get(unit(target), 99) > floor:
            out.append(f"{where} (floor {floor}) imports {target} (floor {FLOORS.get(unit(target))})")
        elif any(module.startswith(s) and target.startswith(o) for s in BACKENDS for o in BACKENDS if s != o):
            out.append(f"{where} imports {target}; no backend imports another")
    return out


def backend_violations(package: Package, module: str) -> list[str]:
    """Imports of a backend's inside that `INSIDE_ALLOWED` does not list."""
    allowed = tuple(backend for prefix, backend in INSIDE_ALLOWED if module.startswith(prefix))
    found = package.backend_internals(module, BACKENDS)
    return [sentence for sentence in found if not sentence.split(" imports ")[1].startswith(allowed or ("\0",))]


@pytest.mark.parametrize("module", [m for m in PACKAGE.files if m != FRONT])
def test_no_upward_edge(module):
    assert floor_violations(PACKAGE, module) == []


@pytest.mark.parametrize("module", PACKAGE.files)
def test_no_private_name_of_another_module(module):
    assert PACKAGE.private_imports(module) == []


@pytest.mark.parametrize("module", PACKAGE.files)
def test_no_import_into_a_backend_from_outside(module):
    assert backend_violations(PACKAGE, module) == []


def test_no_cycle_of_files():
    assert [" -> ".join(cycle) for cycle in PACKAGE.cycles()] == []


def test_every_exception_for_a_backend_is_used():
    used = {
        (prefix, backend)
        for prefix, backend in INSIDE_ALLOWED
        for module in PACKAGE.files
        if module.startswith(prefix) and any(t.startswith(backend) for t in PACKAGE.edges[module])
    }
    assert used == set(INSIDE_ALLOWED)


def test_the_page_names_every_module_on_its_floor():
    page = (Path(__file__).parents[2] / "docs" / "design" / "layering.md").read_text(encoding="utf-8")
    rows = {int(row[2]): row for row in page.splitlines() if row.startswith("| ") and row[2].isdigit()}
    assert sorted(rows) == list(range(9))
    missing = [name for name, floor in FLOORS.items() if f"`{name}`" not in rows[floor] and f"`{name}/`" not in rows[floor]]
    assert missing == []


def test_the_front_stays_below_the_command_line():
    assert {t for t in PACKAGE.edges[FRONT] if FLOORS[unit(t)] > 7} == set()


def test_every_module_of_the_package_is_read():
    assert {"errors", "tensor.qtensor", "formats.mx", "backends.reference", "cli"} <= set(PACKAGE.files)


def planted(folder: Path, **sources: str) -> Package:
    """A package `halfbyte` of the given modules; `a__b` is the module a.b and `a____init__` the
    package a.
    """
    root = folder / "halfbyte"
    for name, source in {"__init__": "", **sources}.items():
        parts = [name] if name == "__init__" else name.split("__", 1)
        path = root.joinpath(*parts[:-1], f"{parts[-1]}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return Package(root)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("from .tensor.qtensor import QTensor", "errors:1 (floor 0) imports tensor.qtensor (floor 2)"),
        ("from . import ops", "errors:1 (floor 0) imports ops (floor 6)"),
        ("def f():\n    from .ops import linear", "errors:2 (floor 0) imports ops (floor 6)"),
        ("if TYPE_CHECKING:\n    from .ops import linear", "errors:2 (floor 0) imports ops (floor 6)"),
        ("import halfbyte.ops", "errors:1 (floor 0) imports ops (floor 6)"),
        ("import rich", "errors:1 imports rich, which floor 0 does not use"),
        ("from . import __version__", "errors:1 imports the package's front (halfbyte.__version__)"),
    ],
)
def test_an_upward_edge_is_found(tmp_path, source, sentence):
    package = planted(tmp_path, errors=source, ops="", tensor__qtensor="")
    assert [e[: len(sentence)] for e in floor_violations(package, "errors")] == [sentence]


@pytest.mark.parametrize("source", ["import os", "from . import spec", "from .spec import Format", "from . import _native"])
def test_an_import_of_the_same_floor_is_none(tmp_path, source):
    assert floor_violations(planted(tmp_path, errors=source, spec=""), "errors") == []


def test_an_optional_package_at_module_level_is_found(tmp_path):
    package = planted(tmp_path, formats__mx="import gguf", formats__nf4="def f():\n    import gguf")
    assert floor_violations(package, "formats.mx") == [
        "formats.mx:1 imports gguf at module level; import it inside the function that needs it"
    ]
    assert floor_violations(package, "formats.nf4") == []


def test_one_backend_importing_another_is_found(tmp_path):
    package = planted(tmp_path, backends__cpu="from . import reference", backends__reference="")
    assert floor_violations(package, "backends.cpu") == ["backends.cpu:1 imports backends.reference; no backend imports another"]


def test_a_module_without_a_floor_is_found(tmp_path):
    package = planted(tmp_path, novelty="")
    assert floor_violations(package, "novelty") == ["novelty has no floor; add it to FLOORS and to docs/design/layering.md"]


@pytest.mark.parametrize(
    "late",
    [
        "from .formats.b import y",
        "def f():\n    from .formats.b import y",
        "if TYPE_CHECKING:\n    from .formats.b import y",
        "import halfbyte.formats.b",
    ],
)
def test_a_cycle_of_files_is_found(tmp_path, late):
    package = planted(tmp_path, spec=late, formats__b="from ..errors import x", errors="from . import spec")
    assert package.cycles() == [["errors", "spec", "formats.b", "errors"]]


def test_a_cycle_through_the_front_is_found(tmp_path):
    package = planted(tmp_path, __init__="from .spec import Format", spec="def f():\n    from . import __version__")
    assert package.cycles() == [["__init__", "spec", "__init__"]]


def test_two_cycles_are_two(tmp_path):
    package = planted(tmp_path, a="from . import b", b="from . import a", c="from . import d, a", d="from . import c")
    assert package.cycles() == [["a", "b", "a"], ["c", "d", "c"]]


def test_no_cycle_without_a_way_back(tmp_path):
    package = planted(tmp_path, a="from . import b, c", b="from . import c, _native", c="")
    assert package.cycles() == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from .a import _x", ["b:1 imports a._x"]),
        ("from . import a\ny = a._x", ["b:2 uses a._x"]),
        ("from . import a as other\ny = other._x()", ["b:2 uses a._x"]),
        ("from .p import _inner", ["b:1 imports p._inner"]),
        ("from . import _native", []),
        ("from . import __version__", []),
        ("from .a import x\ny = x._z", []),
        ("import os\nos._exit(1)", []),
    ],
)
def test_a_private_import_is_found(tmp_path, source, found):
    assert planted(tmp_path, a="_x = 1", p___inner="", b=source).private_imports("b") == found


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("ops", "from .backends.cpu.pack import x", ["ops:1 imports backends.cpu.pack"]),
        ("ops", "def f():\n    from .backends.cpu import pack", ["ops:2 imports backends.cpu.pack"]),
        ("ops", "from .backends import cpu", []),
        ("ops", "from .backends.cpu import linear", []),
        ("mlx__verbs", "from ..backends.metal import launch", []),
        ("mlx__verbs", "from ..backends.cpu import pack", ["mlx.verbs:1 imports backends.cpu.pack"]),
        ("backends__select", "from .cpu import pack", []),
    ],
)
def test_an_import_into_a_backend_is_found(tmp_path, module, source, found):
    package = planted(tmp_path, backends__cpu="", **{module: source})
    inside = {"backends.cpu.pack": "cpu/pack.py", "backends.metal.launch": "metal/launch.py"}
    for path in inside.values():
        file = package.root / "backends" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    package = Package(package.root)
    assert backend_violations(package, module.replace("__", ".")) == found


def fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter that sees this package."""
    env_path = str(PACKAGE.root.parent)
    code = f"import sys; sys.path.insert(0, {env_path!r}); {code}"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("module", ["halfbyte", "halfbyte.cli"])
def test_importing_pulls_in_no_heavy_package(module):
    loaded = set(fresh(f"import {module}; print(*sys.modules)").split())
    assert module in loaded
    assert loaded & {"torch", "transformers", "tokenizers", "triton", "mlx", "matplotlib", "gguf", "onnxruntime"} == set()


def test_importing_takes_under_a_second():
    """Of processor time, the best of three, so that a busy machine does not decide."""
    code = "import time; t = time.process_time(); import halfbyte; print(time.process_time() - t)"
    assert min(float(fresh(code)) for _ in range(3)) < 1.0
