"""A quantization config of each producer, and what it gives some modules."""

from __future__ import annotations

CONFIGS: dict[str, tuple[dict, dict[str, dict | None]]] = {
    # name: (config, module -> the parameters that must be among what is given, None for dense)
    "gptq dynamic": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "dynamic": {
            r"-:.*\.0\.mlp\.down_proj": {}, r"+:.*\.(?:18|19)\..*gate.*": {"bits": 8, "group_size": 64},
             r".*\.20\..*": {"bits": 3}}},
        {"model.layers.0.mlp.down_proj": None, "model.layers.10.mlp.down_proj": {"bits": 4, "group_size": 128},
         "model.layers.18.mlp.gate_proj": {"bits": 8, "group_size": 64, "checkpoint_format": "gptq"},
          "model.layers.20.mlp.up_proj": {"bits": 3}},
    ),
    "awq, autoawq's own file": (
        {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
        {"model.layers.0.mlp.down_proj": {"bits": 4, "group_size": 64, "version": "gemm"}},
    ),
    "compressed-tensors groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", r"re:.*mlp\.gate$"],
         "config_groups": {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}},
            "b": {"targets": [r"re:.*down_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
             "format": "int-quantized"},
            "c": {"targets": ["model.layers.1.mlp.up_proj"], "weights": {"num_bits": 2, "type": "int", "group_size": 32,
             "strategy": "group"}}}},
        {"lm_head": None, "model.layers.0.mlp.gate": None, "model.layers.0.mlp.gate_proj": {"num_bits": 4,
         "format": "pack-quantized"},
         "model.layers.0.mlp.down_proj": {"num_bits": 8, "format": "int-quantized"},
          "model.layers.1.mlp.up_proj": {"num_bits": 2, "group_size": 32},
         "model.layers.10.mlp.up_proj": {"num_bits": 4}, "language_model.model.layers.1.mlp.up_proj": {"num_bits": 2}},
    ),
    "compressed-tensors, an embedding of its own": (
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}, "b": {"targets": ["Embedding"],
         "weights": {"num_bits": 8}}}},
        {"model.embed_tokens": {"num_bits": 8}, "model.layers.0.mlp.up_proj": {"num_bits": 4}},
    ),
    "modelopt file": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16,
         "exclude_modules": ["lm_head", "*.mlp.gate", "a.1.*"]}},
        {"lm_head": None, "model.layers.0.mlp.gate": None, "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4",
         "group_size": 16}, "a.1.b": None,
         "a.10.b": {"quant_algo": "NVFP4"}},
    ),
    "modelopt config.json": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
         "config_groups": {"g": {"weights": {"group_size": 16}}}},
        {"lm_head": None, "model.layers.0.mlp.gate": {"quant_algo": "NVFP4", "group_size": 16}},
    ),
    "modelopt mixed": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
             "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"}}}},
        {"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
         "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"},
         "model.layers.10.mlp.up_proj": None},
    ),
    "mlx": (
        {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6}, "lm_head": False,
         "model.embed_tokens": {"bits": 8},
         "model.layers.1.mlp.up_proj": {"mode": "mxfp4"}, "model.layers.2.mlp.up_proj": True},
        {"model.layers.0.mlp.down_proj": {"bits": 6, "group_size": 32, "mode": "affine"},
         "model.layers.10.mlp.down_proj": {"bits": 4, "group_size": 64},
         "lm_head": None, "model.embed_tokens": {"bits": 8, "group_size": 64},
          "language_model.model.layers.0.mlp.down_proj": {"bits": 6},
         "model.layers.1.mlp.up_proj": {"mode": "mxfp4"}, "model.layers.2.mlp.up_proj": {"bits": 4}},
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
         "model.embed_tokens", "lm_head"]},
        {"model.layers.3.mlp.experts.down_proj": {}, "model.layers.3.mlp.router": None, "model.layers.3.self_attn.q_proj": None,
         "lm_head": None},
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "llm_int8_skip_modules": ["lm_head", "mlp.gate"]},
        {"lm_head": None, "model.layers.0.mlp.gate": None, "model.layers.0.mlp.gate_proj": {"bnb_4bit_quant_type": "nf4"}},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate"]},
        {"model.layers.0.mlp.gate": None, "model.layers.0.mlp.gate_proj": {"weight_block_size": [128, 128]}},
    ),
    "hqq": (
        {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"weight_quant_params": {"nbits": 4,
         "group_size": 64, "axis": 1}}},
        {"lm_head": None, "model.layers.0.mlp.up_proj": {"nbits": 4, "group_size": 64, "axis": 1}},
    ),
    "hqq by tag": (
        {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": 64}},
         "mlp.up_proj": {
            "weight_quant_params": {"nbits": 2, "group_size": 16}}}},
        {"model.layers.0.self_attn.q_proj": {"nbits": 8}, "model.layers.0.mlp.up_proj": {"nbits": 2, "group_size": 16},
         "model.layers.0.mlp.down_proj": None},
    ),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 1,
         "_data": {"group_size": 128}}},
         "modules_to_not_convert": ["lm_head"]},
        {"lm_head": None, "model.layers.0.mlp.up_proj": {"group_size": 128, "_type": "Int4WeightOnlyConfig"}},
    ),
    "torchao by name": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {
            "_default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 32}},
             r"re:.*\.q_proj": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}, "model.layers.1.mlp.up_proj": None,
             r"re:model\.layers\.1": None, r"re:.*\.k_proj\.weight": None,
             "model.layers.2.self_attn.q_proj": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 16}}}}}}},
        {"model.layers.0.self_attn.q_proj": {"group_size": 64}, "model.layers.0.mlp.up_proj": {"group_size": 32},
         "model.layers.1.mlp.up_proj": None, "model.layers.1.self_attn.v_proj": {"group_size": 32},
         "model.layers.1.self_attn.k_proj": None, "model.layers.2.self_attn.q_proj": {"group_size": 16},
         "model.layers.10.mlp.up_proj": {"group_size": 32}},
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 128, "extra_config": {
            "model.layers.0.mlp.up_proj": {"bits": 8}, ".*self_attn.*": {"bits": 16}, "lm_head": {"bits": 4, "group_size": 32},
            "^visual|down_proj$": {"bits": 2}}},
        {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2"},
         "model.layers.10.mlp.up_proj": {"bits": 4}, "model.layers.3.self_attn.q_proj": None,
         "lm_head": {"bits": 4, "group_size": 32}, "model.layers.3.mlp.down_proj": {"bits": 2}, "visual.x": {"bits": 2}},
    ),
    "quark": (
        {"quant_method": "quark", "exclude": ["lm_head", "*.mlp.gate", "re:.*router$"], "global_quant_config": {
            "weight": {"dtype": "fp4", "group_size": 32}}, "layer_quant_config": {
            "*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}, "*.o_proj": {"weight": None}}},
        {"lm_head": None, "model.layers.0.mlp.gate": None, "model.layers.0.mlp.gate_proj": {"dtype": "fp4"}, "a.router": None,
         "model.layers.0.self_attn.q_proj": {"dtype": "fp8_e4m3"}, "model.layers.0.mlp.o_proj": None},
    ),
    "exl3, bits on average": (
        {"quant_method": "exl3", "version": "1.4.6", "bits": 3.84, "head_bits": 6, "codebook": "mcg", "out_scales": "auto"},
        {"model.layers.0.mlp.up_proj": {"codebook": "mcg"}, "lm_head": {"codebook": "mcg"}},
    ),
    "onnx node": ({"K": 256, "N": 32, "bits": 4, "block_size": 32}, {"any": {"K": 256, "block_size": 32}}),
}  # fmt: skip

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, "zp_dtype": "torch.int8"}
TRANSFORM = {"type": "random-hadamard", "head_dim": 64, "apply": [{"targets": ["Linear"], "location": "input", "inverse": True}]}
MORE: dict[str, dict] = {
    "gptq of gptqmodel": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True, "lm_head": False,
     "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:4.0.0"]}, "dynamic": None},
    "awq of llm-awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemv_fast",
     "modules_to_not_convert": ["self_attn"]},
    "compressed-tensors of one group": {"quant_method": "compressed-tensors", "format": "pack-quantized",
     "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
     "sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {"v": TRANSFORM}}},
    "fp8 of rows": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
     "weight_block_size": None, "ignored_layers": ["lm_head"]},
    "w4afp8": {"quant_method": "w4afp8", "group_size": 128, "ignored_layers": ["lm_head"]},
    "modelopt of one group": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head", "*self_attn*"],
     "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128, "dynamic": False}}},
     "pre_quant_scale": True, "has_zero_point": False},
    "bitsandbytes of int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
     "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None, "bnb_4bit_use_double_quant": False},
    "quark of 4-bit words": {"quant_method": "quark", "exclude": [], "export": {"pack_method": "reorder",
     "weight_format": "real_quantized"}, "global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_group",
     "group_size": 32, "symmetric": False, "ch_axis": -1}, "input_tensors": None, "output_tensors": None}},
    "quark of two levels": {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4", "qscheme": "per_group",
     "group_size": 16}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}]}},
    "auto-round of floats": {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "group_size": -1,
     "sym": True, "data_type": "fp", "act_bits": 8, "iters": 200, "block_name_to_quantize": "model.layers"},
    "auto-round as awq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 128,
     "sym": False, "data_type": "int", "modules_to_not_convert": ["lm_head"]},
    "torchao with versions": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig",
     "_version": 2, "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "set_inductor_config": True}}}},
    "mlx of blocks": {"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"}},
    "metal-marlin's own": {"quant_method": "metal-marlin", "codec": "uint4", "bits": 4, "group_size": 32},
}  # fmt: skip
"""Configs with keys that those have not."""
