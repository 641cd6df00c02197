"""halfbyte backends: what can run here, and the reason for what cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .terminal import Column, print_json, print_table


def backends(
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: one backend a line.")] = False,
) -> int:
    """List the backends, best first for each device, and say why one cannot run here."""
    listed = list(records())
    if json:
        for record in listed:
            print_json(record)
        return 0
    columns = (Column("backend"), Column("device"), Column("runs here"), Column("what was detected, or why not"))
    rows = [[r["backend"], r["device"], "yes" if r["available"] else "no", r["reason"] or r["description"]] for r in listed]
    print_table(columns, rows)
    return 0


def records() -> Iterator[dict[str, Any]]:
    """A record for each backend, best first for each device."""
    from ..backends import names

    for name in names():
        yield _record(name)


def _record(name: str) -> dict[str, Any]:
    from ..backends import backend_named

    record: dict[str, Any] = {"record": "backend", "backend": name, "device": "", "available": False, "reason": ""}
    try:
        backend = backend_named(name)
        reason = backend.reason()
        record |= {"device": backend.device, "available": reason is None, "reason": reason}
        description = "" if reason else backend.describe()
    except Exception as error:  # a broken driver or runtime may raise anything; the others are still worth listing
        record |= {"available": False, "reason": f"it could not be loaded: {type(error).__name__}: {error}"}
        description = ""
    return {**record, "description": description}
