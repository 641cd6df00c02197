"""Where a decoding step goes: the native operations of each kind alone, what is around them, and
the model's own forward beside.

    python tools/step_profile.py FILE.gguf [--prompt 512] [--threads 1] [--rounds 40] [--clock wall]

Each kind of operation is run as a step of its own, in turn with the whole step, so that a change of
the machine's speed meets all of them; medians. A kind alone finds its data in a farther cache than
in the whole step. Prints a table for benchmarks/cpu.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

KINDS = {
    "products of the layers": ("product",),
    "attention, keys and values written": ("attend",),
    "norms": ("norm",),
    "gates": ("gate",),
    "rotations and sums": ("rotate", "add"),
    "the call: addresses of keys, values and angles": (),
}
ALL = ("product", "attend", "norm", "gate", "rotate", "add")


class Some:
    """A native step that takes operations of some kinds and passes over the others."""

    def __init__(self, step: Any, kinds: tuple[str, ...]) -> None:
        self._step, self._kinds = step, kinds

    def __getattr__(self, name: str) -> Callable[..., None]:
        found: Callable[..., None] = getattr(self._step, name)
        return found if name in self._kinds or name in ("bind", "run") else lambda *_: None


def measure(path: str, activations: str, prompt: int, threads: int, rounds: int, clock: str) -> dict[str, float]:
    """Milliseconds a token of every part."""
    import torch
    from halfbyte.backends.cpu import native, set_threads
    from halfbyte.bench.cpu.linear import CLOCKS
    from halfbyte.bench.model.run_one import prompt_ids
    from halfbyte.transformers import load_model
    from halfbyte.transformers.decode import native_step as step
    from halfbyte.transformers.decode.kv_cache import growing_cache
    from halfbyte.transformers.decode.session import DecodeSession

    now = CLOCKS[clock]
    torch.set_num_threads(threads)
    set_threads(threads)
    model, _ = load_model(path, activations=activations)
    ids = prompt_ids(prompt, model.config.vocab_size)
    text, theirs = DecodeSession(model), growing_cache(model)
    text(ids)
    token, embedded = torch.tensor([[5]]), torch.randn(1, 1, model.config.hidden_size)
    real, steps = native().Step, {}
    for name, kinds in {**KINDS, "the step": ALL}.items():
        step.native = lambda kinds=kinds: argparse.Namespace(Step=lambda: Some(real(), kinds))
        steps[name] = step.Step(model, text.state.layers)
    step.native = native
    parts: dict[str, Callable[[], Any]] = {name: (lambda s=s: s(embedded)) for name, s in steps.items()}
    parts |= {
        "the head": lambda: model.lm_head(embedded),
        "the embedding": lambda: model.model.embed_tokens(token),
        "the argmax": lambda: int(logits[0, -1].numpy().argmax()),
        "a token, all of it": lambda: int(text([5]).numpy().argmax()),
        "a token through the model's own forward": lambda: model(input_ids=token, cache=theirs, logits_to_keep=1),
    }
    seconds = defaultdict(list)
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), cache=theirs, use_cache=True, logits_to_keep=1)
        logits = model.lm_head(embedded)
        for _ in range(rounds):
            for name, run in parts.items():
                if name in steps:
                    steps[name].written = min(steps[name].written, 1)  # every step over the same places, behind the prompt
                    for row in steps[name].rows.values():  # what operations that are passed over would have written
                        row.normal_()
                start = now()
                run()
                seconds[name].append(now() - start)
    return {name: 1e3 * statistics.median(s) for name, s in seconds.items()}


def main() -> None:
    """Prints the table."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clock", default="wall")
    given = parser.parse_args()
    from halfbyte.bench.cpu.limits import machine_name

    found = {m: measure(given.path, m, given.prompt, given.threads, given.rounds, given.clock) for m in ("int8", "exact")}
    threads = f"{given.threads} thread{'' if given.threads == 1 else 's'}"
    print(f"{machine_name()}, {threads}, {given.clock} time, a token after {given.prompt}; medians of {given.rounds}.")
    print("\n| ms a token | int8 | exact |\n|---|---|---|")
    for name in found["int8"]:
        print(f"| {name} | {found['int8'][name]:.2f} | {found['exact'][name]:.2f} |")


if __name__ == "__main__":
    main()
