"""Mutation testing: change one operator, comparison, constant or term of a source file and see a
test fail.

    python tools/mutate.py formats layouts checkpoints --count 300 --seed 14 --workers 4
    python tools/mutate.py layouts/awq --show             # any package or module below src/halfbyte
    python tools/mutate.py --report build/mutation/mutants.jsonl

Mutants are drawn from all sites of the files named, with a fixed seed, each file in proportion to
its sites. The sources are never changed: a mutant exists as compiled code alone. Do not edit
sources or tests while a sample runs; run long ones in a clone.

1. Recording: the tests of `TESTS` run once, a process for some files of tests, and a trace notes
   which functions of the package each test calls and how long it takes, for at most `CASES` cases
   of a test function and all of a table of outcomes (`build/mutation/calls/`, one file for a file
   of tests, used again until that file of tests, or the recorder, is another).
2. Functions: one process collects these tests and forks the workers. For each mutant inside a
   function a worker forks; the child gives the living functions their mutated code and runs the
   tests that call the function until one fails, those of the mirrored file of tests and of the
   files that tests/README.md lists for it first, different test functions and fast ones before
   others, then the cases of these test functions that were not recorded.
3. Fresh: mutants of module and class bodies (tables, defaults), of functions that no recorded test
   calls, and those that step 2 left in functions that run when the tests are imported, run in a new
   process that imports the mutated file: the tests that call the function, or one that uses the
   constant, then the file's own tests, then those that call any function of the file or of a file
   that imports it. Steps 2 and 3 overlap.

A mutant is killed by a test that fails with it alone and passes without it, or that takes 20 times
its time and 10 seconds more; a file that cannot be imported counts as killed. `--budget` bounds the
processor seconds of tests against one mutant. Tests that fail or skip while recorded are not used,
nor those that start another program, themselves or in a fixture: it imports the source and not the
mutant.
One JSON line a mutant goes to `--out`; a run continues after the mutants listed there.

Left alone: docstrings and messages, annotations, raised errors, `__repr__`, the arguments of
`KEYWORDS` and the constants of `PERFORMANCE`, which change checks of the interpreter, the speed or
the memory and not the result.

One file of more than 800 lines: what makes mutants, records tests, runs and reports is one program
that needs nothing of the package but its sources.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import importlib.machinery
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "halfbyte"
INSIDE = f"{SOURCE}{os.sep}"
BUILD = ROOT / "build" / "mutation"

TESTS = ["formats", "numerics", "tensor", "producers", "layouts", "checkpoints", "conversion", "verification"]
TESTS += [
    "gguf_models/test_tokenizer.py",
    "docs/test_adding_a_format.py",
    "docs/test_adding_a_layout.py",
    "backends/cpu/test_decode.py",
]
TESTS += [f"backends/cuda/test_{name}.py" for name in ("canonical", "decoders", "order", "rounded")]
"""Folders and files below tests/ that run against mutants."""

PRELOADED = ("numpy", "ml_dtypes", "safetensors", "gguf", "torch", "hypothesis", "rich.console", "typer")

PERFORMANCE = {"BLOCK_ELEMENTS", "_BLOCK", "_CHUNK", "_TILE", "_LINE", "_WORDS", "BLOCK_BYTES", "ROWS", "BLOCK", "CHUNK"}
PERFORMANCE |= {"BUFFER", "STEP", "_PIECE", "_MOST", "IN_FLIGHT", "FIRST_READ", "FIRST_BYTES", "FIRST_GGUF", "ATTEMPTS", "WAIT"}
PERFORMANCE |= {"LONGEST_WAIT", "BYTES_PER_SECOND", "PATIENCE", "QUIET_BYTES", "CONNECTIONS", "SAMPLED", "SHOWN", "ENTRY_ROOM"}
PERFORMANCE |= {"MANY_STRINGS"}
"""Constants of block sizes, buffers, waits and lengths of messages."""

KEYWORDS = {"strict", "copy", "stacklevel", "maxsize", "frozen", "slots", "exist_ok", "indent", "ensure_ascii", "daemon"}
"""Keyword arguments whose value is left alone."""

CASES = 24
"""Cases of a parametrized test function that are recorded, evenly spread; of tables of outcomes all
are.
"""

TOOL = 4
"""Number under which `sys.monitoring` knows the recorder."""

RECORDED_SECONDS = 40
"""Seconds after which no more tests of a file are recorded; tables of outcomes have twice as
many.
"""

OUTCOMES = "outcomes.py::"
"""What the names of tests have that keep the outcome of every case of a table."""

KILLED, SURVIVED, SLOW, EMPTY = 1, 0, 3, 4
"""Exit codes of a process that runs tests against one mutant."""

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


KINDS = ["nibble", "shift", "order", "function", "operator", "term", "comparison", "condition", "sign", "constant", "assembly"]


@dataclass(frozen=True)
class Mutant:
    """One change: the `index`-th site of a file, its kind, its line and the text before and after."""

    file: str
    index: int
    kind: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.index}"


FUNCTIONS = {
    "right_shift": "left_shift", "left_shift": "right_shift", "bitwise_or": "bitwise_and", "bitwise_and": "bitwise_or",
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "floor": "ceil", "ceil": "floor",
    "rint": "floor", "all": "any", "any": "all", "zeros": "ones", "ones": "zeros",
}  # fmt: skip
"""Functions and methods whose name is exchanged."""


ASSEMBLY = re.compile(r"(?:\b(?:mov|and|lop3|shr|shl|prmt|fma|sub|mul)\.[a-z0-9.]+ |^0x[0-9a-f]+$)")
"""What a string of GPU assembly, or a number for one, contains."""

NUMBER = re.compile(r"(?<![\w.%$#])(?:0x[0-9a-fA-F]+|\d+)(?![\w.])")

OPCODES = {"shr": "shl", "shl": "shr", "sub": "add", "and": "or"}


def assembly_mutations(text: str) -> Iterator[str]:
    """Each number of a string of assembly without its lowest bit (1 for 0), and each instruction of
    `OPCODES` exchanged.
    """
    for found in NUMBER.finditer(text):
        value = int(found[0], 0)
        changed = value & (value - 1) if value else 1
        yield text[: found.start()] + (hex(changed) if found[0].startswith("0x") else str(changed)) + text[found.end() :]
    for found in re.finditer(r"\b(shr|shl|sub|and)(?=\.)", text):
        yield text[: found.start()] + OPCODES[found[0]] + text[found.end() :]


def _constant(node: ast.AST, value: object) -> bool:
    """Whether a node is a number, or a call such as `np.uint8(4)` of it."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == value and not isinstance(node.value, bool)


def _with(node: Any, **fields: object) -> Any:
    """A copy of a node with some fields replaced."""
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, changed node) of every change of a node. Kinds: nibble (low for high), shift, order
    (two neighbours of a literal list of numbers), function (`FUNCTIONS`), operator, term (dropped),
    comparison, condition, sign, constant (off by one), assembly.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY and not isinstance(node.left, ast.JoinedStr):
        right = node.right.func if isinstance(node.right, ast.Call) else None  # np.uint8(15) stays of that type
        for op, number, other, to in ((ast.BitAnd, 15, ast.RShift, 4), (ast.RShift, 4, ast.BitAnd, 15)):
            if isinstance(node.op, op) and _constant(node.right, number):
                constant: ast.expr = ast.Constant(to)
                yield "nibble", _with(node, op=other(), right=ast.Call(right, [constant], []) if right else constant)
        kind = "shift" if isinstance(node.op, (ast.LShift, ast.RShift)) else "operator"
        yield kind, _with(node, op=BINARY[type(node.op)]())
        if isinstance(node.op, (ast.Add, ast.Sub, ast.BitOr)):
            yield "term", copy.deepcopy(node.left)
    elif isinstance(node, ast.AugAssign) and type(node.op) in BINARY:
        yield "operator", _with(node, op=BINARY[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield "comparison", _with(node, ops=[COMPARE[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield "condition", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield "sign", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        yield "function", _with(node, attr=FUNCTIONS[node.attr])
    elif isinstance(node, ast.Name) and node.id in FUNCTIONS:
        yield "function", _with(node, id=FUNCTIONS[node.id])
    elif isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) > 1:
        first, second, *rest = node.elts
        if all(isinstance(e, ast.Constant) and isinstance(e.value, (int, float)) for e in (first, second)) and (
            ast.unparse(first) != ast.unparse(second)
        ):
            yield "order", _with(node, elts=[second, first, *rest])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        if isinstance(node.value, bool):
            yield "condition", ast.Constant(not node.value)
        else:
            for number in (node.value + 1, node.value - 1):
                if number != node.value:  # as of 1e30
                    yield "constant", ast.Constant(number)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ASSEMBLY.search(node.value):
        for text in assembly_mutations(node.value):
            yield "assembly", ast.Constant(text)


def candidates(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, position in the field's list, node) of every node whose change could change a
    result.
    """

    def same_by_definition(parent: ast.AST, node: ast.AST) -> bool:
        """True for the order of what `in` is asked about, and for unions of types."""
        if isinstance(parent, ast.Compare) and isinstance(node, (ast.Tuple, ast.List)):
            return isinstance(parent.ops[0], (ast.In, ast.NotIn))
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        alias = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(parent, (ast.Assign, ast.BinOp))
        return alias and bool(names) and all(n.id[:1].isupper() and not n.id.isupper() for n in names)

    def inferred_size(parent: ast.AST, node: ast.AST) -> bool:
        """True for the -1 of `reshape`: NumPy infers a size for any negative number."""
        called = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "reshape"
        return called and isinstance(node, ast.UnaryOp) and _constant(node.operand, 1)

    def left_alone(node: ast.AST) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return node.name in ("__repr__", "__str__", "_repr_html_")
        if isinstance(node, ast.Assign):
            return isinstance(node.targets[0], ast.Name) and node.targets[0].id in PERFORMANCE
        if isinstance(node, ast.AnnAssign):
            return isinstance(node.target, ast.Name) and node.target.id in PERFORMANCE
        if isinstance(node, ast.keyword):
            return node.arg in KEYWORDS
        if isinstance(node, ast.Call):  # an error that is made before it is raised, a warning
            return ast.unparse(node.func).rpartition(".")[2].endswith(("Error", "warn", "Warning"))
        return False

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
        if left_alone(node):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list", "op", "ops"):
                continue
            children = value if isinstance(value, list) else [value]
            for position, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.Import, ast.ImportFrom)):
                    continue
                if isinstance(child, ast.JoinedStr):
                    text = [(i, c) for i, c in enumerate(child.values) if isinstance(c, ast.Constant)]
                    yield from ((child, "values", i, c) for i, c in text if ASSEMBLY.search(str(c.value)))
                    continue
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                if left_alone(child):
                    continue
                if not same_by_definition(node, child):
                    yield node, field, position if isinstance(value, list) else None, child
                if not inferred_size(node, child):
                    yield from visit(child)

    yield from visit(tree)


def sites(path: Path) -> Iterator[tuple[Mutant, Callable[[], ast.Module]]]:
    """Every mutant of a file, with a function that applies it to the file's tree and returns that
    tree; only one may be applied.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name, index = path.relative_to(SOURCE).as_posix(), 0
    for parent, field, position, node in list(candidates(tree)):
        for kind, changed in mutations(node):
            ast.copy_location(changed, node)

            def apply(parent=parent, field=field, position=position, changed=changed) -> ast.Module:  # type: ignore[no-untyped-def]
                if position is None:
                    setattr(parent, field, changed)
                else:
                    getattr(parent, field)[position] = changed
                return ast.fix_missing_locations(tree)

            yield Mutant(name, index, kind, getattr(node, "lineno", 0), ast.unparse(node), ast.unparse(changed)), apply
            index += 1


def compiled(mutant: Mutant) -> tuple[CodeType, CodeType]:
    """The module code of the mutant's file, as it is and changed, with the same line numbers."""
    path = SOURCE / mutant.file
    original = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    for found, apply in sites(path):
        if found.index == mutant.index:
            return original, compile(apply(), str(path), "exec", dont_inherit=True)
    raise ValueError(f"{mutant.key} is no site of {mutant.file}")


def chosen(packages: list[str], count: int, seed: int, kinds: list[str] = KINDS) -> list[Mutant]:
    """`count` mutants of the files of some packages (or modules), drawn without replacement."""
    files: list[Path] = []
    for package in packages:
        path = SOURCE / package
        found = sorted(path.rglob("*.py")) if path.is_dir() else [p for p in (path.with_suffix(".py"),) if p.exists()]
        if not found:
            raise SystemExit(f"{package}: no package or module below {SOURCE}")
        files += found
    everything = [mutant for file in files for mutant, _ in sites(file) if mutant.kind in kinds]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def inner(code: CodeType) -> list[CodeType]:
    """Code of the functions and classes directly inside."""
    return [c for c in code.co_consts if isinstance(c, CodeType)]


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all inside it."""
    yield code
    for child in inner(code):
        yield from all_codes(child)


def name_of(code: CodeType) -> str:
    """Key of a function: its file, qualified name and first line."""
    return f"{Path(code.co_filename).relative_to(SOURCE).as_posix()}:{code.co_qualname}:{code.co_firstlineno}"


def recorded_name(name: str) -> str:
    """`name_of` without the line: what a recording lists, which edits of other functions leave."""
    return name.rpartition(":")[0]


def shallow(code: CodeType) -> tuple[Any, ...]:
    """A code object without those of the functions inside it."""
    constants = tuple((type(c), repr(c)) for c in code.co_consts if not isinstance(c, CodeType))
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def function_changes(original: CodeType, changed: CodeType) -> tuple[dict[str, CodeType], list[str]] | None:
    """(new code of every function that must be replaced, names of those whose own body changed), or
    None where a module or class body changed, which runs when it is imported.
    """
    before, after = list(all_codes(original)), list(all_codes(changed))
    names = [name_of(c) for c in before]
    if names != [name_of(c) for c in after]:
        return None
    own = [(name, b) for name, b, a in zip(names, before, after, strict=True) if shallow(b) != shallow(a)]
    optimized = 1  # CO_OPTIMIZED: a function, not a module or class body
    if not own or any(not b.co_flags & optimized or names.count(name) > 1 for name, b in own):
        return None
    replaced = {name: a for name, b, a in zip(names, before, after, strict=True) if a != b and b.co_flags & optimized}
    return replaced, [name for name, _ in own]


class Watch:
    """Notes which functions of the package start, once each: by `sys.monitoring`, else by a trace."""

    def __init__(self) -> None:
        self.seen: dict[int, CodeType] = {}

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self.seen[id(frame.f_code)] = frame.f_code

    def _started(self, code: CodeType, offset: int) -> object:
        self.seen[id(code)] = code
        return sys.monitoring.DISABLE

    def start(self) -> None:
        self.seen = {}
        if sys.version_info >= (3, 12):
            events = sys.monitoring.events.PY_START
            if sys.monitoring.get_tool(TOOL) is None:
                sys.monitoring.use_tool_id(TOOL, "mutate")
            sys.monitoring.register_callback(TOOL, events, self._started)
            sys.monitoring.set_events(TOOL, events)
            sys.monitoring.restart_events()
        else:
            sys.settrace(self._trace)

    def stop(self) -> set[str]:
        """The recorded names of what started since `start`."""
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(TOOL, 0)
        else:
            sys.settrace(None)
        return {recorded_name(name_of(c)) for c in self.seen.values() if c.co_filename.startswith(INSIDE)}


class Recorder:
    """Pytest plugin: which functions of the package each test calls, and its seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self.left_out: list[str] = []
        self.watch = Watch()
        self.good = True
        self.started = False
        self.of_programs: set[object] = set()
        self.end = time.monotonic() + RECORDED_SECONDS

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep at most `CASES` cases of a test function: one of every function first, then the
        others, so that no function is left out when the file takes its time.
        """
        functions: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            functions[item.nodeid.split("[")[0]].append(item)
        most = len(items) if items and OUTCOMES in items[0].nodeid else CASES
        self.end += RECORDED_SECONDS * (most > CASES)
        kept = [[c[i * len(c) // n] for n in [min(most, len(c))] for i in range(n)] for c in functions.values()]
        items[:] = [c[0] for c in kept] + [item for c in kept for item in c[1:]]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: object) -> Iterator[object]:
        before, self.started = self.started, False
        try:
            return (yield)  # type: ignore[misc]
        finally:
            if self.started:
                self.of_programs.add(fixturedef)
            self.started |= before

    def _uses_programs(self, item: pytest.Item) -> bool:
        """Whether a test or a fixture of it started another program, in this test or before."""
        fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        return self.started or any(f in self.of_programs for some in fixtures for f in some)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.good, self.started = True, False
        start, popen = time.process_time(), subprocess.Popen.__init__

        def started(*args: Any, **kwargs: Any) -> None:
            self.started = True
            popen(*args, **kwargs)

        subprocess.Popen.__init__ = started  # type: ignore[method-assign]
        self.watch.start()
        try:
            return (yield)  # type: ignore[misc]
        finally:
            calls = self.watch.stop()
            subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
            if self.good and not self._uses_programs(item):
                self.tests[item.nodeid] = round(time.process_time() - start, 4), sorted(calls)
            else:
                self.left_out.append(item.nodeid)
            if time.monotonic() > self.end:
                item.session.shouldstop = "the file took its time"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.good &= report.outcome == "passed"


def test_files() -> list[Path]:
    """The files of `TESTS`, the largest first."""
    found: set[Path] = set()
    for name in TESTS:
        path = ROOT / "tests" / name
        found |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    return sorted(found, key=lambda p: (-p.stat().st_size, p))


def recording_of(file: Path) -> Path:
    """Where the recording of a file of tests lies."""
    return BUILD / "calls" / (file.relative_to(ROOT / "tests").as_posix().replace("/", ".") + ".json")


def digest(file: Path) -> str:
    """Of the texts of a file of tests and of the recorder: where one changed, the file is recorded
    again.
    """
    return hashlib.sha256(file.read_bytes() + inspect.getsource(Recorder).encode()).hexdigest()


def is_recorded(file: Path) -> bool:
    """Whether there is a recording of a file of tests as it is."""
    recording = recording_of(file)
    return recording.exists() and json.loads(recording.read_text(encoding="utf-8")).get("source") == digest(file)


def record(file: Path) -> int:
    """Run a file of tests under the trace and write its recording."""
    recorder = Recorder()
    pytest.main(pytest_arguments([str(file)]), plugins=[recorder])
    names = sorted({c for _, calls in recorder.tests.values() for c in calls})
    index = {name: i for i, name in enumerate(names)}
    tests = {t: [seconds, [index[c] for c in calls]] for t, (seconds, calls) in recorder.tests.items()}
    target = recording_of(file)
    recording = {"source": digest(file), "names": names, "tests": tests, "left_out": recorder.left_out}
    target.with_suffix(".part").write_text(json.dumps(recording), encoding="utf-8")
    target.with_suffix(".part").rename(target)
    return SURVIVED


def importers(file: str) -> list[str]:
    """Files of the package that import a module or a name of it."""
    wanted = ("halfbyte", *Path(file.removesuffix("/__init__.py").removesuffix(".py")).parts)
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        inside = ("halfbyte", *path.relative_to(SOURCE).parts)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                base = (*inside[: len(inside) - node.level], *(node.module or "").split("."))[: None if node.module else -1]
                names = base if node.level else tuple((node.module or "").split("."))
                if names == wanted or any((*names, alias.name) == wanted for alias in node.names):
                    found.append("/".join(inside[1:]))
                    break
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def mirrors_of(file: str) -> tuple[str, ...]:
    """What the names of the tests in a file's own files of tests contain: of the mirrored file, and
    of those that tests/README.md lists beside the file or a folder above it.
    """
    listed = []
    for line in (ROOT / "tests" / "README.md").read_text(encoding="utf-8").splitlines():
        cells, folder = line.split("|")[1:-1], ""
        for name in re.findall(r"`([^`]+)`", cells[0]) if len(cells) == 2 else ():
            folder = name if name.endswith("/") else folder if "/" not in name else ""
            here = name if name.endswith("/") else f"{folder}{name}.py"
            if here == file or (here.endswith("/") and cells[0].strip() == f"`{here}`" and file.startswith(here)):
                listed += re.findall(r"`(\w+/[^`]+\.py)`", cells[1])
    return f"/test_{Path(file).stem}.py::", *(f"{path}::" for path in listed)


class Calls:
    """What the recordings say: tests of a function and of a file, in the order to run them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.slowest: dict[str, float] = {}
        self.of_function: dict[str, list[str]] = defaultdict(list)
        self.of_file: dict[str, set[str]] = defaultdict(set)
        self.known: set[str] = set()
        for path in sorted((BUILD / "calls").glob("*.json")):
            recorded = json.loads(path.read_text(encoding="utf-8"))
            self.known |= {*recorded["tests"], *recorded["left_out"]}
            for test, (seconds, calls) in recorded["tests"].items():
                self.seconds[test] = seconds
                function = test.split("[")[0]
                self.slowest[function] = max(seconds, self.slowest.get(function, 0.0))
                for name in (recorded["names"][call] for call in calls):
                    self.of_function[name].append(test)
                    self.of_file[name.split(":")[0]].add(test)

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """One case of every test function, then a second of each, and so on, fast ones first."""
        functions: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda t: (self.seconds[t], t)):
            functions[test.split("[")[0]].append(test)
        rank = {test: i for cases in functions.values() for i, test in enumerate(cases)}
        return sorted(rank, key=lambda t: (rank[t], self.seconds[t], t))

    def expected(self, test: str) -> float:
        """Seconds of a test; of a case that was not recorded those of the slowest one that was."""
        function = test.split("[")[0]
        return self.seconds.get(test, self.slowest.get(function, 1.0))

    def for_functions(self, names: list[str]) -> list[str]:
        """The tests that call a function: quick ones of its file's own, tables of outcomes, others."""
        tests = self.ordered({t for name in names for t in self.of_function.get(recorded_name(name), [])})
        mirrors = {mirror for name in names for mirror in mirrors_of(name.split(":")[0])}

        def place(test: str) -> int:
            if any(mirror in test for mirror in mirrors) and self.seconds[test] < 1:
                return 0
            return 1 if OUTCOMES in test else 2

        return sorted(tests, key=place)

    def for_file(self, file: str) -> list[str]:
        """The file's own tests, those that call a function of the file, those of its importers."""
        own, *listed = mirrors_of(file)
        tests = [t for t in self.ordered(self.seconds) if own in t and file.split("/")[0] in t]
        tests += [t for t in self.ordered(self.seconds) if any(path in t for path in listed)]
        tests += [t for t in self.ordered(self.of_file.get(file, ())) if OUTCOMES in t]
        tests += self.ordered(self.of_file.get(file, ()))
        tests += self.ordered({t for other in importers(file) for t in self.of_file.get(other, ())})
        return list(dict.fromkeys(tests))


def run_until_failure(items: list[pytest.Item], calls: Calls, budget: float, note: Path) -> int:
    """Run tests one after another in this process; write the name of the one that fails to `note`.

    Returns KILLED, SURVIVED, SLOW (stopped after `budget` seconds of processor time) or EMPTY.
    """

    class Reports:
        failed = False

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            Reports.failed |= report.outcome == "failed"

    if not items:
        return EMPTY
    items[0].config.pluginmanager.register(Reports())
    start = time.process_time()

    def hung(signum: int, frame: FrameType | None) -> None:
        os._exit(KILLED)

    signal.signal(signal.SIGPROF, hung)
    for item, following in zip(items, [*items[1:], None], strict=True):
        seconds = calls.expected(item.nodeid)
        note.write_text(item.nodeid, encoding="utf-8")
        signal.setitimer(signal.ITIMER_PROF, 10 + 20 * seconds)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if Reports.failed:
            return KILLED
        if time.process_time() - start > budget:
            return SLOW
    return SURVIVED


def hang_limit(budget: float) -> float:
    """Seconds by the clock after which tests hang that have `budget` seconds of a processor, which
    others share.
    """
    return 60 + 4 * budget


def forked(work: Callable[[], int], longest: float) -> int:
    """Exit code of `work` in a forked process without output; one that dies by a signal counts as
    killed, and so does one that takes `longest` seconds by the clock.
    """
    child = os.fork()
    if child == 0:
        code = KILLED
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            code = work()
        finally:
            os._exit(code)
    deadline = time.monotonic() + longest
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            shutil.rmtree(BUILD / "temp" / str(child), ignore_errors=True)
            return KILLED if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


OPTIONS = ["-q", "-s", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not slow and not ecosystem"]


def pytest_arguments(tests: list[str]) -> list[str]:
    """The command line of pytest for some tests."""
    return [*OPTIONS, f"--basetemp={BUILD / 'temp' / str(os.getpid())}", *tests]


class Queue:
    """Numbers in a pipe, which forked processes take one by one when they are free."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.children: list[int] = []

    def put(self, number: int) -> None:
        os.write(self.writer, number.to_bytes(4, "little"))

    def start(self, workers: int, work: Callable[[int], object]) -> None:
        """Fork processes that call `work` with each number until the queue is closed."""
        for _ in range(workers):
            child = os.fork()
            if child == 0:
                os.close(self.writer)
                try:
                    while len(number := os.read(self.reader, 4)) == 4:
                        work(int.from_bytes(number, "little"))
                except BaseException:  # a forked process may not return into pytest
                    traceback.print_exc()
                finally:
                    os._exit(0)
            self.children.append(child)

    def close(self) -> None:
        """Wait until every number is worked on."""
        os.close(self.writer)
        for child in self.children:
            os.waitpid(child, 0)
        os.close(self.reader)


def work_split(count: int, workers: int, work: Callable[[int], object]) -> None:
    """Call `work` with 0 to count - 1, each once, in some forked processes."""
    queue = Queue()
    queue.start(min(workers, count), work)
    for number in range(count):
        queue.put(number)
    queue.close()


class Judge:
    """Runs tests against a mutant: `attempt(tests, mutated)` says how a process with or without the
    mutant ended and names the test that it ended in.
    """

    passing: ClassVar[dict[str, bool]] = {}

    def __init__(self, attempt: Callable[[list[str], bool], tuple[int, str]]) -> None:
        self.attempt = attempt

    def verdict(self, tests: list[str]) -> tuple[int, str]:
        """(exit code, killing test). A kill counts if the test fails alone too, and passes alone
        without the mutant.
        """
        while True:
            code, test = self.attempt(tests, True)
            if code != KILLED or test == COLLECTION:
                return code, test
            if test not in self.passing:
                self.passing[test] = self.attempt([test], False)[0] != KILLED
            if self.passing[test] and (test == tests[0] or self.attempt([test], True)[0] == KILLED):
                return code, test
            tests = [t for t in tests if t != test]


def other_cases(tests: list[str], items: Iterable[str], recorded: Collection[str]) -> list[str]:
    """The cases among `items` of the functions of some tests that were not recorded, in the order
    of the tests.
    """
    cases: dict[str, list[str]] = {t.split("[")[0]: [] for t in tests}
    for item in items:
        if item.split("[")[0] in cases and item not in recorded:
            cases[item.split("[")[0]].append(item)
    return [c for some in cases.values() for c in some]


class FunctionMutants:
    """Pytest plugin: in place of the loop over collected tests, one fork a mutant of a function.

    `done` gets a mutant's number, the exit code, the seconds, the killing test and whether a fresh
    process may find more: nothing ran, or the function ran before the mutant was there.
    """

    def __init__(
        self, mutants: list[Mutant], calls: Calls, budget: float, workers: int, done: Callable[[int, int, float, str, bool], None]
    ) -> None:
        self.mutants, self.calls, self.budget, self.workers, self.done = mutants, calls, budget, workers, done
        self.watch = Watch()
        self.watch.start()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        imported = self.watch.stop()
        items = {item.nodeid: item for item in session.items}
        living: dict[str, list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # tests/conftest.py freezes what was collected, which get_objects leaves out
        for function in gc.get_objects():
            if type(function) is FunctionType and function.__code__.co_filename.startswith(INSIDE):
                living[name_of(function.__code__)].append(function)
        gc.collect()
        gc.freeze()

        def work(number: int) -> None:
            mutant, start = self.mutants[number], time.monotonic()
            changes = function_changes(*compiled(mutant))
            if changes is None or living.keys().isdisjoint(changes[0]):
                self.done(number, EMPTY, 0.0, "", True)
                return
            replaced, own = changes
            tests = [t for t in self.calls.for_functions(own) if t in items]
            tests = [*tests, *other_cases(tests, items, self.calls.known)]
            note = BUILD / f"running-{os.getpid()}"

            def attempt(tests: list[str], mutated: bool) -> tuple[int, str]:
                def child() -> int:
                    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
                    factory._given_basetemp, factory._basetemp = BUILD / "temp" / str(os.getpid()), None
                    for name, code in replaced.items() if mutated else ():
                        for function in living.get(name, []):
                            function.__code__ = code
                    return run_until_failure([items[t] for t in tests], self.calls, self.budget, note)

                return forked(child, hang_limit(self.budget)), note.read_text("utf-8") if note.exists() else ""

            code, test = Judge(attempt).verdict(tests)
            more = code == EMPTY or not imported.isdisjoint(map(recorded_name, own))
            self.done(number, code, time.monotonic() - start, test, more)

        work_split(len(self.mutants), self.workers, work)
        return True


class FreshMutant:
    """Pytest plugin: runs the tests named, in their order, in a process that imports one mutant."""

    def __init__(self, tests: list[str], calls: Calls, budget: float, note: Path) -> None:
        self.tests, self.calls, self.budget, self.note = tests, calls, budget, note
        self.code = KILLED  # collection failed: the file cannot be imported

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True
        items = {item.nodeid: item for item in session.items}
        chosen = [t for t in self.tests if t in items]
        if len(self.tests) > 1:  # then the cases that were not recorded
            chosen += other_cases(chosen, items, self.calls.known)
        self.code = run_until_failure([items[t] for t in chosen], self.calls, self.budget, self.note)
        return True


def run_fresh(file: str, code: CodeType, tests: list[str], calls: Calls, budget: float) -> tuple[int, str]:
    """Exit code and last test of the tests named, run in a fork that imports `code` for a file."""
    note = BUILD / f"running-{os.getpid()}"
    note.write_text(COLLECTION, encoding="utf-8")
    target, get_code = str(SOURCE / file), importlib.machinery.SourceFileLoader.get_code

    def work() -> int:
        def replaced(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
            return code if self.path == target else get_code(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = replaced  # type: ignore[method-assign]
        plugin = FreshMutant(tests, calls, budget, note)
        # A few tests are named one by one; of many the files are collected.
        functions = list(dict.fromkeys(t.split("[")[0] for t in tests))
        arguments = tests if len(tests) == 1 else functions if len(tests) <= FIRST else sorted({t.split("::")[0] for t in tests})
        pytest.main(pytest_arguments(arguments), plugins=[plugin])
        return plugin.code

    return forked(work, hang_limit(budget)), note.read_text("utf-8")


COLLECTION = "collection"
"""Name in place of a test's where a process ended before it ran one."""

STOPPED = 1 << 30
"""Added to the number of a mutant whose tests step 2 stopped at the budget."""

FIRST = 40
"""Tests of the first try of a fresh process, which collects only their files."""


def readers(mutant: Mutant) -> list[str]:
    """Names of the functions that use what a statement outside functions sets: those that name a
    constant, or one made of it, in its file or an importer's, and the function of a default.
    """
    wanted: set[str] = set()
    found = []
    for file in (mutant.file, *importers(mutant.file)):
        path = SOURCE / file
        bodies = [parsed(path).body, *(n.body for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef))]
        for node in (n for body in bodies for n in body):
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            here = file == mutant.file and node.lineno <= mutant.line <= (node.end_lineno or node.lineno)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and (here or not wanted.isdisjoint(used)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                wanted |= {t.id for t in targets if isinstance(t, ast.Name)}
        for code in all_codes(compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)):
            default = file == mutant.file and code.co_firstlineno <= mutant.line and mutant.line in range(*signature(code))
            if code.co_flags & 1 and (default or not wanted.isdisjoint(code.co_names)):  # CO_OPTIMIZED: a function
                found.append(name_of(code))
    return found


def signature(code: CodeType) -> tuple[int, int]:
    """First line of a function, and the first of its body."""
    return code.co_firstlineno, min((line for *_, line in code.co_lines() if line and line > code.co_firstlineno), default=0)


def judge_fresh(mutant: Mutant, calls: Calls, budget: float) -> tuple[int, str]:
    """Exit code and killing test of a mutant whose file is imported anew."""
    original, changed = compiled(mutant)
    changes = function_changes(original, changed)
    users = changes[1] if changes else readers(mutant)
    tests = list(dict.fromkeys([*calls.for_functions(users), *calls.for_file(mutant.file)]))
    if not tests:
        return EMPTY, ""

    def attempt(tests: list[str], mutated: bool) -> tuple[int, str]:
        return run_fresh(mutant.file, changed if mutated else original, tests, calls, budget)

    code, test = EMPTY, ""
    for some in filter(None, (tests[:FIRST], tests[FIRST:])):
        code, test = Judge(attempt).verdict(some)
        if code == KILLED:
            break
    return code, test


def run_sample(mutants: list[Mutant], budget: float, workers: int, out: Path) -> None:
    """Record what is not recorded, then run every mutant that `out` does not list."""
    (BUILD / "temp").mkdir(parents=True, exist_ok=True)
    (BUILD / "calls").mkdir(exist_ok=True)
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    for package in PRELOADED:
        importlib.import_module(package)
    files = [file for file in test_files() if not is_recorded(file)]
    work_split(len(files), workers, lambda number: forked(lambda: record(files[number]), 600) and None)
    calls = Calls()

    def done(mutant: Mutant, code: int, seconds: float, test: str) -> None:
        row = {"key": mutant.key, **asdict(mutant), "killed": code == KILLED, "complete": code != SLOW, "test": test}
        line = json.dumps(row | {"seconds": round(seconds, 1)}) + "\n"
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def left() -> list[Mutant]:
        listed = {json.loads(line)["key"] for line in out.read_text().splitlines()} if out.exists() else set()
        return [m for m in mutants if m.key not in listed]

    waiting = left()
    if not waiting:
        return
    queue = Queue()

    def tried(number: int, code: int, seconds: float, test: str, more: bool) -> None:
        if code == KILLED or not more:
            done(waiting[number], code, seconds, test if code == KILLED else "")
        else:
            queue.put(number + (STOPPED if code == SLOW else 0))

    def fresh(number: int) -> None:
        start, mutant = time.monotonic(), waiting[number % STOPPED]
        code, test = judge_fresh(mutant, calls, budget)
        if code != KILLED:
            code, test = SLOW if number >= STOPPED else code, ""
        done(mutant, code, time.monotonic() - start, test)

    def functions() -> int:
        plugin = FunctionMutants(waiting, calls, budget, workers, tried)
        return int(pytest.main(pytest_arguments([str(f) for f in test_files()]), plugins=[plugin]))

    queue.start(workers, fresh)
    forked_long(functions)
    queue.close()


def forked_long(work: Callable[[], int]) -> None:
    """Run `work` in a forked process that keeps its output; raises SystemExit if it fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (0, 1, 5):
        raise SystemExit(f"a process of tests ended with status {status}")


def report(paths: list[str]) -> str:
    """The score a package and a kind, and every survivor."""
    rows = {(row := json.loads(line))["key"]: row for path in paths for line in Path(path).read_text("utf-8").splitlines()}

    def scores(key: Callable[[dict[str, Any]], str]) -> Iterator[str]:
        for group in sorted({key(r) for r in rows.values()}):
            of = [r for r in rows.values() if key(r) == group]
            killed = sum(r["killed"] for r in of)
            yield f"{group}: {killed} of {len(of)} killed ({killed / len(of):.1%})"

    survivors = [
        f"{r['key']} line {r['line']} {r['before']} -> {r['after']}{'' if r['complete'] else ' (stopped at the budget)'}"
        for r in rows.values()
        if not r["killed"]
    ]
    lines = [*scores(lambda r: r["file"].split("/")[0]), *scores(lambda r: r["kind"]), *scores(lambda r: "all"), *survivors]
    return "\n".join(lines)


def main() -> None:
    """Run, show or report, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages or modules below src/halfbyte")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="draw only these")
    parser.add_argument("--keys", nargs="+", default=[], metavar="FILE:INDEX", help="these mutants instead of a sample")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests against one mutant")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--record", action="store_true", help="record the tests and stop")
    parser.add_argument("--out", type=Path, default=BUILD / "mutants.jsonl")
    parser.add_argument("--show", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--report", nargs="+", metavar="JSONL", help="print the score and the survivors of finished runs")
    args = parser.parse_args()
    if args.report:
        print(report(args.report))
        return
    if args.record:
        run_sample([], args.budget, args.workers, args.out.absolute())
        return
    if args.keys:
        files = sorted({key.split(":")[0] for key in args.keys})
        mutants = [m for file in files for m, _ in sites(SOURCE / file) if m.key in args.keys]
    else:
        mutants = chosen(args.packages, args.count, args.seed, args.kinds)
    if args.show:
        for mutant in mutants:
            print(f"{mutant.key} line {mutant.line} {mutant.kind}  {mutant.before}  ->  {mutant.after}")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run_sample(mutants, args.budget, args.workers, args.out.absolute())
    print(report([str(args.out)]))


if __name__ == "__main__":
    main()
