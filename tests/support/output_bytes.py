"""What the commands that write weights write, as one digest each: the same on every machine.

    python -m support.output_bytes [--threads N ...]

A small llama is quantized to every codec of every layout that is written (of a layout that holds
any codec: to `SOURCES`), by rtn and by mse; packed ones, one of each of `SOURCES`, are converted to
every layout and dequantized. An output's digest is the SHA-256
of the names and bytes of its files; the last line is that of all of them. A codec that a layout
refuses for this model counts by that word.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from halfbyte.backends.cpu import native, set_threads
from halfbyte.cli import main as halfbyte
from halfbyte.conversion.targets import codecs_of
from halfbyte.layouts import written_layouts
from support.conversion_models import write_llama

SOURCES = ("int4:g32", "uint4:g32", "affine4:g32", "mxfp4", "nvfp4", "q4_0")
METHODS = ("rtn", "mse")
VOCABULARY = {chr(ord("!") + i): i for i in range(63)} | {'!"': 63}
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": VOCABULARY, "merges": ['! "']},
}  # fmt: skip
"""One a byte, so that a GGUF can hold it."""


def digest(out: Path) -> str:
    """SHA-256 of a file's bytes, or of the names and bytes of a folder's files."""
    whole = hashlib.sha256()
    for path in sorted(p for p in (out, *out.rglob("*")) if p.is_file()):
        whole.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def commands(codec: str) -> Iterator[tuple[str, ...]]:
    """Arguments after source and output, of a dense source ("") or a packed one."""
    if codec:
        yield ("dequantize",)
        yield from (("convert", "--to", layout) for layout in written_layouts())
        return
    for layout in written_layouts():
        for word in codecs_of(layout) or SOURCES:
            yield from (("quantize", "--to", f"{layout}:{word}", "--method", method) for method in METHODS)


def outputs(work: Path, every: int = 1) -> Iterator[tuple[str, str]]:
    """Command -> digest of what it writes, or "refused"; of one command in `every`."""
    sources = {codec: write_llama(work / codec.replace(":", "-"), codec)[0] for codec in SOURCES}
    for source in sources.values():
        (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    sources[""] = work / "dense"
    assert halfbyte(["dequantize", str(sources[SOURCES[0]]), str(sources[""])]) == 0
    for codec, source in sources.items():
        for number, (verb, *options) in enumerate(itertools.islice(commands(codec), 0, None, every)):
            suffix = ".gguf" if options and options[1].startswith("gguf") else ""  # a GGUF is one file
            out = work / f"out-{codec.replace(':', '-')}-{number}{suffix}"
            status = halfbyte([verb, str(source), str(out), *options, "--json"])
            assert (status == 0) == out.exists(), f"{verb} {codec} {options}: status {status}"
            yield " ".join([verb, codec or "dense", *options]), digest(out) if status == 0 else "refused"


def main() -> None:
    """Prints a line for each output, and one of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    set_threads(parser.parse_args().threads)
    whole, written = hashlib.sha256(), 0
    with tempfile.TemporaryDirectory() as work:
        for name, of in outputs(Path(work)):
            whole.update(f"{name} {of}\n".encode())
            written += of != "refused"
            print(f"output {of} {name}", flush=True)
    print(f"digest of {written} outputs, {native().current()}, {native().threads()} threads: {whole.hexdigest()}")


if __name__ == "__main__":
    main()
