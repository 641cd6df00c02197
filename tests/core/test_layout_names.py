"""What depends on the layout is asked of its class (docs/adding-a-layout.md): outside `layouts` no
module compares a layout's name with a text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte
from halfbyte.layouts import LAYOUTS

SOURCE = Path(halfbyte.__file__).parent

EXCEPTIONS = {
    "checkpoints/engines.py": "a table of what each engine reads names the layouts that it reads",
    "checkpoints/safetensors/checkpoint.py": "unusual zero points that are listed are those of ONNX alone",
}
"""Modules that may, and the reason."""


def comparisons(tree: ast.AST) -> Iterator[str]:
    """Comparisons of what is called a layout with the name of one, or with several."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
            names = {ast.unparse(side).removesuffix(".name").rpartition(".")[2] for side in sides}
            if texts & LAYOUTS.keys() and "layout" in names:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(p for p in SOURCE.rglob("*.py") if p.parts[len(SOURCE.parts)] != "layouts"), ids=str)
def test_layouts_are_asked_what_depends_on_them(path):
    name = path.relative_to(SOURCE).as_posix()
    found = list(comparisons(ast.parse(path.read_text(encoding="utf-8"))))
    assert bool(found) == (name in EXCEPTIONS), f"{name}: {found}; give the layout's class an attribute (layouts/base.py)"


@pytest.mark.parametrize(
    "text", ["goal.layout == 'mlx'", "layout not in ('', 'gguf')", "info.layout.name != 'gptq'", "'mlx' == layout"]
)
def test_a_comparison_with_a_name_is_found(text):
    assert list(comparisons(ast.parse(text)))
    assert not list(comparisons(ast.parse(text.replace("layout", "engine"))))
