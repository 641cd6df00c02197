"""Mutation testing: change one operator, comparison, constant or term of a source file and see its
tests fail.

    python tools/mutate.py formats numerics tensor producers --count 120 --seed 1 --out
    build/mutation/values.jsonl
    python tools/mutate.py layouts --count 100            # any package or module below
                                                          src/halfbyte, spelled with slashes
    python tools/mutate.py --report build/mutation/*.jsonl

Mutants are drawn from all sites of the files named, with a fixed seed, each file in proportion to
its sites. The package is copied to a temporary folder once and a mutant overwrites one file there:
the working tree is never changed, and several runs may go on at the same time. Do not edit the
tests meanwhile; run long samples in a clone. Tests run with `-x`, the mapped files in order, until
one fails (killed), the limit of CPU time passes (killed: a hang is noticed), or all pass
(survived). A mutant that cannot be imported counts as killed.

`--out` gets one JSON line a mutant: file, line, what was changed, killed, the test file, seconds.
Started again with the same `--out`, a run skips the mutants listed there. `--show` prints the
mutants and runs nothing. `TESTS` maps sources to test files, first match wins; without an entry the
test file of the mirrored path is used (`layouts/gptq.py`: `tests/layouts/test_gptq.py`).

Left alone: docstrings and messages, annotations, raised errors, `__repr__`, and the constants of
block sizes listed in `PERFORMANCE`, which change the speed and not the result.
"""

from __future__ import annotations

import argparse
import ast
import copy
import glob
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "halfbyte"

QUANTIZE = ["tests/tensor/test_quantize_golden.py", "tests/tensor/test_quantize_edges.py", "tests/tensor/test_quantize_shapes.py"]
QUANTIZE += ["tests/tensor/test_quantize_refusals.py"]
GOLDEN = [
    f"tests/layouts/test_golden_{p}.py"
    for p in ("mlx", "compressed_tensors", "modelopt", "torchao", "hqq", "bitsandbytes", "gguf", "onnxruntime", "gptq")
]
LAYOUTS = [
    "tests/layouts",
    "tests/checkpoints/test_golden.py",
    "tests/checkpoints/test_open.py",
    "tests/conversion/test_edges.py",
]
LAYOUTS += ["tests/conversion/test_write.py"]
CHECKPOINTS = [
    "tests/checkpoints",
    "tests/cli/test_failures.py",
    "tests/conversion/test_write.py",
    "tests/conversion/test_resume.py",
]
CONVERSION = ["tests/conversion/test_edges.py", "tests/conversion/test_conditions.py", "tests/conversion/test_rare_conditions.py"]
CONVERSION += ["tests/conversion/test_write.py", "tests/conversion", "tests/cli/test_convert.py", "tests/cli/test_quantize.py"]
TESTS: list[tuple[str, list[str]]] = [
    ("formats/ggml", ["tests/formats/ggml", "tests/layouts/test_golden_gguf.py", "tests/layouts/test_gguf.py"]),
    (
        "formats/decode",
        ["tests/formats/test_decode.py", *GOLDEN, "tests/numerics/test_exact.py", "tests/formats", "tests/tensor"],
    ),
    ("formats/nvfp4", ["tests/formats/test_nvfp4.py", *QUANTIZE]),
    ("formats/mx", ["tests/formats/test_mx.py", *QUANTIZE]),
    ("formats/base", ["tests/tensor/test_quantize_refusals.py", "tests/tensor/test_quantize_shapes.py", "tests/docs"]),
    ("formats/options", ["tests/tensor/test_quantize_refusals.py", *QUANTIZE]),
    ("formats", [*QUANTIZE, "tests/layouts/test_zero_points.py", "tests/docs", *GOLDEN, "tests/formats"]),
    ("numerics/array_interop", ["tests/numerics", "tests/test_ops.py"]),
    ("numerics/transpose", ["tests/numerics/test_transpose.py"]),
    ("numerics/minifloat", ["tests/numerics/test_minifloat.py", *QUANTIZE[:2]]),
    ("numerics/exact", ["tests/numerics/test_exact.py", "tests/formats"]),
    ("numerics", ["tests/numerics"]),
    ("producers/gptq_awq", ["tests/producers", "tests/layouts/test_golden_gptq.py", "tests/layouts/test_golden_awq.py"]),
    ("producers/transformers_mxfp4", ["tests/producers", "tests/layouts/test_golden_gpt_oss.py"]),
    ("producers", ["tests/producers", *GOLDEN]),
    ("tensor/quantize", QUANTIZE),
    ("tensor/qtensor", ["tests/tensor/test_qtensor.py", "tests/tensor/test_shard.py", *QUANTIZE]),
    *((f"tensor/{name}", [f"tests/tensor/test_{name}.py"]) for name in ("act_order", "concat", "notebook", "row_view", "shard")),
    ("tensor", ["tests/tensor"]),
    ("layouts/awq", ["tests/layouts/test_awq.py", *LAYOUTS]),
    (
        "layouts/gguf",
        ["tests/layouts/test_gguf.py", "tests/layouts/test_golden_gguf.py", "tests/checkpoints/test_gguf_reader.py"],
    ),
    ("layouts/gptq", ["tests/layouts/test_gptq.py", *LAYOUTS]),
    ("layouts/hqq", ["tests/layouts/test_hqq.py", *LAYOUTS]),
    ("layouts/mlx", ["tests/layouts/test_mlx.py", *LAYOUTS]),
    ("layouts/onnx", ["tests/layouts/test_onnx.py", *LAYOUTS]),
    ("layouts/torchao", ["tests/layouts/test_torchao.py", *LAYOUTS]),
    ("layouts/modelopt", ["tests/layouts/test_modelopt.py", "tests/layouts/test_modelopt_stacked_experts.py", *LAYOUTS]),
    ("layouts/bitsandbytes", ["tests/layouts/test_bitsandbytes.py", *LAYOUTS]),
    ("layouts/compressed_tensors", ["tests/layouts/test_compressed_tensors.py", *LAYOUTS]),
    ("layouts/quant_config/safe_regex", ["tests/layouts/test_safe_regex.py"]),
    ("layouts/quant_config/module_rules", ["tests/layouts/test_module_rules.py", *LAYOUTS]),
    ("layouts", LAYOUTS),
    ("checkpoints/gguf", ["tests/checkpoints/test_gguf_reader.py", "tests/checkpoints/test_gguf_hostile.py", *CHECKPOINTS]),
    ("checkpoints/safetensors", ["tests/checkpoints/test_safetensors_hostile.py", *CHECKPOINTS]),
    ("checkpoints/findings", ["tests/checkpoints/test_findings.py", *CHECKPOINTS]),
    ("checkpoints/inspect", ["tests/checkpoints/test_inspect.py", *CHECKPOINTS]),
    ("checkpoints", CHECKPOINTS),
    ("conversion/to_dense", ["tests/conversion/test_to_dense.py", *CONVERSION]),
    ("conversion", CONVERSION),
]
"""Source prefix -> test files and folders in the order they run, those that fail soonest first."""

PRELOADED = ("numpy", "ml_dtypes", "safetensors", "gguf", "torch", "hypothesis", "rich.console", "typer")

PERFORMANCE = {"BLOCK_ELEMENTS", "_BLOCK", "_CHUNK", "_TILE", "_LINE", "_WORDS", "BLOCK_BYTES"}

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the `index`-th site of a file, with its line and the text before and after."""

    file: str
    index: int
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.index}"


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """The changed nodes that a node may be replaced by."""
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY and not isinstance(node.left, ast.JoinedStr):
        changed = copy.deepcopy(node)
        changed.op = BINARY[type(node.op)]()
        yield changed
        if isinstance(node.op, (ast.Add, ast.Sub, ast.BitOr)):
            yield copy.deepcopy(node.left)
    elif isinstance(node, ast.AugAssign) and type(node.op) in BINARY:
        changed_assign = copy.deepcopy(node)
        changed_assign.op = BINARY[type(node.op)]()
        yield changed_assign
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        flipped = copy.deepcopy(node)
        flipped.ops[0] = COMPARE[type(node.ops[0])]()
        yield flipped
    elif isinstance(node, ast.BoolOp):
        swapped = copy.deepcopy(node)
        swapped.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield swapped
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        else:
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)


def candidates(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, position in the field's list, node) of every node whose change could change a
    result.
    """

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == "__repr__":
            return
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in PERFORMANCE:
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list", "op", "ops"):
                continue
            children = value if isinstance(value, list) else [value]
            for position, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
                    continue
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                yield node, field, position if isinstance(value, list) else None, child
                yield from visit(child)

    yield from visit(tree)


def sites(path: Path) -> Iterator[tuple[Mutant, ast.AST, ast.AST, str, int | None, ast.AST, ast.AST]]:
    """Every mutant of a file: the mutant, the tree, and parent, field, position, node and changed
    node of `_replace`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name, index = path.relative_to(SOURCE).as_posix(), 0
    for parent, field, position, node in list(candidates(tree)):
        for changed in mutations(node):
            ast.copy_location(changed, node)
            mutant = Mutant(name, index, getattr(node, "lineno", 0), ast.unparse(node), ast.unparse(changed))
            yield mutant, tree, parent, field, position, node, changed
            index += 1


def mutated_source(mutant: Mutant) -> str:
    """The whole source of the mutant's file with its change."""
    for found, tree, parent, field, position, _, changed in sites(SOURCE / mutant.file):
        if found.index == mutant.index:
            _replace(parent, field, position, changed)
            return ast.unparse(ast.fix_missing_locations(tree))
    raise ValueError(f"{mutant.key} is no site of {mutant.file}")


def _replace(parent: ast.AST, field: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[position] = node


def tests_of(file: str) -> list[str]:
    """Test files and folders of a source file, those that exist."""
    for prefix, tests in TESTS:
        if file.startswith(prefix):
            return [t for t in tests if (ROOT / t).exists()]
    folder, _, name = file.rpartition("/")
    mirrored = f"tests/{folder}/test_{name.removesuffix('.py')}.py"
    return [t for t in (mirrored, f"tests/{folder}") if (ROOT / t).exists()][:1]


class Runner:
    """Runs tests against a copy of the package in which one file is mutated."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.folder = Path(tempfile.mkdtemp(prefix="halfbyte-mutation-"))
        shutil.copytree(SOURCE, self.folder / "halfbyte", ignore=shutil.ignore_patterns("__pycache__"))
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.environment = os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def passes(self, test: str) -> bool:
        """Whether pytest passes in a child process that is forked after the large packages are
        imported: half the time.
        """
        for package in PRELOADED:
            importlib.import_module(package)
        output = self.folder / "output"
        child = os.fork()
        if child == 0:
            self._run_child(test, output)
        deadline = time.monotonic() + 20 * self.limit  # of a child that sleeps; one that computes meets its limit of CPU time
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False
            time.sleep(0.05)
        if os.WIFSIGNALED(status):
            return False
        code = os.WEXITSTATUS(status)
        if code not in (0, 1, 2, 5):
            raise RuntimeError(f"pytest {test} ended with {code}: {output.read_text('utf-8', 'replace')[-400:]}")
        return code in (0, 5)

    def _run_child(self, test: str, output: Path) -> NoReturn:
        code = 3
        try:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(self.limit), int(self.limit) + 5))
            os.chdir(ROOT)
            os.environ.update(self.environment)
            sys.path.insert(0, str(self.folder))
            sys.dont_write_bytecode = True
            code = int(pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow and not ecosystem", test]))
        finally:
            os._exit(code)

    def killer(self, file: str, source: str) -> str | None:
        """The first mapped test file that fails with `source` in place of the file, None when all
        pass.
        """
        target = self.folder / "halfbyte" / file
        original = target.read_text(encoding="utf-8")
        target.write_text(source, encoding="utf-8")
        try:
            return next((t for t in tests_of(file) if not self.passes(t)), None)
        finally:
            target.write_text(original, encoding="utf-8")


def chosen(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the files of some packages (or modules), drawn without replacement."""
    files: list[Path] = []
    for package in packages:
        path = SOURCE / package
        found = sorted(path.rglob("*.py")) if path.is_dir() else [p for p in (path.with_suffix(".py"),) if p.exists()]
        if not found:
            raise SystemExit(f"{package}: no package or module below {SOURCE}")
        files += found
    everything = [site[0] for file in files if tests_of(file.relative_to(SOURCE).as_posix()) for site in sites(file)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def report(paths: list[str]) -> str:
    """The score a package, and every survivor."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    lines = []
    for package in sorted({r["file"].split("/")[0] for r in rows}):
        of = [r for r in rows if r["file"].split("/")[0] == package]
        killed = sum(r["killed"] for r in of)
        lines.append(f"{package}: {killed} of {len(of)} killed ({killed / len(of):.1%})")
    survivors = (f"{r['file']}:{r['line']}  {r['before']}  ->  {r['after']}" for r in rows if not r["killed"])
    return "\n".join([*lines, *survivors])


def main() -> None:
    """Run, show or report, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages or modules below src/halfbyte")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of CPU time a test file or folder may take")
    parser.add_argument("--out", type=Path, default=Path("build/mutation/mutants.jsonl"))
    parser.add_argument("--show", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--report", nargs="+", metavar="JSONL", help="print the score and the survivors of finished runs")
    args = parser.parse_args()
    if args.report:
        print(report([path for pattern in args.report for path in sorted(glob.glob(pattern))]))
        return
    mutants = chosen(args.packages, args.count, args.seed)
    if args.show:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}  {mutant.before}  ->  {mutant.after}")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["key"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    runner = Runner(args.limit)
    try:
        for mutant in mutants:
            if mutant.key in done:
                continue
            start = time.monotonic()
            test = runner.killer(mutant.file, mutated_source(mutant))
            row = {"key": mutant.key, **asdict(mutant), "killed": test is not None, "test": test or ""}
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row | {"seconds": round(time.monotonic() - start, 1)}) + "\n")
            print(
                f"{'killed  ' if test else 'SURVIVED'} {mutant.file}:{mutant.line}  {mutant.before} -> {mutant.after}", flush=True
            )
    finally:
        runner.close()


if __name__ == "__main__":
    main()
