"""The `halfbyte` command; see docs/reference/cli.md."""

from .app import main

__all__ = ["main"]
