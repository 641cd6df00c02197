"""Records of a benchmark, one a contender, shape and m, and what follows from them: fractions of
the measured limits, ratios to peers.

    limits   device, threads, read_gbps, gflops, gops, and `name` of the machine; the rates are 0
             where nothing was measured
    time     peer ("halfbyte" or another library), format, kind, bits, m, n, k, time_us, gbps,
             gflops, fraction, ratio, best_peer

Only results of one kind are compared (exact, int8, half), and only with weights of nearly the same
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

SAME_BITS = 0.05
"""A peer counts for a format when its bits a weight, scales included, are within this share of the
format's.
"""
FEW_TOKENS = 8
"""Up to so many tokens a product is compared with the read limit, above with the arithmetic limit.
"""


def name_of(record: Record) -> str:
    """The name of a row: the format for halfbyte, the peer's name for another library."""
    return f"halfbyte {record['format']}" if record["peer"] == "halfbyte" else str(record["peer"])


def rates(record: Record, nbytes: float, seconds: float, limits: Record) -> Record:
    """`record` with time_us, gbps, gflops and, where the limit was measured, fraction."""
    m, n, k = record["m"], record["n"], record["k"]
    record |= {"time_us": seconds * 1e6, "gbps": nbytes / seconds / 1e9, "gflops": 2 * m * n * k / seconds / 1e9}
    peak = limits.get("gops" if record["kind"] == "int8" else "gflops") or 0.0
    share = (record["gbps"], limits["read_gbps"]) if m <= FEW_TOKENS else (record["gflops"], peak)
    if share[1]:
        record["fraction"] = share[0] / share[1]
    return record


def peers_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """Other libraries' results of the same shape, m and kind whose weights are within 5 % of
    `record`'s in bits.
    """
    same = ("m", "n", "k", "kind")
    return [
        r
        for r in records
        if r["record"] == "time"
        and r["peer"] != "halfbyte"
        and all(r[key] == record[key] for key in same)
        and abs(r["bits"] / record["bits"] - 1) <= SAME_BITS
    ]


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The records; those of halfbyte with `ratio` (its time over the best peer's) and `best_peer`,
    where there is a comparable peer.
    """
    out = []
    for r in records:
        peers = peers_of(r, records) if r["record"] == "time" and r["peer"] == "halfbyte" and "ratio" not in r else []
        if peers:
            best = min(peers, key=lambda other: float(other["time_us"]))
            r = {**r, "ratio": r["time_us"] / best["time_us"], "best_peer": best["peer"]}
        out.append(r)
    return out
