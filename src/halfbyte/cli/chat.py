"""halfbyte chat: a conversation with a packed model."""

from __future__ import annotations

import sys
from json import dumps as encode
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.io.home import expanded
from ..errors import CheckpointError
from .drawing import ChatTemplate, MinP, RepeatPenalty, Seed, Stop, Temperature, TopK, TopP
from .engine import ActivationsOption, Engine, EngineOption, text_model
from .failures import complain
from .opening import AllowUnknown, BackendOption, ConfigOption, DeviceOption
from .terminal import print_json, printable

COMMANDS = """/help            this text
/system [TEXT]   set the system message, or show it; the conversation starts anew
/reset           forget the conversation
/save FILE       write the conversation as JSON
/exit            end, as /quit, /bye and the end of input do
A line that ends with a backslash goes on in the next; lines between two lines of three quotes are one message."""


def chat(
    path: Annotated[Path, typer.Argument(help="A checkpoint of a model that was made for conversation.")],
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of a reply.")] = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    repeat_penalty: RepeatPenalty = 1.1,
    stop: Stop = None,
    seed: Seed = 0,
    chat_template: ChatTemplate = None,
    activations: ActivationsOption = "exact",
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = Engine.auto,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: a record a reply.")] = False,
) -> int:
    """Talk to a model. Every line of standard input is a message; replies are streamed to standard
    output. Without options a reply is drawn as llama.cpp draws it, with a repeat penalty of 1.1,
    because small models repeat their likeliest words; --temperature 0 takes the likeliest.
    """
    from ..generation.single import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repeat_penalty)
    loaded = text_model(
        path,
        "chat",
        engine,
        activations=activations,
        backend=backend,
        device=device,
        templates=True,
        config=config,
        allow_unknown=allow_unknown,
    )
    tokenizer = loaded.tokenizer
    from ..generation.chat import Chat
    from ..generation.templates import template_named

    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        complain("note: the tokenizer has no chat template; ChatML is used, which the model may not have been made for")
        chat_template = "chatml"
    template, ends = (None, ()) if chat_template is None else template_named(chat_template)
    stops = (*(stop or ()), *ends)
    talk = Chat(
        loaded.model,
        tokenizer,
        system=system,
        max_tokens=max_tokens,
        sampling=sampling,
        template=template,
        stop=stops,
        stop_ids=loaded.ends,
    )
    if sys.stdin.isatty():
        print("/help lists commands", file=sys.stderr)
    while (message := _message()) is not None:
        if message.startswith("/"):
            if _command(talk, message):
                return 0
        elif message.strip():
            _reply(talk, message, json)
    return 0


def _message() -> str | None:
    """The next message of standard input, None at its end."""

    def line(prompt: str) -> str:
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()

    first = line("> ")
    if not first:
        return None
    if first.strip() == '"""':
        lines: list[str] = []
        while (more := line("")) and more.strip() != '"""':
            lines.append(more)
        return "".join(lines).rstrip("\n")
    text = first.rstrip("\n")
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{line('')}".rstrip("\n")
    return text


def _command(talk: Any, text: str) -> bool:
    """Carries out a line that begins with a slash; true for the one that ends the conversation."""
    name, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit", "/bye"):
        return True
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        if rest:
            talk.system = rest
            talk.reset()
        print(printable(talk.system or "(no system message)"), file=sys.stderr)
    elif name == "/save":
        if not rest:
            complain("/save needs the name of a file: /save FILE")
            return False
        from ..checkpoints.io.safe_files import replace_text

        try:
            replace_text(expanded(rest), encode(talk.messages, indent=2, ensure_ascii=False) + "\n")
        except CheckpointError as error:
            complain(str(error))
    else:
        if name != "/help":
            complain(f"there is no command {printable(name)}; these are:")
        print(COMMANDS, file=sys.stderr)
    return False


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
    if not talk.last.text.strip():
        print("(an empty reply: the model may not be made for conversation; halfbyte generate continues a text)", file=sys.stderr)
    elif talk.last.stopped != "eos":
        print(printable(f"(the reply ended at its {talk.last.stopped})"), file=sys.stderr)
