"""Every command that writes is one of `support/faults.py`'s: found from the commands' signatures
and from the sources, so that a new one fails here until the shim runs it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from pathlib import Path

import halfbyte
from halfbyte.cli.app import COMMANDS
from support import faults

SOURCE = Path(halfbyte.__file__).parent
OUTPUTS = {
    ("chat", "/save"): {"report"},
    ("convert", "out"): {"convert", "convert file", "gguf"},
    ("dequantize", "out"): {"dequantize", "dequantize file"},
    ("eval", "report"): {"report"},
    ("imatrix", "out"): {"imatrix"},
    ("inspect", "report"): {"report"},
    ("quantize", "out"): {"quantize", "quantize file", "gguf"},
    ("quantize", "report_page"): {"report"},
    ("quantize", "save_recipe"): {"report"},
    ("sample", "out"): {"report"},
    ("tune", "out"): {"report"},
}
"""(Command, parameter that names what it writes) -> the shim's commands that write the same way."""
INPUTS = {
    "path", "paths", "a", "b", "text", "baseline", "calibration", "imatrix", "like", "recipe_file", "report_text",
}  # fmt: skip
"""Parameters that name what is read."""
TEXTS = {
    "cli/chat.py", "cli/eval.py", "cli/inspect.py", "cli/quantize.py", "cli/sample.py", "backends/cuda/tuning/table.py",
    "conversion/allocation.py",
}  # fmt: skip
"""Files that write a text, by `replace_text`: the shim's "report"."""
WRITE_THEMSELVES = {
    "checkpoints/io/resumable_file.py", "checkpoints/io/safe_files.py", "checkpoints/io/journal.py",
    "checkpoints/safetensors/sharded_writer.py", "checkpoints/safetensors/writer.py",
}  # fmt: skip
"""What the shim's commands go through."""
NO_OUTPUT = {
    "backends/cuda/tuning/table.py": "the folder of the tiles",
    "calibration/sensitivity.py": "a temporary folder",
    "calibration/spool.py": "states between two passes, checked by tests/calibration",
    "cli/demo.py": "the demo's model",
    "verification/match.py": "a rename of keys",
}
"""Files that change files, none of them an output of a command."""
CHANGES = {"write_text", "write_bytes", "mkdir", "touch", "unlink", "rename", "rmdir", "symlink_to", "hardlink_to",
           "truncate", "mkstemp", "mkdtemp", "rmtree", "copyfile", "copytree", "copy2", "savez", "makedirs"}  # fmt: skip
FUNCTIONS = {("os", "remove"), ("torch", "save"), ("np", "save"), ("numpy", "save"), ("shutil", "move"), ("shutil", "copy")}


def calls(file: Path) -> list[tuple[str, str, ast.Call]]:
    """(what a method is called on, its name, the call) of each call in a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                found.append((ast.unparse(node.func.value), node.func.attr, node))
            elif isinstance(node.func, ast.Name):
                found.append(("", node.func.id, node))
    return found


def changes_files(owner: str, name: str, call: ast.Call) -> bool:
    """Whether a call makes, writes, renames or deletes a file."""
    words = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    if name in ("open", "fdopen"):
        flags = " ".join(ast.unparse(a) for a in call.args)
        return any(isinstance(w, str) and set(w) & set("wax+") and set(w) <= set("rwaxbt+") for w in words) or "O_CREAT" in flags
    if name == "replace" and owner != "dataclasses":  # of a path: one argument, or os.replace
        return owner == "os" or (len(call.args) == 1 and not call.keywords)
    return name in CHANGES or (owner, name) in FUNCTIONS


def path_parameters() -> set[tuple[str, str]]:
    """(command, parameter) of each argument and option that is a path."""
    found = set()
    for name in COMMANDS:
        function = getattr(importlib.import_module(f"halfbyte.cli.{name}"), name)
        for parameter, hint in typing.get_type_hints(inspect.unwrap(function)).items():
            if "Path" in str(hint):
                found.add((name, parameter))
    return found


def test_every_path_of_a_command_is_read_or_written_by_the_shim_too():
    found = {(command, parameter) for command, parameter in path_parameters() if parameter not in INPUTS}
    assert found == {pair for pair in OUTPUTS if not pair[1].startswith("/")}
    assert set().union(*OUTPUTS.values()) | {"save", "planted"} == set(faults.COMMANDS)


def test_every_text_is_replaced_by_the_function_that_the_shim_runs():
    callers = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if any(name == "replace_text" for _, name, _ in calls(file))
    }
    assert callers == TEXTS


def test_nothing_else_changes_files():
    found = {
        file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py") if any(changes_files(*call) for call in calls(file))
    }
    assert found == WRITE_THEMSELVES | set(NO_OUTPUT)


def test_calls_that_change_files_are_seen(tmp_path):
    file = tmp_path / "x.py"
    for line in ("path.write_text('')", "open(p, 'wb')", "os.open(p, os.O_CREAT)", "p.open(mode='a')", "part.replace(path)"):
        file.write_text(line)
        assert [changes_files(*call) for call in calls(file)] == [True], line
    for line in ("text.replace('a', 'b')", "open(p, 'rb')", "open(p)", "dataclasses.replace(x, a=1)"):
        file.write_text(line)
        assert [changes_files(*call) for call in calls(file)] == [False], line
