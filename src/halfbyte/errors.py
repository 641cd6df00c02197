"""Every error halfbyte raises on purpose.

A message reads `[operation] what was given, with values; what is allowed; what to do`. All of them
derive from `HalfbyteError`, so one `except` catches the library's own refusals and nothing else.
"""

from __future__ import annotations


class HalfbyteError(Exception):
    """Base of every deliberate refusal."""


class FormatError(HalfbyteError, ValueError):
    """A codec name, option, group size, policy or part that the format does not allow."""


class ShapeError(HalfbyteError, ValueError):
    """Array shapes or dtypes that do not fit together."""


class LayoutError(HalfbyteError, ValueError):
    """Foreign tensors that do not follow the layout they claim, or a value the target layout cannot
    hold.
    """


class CheckpointError(HalfbyteError, ValueError):
    """A file or folder that is damaged, inconsistent, incomplete, or of a kind that is not read."""


class UnsupportedError(HalfbyteError, NotImplementedError):
    """Recognised, but not read or not computed here; the message says what it is and what to use."""


class BackendError(HalfbyteError, RuntimeError):
    """A backend cannot serve the call; the message says why and which backends can."""


class MemoryLimitError(HalfbyteError, MemoryError):
    """More memory than a limit of the process or of its control groups leaves."""


def plural(n: int, word: str) -> str:
    """1 tensor, 1,234 tensors."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def summary_of(error: BaseException) -> str:
    """The kind of an error and what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
