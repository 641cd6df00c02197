"""What looks wrong in a checkpoint: `Finding`, and the checks that make them (headers, weight
values, overflow).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ledger import Ledger

SEVERITIES = ("error", "warning", "note")
"""error: the value read is wrong or unreadable. warning: it may be. note: worth knowing."""


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    severity  one of `SEVERITIES`
    code      a stable word; docs/reference/checkpoints.md lists them
    key       the key or file it concerns, "" for all
    message   a sentence
    """

    severity: str
    code: str
    key: str
    message: str

    def __str__(self) -> str:
        where = f" {self.key}:" if self.key else ""
        return f"{self.severity} [{self.code}]{where} {self.message}"


def adapter_words(base: str, use: str) -> str:
    """What an adapter is and what to do with it.

    base  the name of its model, "" where it names none
    use   how it is used with its model
    """
    of = f" of {base}" if base else ""
    return f"a LoRA adapter{of}, not a model: {use}; for one packed file merge it into the dense model and quantize that"


def adapter_findings(adapter: str) -> list[Finding]:
    """A note for a checkpoint that is an adapter (`Checkpoint.adapter`)."""
    return [Finding("note", "adapter", "", f"it is {adapter}")] if adapter else []


def problem_findings(ledger: Ledger, allowed: Sequence[str]) -> list[Finding]:
    """An error for each problem of the ledger; a note for those that `allowed` lets through."""
    problems, let = ledger.split(allowed)
    out = [Finding("error", f"{e.status}-{e.subject}", e.name, f"{e.status}: {e.why}") for e in problems]
    return out + [Finding("note", "let-through", e.name, f"{e.status}: {e.why}; --allow-unknown names it") for e in let]
