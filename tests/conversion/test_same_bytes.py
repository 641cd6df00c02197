"""Outputs have the same bytes on every instruction set, with any number of threads."""

from __future__ import annotations

from halfbyte.backends.cpu import native, set_threads, use_instruction_set
from support.cpu_weights import SETS, needs_native
from support.output_bytes import outputs

pytestmark = needs_native
EVERY = 7
"""One command in so many; `python -m support.output_bytes` runs all of them."""


def test_quantized_and_converted_files_do_not_depend_on_the_instruction_set(tmp_path, capsys):
    before, found = native().current(), []
    try:
        for name, threads in [(SETS[0], 1), *((name, 8) for name in SETS)]:
            use_instruction_set(name)
            set_threads(threads)
            (work := tmp_path / f"{name}-{threads}").mkdir()
            found.append(dict(outputs(work, EVERY)))
    finally:
        use_instruction_set(before)
        set_threads(0)
    assert len(found) == len(SETS) + 1
    assert all(one == found[0] for one in found)
    digests = {digest for digest in found[0].values() if digest != "refused"}
    assert len(digests) > 20
    verbs = {command.split()[0] for command, digest in found[0].items() if digest in digests}
    assert verbs == {"quantize", "convert", "dequantize"}
