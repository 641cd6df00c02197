"""What a quantization config says of each module: the base class of every producer's config reader.

    reader = read_config(raw, "config.json")          checkpoints/quant_config.py picks the class
    reader.parameters("model.layers.0.mlp.up_proj")   what the layout is given for that module; None
                                                      where it is left dense
    reader.key_uses()                                 which keys are consumed, harmless or unknown;
                                                      checkpoints/ledger.py refuses unknown ones

Each reader is in the file of its producer's layout. AutoRound writes the layouts of other
producers: its reader is in this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from ...errors import CheckpointError
from ..claims import CONSUMED, HARMLESS, UNKNOWN, KeyUse
from .module_rules import check_rule, covered

WIDTHS = ("bits", "num_bits", "nbits", "w_bit")
GROUPS = ("group_size", "q_group_size", "block_size")
"""Keys that hold a width or a group size in some producer's config."""
MAX_DEPTH = 16
EMPTY = "it is empty"
"""Why a key with null, an empty list or an empty object is harmless."""


class Transform(NamedTuple):
    """A matrix that the inputs or the outputs of a module are multiplied by when the model runs.

    group     name of the config's group; the matrix is tensor `MODULE.GROUP_SIDE.weight`, which
              modules of one group and size share
    side      "input" or "output"
    transposed  the matrix is used transposed
    hadamard  a matrix of ±1, divided by the square root of its size
    size      of the square; None is all inputs or outputs
    permuted  rows and columns are taken in the order of tensor `MODULE.GROUP_SIDE.perm`
    inverse   the stored matrix is an inverse of the group's own, and shared with such only
    """

    group: str
    side: str
    transposed: bool
    hadamard: bool
    size: int | None
    permuted: bool
    inverse: bool


class ConfigReader(ABC):
    """One producer's quantization config.

    method    what `Checkpoint.format` reports, and a value of `quant_method`
    methods   further values of `quant_method`
    consumed  paths of the keys that decide how weights are read: `bits`,
              `config_groups.*.weights.num_bits`; `*` is any one key, `**` at the end everything
              below
    harmless  what they are -> paths of keys that do not change any weight's values, everything
              below them included
    unchecked keys of any value: numbers that are no integer, configs within the config
    layouts   names of layouts it can mean, or their beginnings ("awq" is every "awq-..."), most
              likely first
    raw       the dictionary
    where     names its file in messages
    """

    method: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ()
    consumed: ClassVar[tuple[str, ...]] = ()
    harmless: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unchecked: ClassVar[tuple[str, ...]] = ()
    layouts: tuple[str, ...]

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        check_numbers({k: v for k, v in raw.items() if k not in self.unchecked}, where)
        self.layouts = getattr(type(self), "layouts", (self.method,))

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """True when a config without `quant_method` is this producer's, by the keys it has."""
        return False

    @abstractmethod
    def parameters(self, module: str) -> dict[str, Any] | None:
        """What the config says of `module`, in the producer's words; None when it leaves the module
        dense.
        """

    def transforms(self, module: str) -> tuple[Transform, ...]:
        """What a module's inputs and outputs are multiplied by, besides its weight."""
        return ()

    @property
    def transform_groups(self) -> tuple[str, ...]:
        """Groups of transforms, as tensors are named after them."""
        return ()

    def common(self) -> dict[str, Any]:
        """What a module is given that the config leaves dense and that is packed all the same."""
        return self.parameters("") or {}

    def key_uses(self) -> tuple[KeyUse, ...]:
        """One entry for each key of the config, nested ones by their path."""
        return tuple(self._use(path, value) for path, value in leaves(self.raw))

    def _use(self, path: tuple[str, ...], value: Any) -> KeyUse:
        text = ".".join(path)
        if any(path_covers(pattern, path) for pattern in (*self.consumed, "quant_method")):
            return KeyUse(text, value, CONSUMED)
        below = ((why, pattern) for why, patterns in self.harmless.items() for pattern in patterns)
        why = next((why for why, pattern in below if path_covers(f"{pattern}.**", path)), None)
        if why is None and value in (None, [], {}, ""):
            why = EMPTY
        return KeyUse(text, value, UNKNOWN if why is None else HARMLESS, why or "")

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names`, names of layouts, that the config can mean, most likely first."""
        names = tuple(names)
        ranked = [n for word in self.layouts for n in names if n == word or n.startswith(word + "-")]
        return tuple(dict.fromkeys(ranked))

    def complete(self, other: ConfigReader) -> list[str]:
        """Take from another file's config of the same method what this one leaves out; a sentence
        for each key in which the two contradict each other.
        """
        mine, theirs = self.raw, other.raw
        keys = (*WIDTHS, *GROUPS, "checkpoint_format", "quant_algo", "version", "mode")
        both = [k for k in keys if mine.get(k) is not None and theirs.get(k) is not None]
        says = "{} is {!r:.60} in {} and {!r:.60} in {}; the first is used"
        conflicts = [
            says.format(k, mine[k], self.where, theirs[k], other.where)
            for k in both
            if str(mine[k]).lower() != str(theirs[k]).lower()
        ]
        type(self).__init__(self, {**theirs, **{k: v for k, v in mine.items() if v is not None}}, self.where)
        return conflicts

    def _names(self, *keys: str) -> tuple[str, ...]:
        """The list of names under the first of `keys` that is there; null is empty."""
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            if isinstance(value, str):
                value = [value]
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise CheckpointError(f"[config] {self.where}: {key} is {value!r:.80}; wanted a list of module names")
            return tuple(check_rule(v, self.where) for v in value)
        return ()

    def _object(self, key: str) -> Mapping[str, Any]:
        """The object under `key`; null and absence are empty."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"[config] {self.where}: {key} is {value!r:.80}; wanted an object")
        return value


class SkipListReader(ConfigReader):
    """One set of parameters for all modules, and a list of modules that stay dense.

    skip_keys  keys of that list, the first that is there decides
    """

    skip_keys: ClassVar[tuple[str, ...]]

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self._skipped = self._names(*self.skip_keys)

    def _use(self, path: tuple[str, ...], value: Any) -> KeyUse:
        return KeyUse(".".join(path), value, CONSUMED) if path[0] in self.skip_keys else super()._use(path, value)

    def parameters(self, module: str) -> dict[str, Any] | None:
        return None if covered(self._skipped, module) else dict(self.raw)


class PlainReader(ConfigReader):
    """The same parameters for every module."""

    def parameters(self, module: str) -> dict[str, Any] | None:
        return dict(self.raw)


def path_covers(pattern: str, path: tuple[str, ...]) -> bool:
    """True when a dotted pattern of keys covers a path: segment by segment, shell wildcards within
    one, `**` for all below.

    >>> path_covers("config_groups.*.weights.**", ("config_groups", "group_0", "weights", "num_bits"))
    True
    """
    wanted = pattern.split(".")
    if wanted[-1] == "**":
        return len(path) >= len(wanted) - 1 and all(map(fnmatchcase, path, wanted[:-1]))
    return len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))


def leaves(value: Any, path: tuple[str, ...] = (), depth: int = 0) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path of keys, value) of everything in nested objects that is no object with keys of its own;
    lists are values.
    """
    if isinstance(value, Mapping) and value and depth <= MAX_DEPTH:
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)), depth + 1)
    elif path:
        yield path, value


def check_numbers(raw: Mapping[str, Any], where: str) -> None:
    """Widths are whole numbers from 1 to 32, group sizes −1 or at least 1, or null; CheckpointError
    naming the key otherwise.
    """
    for path, value in leaves(raw):
        key = path[-1]
        if value is None or key not in (*WIDTHS, *GROUPS):
            continue
        is_int = type(value) is int
        if key in WIDTHS and not (is_int and 1 <= value <= 32):
            raise CheckpointError(f"[config] {where}: {'.'.join(path)} is {value!r:.80}; wanted a whole number of bits, 1 to 32")
        if key in GROUPS and not (is_int and (value == -1 or 1 <= value < 1 << 31)):
            raise CheckpointError(
                f"[config] {where}: {'.'.join(path)} is {value!r:.80}; wanted a whole group size of at least 1, or -1 for a row"
            )
