"""`halfbyte chat` as a user has it: in a terminal, line by line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfbyte.generation.single import Generation
from halfbyte.transformers import load_model
from support.gguf_families import family_model, write_family
from support.gguf_writer import GGUF

pty = pytest.importorskip("pty")

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WAIT = 120
"""Seconds after which a program that says nothing has failed."""


class Terminal:
    """A program whose input and output are one pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "halfbyte", *arguments]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TERM": "dumb", "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """What is printed up to `text`, which must come."""
        end = time.monotonic() + WAIT
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come; there was {self.seen!r}"
            if not select.select([self.ours], [], [], 1)[0]:
                continue
            try:
                more = os.read(self.ours, 4096)
            except OSError as error:  # the end of a pseudo terminal on Linux
                raise AssertionError(f"{text!r} did not come; there was {self.seen!r}") from error
            self.seen += more.decode().replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, *lines: str) -> str:
        """Types the lines; what is printed before the next prompt, without their echo."""
        for line in lines:
            os.write(self.ours, f"{line}\n".encode())
        said = self.until("> ")
        for line in lines:
            said = said.replace(f"{line}\n", "", 1)
        return said

    def end(self, keys: bytes) -> int:
        """The exit status after the last keys."""
        os.write(self.ours, keys)
        status = self.process.wait(WAIT)
        os.close(self.ours)
        return status


def model_file(path: Path, monkeypatch: pytest.MonkeyPatch, **ends: int) -> Path:
    """A random model with a chat template, and tokens that end a turn."""
    whole = GGUF.bytes

    def with_template(file: GGUF) -> bytes:
        pairs = [(f"tokenizer.ggml.{name}_token_id", "uint32", token) for name, token in ends.items()]
        kept = [pair for pair in file.pairs if pair[0] not in {name for name, _, _ in pairs}]
        for key, _, types in kept:
            for token in ends.values() if key == "tokenizer.ggml.token_type" else ():
                types[token] = 3  # a control token
        file.pairs = [*kept, ("tokenizer.chat_template", "string", TEMPLATE), *pairs]
        return whole(file)

    with monkeypatch.context() as patch:
        patch.setattr(GGUF, "bytes", with_template)
        return write_family(path, "xverse", family_model("xverse"))


def test_a_conversation_in_a_terminal(tmp_path, monkeypatch):
    """Commands, messages of several lines, history, and the end of input."""
    saved = tmp_path / "talk.json"
    terminal = Terminal("chat", str(model_file(tmp_path / "m.gguf", monkeypatch)), "-n", "3", "--temperature", "0")
    assert "/help lists commands" in terminal.until("> ")
    for command in ("/system [TEXT]", "/reset", "/save FILE", "/exit"):
        assert command in terminal.type("/help")
    assert terminal.type("/system") == "(no system message)\n"
    assert terminal.type("/system be brief") == "be brief\n"
    first = terminal.type("abc\\", "def")
    assert terminal.type('"""', "ghi", "jkl", '"""') != ""
    terminal.type(f"/save {saved}")
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["be brief", "abc\ndef", "ghi\njkl"]
    assert first.startswith(messages[2]["content"])
    terminal.type("/reset")
    assert terminal.type("abc\\", "def") == first  # the history was forgotten, the system message was not
    helped = terminal.type("/help")
    assert terminal.type("/nonsense") == f"halfbyte: there is no command /nonsense; these are:\n{helped}"
    assert terminal.type("/save") == "halfbyte: /save needs the name of a file: /save FILE\n"
    terminal.type(f"/save {tmp_path / 'no folder' / 'talk.json'}")  # a message, and the conversation goes on
    assert terminal.end(b"\x04") == 0


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_a_reply_ends_at_every_token_that_ends_a_turn(tmp_path, monkeypatch, name):
    """The second token that the model would write ends the turn, under each name for it."""
    model, tokenizer = load_model(model_file(tmp_path / "m.gguf", monkeypatch))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], add_generation_prompt=True)["input_ids"]
    tokens = [piece.token for piece in Generation(model, tokenizer, prompt, max_tokens=4, stop_ids=set())]
    end = next(i for i in range(1, 4) if tokens[i] not in tokens[:i])
    path = model_file(tmp_path / f"{name}.gguf", monkeypatch, **{name: tokens[end]})
    terminal = Terminal("chat", str(path), "-n", "4", "--temperature", "0")
    terminal.until("> ")
    said = terminal.type("abc")
    assert said == tokenizer.decode(tokens[:end]).strip("\n") + "\n"  # and no remark that it was cut
    assert terminal.end(b"/exit\n") == 0
