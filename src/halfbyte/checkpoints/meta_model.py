"""The modules of an architecture that the table of `architecture.py` lacks, from transformers' own
model on torch's meta device, where nothing is allocated.

    required_by_transformers(config, keys)    requirements, and kinds of modules that cannot be
                                              compared because the file has none of them

Files may name modules otherwise than transformers does (it renames on loading), so a kind of
module, `model.layers.*.mixer.in_proj`, is compared only where the file has one of that name: then
every layer that has it in the model must have it in the file. transformers and torch are imported
here, late; no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from .architecture import Requirement

_FIRST_LAYER = re.compile(r"((?:[^.\d]+\.)*?)([^.\d]+)\.\d+\.")
_TOWERS = ("vision", "visual", "audio", "mtp", "draft", "eagle")
_QUANTIZATION = ("quantization_config", "quantization", "compression_config", "auto_map")
SHOWN = 4
"""Kinds of modules that the report lists."""
MODULES = 1 << 14
"""Modules that a model may have beside `MODULES_PER_TENSOR` for each tensor of the file."""
MODULES_PER_TENSOR = 16


Shape = tuple[int, ...]


def required_by_transformers(
    config: Mapping[str, Any], keys: Iterable[str]
) -> tuple[list[Requirement], str, dict[str, Shape]] | str:
    """(requirements, a clause that names what is not compared, "" for nothing, the shapes that
    transformers gives them); or why nothing is compared, as a clause.

    keys  modules and parameters of the file, without `.weight`
    """
    word = str(config.get("model_type") or "")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return f"model_type {word!r} is not in the table, and transformers is not installed to say what it has"
    settings = {k: v for k, v in config.items() if k not in _QUANTIZATION}
    keys = set(keys)
    names = _parameters(json.dumps(settings, sort_keys=True, default=str), most_modules(len(keys)))
    if isinstance(names, str):
        return f"model_type {word!r} is not in the table, and transformers {names}"
    ours, theirs = _stem(keys), _stem(names)
    kinds: dict[str, list[str]] = {}
    shapes: dict[str, Shape] = {}
    for name, shape in names.items():
        moved = ours + name[len(theirs) :] if theirs and name.startswith(theirs) else name
        kinds.setdefault(_kind(moved), []).append(moved)
        shapes[moved] = shape
    have = Counter(map(_kind, keys))
    compared = [name for kind, same in kinds.items() if have[kind] for name in same]
    left = [kind for kind in kinds if not have[kind]]
    more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    clause = f"{', '.join(left[:SHOWN])}{more}, which the file has under no such name; the others are compared" if left else ""
    return [Requirement(((name,),)) for name in compared], clause, shapes


def most_modules(tensors: int) -> int:
    """Modules that a model of so many tensors may have."""
    return MODULES + MODULES_PER_TENSOR * tensors


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _stem(names: Iterable[str]) -> str:
    """What precedes the numbered layers of the language model, in most names."""
    stems = Counter(m[1] for n in names if (m := _FIRST_LAYER.match(n)) and not any(t in m[1] for t in _TOWERS))
    return stems.most_common(1)[0][0] if stems else ""


@lru_cache(maxsize=8)
def _parameters(config: str, most: int) -> dict[str, Shape] | str:
    """Shapes of the parameters of a causal language model of at most `most` modules, by path
    without `.weight`; or why there are none, as a verb's phrase.
    """
    settings: dict[str, Any] = json.loads(config)
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        kind = str(settings.pop("model_type", ""))
        try:
            made = AutoConfig.for_model(kind, **settings)
        except Exception as error:  # a configuration's checks raise errors of their own kinds
            return f"does not know it: {str(error).splitlines()[0]:.80}" if str(error) else "does not know it"
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            try:
                model = without_memory(partial(auto.from_config, made, trust_remote_code=False), most)
            except TooManyModulesError:
                return f"builds more than {most:,} modules of its config.json, which its tensors cannot fill"
            except Exception:  # an architecture's constructor raises whatever its code does
                continue
            tied = getattr(made.get_text_config(), "tie_word_embeddings", False)
            parameters = stored(model, dict(model.named_parameters(remove_duplicate=False)))
            return {
                name.removesuffix(".weight"): tuple(p.shape)
                for name, p in parameters.items()
                if not (tied and name.startswith("lm_head"))
            }
    return "builds no language model of its config.json"


def without_memory(make: Callable[[], Any], most: int) -> Any:
    """A model that `make` makes, on torch's meta device. Raises TooManyModulesError, and whatever
    the architecture's code does.
    """
    import torch

    with torch.device("meta"), at_most(most):
        return make()


def stored(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that files have: of tied ones, those that the others are tied to."""
    shared = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in state.items() if name not in shared}


class TooManyModulesError(Exception):
    """A model has more modules than its file could fill."""


@contextlib.contextmanager
def at_most(modules: int) -> Iterator[None]:
    """Raises TooManyModulesError in the block where this thread registers more modules: a config
    that asks for 65,536 experts a layer would take minutes.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    thread, count = threading.get_ident(), 0

    def registered(*_: object) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > modules:
                raise TooManyModulesError

    hook = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that transformers prints while it builds a model."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
