"""JSON files of a checkpoint, read under limits: size, number of values, depth, UTF-8 in every
locale, no duplicate keys.

A limit on bytes alone does not bound memory: `[],[],[]` costs 24 times its length as Python lists.
Commas and brackets count values before anything is built.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .regular_file import LFS_ADVICE, LFS_POINTER, open_regular

CONFIG_BYTES = 16 << 20
"""Largest configuration file: a config with entries for 70,000 modules is 6 MB."""
INDEX_BYTES = 48 << 20
"""Largest shard index: 400,000 tensors of 100 bytes are 40 MB."""
MAX_VALUES = 1 << 20
"""Most values in one file."""

MAX_TOKEN_ID = 10**7 - 1
"""Largest id of a token: the largest vocabularies have 300,000."""
TOKENIZER_BYTES = 1 << 28
"""Largest JSON file of a tokenizer: the largest have 40 MB."""
_OPENED_BY_LIBRARIES = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab", ".spm"))
"""Suffixes of configurations, vocabularies and templates, which transformers opens by itself."""


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """The object in the JSON file `path`; CheckpointError naming the file otherwise."""
    try:
        with open_regular(path) as f:
            size = os.fstat(f.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"[open] {path}: {size:,} bytes; a file of this kind is read up to {limit:,}")
            data = f.read(limit)
        if data.startswith(LFS_POINTER):
            raise CheckpointError(f"[open] {path} {LFS_ADVICE}")
    except OSError as error:
        raise CheckpointError(f"[open] {path}: cannot be read: {error.strerror or error}") from error
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in messages. CheckpointError when it is anything
    else.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_VALUES:
        raise CheckpointError(f"[open] {where}: about {values:,} JSON values; read up to {MAX_VALUES:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"[open] {where}: byte {error.start} is not UTF-8 ({error.reason}); JSON is written in UTF-8"
        ) from error

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CheckpointError(
                f"[open] {where}: key {twice!r} is given twice in one object; which value is meant cannot be known"
            )
        return out

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise CheckpointError(f"[open] {where}: JSON nested too deeply; allowed: the nesting of a configuration") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"[open] {where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"[open] {where}: holds a JSON {_kind(value)}; an object {{...}} is needed")
    return value


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "null")


def check_plain_files(folder: Path, op: str) -> None:
    """CheckpointError for what transformers must not open beside a checkpoint's tensors: a pipe
    would block it for ever, a file of more than `TOKENIZER_BYTES` fill memory.
    """
    for path in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        if path.suffix not in _OPENED_BY_LIBRARIES:
            continue
        try:
            found = path.stat()
        except OSError:  # a link that leads nowhere: the library reports it
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise CheckpointError(f"[{op}] {path}: cannot be read: it is a pipe, a device or a socket")
        if found.st_size > TOKENIZER_BYTES:
            raise CheckpointError(
                f"[{op}] {path}: {found.st_size:,} bytes; files of this kind are read up to {TOKENIZER_BYTES:,}"
            )


def check_token_ids(path: Path, op: str) -> None:
    """CheckpointError for a tokenizer.json, or a vocab.json, with an id above `MAX_TOKEN_ID`.

    The tokenizers library lists every id below the largest that no token has, and ends the process
    when there is no memory for the list.
    """
    try:
        with open_regular(path) as file:
            data = file.read(TOKENIZER_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"[{op}] {path}: cannot be read: {error.strerror or error}") from error
    if len(data) > TOKENIZER_BYTES:
        raise CheckpointError(f"[{op}] {path}: more than {TOKENIZER_BYTES:,} bytes; no tokenizer is that large")
    if not re.search(rb":\s*\d{8}", data):
        return
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # the library reports it
        return
    if not isinstance(value, dict):
        return
    model, added = value.get("model"), value.get("added_tokens")
    tables = [value, model.get("vocab") if isinstance(model, dict) else None]
    found = [item for table in tables if isinstance(table, dict) for item in table.items()]
    found += [(t.get("content"), t.get("id")) for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    for token, index in found:
        if isinstance(index, int) and index > MAX_TOKEN_ID:
            raise CheckpointError(f"[{op}] {path}: token {token!r:.60} has id {index}; ids up to {MAX_TOKEN_ID:,} are allowed")


def decoded_floats(value: Any) -> Any:
    """A configuration's value with the floats that transformers encodes: {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [decoded_floats(v) for v in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["__float__"] and str(value["__float__"]).lstrip("+-") in ("Infinity", "NaN"):
        return float(value["__float__"])
    return {k: decoded_floats(v) for k, v in value.items()}
