"""halfbyte plan: what a model needs to run, whether that fits, and what would make it fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..numerics.memory_limit import memory_limit
from .opening import AllowUnknown, ConfigOption, config_of
from .terminal import Column, human_bytes, print_json, print_table, print_wrapped


def plan(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder with the config.json of one.")],
    context: Annotated[int, typer.Option(help="Tokens of prompt and answer together.")] = 4096,
    batch: Annotated[int, typer.Option(help="Texts generated at once.")] = 1,
    device_memory: Annotated[str | None, typer.Option(help="Memory of the device: 24GB, 16GiB.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda when --device-memory is given.")] = "",
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of activations and dense tensors; by default float32 on the CPU, else bfloat16.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Plan as if its matrices were in this codec (int4:g128).")] = None,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
) -> int:
    """Say what a model needs in memory to run: weights, KV cache, activations, overhead.

    Exit status: 1 when it does not fit --device-memory, or on the CPU the memory that limits of the
    process and of its control groups leave; else 0.
    """
    from ..generation.memory_plan import Planner

    where = device or ("cpu" if device_memory is None else "cuda")
    memory = None if device_memory is None else _memory(device_memory)
    planner = Planner(
        path,
        device=where.partition(":")[0],
        dtype=dtype,
        codec=codec,
        config=config_of(config),
        allow_unknown=allow_unknown or (),
    )
    made = planner.plan(context, batch=batch, device_memory=memory)
    remedies = planner.remedies(made)
    limit = memory_limit() if where == "cpu" and memory is None else None
    below = limit is None or made.total - made.overhead <= limit.left
    if json:
        print_json(
            {
                "record": "plan",
                **asdict(made),
                "total": made.total,
                "fits": made.fits,
                "remedies": remedies,
                "memory_limit": None if limit is None else limit._asdict(),
            }
        )
        return int(made.fits is False or not below)
    print_wrapped(f"{path}: {context:,} tokens, batch {batch}, {made.dtype} on {made.device}")
    rows: list[tuple[str, int]] = [
        ("packed weights", made.packed), ("dense weights", made.dense), ("KV cache", made.cache),
        ("activations", made.activations), ("overhead", made.overhead), ("total, at most", made.total),
    ]  # fmt: skip
    print_table((Column("for"), Column("bytes", True)), [[name, human_bytes(n)] for name, n in rows])
    if made.loading > made.weights + made.cache + made.activations:
        print_wrapped(f"peak while the weights are read: {human_bytes(made.overhead + made.loading)}")
    longest = getattr(planner.config, "max_position_embeddings", None)
    if longest and context > longest:
        print_wrapped(f"the model was made for texts of up to {longest:,} tokens")
    if where == "cuda" and not device and not _has_cuda():
        print_wrapped("planned for a CUDA device, which this machine has not; --device cpu plans for the processor")
    if memory is not None:
        print_wrapped(f"{'fits' if made.fits else 'does not fit'} {human_bytes(memory)}")
    if limit is not None:
        verb = "fits" if below else "does not fit"
        print_wrapped(f"{verb} the {human_bytes(limit.left)} that {limit.name} leaves this process")
    for remedy in remedies:
        print_wrapped(f"would fit: {remedy}")
    return int(made.fits is False or not below)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _memory(text: str) -> int:
    """Bytes. CheckpointError for what is no size."""
    from ..conversion.to_dense import parse_size
    from ..errors import CheckpointError, HalfbyteError

    try:
        return parse_size(text)
    except HalfbyteError:
        raise CheckpointError(
            f"[plan] --device-memory {text!r}; allowed: a number with B, KB, MB, GB, TB, KiB, MiB or GiB (24GB, 16GiB)"
        ) from None
