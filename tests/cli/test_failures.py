"""What the command line does when something goes wrong: one line, an exit status, no traceback,
nothing left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte
from halfbyte.cli import main
from halfbyte.cli.app import COMMANDS
from support.gguf_writer import F32, GGUF, Tensor
from support.memory_checkpoint import MemoryCheckpoint, packed

SOURCE = str(Path(halfbyte.__file__).parents[1])
READERS = {
    "inspect": ("{}",),
    "inspect --json": ("{}", "--json"),
    "inspect --data": ("{}", "--data"),
    "dequantize": ("{}", "{out}"),
    "verify A": ("{}", "{good}"),
    "verify B": ("{good}", "{}"),
    "generate": ("{}", "-p", "x"),
    "convert": ("{}", "{out}", "--to", "halfbyte"),
    "quantize": ("{}", "{out}", "--to", "mlx:affine4"),
    "eval": ("{}", "--text", "{good}/config.json"),
    "eval --baseline": ("{good}", "--text", "{good}/config.json", "--baseline", "{}"),
    "chat": ("{}",),
    "serve": ("{}",),
    "plan": ("{}",),
}
"""Every way a command is given a checkpoint."""


def run(*arguments: str, env: dict[str, str] | None = None, **more: object) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    full = {**os.environ, "PYTHONPATH": SOURCE, **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "halfbyte", *arguments], capture_output=True, timeout=120, env=full, check=False, **more
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    folder.mkdir()
    save_file({"model.norm.weight": np.ones(8, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def arguments(how: str, bad: Path, good: Path, tmp_path: Path) -> list[str]:
    command = how.split()[0]
    return [command, *(a.format(bad, good=good, out=tmp_path / "out") for a in READERS[how])]


def one_line(err: str) -> str:
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("halfbyte: [")
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize("how", READERS)
def test_case_41_a_missing_shard_is_named_in_every_command(how, good, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    save_file({"a.weight": np.ones((2, 2), np.float32)}, bad / "model-00001-of-00002.safetensors")
    weight_map = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert main(arguments(how, bad, good, tmp_path)) == 2
    out, err = capsys.readouterr()
    assert "model-00002-of-00002.safetensors" in one_line(err)
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("kind", ["nothing there", "empty folder", "empty file", "cut short", "garbage", "bad config"])
def test_bad_input_is_one_line_and_status_2(how, kind, good, tmp_path, capsys):
    bad = tmp_path / "bad.safetensors"
    if kind == "empty folder":
        bad.mkdir()
    elif kind == "empty file":
        bad.write_bytes(b"")
    elif kind == "cut short":
        bad.write_bytes((good / "model.safetensors").read_bytes()[:-1])
    elif kind == "garbage":
        bad.write_bytes(np.random.default_rng(0).bytes(4096))
    elif kind == "bad config":
        bad.mkdir()
        save_file({"a.weight": np.ones(2, np.float32)}, bad / "model.safetensors")
        (bad / "config.json").write_text('{"quantization_config": 7}', encoding="utf-8")
    assert main(arguments(how, bad, good, tmp_path)) == 2
    out, err = capsys.readouterr()
    assert "bad.safetensors" in one_line(err)
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", READERS)
def test_case_41_a_missing_part_of_a_split_gguf_is_named(how, good, tmp_path, capsys):
    first = tmp_path / "m-00001-of-00002.gguf"
    values = np.ones(4, "<f4").tobytes()
    pairs = [("general.architecture", "string", "llama"), ("split.count", "uint16", 2), ("split.no", "uint16", 0)]
    first.write_bytes(GGUF(pairs=pairs, tensors=[Tensor("a", (4,), F32, values)]).bytes())
    assert main(arguments(how, first, good, tmp_path)) == 2
    assert "m-00002-of-00002.gguf" in one_line(capsys.readouterr().err)


def test_generate_says_what_it_reads(good, capsys):
    assert main(["generate", str(good), "-p", "x"]) == 2
    assert "is a dense checkpoint without the config.json of a model" in one_line(capsys.readouterr().err)


def test_case_40_a_shard_outside_the_folder_is_refused(good, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../good/model.safetensors"}}', encoding="utf-8")
    for how in READERS:
        assert main(arguments(how, bad, good, tmp_path)) == 2
        assert "../good/model.safetensors" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("how", READERS)
def test_no_permission_is_one_line(how, good, tmp_path, capsys, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "secret"))

    monkeypatch.setattr("halfbyte.checkpoints.open", refuse)
    assert main(arguments(how, tmp_path / "secret", good, tmp_path)) == 2
    assert one_line(capsys.readouterr().err).endswith("secret: Permission denied")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "halfbyte: interrupted"),
        (MemoryError("8 GB"), 2, "halfbyte: [inspect] out of memory: 8 GB"),
        (ImportError("No module named 'x'"), 2, "halfbyte: [inspect] a package is missing: No module named 'x'; install it"),
        (ImportError("x; pip install 'y'"), 2, "halfbyte: [inspect] a package is missing: x; pip install 'y'\n"),
        (ZeroDivisionError("oh"), 70, "halfbyte: [inspect] a fault in halfbyte: ZeroDivisionError: oh; HALFBYTE_DEBUG=1"),
        (BrokenPipeError(), 141, ""),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_other_failures(error, status, line, monkeypatch, capsys):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("halfbyte.checkpoints.open", fail)
    assert main(["inspect", "x"]) == status
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert len(err.splitlines()) == (1 if line else 0)


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("HALFBYTE_DEBUG", "1")
    with pytest.raises(halfbyte.HalfbyteError, match="no such file"):
        main(["inspect", "no-such-file"])


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "x", "--no-such-option"], ["no-such-command"]])
def test_bad_usage_is_status_2(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"halfbyte {command}" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_help_is_wrapped_by_the_terminal_alone(columns, monkeypatch, capsys):
    """A line of a paragraph ends where the next word has no room, not where the source's line
    did.
    """
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out.partition("╭")[0]
        lines = [line.strip() for line in text.split("\n")]
        for line, after in itertools.pairwise(lines):
            assert not line or not after or len(line) + 1 + len(after.split()[0]) > columns - 2, (command, line)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"halfbyte {halfbyte.__version__}\n"


def test_warnings_are_one_line(monkeypatch, capsys):
    import warnings

    def open_loudly(*args: object, **kwargs: object) -> MemoryCheckpoint:
        warnings.warn("down_proj overflows float16", UserWarning, stacklevel=2)
        return MemoryCheckpoint({})

    monkeypatch.setattr("halfbyte.checkpoints.open", open_loudly)
    assert main(["inspect", "x"]) == 0
    assert capsys.readouterr().err == "halfbyte: warning: down_proj overflows float16\n"


def test_names_cannot_steer_the_terminal(monkeypatch, capsys):
    """Escape sequences and newlines in a tensor's name are shown, not obeyed; rich's own markup is
    text.
    """
    evil = "a\x1b[2J\x1b]0;owned\x07\n[bold red]b.weight"
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, *options: MemoryCheckpoint({evil: np.ones(1)}))
    assert main(["inspect", "x"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"a\x1b[2J\x1b]0;owned\x07 [bold red]b.weight" in out


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_narrow_terminals_lose_nothing(columns, monkeypatch, capsys):
    key = "model.language_model.layers.17.mlp.experts.gate_up_proj"
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, *options: MemoryCheckpoint({key: packed("mxfp4", (2, 64, 64))}))
    assert main(["inspect", "x"]) == 0
    out = capsys.readouterr().out
    if columns == 80:  # a table whose first column wraps
        head = next(line for line in out.splitlines() if line.startswith("tensor"))
        assert key in "".join(line[: head.index("count") - 1].strip() for line in out.splitlines())
    for value in (*([key] if columns != 80 else []), "mxfp4:g32", "2x64x64", "4.25", "4,352 B"):
        assert value in out.replace("\n", "") or value in "".join(out.split())


def test_a_pipe_gets_every_value_whole(monkeypatch, capsys):
    key = "layers." + "x" * 300
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("halfbyte.checkpoints.open", lambda path, *options: MemoryCheckpoint({key: packed("mxfp4", (64, 64))}))
    assert main(["inspect", "x"]) == 0
    assert any(line.startswith(key) and "4.25" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}], ids=str)
def test_case_55_any_locale(locale, tmp_path):
    """Non-ASCII names and configuration: read as UTF-8, printed as far as the output can."""
    folder = tmp_path / "modèle-模型"
    folder.mkdir()
    save_file({"слой.weight": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"_name_or_path": "éé-模型"}', encoding="utf-8")
    path = str(folder)
    code = "import os, sys; from halfbyte.cli import main; status = 0\n"
    code += "for words in (['inspect'], ['inspect', '--json'], ['verify', sys.argv[1], '--all']):\n"
    code += "    status += main([words[0], sys.argv[1], *words[1:]]); print('\\f', flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(status)", path],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCE, **locale},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    plain, lines, compared, end = done.stdout.split(b"\f\n")
    assert plain
    assert compared
    assert end == b""
    records = [json.loads(line) for line in lines.decode("utf-8").splitlines()]
    assert [r["key"] for r in records if r["record"] == "tensor"] == ["слой.weight"]


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are Unix's")
def test_a_bar_is_drawn_on_a_terminal_only(tmp_path):
    import pty

    from halfbyte.checkpoints import save

    source = tmp_path / "w.safetensors"
    save(source, {"[bold]layer": packed("mxfp4", (64, 64))})
    quiet = run("dequantize", str(source), str(tmp_path / "a.safetensors"))
    assert (quiet.returncode, quiet.stderr) == (0, b"")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "halfbyte", "dequantize", str(source), str(tmp_path / "b.safetensors")]
    env = {**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=env, timeout=120, check=False)
    os.close(slave)
    drawn = os.read(master, 1 << 16)
    os.close(master)
    assert done.returncode == 0
    assert b"dequantizing" in drawn
    assert b"[bold]layer" in drawn
    assert done.stdout.startswith(str(tmp_path / "b.safetensors").encode())


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """`halfbyte inspect x --json | head -1`"""
    save_file({f"layers.{i}.weight": np.ones(1, np.float32) for i in range(3000)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-m", "halfbyte", "inspect", str(tmp_path), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE}, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["record"] == "checkpoint"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["backends"], ["inspect", "{good}"], ["inspect", "--help"]])
def test_an_output_that_is_full_is_one_line(arguments, good):
    command = [sys.executable, "-m", "halfbyte", *(a.format(good=good) for a in arguments)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE}, text=True)
    assert done.returncode == 2
    assert one_line(done.stderr).endswith("No space left on device")


@pytest.mark.skipif(os.name == "nt", reason="a shell's >&-")
@pytest.mark.parametrize("arguments", ["--version", "backends --json", "inspect {good}", "verify {good} {good}"])
def test_no_output_at_all_is_no_fault(arguments, good):
    command = f"{sys.executable} -m halfbyte {arguments.format(good=good)} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE})
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_warning_that_python_makes_an_error_is_a_refusal(monkeypatch, capsys):
    monkeypatch.setattr(
        "halfbyte.cli.inspect.open_with", lambda *_, **__: warnings.warn("float16 overflows", UserWarning, stacklevel=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["inspect", "x"]) == 2
    assert (
        one_line(capsys.readouterr().err)
        == "halfbyte: [inspect] a warning, which PYTHONWARNINGS or -W makes an error: float16 overflows"
    )


@pytest.mark.skipif(os.name == "nt", reason="a shell's >&-")
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_leave_the_output_whole(closed, good, tmp_path):
    command = f"{sys.executable} -m halfbyte dequantize {good} {tmp_path}/out.safetensors {closed}"
    assert subprocess.run(command, shell=True, env={**os.environ, "PYTHONPATH": SOURCE}).returncode == 0
    assert halfbyte.verify(halfbyte.open(good), halfbyte.open(tmp_path / "out.safetensors")).verdict == "identical"
