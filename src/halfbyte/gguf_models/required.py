"""The tensors that a GGUF model of an architecture in `architectures.py` needs: each parameter of
transformers' model, under the names that the architecture's table has for it, in its shape.

    missing_tensors(checkpoint, shapes)      entries of the ledger, or why nothing is compared

The model is built on torch's meta device from the header, where nothing is allocated; torch and
transformers are imported late. Families in `checkpoints/architecture.py` need neither.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from ..checkpoints.architecture import Requirement
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.ledger import MISSING, SHAPE, UNKNOWN, Entry, requirement_entries
from ..checkpoints.meta_model import TooManyModulesError, most_modules, quiet, stored, without_memory
from ..errors import CheckpointError, HalfbyteError, summary_of
from .architecture import DBRX_EXPERTS, EACH, EXPERTS, PART, Architecture
from .config import architecture_of, register, settings_of
from .keys import Keys, MissingError
from .names import LAYER, OWN_MODEL, SIDES, class_name, slot
from .view import TRANSPOSED, ModelView

LEAVES = ("weight", "bias", "")
"""What ends the name of a tensor after its stem; some tensors of recurrent layers end with it."""
HALVES = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""Projection of experts -> the parameter that it is half of in transformers."""
Shape = tuple[int, ...]


def missing_tensors(checkpoint: GGUFCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[Entry] | str:
    """Entries of what the model needs and the file lacks or has in another shape; or why that is
    not known, as a clause.

    shapes  of all tensors, names without `.weight`
    """
    try:
        architecture, settings = architecture_of(checkpoint), settings_of(checkpoint)
    except MissingError as error:
        return [Entry(error.subject, error.name, MISSING, why="the model needs it")]
    except HalfbyteError as error:
        why = f"no model is built of the header: {str(error).partition('] ')[2].removeprefix(f'{checkpoint.path}: '):.160}"
        return [Entry("key", "general.architecture", UNKNOWN, why=why)] if isinstance(error, CheckpointError) else why
    if find_spec("transformers") is None or find_spec("torch") is None:
        return f"{architecture.model_type} is not in the table, and transformers is not installed to say what it has"
    config = json.dumps(settings, sort_keys=True, default=str)
    try:
        state = _parameters(config, architecture.task, most_modules(len(shapes)))
    except _RefusedError as error:
        return [Entry("key", "general.architecture", UNKNOWN, why=str(error))]
    if isinstance(state, str):
        return state
    lacking = requirement_entries(list(_requirements(architecture, Keys(checkpoint), state, shapes)), shapes, {}, "the header")
    return lacking or list(_misshapen(checkpoint, state))


class _RefusedError(Exception):
    """transformers knows the model type and builds no model of the header's values."""


@lru_cache(maxsize=4)
def _parameters(settings: str, task: str, most: int) -> dict[str, Shape] | str:
    """Shapes of a model's parameters and of the buffers that checkpoints have, by name; or why
    there are none.
    """
    with quiet():
        import transformers

        given = json.loads(settings)
        kind = given.pop("model_type")
        register(kind)
        name = "" if kind == OWN_MODEL else class_name(kind, task)
        if kind not in transformers.CONFIG_MAPPING or not hasattr(transformers, name or "AutoConfig"):
            return f"transformers {transformers.__version__} has no {kind}"
        try:
            config = transformers.AutoConfig.for_model(kind, **given)
            make = getattr(transformers, name) if name else transformers.AutoModelForCausalLM.from_config
            model = without_memory(partial(make, config), most)
        except TooManyModulesError:
            return f"transformers builds more than {most:,} modules of the header, which the tensors cannot fill"
        except ImportError as error:
            return f"transformers builds no {kind}: {summary_of(error)}"
        except Exception as error:  # a configuration's checks and a constructor raise errors of their own kinds
            raise _RefusedError(f"transformers builds no {kind} of the header: {summary_of(error)}") from error
        return {name: tuple(tensor.shape) for name, tensor in stored(model, model.state_dict()).items()}


def _misshapen(checkpoint: GGUFCheckpoint, state: Mapping[str, Shape]) -> Iterator[Entry]:
    """Tensors that the model has in another shape: sizes in the header that are not the tensors'."""
    try:
        view = ModelView(checkpoint, stacks=True, dense=True)
    except HalfbyteError:
        return  # a tensor without a name in the model, which `load_model` and conversions refuse
    for key in view:
        if not view.source_keys(key):
            continue
        file, kind = view.source_keys(key)[0], view.architecture.model_type
        try:
            have = view.info(key).shape
        except (ValueError, IndexError, ZeroDivisionError):  # of sizes that do not divide the tensor's
            yield Entry("tensor", file, SHAPE, why=f"{list(checkpoint.info(file).shape)}, which the header's sizes do not divide")
            continue
        name = next((n for n in (key, f"{key}.weight") if n in state), "")
        stack = len(have) == 3 and kind in TRANSPOSED
        wanted = state[name] if name and not stack else _projection_shape(key, state, kind)
        if wanted is not None and wanted != have:
            made = f"{list(have)} as {key}" if (shape := checkpoint.info(file).shape) != have else f"{list(shape)}"
            yield Entry("tensor", file, SHAPE, why=f"{made}; the header makes it {list(wanted)}")


def _projection_shape(key: str, state: Mapping[str, Shape], kind: str) -> Shape | None:
    """The shape of one projection of all experts, whose parameter has another name; None where the
    model has none such.
    """
    module, _, projection = key.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    leaf = "_bias" if key.endswith(".bias") else ""
    half = f"{module}.{HALVES.get(projection, projection)}{leaf}"
    whole = f"{module}.{projection}{leaf}"
    found = state.get(whole) or state.get(half)
    if found is None or len(found) != (2 if leaf else 3):
        return None
    e, n, k = (*found, 0) if leaf else (found[0], found[2], found[1]) if kind in TRANSPOSED else found
    n = n if whole in state else n // 2
    return (e, n) if leaf else (e, n, k)


def _requirements(
    architecture: Architecture, keys: Keys, state: Mapping[str, Shape], names: Mapping[str, Any]
) -> Iterator[Requirement]:
    """For each parameter the sets of tensors that together hold it."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in _candidates(architecture, keys, names):
        for parameter, piece in _holds(architecture, name, state):
            found[parameter][piece].append(name.removesuffix(".weight"))
    if "output.bias" in names:  # without its matrix the embedding would be the head
        yield Requirement((("output",),))
    for pieces in found.values():
        whole = [(name,) for name in dict.fromkeys(pieces.pop("", []))]
        parts = list(zip(*(dict.fromkeys(alternatives) for alternatives in pieces.values()), strict=False)) if pieces else []
        yield Requirement((*whole, *parts) if whole and whole[0][0] in names else (*parts, *whole))


def _candidates(architecture: Architecture, keys: Keys, names: Mapping[str, Any]) -> Iterator[str]:
    """Every name that a tensor of the model may have, endings that the file uses first."""
    ends: dict[str, set[str]] = defaultdict(set)
    for name in names:
        match = LAYER.fullmatch(name)
        stem, _, leaf = (match[2] if match else name).rpartition(".")
        ends[stem if leaf == "bias" else match[2] if match else name].add("bias" if leaf == "bias" else "")

    def leaves(stem: str) -> list[str]:
        return sorted(LEAVES, key=lambda leaf: leaf.removesuffix("weight") not in ends[stem])

    for stem in architecture.top:
        yield from (f"{stem}.{leaf}" if leaf else stem for leaf in leaves(stem))
    stems = list(dict.fromkeys((*architecture.names, *architecture.splits)))
    decoder = keys.get("decoder_block_count", "integer", 0)
    for layer in range(max(keys.layers, min(decoder, len(names)))):
        for stem in stems:
            side, _, rest = stem.partition(".")
            at, inner = (f"{side}.blk.{layer}.", rest) if side in SIDES else (f"blk.{layer}.", stem)
            yield from (f"{at}{inner}.{leaf}" if leaf else f"{at}{inner}" for leaf in leaves(inner))


def _holds(architecture: Architecture, name: str, state: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """(parameter, which piece of it) of each parameter that a tensor of this name holds; "" for the
    whole.
    """
    match = LAYER.fullmatch(name)
    stem = match[2].removesuffix(".weight").removesuffix(".bias") if match else ""
    if stem in architecture.splits:
        same = (slot(architecture, name.replace(f".{stem}", f".{part}")) for part in architecture.splits[stem])
        yield from ((f"{path}.{leaf}", "") for path, leaf in filter(None, same) if f"{path}.{leaf}" in state)
        return
    where = slot(architecture, name)
    if where is None:
        return
    path, leaf = where
    if EXPERTS in path:
        module, _, projection = path.partition(EXPERTS)
        end = "_bias" if leaf == "bias" else ""
        for whole in (projection, HALVES.get(projection, ""), DBRX_EXPERTS.get(projection, "")):
            if whole and f"{module}.{whole}{end}" in state:
                yield f"{module}.{whole}{end}", projection if whole == HALVES.get(projection) else ""
    elif EACH in path:
        before, _, after = path.partition(EACH)
        yield from ((p, "") for p in state if p.startswith(before) and p.endswith(f"{after}.{leaf}"))
    else:
        path, _, number = path.partition(PART)
        if f"{path}.{leaf}" in state:
            yield f"{path}.{leaf}", number
