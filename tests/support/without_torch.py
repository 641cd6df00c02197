"""The `generate` command in a process that cannot import torch or transformers, compared with
transformers here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from halfbyte.generation.single import Generation
from halfbyte.transformers import load_model

PROGRAM = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
from halfbyte.cli import main
sys.exit(main(sys.argv[1:]))
"""


def check_same_text(path: Path) -> None:
    """The tokens, the text and why it ends are the same."""
    command = ["generate", str(path), "-p", "abc", "-n", "9", "--json"]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ours = json.loads(run.stdout.splitlines()[-1])
    assert ours["engine"] == "native"
    theirs = Generation(*load_model(path), "abc", max_tokens=9)
    assert [p.token for p in theirs] == [json.loads(line)["token"] for line in run.stdout.splitlines()[:-1]]
    assert (ours["text"], ours["stopped"]) == (theirs.text, theirs.stopped)
