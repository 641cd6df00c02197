"""Chat templates by name or file, for a model whose tokenizer has none or another one."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsupportedError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
ENDS = {"chatml": ("<|im_end|>", "<|im_start|>")}
"""Texts that end a reply, for a vocabulary that has no token for them."""


def template_named(name: str) -> tuple[str, tuple[str, ...]]:
    """(template, texts that end a reply) of a name in `TEMPLATES`, or of a Jinja file.

    Raises UnsupportedError for what is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name], ENDS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UnsupportedError(f"[chat] --chat-template {name}; allowed: {', '.join(TEMPLATES)}, or a file with a Jinja template")
    try:
        return path.read_text(encoding="utf-8"), ()
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"[chat] --chat-template {path} is not UTF-8: byte {error.start}") from error
