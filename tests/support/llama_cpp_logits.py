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

from support.gguf_families import FAMILIES, IDS, architecture, family_model, write_family

FLASH = {"minimax-m3:blocks"}
"""Cases for which `llama_cpp_logits` needs `flash`."""
PATH = Path(__file__).parents[1] / "data" / "gguf_logits.json"


def recorded() -> dict[str, list[float]]:
    """Family -> the logits."""
    data: dict[str, list[float]] = json.loads(PATH.read_text("utf-8"))
    return data


def llama_cpp_logits(path: Path, task: str = "text", flash: bool = False) -> np.ndarray:
    """float64 [tokens, vocabulary], keys and values in float32; of an encoder [tokens, width].

    flash  with the attention in one operation, without which llama.cpp leaves out MiniMax M3's
           choice of blocks
    """
    import llama_cpp

    options: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "flash_attn": flash, "type_k": 0, "type_v": 0, "verbose": False}
    model = llama_cpp.Llama(str(path), logits_all=True, embedding=task == "encoder", pooling_type=0, **options)
    if task != "text":
        return _two_sides(llama_cpp, model, task)
    model.eval(IDS)
    return np.array(model.scores[: len(IDS)], np.float64)


def _two_sides(llama_cpp: Any, model: Any, task: str) -> np.ndarray:
    """The vectors of an encoder, or the logits of a decoder that reads the same tokens."""
    context = model._ctx.ctx
    batch = llama_cpp.llama_batch_init(len(IDS), 0, 1)
    batch.n_tokens = len(IDS)
    for i, token in enumerate(IDS):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert llama_cpp.llama_encode(context, batch) == 0
    if task == "encoder":
        width, row = model.n_embd(), llama_cpp.llama_get_embeddings_ith
    else:
        assert llama_cpp.llama_decode(context, batch) == 0
        width, row = model.n_vocab(), llama_cpp.llama_get_logits_ith
    return np.array([np.ctypeslib.as_array(row(context, i), (width,)) for i in range(len(IDS))], np.float64)


def main() -> None:
    data = recorded() if PATH.exists() else {}
    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = write_family(Path(folder) / "m.gguf", name, family_model(name))
                last = llama_cpp_logits(path, architecture(name).task, name in FLASH)[-1]
            except (ValueError, RuntimeError) as error:
                print(name, error)
                continue
        data[name] = [float(f"{v:.7g}") for v in last]
        rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(data[k])}" for k in sorted(data))
        PATH.write_text(f"{{\n{rows}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
