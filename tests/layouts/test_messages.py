"""Each refusal of a layout says what is allowed or what to do, after what it found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(halfbyte.__file__).parent
WAY_ON = re.compile(
    r"; |\. [A-Z]|wanted|allowed|must|read: |needs|takes|up to|at least|at most|is missing|holds|reach(es)? "
    r"|cannot be written|want "
)


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "{}"


def refusals() -> list[tuple[str, str]]:
    """(file and line, message) of each error that the layouts raise by a sentence of their own."""
    found = []
    for path in sorted((ROOT / "layouts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = text_of(node.exc.args[0])
                if re.search(r"[a-z]{3,} [a-z]{2,}", message) and not message.endswith(": {}"):  # another error's sentence
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", message))
    return found


def test_every_refusal_of_a_layout_gives_the_way_on():
    found = refusals()
    assert len(found) > 150
    assert [entry for entry in found if not WAY_ON.search(entry[1])] == []


@pytest.mark.parametrize("message", ["[x] a is there, and b has none", "[x] the config has no group_size"])
def test_a_sentence_without_a_way_on_is_noticed(message):
    assert not WAY_ON.search(message)
