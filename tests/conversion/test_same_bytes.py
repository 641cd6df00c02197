"""Outputs have the same bytes on every instruction set, with any number of threads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from halfbyte.backends.cpu import native, set_threads, use_instruction_set
from halfbyte.cli import main
from support.conversion_models import write_llama
from support.cpu_weights import SETS, needs_native

pytestmark = needs_native
ROUNDED = ("modelopt:nvfp4", "mlx:affine4:g32", "halfbyte:q4_K")
CONVERTED = {"int4:g32": ("gptq", "mlx"), "uint4:g32": ("awq",), "nvfp4": ("modelopt",)}


def digest(out: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        whole.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def outputs(sources: dict[str, Path], work: Path) -> dict[str, str]:
    """Command -> digest of what it writes."""
    work.mkdir()
    commands = {("dequantize", "int4:g32", ""): []}
    commands |= {("quantize", "dense", target): ["--method", "mse"] for target in ROUNDED}
    commands |= {("convert", codec, target): [] for codec, targets in CONVERTED.items() for target in targets}
    found = {}
    for number, ((verb, source, target), options) in enumerate(commands.items()):
        out = work / str(number)
        to = ["--to", target] if target else []
        assert main([verb, str(sources[source]), str(out), *to, *options]) == 0
        found[f"{verb} {source} {target}"] = digest(out)
    return found


def test_quantized_and_converted_files_do_not_depend_on_the_instruction_set(tmp_path, capsys):
    sources = {codec: write_llama(tmp_path / codec.replace(":", "-"), codec)[0] for codec in CONVERTED}
    sources["dense"] = tmp_path / "dense"
    assert main(["dequantize", str(sources["int4:g32"]), str(sources["dense"])]) == 0
    before, found = native().current(), []
    try:
        for name, threads in [(SETS[0], 1), *((name, 8) for name in SETS)]:
            use_instruction_set(name)
            set_threads(threads)
            found.append(outputs(sources, tmp_path / f"{name}-{threads}"))
    finally:
        use_instruction_set(before)
        set_threads(0)
    assert len(found) == len(SETS) + 1
    assert all(one == found[0] for one in found)
    assert len(set(found[0].values())) > 4
