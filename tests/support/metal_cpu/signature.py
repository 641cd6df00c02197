"""Kernels of an MSL source by name: their parameters, and the C entry through which the harness
calls each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KERNEL = re.compile(r"(?:\bkernel|\[\[\s*kernel\s*\]\])\s+void\s+(\w+)\s*\(")
_BUILT_IN = {
    "thread_position_in_grid": 0, "thread_position_in_threadgroup": 1, "threadgroup_position_in_grid": 2,
    "threads_per_threadgroup": 3, "threads_per_grid": 4, "threadgroups_per_grid": 5, "thread_index_in_threadgroup": 6,
    "thread_index_in_simdgroup": 7, "simdgroup_index_in_threadgroup": 8, "simdgroups_per_threadgroup": 9,
    "threads_per_simdgroup": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter: `space` is device, constant or built-in; `by` is `*`, `&` or nothing."""

    name: str
    type: str
    space: str
    by: str
    const: bool
    attribute: str


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters in order."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> list[Parameter]:
        """The parameters a caller binds, in order of their buffer index."""
        return [p for p in self.parameters if p.space != "built-in"]

    def entry(self) -> str:
        """A kernel that takes one array of addresses and calls this one."""
        arguments, at = [], 0
        for p in self.parameters:
            if p.space == "built-in":
                which = _BUILT_IN[p.attribute]
                one = [f"hb_built_in({which}, {axis})" for axis in range(int(p.type[4:] or 1))]
                arguments.append(one[0] if len(one) == 1 else f"{p.type}{{{', '.join(one)}}}")
                continue
            pointer = f"({'const ' if p.const and p.space == 'device' else ''}{p.space} {p.type}*)a[{at}]"
            arguments.append(f"*{pointer}" if p.by == "&" else pointer)
            at += 1
        return f"kernel void hb_call_{self.name}(device ulong* a) {{ {self.name}({', '.join(arguments)}); }}\n"


def _balanced(text: str, start: int) -> int:
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start - 1


def _split(text: str) -> list[str]:
    out, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "([<"
        depth -= c in ")]>"
        if c == "," and not depth:
            out.append(text[last:i])
            last = i + 1
    return [p for p in (*out, text[last:]) if p.strip()]


def _parameter(text: str) -> Parameter:
    attribute = re.search(r"\[\[\s*(\w+)(?:\((\d+)\))?\s*\]\]", text)
    if attribute is None:
        raise ValueError(f"kernel parameter {text.strip()!r} has no attribute")
    words = re.sub(r"\[\[.*?\]\]", "", text).replace("*", " * ").replace("&", " & ").split()
    name = words.pop()
    by = words.pop() if words[-1] in "*&" else ""
    const = "const" in words or "constant" in words
    space = next((w for w in words if w in ("device", "constant", "threadgroup")), "built-in")
    type_ = next(w for w in words if w not in ("const", "device", "constant", "threadgroup"))
    if (space == "built-in") != (attribute[1] in _BUILT_IN):
        raise ValueError(f"kernel parameter {text.strip()!r}: a buffer has an address space, a built-in value has none")
    return Parameter(name, type_, space, by, const, attribute[1])


def signatures(source: str) -> dict[str, Signature]:
    """Every kernel of a source. Raises ValueError for buffer indices that are not 0, 1, 2 ... in
    order.
    """
    found = {}
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    for match in _KERNEL.finditer(text):
        inside = text[match.end() : _balanced(text, match.end())]
        parameters = tuple(_parameter(p) for p in _split(inside))
        indices = [int(i) for i in re.findall(r"\[\[\s*buffer\((\d+)\)\s*\]\]", inside)]
        if indices != list(range(len(indices))):
            raise ValueError(f"kernel {match[1]} has buffer indices {indices}; 0, 1, 2 ... in order are wanted")
        found[match[1]] = Signature(match[1], parameters)
    return found
