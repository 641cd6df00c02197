"""A module imports only from its own floor and lower ones, and heavy packages only where its floor may."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent

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
    "ops": 6, "conversion": 6, "verification": 6, "quantizers": 6,
    # 7 integrations
    "torch": 7, "transformers": 7, "mlx": 7, "generation": 7, "evaluation": 7, "calibration": 7,
    # 8 cli
    "cli": 8, "bench": 8, "__main__": 8,
}  # fmt: skip
"""Floor of each module or subpackage directly under `halfbyte`."""

EXTENSIONS = {"_native"}
"""Compiled modules, which are no file here."""

FRONT = "__init__"
"""The package's own `__init__`: the names users import, from any floor up to 7. Inside, only `cli` and `bench` may import it."""

ALLOWED: dict[int, set[str]] = {
    0: {"numpy", "ml_dtypes"},
    1: {"numpy", "ml_dtypes", "gguf"},
    2: {"numpy", "ml_dtypes"},
    3: {"numpy", "ml_dtypes"},
    4: {"numpy", "ml_dtypes", "safetensors", "gguf"},
    5: {"numpy", "ml_dtypes", "torch", "triton", "mlx"},
    6: {"numpy", "ml_dtypes", "safetensors", "gguf"},
    7: {"numpy", "ml_dtypes", "safetensors", "gguf", "torch", "transformers", "tokenizers", "datasets", "lm_eval", "mlx"}
    | {"jinja2"},
}
"""Third-party packages of each floor; floor 8 may use anything."""

LATE = {"torch", "transformers", "tokenizers", "triton", "mlx", "matplotlib", "gguf", "onnxruntime"}
"""Packages that are optional or slow to import: only inside functions or under `TYPE_CHECKING`."""

HOMES = ("backends.cuda.", "backends.metal.", "torch.", "transformers.", "mlx.", "evaluation.", "bench.", "calibration.")
"""Modules inside these packages are written in torch, triton or mlx and import them at the top. Their `__init__` may not: it
is what says that they are missing."""

SIBLINGS = ("backends.reference", "backends.cpu", "backends.cuda", "backends.metal")
"""Modules that must not see each other."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(p): p for p in sorted(PACKAGE.rglob("*.py"))}


def unit(module: str) -> str:
    """The first component: what the table of floors lists."""
    return module.split(".")[0]


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(absolute dotted name, True at module level and run, line) of every import in a file, those in functions included."""
    package = list(path.relative_to(PACKAGE.parent).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            late.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in late, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(x for x in (base, node.module) if x)
            for alias in node.names:
                yield f"{stem}.{alias.name}", node not in late, node.lineno


def inside(name: str) -> str | None:
    """The halfbyte module that a dotted name refers to ("" for the package itself), None for other packages."""
    parts = name.split(".")
    if parts[0] != "halfbyte":
        return None
    for end in range(len(parts), 1, -1):
        found = ".".join(parts[1:end])
        if found in MODULES or found in EXTENSIONS:
            return found
    return ""


def upward_edges(module: str, path: Path) -> list[str]:
    """Every import of `path` that the floors forbid, as a sentence."""
    floor = FLOORS.get(unit(module))
    if floor is None:
        return [f"{module} has no floor; add it to FLOORS and to docs/design/layering.md"]
    found = []
    for name, at_import, line in imports(path):
        where = f"{module}:{line}"
        target = inside(name)
        if target is None:
            root = name.split(".")[0]
            if root in sys.stdlib_module_names or root == "halfbyte":
                continue
            if root not in ALLOWED.get(floor, {root}):
                found.append(f"{where} imports {root}, which floor {floor} does not use")
            if root in LATE and at_import and not module.startswith(HOMES):
                found.append(f"{where} imports {root} at module level; import it inside the function that needs it")
        elif target == "":
            if floor < 8:
                found.append(f"{where} imports the package's front ({name}); import the module that defines it")
        elif FLOORS.get(unit(target), 99) > floor:
            found.append(f"{where} (floor {floor}) imports {target} (floor {FLOORS.get(unit(target))})")
        elif any(module.startswith(s) and target.startswith(o) for s in SIBLINGS for o in SIBLINGS if s != o):
            found.append(f"{where} imports {target}; no backend sees another")
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if m != FRONT])
def test_no_upward_edge(module):
    assert upward_edges(module, MODULES[module]) == []


def test_the_page_names_every_module_on_its_floor():
    page = (Path(__file__).parents[2] / "docs" / "design" / "layering.md").read_text(encoding="utf-8")
    rows = {int(row[2]): row for row in page.splitlines() if row.startswith("| ") and row[2].isdigit()}
    assert sorted(rows) == list(range(9))
    missing = [name for name, floor in FLOORS.items() if f"`{name}`" not in rows[floor] and f"`{name}/`" not in rows[floor]]
    assert missing == []


def test_the_front_stays_below_the_command_line():
    targets = {inside(name) for name, _, _ in imports(MODULES[FRONT])} - {None, ""}
    assert {t for t in targets if FLOORS[unit(str(t))] > 7} == set()


def test_every_module_of_the_package_is_seen():
    assert {"errors", "tensor.qtensor", "formats.mx", "backends.reference", "cli"} <= set(MODULES)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("from .tensor.qtensor import QTensor", "errors:1 (floor 0) imports tensor.qtensor (floor 2)"),
        ("from . import ops", "errors:1 (floor 0) imports ops (floor 6)"),
        ("def f():\n    from .checkpoints import Checkpoint", "errors:2 (floor 0) imports checkpoints (floor 4)"),
        ("import halfbyte.cli", "errors:1 (floor 0) imports cli (floor 8)"),
        ("import rich", "errors:1 imports rich, which floor 0 does not use"),
        ("from . import __version__", "errors:1 imports the package's front"),
    ],
)
def test_the_check_itself_sees_an_upward_edge(tmp_path, monkeypatch, source, sentence):
    fake = tmp_path / "halfbyte" / "errors.py"
    fake.parent.mkdir()
    fake.write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake.parent)
    assert [e[: len(sentence)] for e in upward_edges("errors", fake)] == [sentence]


def test_a_module_without_a_floor_is_reported():
    assert upward_edges("novelty", MODULES["errors"]) == ["novelty has no floor; add it to FLOORS and to docs/design/layering.md"]


def fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter that sees this package."""
    env_path = str(PACKAGE.parent)
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
