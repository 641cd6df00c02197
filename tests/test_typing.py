"""What type checkers tell users: a verb returns the kind of array it was given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USER = """
import numpy as np
import torch
from numpy.typing import NDArray

import halfbyte as hb

def use(x: NDArray[np.float32], t: torch.Tensor, p: torch.nn.Parameter, q: hb.QTensor, ids: NDArray[np.int64]) -> None:
    w = hb.prepare(q)
    reveal_type(w)
    reveal_type(hb.linear(x, w))
    reveal_type(hb.linear(t, w, t))
    reveal_type(hb.linear(p, q))
    reveal_type(hb.embedding(ids, w))
    reveal_type(hb.experts(t, w, w, t, t, gate="geglu"))
    reveal_type(hb.dequantize(q))
    hb.linear("x", w)
    hb.experts(x, w, w, t, t)
"""
TORCH = """
class Tensor: ...
class dtype: ...
class nn:
    class Parameter(Tensor): ...
"""
"""As much of torch's types as the snippet names: mypy takes minutes for the real ones."""


def test_verbs_return_what_they_are_given(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "user"),
        "user.py",
    ]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "MYPYPATH": path}, capture_output=True, text=True)
    revealed = re.findall(r'user.py:\d+: note: Revealed type is "(.*)"', done.stdout)
    kinds = [
        re.sub(r"\[.*", "", t.rpartition(".")[2] if "[" not in t else t.partition("[")[0].rpartition(".")[2]) for t in revealed
    ]
    assert kinds == ["Prepared", "ndarray", "Tensor", "Tensor", "ndarray", "Tensor", "ndarray"], done.stdout + done.stderr
    errors = re.findall(r"user.py:(\d+): error: .*\[(.*)\]", done.stdout)
    lines = USER.splitlines()
    assert [(lines[int(n) - 1].strip(), code) for n, code in errors] == [
        ('hb.linear("x", w)', "type-var"),
        ("hb.experts(x, w, w, t, t)", "type-var"),
    ]
