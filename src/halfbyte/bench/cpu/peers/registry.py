"""The peers by the names that `--peers` takes."""

from __future__ import annotations

from .base import Peer
from .ggml import GGML_PEERS
from .mlx import MLX_PEERS
from .onnxruntime import ONNXRUNTIME
from .openvino import OPENVINO
from .torch import TORCH


def all_peers() -> dict[str, Peer]:
    """Peers by name."""
    return {p.name: p for p in (*ONNXRUNTIME, *OPENVINO, *TORCH, *MLX_PEERS, *GGML_PEERS)}


def peers_named(words: list[str]) -> list[Peer]:
    """Peers for `--peers`: a name, or the beginning of several ("onnxruntime", "onnxruntime-4").
    KeyError lists the names.
    """
    known = all_peers()
    chosen: dict[str, Peer] = {}
    for word in words:
        found = {name: p for name, p in known.items() if name == word or name.startswith(word + "-")}
        if not found:
            raise KeyError(f"{word!r} is not a peer; known: {', '.join(known)}")
        chosen |= found
    return list(chosen.values())
