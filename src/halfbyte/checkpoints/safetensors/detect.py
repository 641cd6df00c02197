"""Which layout a module's tensors follow and with which numbers, from the quantization config and
from the tensors themselves.

The config names a producer and each module's parameters; the tensors, by suffix, dtype and shape,
say which layouts are possible. Where they agree that is the reading. Where they do not, the tensors
are right if they leave one reading only, and a finding reports it; if they leave several (4 bits in
groups of 32 and 2 bits in groups of 64 have the same shapes) the module is refused with a sentence
that lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, HalfbyteError, LayoutError, UnsupportedError
from ...layouts import Described, Layout
from ...layouts.quant_config.reader import ConfigReader
from ..findings import Finding
from .expected_shapes import expected_shape
from .modules import Kind, kind_of, own_suffixes
from .shards import Shards

BITS = (1, 2, 3, 4, 5, 6, 7, 8)
GROUPS = (16, 32, 64, 128, 256, 512, 1024, -1)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
"""What is tried where a config does not fit."""
DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""What code that trusts a value raises when a file holds something else instead."""


@dataclass(frozen=True)
class Reading:
    """How one module is read: its layout, the parameters it is given, what the headers then say,
    and a finding about it, if any.
    """

    layout: Layout
    params: Mapping[str, Any]
    described: Described
    odd: Finding | None = None


class Detector:
    """Chooses a `Reading` for each module.

    scheme    the quantization config, None when there is none
    config    the model's config.json, for sizes that a file leaves open
    extra     parameters from the metadata of a single file
    layouts   the layouts that modules may follow
    """

    def __init__(
        self,
        shards: Shards,
        scheme: ConfigReader | None,
        config: Mapping[str, Any],
        extra: Mapping[str, Any],
        layouts: Sequence[Layout],
    ) -> None:
        self.shards = shards
        self.scheme = scheme
        self.config = config
        self.extra = extra
        self.layouts = layouts
        self._meant = () if scheme is None else scheme.order(layout.name for layout in layouts)
        self._kinds: dict[tuple[tuple[str, Any], ...], Kind] = {}
        self._fits: dict[Any, list[tuple[Mapping[str, Any], Described]]] = {}

    def kind(self, tensors: Mapping[str, str]) -> Kind:
        """What a module with these tensors, by suffix, can be."""
        # A tensor without a known suffix belongs to no layout, and its header may be one that is
        # not read.
        lone = tuple(tensors) == ("",)
        headers = {} if lone else {suffix: self.shards.header(tensor) for suffix, tensor in tensors.items()}
        signature = tuple((suffix, header.dtype) for suffix, header in headers.items())
        if signature not in self._kinds:
            self._kinds[signature] = kind_of(self.layouts, headers, self._meant)
        return self._kinds[signature]

    def parameters(self, module: str) -> dict[str, Any]:
        """What `module`'s layout is given. A module that the config leaves dense but is packed gets
        the parameters of all others.
        """
        params = dict(self.extra)
        if self.scheme is not None:
            own = self.scheme.parameters(module)
            params.update(own if own is not None else self.scheme.common())
        n, k = expected_shape(self.config, module)
        if n and k:
            params.setdefault("shape", [n, k])
        return params

    def read(self, module: str, tensors: Mapping[str, str]) -> Reading:
        """The reading of `module`. CheckpointError naming its file and tensors when there is none,
        or more than one.
        """
        meant, others, *_ = self.kind(tensors)
        params = self.parameters(module)
        if self._meant and not meant:
            # Not all of its tensors are there; its own complaint says which.
            meant = tuple(layout for layout in self.layouts if layout.name == self._meant[0])
        readings, problem = self._try(meant or others, params, module, tensors)
        if self.scheme is not None and not readings:
            # Another producer's numbers may share a name with this one's and not its meaning:
            # without them, then.
            readings = self._try(others, params, module, tensors)[0] or self._try(others, self.extra, module, tensors)[0]
            if readings:
                text = f"the config says {self.scheme.method}, its tensors are {readings[0].layout.name}; read as that"
                odd = Finding("warning", "layout-disagrees", module, text)
                readings = [Reading(r.layout, r.params, r.described, odd) for r in readings]
        if not readings:
            return self._infer(meant or others, params, module, tensors, problem)
        named = self.scheme is not None and readings[0].layout.name == self.scheme.layouts[0]
        if not named and any(r.described != readings[0].described for r in readings):
            names = ", ".join(f"{r.layout.name} ({r.described.format}, {r.described.shape})" for r in readings)
            raise self._refusal(tensors, f"{module} can be read as {names}; say which with config={{'quant_method': ...}}")
        return readings[0]

    def _try(
        self, layouts: Sequence[Layout], params: Mapping[str, Any], module: str, tensors: Mapping[str, str]
    ) -> tuple[list[Reading], HalfbyteError | None]:
        """Readings that fit, and the problem of the layout that has a place for most of the
        tensors.
        """
        readings: list[Reading] = []
        problems: list[tuple[int, HalfbyteError]] = []
        for layout in layouts:
            try:
                readings.append(Reading(layout, params, self._describe(layout, params, module, tensors)))
            except HalfbyteError as error:
                problems.append((len(layout.claims(own_suffixes(layout, tensors))), error))
        return readings, max(problems, key=lambda p: p[0])[1] if problems else None

    def _describe(self, layout: Layout, params: Mapping[str, Any], module: str, tensors: Mapping[str, str]) -> Described:
        return self._described(layout, self._headers(layout, tensors), params, module)

    def _headers(self, layout: Layout, tensors: Mapping[str, str]) -> dict[str, Any]:
        own = own_suffixes(layout, tensors)
        return {s: self.shards.array(own[s]) if s in layout.peek else self.shards.header(own[s]) for s in layout.claims(own)}

    def _described(self, layout: Layout, headers: dict[str, Any], params: Mapping[str, Any], module: str) -> Described:
        try:
            return layout.describe(headers, params, module)
        except HalfbyteError:
            raise
        except DAMAGE as error:
            raise LayoutError(
                f"[{layout.name}] {module}: its tensors or its config are damaged ({type(error).__name__}: {error})"
            ) from error

    def _infer(
        self,
        layouts: Sequence[Layout],
        params: Mapping[str, Any],
        module: str,
        tensors: Mapping[str, str],
        problem: HalfbyteError | None,
    ) -> Reading:
        """The one reading with other numbers that fits the shapes and the model's sizes; else
        `problem` is raised, naming the file.
        """
        assert problem is not None  # nothing fitted
        if isinstance(problem, UnsupportedError):
            raise self._refusal(tensors, str(problem), type(problem)) from problem
        k = expected_shape(self.config, module)[1]
        found = [(layout, p, d) for layout in layouts for p, d in self._numbers(layout, params, module, tensors)]
        right = [f for f in found if k is not None and f[2].shape[-1] == k]
        if not found:
            raise self._refusal(tensors, str(problem), type(problem)) from problem
        if len(right) != 1:
            listed = ", ".join(f"{d.format} (k = {d.shape[-1]})" for _, _, d in found[:6])
            why = "which one, nothing in the checkpoint says" if k is None else f"the model's config makes k {k}"
            raise self._refusal(
                tensors, f"{problem} Shapes allow {listed}; {why}. Pass config= with bits and group_size"
            ) from problem
        layout, fitting, described = right[0]
        reason = "the config's numbers do not fit" if self.scheme is not None else "no config gives its numbers"
        text = f"{reason}; its shapes and k = {k} leave {described.format} only, which it is read as"
        severity = "warning" if self.scheme is not None else "note"
        return Reading(layout, fitting, described, Finding(severity, "numbers-inferred", module, text))

    def _numbers(
        self, layout: Layout, params: Mapping[str, Any], module: str, tensors: Mapping[str, str]
    ) -> list[tuple[Mapping[str, Any], Described]]:
        """Every setting of bits, group size and mode with which the layout accepts the tensors, one
        for each distinct outcome.
        """
        own = own_suffixes(layout, tensors)
        signature = (
            layout.name,
            tuple((s, self.shards.header(t)) for s, t in own.items()),
            repr(sorted(params.items(), key=str)),
        )
        if signature not in self._fits:
            outcomes: dict[Any, tuple[Mapping[str, Any], Described]] = {}
            try:
                headers = self._headers(layout, tensors)
            except HalfbyteError:
                return []
            for changed in _settings(params):
                try:
                    d = self._described(layout, headers, changed, module)
                except HalfbyteError:
                    continue
                outcomes.setdefault((d.format.name, d.format.groups(d.shape[-1]), d.shape), (changed, d))
            self._fits[signature] = list(outcomes.values())
        return self._fits[signature]

    def _refusal(self, tensors: Mapping[str, str], text: str, kind: type[HalfbyteError] = CheckpointError) -> HalfbyteError:
        shards = dict.fromkeys(self.shards.path_of(t) for t in tensors.values())
        kind = UnsupportedError if issubclass(kind, UnsupportedError) else CheckpointError
        return kind(f"[open] {', '.join(map(str, shards))}: {text}")


def _settings(params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    modes = MODES if "mode" not in params else (params["mode"],)
    for mode, bits, group in itertools.product(modes, BITS, GROUPS):
        yield {**params, "mode": mode, "bits": bits, "num_bits": bits, "group_size": group}
