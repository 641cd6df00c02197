"""What a layout is: a bijection between the tensors of a producer's file and the parts of a
`QTensor`.

    unpack(tensors, config) -> QTensor        pack(q, config) -> tensors        pack(unpack(t)) == t, unpack(pack(q)) == q

Tensors of one module are keyed by what follows the module's path (`qweight`, `weight_scale`);
`config` holds that module's own parameters in the words of the producer's quantization config,
per-module rules already applied. What the canonical parts cannot express (which writer, which
padding, bits that no decoder reads) is kept in `QTensor.details`, so that nothing is lost when the
tensor is packed again.

A layout is one class in one file, and everything about it is there: its name, the producers that
write it, which formats it holds (`holds`, `misfit`), how a quantization config is read and written
(`config_reader`, `write_config`), and what each of its tensors is (`consumes`). The registry in
`__init__.py` lists the classes; tables of layouts derive from it. docs/adding-a-layout.md adds one
from end to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import LayoutError
from ..spec import FLOAT_SCALES, Format
from ..tensor.qtensor import QTensor
from .claims import AUXILIARY, Claim
from .quant_config.reader import ConfigReader
from .quant_config.writer import ConfigFiles, DenseTensor, PackedModule

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Config = Mapping[str, Any]


class HasHeader(Protocol):
    """Anything with a shape and a numpy dtype: an array, or a `Header` read from a file without its
    data.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class Header(NamedTuple):
    """Shape and dtype of a tensor whose data was not read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Described(NamedTuple):
    """What a module's tensors are, known from their headers."""

    format: Format
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Holds:
    """The formats that conversions write in a layout.

    codecs      words a target may name (`--to mlx:affine4`), preferred ones first
    conditions  what else a weight must meet, in words; `Layout.misfit` and `pack` check it
    groups      group sizes of codecs with float scales, preferred ones first; () for any
    levels      what `global_scale` of its NVFP4 may be, best first
    scales      dtypes of float scales
    wider       widths that a weight of another width may go to when no codec is asked for: those
                that engines read
    """

    codecs: tuple[str, ...]
    conditions: str = ""
    groups: tuple[int, ...] = ()
    levels: tuple[str, ...] = ()
    scales: tuple[str, ...] = FLOAT_SCALES
    wider: tuple[int, ...] = (4, 8)


class Layout(ABC):
    """One producer's order of packed weights.

    name           registry key, and the layout word of a conversion target (`--to NAME`)
    aliases        other words for it in a target -> parameters that the word fixes
    codec_aliases  codec words that mean another codec in this layout
    producers      producers that write it, the usual one first: keys of `producers.DECODERS`, whose
                   arithmetic `arithmetic="producer"` reproduces; () where nobody's arithmetic is
                   known
    holds          what conversions write in it, None where it only takes weights that already have
                   a format of its own
    container      the kind of file that holds its tensors: "safetensors", "gguf", or "halfbyte" for
                   halfbyte's own
    engine         the one engine that its files are for, which multiplies packed embeddings and
                   heads, and each projection of an expert on its own; "" where several read them
    splits_stacks  conversions write a stack of experts as one matrix for each
    stacks_only    conversions write stacks of experts in it, and leave every other weight dense
    one_format     its config has no formats of single modules
    engine_names   a folder of it has its engine's names of experts, and older ones in its config
    inputs_first   dense, a stack of it has its inputs before its outputs, as transformers has them
    alternating    rows of gate and up alternate in a stack that holds both
    input_scales   it keeps `pre_quant_scale`, by which inputs are multiplied, beside a weight
    config_reader  the class that reads its producer's quantization config, None without one
    required       suffixes that are always there
    optional       suffixes that belong to the weight when they are there; all others (`bias`) stay
                   tensors of their own
    peek           suffixes whose data, a few bytes, `describe` reads: pass arrays for these,
                   headers for the rest
    parts          suffix -> the part of a QTensor that the tensor becomes, where the two names
                   differ
    harmless       suffix -> what it is, of tensors beside the weight that do not enter its values
    sparse         it holds no zeros of a 2:4 sparse weight, which its `unpack` restores
    separator      the character between the module's path and a suffix (`.`; gpt-oss writes
                   `gate_up_proj_blocks`, so `_`)
    """

    name: ClassVar[str]
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    codec_aliases: ClassVar[Mapping[str, str]] = {}
    producers: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[Holds | None] = None
    container: ClassVar[str] = "safetensors"
    engine: ClassVar[str] = ""
    splits_stacks: ClassVar[bool] = False
    stacks_only: ClassVar[bool] = False
    one_format: ClassVar[bool] = False
    engine_names: ClassVar[bool] = False
    inputs_first: ClassVar[bool] = False
    alternating: ClassVar[bool] = False
    input_scales: ClassVar[bool] = False
    config_reader: ClassVar[type[ConfigReader] | None] = None
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    peek: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[Mapping[str, str]] = {}
    harmless: ClassVar[Mapping[str, str]] = {}
    sparse: ClassVar[bool] = False
    separator: ClassVar[str] = "."

    def matches(self, suffixes: Collection[str]) -> bool:
        """True when a module with tensors of these suffixes can be of this layout (the config
        decides between lookalikes).
        """
        return all(s in suffixes for s in self.required)

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        """`matches`, with the dtypes, for layouts whose tensors' names are ordinary ones too."""
        return self.matches(headers)

    def claims(self, suffixes: Collection[str]) -> tuple[str, ...]:
        """The suffixes among these that make up the weight, required ones first."""
        return tuple(s for s in (*self.required, *self.optional) if s in suffixes)

    def consumes(self, suffixes: Collection[str]) -> tuple[Claim, ...]:
        """What each of these suffixes is to this layout; a suffix without a claim is unknown to it."""
        read = tuple(Claim(s, self.parts.get(s, s)) for s in self.claims(suffixes))
        return (*read, *(Claim(s, AUXILIARY, why) for s, why in self.harmless.items() if s in suffixes))

    @abstractmethod
    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        """Format and logical shape, from headers alone (and the data of `peek`).

        Raises LayoutError, naming the tensor, when shapes, dtypes and config do not fit together.
        """

    @abstractmethod
    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        """The canonical tensor. Raises LayoutError as `describe` does, and for values out of range."""

    def zero_points(self, tensors: Tensors, config: Config, name: str = "") -> Array | None:
        """The part `zeros` alone, None where there is none: layouts whose codes are costly to
        transpose do without them.
        """
        return self.unpack(tensors, config, name).parts.get("zeros")

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        """Why no weight of this format and shape can be stored in this layout, as a clause; "" when
        it depends on the values.
        """
        return ""

    def unfilled(self, fmt: Format, shape: tuple[int, ...]) -> str:
        """Which groups or words a weight of this shape would not fill, as what it has and what is
        wanted: a model is quantized without such a weight. "" where there is none.
        """
        return ""

    def checkpoint_params(self, given: Config, formats: Iterable[Format], usual_zeros: Callable[[], bool]) -> Config:
        """Parameters that all weights of a checkpoint share: `given`, and what the weights decide.

        formats      of the weights
        usual_zeros  whether their zero points are those that every reader takes; costly, so only
                     called where it decides
        """
        return given

    @abstractmethod
    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        """The producer's tensors of `q`. LayoutError when this layout cannot hold `q` exactly; the
        message says what can.
        """

    def check_fits(self, q: QTensor) -> None:
        """LayoutError for what `misfit` names."""
        why = self.misfit(q.format, q.shape)
        if why:
            raise cannot_hold(self.name, q, why)

    def own_details(self, q: QTensor) -> Mapping[str, Any]:
        """`q.details` when this layout wrote them (it puts its name under `layout`), else nothing:
        another layout's mean something else.
        """
        return q.details if q.details.get("layout") == self.name else {}

    def config(self, q: QTensor) -> dict[str, Any]:
        """The parameters with which `pack` writes `q`, to be put into the target's quantization
        config.
        """
        return {"bits": q.format.bits, "group_size": q.format.group_size}

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """The quantization config of a checkpoint. LayoutError where conversions do not write
        checkpoints of this layout.
        """
        raise LayoutError(f"[convert] no writer for {self.name} checkpoints; single weights of it can be packed")

    @property
    def writes_checkpoints(self) -> bool:
        """True when conversions write checkpoints of this layout."""
        return type(self).write_config is not Layout.write_config


def label(name: str, suffix: str) -> str:
    """Full tensor name for a message."""
    return f"{name}.{suffix}" if name else suffix


def require(
    layout: str,
    tensors: Mapping[str, HasHeader],
    suffix: str,
    name: str,
    dtypes: Sequence[np.dtype[Any]] = (),
    shape: tuple[int | None, ...] | None = None,
    because: str = "",
) -> tuple[int, ...]:
    """The shape of tensor `suffix`, after checking that it is there and has one of `dtypes` and
    `shape` (None: any size).

    because  where the wanted sizes come from, for the message
    Raises LayoutError otherwise.
    """
    if suffix not in tensors:
        raise LayoutError(
            f"[{layout}] {label(name, suffix)} is missing; the module has {', '.join(sorted(tensors)) or 'no tensors'}"
        )
    t = tensors[suffix]
    got = tuple(t.shape)
    if dtypes and t.dtype not in dtypes:
        raise LayoutError(f"[{layout}] {label(name, suffix)} is {t.dtype}; allowed: {', '.join(d.name for d in dtypes)}")
    if shape is not None and (len(got) != len(shape) or any(w is not None and g != w for g, w in zip(got, shape, strict=True))):
        sizes = ", ".join("*" if w is None else str(w) for w in shape)
        raise LayoutError(
            f"[{layout}] {label(name, suffix)} has shape {list(got)}; wanted [{sizes}]" + (f" {because}" if because else "")
        )
    return got


def reject_extra(layout: str, tensors: Mapping[str, Any], wanted: Collection[str], name: str, what: str) -> None:
    """LayoutError for a tensor that this kind of weight does not have: it would be lost."""
    extra = sorted(set(tensors) - set(wanted))
    if extra:
        raise LayoutError(
            f"[{layout}] {label(name, extra[0])} is there, but {what} has {', '.join(wanted)} and nothing else; "
            "without it the file is read"
        )


def integer_of(layout: str, config: Config, key: str, name: str) -> int | None:
    """The whole number `config` gives for `key`, None when it gives none. Raises LayoutError for
    anything else.
    """
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise LayoutError(f"[{layout}] {name}: {key} is {value!r} in the quantization config; a whole number is wanted")
    return value


def sizes_of(layout: str, value: Any, key: str, name: str) -> tuple[int, ...]:
    """A list of sizes, whole numbers of at least 0. Raises LayoutError for anything else."""
    if not isinstance(value, Sequence) or any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in value):
        raise LayoutError(f"[{layout}] {name}: {key} is {value!r:.80} in the quantization config; a list of sizes is wanted")
    return tuple(value)


def check_requested(layout: str, q: QTensor, config: Config, expected: Mapping[str, Any]) -> None:
    """LayoutError when `config` gives another value of a parameter than q has; it may leave
    parameters out.
    """
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise cannot_hold(layout, q, f"the config asks for {key} {config[key]!r}; this weight has {value!r}")


def cannot_hold(layout: str, q: QTensor, why: str, instead: str = "") -> LayoutError:
    """The error for a tensor that a layout cannot hold exactly."""
    tail = f"; {instead}" if instead else ""
    return LayoutError(f"[{layout}] {q.format} of shape {q.shape} cannot be written: {why}{tail}")
