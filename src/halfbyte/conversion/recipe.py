"""Which weights of a dense checkpoint are quantized, and to what.

A rule is `regex=codec[:gN]` or `regex=keep`; the first whose regular expression is found in a
module's name decides. Weights that no rule matches get the target's own codec, except those that
are kept as they are: embeddings, the output head, routers, norms, and what is no matrix and no
stack of experts' matrices. A rule may name these too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..checkpoints import TensorInfo
from ..errors import FormatError, ShapeError
from ..formats import family_of, format_named, takes
from ..formats.ggml.types import GGML_BY_CODEC
from ..layouts import LAYOUTS
from ..layouts.quant_config.module_rules import check_rule
from ..layouts.quant_config.writer import EMBEDDINGS
from ..spec import FLOAT_SCALES, Format
from .mixes import MIXES, mix_named
from .targets import Goal, codecs_of, goal_named

KEPT_LAST = (*EMBEDDINGS, "lm_head", "output", "router", "gate", "ffn_gate_inp", "ffn_gate_inp_shexp", "shared_expert_gate")
"""Last segments of modules that are kept: embeddings, heads and routers are small and sensitive."""


def is_kept(module: str) -> bool:
    """Whether a module is an embedding, a head or a router. A router's matrix may be a part of it:
    Granite's is `router.layer`, Hunyuan's `gate.wg`.
    """
    *_, above, last = "", *module.split(".")
    return last in KEPT_LAST or above in ("router", "gate")


EXPERTS = re.compile(r"(^|[._])(experts|exps|switch_mlp)([.]|$)")
"""Modules whose stacks of matrices are weights of experts; other stacks, of convolutions, are kept.
"""
INPUTS_FIRST = ("fc1", "fc2")
"""Stacks of experts that are [e, k, n] in their files (Aria's), which no packed layout is: kept."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Of dense weights that are quantized."""


@dataclass(frozen=True)
class Rule:
    """A regular expression and what its modules become; goal None keeps them."""

    pattern: re.Pattern[str]
    goal: Goal | None
    text: str


@dataclass(frozen=True)
class Recipe:
    """What becomes of each weight.

    goal   for those without a rule
    rules  in order
    mix    name of llama.cpp's mix that decides for those without a rule, "" for none
    names  module -> a second name of it, to which rules may refer too
    """

    goal: Goal
    rules: tuple[Rule, ...] = ()
    mix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def rule(self, module: str) -> Rule | None:
        """The first rule for a module, None for none."""
        names = (module, self.names.get(module, module))
        return next((r for r in self.rules if any(r.pattern.search(n) for n in names)), None)

    def of(self, module: str, ndim: int) -> Goal | None:
        """The goal of a module's weight, None when it is kept."""
        if (rule := self.rule(module)) is not None:
            return rule.goal
        last = module.rpartition(".")[2]
        weight = (ndim == 2 and not self.goal.writer.stacks_only) or (
            ndim == 3 and EXPERTS.search(module) is not None and last not in INPUTS_FIRST
        )
        return self.goal if weight and not is_kept(module) and "norm" not in last else None

    def check(self, modules: Iterable[str]) -> None:
        """FormatError for a rule that matches none of the modules, which is a typing error."""
        names = list(modules)
        for rule in self.rules:
            if not any(rule.pattern.search(n) for n in names):
                raise FormatError(f"[quantize] rule {rule.text!r} matches no module; they are named like {', '.join(names[:3])}")


def recipe_of(to: str, rules: Sequence[str] = (), scale_dtype: str | None = None) -> Recipe:
    """The recipe for target `layout:codec[:gN]` and rules. FormatError or LayoutError when one is
    not spelled right.

    >>> recipe_of("mlx:affine4:g64", ["down_proj$=affine6", "layers\\\\.0\\\\.=keep"]).rules[0].goal.target.codec
    'affine6'
    """
    word, _, codec = to.partition(":")
    mix = mix_named(codec) if word.lower() == "gguf" else None
    try:
        goal = goal_named(f"gguf:{MIXES[mix].codec}" if mix else to, scale_dtype)
    except FormatError as error:
        if word.lower() != "gguf":
            raise
        raise FormatError(f"{error}; llama.cpp's mixes: {', '.join(MIXES)}") from None
    if goal.target.codec is None:
        words = codecs_of(goal.layout) or ("mxfp4", "nvfp4", "int4", "...")
        if not goal.writer.stacks_only:
            raise FormatError(f"[quantize] target {to!r} names no codec; {goal.layout} holds {', '.join(words)}")
        goal = goal_named(f"{to}:{words[0]}")
    out = []
    for text in rules:
        pattern, equals, codec = text.rpartition("=")
        if not equals or not pattern:
            raise FormatError(f"[quantize] rule {text!r}; a rule is spelled regex=codec[:gN] or regex=keep")
        check_rule(f"re:{pattern}", "rule")
        own = None if codec == "keep" else goal_named(f"{goal.layout}:{codec}", scale_dtype)
        out.append(Rule(re.compile(pattern), own, text))
    formats = [format_named(str(g.target.codec)) for g in (goal, *(r.goal for r in out if r.goal))]
    # Asymmetric rounding finds zero points of 0.
    params = goal.writer.checkpoint_params(goal.params, formats, lambda: all(f.zero == "none" for f in formats))
    goal = replace(goal, params=params)
    out = [replace(r, goal=r.goal and replace(r.goal, params=params)) for r in out]
    return Recipe(goal, tuple(out), mix or "")


def module_of(info: TensorInfo) -> str | None:
    """The module whose weight a tensor is; None for what is no weight of floats."""
    if info.quantized:
        return info.key
    weight = info.key.endswith(".weight") and info.dtype in DTYPES and len(info.shape) >= 2
    return info.key.removesuffix(".weight") if weight else None


def format_for(goal: Goal, dtype: str, shape: tuple[int, ...]) -> tuple[Format, str]:
    """(format of a weight of this dtype and shape, "") or, where its blocks do not fit the rows,
    (another, the reason).

    Raises ShapeError when there is no other either.
    """
    assert goal.target.codec is not None
    fmt = _format(goal, dtype)
    why = _refusal(fmt, shape, goal)
    if not why:
        return fmt, ""
    if goal.writer.container == "gguf" and goal.target.codec in GGML_BY_CODEC:
        # llama.cpp's own fallback for rows that are not whole super-blocks.
        wide = replace(goal, target=replace(goal.target, codec="q8_0", group_size=None))
        other = _format(wide, dtype)
        if not _refusal(other, shape, wide):
            return other, f"{fmt.name} does not fit rows of {shape[-1]}: {other.name} instead"
    raise ShapeError(why)


def _format(goal: Goal, dtype: str) -> Format:
    word, size, holds = str(goal.target.codec), goal.target.group_size, LAYOUTS[goal.layout].holds
    usual = format_named(word)
    if takes(usual, "scale_dtype"):
        own = goal.scale_dtype or (dtype if dtype in FLOAT_SCALES and dtype != "float32" else "float16")
        return format_named(word, size, scale_dtype=own)
    if usual.family in ("nvfp4", "ggml_fp4"):
        levels = holds.levels if holds else ("multiply",)
        # Weights are small: one level of E4M3 would lie among its subnormals. MLX's programs read
        # no other.
        return format_named(word, size, global_scale="multiply" if "multiply" in levels else levels[0])
    return format_named(word, size)


def _refusal(fmt: Format, shape: tuple[int, ...], goal: Goal) -> str:
    """Why rows of this length cannot be stored, "" when they can."""
    k = shape[-1]
    try:
        family_of(fmt).geometry(fmt, shape)
    except ShapeError as error:
        return str(error)
    if fmt.bits == 4 and k % 2 and fmt.element == "e2m1":
        return f"[quantize] {fmt} with rows of {k}; two codes share a byte, so k must be even"
    unfilled = goal.writer.unfilled(fmt, shape)
    return unfilled and f"[quantize] {fmt} with {unfilled}"
