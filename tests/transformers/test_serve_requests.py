"""What the server's middleware bounds: bodies of slow clients, prompts, and requests whose client
leaves.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from halfbyte.transformers import serve, serve_requests
from halfbyte.transformers.serve_requests import CHAT, COMPLETIONS, RESPONSES, TOKEN_LENGTH, UNBATCHED, RequestCheck, RequestError

ASKED = json.dumps({"prompt": "a"}).encode()


class Client:
    """One connection: parts of a body, then silence until it leaves."""

    def __init__(self, parts: list[bytes], whole: bool = True) -> None:
        self.parts, self.whole = list(parts), whole
        self.left = asyncio.Event()
        self.sent: list[dict] = []

    async def receive(self) -> dict:
        if self.parts:
            part = self.parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.parts) or not self.whole}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def error(self) -> dict:
        return json.loads(self.sent[-1]["body"])["error"]


def check(app) -> RequestCheck:
    return RequestCheck(app, name="m", count=lambda text: 1, context=64, max_prompt=64, hosts=None)


def request(middleware: RequestCheck, client: Client) -> asyncio.Task:
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    return asyncio.ensure_future(middleware(scope, client.receive, client.send))


async def answer(scope, receive, send) -> None:
    assert (await receive())["body"] == ASKED
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def wait_for_ever(scope, receive, send) -> None:
    await asyncio.Event().wait()


def test_five_hundred_slow_clients_have_bounded_memory_and_leave_the_server_free():
    """Each sends 1 MiB of a body that never ends: 64 are kept, the others get 503, and once they
    leave the next is answered.
    """

    async def run() -> None:
        middleware = check(answer)
        slow = [Client([bytes(1 << 20)], whole=False) for _ in range(500)]
        tasks = [request(middleware, c) for c in slow]
        while any(client.parts for client in slow) or sum(c.status == 503 for c in slow) < 436:
            await asyncio.sleep(0)
        assert middleware.unfinished <= serve_requests.ALL_BODIES
        refused = [c for c in slow if c.status == 503]
        assert len(refused) == 500 - (serve_requests.ALL_BODIES >> 20)
        assert refused[0].error["code"] == "busy"
        assert "up to 67,108,864 are allowed" in refused[0].error["message"]
        for client in slow:
            client.left.set()
        await asyncio.gather(*tasks)
        assert middleware.unfinished == 0
        late = Client([ASKED])
        await request(middleware, late)
        assert late.status == 200

    asyncio.run(run())


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch):
    monkeypatch.setattr(serve_requests, "BODY_SECONDS", 0.05)

    async def run() -> None:
        middleware, client = check(answer), Client([b"{"], whole=False)
        await request(middleware, client)
        assert (client.status, client.error["code"]) == (408, "timeout")
        assert middleware.unfinished == 0

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_whose_client_leaves_is_cancelled(begun):
    """Before its reply begins by the middleware; a stream gets the message and ends itself."""
    ended = []

    async def generate(scope, receive, send) -> None:
        await receive()
        try:
            if begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                assert (await receive())["type"] == "http.disconnect"
            else:
                await wait_for_ever(scope, receive, send)
        finally:
            ended.append(True)

    async def run() -> None:
        middleware, client = check(generate), Client([ASKED])
        task = request(middleware, client)
        await asyncio.sleep(0.01)
        assert not ended
        client.left.set()
        await asyncio.wait_for(task, 1)
        assert ended == [True]
        assert middleware.unfinished == 0

    asyncio.run(run())


def test_an_error_of_a_handler_is_a_reply():
    async def fail(scope, receive, send) -> None:
        raise KeyError("x")

    async def run() -> None:
        client = Client([ASKED])
        with pytest.raises(KeyError):
            await request(check(fail), client)
        assert client.status == 500

    asyncio.run(run())


@pytest.mark.parametrize(
    ("characters", "wanted", "message"),
    [
        (8, 8, None),
        (9, 1, r"^\[serve\] the prompt has 9 tokens; up to 8 tokens are allowed$"),
        (8 * TOKEN_LENGTH + 1, 1, r"^\[serve\] the prompt has 257 characters; up to 8 tokens are allowed$"),
        (8, 9, r"^\[serve\] the prompt has 8 tokens and 9 are requested; up to 16 together are allowed$"),
    ],
)
def test_a_prompt_and_its_answer_fit_the_context(characters, wanted, message):
    counted = []
    middleware = RequestCheck(
        answer, name="m", count=lambda text: counted.append(text) or len(text), context=16, max_prompt=8, hosts=None
    )
    body = json.dumps({"prompt": "a" * characters, "max_tokens": wanted}).encode()
    if message is None:
        middleware.check(COMPLETIONS, body)
    else:
        with pytest.raises(RequestError, match=message) as caught:
            middleware.check(COMPLETIONS, body)
        assert caught.value.code == "context_length_exceeded"
    # Longer texts than any of so many tokens are refused without being tokenized.
    assert [len(text) for text in counted] == ([characters] if characters <= 8 * TOKEN_LENGTH else [])


WRONG = {
    "temperature": ["hot", -1, 9, True], "top_p": [2], "max_tokens": [0, 1.5, 65], "n": [2], "seed": [-1], "stream": ["yes"],
    "stop": [3, ["a"] * 17, [1], "", ["a", ""]], "tools": ["a", ["a"], [{"type": "function"}]],
    "chat_template_kwargs": ["a", {"chat_template": "x"}, {"thinking": [1]}],
    "messages": ["hi", {"role": "user"}, 3],
}  # fmt: skip
"""Field -> values that are refused."""
MESSAGES = {"": ["hi", 3], ".role": ["cook", 3], ".content": [3, {"text": "a"}, [{"type": "image_url"}], ["a"]]}
"""Part of a message -> values that are refused."""


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_refusal_says_what_was_given(field, value):
    body = {"messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(RequestError) as caught:
        check(answer).check(CHAT, json.dumps(body).encode())
    assert str(caught.value).startswith(f"[serve] {field} = {json.dumps(value)[:80]}; ")
    assert "allowed" in str(caught.value).partition("; ")[2]
    assert caught.value.param == field


@pytest.mark.parametrize(("part", "value"), [(part, value) for part, values in MESSAGES.items() for value in values])
def test_a_refused_message_says_what_was_given(part, value):
    message = {"role": "user", "content": "a", part[1:]: value} if part else value
    with pytest.raises(RequestError) as caught:
        check(answer).check(CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}, message]}).encode())
    assert str(caught.value).startswith(f"[serve] messages[1]{part} = {json.dumps(value)}; ")


@pytest.mark.parametrize("nothing", [None, "", [], {}])
@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")])
def test_what_is_missing_or_empty_is_called_so(path, field, nothing):
    for body in ({}, {field: nothing}):
        with pytest.raises(RequestError, match=f"{field} is missing or empty; ") as caught:
            check(answer).check(path, json.dumps(body).encode())
        assert caught.value.param == field


def test_a_batch_takes_the_settings_of_each_request_and_refuses_what_it_would_pass_over():
    middleware = RequestCheck(answer, name="m", count=len, context=64, max_prompt=64, hosts=None, batching=True)

    def ask(**fields) -> None:
        middleware.check(COMPLETIONS, json.dumps({"prompt": "a", **fields}).encode())

    with pytest.raises(RequestError, match="the prompt has 65 tokens"):
        ask(prompt="a" * 65, temperature=2)
    for temperature, top_p in ((0.5, None), (0, 0.9), (2, 0.1), (None, None)):
        ask(temperature=temperature, top_p=top_p, stop=None, seed=None, presence_penalty=0, frequency_penalty=0.0)
    own = {"stop": ["x"], "seed": 0, "presence_penalty": 1, "frequency_penalty": -0.5}
    assert own.keys() == UNBATCHED.keys()
    for key, value in own.items():
        with pytest.raises(RequestError, match=f"{key} is not taken with --batching: .*; start the server without it") as caught:
            ask(**{key: value})
        assert caught.value.param == key
    middleware.batching = False
    ask(**own)


def test_a_model_is_called_what_its_path_is_called(tmp_path, monkeypatch):
    (tmp_path / "blob").mkdir()
    (tmp_path / "model").symlink_to("blob")
    monkeypatch.chdir(tmp_path / "blob")
    assert [serve.served_name(p) for p in (tmp_path / "model", ".", "../model/", "x.gguf")] == [
        "model",
        "blob",
        "model",
        "x.gguf",
    ]
