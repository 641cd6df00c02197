"""Two names exchanged in one step."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from halfbyte.checkpoints.io.rename import exchange, identity

pytestmark = pytest.mark.skipif(os.name != "posix", reason="names as Unix has them")


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kinds", ["folders", "files", "one of each"])
def test_each_name_has_what_the_other_had(tmp_path, monkeypatch, relative, kinds):
    monkeypatch.chdir(tmp_path)
    a, b = (Path(n) if relative else tmp_path / n for n in "ab")
    for path in (a, b):
        if kinds == "folders" or (kinds == "one of each" and path == a):
            path.mkdir()
        else:
            path.touch()
    before = identity(a), identity(b)
    assert before[0] != before[1]
    assert all(before)
    if exchange(a, b):
        assert (identity(b), identity(a)) == before
    else:
        assert sys.platform not in ("linux", "darwin")
        assert (identity(a), identity(b)) == before


def test_a_name_that_is_not_there_is_an_error_and_changes_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    before = identity(tmp_path / "a")
    for names in (("a", "b"), ("b", "a"), ("b", "c")):
        with pytest.raises(OSError, match="No such file") as caught:
            exchange(*(tmp_path / n for n in names))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / names[1]))
    assert identity(tmp_path / "a") == before
    assert identity(tmp_path / "b") == []
    status = os.lstat(tmp_path / "a")
    assert before == [status.st_dev, status.st_ino]
