"""Stand-ins for the classes of vLLM that the plug-in's layers derive from or look at, so that the
layers can be tested where vLLM is not installed: on a machine with an NVIDIA GPU, and in
`make test`.

    with vllm_classes() as plugin:
        method = plugin.linear.HalfbyteLinearMethod(["q_proj"])

Where vLLM is installed its own classes are used. A stand-in has what the plug-in asks of its class
and nothing else; `tests/vllm/test_plugin.py` runs the same code inside vLLM's engine.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn


class LinearMethodBase:
    pass


class QKVParallelLinear(nn.Module):
    pass


class RowParallelLinear(nn.Module):
    pass


class VocabParallelEmbedding(nn.Module):
    pass


class FusedMoEMethodBase:
    def __init__(self, moe: Any) -> None:
        self.moe = moe


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"


def set_weight_attrs(weight: Any, attributes: dict[str, Any]) -> None:
    vars(weight).update(attributes)


NAMES: dict[str, tuple[Any, ...]] = {
    "model_executor.layers.linear": (LinearMethodBase, QKVParallelLinear, RowParallelLinear),
    "model_executor.layers.vocab_parallel_embedding": (VocabParallelEmbedding,),
    "model_executor.layers.fused_moe": (FusedMoEMethodBase,),
    "model_executor.layers.fused_moe.activation": (MoEActivation,),
    "model_executor.utils": (set_weight_attrs,),
}
"""Module of vLLM -> what the plug-in's layers import from it."""


@contextmanager
def vllm_classes() -> Iterator[SimpleNamespace]:
    """The plug-in's modules `linear` and `experts`, and the classes that its layers may have."""
    added: list[str] = []
    if not _installed():
        for name, members in NAMES.items():
            parts = f"vllm.{name}".split(".")
            for i in range(1, len(parts) + 1):
                path = ".".join(parts[:i])
                if path not in sys.modules:
                    sys.modules[path] = ModuleType(path)
                    added.append(path)
            for member in members:
                setattr(sys.modules[f"vllm.{name}"], member.__name__, member)
    try:
        linear, experts = (importlib.import_module(f"halfbyte.vllm.{name}") for name in ("linear", "experts"))
        yield SimpleNamespace(
            linear=linear,
            experts=experts,
            **{
                kind.__name__: getattr(sys.modules[f"vllm.{name}"], kind.__name__)
                for name, members in NAMES.items()
                for kind in members
            },
        )
    finally:
        if added:
            for path in (*added, "halfbyte.vllm.linear", "halfbyte.vllm.experts"):
                sys.modules.pop(path, None)


def _installed() -> bool:
    """Whether vLLM is there; the folder of its tests here has its name."""
    try:
        return importlib.util.find_spec("vllm.model_executor") is not None
    except ModuleNotFoundError:
        return False
