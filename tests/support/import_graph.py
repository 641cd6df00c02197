"""The imports of a package, file by file, and the rules they are held to.

`Package(root)` parses every Python file below `root` (the package's own folder). Imports inside
functions and under `TYPE_CHECKING` count as imports. Compiled extensions are modules without
imports of their own.

Every rule returns sentences, one a violation; an empty list means the rule holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FRONT = "__init__"
"""Name of the module that is the package's own `__init__.py`."""


@dataclass(frozen=True)
class Import:
    """One imported name.

    name        absolute dotted name, `package.module` or `package.module.attribute`
    line        line of the statement
    at_import   True when the statement runs as the module is imported: outside functions and
                `TYPE_CHECKING`
    """

    name: str
    line: int
    at_import: bool


class Package:
    """Modules of a package by dotted name without the package's own ("formats.mx"), and what each
    imports.
    """

    def __init__(self, root: Path, extensions: frozenset[str] = frozenset({"_native"})) -> None:
        self.root = root
        self.name = root.name
        self.extensions = extensions
        self.files = {self._module_name(path): path for path in sorted(root.rglob("*.py"))}
        self._facts: dict[str, tuple[list[Import], list[str]]] = {}

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _read(self, module: str) -> tuple[list[Import], list[str]]:
        """Imports and private uses of a module, parsed once. The tree is not kept: all of them
        would be millions of objects.
        """
        if module not in self._facts:
            nodes = list(ast.walk(ast.parse(self.files[module].read_text(encoding="utf-8"))))
            self._facts[module] = list(self._imports(module, nodes)), self._private_imports(module, nodes)
        return self._facts[module]

    def imports(self, module: str) -> list[Import]:
        """Every import of a module, those inside functions included."""
        return self._read(module)[0]

    def private_imports(self, module: str) -> list[str]:
        """Uses of another module's underscore names in a module: `from .a import _b`, or `a._b` of
        an imported module a.
        """
        return self._read(module)[1]

    def _imports(self, module: str, nodes: list[ast.AST]) -> Iterator[Import]:
        package = [self.name, *self.files[module].relative_to(self.root).parent.parts]
        late: set[ast.AST] = set()
        for node in nodes:
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if node not in late and (guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
                late.update(ast.walk(node))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, node not in late)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                stem = ".".join(x for x in (base, node.module) if x)
                for alias in node.names:
                    yield Import(f"{stem}.{alias.name}", node.lineno, node not in late)

    def module_of(self, name: str) -> str | None:
        """The module that a dotted name refers to, `FRONT` for the package itself, None for another
        package.
        """
        parts = name.split(".")
        if parts[0] != self.name:
            return None
        for end in range(len(parts), 1, -1):
            module = ".".join(parts[1:end])
            if module in self.files or module in self.extensions:
                return module
        return FRONT

    @cached_property
    def edges(self) -> dict[str, dict[str, int]]:
        """module -> {imported module: first line that imports it}, itself left out."""
        out: dict[str, dict[str, int]] = {}
        for module in self.files:
            targets = out.setdefault(module, {})
            for item in self.imports(module):
                target = self.module_of(item.name)
                if target is not None and target != module:
                    targets.setdefault(target, item.line)
        return out

    def cycles(self) -> list[list[str]]:
        """One shortest cycle [a, b, ..., a] of each set of modules that reach each other."""
        return [self._shortest_cycle(component) for component in self._components()]

    def _components(self) -> list[set[str]]:
        """Strongly connected sets of more than one module, by reachability in both directions."""
        reach = {module: self._reachable(module) for module in self.files}
        out: list[set[str]] = []
        for module in self.files:
            if any(module in component for component in out):
                continue
            component = {other for other in reach[module] if module in reach.get(other, ())}
            if component - {module}:
                out.append(component | {module})
        return out

    def _reachable(self, start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            for target in self.edges.get(pending.pop(), {}):
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        return seen

    def _shortest_cycle(self, component: set[str]) -> list[str]:
        best: list[str] = []
        for start in sorted(component):
            paths, seen = [[start]], {start}
            while paths:
                path = paths.pop(0)
                targets = [t for t in self.edges[path[-1]] if t in component]
                if start in targets:
                    if not best or len(path) + 1 < len(best):
                        best = [*path, start]
                    break
                for target in targets:
                    if target not in seen:
                        seen.add(target)
                        paths.append([*path, target])
        return best

    def _private_imports(self, module: str, nodes: list[ast.AST]) -> list[str]:
        out = []
        package = [self.name, *self.files[module].relative_to(self.root).parent.parts]
        bound: dict[str, str] = {}
        for node in nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(x for x in (base, node.module) if x)
            for alias in node.names:
                name = f"{stem}.{alias.name}"
                target = self.module_of(name)
                if target is None or target in self.extensions:
                    continue
                path = name.removeprefix(f"{self.name}.")
                if any(map(_is_private, path.split("."))):
                    out.append(f"{module}:{node.lineno} imports {path}")
                elif path == target:
                    bound[alias.asname or alias.name] = target
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_private(node.attr):
                target = bound.get(node.value.id)
                if target is not None:
                    out.append(f"{module}:{node.lineno} uses {target}.{node.attr}")
        return out

    def backend_internals(self, module: str, backends: Iterable[str]) -> list[str]:
        """Imports of modules below one of `backends` by a module that is not itself below
        `backends`.
        """
        if module.split(".")[0] == "backends":
            return []
        inside = tuple(f"{backend}." for backend in backends)
        return [f"{module}:{line} imports {target}" for target, line in self.edges[module].items() if target.startswith(inside)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
