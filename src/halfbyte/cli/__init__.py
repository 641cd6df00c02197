"""The `halfbyte` command; see docs/cli.md."""

from .app import main

__all__ = ["main"]
