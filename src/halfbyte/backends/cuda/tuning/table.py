"""Tiles that `halfbyte tune` found, by card: JSON files beside this one for the cards they were
measured on, and the user's own.

    {"card": "NVIDIA H100 80GB HBM3", "measured": "...", "tiles": [
        {"kernel": "fragments", "family": "int", "n": 4096, "k": 4096, "m": 16,
         "tile": [2, 2, 8, 1, 4, 0, 1, false]}, ...]}

A call takes the entry of its kernel and family whose shape is nearest (in factors of n and k, and
of the work that its tile does beyond k) and whose m is the smallest that is not below its own. The
user's file, $XDG_CACHE_HOME/halfbyte/tiles-CARD.json, goes before the default one. Nothing is
searched for while a program runs: without an entry, the rules of mma_tiles.py decide.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....checkpoints.io.safe_files import replace_text
from ....errors import BackendError

DEFAULT = Path(__file__).parent / "cards"
Entry = dict[str, Any]


def word_of(card: str) -> str:
    """A card's name as a file's: "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.search(r"[A-Z]+\d+\w*", card)
    return (model.group() if model else card.replace(" ", "-")).lower()


def user_file(card: str) -> Path:
    """Where `halfbyte tune` writes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "halfbyte" / f"tiles-{word_of(card)}.json"


def read(path: Path) -> list[Entry]:
    """A file's entries. BackendError names the file when it is not what `halfbyte tune` writes."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        for e in entries:
            if not (isinstance(e["kernel"], str) and isinstance(e["tile"], list) and min(e["n"], e["k"], e["m"]) > 0):
                raise ValueError(f"entry {e}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"[cuda] {path} holds no tiles: {error}; remove it, or run `halfbyte tune` again") from None
    return list(entries)


def write(path: Path, card: str, measured: str, entries: list[Entry]) -> None:
    """Entries to a file; those of the same kernel, family and shape that are there already are
    replaced.
    """
    old = read(path) if path.exists() else []
    new = {key(e) for e in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted([e for e in old if key(e) not in new] + entries, key=key)
    text = ",\n".join(f"  {json.dumps(e)}" for e in rows)
    head = f'{{"card": {json.dumps(card)}, "measured": {json.dumps(measured)}, "tiles": [\n'
    replace_text(path, f"{head}{text}\n]}}\n")


def key(e: Entry) -> tuple[Any, ...]:
    """Keys that identify an entry."""
    return e["kernel"], e["family"], e["n"], e["k"], e["m"]


@functools.cache
def entries_for(card: str) -> tuple[tuple[Entry, ...], ...]:
    """The user's entries for a card, then the default ones; none for a card without a file."""
    files = (user_file(card), DEFAULT / f"{word_of(card)}.json")
    return tuple(tuple(read(f)) for f in files if f.exists())


@functools.lru_cache(maxsize=4096)
def found(
    card: str, kernel: str, family: str, n: int, k: int, m: int, work: Callable[[int, tuple[Any, ...]], float] | None = None
) -> tuple[Any, ...] | None:
    """The tile for a call, or None. `work(k, tile)`, the work of a tile over what k needs, counts
    as distance too: a tile that suited its own k may do twice the work at another.
    """

    def distance(e: Entry) -> tuple[float, int]:
        tile = tuple(e["tile"])
        more = 0.0 if work is None else 2 * math.log2(work(k, tile) / work(e["k"], tile))
        return abs(math.log2(e["n"] / n)) + abs(math.log2(e["k"] / k)) + max(0.0, more), e["m"]

    for entries in entries_for(card):
        fit = [e for e in entries if e["kernel"] == kernel and e["family"] == family and e["m"] >= m]
        if fit:
            return tuple(min(fit, key=distance)["tile"])
    return None


@functools.lru_cache(maxsize=4096)
def exact(card: str, kernel: str, family: str, n: int, k: int, m: int) -> tuple[Any, ...] | None:
    """The tile measured for this very shape and m, or None."""
    for entries in entries_for(card) if card else ():
        for e in entries:
            if (e["kernel"], e["family"], e["n"], e["k"], e["m"]) == (kernel, family, n, k, m):
                return tuple(e["tile"])
    return None
