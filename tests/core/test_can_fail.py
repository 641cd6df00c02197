"""Every test can fail: it checks something, what it checks is no constant and no comparison of a
value with itself, its tolerances are small, and it is not skipped everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
LARGEST_TOLERANCE = 0.05
"""Of comparisons (`rtol`, `atol`, `rel`, `abs`, `approx`): errors above it need a bound that the
test derives.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called_name(call: ast.Call) -> str:
    """The last component of what a call names: `assert_equal` of np.testing.assert_equal(...)."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


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


def used_by(function: Function) -> set[str]:
    """Names that a function calls or takes as fixtures."""
    return {called_name(n) for n in ast.walk(function) if isinstance(n, ast.Call)} | {a.arg for a in function.args.args}


def checkers(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of the functions and fixtures of the tests that check something, by calls of others
    too.
    """
    found: set[str] = set()
    uses: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, Function) and not node.name.startswith("test_"):
                found |= {node.name} if checks_itself(node) else set()
                uses.setdefault(node.name, set()).update(used_by(node))
    while more := {name for name, used in uses.items() if name not in found and used & found}:
        found |= more
    return found


def is_constant(node: ast.expr) -> bool:
    """True for literals, which an assertion always finds true or always false."""
    if isinstance(node, ast.UnaryOp):
        return is_constant(node.operand)
    return isinstance(node, (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.JoinedStr, ast.Lambda))


def compares_with_itself(node: ast.AST) -> bool:
    """True for x == x, f(x) == f(x), and array_equal(x, x) and its like."""
    if (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and type(node.left) is type(node.comparators[0])
        and isinstance(node.ops[0], (ast.Eq, ast.Is, ast.LtE, ast.GtE))
    ):
        return ast.dump(node.left) == ast.dump(node.comparators[0])
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        name = called_name(node)
        if name in ("array_equal", "allclose", "isclose", "equal", "same_tensors") or name.startswith("assert_"):
            return ast.dump(node.args[0]) == ast.dump(node.args[1])
    return False


def tolerances(node: ast.AST) -> Iterator[float]:
    """Literal tolerances of the comparisons that an assertion wants true."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return
    for child in ast.iter_child_nodes(node):
        yield from tolerances(child)
    if isinstance(node, ast.Call) and (called_name(node) in ("allclose", "isclose", "approx", "assert_allclose")):
        for keyword in node.keywords:
            if keyword.arg in ("rtol", "atol", "rel", "abs"):
                try:
                    yield abs(float(eval(compile(ast.Expression(keyword.value), "tolerance", "eval"), {})))
                except NameError:
                    continue  # computed from the data or the format


def weaknesses(function: Function, checking: set[str]) -> Iterator[str]:
    """What keeps a test function from failing."""
    if not checks_itself(function) and not used_by(function) & checking:
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
        if (
            isinstance(node, ast.Call)
            and called_name(node) == "raises"
            and ast.unparse(node) in ("pytest.raises(Exception)", "pytest.raises(BaseException)")
        ):
            yield f"line {node.lineno}: it expects any error"
    yield from (f"a tolerance of {t:g}" for t in tolerances(function) if t > LARGEST_TOLERANCE)
    for mark in function.decorator_list:
        text = ast.unparse(mark)
        if text.startswith("pytest.mark.skip") and (not text.startswith("pytest.mark.skipif") or "skipif(True" in text):
            yield "it is skipped everywhere"


ALLOWED = {
    "backends/metal/test_linear.py::test_every_schedule_gives_the_same_answer_twice": "two runs of threads are compared",
    "generation/test_single.py::test_a_seed_decides_the_text": "two draws from one seed are compared",
    "layouts/test_registry.py::test_what_fits_comes_back_and_what_does_not_is_refused": "refused values are drawn",
    "numerics/test_error_stats.py::test_case_57_shuffled_weights_fail_at_any_magnitude": "it shows what an absolute bound misses",
}
"""Tests that do on purpose what is looked for -> the reason."""


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
    weak = found()
    assert {test: why for test, why in weak.items() if test not in ALLOWED} == {}
    assert set(ALLOWED) <= set(weak)


WEAK = {
    "assert f(1)": "",
    "f(1)": "it checks nothing",
    "helper(1)": "",
    "import subprocess; subprocess.run(['x'], check=True)": "",
    "assert True": "it asserts a constant, True",
    "assert (f(1), 'message')": "it asserts a constant, (f(1), 'message')",
    "assert x == x": "it compares a value with itself, x == x",
    "assert f(x) == f(x)": "it compares a value with itself, f(x) == f(x)",
    "np.testing.assert_array_equal(x, x)": "it compares a value with itself, np.testing.assert_array_equal(x, x)",
    "assert np.allclose(x, y, rtol=1)": "a tolerance of 1",
    "assert not np.allclose(x, y, rtol=1)": "",
    "assert x == pytest.approx(y, rel=1 / 4)": "a tolerance of 0.25",
    "assert np.allclose(x, y, atol=bound)": "",
    "assert x\n    try:\n        f(1)\n    except ValueError:\n        pass": "it swallows ValueError",
    "with pytest.raises(Exception):\n        f(1)": "it expects any error",
    "with pytest.raises(ValueError):\n        f(1)": "",
}


@pytest.mark.parametrize("body", WEAK)
def test_weaknesses_are_found(body):
    tree = ast.parse(f"def helper(x):\n    assert x\ndef test_one():\n    {body}\n")
    got = list(weaknesses(tree.body[1], checkers({Path("test_one.py"): tree})))
    assert [g.partition(": ")[2] or g for g in got] == ([WEAK[body]] if WEAK[body] else [])


def test_a_test_that_is_skipped_everywhere_is_found():
    for mark, wrong in (
        ("skip", True),
        ("skip(reason='x')", True),
        ("skipif(True)", True),
        ("skipif(x)", False),
        ("slow", False),
    ):
        (function,) = ast.parse(f"@pytest.mark.{mark}\ndef test_one():\n    assert f(1)\n").body
        assert list(weaknesses(function, set())) == (["it is skipped everywhere"] if wrong else [])


def test_a_test_without_cases_fails(pytestconfig):
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"
