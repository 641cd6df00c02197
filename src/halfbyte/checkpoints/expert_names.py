"""The names that checkpoints give to the projections of a mixture of experts.

    model.layers.0.mlp.experts.3.gate_proj.weight      one expert of transformers' older models
    model.layers.0.block_sparse_moe.experts.3.w1       one expert of Mixtral
    model.layers.0.mlp.experts.gate_up_proj_bias       all experts in one tensor, transformers
    model.layers.0.mlp.switch_mlp.up_proj              the same, MLX
    model.layers.0.experts.switch_glu.up_proj          the same, MLX's Gemma 4
    backbone.layers.0.mixer.switch_mlp.fc1             the same without gate, MLX
    model.layers.0.mlp.experts.w13_weight              the same, vLLM

`parse` reads all of them. In `w13` the rows of gate come before those of up, whatever the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROJECTIONS = {
    "gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj", "gate_up_proj": "gate_up_proj",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "w13": "gate_up_proj",
}  # fmt: skip
"""Word in a name -> the projection, by the name that transformers has for it."""
_UNGATED = {"fc1": "up_proj", "fc2": "down_proj"}
"""The same, of MLX's stacks without gate, `switch_mlp`. Aria's `experts.fc1` is gate and up, inputs
first.
"""
_NAME = re.compile(
    r"(?P<parent>.+)\.(?P<stack>experts\.switch_glu|experts|switch_mlp)"
    rf"(?:\.(?P<expert>\d+)\.(?P<one>{'|'.join(PROJECTIONS)})|\.(?P<all>\w+?_proj|w13|w2|fc1|fc2))"
    r"(?P<leaf>\.weight|\.bias|_weight|_bias)?"
)


@dataclass(frozen=True)
class ExpertName:
    """What the name of a tensor or of a packed module says.

    module      module of the experts as the checkpoint names it (`….switch_mlp`)
    path        the same under transformers' name (`….experts`)
    word        the projection as the checkpoint names it
    projection  "gate_proj", "up_proj", "down_proj" or "gate_up_proj"
    expert      None for all experts in one tensor
    leaf        "weight", "bias", or "" for a name without either
    """

    module: str
    path: str
    word: str
    projection: str
    expert: int | None
    leaf: str

    def gate_up_alternate(self, model: bool) -> bool:
        """Whether rows of gate and up alternate in this `gate_up_proj`, in a model in whose own
        parameter they do (`model`) or do not.
        """
        return model and self.word != "w13"


def parse(name: str) -> ExpertName | None:
    """The parts of `name`; None when it is not a projection of experts.

    >>> parse("layers.0.block_sparse_moe.experts.3.w1.weight").projection
    'gate_proj'
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    word, leaf = match["one"] or match["all"], match["leaf"] or ""
    words = PROJECTIONS | _UNGATED if match["stack"] == "switch_mlp" else PROJECTIONS
    projection = words.get(word)
    if projection is None or (match["expert"] and leaf.startswith("_")):
        return None
    expert = int(match["expert"]) if match["expert"] else None
    parent = match["parent"]
    return ExpertName(f"{parent}.{match['stack']}", f"{parent}.experts", word, projection, expert, leaf[1:])


def words_for(projection: str) -> tuple[str, ...]:
    """The words for a projection, transformers' own first.

    >>> words_for("down_proj")
    ('down_proj', 'w2')
    """
    return tuple(word for word, meant in PROJECTIONS.items() if meant == projection)
