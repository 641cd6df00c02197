"""Names of repositories on the hub, as users write them in the place of a path.

org/name          org/name@revision          org/name/model-Q4_K_M.gguf@revision
hf://org/name     the same, where a folder of that name might be meant
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FILES = (".gguf", ".safetensors")
"""Endings of files that can be opened by themselves."""
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(hf:/{{1,3}})?({_PART}/{_PART})((?:/[^@/]+)*)(?:@([\w./+-]+))?")


@dataclass(frozen=True)
class HubName:
    """A repository, or one file in it.

    repo      "org/name"
    revision  branch, tag or commit; "" for the default branch
    file      path in the repository of one file, "" for the whole
    """

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{'/' + self.file if self.file else ''}{at}"


def parse_name(path: str | os.PathLike[str]) -> HubName | None:
    """The repository that a path names; None for a path that exists, and for what cannot be one.

    A path without `hf://` and without a revision whose first folder exists here means a local file
    that is missing: it is no repository's name.

    >>> parse_name("org/name@main")
    HubName(repo='org/name', revision='main', file='')
    """
    text = os.fspath(path)
    match = _NAME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    prefix, repo, inner, revision = match.groups()
    inner = inner.strip("/")
    if not prefix:
        first = Path(text.partition("/")[0])
        if os.path.lexists(text) or (first.is_dir() and not revision) or (inner and not inner.endswith(FILES)):
            return None
        if repo.endswith((*FILES, ".json", ".onnx", ".bin", ".pt")):  # a file in a folder that is not here
            return None
    return HubName(repo, revision or "", inner)
