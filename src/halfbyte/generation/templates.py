"""Chat templates by name or file, for a model whose tokenizer has none or another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..checkpoints.io.home import expanded
from ..errors import HalfbyteError, UnsupportedError
from .template_limits import check_template, template_limits

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
TEMPLATE_BYTES = 1 << 24
"""Largest file of a chat template."""
ENDS = {"chatml": ("<|im_end|>", "<|im_start|>")}
"""Texts that end a reply, for a vocabulary that has no token for them."""


def template_named(name: str, command: str = "chat") -> tuple[str, tuple[str, ...]]:
    """(template, texts that end a reply) of a name in `TEMPLATES`, or of a Jinja file.

    command  what was called, for the message

    Raises UnsupportedError for what is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name], ENDS[name]
    path = expanded(name)
    if not path.is_file():
        raise UnsupportedError(
            f"[{command}] --chat-template {name}; allowed: {', '.join(TEMPLATES)}, or a file with a Jinja template"
        )
    if path.stat().st_size > TEMPLATE_BYTES:
        raise UnsupportedError(f"[{command}] --chat-template {path} has more than {TEMPLATE_BYTES:,} bytes")
    try:
        return path.read_text(encoding="utf-8"), ()
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"[{command}] --chat-template {path} is not UTF-8: byte {error.start}") from error


def token_ids(tokenizer: Any, text: str, op: str, **options: Any) -> list[int]:
    """The ids of a text, by a transformers tokenizer with `options`.

    Raises UnsupportedError, with the tokenizer's reason, for a text that it cannot encode: its
    vocabulary lacks the token for unknown characters.
    """
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except BaseException as error:  # the tokenizers library raises plain Exception; its panics are none
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        why = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"[{op}] the tokenizer cannot encode this text ({type(error).__name__}: {why}); give another text, or a checkpoint "
            "whose tokenizer.json has its unknown token in the vocabulary"
        ) from error


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the next reply begins, by the tokenizer's template in
    transformers' sandbox.

    template  in place of the tokenizer's own
    tools     JSON schemas of functions that the model may call
    thinking  sets `enable_thinking`, which some templates read
    Where the template fails, the same conversation is given in the other forms that templates were
    written for (`_forms`). Raises UnsupportedError, with what the template says of the first, where
    it refuses all of them or fails.
    """
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    given = template or getattr(tokenizer, "chat_template", None)
    for text in given.values() if isinstance(given, dict) else (given,):
        if isinstance(text, str):
            check_template(text)
    first: Exception | None = None
    for form, schemas in _forms(messages, tools):
        try:
            with template_limits():
                encoded = tokenizer.apply_chat_template(
                    form, tools=schemas, chat_template=template, add_generation_prompt=True, return_dict=True, **options
                )
            return list(encoded["input_ids"])
        except HalfbyteError:
            raise
        except Exception as error:  # a template is a program: it raises what it meets
            first = first or error
    assert first is not None
    why = " ".join(str(first).split())[:300] or "no reason given"
    raise UnsupportedError(
        f"[chat] the chat template does not render this conversation ({type(first).__name__}: {why}); "
        "give another with --chat-template (chatml, or a file)"
    ) from first


Form = tuple[list[Mapping[str, Any]], list[Mapping[str, Any]] | None]


def _forms(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Iterator[Form]:
    """(messages, tools) of one conversation: as given; with an empty list of tools where there are
    none, for templates that always read it; with arguments of calls as JSON text, for templates
    that join them to text.
    """
    yield list(messages), None if tools is None else list(tools)
    if tools is None:
        yield list(messages), []
    as_text = [{**m, "tool_calls": [_text_arguments(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]
    if as_text != list(messages):
        yield as_text, None if tools is None else list(tools)


def _text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call with its arguments as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
