"""That a program is loaded, or does something, without a word of warning."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import warning_once


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(f"{record.name}: {record.getMessage()}")


@contextmanager
def quiet(*allowed: str) -> Iterator[None]:
    """Fails where Python or a library's log warns of something that no expression of `allowed`
    finds. transformers keeps its records from the root; what it says once a process it says again
    here.
    """
    warning_once.cache_clear()
    kept = _Kept()
    loggers = [logging.getLogger(name) for name in (None, "transformers")]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(kept)
    said = [*kept.records, *(f"{w.category.__name__}: {w.message}" for w in caught)]
    left = [text for text in said if not any(re.search(expression, text) for expression in allowed)]
    assert not left, "\n".join(left)
