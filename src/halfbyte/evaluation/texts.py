"""The text that is evaluated, and its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..checkpoints.io.home import expanded
from ..checkpoints.io.regular_file import TEXT_BYTES, read_given
from ..generation.templates import token_ids
from .protocols import EvaluationError

JOINT = "\n\n"
"""Between the documents of a data set, as is the custom for WikiText."""


def read_text(path: str | Path) -> str:
    """A UTF-8 file as it is, line ends included; of a .jsonl file, the `text` of every line, joined
    by an empty line.
    """
    path = expanded(path)
    try:
        text = read_given(path, TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"[eval] {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    if path.suffix == ".jsonl":
        return JOINT.join(_line_text(line, f"{path} line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip())
    return text


def _line_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise EvaluationError(f"[eval] {where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise EvaluationError(f"[eval] {where} has no `text`")
    return str(record["text"])


def dataset_text(spec: str) -> str:
    """The `text` column of a data set, `NAME[/CONFIG][:SPLIT]` ("wikitext/wikitext-2-raw-v1:test"),
    through the datasets package.

    EvaluationError when the package, or the column, is not there.
    """
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise EvaluationError("[eval] --dataset needs the datasets package (pip install datasets); or give --text FILE") from None
    name, _, split = spec.partition(":")
    owner = name.split("/")
    config = owner.pop() if len(owner) in (2, 3) and "-v" in owner[-1] else None
    table = load_dataset("/".join(owner), config, split=split or "test")
    if "text" not in table.column_names:
        raise EvaluationError(f"[eval] {spec} has columns {', '.join(table.column_names)}; one named text is wanted")
    return JOINT.join(table["text"])


def tokens_of(tokenizer: Any, text: str) -> tuple[list[int], int | None]:
    """Token ids with what the tokenizer adds, and the bos token where it puts one first."""
    ids: list[int] = token_ids(tokenizer, text, "eval", verbose=False)
    bos = tokenizer.bos_token_id
    if not ids:
        raise EvaluationError("[eval] the text has no tokens")
    if ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()  # an eos that the tokenizer adds is no part of the text
    return ids, bos if bos is not None and ids[0] == bos else None
