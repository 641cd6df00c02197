"""llama.cpp's logits after the last token of `IDS`, of a float32 file of every family: the numbers
that test_families.py compares with.

    python tests/support/llama_cpp_logits.py [FAMILY ...]      records them again (needs llama-cpp-python)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from support.gguf_families import FAMILIES, IDS, family_model, write_family

PATH = Path(__file__).parents[1] / "data" / "gguf_logits.json"


def recorded() -> dict[str, list[float]]:
    """Family -> the logits."""
    data: dict[str, list[float]] = json.loads(PATH.read_text("utf-8"))
    return data


def llama_cpp_logits(path: Path) -> np.ndarray:
    """float64 [tokens, vocabulary], keys and values in float32."""
    import llama_cpp

    options: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "flash_attn": False, "type_k": 0, "type_v": 0, "verbose": False}
    model = llama_cpp.Llama(str(path), logits_all=True, **options)
    model.eval(IDS)
    return np.array(model.scores[: len(IDS)], np.float64)


def main() -> None:
    data = recorded() if PATH.exists() else {}
    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                last = llama_cpp_logits(write_family(Path(folder) / "m.gguf", name, family_model(name)))[-1]
            except (ValueError, RuntimeError) as error:
                print(name, error)
                continue
        data[name] = [float(f"{v:.7g}") for v in last]
        rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(data[k])}" for k in sorted(data))
        PATH.write_text(f"{{\n{rows}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
