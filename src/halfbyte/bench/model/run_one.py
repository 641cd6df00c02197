"""Measure one contender on one model; `race` starts this module in a process of its own. Prints one
line of JSON.

    python -m halfbyte.bench.model.run_one exact|int8|llama.cpp FILE THREADS PROMPT DECODE \\
        wall|processor

`ready_s` starts when the libraries are imported. The prompt is timed in its second run: the first
allocates. Decoding is greedy in both libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...cli.generate import peak_memory
from ..cpu.limits import Clock
from ..cpu.linear import CLOCKS

Step = Callable[[list[int]], int]


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids spread over the vocabulary, the same for every contender."""
    return [2, *((1000 + 37 * i) % vocabulary for i in range(1, count))]


Made = tuple[str, Iterator[Step], int, float]
"""(what computes the model; a generator of its fresh states, each a function from new tokens to the
next one; the size of the vocabulary; seconds until the model was ready).
"""


def halfbyte(mode: str, path: str, threads: int, now: Clock) -> Made:
    """halfbyte's model, every packed product in the given mode of activations, by the engine that
    `generate` takes by itself: the native decoder where it computes the model, else transformers.
    """
    from ...backends.cpu import set_threads
    from ...checkpoints import open as open_checkpoint
    from ...generation.native_model import native_reader

    set_threads(threads)
    start = now()
    with open_checkpoint(path) as checkpoint:
        reader = native_reader(checkpoint, mode)
        if not isinstance(reader, str):
            model = reader.model()
            return "native", _states(model.session), model.head.shape[0], now() - start
    import torch

    from ...transformers import load_model
    from ...transformers.decode.session import DecodeSession
    from ...transformers.load import import_model_code

    torch.set_num_threads(threads)
    import_model_code(path)
    start = now()
    loaded, _ = load_model(path, activations=mode)
    vocabulary = loaded.config.get_text_config().vocab_size
    return "transformers", _states(lambda: DecodeSession(loaded)), vocabulary, now() - start


def _states(session: Callable[[], Any]) -> Iterator[Step]:
    while True:
        yield partial(_likeliest, session())


def _likeliest(text: Callable[[list[int]], Any], ids: list[int]) -> int:
    return int(np.argmax(np.asarray(text(ids))))


def llama(path: str, threads: int, context: int, now: Clock) -> Made:
    """llama.cpp's model."""
    import llama_cpp

    start = now()
    model = llama_cpp.Llama(path, n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    ready = now() - start

    def states() -> Iterator[Step]:
        while True:
            model.reset()

            def step(ids: list[int]) -> int:
                model.eval(ids)
                logits = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
                return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())

            yield step

    return "llama.cpp", states(), model.n_vocab(), ready


def main(what: str, path: str, threads: int, prompt: int, decode: int, clock: str) -> None:
    """Measure one contender and print its record."""
    now = CLOCKS[clock]
    made = llama(path, threads, prompt + decode + 8, now) if what == "llama.cpp" else halfbyte(what, path, threads, now)
    engine, states, vocabulary, ready = made
    ids = prompt_ids(prompt, vocabulary)
    next(states)(ids)
    step = next(states)
    start = now()
    token = step(ids)
    prompt_seconds = now() - start
    start = now()
    for _ in range(decode):
        token = step([token])
    decode_seconds = now() - start
    print(
        json.dumps(
            {
                "engine": engine,
                "ready_s": ready,
                "peak_mb": peak_memory() / 1e6,
                "prompt_tokens_per_s": prompt / prompt_seconds,
                "decode_tokens_per_s": decode / decode_seconds,
            }
        )
    )


if __name__ == "__main__":
    what, path, threads, prompt, decode, clock = sys.argv[1:]
    main(what, path, int(threads), int(prompt), int(decode), clock)
