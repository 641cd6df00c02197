"""halfbyte serve: a packed model behind transformers' OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .drawing import ChatTemplate
from .engine import ActivationsOption
from .failures import complain
from .opening import AllowUnknown, BackendOption, ConfigOption, DeviceOption, DtypeOption, config_of, downloaded, open_with
from .terminal import printable


def serve(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder, .safetensors or .gguf.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in requests; by default that of its file or folder.")] = None,
    max_prompt: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt; the model's context if that is less.")] = 8192,
    chat_template: ChatTemplate = None,
    batching: Annotated[
        bool, typer.Option("--batching", help="Batch requests that come at the same time; else one waits for the other.")
    ] = False,
    cache_tokens: Annotated[
        int, typer.Option(min=256, help="With --batching, tokens of all conversations at once: what its cache holds.")
    ] = 16384,
    cors: Annotated[bool, typer.Option("--cors", help="Allow requests from any origin.")] = False,
    activations: ActivationsOption = "exact",
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
) -> int:
    """Serve /v1/chat/completions, /v1/completions and the rest of transformers' server until
    interrupted.
    """
    path = downloaded(path)
    with open_with(path, config, allow_unknown) as checkpoint:  # what is damaged is reported before torch is imported
        checkpoint.check_model("serve")
    from ..generation.templates import template_named
    from ..transformers.serve import server

    template = None if chat_template is None else template_named(chat_template, "serve")[0]
    local = ("localhost", "127.0.0.1", "::1")
    hosts = None if host in ("0.0.0.0", "::", "") else (*local, host)
    app = server(
        path,
        name=name,
        cors=cors,
        hosts=hosts,
        max_prompt=max_prompt,
        chat_template=template,
        batching=batching,
        cache_tokens=cache_tokens,
        activations=activations,
        backend=backend,
        device=device,
        dtype=dtype,
        config=config_of(config),
        allow_unknown=allow_unknown or (),
    )
    if app.state.chatml:
        complain("note: the tokenizer has no chat template; ChatML is used, which the model may not have been made for")
    import uvicorn

    print(printable(f"{path} at http://{host}:{port}/v1"), file=sys.stderr)
    uvicorn.run(app, host=host, port=port, log_level="warning")
    return 0
