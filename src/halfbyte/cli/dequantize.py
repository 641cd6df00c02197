"""halfbyte dequantize: a packed checkpoint to dense safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import plural
from .failures import complain, complain_of_notes
from .opening import AllowUnknown, ConfigOption, ForceOption, ShardSizeOption, open_with, warn_of_missing_tokenizer
from .terminal import human_bytes, print_json, print_wrapped, progress


def dequantize(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder, .safetensors or .gguf.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, or one file when the name ends in .safetensors.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16, for the packed weights. Without it: the configuration's, else float32."),
    ] = None,
    arithmetic: Annotated[
        str, typer.Option(help="exact: the real value rounded once. producer: bit for bit what the producer's own decoder gives.")
    ] = "exact",
    max_shard_size: ShardSizeOption = "5GB",
    force: ForceOption = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON about what was written.")] = False,
) -> int:
    """Write every weight dense. Streams: memory stays at one packed tensor and a block of rows.

    Configuration and tokenizer files are copied, without the quantization config. A failed run
    leaves nothing behind.
    """
    from ..conversion.to_dense import dequantize_checkpoint, parse_size

    limit = parse_size(max_shard_size)
    with open_with(path, config, allow_unknown) as checkpoint, progress("dequantizing", in_bytes=True) as report:
        warn_of_missing_tokenizer(checkpoint, out)
        written = dequantize_checkpoint(
            checkpoint, out, dtype=dtype, arithmetic=arithmetic, max_shard_size=limit, overwrite=force, progress=report
        )
    complain_of_notes(written.notes)
    for name, count in written.nonfinite.items():
        complain(f"warning: {name}: {plural(count, 'value')} infinite or NaN in {written.dtype}; see halfbyte inspect --data")
    if json:
        print_json(written.record())
    else:
        files = sum(f.endswith(".safetensors") for f in written.files)
        print_wrapped(
            f"{written.path}: {plural(written.tensors, 'tensor')}, {written.quantized:,} of them dequantized to "
            f"{written.dtype}, {human_bytes(written.nbytes)} in {plural(files, 'file')}"
        )
        if written.dropped:
            print_wrapped(f"not written, used by packed modules only: {plural(len(written.dropped), 'activation scale')}")
    return 0
