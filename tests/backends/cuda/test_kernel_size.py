"""Kernels stay readable: few parameters, since arguments travel in records, and loops that fit a
page.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(halfbyte.__file__).parent
FILES = sorted(path for folder in ("backends/cuda", "bench/cuda") for path in (ROOT / folder).rglob("*.py"))
MOST_PARAMETERS = 12
MOST_LOOP_LINES = 40


def kernels(source):
    """(function, its source lines) of everything that Triton or Gluon compiles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(is_jit(one) for one in node.decorator_list):
            yield node


def is_jit(decorator):
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "jit"


def parameters(function):
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def loop_lines(function, lines):
    """Lines of code of the longest loop, comments and blank lines not counted."""
    longest = 0
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.While):
            body = [line.strip() for line in lines[node.lineno - 1 : node.end_lineno]]
            longest = max(longest, sum(bool(line) and not line.startswith("#") for line in body))
    return longest


def violations(source):
    """A sentence for each kernel that is too large."""
    out = []
    for function in kernels(source):
        count, length = parameters(function), loop_lines(function, source.splitlines())
        if count > MOST_PARAMETERS:
            out.append(f"{function.name} has {count} parameters")
        if length > MOST_LOOP_LINES:
            out.append(f"{function.name} has a loop of {length} lines")
    return out


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_few_parameters_and_short_loops(path):
    assert violations(path.read_text(encoding="utf-8")) == []


def test_every_kernel_is_read():
    names = {function.name for path in FILES for function in kernels(path.read_text(encoding="utf-8"))}
    launched = ("fragment", "wgmma", "matvec", "matmul", "tile", "striped", "dequantize", "decode", "gather", "routing", "gate")
    assert {f"{name}_kernel" for name in launched} <= names


@pytest.mark.parametrize("decorator", ["@triton.jit", "@gluon.jit", "@triton.jit(do_not_specialize=['m'])"])
def test_a_kernel_that_is_too_large_is_found(decorator):
    many = ", ".join(f"a{i}" for i in range(13))
    loop = "\n".join(f"        x = {i}" for i in range(40))
    source = f"{decorator}\ndef k({many}):\n    for i in range(3):\n        # a comment\n\n{loop}\n"
    assert violations(source) == ["k has 13 parameters", "k has a loop of 41 lines"]
    assert (
        violations(source.replace("a12", "*").replace("x = 39", "pass").replace(", *", "").replace("        x = 38\n", "")) == []
    )
