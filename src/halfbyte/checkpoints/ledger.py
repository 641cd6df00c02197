"""The ledger of a checkpoint: every tensor and every key of its quantization config, and who
accounts for it.

| subject | status | meaning |
|---|---|---|
| tensor | claimed | a layout reads it as part of a packed weight |
| tensor | dense | an array of floats that nothing suggests is more than that |
| tensor | auxiliary | known to change no weight: scales of activations, rotary frequencies |
| tensor | unknown | code-like without a layout, or beside a weight without being part of it |
| tensor | missing | a layout, or the model's config.json, needs it |
| tensor | shape | its shape contradicts config.json |
| tensor | unreadable | part of a packed weight that its layout refuses; reading it raises the reason |
| key | consumed, harmless, unknown | of the quantization config: read; known to change no weight; neither |

Unknown, missing and shape are problems: `Checkpoint.check(op)` refuses them, and every command that
uses the weights calls it. `open(..., allow_unknown=patterns)` lets single ones through by name.
Layouts and config readers state what they consume as `Claim` and `KeyUse` (`layouts/claims.py`, a
lower floor).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import CheckpointError
from ..layouts.claims import AUXILIARY, CONSUMED, HARMLESS, PARAMETERS, UNKNOWN, Claim, KeyUse
from .architecture import Requirement

CLAIMED, DENSE, MISSING, SHAPE, UNREADABLE = "claimed", "dense", "missing", "shape", "unreadable"
PROBLEMS = (MISSING, UNKNOWN, SHAPE)
"""Statuses that commands refuse, in the order in which they are reported."""
SHOWN = 6
"""Problems that an error message lists."""

ACTIVATION_SCALES: dict[str, str] = {
    "input_scale": "scale of the activations",
    "input_scale_2": "scale of the activations' scales",
    "input_global_scale": "scale of the activations",
    "input_zero_point": "zero point of the activations",
    "activation_scale": "scale of the activations",
}
"""Tensors that quantize the activations of a packed module; a dense module has no use for them."""
AUXILIARY_NAMES: dict[str, str] = ACTIVATION_SCALES | {
    "output_scale": "scale of the activations", "output_zero_point": "zero point of the activations",
    "k_zero_point": "zero point of the key cache", "v_zero_point": "zero point of the value cache",
    "k_scale": "scale of the key cache", "v_scale": "scale of the value cache", "q_scale": "scale of the queries",
    "kv_scale": "scale of the key-value cache",
    "pre_quant_scale": "scale of the inputs: load_model multiplies by it, other commands refuse it or keep it",
    "inv_freq": "rotary frequencies, which the configuration determines", "weight_format": "a label of the writer",
    "e_score_correction_bias": "bias of the router",
}  # fmt: skip
"""Last segment of a tensor's name -> what it is, for float tensors that belong to no weight's
values.
"""
INTEGER_BUFFERS = (
    "position_ids",
    "num_batches_tracked",
    "token_type_ids",
    "relative_position_index",
    "cache_position",
    "tid2eid",
    "layer_multipliers",
    "ngram_heads_offsets",
    "ngram_heads_vocab_sizes",
)
"""Last segments of integer tensors that are indices of the model's own (`tid2eid`: the experts of a
token; the last three make a row of a table of several tokens); only of 32- or 64-bit integers.
"""
OWN_PARAMETERS = ("logit_scale",)
"""Last segments of parameters of a model's own beside a matrix: Dory's head multiplies each logit."""
CODE_DTYPES = frozenset({
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float8_e4m3fnuz", "float8_e5m2fnuz",
})  # fmt: skip
"""Stored dtypes of codes and scales; a dense weight has none of them."""
SCALE_NAMES = re.compile(
    r"(weight_)?(scale|scales|scale_inv|scale_2|global_scale|absmax|zeros|qzeros|zero_point|g_idx|shape|lut|codebooks?|outliers?)"
    r"|SCB|scale_weight|lora_[AaBb]|svdquant_lora_[ab]"
)
"""Last segments that, beside a matrix `weight`, say that its values are not those of the matrix
alone.
"""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    subject  "tensor" or "key" (of the quantization config)
    name     full name of the tensor, dotted path of the key, or the name of what is missing
    status   see the table above
    owner    the key of the weight that a claimed or auxiliary tensor belongs to, "" for others
    part     what a claimed tensor is to its layout: "codes", "scales", ...
    why      a clause
    """

    subject: str
    name: str
    status: str
    owner: str = ""
    part: str = ""
    why: str = ""

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "record": "ledger",
            "subject": self.subject,
            "name": self.name,
            "status": self.status,
            "owner": self.owner,
            "part": self.part,
            "why": self.why,
        }

    def __str__(self) -> str:
        kind = "config key " if self.subject == "key" else ""
        return f"{kind}{self.name}: {self.status}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Ledger:
    """Every entry, and whether the modules were compared with the model's configuration.

    modules  "" when they were, else why not
    """

    entries: tuple[Entry, ...]
    modules: str = ""

    @property
    def problems(self) -> tuple[Entry, ...]:
        """Entries that commands refuse: missing, then unknown, then of another shape."""
        return tuple(sorted((e for e in self.entries if e.status in PROBLEMS), key=lambda e: PROBLEMS.index(e.status)))

    def counts(self, subject: str) -> dict[str, int]:
        """Entries of a subject by status."""
        return dict(Counter(e.status for e in self.entries if e.subject == subject))

    def split(self, allowed: Sequence[str]) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """(problems that remain, problems that one of the patterns names). CheckpointError for a
        pattern that names none.
        """
        problems = self.problems
        for pattern in allowed:
            if not any(fnmatchcase(e.name, pattern) for e in problems):
                raise CheckpointError(
                    f"[open] allow-unknown {pattern!r} matches nothing that is unknown or missing; give a name or a pattern with "
                    "* from the list of halfbyte inspect"
                )
        let = tuple(e for e in problems if any(fnmatchcase(e.name, p) for p in allowed))
        return tuple(e for e in problems if e not in let), let

    def require(self, op: str, path: object, allowed: Sequence[str] = ()) -> None:
        """CheckpointError naming what is not accounted for; a warning that names what `allowed`
        lets through.
        """
        problems, let = self.split(allowed)
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise CheckpointError(
                f"[{op}] {path}: not everything in it is accounted for: {'; '.join(map(str, problems[:SHOWN]))}{more}. Values "
                "would be wrong or lost. halfbyte inspect lists all; a name given to --allow-unknown (allow_unknown=) is let "
                "through"
            )
        if let:
            more = f" and {len(let) - 20} more" if len(let) > 20 else ""
            warnings.warn(f"[{op}] let through unaccounted for: {', '.join(e.name for e in let[:20])}{more}", stacklevel=3)


def code_like(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """True for a stored tensor that is no array of floats: codes, or scales of codes."""
    last = name.rpartition(".")[2]
    if dtype not in CODE_DTYPES or not shape:
        return False
    if dtype in ("int32", "int64") and last in INTEGER_BUFFERS:
        return False
    # The causal mask of GPT-2's attention: [1, 1, n, n].
    return not (name.endswith("attn.bias") and dtype == "uint8" and len(shape) == 4)


def sort_tensor(name: str, dtype: str, shape: Sequence[int], owner: str, tensors: Mapping[str, Sequence[int]]) -> Entry:
    """The entry of a tensor that no layout claims.

    owner    the packed weight whose path its name continues, "" for none
    tensors  shapes of all tensors by name
    """
    path, _, last = name.rpartition(".")
    if code_like(name, dtype, shape):
        return Entry("tensor", name, UNKNOWN, owner, why=f"{dtype} {list(shape)}, which no layout reads")
    if last in AUXILIARY_NAMES:
        return Entry("tensor", name, AUXILIARY, owner, why=AUXILIARY_NAMES[last])
    if owner:
        if name in (f"{owner}.bias", f"{owner}_bias"):
            return Entry("tensor", name, DENSE, owner)
        return Entry("tensor", name, UNKNOWN, owner, why=f"beside the packed weight {owner}, whose layout does not read it")
    matrix = _matrix_beside(name, path, last, tensors)
    if matrix:
        return Entry("tensor", name, UNKNOWN, why=f"beside {matrix}, whose values may depend on it")
    return Entry("tensor", name, DENSE)


def _matrix_beside(name: str, path: str, last: str, tensors: Mapping[str, Sequence[int]]) -> str:
    """The matrix that a tensor belongs to: it lies beside or below the `weight` of a module and is
    no bias, or its name is that of a scale; "" for none.
    """
    parts = [] if last in (*INTEGER_BUFFERS, *OWN_PARAMETERS) else name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        weight = ".".join([*parts[:i], "weight"])
        if weight != name and len(tensors.get(weight, ())) >= 2 and not (parts[i:] == parts[-1:] and parts[-1].endswith("bias")):
            return weight
    found = ""
    if SCALE_NAMES.fullmatch(last):
        found = f"{path}.weight"
    elif last == "weight" and re.fullmatch(r"lora_[AaBb]|.*_(input|output)", path.rpartition(".")[2]):
        found = re.sub(r"(\.lora_[AaBb]|_(input|output))$", ".weight", path)
    elif match := re.fullmatch(r"(.+?)(?:_scales?|_scale_inv|_blocks)", name):
        found = match[1] if match[1] in tensors else f"{match[1]}.weight"
    return found if found and found != name and len(tensors.get(found, ())) >= 2 else ""


def key_entries(uses: Iterable[KeyUse]) -> list[Entry]:
    """Entries of the keys of a quantization config."""
    out = []
    for use in uses:
        why = use.why or (f"{use.value!r:.60}: no reader knows it" if use.use == UNKNOWN else "")
        out.append(Entry("key", use.path, use.use, why=why))
    return out


def _kind(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"\d+", "*", name)


def requirement_entries(
    requirements: Sequence[Requirement],
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, tuple[int | None, int | None]],
    by: str = "config.json",
) -> list[Entry]:
    """Missing tensors, and tensors of another shape than the configuration gives.

    shapes    key -> shape of every weight, packed or dense, names without `.weight`
    expected  module -> (n, k) as the configuration implies it
    by        what the configuration is, for the clause
    """
    out: list[Entry] = []
    kinds = {_kind(name) for name in shapes}
    paths = {""} | {".".join(parts[:i]) for name in shapes for parts in [name.split(".")] for i in range(1, len(parts))}
    for need in requirements:
        choice = next((names for names in need.names if all(n in shapes for n in names)), None)
        if choice is None:
            # The name to report: of the alternative that is there in part, else whose path is in
            # use, else the usual one.
            def rank(names: tuple[str, ...]) -> tuple[float, int, int]:
                share = sum(n in shapes for n in names) / len(names)
                return share, int(names[0].rpartition(".")[0] in paths), int(_kind(names[0]) in kinds)

            partly = max(need.names, key=rank)
            absent = next(n for n in partly if n not in shapes)
            others = [names[0] for names in need.names if len(names) == 1 and names != partly][:2] if by == "the header" else []
            out.append(Entry("tensor", absent, MISSING, why=" or ".join([f"{by} requires it", *others])))
            continue
        for name in choice:
            shape = tuple(shapes[name])
            if need.shape is not None and choice == need.names[0] and shape != need.shape:
                out.append(Entry("tensor", name, SHAPE, why=f"{list(shape)}; {by} makes it {list(need.shape)}"))
            n, k = expected.get(name, (None, None))
            vector = len(shape) < 2 and need.shape is None and (n or k) and not name.endswith((".bias", ".sinks"))
            # One matrix with an axis too many; stacks of experts have three.
            lone = len(shape) == 3 and shape[0] == 1 and (n or k) and not {"experts", "switch_mlp"} & set(name.split("."))
            if vector or lone or (len(shape) == 2 and ((n and shape[0] != n) or (k and shape[1] != k))):
                out.append(Entry("tensor", name, SHAPE, why=f"{list(shape)}; {by} makes it [{n or '*'}, {k or '*'}]"))
    return list(dict.fromkeys(out))


__all__ = [
    "AUXILIARY", "CLAIMED", "CONSUMED", "DENSE", "HARMLESS", "MISSING", "PARAMETERS", "PROBLEMS", "SHAPE", "UNKNOWN",
    "UNREADABLE", "Claim", "Entry", "KeyUse", "Ledger", "code_like", "key_entries", "requirement_entries", "sort_tensor",
]  # fmt: skip
