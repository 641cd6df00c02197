"""Files that a user names are read within bounds: a device that never ends is an error, and a pipe
nobody writes to is not waited for where a file alone has a meaning.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfbyte.calibration.walk import token_sequences
from halfbyte.checkpoints.io import regular_file
from halfbyte.checkpoints.io.regular_file import read_given
from halfbyte.conversion.allocation import read_recipe
from halfbyte.conversion.importance import digest_of, read_importance
from halfbyte.errors import HalfbyteError
from halfbyte.evaluation import texts
from halfbyte.generation import templates

pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="devices that never end are Unix's")


def test_a_text_that_does_not_end():
    with pytest.raises(OSError, match="more than 268,435,456 bytes") as error:
        texts.read_text("/dev/zero")
    assert error.value.filename == "/dev/zero"


def test_a_calibration_text_that_does_not_end():
    with pytest.raises(OSError, match="more than 268,435,456 bytes"):
        token_sequences(object(), Path("/dev/zero"), 8, 1)


def test_a_recipe_that_does_not_end():
    with pytest.raises(OSError, match="more than 16,777,216 bytes"):
        read_recipe("/dev/zero")


def test_a_text_of_a_pipe_is_read_whole():
    read, write = os.pipe()
    os.write(write, "é".encode() * 1000)
    os.close(write)
    assert read_given(Path(f"/dev/fd/{read}"), 2000) == "é".encode() * 1000
    os.close(read)


def test_a_file_whose_bytes_are_not_there_yet_is_an_error(tmp_path, monkeypatch):
    """As some files below /proc are: regular ones that wait."""
    os.mkfifo(tmp_path / "kmsg")
    held = os.open(tmp_path / "kmsg", os.O_RDWR)
    monkeypatch.setattr(regular_file.stat, "S_ISREG", lambda mode: True)
    with regular_file.open_regular(tmp_path / "kmsg") as file, pytest.raises(OSError, match="it has no bytes yet"):
        file.read(32)
    os.close(held)


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
