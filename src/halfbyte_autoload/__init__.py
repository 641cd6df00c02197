"""Lets transformers read halfbyte's own layout in programs that do not import halfbyte.

`import torch` calls `install` through torch's extension point (the entry points `torch.backends`).
When transformers then imports its table of quantization methods, "halfbyte" is entered in it, so
that `from_pretrained` reads a folder that `save_pretrained` of a packed model wrote. halfbyte
itself is imported when such a folder is read. A package of its own beside it, because
importing `halfbyte` costs more than a program that never meets such a folder should pay.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TABLE = "transformers.quantizers.auto"
METHOD = "halfbyte"


class Late:
    """Takes the place of halfbyte's classes in transformers' tables until one of them is used."""

    def __init__(self, table: str) -> None:
        self.table = table

    def real(self) -> Any:
        """The class that halfbyte.transformers registers."""
        importlib.import_module("halfbyte.transformers")  # which enters them in place of this
        return getattr(sys.modules[TABLE], self.table)[METHOD]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.real()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)


TABLES = ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING")


def enter(auto: ModuleType) -> None:
    """Enters the method in transformers' tables; nothing where they are not as expected."""
    tables = [getattr(auto, name, None) for name in TABLES]
    if all(isinstance(table, dict) and METHOD not in table for table in tables):
        for name, table in zip(TABLES, tables, strict=True):
            table[METHOD] = Late(name)  # type: ignore[index]


class Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' table as Python would, and has `enter` run after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                enter(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Called by `import torch`."""
    if TABLE in sys.modules:
        enter(sys.modules[TABLE])
    elif not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
