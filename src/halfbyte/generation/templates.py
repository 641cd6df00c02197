"""Chat templates by name or file, for a model whose tokenizer has none or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import HalfbyteError, UnsupportedError
from .template_limits import check_template, template_limits

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
ENDS = {"chatml": ("<|im_end|>", "<|im_start|>")}
"""Texts that end a reply, for a vocabulary that has no token for them."""


def template_named(name: str, command: str = "chat") -> tuple[str, tuple[str, ...]]:
    """(template, texts that end a reply) of a name in `TEMPLATES`, or of a Jinja file.

    command  what was called, for the message

    Raises UnsupportedError for what is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name], ENDS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UnsupportedError(
            f"[{command}] --chat-template {name}; allowed: {', '.join(TEMPLATES)}, or a file with a Jinja template"
        )
    try:
        return path.read_text(encoding="utf-8"), ()
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"[{command}] --chat-template {path} is not UTF-8: byte {error.start}") from error


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool | None = None,
) -> list[int]:  # fmt: skip
    """Token ids of a conversation up to where the next reply begins, by the tokenizer's template in
    transformers' sandbox.

    template  in place of the tokenizer's own
    tools     JSON schemas of functions that the model may call
    thinking  sets `enable_thinking`, which some templates read
    Raises UnsupportedError, with what the template says, where it refuses the conversation or
    fails.
    """
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    given = template or getattr(tokenizer, "chat_template", None)
    for text in given.values() if isinstance(given, dict) else (given,):
        if isinstance(text, str):
            check_template(text)
    try:
        with template_limits():
            encoded = tokenizer.apply_chat_template(
                list(messages), tools=None if tools is None else list(tools), chat_template=template, add_generation_prompt=True,
                return_dict=True, **options,
            )  # fmt: skip
        return list(encoded["input_ids"])
    except HalfbyteError:
        raise
    except Exception as error:  # a template is a program: it raises what it meets
        why = " ".join(str(error).split())[:300] or "no reason given"
        raise UnsupportedError(
            f"[chat] the chat template does not render this conversation ({type(error).__name__}: {why}); "
            "give another with --chat-template (chatml, or a file)"
        ) from error
