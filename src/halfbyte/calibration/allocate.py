"""A codec for each weight within a budget of bits, bytes or divergence.

    allocation = allocate(checkpoint, "gguf", "text.txt", bits=4.25)
    allocation.save("recipe.json")
    quantize_checkpoint(checkpoint, "out.gguf", allocation.recipe)

Divergences are estimated weight by weight (`sensitivity`) and added. For a limit on the divergence
itself, the model is also quantized and measured on the calibration text, and the estimate's limit
is moved until what was measured is within it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint
from ..checkpoints.io.home import expanded
from ..conversion.allocation import Allocation, Unit, allocated, overhead_of
from ..conversion.quantize import quantize_checkpoint
from ..conversion.recipe import Recipe
from ..conversion.targets import goal_named
from ..conversion.to_dense import DEFAULT_SHARD
from ..errors import FormatError, HalfbyteError, LayoutError, plural
from ..evaluation.compare import Comparison, compare
from ..evaluation.protocols import Window
from ..layouts import LAYOUTS
from ..transformers import load_model
from .sensitivity import sensitivities
from .walk import CalibrationError, Progress, calibrate, token_sequences

TRIES = 5
"""Models that are quantized and measured for a limit on the divergence, at most."""


def allocate(
    checkpoint: Checkpoint,
    to: str,
    text: str | Path,
    *,
    bits: float | None = None,
    size: int | None = None,
    max_kl: float | None = None,
    method: str = "rtn",
    codecs: Sequence[str] = (),
    context: int = 512,
    sequences: int = 32,
    device: str = "auto",
    from_packed: bool = False,
    seed: int = 0,
    folder: str | Path | None = None,
    max_shard_size: int = DEFAULT_SHARD,
    progress: Progress | None = None,
) -> Allocation:
    """The choices of least estimated divergence within one budget.

    to       layout of the target
    text     calibration text, path of a UTF-8 file
    bits     a weight, at most, over all weights that can be packed; a tied head counts once
    size     bytes of the files of weights, at most
    max_kl   divergence from the dense model on the calibration text, nats a token, at most: the
             fewest bytes within it, measured on at most `TRIES` quantized models
    method   that will round: "rtn", "mse", "gptq", "awq", "learned"
    codecs   candidates; by default all of the target
    max_shard_size  of the files that `size` counts, as they will be written
    folder   where the models of `max_kl` are written, and deleted; the system's for temporary files
    Equal arguments give equal choices. FormatError, with what is possible, for a budget that cannot
    be met, and as `sensitivities`.
    """
    if sum(limit is not None for limit in (bits, size, max_kl)) != 1:
        raise FormatError("[quantize] one budget is wanted: bits, size or max_kl")
    layout = goal_named(to).layout
    if ":" in to:
        raise FormatError(f"[quantize] target {to!r} with a budget, which chooses the codecs; give {to.partition(':')[0]}")
    if LAYOUTS[layout].one_format:
        raise LayoutError(f"[quantize] {layout} has one format for all its weights, so a budget has nothing to choose; name it")
    found = sensitivities(
        checkpoint,
        layout,
        text,
        method,
        codecs=codecs,
        context=context,
        sequences=sequences,
        device=device,
        from_packed=from_packed,
        seed=seed,
        progress=progress,
    )
    facts: dict[str, Any] = {
        "method": method,
        "calibration": Path(text).name,
        "tokens": found.tokens,
        "tokens_sha256": found.digest,
        "seed": seed,
    }
    files = 1 if size is None else 1 + 2 * size // max_shard_size
    overhead = overhead_of(checkpoint, layout, [m for u in found.units for m in u.modules], files)
    if max_kl is None:
        return allocated(layout, found.units, found.kept, overhead, bits=bits, size=size, facts=facts)
    trial = _Trial(checkpoint, text, method, context, sequences, device, from_packed, folder)
    return _within(layout, found.units, found.kept, overhead, max_kl, facts, trial)


def _within(
    layout: str, units: Sequence[Unit], kept: Sequence[str], overhead: int, max_kl: float, facts: dict[str, Any], trial: _Trial
) -> Allocation:
    """The smallest of the tried allocations whose measured divergence is within the limit."""
    limit, best, seen = max_kl, None, list[float]()
    for _ in range(TRIES):
        try:
            allocation = allocated(layout, units, kept, overhead, max_kl=limit, facts={**facts, "max_kl": max_kl})
        except FormatError:
            if not seen:
                raise
            break
        measured = trial.measure(allocation.recipe).kl_mean
        seen.append(measured)
        if measured <= max_kl and (best is None or allocation.nbytes < best.nbytes):
            best = replace(allocation, facts={**allocation.facts, "measured_kl": measured})
        if 0.9 * max_kl <= measured <= max_kl:
            break
        # The estimate's share of what is measured changes slowly with the size.
        limit *= 0.97 * max_kl / max(measured, 1e-3 * max_kl)
    if best is None:
        raise FormatError(
            f"[quantize] --max-kl {max_kl:g}; the least that was measured is {min(seen):.4g}, of {plural(len(seen), 'model')}. "
            "Allow more, or take another method"
        )
    return best


def windows_of(tokenizer: Any, text: Path, context: int, sequences: int) -> list[Window]:
    """The tokens that calibration takes from a text, all but the first of a sequence predicted."""
    return [Window(tuple(sequence), 1) for sequence in token_sequences(tokenizer, text, context, sequences)]


class _Trial:
    """Quantizes a model by a recipe and measures it on the calibration text."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        text: str | Path,
        method: str,
        context: int,
        sequences: int,
        device: str,
        from_packed: bool,
        folder: str | Path | None,
    ) -> None:
        self.checkpoint, self.text, self.method, self.from_packed = checkpoint, text, method, from_packed
        self.context, self.sequences, self.device, self.folder = context, sequences, device, folder
        self.dense, tokenizer = load_model(checkpoint.path)
        self.windows = windows_of(tokenizer, expanded(text), context, sequences)

    def measure(self, recipe: Recipe) -> Comparison:
        """Beside the dense model."""
        with tempfile.TemporaryDirectory(prefix="halfbyte-", dir=self.folder) as folder:
            out = Path(folder) / ("trial.gguf" if recipe.goal.writer.container == "gguf" else "trial")
            if self.method == "rtn":
                quantize_checkpoint(self.checkpoint, out, recipe, "rtn", from_packed=self.from_packed)
            else:
                found = calibrate(
                    self.checkpoint,
                    recipe,
                    self.text,
                    self.method,
                    context=self.context,
                    sequences=self.sequences,
                    device=self.device,
                    from_packed=self.from_packed,
                )
                quantize_checkpoint(
                    self.checkpoint, out, recipe, found.rounder, replaced=found.replaced, from_packed=self.from_packed
                )
            try:
                model = load_model(out)[0]
            except HalfbyteError as error:
                raise CalibrationError(f"[quantize] --max-kl: what was quantized does not load: {error}") from None
            return compare(model, self.dense, self.windows)
