"""An OpenAI-compatible server of one packed model: transformers' own server, given a model that
`load_model` made.

    app = server(path, name="gemma")        a FastAPI application: /v1/chat/completions,
                                            /v1/completions, /v1/models, /health, ...

Endpoints, streaming, sampling options and tool calls are transformers' (`transformers serve`); the
model comes from here, and `serve_requests` checks what is let through. Needs `pip install
'halfbyte[serve]'`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..generation.single import end_tokens
from ..generation.templates import CHATML, token_ids
from .load import load_model
from .serve_requests import RequestCheck

PAGE = 256
"""Tokens of a page of the cache with batching."""
LARGEST_BATCH = 1024
"""Tokens that one step of batching computes, of a prompt or one of each answer."""
MOST_REQUESTS = 64
"""Requests of a batch; further ones wait."""
PACKAGES = ("fastapi", "openai", "pydantic", "uvicorn")
"""What transformers' serving modules use without a word when they are imported, and miss when they
are called.
"""


def served_name(path: str | os.PathLike[str]) -> str:
    """What requests call a model: the last part of the path as it was given. A link keeps its own
    name; in a hub's cache it leads to a file that is named by a hash.
    """
    return Path(os.path.abspath(path)).name


def server(
    path: str | Path,
    *,
    name: str | None = None,
    cors: bool = False,
    hosts: Sequence[str] | None = None,
    max_prompt: int = 8192,
    chat_template: str | None = None,
    batching: bool = False,
    cache_tokens: int = 16384,
    **options: Any,
) -> Any:
    """The application.

    name        what requests call the model; the file's or folder's name by default
    cors        let pages of any origin read its replies, errors too
    hosts       allowed Host headers, without port; None for all
    max_prompt  most tokens of a prompt; the model's context if that is less (`serve_requests`)
    chat_template  a Jinja template in place of the tokenizer's own; ChatML where neither is given,
                which `app.state.chatml` says
    batching    requests at the same time are batched by transformers' continuous batching, each
                with a temperature, top_p and top_k of its own (`batched_sampling`), without seed,
                stop strings and penalties; without it one waits for the other
    cache_tokens  with batching, tokens of all conversations at once. Their keys and values take
                memory from the first request on; transformers alone takes most of the machine's
    options     those of `load_model`

    Raises UnsupportedError when transformers' serving parts are not installed, or the checkpoint
    has no tokenizer.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UnsupportedError(
            f"[serve] transformers' server needs {', '.join(missing)}, not installed here; pip install 'halfbyte[serve]'"
        )
    try:
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.response import ResponseHandler
        from transformers.cli.serving.server import build_server
        from transformers.cli.serving.systemone import SystemOneHandler
        from transformers.cli.serving.transcription import TranscriptionHandler

        from .batched_sampling import Sampled
        from .serve_replies import Stopping
    except ImportError as error:
        raise UnsupportedError(
            f"[serve] {error.name or error} is missing, which transformers' server needs; pip install 'halfbyte[serve]'"
        ) from error
    model, tokenizer = load_model(path, **options)
    if tokenizer is None:
        raise UnsupportedError(f"[serve] {path} has no tokenizer; put its tokenizer.json beside the weights")
    chatml = chat_template is None and not getattr(tokenizer, "chat_template", None)
    if chatml or chat_template is not None:
        tokenizer.chat_template = CHATML if chatml else chat_template
        end = tokenizer.backend_tokenizer.token_to_id("<|im_end|>")
        if end is not None and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted({end, *end_tokens(model, tokenizer)})
    _limit_template(tokenizer)
    manager = _manager(model, tokenizer, name or served_name(path))
    state = _generation_state(batching, cache_tokens)
    manager.shutdown = state.shutdown

    def sampled(handler: type, **settings: Any) -> Any:
        bases = (Stopping, Sampled, handler)
        return type(handler.__name__, bases, {})(model_manager=manager, generation_state=state, **settings)

    app = build_server(
        manager,
        sampled(ChatCompletionHandler, chat_template_kwargs={}),
        completion_handler=sampled(CompletionHandler),
        response_handler=sampled(ResponseHandler, chat_template_kwargs={}),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(
            model_manager=manager, generation_state=state, chat_template_kwargs={}, decision_config=None
        ),
        generation_state=state,
    )
    app.state.chatml = chatml
    context = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_prompt)
    context = min(context, cache_tokens) if batching else context
    app.add_middleware(
        RequestCheck,
        name=manager.force_model,
        count=lambda text: len(token_ids(tokenizer, text, "serve", verbose=False)),
        context=context,
        max_prompt=max_prompt,
        hosts=hosts,
        batching=batching,
    )
    return allow_any_origin(app) if cors else app


def _limit_template(tokenizer: Any) -> None:
    """The tokenizer writes conversations under the limits of `template_limits`."""
    from ..generation.template_limits import template_limits

    plain = tokenizer.apply_chat_template

    def limited(*args: Any, **kwargs: Any) -> Any:
        with template_limits():
            return plain(*args, **kwargs)

    tokenizer.apply_chat_template = limited


def allow_any_origin(app: Any) -> Any:
    """`app`, a Starlette application, with CORS headers on every reply: outside its other
    middleware and what answers exceptions with status 500, whose replies would lack them, so that a
    browser would show none of what they say.
    """
    from transformers.cli.serving.server import CORSMiddleware

    inner = app.build_middleware_stack
    everything = {"allow_origins": ["*"], "allow_credentials": True, "allow_methods": ["*"], "allow_headers": ["*"]}
    app.build_middleware_stack = lambda: CORSMiddleware(inner(), **everything)
    return app


def _generation_state(batching: bool, cache_tokens: int) -> Any:
    """transformers' state of the server, where a request that is cancelled before its reply begins
    ends its generation: transformers itself generates all of its tokens, while others wait.
    """
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState

    from transformers import ContinuousBatchingConfig

    from .batched_sampling import OwnSettings, Settings, at_the_end_of_this_task, settings_of, shared_config, sort_few_rows
    from .serve_replies import STOP, Decoded, Replying, end_ids

    class OneByOne(GenerateManager):  # type: ignore[misc] # transformers is not type-checked
        async def generate_non_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            replying = Replying(model, STOP.get())
            try:
                _, length, ids = await super().generate_non_streaming(replying, *args, **kwargs)
            except asyncio.CancelledError:
                replying.cancelled.set()
                raise
            return replying.reply.text if replying.reply else "", length, ids

        def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            queue, streamer = super().generate_streaming(Replying(model, STOP.get()), *args, **kwargs)
            at_the_end_of_this_task(streamer.cancel)
            return queue, streamer

    class Batched(CBGenerateManager):  # type: ignore[misc] # transformers is not type-checked
        def init_cb(self, model: Any, gen_config: Any) -> None:
            if self._cb is not None:
                return
            super().init_cb(model, shared_config(gen_config))
            self._settings: dict[str, Settings] = {}
            self._cb: Any = OwnSettings(self._cb, self._settings)
            if model.device.type == "cpu":
                sort_few_rows(self._cb.logit_processor.logits_processor)

        def stop(self) -> None:
            """The thread that computes ends, and with it the process: it would go on by itself."""
            if self._cb is not None:
                self._cb.stop(block=True, hard_stop=True)

        def _expect(self, model: Any, gen_config: Any, request_id: str) -> None:
            self._settings[request_id] = settings_of(gen_config, model.config.get_text_config().vocab_size)
            at_the_end_of_this_task(lambda: self._cb.forget(request_id))

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
        ) -> Any:
            self._expect(model, gen_config, request_id)
            queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
            streamer._decode_stream = Decoded(processor, gen_config, response_parser is not None)
            return queue, streamer

        async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str) -> Any:
            self._expect(model, gen_config, request_id)
            text, length, ids = await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
            if ids and ids[-1] in end_ids(gen_config):
                gen_config.max_new_tokens = None  # the handler says "stop"
            return text, length, ids

    class State(GenerationState):  # type: ignore[misc] # transformers is not type-checked
        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            if use_cb:
                if self._cb_manager is None:
                    self._cb_manager: Any = Batched(cb_config=self._cb_config)
                    self._cb_model_id = model_id
                return super().get_manager(model_id, use_cb)
            if model_id not in self._generate_managers:
                self._generate_managers[model_id] = OneByOne()
            return self._generate_managers[model_id]

    pages = -(-cache_tokens // PAGE)
    config = ContinuousBatchingConfig(
        num_blocks=pages,
        page_size=PAGE,
        max_batch_tokens=LARGEST_BATCH,
        max_requests_per_batch=MOST_REQUESTS,
        per_request_processors=True,
    )
    return State(continuous_batching=batching, cb_config=config if batching else None)


def _manager(model: Any, tokenizer: Any, name: str) -> Any:
    """transformers' manager of models, with one model in it that is there and stays."""
    from transformers.cli.serving.model_manager import ModelManager

    class PackedManager(ModelManager):  # type: ignore[misc] # transformers is not type-checked
        def __init__(self) -> None:
            super().__init__(device=str(model.device), model_timeout=-1)
            self.force_model = name

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return model, tokenizer

        def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            loaded = {"value": "loaded"}
            return [{"owned_by": "halfbyte", "id": name, "object": "model", "created": 0, "status": loaded}]

    return PackedManager()
