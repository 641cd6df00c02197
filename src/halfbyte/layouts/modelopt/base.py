"""ModelOpt: what NVIDIA's unified export writes, and its in-memory tensors saved as they are. Which
one it is, the dtypes say.

| kind | weight | scales | value |
|---|---|---|---|
| nvfp4 | `weight` uint8 [*lead, n, k/2], low nibble even | `weight_scale` E4M3 [.., k/16], `.._scale_2` float32 | e2m1 · s · s2 |
| nvfp4 with SVDQuant | the same, [n, k/2] | and `svdquant_lora_a` [r, k], `svdquant_lora_b` [n, r] | e2m1 · s · s2 + B · A |
| the same from ModelOpt 0.47 | the same | `weight_quantizer._svdquant_lora_a` and `_b` | the same |
| mxfp4 | the same | `weight_scale` E8M0 bytes [*lead, n, k/32] | e2m1 · 2^(b − 127) |
| mxfp8 | `weight` E4M3 [*lead, n, k] | the same | e4m3 · 2^(b − 127) |
| int4 export | `weight` uint8 [*lead, n/2, k]: low nibble row 2i, high row 2i + 1 | `weight_scale` float [*lead, n, G] | q · s |
| fp8 | `weight` E4M3 [*lead, n, k] | `weight_scale` float: one, one a row, or one a tile | e4m3 · s |
| int8 | `weight` int8 [*lead, n, k] | `weight_scale` float, one a row | q · s |
| INT4QTensor | `weight` uint8 [n, k/2], high nibble even, q + 8 | `weight_scale_inv` float [n·k/g, 1] | (c − 8) / s |
| NF4QTensor | `weight` uint8, high nibble even, flat | int8 [B, S], `.._double_scale` [B], `.._zeros` [] | table · (b / d + z) |

The int4 export's codes are two's complement, NF4QTensor's blocks run over the flattened weight.

Config: `group_size` where the shapes leave it open; NF4QTensor needs `shape`, (n, k), which its
flat tensor leaves open. A `quant_algo` ("NVFP4", "MXFP4", "MXFP8", "W4A16_AWQ", "FP8", ...) must
agree with what the tensors are.

An exported `pre_quant_scale` belongs to the activations (x · pre_quant_scale meets this weight) and
stays a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ...errors import CheckpointError, LayoutError, UnsupportedError
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, cannot_hold, label, reject_extra, require
from ..quant_config.module_rules import covered, glob_matches, lookup
from ..quant_config.reader import ConfigReader
from ..quant_config.writer import ConfigFiles, DenseTensor, PackedModule, dense_modules, differing, most_common
from .export import FP8, INT8, LOW_RANK, LOW_RANK_OF_QUANTIZER, MXFP4, MXFP8, NVFP4, NVFP4SVD, INT4Export, Kind
from .qtensor import INT4QTensor, NF4QTensor

T = TypeVar("T", bound=HasHeader)

KINDS: tuple[Kind, ...] = (NVFP4SVD(), NVFP4(), MXFP4(), MXFP8(), INT4Export(), FP8(), INT8(), INT4QTensor(), NF4QTensor())
"""The first that recognises the tensors."""


def is_w4afp8(config: Config) -> bool:
    """Whether a module's parameters are those of MIXED_PRECISION without a table of layers, which
    W4AFP8 checkpoints are written under.
    """
    return str(config.get("quant_algo")).upper() == "MIXED_PRECISION"


class ModelOptConfig(ConfigReader):
    """ModelOpt's config, in config.json's words or those of hf_quant_config.json: `exclude_modules`
    as shell patterns, `quantized_layers` when mixed.
    """

    method = "modelopt"
    methods = ("modelopt_fp4", "modelopt_mixed")
    consumed = (
        "quant_algo", "group_size", "exclude_modules", "ignore", "quantized_layers.*.quant_algo", "quantized_layers.*.group_size",
        "config_groups.*.targets", *(f"config_groups.*.weights.{key}" for key in ("num_bits", "type", "group_size", "strategy")),
    )  # fmt: skip
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "how activations and caches are quantized when the model runs": (
            "kv_cache_quant_algo", "kv_cache_scheme", "config_groups.*.input_activations", "config_groups.*.output_activations",
            "quantized_layers.*.awq_block_size", "quantized_layers.*.has_zero_point", "quantized_layers.*.pre_quant_scale",
            "config_groups.*.has_zero_point", "config_groups.*.pre_quant_scale", "has_zero_point",
            "pre_quant_scale", "smoothquant_val", "with_input_scale", "config_groups.*.weights.dynamic",
        ),
        "widths, which the tensors state": ("lora_rank", "config_groups.*.lora_rank", "quantized_layers.*.lora_rank"),
        "notes of the writer": ("producer", "quant_lib", "version"),
    }  # fmt: skip

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        inner = self._object("quantization")
        self.raw = {**{k: v for k, v in raw.items() if k != "quantization"}, **inner}
        self._common = {k: v for k, v in self.raw.items() if k != "quantized_layers"}
        groups = [g.get("weights") for g in self._object("config_groups").values() if isinstance(g, dict)]
        if "group_size" not in self._common and len(groups) == 1 and isinstance(groups[0], dict):
            self._common["group_size"] = groups[0].get("group_size")
        layers = self.raw.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise CheckpointError(f"[config] {where}: quantized_layers is {layers!r:.80}; wanted an object of objects")
        self._layers: dict[str, dict[str, Any]] = layers
        self._skipped = self._names("exclude_modules", "ignore")
        if is_w4afp8(self._common) and not layers:
            # TensorRT-LLM's mixture: int4 experts and block FP8, in DeepSeek's names.
            self.layouts = ("fp8", "modelopt")
            self._common.setdefault("weight_block_size", [128, 128])

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "quant_algo" in raw or "producer" in raw

    def parameters(self, module: str) -> dict[str, Any] | None:
        own = lookup(self._layers, module)
        if own is not None:
            return {**self._common, **own}
        return None if self._layers or covered(self._skipped, module, glob_matches) else dict(self._common)


class ModelOpt(Layout):
    """Whichever kind recognises the tensors."""

    name = "modelopt"
    codec_aliases: ClassVar[dict[str, str]] = {"mxfp8": "mxfp8_e4m3", "fp8": "fp8_e4m3"}
    producers = ("modelopt",)
    holds = Holds(
        ("int4", "int8", "nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_e4m3"),
        "matrices and stacks; int4 with an even number of outputs; a global scale multiplies",
        levels=("multiply",),
    )
    config_reader = ModelOptConfig
    input_scales = True
    required = ("weight",)
    optional: ClassVar[tuple[str, ...]] = (
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_double_scale",
        "weight_scale_zeros",
        *LOW_RANK,
        *LOW_RANK_OF_QUANTIZER,
    )
    parts: ClassVar[dict[str, str]] = {
        "weight": "codes",
        "weight_scale": "scales",
        "weight_scale_2": "global_scale",
        "weight_scale_inv": "scales",
        "weight_double_scale": "nested_absmax",
        "weight_scale_zeros": "nested_offset",
        **{suffix: f"lora_{suffix[-1]}" for suffix in (*LOW_RANK, *LOW_RANK_OF_QUANTIZER)},
    }
    harmless: ClassVar[dict[str, str]] = {
        "input_scale": "scale of the activations",
        "output_scale": "scale of the outputs",
        "k_scale": "scale of the key cache",
        "v_scale": "scale of the value cache",
        "k_proj.k_scale": "scale of the key cache",
        "v_proj.v_scale": "scale of the value cache",
    }

    def matches(self, suffixes: Collection[str]) -> bool:
        return "weight" in suffixes and ("weight_scale" in suffixes or "weight_scale_inv" in suffixes)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        if is_w4afp8(config):
            raise UnsupportedError(
                f"[modelopt] {name}: quant_algo MIXED_PRECISION names no format of this layer; it has them in "
                "quantized_layers, or the file is W4AFP8, whose tensors are weight and weight_scale_inv"
            )
        plain = _plain_names(tensors, name)
        return self._kind(plain, config, name).describe(plain, config, name)

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        plain = _plain_names(tensors, name)
        q = self._kind(plain, config, name).unpack(plain, config, name)
        if plain.keys() == tensors.keys():
            return q
        details = {**q.details, "low_rank_names": "quantizer"}
        return QTensor(q.format, q.shape, q.parts, origin=q.origin, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        if any(kind.holds(fmt) for kind in KINDS):
            return ""
        return "ModelOpt holds nvfp4 (global scale multiplies), mxfp4, mxfp8_e4m3, int4, int8, fp8_e4m3 and nf4_modelopt (nested)"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        kind = self._holder(q)
        if "group_index" in q.parts:
            raise cannot_hold("modelopt", q, "ModelOpt has no group index (act-order)")
        out = kind.pack(q, q.details if q.origin == "modelopt" else {})
        if q.details.get("low_rank_names") == "quantizer":
            out = {f"weight_quantizer._{s}" if s in LOW_RANK else s: t for s, t in out.items()}
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        kind = self._holder(q)
        algo = kind.algos[0]
        if algo == "W8A8" or (algo == "FP8" and q.format.grouping == "row"):
            algo = "W8A8_SQ_PER_CHANNEL" if algo == "W8A8" else "FP8_PER_CHANNEL_PER_TOKEN"
        elif algo == "FP8" and q.format.group_rows != -1:
            algo = "FP8_PB_WO"
        out: dict[str, Any] = {"quant_algo": algo, "group_size": q.format.group_size}
        return {**out, "shape": list(q.shape)} if isinstance(kind, NF4QTensor) else out

    @staticmethod
    def _kind(tensors: Mapping[str, HasHeader], config: Config, name: str) -> Kind:
        kind = next((c for c in KINDS if c.recognises(tensors)), None)
        have = ", ".join(f"{s} {t.dtype.name}" for s, t in sorted(tensors.items()))
        if kind is None:
            raise LayoutError(
                f"[modelopt] {name or 'weight'}: {have or 'no tensors'} is no kind of weight that ModelOpt stores; stored: "
                + ", ".join(dict.fromkeys(c.algos[0] for c in KINDS))
            )
        reject_extra("modelopt", tensors, kind.suffixes, name, kind.algos[0])
        algo = str(config.get("quant_algo") or "").upper()
        if algo == "NVFP4_SVD" and not isinstance(kind, NVFP4SVD):
            require("modelopt", tensors, LOW_RANK[0], name)
        if algo and algo != "MIXED_PRECISION" and not any(a in algo for a in kind.algos):
            raise LayoutError(
                f"[modelopt] {name or 'weight'}: quant_algo {algo}, but the tensors ({have}) are {kind.algos[0]}; wanted "
                f"one of {', '.join(kind.algos)}"
            )
        return kind

    def _holder(self, q: QTensor) -> Kind:
        self.check_fits(q)
        return next(kind for kind in KINDS if kind.holds(q.format))

    def write_config(self, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
        """`quantization_config` flat, and the nested form that ModelOpt's export writes beside it:
        `quant_algo` for all modules, `quantized_layers` when they differ.
        """
        keys = ("quant_algo", "group_size")
        base = most_common(packed, keys)
        excluded = dense_modules(dense)
        nested: dict[str, Any] = {**base, "kv_cache_quant_algo": None, "exclude_modules": excluded}
        if differing(packed, base, keys):
            nested = {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": None,
                "quantized_layers": {p.name: {k: p.params[k] for k in keys} for p in packed},
            }
        producer = {"name": "halfbyte", "version": "0.1.0"}
        flat = {k: v for k, v in nested.items() if k != "exclude_modules"}
        flat |= {"quant_method": "modelopt", "ignore": excluded, "producer": producer}
        return ConfigFiles(
            {"quantization_config": flat}, {"hf_quant_config.json": {"producer": producer, "quantization": nested}}
        )


def _plain_names(tensors: Mapping[str, T], name: str) -> dict[str, T]:
    """The tensors under the names without `weight_quantizer._`; LayoutError where one is there
    twice.
    """
    for spelled, plain in LOW_RANK_OF_QUANTIZER.items():
        if spelled in tensors and plain in tensors:
            raise LayoutError(
                f"[modelopt] {label(name, spelled)} and {label(name, plain)} are one factor under two names; wanted one of them"
            )
    return {LOW_RANK_OF_QUANTIZER.get(suffix, suffix): tensor for suffix, tensor in tensors.items()}
