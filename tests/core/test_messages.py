"""Every message that the library raises with one of its own errors begins with the operation in
brackets, as `halfbyte.errors` says.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from halfbyte import errors

ERRORS = sorted(name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__)
MESSAGE = re.compile(rf"raise (?:{'|'.join(ERRORS)}|GenerationError)\(\s*f?(?:\"|')(.{{12}})")
"""The beginning of a message that is written where it is raised."""
SOURCES = sorted((Path(errors.__file__).parent).rglob("*.py"))


def without_operation(source: str) -> list[str]:
    """Beginnings of messages in a source that name no operation. One that begins with a value, `{`,
    takes its operation from there.
    """
    return [text for text in MESSAGE.findall(source) if not re.match(r"\[[A-Za-z{]|\{", text)]


def test_messages_begin_with_the_operation() -> None:
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]
    assert sum(len(MESSAGE.findall(source)) for source in sources) > 500
    assert {path.name: found for path, source in zip(SOURCES, sources, strict=True) if (found := without_operation(source))} == {}


@pytest.mark.parametrize(
    "line", ['raise LayoutError("bits 5; allowed: 4, 8")', "raise ShapeError(\n    f'x has {k} inputs; allowed')"]
)
def test_one_without_is_found(line: str) -> None:
    assert len(without_operation(line)) == 1


def counts_without_plural(source: str) -> list[str]:
    """`{len(x)} words` in f-strings: 1 would read "1 words"; `plural` gives both forms. Bytes of a
    header or tensor are many.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        pairs = zip(node.values, node.values[1:], strict=False) if isinstance(node, ast.JoinedStr) else ()
        for value, text in pairs:
            counted = isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Call)
            counted = counted and ast.unparse(value.value).startswith(("len(", "sum("))
            if counted and isinstance(text, ast.Constant) and re.match(r" (?!bytes|is\b|has\b|was\b)[a-z]+s\b", text.value):
                found.append(f"{ast.unparse(value.value)}{text.value}")
    return found


def test_a_count_of_one_is_singular() -> None:
    assert {path.name: found for path in SOURCES if (found := counts_without_plural(path.read_text("utf-8")))} == {}
    assert errors.plural(1, "weight") == "1 weight"
    assert [errors.plural(n, "weight") for n in (0, 2, 1234)] == ["0 weights", "2 weights", "1,234 weights"]


@pytest.mark.parametrize("line", ['f"{len(x)} weights have none"', 'f"{path}: {sum(y):,} tensors"', 'g(f"of {len(a.b)} tiles")'])
def test_a_count_that_is_always_plural_is_found(line: str) -> None:
    assert len(counts_without_plural(line)) == 1
    assert counts_without_plural(line.replace("{len(", "{g(").replace("{sum(", "{g(")) == []
