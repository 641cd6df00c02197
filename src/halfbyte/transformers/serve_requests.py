"""What the server lets through: ASGI middleware that checks a request before transformers' handlers
see it.

Every refusal, and every error of the handlers, has OpenAI's shape: {"error": {"message", "type",
"param", "code"}}. A request names no other model, template or generation config, and its prompt and
output are bounded by the model's context. The bodies of all unfinished requests together have a
limit, a body must arrive in time, and a request whose client leaves is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UnsupportedError, plural

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = {CHAT: "POST", COMPLETIONS: "POST", RESPONSES: "POST", "/v1/models": "GET", "/health": "GET"}
BODY_LIMIT = 4 << 20
"""Bytes of a request."""
ALL_BODIES = 64 << 20
"""Bytes of all requests that are read or not yet answered; a further request gets status 503."""
BODY_SECONDS = 60.0
"""Seconds in which a body must arrive."""
TOKEN_LENGTH = 32
"""Most characters of a token: a text of more than that for each token of `max_prompt` is refused
without being tokenized.
"""
TEMPLATE_OPTIONS = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking")
"""Template variables that a request may set."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RANGES = {
    "max_tokens": (int, 1, None), "max_completion_tokens": (int, 1, None), "max_output_tokens": (int, 1, None),
    "temperature": (float, 0, 2), "top_p": (float, 0, 1), "frequency_penalty": (float, -2, 2), "presence_penalty": (float, -2, 2),
    "seed": (int, 0, (1 << 63) - 1), "n": (int, 1, 1),
}  # fmt: skip
"""Field -> type, least and largest value; None for the model's context."""


UNBATCHED = {
    "stop": "its tokens are not compared with strings",
    "seed": "requests that are computed together draw from one generator",
    "frequency_penalty": "it has no penalties",
    "presence_penalty": "it has no penalties",
}
"""Field that transformers' batching would pass over -> why."""


class RequestError(Exception):
    """A request that is refused; becomes a reply of OpenAI's shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(f"[serve] {message}")
        self.status, self.param, self.code = status, param, code


class ClientLeftError(Exception):
    """The client closed the connection before its reply began."""


def error_body(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> bytes:
    """An error as OpenAI's API writes it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


class RequestCheck:
    """ASGI middleware.

    name        what requests call the model
    count       text -> its number of tokens
    context     most tokens of prompt and answer together: the model's context, or what a cache holds
    max_prompt  most tokens of a prompt
    hosts       allowed Host headers without port; None for all
    batching    requests are batched, without what `UNBATCHED` names
    """

    def __init__(
        self,
        app: Any,
        *,
        name: str,
        count: Callable[[str], int],
        context: int,
        max_prompt: int,
        hosts: Sequence[str] | None,
        batching: bool = False,
    ) -> None:
        self.app, self.name, self.count = app, name, count
        self.context, self.max_prompt = context, min(max_prompt, context)
        self.hosts = None if hosts is None else {h.lower() for h in hosts}
        self.batching = batching
        self.unfinished = 0
        """Bytes of the bodies of unfinished requests."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            self.check_host(scope)
            if scope["method"] == "POST":
                await self.read_body(receive, body)
                self.check(scope["path"], bytes(body))
            elif scope["path"].startswith("/v1/") and scope["path"] not in ENDPOINTS:
                raise RequestError(f"there is no {scope['path']}", code="not_found", status=404)
            await self.handle(scope, receive, send, bytes(body))
        except ClientLeftError:
            pass
        except RequestError as error:
            await reply(send, error.status, error_body(str(error), param=error.param, code=error.code))
        finally:
            self.unfinished -= len(body)

    async def read_body(self, receive: Any, body: bytearray) -> None:
        """Append a request's body to `body`, which counts in `unfinished`. RequestError past
        `BODY_LIMIT`, `ALL_BODIES` or `BODY_SECONDS`.
        """
        try:
            await asyncio.wait_for(self._collect(receive, body), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(f"the body did not arrive in {BODY_SECONDS:g} s", code="timeout", status=408) from None

    async def _collect(self, receive: Any, body: bytearray) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientLeftError
            part = message.get("body", b"")
            if len(body) + len(part) > BODY_LIMIT:
                raise RequestError(f"the request is longer than {BODY_LIMIT:,} bytes", code="request_too_large", status=413)
            if self.unfinished + len(part) > ALL_BODIES:
                raise RequestError(
                    f"the requests that wait have {self.unfinished:,} bytes; up to {ALL_BODIES:,} are allowed. Try again later",
                    code="busy",
                    status=503,
                )
            body += part
            self.unfinished += len(part)
            if not message.get("more_body", False):
                return

    async def handle(self, scope: Any, receive: Any, send: Any, body: bytes) -> None:
        """The application's reply to a request that was read. It is cancelled where the client
        leaves before the reply begins; a stream notices by itself.
        """
        left = asyncio.ensure_future(client_left(receive))
        replayed = scope["method"] != "POST"

        async def again() -> Any:
            nonlocal replayed
            if replayed:
                await asyncio.shield(left)
                return {"type": "http.disconnect"}
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        out = Rewritten(send, scope["path"])
        task = asyncio.ensure_future(self.app(scope, again, out))
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not out.started:
                raise ClientLeftError
            await task
        except ClientLeftError:
            raise
        except Exception as error:
            if not out.started:
                await reply(send, 500, error_body(f"[serve] {type(error).__name__}; the server's log has more", "server_error"))
            raise
        finally:
            for each in (task, left):
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await each

    def check_host(self, scope: Any) -> None:
        """A page of another site that has a name resolve to this machine sends its own name as
        Host.
        """
        if self.hosts is None:
            return
        host = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.strip("[]").lower() not in self.hosts:
            raise RequestError(f"Host {host!r}; allowed: {', '.join(sorted(self.hosts))}", code="host_not_allowed", status=403)

    def check(self, path: str, raw: bytes) -> None:
        """RequestError for a POST that is refused."""
        if ENDPOINTS.get(path) != "POST":
            raise RequestError(
                f"there is no POST {path}; this server has one model, loaded at its start", code="not_found", status=404
            )
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise RequestError("the request is not JSON") from None
        if not isinstance(body, dict):
            raise RequestError(f"the request is a JSON {type(body).__name__}; an object is allowed")
        if body.get("model") not in (None, self.name):
            raise RequestError(
                f"model {str(body['model'])[:80]!r} is not served; allowed: {self.name!r}. No model is loaded because a request "
                "names it",
                "model",
                "model_not_found",
            )
        self.check_fields(body)
        text = {CHAT: self.messages, COMPLETIONS: self.prompt, RESPONSES: self.input}[path](body)
        self.check_length(body, text)
        if self.batching:
            self.check_batched(body)

    def check_batched(self, body: dict[str, Any]) -> None:
        """RequestError for what a batch would pass over without a word."""
        for key, why in UNBATCHED.items():
            value = body.get(key)
            if value or (key == "seed" and value is not None):  # 0 is a seed, and no penalty
                raise RequestError(f"{key} is not taken with --batching: {why}; start the server without it", key)

    def check_fields(self, body: dict[str, Any]) -> None:
        """Numbers within their ranges, and nothing that would replace what the server was started
        with.
        """
        if body.get("generation_config") is not None:
            raise RequestError("generation_config is not taken from requests", "generation_config")
        for key, (kind, least, largest) in RANGES.items():
            value = body.get(key)
            if value is None:
                continue
            top = self.context if largest is None else largest
            number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
            if not number or not least <= value <= top:
                allowed = f"{kind.__name__} from {least} to {top}" if least < top else f"{top} alone"
                raise RequestError(f"{_given(key, value)}; allowed: {allowed}", key)
        if not isinstance(body.get("stream", False), bool | None):
            raise RequestError(f"{_given('stream', body['stream'])}; allowed: true, false", "stream")
        stop = body.get("stop")
        if stop is not None and not ((isinstance(stop, str) and stop) or (_strings(stop) and all(stop) and len(stop) <= 16)):
            given = json.dumps(stop)[:80]
            raise RequestError(f"stop = {given}; allowed: one or more characters, or up to 16 such strings", "stop")
        options = body.get("chat_template_kwargs")
        if options is not None:
            given = _given("chat_template_kwargs", options)
            if not isinstance(options, dict) or not set(options) <= set(TEMPLATE_OPTIONS):
                raise RequestError(f"{given}; allowed: {', '.join(TEMPLATE_OPTIONS)}", "chat_template_kwargs")
            if not all(isinstance(v, bool | str | int) for v in options.values()):
                raise RequestError(f"{given}; allowed values: true, false, strings, numbers", "chat_template_kwargs")
        tools = body.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) and _named(t) for t in tools)):
            allowed = 'a list of {"type": "function", "function": {"name": ..., ...}}'
            raise RequestError(f"{_given('tools', tools)}; allowed: {allowed}", "tools")

    def messages(self, body: dict[str, Any]) -> str:
        """The text of a conversation."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(f"{_given('messages', messages)}; a list of one or more is allowed", "messages")
        return "\n".join(_message(m, f"messages[{i}]") for i, m in enumerate(messages)) + json.dumps(body.get("tools") or "")

    def prompt(self, body: dict[str, Any]) -> str:
        """The text of a completion."""
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(f"{_given('prompt', prompt)}; a string is allowed", "prompt")
        return prompt

    def input(self, body: dict[str, Any]) -> str:
        """The text of a response."""
        value = body.get("input")
        if not isinstance(value, str | list) or not value:
            raise RequestError(f"{_given('input', value)}; a string, or a list of messages, is allowed", "input")
        return json.dumps(value, ensure_ascii=False) + json.dumps([body.get("instructions") or "", body.get("tools") or ""])

    def check_length(self, body: dict[str, Any], text: str) -> None:
        """RequestError for a prompt longer than `max_prompt`, or one that leaves too little of the
        context for the answer.
        """
        try:
            tokens = self.max_prompt + 1 if len(text) > self.max_prompt * TOKEN_LENGTH else self.count(text)
        except UnsupportedError as error:
            raise RequestError(str(error).removeprefix("[serve] ")) from error
        if tokens > self.max_prompt:
            counted = plural(tokens, "token") if len(text) <= self.max_prompt * TOKEN_LENGTH else plural(len(text), "character")
            raise RequestError(
                f"the prompt has {counted}; up to {self.max_prompt:,} tokens are allowed", None, "context_length_exceeded"
            )
        wanted = max((body.get(k) or 0 for k in ("max_tokens", "max_completion_tokens", "max_output_tokens")), default=0)
        if tokens + wanted > self.context:
            raise RequestError(
                f"the prompt has {plural(tokens, 'token')} and {wanted:,} are requested; up to {self.context:,} together "
                "are allowed",
                None,
                "context_length_exceeded",
            )


def _given(name: str, value: Any) -> str:
    """What a request gives, for a refusal."""
    return f"{name} is missing or empty" if value in (None, "", [], {}) else f"{name} = {json.dumps(value)[:80]}"


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _named(tool: dict[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: Any, where: str) -> str:
    """The text of one message."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        given = _given(f"{where}.role", message.get("role")) if isinstance(message, dict) else _given(where, message)
        raise RequestError(f"{given}; allowed: {', '.join(ROLES)}", where)
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "\n".join(p["text"] for p in content)
    raise RequestError(
        f"{_given(f'{where}.content', content)}; a string, or a list of text parts, is allowed", f"{where}.content"
    )


async def client_left(receive: Any) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Any, status: int, body: bytes) -> None:
    """One JSON reply."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Rewritten:
    """`send` that gives errors OpenAI's shape and ends event streams with `data: [DONE]`."""

    def __init__(self, send: Any, path: str) -> None:
        self.send, self.path = send, path
        self.start: Any = None
        self.body = b""
        self.tail = b""
        self.streams = self.started = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.streams = headers.get(b"content-type", b"").startswith(b"text/event-stream") and self.path != RESPONSES
            if message["status"] >= 400:
                self.start = message
                return
            self.started = True
        elif message["type"] == "http.response.body" and self.start is not None:
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                await self.error(self.start["status"])
            return
        elif message["type"] == "http.response.body" and self.streams:
            piece = message.get("body", b"")
            self.tail = (self.tail + piece)[-64:]
            if not message.get("more_body", False) and b"data: [DONE]" not in self.tail:
                message = {**message, "body": piece + b"data: [DONE]\n\n"}
        await self.send(message)

    async def error(self, status: int) -> None:
        """The collected error, rewritten where it is not of OpenAI's shape."""
        try:
            stored = json.loads(self.body)
        except ValueError:
            stored = self.body.decode("utf-8", "replace")[:300]
        if isinstance(stored, dict) and isinstance(stored.get("error"), dict):
            body = self.body
        else:
            detail = stored.get("detail", stored.get("error", stored)) if isinstance(stored, dict) else stored
            text = detail if isinstance(detail, str) else json.dumps(detail)
            kind = "server_error" if status >= 500 else "invalid_request_error"
            body = error_body(f"[serve] {text}", kind)
        kept = [(k, v) for k, v in self.start["headers"] if k not in (b"content-type", b"content-length")]
        length = (b"content-length", str(len(body)).encode())
        headers = [*kept, (b"content-type", b"application/json"), length]
        await self.send({"type": "http.response.start", "status": 400 if status == 422 else status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
