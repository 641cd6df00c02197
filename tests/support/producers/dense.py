"""The dense models every producer starts from: python dense.py FOLDER writes FOLDER/ARCH, bfloat16,
each with a tokenizer.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

WIDE = "_wide"
"""What the folders end with whose matrices have 64 outputs and more, as the AWQ search wants."""
ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "mistral", "phi3", "mixtral", "qwen3_moe", "gpt_oss")


def main(folder: Path, of_one: Mapping[str, dict[str, Any]] | None = None, **changes: Any) -> None:
    """Writes the models, their configurations changed: `of_one` for one architecture, `changes` for
    all.
    """
    import torch
    from support.tiny_configs import dense_model
    from support.tiny_models import write_tiny
    from support.tiny_tokenizer import write_tokenizer

    own = {arch: {**changes, **(of_one or {}).get(arch, {})} for arch in ARCHITECTURES}
    for arch, changed in own.items():
        dense_model(arch, **changed).to(torch.bfloat16).save_pretrained(folder / arch)
        wide = {**changed, "num_key_value_heads": changed.get("num_attention_heads", 4)}
        dense_model(arch, **wide).to(torch.bfloat16).save_pretrained(folder / (arch + WIDE))
    # gpt-oss is published packed; mlx-lm and llama.cpp read that.
    write_tiny(folder / "gpt_oss_mxfp4", "gpt_oss", "gpt-oss", **own["gpt_oss"])
    for path in folder.glob("*/config.json"):
        write_tokenizer(path.parent)
        named = path.with_name("tokenizer_config.json")
        named.write_text(named.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))  # transformers 4's name
        config = json.loads(path.read_text())
        config["torch_dtype"] = "bfloat16"
        # As the published files say it; transformers 5 writes these under other names.
        if "rope_parameters" in config and "rope_theta" in config["rope_parameters"]:
            config["rope_theta"] = config["rope_parameters"]["rope_theta"]
            if config["rope_parameters"]["rope_type"] != "default":
                config["rope_scaling"] = {k: v for k, v in config["rope_parameters"].items() if k != "rope_theta"}
        if config["model_type"] == "gpt_oss":
            config["architectures"] = ["GptOssForCausalLM"]
        if config["model_type"] == "qwen3_moe":
            config["num_experts"] = config["num_local_experts"] = config.get("num_local_experts") or config["num_experts"]
        path.write_text(json.dumps(config, indent=1))


def calibration(count: int = 16, length: int = 48, seed: int = 3) -> Iterator[dict[str, Any]]:
    """Random texts of token ids."""
    import torch

    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(3, 96, (length,), generator=random)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def each(
    variants: dict[str, Callable[[Path, Path, str], None]],
    sources: dict[str, str] | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
) -> None:
    """Every variant of every architecture into OUT/ARCH-VARIANT; a line a checkpoint says what
    happened. Arguments of the command: DENSE OUT [WORD ...], words that names of checkpoints must
    hold one of. `sources` names another dense folder.
    """
    dense, out = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = sys.argv[3:]
    for variant, write in variants.items():
        for arch in architectures:
            name = f"{arch}-{variant}"
            if wanted and not any(word in name for word in wanted):
                continue
            try:
                write(dense / (sources or {}).get(arch, arch), out / name, arch)
                files = [*(out / name).rglob("*"), *out.glob(f"{name}.gguf")]
                size = sum(f.stat().st_size for f in files if f.is_file())
                print(json.dumps({"wrote": name, "bytes": size}), flush=True)
            except Exception as error:  # what a producer refuses is part of the log
                traceback.print_exc(limit=-6)
                shutil.rmtree(out / name, ignore_errors=True)
                print(json.dumps({"refused": name, "why": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
