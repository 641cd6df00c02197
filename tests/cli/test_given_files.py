"""Files that a user names are read within bounds: a device that never ends is an error, and a pipe
nobody writes to is not waited for where a file alone has a meaning.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfbyte.conversion.allocation import read_recipe
from halfbyte.conversion.importance import digest_of, read_importance
from halfbyte.errors import HalfbyteError
from halfbyte.evaluation import texts
from halfbyte.generation import templates

pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="devices that never end are Unix's")


def test_a_text_that_does_not_end(monkeypatch):
    monkeypatch.setattr(texts, "TEXT_BYTES", 1 << 20)
    with pytest.raises(HalfbyteError, match=r"/dev/zero has more than 1,048,576 bytes; give a part of it"):
        texts.read_text("/dev/zero")


def test_a_recipe_that_does_not_end():
    with pytest.raises(HalfbyteError, match="/dev/zero is no JSON"):
        read_recipe("/dev/zero")


def test_a_template_out_of_proportion(tmp_path):
    path = tmp_path / "a.jinja"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(HalfbyteError, match=r"a.jinja has more than 16,777,216 bytes"):
        templates.template_named(str(path))


@pytest.mark.parametrize("read", [read_importance, digest_of])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_an_importance_matrix_is_a_file(tmp_path, kind, read):
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "imatrix.gguf"
        os.mkfifo(path)
    with pytest.raises(OSError, match="it is a pipe, a device or a socket"):
        read(path)
