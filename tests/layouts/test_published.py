"""Checkpoints as people publish them: each written here tensor by tensor, by its producer's rules,
with the values it means.

The writers below share no code with the layouts: a code is turned into a number by a table or a
formula of this file. More than 800 lines: the writers serve one list of checkpoints, which every
test here goes through.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.checkpoints.quant_config import read_config
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.edges import LossyError
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedError
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.claims import UNKNOWN
from support.every_command import run

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAME = "model.layers.0.mlp.down_proj"


def write(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None, **beside: Any) -> Path:
    """A folder with these tensors, `config` under quantization_config, and further files or keys of
    config.json.
    """
    path.mkdir(exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path / "model.safetensors")
    keys = {k: v for k, v in beside.items() if not k.endswith("_json")}
    (path / "config.json").write_text(json.dumps({**({"quantization_config": config} if config else {}), **keys}))
    for name, content in beside.items():
        if name.endswith("_json"):
            (path / f"{name.removesuffix('_json')}.json").write_text(json.dumps(content))
    return path


def values(path: Path, name: str = NAME) -> np.ndarray:
    with hb.open(path) as checkpoint:
        weight = checkpoint[name]
        assert isinstance(weight, hb.QTensor)
        assert [str(entry) for entry in checkpoint.ledger().problems] == []  # every tensor and every key is accounted for
        return weight.dequantize("float64")


def severities(path: Path) -> set[str]:
    """Severities of the findings, notes left out."""
    with hb.open(path) as checkpoint:
        return {f.code for f in checkpoint.findings() if f.severity != "note"}


def finite_e4m3(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0x38), codes).view(E4M3)


def spread(scales: np.ndarray, tile: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of each element."""
    return np.repeat(np.repeat(scales, tile[0], 0), tile[1], 1)[: shape[0], : shape[1]]


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes [n, k] -> bytes [n, k/2], the even element in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------
# FP8 of many kinds


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, E8M0])
def test_case_71_block_scales_of_each_dtype_are_their_numbers(suffix: str, dtype: Any, tmp_path: Path):
    rng = np.random.default_rng(0)
    weight = finite_e4m3(rng, 192, 256)
    exponents = rng.integers(-20, -2, (2, 2))
    scales = np.ldexp(1.0, exponents).astype(np.float32).astype(dtype)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = write(tmp_path / "m", {f"{NAME}.weight": weight, f"{NAME}.{suffix}": scales}, config)
    want = weight.astype(np.float64) * spread(np.ldexp(1.0, exponents), (128, 128), (192, 256))
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_case_70_one_scale_for_a_whole_matrix(suffix: str, shape: tuple[int, ...], tmp_path: Path):
    weight = finite_e4m3(np.random.default_rng(1), 192, 256)
    scale = np.full(shape, 0.0123, ml_dtypes.bfloat16)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.{suffix}": scale, f"{NAME}.activation_scale": scale.astype(np.float32)}
    config = {
        "quant_method": "fp8",
        "weight_block_size": None,
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["lm_head", "model.vision_tower"],
    }
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder), weight.astype(np.float64) * float(scale.reshape(-1)[0]))
    assert severities(folder) == set()


def test_static_fp8_with_ignored_layers_and_cache_scales(tmp_path: Path):
    weight = finite_e4m3(np.random.default_rng(2), 64, 96)
    tensors = {
        f"{NAME}.weight": weight, f"{NAME}.weight_scale": np.float32([0.25]), f"{NAME}.input_scale": np.float32([1.5]),
        "model.layers.0.self_attn.kv_scale": np.float32([0.1]), "lm_head.weight": np.ones((8, 96), np.float16),
    }  # fmt: skip
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder), weight.astype(np.float64) * 0.25)
    with hb.open(folder) as checkpoint:
        assert checkpoint.info("lm_head.weight").kind == "dense"
        assert not [f for f in checkpoint.findings() if f.code in ("dense-but-listed", "layout-disagrees")]


def test_case_72_deepseek_v4_experts_are_fp4_pairs_and_the_rest_is_fp8(tmp_path: Path):
    rng = np.random.default_rng(3)
    n, k = 64, 128
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(100, 140, (n, k // 32))
    expert, attention = "layers.0.ffn.experts.3.w1", "layers.0.attn.wq_a"
    fp8, tile = finite_e4m3(rng, n, k), np.uint8([[130]])
    tensors = {
        f"{expert}.weight": nibbles(codes).view(np.int8), f"{expert}.scale": exponents.astype(np.uint8).view(E8M0),
        f"{attention}.weight": fp8, f"{attention}.scale": tile.view(E8M0),
        "layers.0.attn_norm.weight": np.ones(k, np.float32), "layers.0.hc.scale": np.ones(3, np.float32),
    }  # fmt: skip
    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder, expert), E2M1[codes] * np.ldexp(1.0, np.repeat(exponents, 32, 1) - 127))
    np.testing.assert_array_equal(values(folder, attention), fp8.astype(np.float64) * 8)
    with hb.open(folder) as checkpoint:
        assert checkpoint.info("layers.0.hc.scale").kind == "dense"
        assert str(checkpoint.info(expert).format) == "mxfp4:g32"


def test_a_dense_weight_beside_a_tensor_called_scale_stays_dense(tmp_path: Path):
    folder = write(tmp_path / "m", {"norm.weight": np.ones((4, 4), np.float32), "norm.scale": np.ones(4, np.float32)}, None)
    with hb.open(folder) as checkpoint:
        assert [checkpoint.info(key).kind for key in checkpoint] == ["dense", "dense"]


@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
        {"quant_method": "w4afp8", "ignored_layers": ["lm_head"], "group_size": 128, "moe_activation_scheme": "static"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None},
        {"quant_algo": "MIXED_PRECISION", "producer": {"name": "trtllm"}},
    ],
    ids=["fp8", "w4afp8", "modelopt", "quant_algo alone"],
)
def test_case_69_w4afp8_has_int4_pairs_and_block_fp8(config: dict, scale_dtype: type, tmp_path: Path):
    """Two's complement nibbles, the even input in the low one, times a scale of 128 inputs: as
    vLLM's loader turns them into biased codes by exclusive-or with 0x88.
    """
    rng = np.random.default_rng(4)
    expert, attention = "model.layers.3.mlp.experts.7.down_proj", "model.layers.3.self_attn.o_proj"
    codes = rng.integers(-8, 8, (64, 256))
    scale = rng.uniform(0.01, 0.02, (64, 2)).astype(scale_dtype)
    fp8, tiles = finite_e4m3(rng, 128, 256), np.float32([[0.5, 2.0]])
    tensors = {
        f"{expert}.weight": nibbles(codes & 15).view(np.int8), f"{expert}.weight_scale_inv": scale,
        f"{expert}.input_scale": np.ones(1, ml_dtypes.bfloat16), "lm_head.weight": np.ones((8, 256), np.float16),
        f"{attention}.weight": fp8, f"{attention}.weight_scale_inv": tiles,
    }  # fmt: skip
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder, expert), codes * np.repeat(scale.astype(np.float64), 128, 1))
    np.testing.assert_array_equal(values(folder, attention), fp8.astype(np.float64) * np.repeat(tiles, 128, 1))
    assert severities(folder) == set()
    with hb.open(folder) as checkpoint:
        assert str(checkpoint.info(expert).format) == "int4:g128"
        layout, weight = LAYOUTS["fp8"], checkpoint[expert]
        back = layout.pack(weight, config)
        assert all(np.array_equal(back[s], tensors[f"{expert}.{s}"]) for s in ("weight", "weight_scale_inv"))
    hb.convert(folder, tmp_path / "own", to="halfbyte")
    with hb.open(tmp_path / "own") as own:
        assert np.array_equal(own[expert].dequantize("float64"), values(folder, expert))


def test_case_69_w4afp8_scales_of_another_width_are_refused(tmp_path: Path):
    tensors = {f"{NAME}.weight": np.zeros((64, 128), np.int8), f"{NAME}.weight_scale_inv": np.ones((64, 4), np.float32)}
    with pytest.raises(HalfbyteError, match=r"down_proj.weight_scale_inv .*\[64, 4\].*\[64, 2\].*W4AFP8"):
        values(write(tmp_path / "m", tensors, {"quant_method": "w4afp8"}))
    assert values(write(tmp_path / "m2", tensors, {"quant_method": "w4afp8", "group_size": 64})).shape == (64, 256)


def test_case_73_a_scale_in_another_shard_is_found_and_missing_it_is_named(tmp_path: Path):
    weight = finite_e4m3(np.random.default_rng(5), 128, 128)
    folder = write(tmp_path / "m", {f"{NAME}.weight": weight}, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_file({f"{NAME}.weight_scale_inv": np.float32([[0.5]])}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    np.testing.assert_array_equal(values(folder), weight.astype(np.float64) * 0.5)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="00002"):
        values(folder)


# -------------------------------------------------------------------------------------------- GPTQ
# words of other producers


def gptq_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [k, n] -> int32 words [k·bits/32, n]: a bit stream down each column, lowest bit first."""
    k, n = codes.shape
    words = np.zeros((k * bits // 32, n), np.uint32)
    for column in range(n):
        stream = sum(int(codes[row, column]) << (row * bits) for row in range(k))
        for i in range(words.shape[0]):
            words[i, column] = stream >> (32 * i) & 0xFFFFFFFF
    return words.view(np.int32)


def gptq_module(rng: np.random.Generator, bits: int, group: int, minus_one: bool, n: int = 32, k: int = 64):
    """(tensors, values) of a GPTQ module with zero points in 1 … 2^bits − 1."""
    codes = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(1, 1 << bits, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype(np.float16)
    tensors = {
        "qweight": gptq_words(codes, bits), "qzeros": np.ascontiguousarray(gptq_words((zeros - minus_one).T, bits).T),
        "scales": scales, "g_idx": (np.arange(k) // group).astype(np.int32),
    }  # fmt: skip
    spread_out = np.repeat(zeros, group, 0), np.repeat(scales.astype(np.float64), group, 0)
    return tensors, ((codes - spread_out[0]) * spread_out[1]).T


@pytest.mark.parametrize(
    ("packing", "minus_one"),
    [("auto_round:auto_gptq", True), ("auto_gptq", True), ("auto_round", False), ("auto_round:exllamav2", False),
     ("auto_round:gptqmodel", False)],
)  # fmt: skip
def test_case_61_autorounds_packing_word_decides_the_zero_points(packing: str, minus_one: bool, tmp_path: Path):
    rng = np.random.default_rng(6)
    usual, want = gptq_module(rng, 4, 32, minus_one)
    wide, want_wide = gptq_module(rng, 8, 64, minus_one)
    other = "model.layers.1.mlp.down_proj"
    tensors = {f"{NAME}.{s}": t for s, t in usual.items()} | {f"{other}.{s}": t for s, t in wide.items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((32, 64), np.float16)
    config = {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False, "data_type": "int",
        "iters": 200, "autoround_version": "0.9.1", "block_name_to_quantize": "model.layers",
        "extra_config": {other: {"bits": 8, "group_size": 64}, ".*self_attn.*": {"bits": 16, "data_type": "float"}},
    }  # fmt: skip
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder), want)
    np.testing.assert_array_equal(values(folder, other), want_wide)
    assert severities(folder) == set()
    with hb.open(folder) as checkpoint:
        assert checkpoint.format == "auto-round"


AUTOROUNDS_WORDS = {
    "autoround_version": "0.16.1", "provider": "auto-round", "data_type": "int", "act_bits": 16, "act_data_type": "int",
    "act_group_size": 32, "act_sym": True, "act_dynamic": True, "amp": True, "batch_size": 8, "enable_minmax_tuning": False,
    "enable_norm_bias_tuning": True, "enable_quanted_input": False, "gradient_accumulate_steps": 2, "iters": 200, "lr": 0.005,
    "low_gpu_mem_usage": True, "minmax_lr": 0.005, "nsamples": 128, "quant_block_list": ["model.layers"],
    "scale_dtype": "torch.float16", "seqlen": 2048, "supported_types": ["Linear"], "static_attention_dtype": "fp8",
    "static_kv_dtype": "fp8", "static_attention_granularity": "head", "static_kv_granularity": "head", "super_bits": 6,
    "super_group_size": 8, "to_quant_block_names": "model.layers", "block_name_to_quantize": "model.layers",
}  # fmt: skip
"""What AutoRound 0.16 writes into a config beside the words of the format (its
SerializedCompressorConfig, and its exporters).
"""
OWN_WORDS = {
    "gptq": {"desc_act": False, "sym": True, "true_sequential": False, "damp_percent": 0.01, "lm_head": False},
    "awq": {"zero_point": True, "version": "gemm", "sym": False, "modules_to_not_convert": ["lm_head"]},
    "auto-round": {"packing_format": "auto_round:auto_gptq", "sym": True},
}


@pytest.mark.parametrize("method", OWN_WORDS)
def test_autorounds_words_in_the_configs_that_it_writes(method: str):
    words = {**AUTOROUNDS_WORDS, **OWN_WORDS[method], "bits": 4, "group_size": 32}
    reader = read_config({"quant_method": method, **words}, "config.json")
    assert [use for use in reader.key_uses() if use.use == UNKNOWN] == []
    told = reader.parameters(NAME)
    assert told is not None
    assert (told["bits"], told["group_size"]) == (4, 32)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_of_other_than_integers_are_refused(method: str):
    words = {"quant_method": method, "bits": 4, "group_size": 32, "data_type": "mx_fp", **OWN_WORDS[method]}
    with pytest.raises(UnsupportedError, match="data_type is 'mx_fp'"):
        read_config(words, "config.json")


def test_case_61_autorounds_awq_words(tmp_path: Path):
    rng = np.random.default_rng(7)
    n, k, group = 64, 128, 32
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype(np.float16)

    def words(fields: np.ndarray) -> np.ndarray:
        out = np.zeros((fields.shape[0], n // 8), np.uint32)
        for position, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out |= fields[:, column::8].astype(np.uint32) << np.uint32(4 * position)
        return out.view(np.int32)

    tensors = {f"{NAME}.qweight": words(codes), f"{NAME}.qzeros": words(zeros), f"{NAME}.scales": scales}
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": group, "sym": False}
    want = ((codes - np.repeat(zeros, group, 0)) * np.repeat(scales.astype(np.float64), group, 0)).T
    np.testing.assert_array_equal(values(write(tmp_path / "m", tensors, config)), want)


def test_case_61_autorounds_float_formats(tmp_path: Path):
    """MXFP4, MXFP8 and NVFP4 in compressed-tensors' names, FP8 with one scale, a scale a row and
    tiles; a layer of 16 bits stays dense.
    """
    rng = np.random.default_rng(31)
    n, k = 128, 256
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    powers = np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 1) - 127)
    fp8, blocks = finite_e4m3(rng, n, k), np.abs(finite_e4m3(rng, n, k // 16).astype(np.float32)).astype(E4M3)
    row, tile = rng.uniform(0.01, 0.02, n).astype(np.float32), rng.uniform(0.01, 0.02, (1, 2)).astype(np.float32)
    compressed = {"packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32, "data_type": "mx_fp"}
    scaled = {"bits": 8, "data_type": "fp", "fmt": "e4m3", "activation_scheme": "dynamic", "act_group_size": 0}
    cases: list[tuple[dict, dict, np.ndarray]] = [
        (compressed, {"weight_packed": nibbles(codes), "weight_scale": exponents}, E2M1[codes] * powers),
        (
            {**compressed, "data_type": "mx_fp_rceil"}, {"weight_packed": nibbles(codes), "weight_scale": exponents},
            E2M1[codes] * powers,
        ),
        (
            {**compressed, "data_type": "mx_fp_rceil", "bits": 8}, {"weight": fp8, "weight_scale": exponents},
            fp8.astype(np.float64) * powers,
        ),
        ({**compressed, "bits": 8}, {"weight": fp8, "weight_scale": exponents}, fp8.astype(np.float64) * powers),
        (
            {**compressed, "data_type": "nv_fp", "group_size": 16, "act_data_type": "nv_fp4_with_static_gs"},
            {"weight_packed": nibbles(codes), "weight_scale": blocks, "weight_global_scale": np.float32([4]),
             "input_global_scale": np.float32([9])},
            E2M1[codes] * np.repeat(blocks.astype(np.float64), 16, 1) / 4,
        ),
        ({**scaled, "group_size": 0}, {"weight": fp8, "weight_scale": np.float32([0.25])}, fp8.astype(np.float64) / 4),
        (
            {**scaled, "group_size": -1, "packing_format": "auto_round:fp8_static"},
            {"weight": fp8, "weight_scale": row, "input_scale": np.float32([1])},
            fp8.astype(np.float64) * row.astype(np.float64)[:, None],
        ),
        (
            {**scaled, "group_size": [128, 128], "weight_block_size": [128, 128], "packing_format": "auto_round:fp8"},
            {"weight": fp8, "weight_scale_inv": tile},
            fp8.astype(np.float64) * np.repeat(tile.astype(np.float64), 128, 1),
        ),
    ]  # fmt: skip
    for number, (words, parts, want) in enumerate(cases):
        config = {
            "quant_method": "auto-round",
            "sym": True,
            "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
            **words,
        }
        tensors = {**{f"{NAME}.{s}": t for s, t in parts.items()}, "lm_head.weight": np.ones((8, k), np.float32)}
        folder = write(tmp_path / str(number), tensors, config)
        np.testing.assert_array_equal(values(folder), want)
        assert severities(folder) == set()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"packing_format": "auto_round:fp8_static"}, "data_type 'int' of 4 bits .* layout fp8"), ({"data_type": "mx_fp"}, "mx_fp"),
     ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "packing_format 'auto_round:llm_compressor_nvfp4_e5m3'"),
     ({"packing_format": "auto_round:fp8", "data_type": "fp", "bits": 8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
     ({"packing_format": "auto_round:fp8", "data_type": "fp", "bits": 8, "group_size": -2}, "group_size is -2"),
     ({"extra_config": {"model.layers.0.mlp.down_proj": {"group_size": 0}}}, "down_proj.group_size is 0"),
     *(({"packing_format": "auto_round:llm_compressor", "data_type": kind, "bits": bits}, f"{kind}.* of {bits} bits")
       for kind, bits in (("mx_fp", 9), ("mx_fp_rceil", 9), ("mx_fp_rceil", 5), ("mx_fp", 3), ("nv_fp", 8), ("nv_fp", 5))),
     ({"packing_format": "auto_round:fp8", "data_type": "fp", "bits": 9}, "of 9 bits"),
     ({"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config rotates the inputs")],
)  # fmt: skip
def test_case_61_what_autoround_writes_besides_is_refused_by_name(change: dict, says: str, tmp_path: Path):
    tensors, _ = gptq_module(np.random.default_rng(8), 4, 32, True)
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, **change}
    with pytest.raises(HalfbyteError, match=says):
        values(write(tmp_path / "m", {f"{NAME}.{s}": t for s, t in tensors.items()}, config))


# ----------------------------------------------------------------------------------------------------------
# Quark's exports


def test_case_74_quarks_mxfp4_with_exclude_globs_and_fp8_layers(tmp_path: Path):
    rng = np.random.default_rng(9)
    n, k = 64, 128
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    attention = "model.layers.0.self_attn.q_proj"
    fp8, scale = finite_e4m3(rng, n, k), np.float32(0.03)
    tensors = {
        f"{NAME}.weight": nibbles(codes), f"{NAME}.weight_scale": exponents, f"{attention}.weight": fp8,
        f"{attention}.weight_scale": scale, f"{attention}.input_scale": np.float32(2),
        "lm_head.weight": np.ones((8, k), np.float16), "model.layers.0.mlp.gate.weight": np.ones((8, k), np.float16),
    }  # fmt: skip
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None, "ch_axis": -1}
    config = {
        "quant_method": "quark", "quant_mode": "eager_mode", "exclude": ["lm_head", "*.mlp.gate"], "algo_config": None,
        "global_quant_config": {"weight": fp4, "input_tensors": {"dtype": "fp4", "is_dynamic": True}, "output_tensors": None},
        "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True}}},
        "layer_type_quant_config": {}, "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder), E2M1[codes] * np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 1) - 127))
    np.testing.assert_array_equal(values(folder, attention), fp8.astype(np.float64) * float(scale))
    assert severities(folder) == set()


@pytest.mark.parametrize("shape", [(), (1,), (64,), (64, 1)])
def test_quarks_int8_under_one_scale_or_one_a_row(shape: tuple[int, ...], tmp_path: Path):
    rng = np.random.default_rng(25)
    weight, scale = rng.integers(-128, 128, (64, 96), dtype=np.int8), rng.random(shape).astype(np.float32)
    scheme = {"dtype": "int8", "qscheme": "per_channel" if 64 in shape else "per_tensor", "symmetric": True, "ch_axis": 0}
    config = {"quant_method": "quark", "global_quant_config": {"weight": scheme}, "exclude": []}
    folder = write(tmp_path / "m", {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scale}, config)
    np.testing.assert_array_equal(values(folder), weight.astype(np.float64) * scale.astype(np.float64).reshape(-1, 1))


def quark_words(fields: np.ndarray, order: str) -> np.ndarray:
    """Eight 4-bit fields of a row a word, as one long integer."""
    first = (0, 2, 4, 6, 1, 3, 5, 7) if order == "reorder" else range(8)
    rows, count = fields.shape
    out = np.zeros((rows, count // 8), np.int64)
    for r, w in np.ndindex(*out.shape):
        out[r, w] = sum((int(fields[r, 8 * w + of]) & 15) << 4 * i for i, of in enumerate(first))
    return out.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize(("word", "group"), [("int4", 32), ("uint4", 32), ("int4", None), ("uint4", None)])
def test_case_74_quarks_4_bit_integers(word: str, group: int | None, order: str, tmp_path: Path):
    rng = np.random.default_rng(41)
    n, k = 24, 64
    low = -8 if word == "int4" else 0
    q, z = rng.integers(low, low + 16, (n, k)), np.zeros((n, 2 if group else 1), int)
    z += 0 if word == "int4" else rng.integers(0, 16, z.shape)
    scale = rng.random(z.shape).astype(np.float32)
    weight = {
        "dtype": word, "qscheme": "per_group" if group else "per_channel", "group_size": group, "ch_axis": -1 if group else 0,
        "symmetric": word == "int4", "zero_point_type": "int32", "scale_type": "float", "enable_buffer_reuse": False,
    }  # fmt: skip
    if group:
        own = {"weight": quark_words(q.T, order), "weight_scale": scale.T, "weight_zero_point": quark_words(z.T, order)}
    else:
        own = {"weight": quark_words(q, order), "weight_scale": scale[:, 0], "weight_zero_point": quark_words(z.T, order)[0]}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": [],
              "export": {"pack_method": order, "weight_format": "real_quantized"}}  # fmt: skip
    tensors = {f"{NAME}.{s}": t for s, t in own.items()}
    folder = write(tmp_path / "m", tensors, config)
    want = (q - np.repeat(z, k // z.shape[1], 1)) * np.repeat(scale.astype(np.float64), k // z.shape[1], 1)
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()
    with hb.open(folder) as ckpt:
        again = LAYOUTS["quark"].pack(ckpt[NAME], {})
        assert {s: t.tobytes() for s, t in again.items()} == {s: np.ascontiguousarray(t).tobytes() for s, t in own.items()}
    for key in ("pack_method", "symmetric"):
        lost = json.loads(json.dumps(config))
        del (lost["export"] if key == "pack_method" else lost["global_quant_config"]["weight"])[key]
        with pytest.raises(CheckpointError, match=key):
            values(write(tmp_path / key, tensors, lost))
    if word == "int4":
        tensors[f"{NAME}.weight_zero_point"] = tensors[f"{NAME}.weight_zero_point"] | 1
        with pytest.raises(CheckpointError, match="weight_zero_point is not 0, and the config says symmetric"):
            values(write(tmp_path / "z", tensors, config))


@pytest.mark.parametrize("word", ["fp6_e2m3", "fp6_e3m2"])
def test_case_74_quarks_mxfp6_is_a_stream_of_6_bits(word: str, tmp_path: Path):
    rng = np.random.default_rng(42)
    n, k = 8, 64
    codes, exponents = rng.integers(0, 64, (n, k)), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    stream = [sum(int(c) << 6 * i for i, c in enumerate(row)).to_bytes(6 * k // 8, "little") for row in codes]
    packed = np.frombuffer(b"".join(stream), np.uint8).reshape(n, -1)
    weight = {"dtype": word, "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None, "ch_axis": -1}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": {"pack_method": "reorder"}}
    folder = write(tmp_path / "m", {f"{NAME}.weight": packed, f"{NAME}.weight_scale": exponents}, config)
    mantissa, bias = (3, 1) if word == "fp6_e2m3" else (2, 3)
    e, m = codes >> mantissa & (1 << 5 - mantissa) - 1, codes & (1 << mantissa) - 1
    size = np.where(e > 0, np.ldexp(1 + m / 2**mantissa, e - bias), np.ldexp(m / 2**mantissa, 1 - bias))
    want = np.where(codes & 32, -size, size) * np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 1) - 127)
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ({"dtype": "int3"}, "weights of int3"),
        ({"dtype": "mx", "mx_element_dtype": "fp6_e3m2"}, "weights of fp6_e3m2"),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e5m3"}, "fp4 whose scale_format is 'e5m3'"),
        ({"dtype": "uint4", "qscheme": "per_group", "symmetric": True}, "uint4 whose symmetric is True"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block"}, "fp8_e4m3 whose qscheme is 'per_block'"),
        ([{"dtype": "fp8_e4m3"}, {"dtype": "int4"}], "quantizes weights to fp8_e4m3, then int4"),
    ],
)
def test_case_74_what_quark_writes_besides_is_refused_by_name(weight, says: str, tmp_path: Path):
    tensors = {f"{NAME}.weight": np.zeros((4, 96), np.uint8), f"{NAME}.weight_scale": np.zeros((4, 6), np.uint8)}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    with pytest.raises(UnsupportedError, match=f"Quark's global_quant_config .*{says}.* recognised and not read"):
        values(write(tmp_path / "m", tensors, config))


def svd_module(rng: np.random.Generator, n: int, k: int, rank: int = 8) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As ModelOpt's SVDQuant export names them; the weight in float64, where all of these sums are
    exact.
    """
    codes, scales = rng.integers(0, 16, (n, k)), finite_e4m3(rng, n, k // 16)
    a, b = ((rng.integers(-8, 8, s) / 64).astype(ml_dtypes.bfloat16) for s in ((rank, k), (n, rank)))
    tensors = {
        "weight": nibbles(codes),
        "weight_scale": scales,
        "weight_scale_2": np.float32(2.0**-12),
        "svdquant_lora_a": a,
        "svdquant_lora_b": b,
    }
    residual = E2M1[codes] * np.repeat(scales.astype(np.float64), 16, 1) * 2.0**-12
    return tensors, residual + b.astype(np.float64) @ a.astype(np.float64)


SVD = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4_SVD",
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "has_zero_point": False,
            "pre_quant_scale": True,
            "targets": ["Linear"],
            "lora_rank": 8,
        }
    },
}


def test_case_68_a_low_rank_part_is_part_of_the_weight(tmp_path: Path):
    tensors, want = svd_module(np.random.default_rng(3), 32, 64)
    folder = write(tmp_path / "m", {f"{NAME}.{s}": t for s, t in tensors.items()}, SVD)
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()
    layout = LAYOUTS["modelopt"]
    packed = layout.pack(layout.unpack({s: np.asarray(t) for s, t in tensors.items()}, {}), {})
    assert {s: t.tobytes() for s, t in packed.items()} == {s: np.asarray(t).tobytes() for s, t in tensors.items()}
    with hb.open(folder) as checkpoint:
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
        np.testing.assert_array_equal(hb.open(tmp_path / "dense")[f"{NAME}.weight"], want.astype(np.float32))
        with pytest.raises(LossyError, match="is more than one code under its scales"):
            convert_checkpoint(checkpoint, tmp_path / "mlx", "mlx:affine8:g32")
        convert_checkpoint(checkpoint, tmp_path / "mlx", "mlx:affine8:g32", lossy=True)
    got = hb.open(tmp_path / "mlx")[NAME].dequantize("float64")
    assert np.abs(got - want).max() <= np.abs(want).max() / 200
    for lost, config in (("svdquant_lora_a", SVD), ("svdquant_lora_b", SVD), ("", SVD | {"quant_algo": "NVFP4"})):
        rest = {f"{NAME}.{s}": t for s, t in tensors.items() if s != lost}
        with pytest.raises(CheckpointError, match=lost or "quant_algo NVFP4, but"):
            values(write(tmp_path / "n", rest, config))
    rest = {f"{NAME}.{s}": t for s, t in tensors.items() if "lora" not in s}
    with pytest.raises(CheckpointError, match="svdquant_lora_a is missing"):
        values(write(tmp_path / "n", rest, SVD))


def test_case_68_the_low_rank_part_under_the_names_of_the_quantizer(tmp_path: Path):
    """What ModelOpt 0.47 exports: the same values, and the names come back."""
    tensors, want = svd_module(np.random.default_rng(3), 32, 64)
    spelled = {f"weight_quantizer._{s}" if "lora" in s else s: np.asarray(t) for s, t in tensors.items()}
    folder = write(tmp_path / "m", {f"{NAME}.{s}": t for s, t in spelled.items()}, SVD)
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()
    packed = LAYOUTS["modelopt"].pack(LAYOUTS["modelopt"].unpack(spelled, {}), {})
    assert {s: t.tobytes() for s, t in packed.items()} == {s: t.tobytes() for s, t in spelled.items()}
    both = {**spelled, "svdquant_lora_a": tensors["svdquant_lora_a"]}
    with pytest.raises(CheckpointError, match="svdquant_lora_a are one factor under two names"):
        values(write(tmp_path / "n", {f"{NAME}.{s}": t for s, t in both.items()}, SVD))


def test_case_68_load_model_adds_the_low_rank_part(tmp_path: Path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.tiny_models import agree, dense_model, ids, logits

    rng, model, stored = np.random.default_rng(5), dense_model("llama", num_hidden_layers=1), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            tensors, want = svd_module(rng, *module.weight.shape)
            scale = rng.uniform(0.5, 2, module.in_features).astype(np.float32)
            stored |= {f"{name}.{s}": t for s, t in tensors.items()} | {f"{name}.pre_quant_scale": scale}
            module.weight.data = torch.from_numpy((want * scale).astype(np.float32))
    rest = {n: p.numpy() for n, p in model.state_dict().items() if f"{n}_scale" not in stored}
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    folder = write(tmp_path / "m", stored | rest, SVD | {"ignore": ["lm_head"]}, **json.loads(json.dumps(own)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a backend that decodes NVFP4 multiplies
        ours, _ = hb.load_model(folder, dtype="float32")
        assert agree(logits(ours, ids()), logits(model, ids()))
    ours.save_pretrained(tmp_path / "again")
    again, _ = hb.load_model(tmp_path / "again", dtype="float32")
    assert agree(logits(again, ids()), logits(model, ids()))


# -------------------------------------------------------------------------------------------------
# GPTQ files met in the wild


def gptq_folder(path: Path, modules: dict[str, dict[str, np.ndarray]], config: dict[str, Any], **beside: Any) -> Path:
    tensors = {f"{name}.{s}": t for name, parts in modules.items() for s, t in parts.items()}
    return write(path, tensors, config, **beside)


@pytest.mark.parametrize("listed", [["mlp.down_proj"], [["mlp.up_proj"], ["mlp.down_proj"]]])
def test_case_58_a_list_of_modules_that_leaves_out_packed_ones(listed: list, tmp_path: Path):
    rng = np.random.default_rng(10)
    attention = "model.layers.0.self_attn.q_proj"
    (mlp, want), (q, want_q) = gptq_module(rng, 4, 32, True), gptq_module(rng, 4, 32, True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": listed}
    folder = gptq_folder(tmp_path / "m", {NAME: mlp, attention: q}, config)
    np.testing.assert_array_equal(values(folder), want)
    np.testing.assert_array_equal(values(folder, attention), want_q)
    assert severities(folder) == {"packed-but-skipped"}
    with hb.open(folder) as checkpoint:
        (finding,) = (f for f in checkpoint.findings() if f.code == "packed-but-skipped")
        assert finding.key == attention


def test_case_58_a_list_that_leaves_out_dense_modules_is_right(tmp_path: Path):
    (q, want) = gptq_module(np.random.default_rng(11), 4, 32, True)
    attention = "model.layers.0.self_attn.q_proj"
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    dense = {"weight": np.ones((32, 64), np.float16)}
    folder = gptq_folder(tmp_path / "m", {attention: q, NAME: dense}, config)
    np.testing.assert_array_equal(values(folder, attention), want)
    assert severities(folder) == set()


def test_case_59_three_bits_in_one_group_with_an_index_of_zeros(tmp_path: Path):
    tensors, want = gptq_module(np.random.default_rng(12), 3, 64, True)
    assert not tensors["g_idx"].any()
    side = {"bits": 3, "group_size": -1, "desc_act": True, "sym": False, "damp_percent": 0.01, "true_sequential": True}
    folder = gptq_folder(tmp_path / "m", {NAME: tensors}, {}, quantize_config_json=side)
    np.testing.assert_array_equal(values(folder), want)
    assert severities(folder) == set()


def test_case_60_empty_zero_points_are_the_middle_code(tmp_path: Path):
    rng = np.random.default_rng(13)
    attention, n, k = "model.layers.0.self_attn.q_proj", 32, 64
    mlp, want = gptq_module(rng, 4, 32, False)
    codes, scales = rng.integers(0, 16, (k, n)), rng.standard_normal((k // 32, n)).astype(np.float16)
    symmetric = {
        "qweight": gptq_words(codes, 4), "qzeros": np.zeros(0, np.int32), "scales": scales,
        "g_idx": (np.arange(k) // 32).astype(np.int32),
    }  # fmt: skip
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2"}
    folder = gptq_folder(tmp_path / "m", {NAME: mlp, attention: symmetric}, config)
    np.testing.assert_array_equal(values(folder), want)
    np.testing.assert_array_equal(values(folder, attention), ((codes - 8) * np.repeat(scales.astype(np.float64), 32, 0)).T)
    with hb.open(folder) as checkpoint:
        raw = checkpoint.raw(attention)
        back = checkpoint.reading(attention).layout.pack(checkpoint[attention], checkpoint.reading(attention).params)
        assert {s: (a.dtype, a.tobytes()) for s, a in back.items()} == {s: (a.dtype, a.tobytes()) for s, a in raw.items()}


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_narrow_and_wide_pack_dtypes_are_the_same_bits(dtype: Any, tmp_path: Path):
    tensors, want = gptq_module(np.random.default_rng(14), 4, 32, True)
    for suffix, axis in (("qweight", 0), ("qzeros", 1)):
        along = np.ascontiguousarray(np.swapaxes(tensors[suffix], axis, 1))
        words = along.view(dtype)
        tensors[suffix] = np.ascontiguousarray(np.swapaxes(words, axis, 1))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "pack_dtype": np.dtype(dtype).name}
    folder = gptq_folder(tmp_path / "m", {NAME: tensors}, config)
    np.testing.assert_array_equal(values(folder), want)


# -------------------------------------------------------------------------------------------------------
# compressed-tensors


def ct_words(codes: np.ndarray, bits: int = 4) -> np.ndarray:
    """Codes [n, k] -> int32 [n, k·bits/32], eight of four bits to a word."""
    return np.ascontiguousarray(gptq_words(codes.T, bits).T)


def ct_module(rng: np.random.Generator, n: int = 32, k: int = 64, group: int = 32):
    codes = rng.integers(0, 16, (n, k))
    scales = rng.standard_normal((n, k // group)).astype(ml_dtypes.bfloat16)
    tensors = {"weight_packed": ct_words(codes), "weight_scale": scales, "weight_shape": np.array([n, k], np.int64)}
    return tensors, (codes - 8) * np.repeat(scales.astype(np.float64), group, 1)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def test_case_62_mixed_fp8_channels_and_nvfp4(tmp_path: Path):
    rng = np.random.default_rng(15)
    n, k, attention = 32, 64, "model.layers.0.self_attn.q_proj"
    fp8, rows = finite_e4m3(rng, n, k), rng.standard_normal((n, 1)).astype(ml_dtypes.bfloat16)
    codes, scales = rng.integers(0, 16, (n, k)), finite_e4m3(rng, n, k // 16)
    tensors = {
        f"{attention}.weight": fp8, f"{attention}.weight_scale": rows, f"{NAME}.weight_packed": nibbles(codes),
        f"{NAME}.weight_scale": scales, f"{NAME}.weight_global_scale": np.float32([512]),
        f"{NAME}.input_global_scale": np.float32([7]),
    }  # fmt: skip
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*_proj"], "format": "float-quantized", "input_activations": {"dynamic": True},
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}},
        "group_1": {"targets": ["re:.*mlp.*"], "format": "nvfp4-pack-quantized",
                    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}},
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder, attention), fp8.astype(np.float64) * rows.astype(np.float64))
    np.testing.assert_array_equal(values(folder), E2M1[codes] * np.repeat(scales.astype(np.float64), 16, 1) / 512)
    assert severities(folder) == set()


@pytest.mark.parametrize("place", ["compression_config", "compression_config.quantization_config", "quantization_config"])
def test_case_63_the_first_generations_config(place: str, tmp_path: Path):
    tensors, want = ct_module(np.random.default_rng(16))
    config = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}, "ignore": []}
    if place == "compression_config":
        keys = {"compression_config": {"quant_method": "sparseml", **config}}
    elif place == "quantization_config":
        keys = {"quantization_config": {"quant_method": "sparseml", **config}}
    else:
        keys = {"compression_config": {"quantization_config": {"quant_method": "sparseml", **config}, "sparsity_config": {}}}
    folder = write(tmp_path / "m", {f"{NAME}.{s}": t for s, t in tensors.items()}, None, **keys)
    np.testing.assert_array_equal(values(folder), want)
    with hb.open(folder) as checkpoint:
        assert checkpoint.format == "compressed-tensors"
    assert severities(folder) == set()


@pytest.mark.parametrize("separator", [".weight_packed", "_packed"])
def test_case_64_a_stack_of_experts_in_both_spellings(separator: str, tmp_path: Path):
    rng = np.random.default_rng(17)
    modules = [ct_module(rng) for _ in range(3)]
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    suffix = separator.removesuffix("packed")
    tensors = {
        f"{stack}{suffix}packed": np.stack([m[0]["weight_packed"] for m in modules]),
        f"{stack}{suffix}scale": np.stack([m[0]["weight_scale"] for m in modules]),
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "ignore": [],
    }
    folder = write(tmp_path / "m", tensors, config)
    np.testing.assert_array_equal(values(folder, stack), np.stack([m[1] for m in modules]))


def test_case_65_ignore_entries_of_a_wrapped_linear(tmp_path: Path):
    tensors, want = ct_module(np.random.default_rng(18))
    vision = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": [f"{vision}.linear", "lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    }
    for dense in (f"{vision}.linear.weight", f"{vision}.weight"):
        parts = {f"{NAME}.{s}": t for s, t in tensors.items()} | {dense: np.ones((32, 64), np.float16)}
        folder = write(tmp_path / "m", parts, config)
        np.testing.assert_array_equal(values(folder), want)
        assert severities(folder) == set(), dense


def transform_config(kind: str, *uses: tuple[str, str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """(target, location, further keys) of each use in one group `v`, as compressed-tensors dumps
    it.
    """
    apply = [{"targets": [t], "location": at, "inverse": False, "ignore": [], **also} for t, at, also in uses]
    group = {"type": kind, "apply": apply, "randomize": False, "requires_grad": False, "head_dim": None, "precision": "float32"}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "transform_config": {"config_groups": {"v": {**group, **more}}},
    }  # fmt: skip


def sylvester(size: int) -> np.ndarray:
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)], np.float32)


def test_transforms_of_inputs_and_outputs_are_part_of_the_weight(tmp_path: Path):
    """y = ((x V) Wᵀ) U: the weight that the model computes with is Uᵀ W Vᵀ, here of exact numbers."""
    rng = np.random.default_rng(19)
    tensors, w = ct_module(rng)
    n, k = w.shape
    own = {f"{NAME}.{s}": t for s, t in tensors.items()}
    signs = np.where(rng.random((16, 16)) < 0.5, -1, 1).astype(np.float32)
    wide = np.kron(np.eye(k // 16), signs / 4)
    matrix = (rng.integers(-8, 8, (k, k)) / 8).astype(np.float32)
    order = rng.permutation(16)
    cases = [
        ("random-hadamard", "input", {}, {"head_dim": 16}, signs, w @ wide.T),
        ("hadamard", "input", {"inverse": True}, {"head_dim": 16}, signs, w @ wide),
        ("hadamard", "output", {}, {"head_dim": 16}, signs, np.kron(np.eye(n // 16), signs / 4).T @ w),
        ("random-matrix", "input", {}, {}, matrix, w @ matrix.T.astype(np.float64)),
        ("random-matrix", "input", {"inverse": True}, {}, matrix, w @ matrix.T.astype(np.float64)),
        ("hadamard", "input", {}, {"head_dim": 16, "randomize": True}, signs,
         w @ np.kron(np.eye(k // 16), signs[order][:, order] / 4).T),
    ]  # fmt: skip
    for i, (kind, at, also, more, stored, want) in enumerate(cases):
        config = transform_config(kind, ("re:.*down_proj$", at, also), ("re:.*down_proj$", f"weight_{at}", {}), **more)
        beside = {f"{NAME}.v_{at}.weight": stored} | ({f"{NAME}.v_{at}.perm": order} if "randomize" in more else {})
        folder = write(tmp_path / f"m{i}", own | beside, config)
        np.testing.assert_array_equal(values(folder), want, err_msg=f"{kind} {at} {also}")
        assert severities(folder) == set()
        with hb.open(folder) as checkpoint:
            assert list(checkpoint) == [NAME]
            dequantize_checkpoint(checkpoint, tmp_path / f"d{i}", dtype="float32")
            convert_checkpoint(checkpoint, tmp_path / f"o{i}", "halfbyte")
        np.testing.assert_array_equal(hb.open(tmp_path / f"d{i}")[f"{NAME}.weight"], want.astype(np.float32))
        np.testing.assert_array_equal(values(tmp_path / f"o{i}"), want)
        with pytest.raises(CheckpointError, match=rf"{NAME}.v_{at}.weight, .* is missing|no order|wanted \["):
            values(write(tmp_path / "lost", own | {k: v for k, v in beside.items() if not k.endswith("weight")}, config))


def test_a_transform_of_an_odd_power_of_two_is_rounded_once(tmp_path: Path):
    tensors, w = ct_module(np.random.default_rng(20))
    k = w.shape[1]
    own = {f"{NAME}.{s}": t for s, t in tensors.items()} | {f"{NAME}.v_input.weight": sylvester(32)}
    config = transform_config("hadamard", ("Linear", "input", {}), head_dim=32)
    folder = write(tmp_path / "m", own, config)
    total = w @ np.kron(np.eye(k // 32), sylvester(32)).T  # exact in float64
    with hb.open(folder) as checkpoint:
        got = checkpoint[NAME].dequantize("float32")
    want = (total.astype(np.longdouble) / np.sqrt(np.longdouble(32))).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_transforms_that_are_not_read_are_named(tmp_path: Path):
    tensors, _ = ct_module(np.random.default_rng(21))
    own = {f"{NAME}.{s}": t for s, t in tensors.items()} | {f"{NAME}.v_input.weight": sylvester(64)}
    heads = "model.layers.0.self_attn"
    rotated = [("re:.*self_attn$", "q_attn", {}), ("re:.*self_attn$", "k_cache", {})]
    keys = transform_config("hadamard", ("Linear", "input", {}), *rotated, head_dim=64)
    both = {f"{heads}.v_q_attn.weight": sylvester(64), f"{heads}.v_k_cache.weight": sylvester(64)}
    with hb.open(write(tmp_path / "m", own | both, keys)) as checkpoint:
        assert checkpoint.ledger().problems == ()
    refused = [
        (transform_config("hadamard", rotated[0]), {}, "that do not cancel"),
        (transform_config("random-matrix", *rotated), {}, "that do not cancel"),
        (transform_config("fourier", ("Linear", "input", {})), {}, "is of type 'fourier'; read: hadamard"),
        (transform_config("hadamard", ("Linear", "middle", {})), {}, "applies at 'middle'"),
        (transform_config("hadamard", ("Linear", "input", {}), ("Linear", "input", {})), {}, "read: a matrix, one a side"),
        (transform_config("hadamard", ("Linear", "output", {}), head_dim=16),
         {f"{NAME}.v_output.weight": sylvester(16), f"{NAME}.bias": np.ones(32, np.float16)}, "layers without a bias"),
        (transform_config("hadamard", ("Linear", "input", {})), {f"{NAME}.v_input.weight": 2 * sylvester(64)}, "besides 1"),
    ]  # fmt: skip
    for config, change, says in refused:
        with pytest.raises((UnsupportedError, CheckpointError), match=says):
            values(write(tmp_path / "n", own | change, config))
    dense = transform_config("hadamard", ("re:.*q_proj$", "input", {}))
    extra = {f"{heads}.q_proj.weight": np.ones((64, 64), np.float16)}
    with hb.open(write(tmp_path / "dense", own | extra, dense)) as checkpoint:
        said = "; ".join(str(e) for e in checkpoint.ledger().problems)
    assert f"{heads}.q_proj.weight: unknown (config.json multiplies its inputs" in said
    assert f"{NAME}.v_input.weight: unknown (a transform that config.json does not apply" in said


def test_load_model_applies_transforms_that_modules_share(tmp_path: Path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.tiny_models import agree, dense_model, ids, logits

    model, stored, layout = dense_model("llama", num_hidden_layers=1), {}, LAYOUTS["compressed-tensors"]
    targets = ("q_proj", "k_proj", "down_proj", "up_proj")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            q = hb.quantize(module.weight.detach().numpy(), "int4:g32")
            stored |= {f"{name}.{s}": t for s, t in layout.pack(q, layout.config(q)).items()}
            want, last = q.dequantize("float64"), name.rpartition(".")[2]
            if last in targets[:3]:
                want = want @ (sylvester(want.shape[1]) / np.sqrt(want.shape[1])).T
                if last != "k_proj":  # which shares q_proj's
                    stored[f"{name}.v_input.weight"] = sylvester(want.shape[1])
            if last == "up_proj":
                want = (sylvester(128) / np.sqrt(128)).T @ want
                stored[f"{name}.v_output.weight"] = sylvester(128)
            module.weight.data = torch.from_numpy(want.astype(np.float32))
    rest = {n: p.numpy() for n, p in model.state_dict().items() if f"{n}_packed" not in stored}
    own = json.loads(json.dumps({k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}))
    weights = {**INT4, "group_size": 32}
    uses = [(f"re:.*{t}$", "output" if t == "up_proj" else "input", {}) for t in targets]
    config = transform_config("hadamard", *uses) | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    folder = write(tmp_path / "m", stored | rest, config, **own)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no backend decodes the transforms
        ours, _ = hb.load_model(folder, dtype="float32")
        assert agree(logits(ours, ids()), logits(model, ids()))
    ours.save_pretrained(tmp_path / "again")
    assert agree(logits(hb.load_model(tmp_path / "again", dtype="float32")[0], ids()), logits(model, ids()))


# -----------------------------------------------------------------------------------------------------------------
# ModelOpt


def nvfp4_module(rng: np.random.Generator, n: int = 32, k: int = 64):
    codes, scales = rng.integers(0, 16, (n, k)), finite_e4m3(rng, n, k // 16)
    tensors = {"weight": nibbles(codes), "weight_scale": scales, "weight_scale_2": np.float32(0.125)}
    return tensors, E2M1[codes] * np.repeat(scales.astype(np.float64), 16, 1) / 8


def test_case_66_weight_only_nvfp4_with_its_config_in_the_sidecar(tmp_path: Path):
    rng = np.random.default_rng(21)
    (down, want), (head, want_head) = nvfp4_module(rng), nvfp4_module(rng)
    tensors = {f"{NAME}.{s}": t for s, t in down.items()} | {f"lm_head.{s}": t for s, t in head.items()}
    side = {
        "producer": {"name": "modelopt", "version": "0.40"},
        "quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []},
    }
    folder = write(tmp_path / "m", tensors, None, hf_quant_config_json=side)
    np.testing.assert_array_equal(values(folder), want)
    np.testing.assert_array_equal(values(folder, "lm_head"), want_head)
    with hb.open(folder) as checkpoint:
        assert checkpoint.findings() == []


def test_case_67_mixed_precision_as_the_exporter_writes_it(tmp_path: Path):
    rng = np.random.default_rng(22)
    n, k, path = 32, 64, "model.layers.0.self_attn"
    (down, want), (head, want_head) = nvfp4_module(rng), nvfp4_module(rng)
    fp8, mx, exponents = finite_e4m3(rng, n, k), finite_e4m3(rng, n, k), rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    tensors = {f"{NAME}.{s}": t for s, t in down.items()} | {f"lm_head.{s}": t for s, t in head.items()}
    tensors |= {
        f"{path}.q_proj.weight": fp8, f"{path}.q_proj.weight_scale": np.float32(0.5), f"{path}.q_proj.input_scale": np.float32(2),
        f"{path}.o_proj.weight": mx, f"{path}.o_proj.weight_scale": exponents, f"{path}.k_proj.k_scale": np.float32(1),
        f"{path}.v_proj.v_scale": np.float32(1), f"{path}.v_proj.weight": np.ones((n, k), ml_dtypes.bfloat16),
        f"{path}.k_proj.weight": fp8, f"{path}.k_proj.weight_scale": np.float32(0.25),
    }  # fmt: skip
    layers = {
        NAME: {"quant_algo": "NVFP4", "group_size": 16}, f"{path}.o_proj": {"quant_algo": "MXFP8", "group_size": 32},
        f"{path}.q_proj": {"quant_algo": "FP8"}, f"{path}.k_proj": {"quant_algo": "FP8"},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }  # fmt: skip
    mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    side = {"producer": {"name": "modelopt", "version": "0.40"}, "quantization": mixed}
    config = {**mixed, "quant_method": "modelopt", "producer": {"name": "modelopt"}}
    for folder in (
        write(tmp_path / "both", tensors, config, hf_quant_config_json=side),
        write(tmp_path / "side", tensors, None, hf_quant_config_json=side),
    ):
        np.testing.assert_array_equal(values(folder), want)
        np.testing.assert_array_equal(values(folder, "lm_head"), want_head)
        np.testing.assert_array_equal(values(folder, f"{path}.q_proj"), fp8.astype(np.float64) / 2)
        np.testing.assert_array_equal(values(folder, f"{path}.k_proj"), fp8.astype(np.float64) / 4)
        scale = np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 1) - 127)
        np.testing.assert_array_equal(values(folder, f"{path}.o_proj"), mx.astype(np.float64) * scale)
        assert severities(folder) == set()


def test_offsets_of_modelopts_affine_caches_are_refused_by_name_and_let_through_when_allowed(tmp_path: Path):
    """FP8_AFFINE_KV_CFG and NVFP4_AFFINE_KV_CFG write `k_bias` and `v_bias` beside the scales of
    the caches: no weight depends on them, and nothing but their name says so.
    """
    codes = finite_e4m3(np.random.default_rng(23), 32, 64)
    path = "model.layers.0.self_attn.k_proj"
    tensors = {f"{path}.weight": codes, f"{path}.weight_scale": np.float32(0.5), f"{path}.k_scale": np.float32(1),
               f"{path}.k_bias": np.ones(64, np.float32)}  # fmt: skip
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    folder = write(tmp_path / "in", tensors, config)
    lines = {"inspect": 1, "dequantize": 2, "convert": 2, "verify": 1, "quantize": 2}
    rest: dict[str, list[Any]] = {
        "inspect": [],
        "dequantize": [tmp_path / "dense"],
        "convert": [tmp_path / "own", "--to", "halfbyte"],
        "verify": [folder],
        "quantize": [tmp_path / "again", "--to", "halfbyte:int8:g32", "--from-packed"],
    }
    for command, status in lines.items():
        code, said = run(command, folder, *rest[command])
        assert (code, f"{path}.k_bias" in said.replace("\n", "")) == (status, True), (command, said)
    code, said = run("dequantize", folder, tmp_path / "dense", "--dtype", "float32", "--allow-unknown", "*.k_bias")
    assert code == 0, said
    with hb.open(tmp_path / "dense") as dense:
        assert np.array_equal(dense[f"{path}.weight"], codes.astype(np.float32) / 2)


def test_case_69_mixed_precision_without_a_table_over_other_tensors_is_refused(tmp_path: Path):
    tensors, _ = nvfp4_module(np.random.default_rng(23))
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    with pytest.raises(UnsupportedError, match=r"MIXED_PRECISION names no format .*quantized_layers.*W4AFP8"):
        values(write(tmp_path / "m", {f"{NAME}.{s}": t for s, t in tensors.items()}, config))


# ---------------------------------------------------------------------------------------------------------
# fused MXFP4 names


def test_case_75_vllms_fused_expert_names(tmp_path: Path):
    rng = np.random.default_rng(24)
    e, n, k, path = 2, 8, 64, "model.layers.0.mlp.experts"
    tensors, want = {}, {}
    for word in ("w13", "w2"):
        codes, exponents = rng.integers(0, 16, (e, n, k)), rng.integers(100, 140, (e, n, k // 32)).astype(np.uint8)
        tensors[f"{path}.{word}_weight"] = np.stack([nibbles(c) for c in codes])
        tensors[f"{path}.{word}_weight_scale"] = exponents
        want[word] = E2M1[codes] * np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 2) - 127)
    folder = write(tmp_path / "m", tensors, {"quant_method": "mxfp4"})
    for word, wanted in want.items():
        np.testing.assert_array_equal(values(folder, f"{path}.{word}"), wanted)
    assert severities(folder) == set()


def test_case_75_fused_expert_names_load_and_dequantize_to_the_models_own(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from support.tiny_models import agree, dense_model, ids, logits

    rng, model = np.random.default_rng(6), dense_model("qwen3_moe", num_hidden_layers=1)
    rest = {n: p.numpy() for n, p in model.state_dict().items() if ".experts." not in n}
    path = "model.layers.0.mlp.experts"
    for word, leaf in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        parameter = getattr(model.get_submodule(path), leaf)
        e, n, k = parameter.shape
        codes, exponents = rng.integers(0, 16, (e, n, k)), rng.integers(122, 126, (e, n, k // 32)).astype(np.uint8)
        rest[f"{path}.{word}_weight"] = np.stack([nibbles(c) for c in codes])
        rest[f"{path}.{word}_weight_scale"] = exponents
        want = E2M1[codes] * np.ldexp(1.0, np.repeat(exponents.astype(int), 32, 2) - 127)
        parameter.data = torch.from_numpy(want.astype(np.float32))
    own = json.loads(json.dumps({k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}))
    folder = write(tmp_path / "m", rest, {"quant_method": "mxfp4"}, **own)
    ours, _ = hb.load_model(folder, dtype="float32")
    assert agree(logits(ours, ids()), logits(model, ids()))
    dequantize_checkpoint(hb.open(folder), tmp_path / "dense", dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    assert torch.equal(logits(again, ids()), logits(model, ids()))


# -------------------------------------------------------------------------------------------
# configs as the exporters write them

WHOLE: dict[str, dict[str, Any]] = {
    "GPTQModel": {
        "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq",
        "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "sym": True, "dynamic": None,
        "meta": {"quantizer": ["gptqmodel:7.1.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
                 "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None,
                 "act_group_aware": True, "fallback": {"strategy": "rtn", "smooth": None}},
    },
    "AutoGPTQ": {
        "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
        "checkpoint_format": "gptq",
    },
    "transformers' GPTQ": {
        "quant_method": "gptq", "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.1, "dataset": "c4", "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
        "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None, "pad_token_id": None,
        "modules_in_block_to_quantize": None, "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "AutoAWQ": {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm",
                "modules_to_not_convert": None},
    "transformers' AWQ": {
        "quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm", "backend": "autoawq",
        "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None, "modules_to_fuse": None,
        "modules_to_not_convert": ["visual"],
    },
    "llm-compressor": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.12.2",
        "sparsity_config": {}, "transform_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "output_activations": None,
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
                                  "group_size": None, "observer": None, "observer_kwargs": {}, "actorder": None},
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128, "strategy": "group",
                        "block_structure": None, "dynamic": False, "actorder": "static", "observer": "minmax",
                        "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}}},
    },
    "ModelOpt": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"},
        "ignore": ["lm_head"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"targets": ["Linear"],
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
    },
    "MLX": {"group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
            "lm_head": False},
    "DeepSeek-V3": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "AutoRound": {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128, "sym": True,
        "data_type": "int", "autoround_version": "0.9.1", "block_name_to_quantize": "model.layers", "iters": 200, "nsamples": 512,
        "seqlen": 2048, "enable_quanted_input": True, "low_gpu_mem_usage": True, "act_bits": 16,
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float", "act_bits": 16}},
    },
    "bitsandbytes": {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False,
    },
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "torchao": {
        "quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {
            "group_size": None, "set_inductor_config": True}}}, "quant_type_kwargs": {}, "modules_to_not_convert": None,
        "include_input_output_embeddings": False, "untie_embedding_weights": False,
    },
    "HQQ": {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"offload_meta": False,
        "scale_quant_params": None, "zero_quant_params": None, "weight_quant_params": {"nbits": 4, "group_size": 64,
        "axis": 1, "channel_wise": True, "optimize": True, "round_zero": False, "view_as_float": False}}},
}  # fmt: skip


@pytest.mark.parametrize("producer", WHOLE)
def test_every_key_of_an_exporters_config_is_accounted_for_and_a_further_one_is_not(producer: str):
    reader = read_config(WHOLE[producer], "config.json")
    assert [use for use in reader.key_uses() if use.use == UNKNOWN] == []
    assert len(reader.key_uses()) >= len(WHOLE[producer])
    twisted = read_config({**WHOLE[producer], "rotation": "hadamard"}, "config.json")
    assert [use.path for use in twisted.key_uses() if use.use == UNKNOWN] == ["rotation"]
