"""mkdocs hook: links from the pages to files outside docs/ (benchmarks, tests, sources) become
plain text of their path.

The site holds docs/ alone; in the repository the same links lead to the files themselves. A link to
a file that exists in neither place is an error of the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that leave docs/ replaced by their text and the file's path in the
    repository.
    """
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: link to {match[2]}, which is no file")
        return f"{match[1]} (`{target.relative_to(docs.parent)}`)"

    return LINK.sub(replace, markdown)
