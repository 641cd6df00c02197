"""halfbyte chat: a conversation with a packed model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UnsupportedError
from .drawing import Seed, Temperature, TopK, TopP
from .opening import AllowUnknown, ConfigOption, config_of, open_with
from .terminal import print_json, printable

COMMANDS = "/reset forgets the conversation, /exit (or end of input) ends it"


def chat(
    path: Annotated[Path, typer.Argument(help="A checkpoint of a model that was made for conversation.")],
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many tokens a reply.")] = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    activations: Annotated[str, typer.Option(help="exact, or int8.")] = "exact",
    backend: Annotated[str | None, typer.Option(help="One of `halfbyte backends`.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: a record a reply.")] = False,
) -> int:
    """Talk to a model. Every line of standard input is a message; replies are streamed to standard output."""
    open_with(path, config, allow_unknown).close()  # what is damaged is reported before torch is imported
    from ..generation.chat import Chat
    from ..generation.single import Sampling
    from ..transformers import load_model

    sampling = Sampling(temperature, top_k, top_p, seed)
    model, tokenizer = load_model(
        path, activations=activations, backend=backend, device=device, config=config_of(config), allow_unknown=allow_unknown or ()
    )
    if tokenizer is None:
        raise UnsupportedError(f"[chat] {path} has no tokenizer; put its tokenizer.json beside the weights")
    talk = Chat(model, tokenizer, system=system, max_tokens=max_tokens, sampling=sampling)
    if sys.stdin.isatty():
        print(COMMANDS, file=sys.stderr)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            talk.reset()
        elif line.strip():
            _reply(talk, line.rstrip("\n"), json)


def _reply(talk: object, text: str, json: bool) -> None:
    from ..generation.chat import Chat

    assert isinstance(talk, Chat)
    for piece in talk.say(text):
        if not json:
            print(piece, end="", flush=True)
    assert talk.last is not None
    if json:
        last = talk.last
        print_json({"record": "reply", "text": last.text, "stopped": last.stopped, "prompt_tokens": len(last.prompt_ids),
                    "tokens": len(last.tokens), "tokens_per_s": round(last.tokens_per_s, 2)})  # fmt: skip
        sys.stdout.flush()
        return
    print(flush=True)
    if talk.last.stopped != "eos":
        print(printable(f"(the reply ended at its {talk.last.stopped})"), file=sys.stderr)
