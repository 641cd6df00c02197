"""Render every chat template of a folder with a conversation that has each role, as halfbyte's chat
and server do.

    python tools/render_chat_templates.py FOLDER        FOLDER holds *.jinja (llama.cpp: models/templates)

One line a template: for plain turns, and for a tool call with its result, each without and with
thinking, "text", "no system" (renders once the system message is part of the first user message, as
`halfbyte chat` retries) or the message that the user gets. The exit status is 1 where anything but
halfbyte's own error was raised.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from halfbyte.errors import HalfbyteError
from halfbyte.generation.templates import render

SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And the weather in Rome?"},
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLED = [
    *PLAIN,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"celsius": 21}'},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    }
]


def tokenizer() -> Any:
    """Bytes as tokens, and the markers of a start and an end."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def outcome(tok: Any, template: str, messages: list[dict[str, Any]], tools: Any, thinking: bool | None) -> str:
    """What a conversation gives: text, no system, or the message."""
    try:
        render(tok, [SYSTEM, *messages], template=template, tools=tools, thinking=thinking)
        return "text"
    except HalfbyteError as error:
        refused = str(error)
    first, *rest = messages
    try:
        joined = [{**first, "content": f"{SYSTEM['content']}\n\n{first['content']}"}, *rest]
        render(tok, joined, template=template, tools=tools, thinking=thinking)
        return "no system"
    except HalfbyteError:
        return refused.partition("this conversation ")[2].partition("; give another")[0] or refused


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render chat templates with a conversation of every role.")
    parser.add_argument("folder", type=Path)
    tok = tokenizer()
    failed = 0
    print("| template | turns | turns, thinking | tools | tools, thinking |\n| --- | --- | --- | --- | --- |")
    for path in sorted(parser.parse_args().folder.glob("*.jinja")):
        template = path.read_text("utf-8")
        row = []
        for messages, tools in ((PLAIN, None), (TOOLED, TOOLS)):
            for thinking in (False, True):
                try:
                    row.append(outcome(tok, template, messages, tools, thinking))
                except Exception as error:  # what must not happen
                    failed += 1
                    row.append(f"TRACEBACK {type(error).__name__}: {error}")
        print(f"| {path.stem} | " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
