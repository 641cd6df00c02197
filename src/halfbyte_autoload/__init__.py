"""Enters halfbyte where other libraries look for plug-ins, in programs that do not import halfbyte.

    transformers          `from_pretrained` reads a folder that `save_pretrained` of a packed model wrote
    lm-evaluation-harness `lm_eval run --model halfbyte --model_args path=model.gguf` runs it

`import torch` calls `install` through torch's extension point (the entry points `torch.backends`).
When one of these libraries then imports its table (of quantization methods, of models), "halfbyte"
is entered in it. halfbyte itself is imported when the entry is used. A package of its own beside
it, because importing `halfbyte` costs more than a program that never uses an entry should pay.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
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


def enter_method(auto: ModuleType) -> None:
    """Enters the method in transformers' tables; nothing where they are not as expected."""
    tables = [getattr(auto, name, None) for name in TABLES]
    if all(isinstance(table, dict) and METHOD not in table for table in tables):
        for name, table in zip(TABLES, tables, strict=True):
            table[METHOD] = Late(name)  # type: ignore[index]


HARNESS = "lm_eval.models"
MODEL = "halfbyte.evaluation.lm_harness:HalfbyteLM"


def enter_model(models: ModuleType) -> None:
    """Enters the harness's model by its place, which the harness imports when it is asked for;
    nothing where its registry is not as expected.
    """
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is not None and METHOD not in registry:
        registry.register(METHOD, target=MODEL)


ENTRIES: dict[str, Callable[[ModuleType], None]] = {TABLE: enter_method, HARNESS: enter_model}
"""What to do after a module was imported, by the module's name."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `ENTRIES` as Python would, and enters halfbyte after each."""

    def __init__(self) -> None:
        self.waiting = {name for name in ENTRIES if name not in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        self.waiting.discard(fullname)
        if not self.waiting:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                ENTRIES[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Called by `import torch`."""
    for name, enter in ENTRIES.items():
        if name in sys.modules:
            enter(sys.modules[name])
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        finder = Finder()
        if finder.waiting:
            sys.meta_path.insert(0, finder)
