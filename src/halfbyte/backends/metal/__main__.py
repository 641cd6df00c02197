"""Print a kernel: `python -m halfbyte.backends.metal FUNCTION CODEC DTYPE [--whole]`, for reading
and for Xcode.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...errors import BackendError, HalfbyteError
from ...formats import format_named
from .kernels import NAMED
from .source import entry, whole_source
from .weight import fused_refusal, refusal
from .widen import one_level_format, widens

DTYPES = ("float16", "bfloat16", "float32")


def text(arguments: Sequence[str]) -> str:
    """The kernel's entry, or with --whole all it needs. Raises HalfbyteError when there is no such
    kernel.
    """
    words = [a for a in arguments if a != "--whole"]
    if len(words) != 3 or words[0] not in NAMED or words[2] not in DTYPES:
        raise BackendError(
            f"[metal] {' '.join(words) or 'nothing'} given; FUNCTION CODEC DTYPE [--whole] is wanted. Functions: "
            f"{', '.join(NAMED)}; dtypes of x: {', '.join(DTYPES)}"
        )
    function, codec, dtype = words
    fmt = format_named(codec)
    why = refusal(fmt) or (fused_refusal(fmt) if function.startswith("gemm_fused") else None)
    if why:
        raise BackendError(f"[metal] {why}")
    kernel = NAMED[function](one_level_format(fmt) if widens(fmt) else fmt, dtype)
    return whole_source(kernel) if "--whole" in arguments else entry(kernel)


if __name__ == "__main__":
    try:
        print(text(sys.argv[1:]))
    except HalfbyteError as e:
        raise SystemExit(str(e)) from None
