"""HRM-Text: two stacks of layers that run several times each token, the low one more often.

    CYCLES["hrm_text"]      blk.0 ... of the low stack, then the high stack's

A file counts a slot of the cache for each run of a layer (`block_count`), and has the tensors of
the layers once: first those of the low stack, then those of the high one. So the module of a block
follows from the number of layers in a stack, which is a key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .architecture import ATTENTION, MLP, PARAMETER, Architecture, optional
from .keys import Keys

_LAYER = {stem: path for stem, path in (ATTENTION | MLP).items() if not stem.endswith("norm")} | {
    "attn_gate": "self_attn.gate_proj"
}
_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "hrm.z_l_init": f"model{PARAMETER}z_L_init"}


def cycles_of(keys: Keys) -> tuple[int, int, int]:
    """(layers of a stack, high cycles, low cycles in each) of a file, which make its `block_count`."""
    layers, high, low = (keys.size(f"hrm.{name}") for name in ("layers_per_stack", "h_cycles", "l_cycles"))
    if keys.layers != layers * high * (low + 1):
        raise keys.error(
            f"'{keys.arch}.block_count' is {keys.layers}; {high} high cycles of {low} low ones and {layers} layers a stack "
            f"make {layers * high * (low + 1)}"
        )
    return layers, high, low


def _hrm_text(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Norms have no weights. Instructions are read causally, as a text without token types is."""
    layers, high, low = cycles_of(keys)
    if config["num_attention_heads"] != config["num_key_value_heads"]:
        raise keys.refuse("whose keys have fewer heads than queries")
    return {"num_layers_per_stack": layers, "H_cycles": high, "L_cycles": low}


_HRM_TEXT = Architecture(
    "hrm_text",
    {},
    top=_TOP,
    repeated=True,
    fields=(
        optional("embedding_scale", "embedding_scale", "float", 1.0),
        optional("hrm.prefix_lm", "prefix_lm", "bool", False),
    ),
    extra=_hrm_text,
)


def hrm_text(layers: int) -> Architecture:
    """The table of a model of so many layers a stack."""
    blocks = {
        f"blk.{stack * layers + i}.{stem}": f"model.{module}.layers.{i}.{path}"
        for stack, module in enumerate(("L_module", "H_module"))
        for i in range(layers)
        for stem, path in _LAYER.items()
    }
    return replace(_HRM_TEXT, top=_TOP | blocks)


CYCLES: dict[str, Architecture] = {"hrm_text": _HRM_TEXT}
"""GGUF architectures of such models; `architectures.architecture_named` has a file's blocks."""
