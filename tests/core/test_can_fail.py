"""Every test can fail: it checks something, what it checks is no constant and no comparison of a
value with itself, its tolerances are small, and it is not skipped everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
LARGEST_TOLERANCE = 0.05
"""Of comparisons (`rtol`, `atol`, `rel`, `abs`, `approx`): errors above it need a bound that the test derives."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called_name(call: ast.Call) -> str:
    """The last component of what a call names: `assert_equal` of np.testing.assert_equal(...)."""
    return ast.unparse(call.func).rpartition(".")[2].partition("(")[0]


def checks_itself(function: ast.AST) -> bool:
    """True for an assertion, an expected error or warning, or a call that fails by itself."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call):
            name = called_name(node)
            if name in ("raises", "warns", "fail", "fnmatch_lines", "assert_outcomes") or name.startswith("assert_"):
                return True
            if any(k.arg == "check" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords):
                return True  # subprocess.run(..., check=True)
    return False


def checkers(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of the functions and fixtures of the tests that check something, by calls of others too."""
    functions: dict[str, list[Function]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                functions.setdefault(node.name, []).append(node)
    found = {name for name, nodes in functions.items() if any(map(checks_itself, nodes))}
    while True:
        more = {name for name, nodes in functions.items() if name not in found and any(calls_any(n, found) for n in nodes)}
        if not more:
            return found
        found |= more


def calls_any(function: Function, names: set[str]) -> bool:
    """True when a function calls one of `names`, or takes it as a fixture."""
    called = {called_name(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    return bool((called | {a.arg for a in function.args.args}) & names)


def is_constant(node: ast.expr) -> bool:
    """True for literals, which an assertion always finds true or always false."""
    if isinstance(node, ast.UnaryOp):
        return is_constant(node.operand)
    return isinstance(node, (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.JoinedStr, ast.Lambda))


def compares_with_itself(node: ast.AST) -> bool:
    """True for x == x, f(x) == f(x), and array_equal(x, x) and its like."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.Is, ast.LtE, ast.GtE)):
        return ast.dump(node.left) == ast.dump(node.comparators[0])
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        name = called_name(node)
        if name in ("array_equal", "allclose", "isclose", "equal", "same_tensors") or name.startswith("assert_"):
            return ast.dump(node.args[0]) == ast.dump(node.args[1])
    return False


def tolerances(node: ast.AST) -> Iterator[float]:
    """Literal tolerances of a comparison."""
    if isinstance(node, ast.Call) and (called_name(node) in ("allclose", "isclose", "approx", "assert_allclose")):
        for keyword in node.keywords:
            if keyword.arg in ("rtol", "atol", "rel", "abs"):
                try:
                    yield abs(float(eval(compile(ast.Expression(keyword.value), "tolerance", "eval"), {})))
                except NameError:
                    continue  # computed from the data or the format


def weaknesses(function: Function, checking: set[str]) -> Iterator[str]:
    """What keeps a test function from failing."""
    if not checks_itself(function) and not calls_any(function, checking):
        yield "it checks nothing"
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and is_constant(node.test):
            yield f"line {node.lineno}: it asserts a constant, {ast.unparse(node.test)}"
        if compares_with_itself(node):
            yield f"line {node.lineno}: it compares a value with itself, {ast.unparse(node)}"
        if isinstance(node, ast.ExceptHandler) and all(isinstance(s, (ast.Pass, ast.Continue, ast.Return)) for s in node.body):
            yield f"line {node.lineno}: it swallows {ast.unparse(node.type) if node.type else 'every error'}"
        if isinstance(node, ast.Call) and called_name(node) == "suppress":
            yield f"line {node.lineno}: it swallows {', '.join(map(ast.unparse, node.args))}"
        expected = ast.unparse(node.args[0]) if isinstance(node, ast.Call) and called_name(node) == "raises" and node.args else ""
        if expected in ("Exception", "BaseException"):
            yield f"line {node.lineno}: it expects any error"
        yield from (f"line {node.lineno}: a tolerance of {t:g}" for t in tolerances(node) if t > LARGEST_TOLERANCE)
    for mark in function.decorator_list:
        text = ast.unparse(mark)
        if text.startswith("pytest.mark.skip") and (not text.startswith("pytest.mark.skipif") or "skipif(True" in text):
            yield "it is skipped everywhere"


def found() -> dict[str, list[str]]:
    """Test function -> its weaknesses."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    checking = checkers(trees)
    out: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            test = isinstance(node, Function) and node.name.startswith("test") and path.stem.startswith("test_")
            if test and (weak := list(dict.fromkeys(weaknesses(node, checking)))):
                out[f"{path.relative_to(TESTS).as_posix()}::{node.name}"] = weak
    return out


def test_every_test_can_fail():
    assert found() == {}
