"""Formats that are recognised and not read: how to recognise them, what they are, what to use
instead.

A checkpoint that matches an entry is refused by name: it is not a damaged file of a kind that is
read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..errors import UnsupportedError


class Recognised(NamedTuple):
    """One format that is not read.

    name      what people call it
    methods   values of the config's `quant_method` (lower case)
    suffixes  tensors that only it has, all of them beside one module
    what      what its bits are, in a sentence
    use       where to go instead
    formats   values of the config's `format`, `checkpoint_format` or `quant_algo` (lower case)
    """

    name: str
    methods: tuple[str, ...]
    suffixes: tuple[str, ...]
    what: str
    use: str
    formats: tuple[str, ...] = ()


RECOGNISED: tuple[Recognised, ...] = (
    Recognised(
        "EXL2", ("exl2",), ("q_weight", "q_scale", "q_groups"), "2- to 8-bit columns of mixed width in one matrix", "ExLlamaV2"
    ),
    Recognised("AQLM", ("aqlm",), ("codes", "codebooks", "scales"), "sums of vectors from learned codebooks", "the aqlm package"),
    Recognised(
        "QuIP#",
        ("quip", "quip_sharp", "quip#"),
        ("Qidxs", "SU", "SV"),
        "lattice codebooks under a Hadamard rotation",
        "quip-sharp",
    ),
    Recognised(
        "QTIP", ("qtip",), ("trellis", "SU", "SV"), "trellis-coded weights under a Hadamard rotation", "the authors' code"
    ),
    Recognised(
        "SpQR",
        ("spqr",),
        ("dense_weights", "row_offsets", "col_vals"),
        "3-bit codes with sparse outliers",
        "the spqr_quant package",
    ),
    Recognised(
        "VPTQ", ("vptq",), ("indices", "centroids.weight"), "vector quantization with learned centroids", "the vptq package"
    ),
    Recognised(
        "Sparse-Marlin (2:4)",
        (),
        ("B_24", "B_meta", "s"),
        "4-bit codes of a 2:4 sparse weight in the order of one kernel",
        "vLLM",
        ("marlin_24",),
    ),
    Recognised(
        "Marlin",
        ("marlin",),
        ("B", "s"),
        "4-bit codes in the order of one kernel",
        "the gptq file it was made from, or vLLM",
        ("marlin",),
    ),
    Recognised(
        "QQQ", ("qqq",), ("B", "s_channel", "s_group"), "4-bit weights for 8-bit activations in the order of one kernel", "vLLM"
    ),
    Recognised(
        "BitBLAS", ("bitblas",), (), "codes in an order BitBLAS chose for one GPU", "the gptq file it was made from", ("bitblas",)
    ),
    Recognised(
        "BitNet", ("bitnet",), (), "ternary weights, four to a byte, that want 8-bit activations", "transformers or bitnet.cpp"
    ),
    Recognised(
        "FBGEMM FP8", ("fbgemm_fp8",), (), "float8 rows that want dynamically quantized activations", "transformers or vLLM"
    ),
    Recognised("Quanto", ("quanto",), ("weight._data", "weight._scale"), "optimum-quanto's tensor subclasses", "optimum-quanto"),
    Recognised("EETQ", ("eetq",), ("weight_scales",), "int8 in the order of one CUTLASS kernel", "the EETQ package"),
    Recognised("HIGGS", ("higgs",), ("tables", "tables2"), "vector grids under a Hadamard rotation", "the flute package"),
    Recognised("FLUTE", ("flute",), ("tables", "tables2"), "look-up tables in the order of one kernel", "the flute package"),
    Recognised(
        "ParoQuant", ("paroquant", "paro"), ("theta", "pairs", "channel_scales"), "codes under pairwise rotations", "GPTQModel"
    ),
    Recognised(
        "SVDQuant (Nunchaku)",
        ("svdquant", "nunchaku"),
        ("proj_down", "proj_up", "wscales"),
        "4-bit codes beside a low-rank product, in the order of one kernel",
        "nunchaku",
    ),
    Recognised("SINQ", ("sinq",), (), "codes under two axes of scales", "the sinq package"),
    Recognised("FPQuant", ("fp_quant",), ("qweight", "hadamard_matrix"), "FP4 under a Hadamard rotation", "the fp_quant package"),
    Recognised("DeepSpeed FP", ("deepspeedfp",), (), "DeepSpeed's own float formats", "DeepSpeed"),
    Recognised(
        "SqueezeLLM", ("squeezellm",), ("lookup_table",), "a table of values a row, and sparse outliers", "the authors' code"
    ),
    Recognised(
        "GPTQModel's GGUF",
        ("gguf",),
        (),
        "blocks of a GGUF in safetensors",
        "GPTQModel, or the model as a .gguf file",
    ),
    Recognised(
        "GPTQModel's FP8",
        (),
        (),
        "float8 under scales of a config of its own",
        "GPTQModel, or llm-compressor's FP8",
        ("float8_e4m3fn", "float8_e5m2"),
    ),
    Recognised("OmniQuant", ("omniquant",), (), "GPTQ words under an own name", "a gptq config, if its words are GPTQ's"),
)
"""In the order they are tried: a format whose tensors are a subset of another's comes after it."""

FORMAT_KEYS = ("format", "checkpoint_format", "quant_algo")
"""Keys of a quantization config whose values name a format."""


def recognise(config: Mapping[str, Any], suffixes: Collection[str] = ()) -> Recognised | None:
    """The entry that a quantization config, or the tensors of one module, belong to; None when
    there is none.

    config    the quantization config; `quant_method` and `FORMAT_KEYS` are looked at
    suffixes  what follows the module's path in the names of its tensors
    """
    method = str(config.get("quant_method") or "").lower()
    formats = {str(config.get(key) or "").lower() for key in FORMAT_KEYS}
    for entry in RECOGNISED:
        if (method and method in entry.methods) or formats & set(entry.formats):
            return entry
    if method:
        return None
    return next((e for e in RECOGNISED if e.suffixes and all(s in suffixes for s in e.suffixes)), None)


def refuse_recognised(config: Mapping[str, Any], suffixes: Collection[str] = (), where: str = "") -> None:
    """Raise UnsupportedError, naming the format, when `recognise` finds one."""
    entry = recognise(config, suffixes)
    if entry is not None:
        raise UnsupportedError(
            f"[open] {where or 'the checkpoint'} is {entry.name}: {entry.what}. It is recognised and not read; use {entry.use}, "
            "or a checkpoint of the same model in a format that `halfbyte inspect` reads"
        )
