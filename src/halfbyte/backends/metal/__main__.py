"""Print a kernel: `python -m halfbyte.backends.metal FUNCTION CODEC DTYPE [--whole]`, for reading and for Xcode."""

from __future__ import annotations

import sys

from ...formats import format_named
from .kernels import NAMED
from .source import entry, whole_source

if __name__ == "__main__":
    words = [a for a in sys.argv[1:] if a != "--whole"]
    if len(words) != 3 or words[0] not in NAMED:
        raise SystemExit(f"FUNCTION CODEC DTYPE [--whole]; functions: {', '.join(NAMED)}")
    kernel = NAMED[words[0]](format_named(words[1]), words[2])
    print(whole_source(kernel) if "--whole" in sys.argv else entry(kernel))
