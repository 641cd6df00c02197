"""Every message that the library raises with one of its own errors begins with the operation in
brackets, as `halfbyte.errors` says.
"""

from __future__ import annotations

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
