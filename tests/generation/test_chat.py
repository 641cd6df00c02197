"""Conversations, from the template to the command; and the server, which is transformers' own."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli.app import main
from halfbyte.errors import UnsupportedError
from halfbyte.generation.chat import Chat
from halfbyte.generation.single import Generation
from halfbyte.generation.templates import CHATML, render
from halfbyte.transformers import load_model
from support.tiny_models import write_tiny
from support.tiny_tokenizer import TEMPLATE, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("chat")
    write_tiny(where, "llama", "mlx")
    write_tokenizer(where, TEMPLATE)
    return where


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


def test_the_prompt_is_the_templates(loaded):
    chat = Chat(*loaded, max_tokens=3)
    reply = "".join(chat.say("<tok7> <tok8>"))
    assert chat.messages == [{"role": "user", "content": "<tok7> <tok8>"}, {"role": "assistant", "content": reply}]
    assert chat.last.prompt_ids == loaded[1].apply_chat_template(chat.messages[:1], add_generation_prompt=True)["input_ids"]
    assert chat.last.prompt_ids[-1] == 4
    first = list(chat.last.tokens)
    list(chat.say("<tok9>"))
    assert chat.last.prompt_ids[: 6 + len(first)] == [1, 3, 7, 8, 5, 4, *first]
    plain = Generation(*loaded, chat.last.prompt_ids, max_tokens=3)
    list(plain)
    assert plain.tokens == chat.last.tokens


def test_a_system_message_that_the_template_does_not_know(loaded):
    """It goes to the head of the first message, as the models' makers advise."""
    chat = Chat(*loaded, system="<tok20>", max_tokens=1)
    list(chat.say("<tok7>"))
    assert chat.last.prompt_ids == [1, 3, 20, 7, 5, 4]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "<tok20>"}]


def test_a_reply_that_is_not_read_to_its_end(loaded):
    chat = Chat(*loaded, max_tokens=5)
    stream = chat.say("<tok7>")
    piece = next(stream)
    stream.close()
    assert chat.messages[-1] == {"role": "assistant", "content": piece}


def test_without_a_template(loaded, tmp_path):
    with pytest.raises(UnsupportedError, match="has no chat template"):
        Chat(loaded[0], write_tokenizer(tmp_path))


@pytest.mark.parametrize("end", ["/exit", "/quit", "/bye"])
def test_the_command(folder, capsys, monkeypatch, end):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"<tok7>\n\n<tok8>\n/reset\n<tok7>\n{end}\n<tok9>\n"))
    assert main(["chat", str(folder), "-n", "2", "--json"]) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {**third, "tokens_per_s": first["tokens_per_s"]}
    assert second["prompt_tokens"] > first["prompt_tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("<tok7>\n"))
    assert main(["chat", str(folder), "-n", "2"]) == 0
    assert capsys.readouterr().out.strip() == first["text"].strip()


def test_commands_and_messages_of_several_lines(folder, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["/help", "/system <tok5>", "<tok7>\\", "<tok8>", '"""', "<tok9>", "<tok3>", '"""', f"/save {saved}", "/exit"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", str(folder), "-n", "2"]) == 0
    assert "/save FILE" in capsys.readouterr().err
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["<tok5>", "<tok7>\n<tok8>", "<tok9>\n<tok3>"]


def test_chatml_where_a_file_has_no_template(folder, capsys, monkeypatch, tmp_path):
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("<tok7>\n"))
    assert main(["chat", str(plain), "-n", "2"]) == 0
    assert "note: the tokenizer has no chat template; ChatML is used" in capsys.readouterr().err
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("<tok7>\n"))
    assert main(["chat", str(plain), "-n", "2", "--json", "--chat-template", str(template)]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["prompt_tokens"] <= 2
    assert "ChatML" not in out.err
    assert main(["chat", str(plain), "--chat-template", "nothing"]) == 2
    assert "--chat-template nothing; allowed: chatml, or a file" in capsys.readouterr().err


@pytest.mark.ecosystem("applications")
def test_the_server_answers_as_the_model(folder, loaded):
    """Chat and text completions through HTTP; needs transformers[serving] and httpx."""
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server

    model, tokenizer = loaded
    with TestClient(server(folder, name="tiny")) as client:
        [listed] = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["status"]["value"]) == ("tiny", "loaded")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "<tok7>"}], "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/chat/completions", json={**body, "stream": False}).json()
        plain = Generation(model, tokenizer, [1, 3, 7, 5, 4], max_tokens=4)
        list(plain)
        assert answer["choices"][0]["message"]["content"].split() == tokenizer.decode(plain.tokens).split()
        assert answer["usage"]["prompt_tokens"] == 5
        text = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "<tok7>", "max_tokens": 3, "temperature": 0}
        ).json()
        assert text["choices"][0]["text"]
        assert client.post("/v1/chat/completions", json={**body, "model": "other"}).status_code == 400


BAD_REQUESTS = [
    ("chat/completions", b"{", 400, "is not JSON", None),
    ("chat/completions", b"[1]", 400, "an object is allowed", None),
    ("chat/completions", {}, 400, "messages is missing or empty", "messages"),
    ("chat/completions", {"messages": []}, 400, "messages is missing or empty", "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role is missing or empty", "messages[0]"),
    ("chat/completions", {"messages": [{"role": "cook", "content": "x"}]}, 400, 'role = "cook"; allowed', "messages[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content = 3;", "messages[0].content"),
    ("completions", {"prompt": ""}, 400, "prompt is missing or empty", "prompt"),
    ("completions", {"prompt": "<tok7>", "no_such_field": 1}, 400, "no_such_field", None),
    ("completions", {"prompt": "<tok7>", "max_tokens": -1}, 400, "max_tokens = -1; allowed: int from 1", "max_tokens"),
    ("completions", {"prompt": "<tok7>", "max_tokens": 0}, 400, "max_tokens = 0", "max_tokens"),
    ("completions", {"prompt": "<tok7>", "max_tokens": "a"}, 400, 'max_tokens = "a"', "max_tokens"),
    ("completions", {"prompt": "<tok7>", "max_tokens": 10**9}, 400, "max_tokens = 1000000000", "max_tokens"),
    ("completions", {"prompt": "<tok7>", "temperature": "hot"}, 400, "temperature", "temperature"),
    ("completions", {"prompt": "<tok7>", "generation_config": "{}"}, 400, "not taken from requests", "generation_config"),
    ("completions", {"prompt": "<tok7>", "model": "org/other"}, 400, "No model is loaded because a request names it", "model"),
    ("completions", {"prompt": "<tok7> " * 9000}, 400, "the prompt has", None),
    ("completions", {"prompt": "x" * (5 << 20)}, 413, "is longer than", None),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": ["a"]}, 400, 'tools = ["a"];', "tools"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {
        "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}},
     400, "; allowed: enable_thinking", "chat_template_kwargs"),
    ("responses", {"input": []}, 400, "input is missing or empty", "input"),
    ("systemone", {}, 404, "there is no POST /v1/systemone", None),
    ("audio/transcriptions", {}, 404, "there is no POST", None),
]  # fmt: skip


@pytest.mark.ecosystem("applications")
def test_bad_requests_get_openais_error_shape(folder):
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server

    with TestClient(server(folder, name="tiny", hosts=("localhost", "testserver"))) as client:
        for path, body, status, said, param in BAD_REQUESTS:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = client.post(f"/v1/{path}", content=raw, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, (path, str(body)[:80], answer.text[:300])
            error = answer.json()["error"]
            assert said in error["message"], error
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param
        for path in ("/load_model", "/reset"):
            assert client.post(path, json={"model": "org/other"}).json()["error"]["code"] == "not_found"
        refused = client.get("/v1/models", headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        body = {"messages": [{"role": "user", "content": "<tok7>"}], "max_tokens": 3, "stream": True}
        streamed = client.post("/v1/chat/completions", json=body).text
        assert streamed.count("data: [DONE]") == 1
        assert streamed.endswith("data: [DONE]\n\n")


@pytest.fixture
def listening(folder, tmp_path):
    """OpenAI clients of two servers on ports of their own: the model, and the model without its
    chat template.
    """
    import openai
    import uvicorn

    from halfbyte.transformers.serve import server

    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "chat_template.jinja").unlink()
    servers, clients = [], []
    for where in (folder, plain):
        one = uvicorn.Server(uvicorn.Config(server(where, name="tiny"), port=0, log_level="error"))
        thread = threading.Thread(target=one.run)
        thread.start()
        servers.append((one, thread))
        while not one.started:
            time.sleep(0.01)
        port = one.servers[0].sockets[0].getsockname()[1]
        clients.append(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0))
    yield clients
    for one, thread in servers:
        one.should_exit = True
        thread.join(20)


@pytest.mark.ecosystem("applications")
def test_openais_client_talks_to_the_server(listening, loaded):
    """Streamed and whole; a model without a chat template converses by ChatML."""
    import openai

    model, tokenizer = loaded
    talks, continues = listening
    plain = Generation(model, tokenizer, [1, 3, 7, 5, 4], max_tokens=4)
    list(plain)
    wanted = tokenizer.decode(plain.tokens).split()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "<tok7>"}], "max_tokens": 4, "temperature": 0}
    whole = talks.chat.completions.create(**asked)
    assert whole.choices[0].message.content.split() == wanted
    pieces = [p.choices[0].delta.content or "" for p in talks.chat.completions.create(stream=True, **asked) if p.choices]
    assert len([p for p in pieces if p]) > 1
    assert "".join(pieces).split() == wanted
    with pytest.raises(openai.BadRequestError):
        talks.chat.completions.create(**{**asked, "model": "other"})
    text = {"model": "tiny", "prompt": "<tok7>", "max_tokens": 3, "temperature": 0}
    assert continues.completions.create(**text).choices[0].text == talks.completions.create(**text).choices[0].text
    prompt = render(tokenizer, asked["messages"], template=CHATML)
    assert continues.chat.completions.create(**asked).usage.prompt_tokens == len(prompt)


def _at_once(ask: Callable[[int], None], count: int) -> None:
    """Calls `ask` with 0 to count - 1, each in a thread."""
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("batching", [True, False])
def test_requests_at_the_same_time_get_the_replies_they_would_get_alone(folder, loaded, batching, monkeypatch):
    """Batched ones are in one step together, in a cache of bounded memory."""
    from fastapi.testclient import TestClient
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    from halfbyte.transformers.serve import server

    model, tokenizer = loaded
    app = server(folder, name="tiny", batching=batching, chat_template=CHATML)
    assert not app.state.chatml
    replies: dict[int, str] = {}
    together, schedule, before = [0], FIFOScheduler.schedule_batch, _peak()

    def watched(self, *args, **kwargs):
        scheduled = schedule(self, *args, **kwargs)
        together.append(len(self.active_requests))
        return scheduled

    monkeypatch.setattr(FIFOScheduler, "schedule_batch", watched)
    with TestClient(app) as client:

        def ask(i: int) -> None:
            body = {"prompt": f"<tok{7 + i}> <tok9>", "max_tokens": 20, "temperature": 0}
            replies[i] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        _at_once(ask, 4)
    for i in range(4):
        alone = Generation(model, tokenizer, f"<tok{7 + i}> <tok9>", max_tokens=20)
        list(alone)
        assert replies[i].split() == tokenizer.decode(alone.tokens, skip_special_tokens=True).split()
    assert (max(together) > 1) == batching
    assert _peak() - before < 1000


@pytest.mark.ecosystem("applications")
def test_requests_of_a_batch_are_drawn_each_by_its_own_settings(folder, loaded):
    """Whatever the first one asked for: a greedy reply among hot ones is the greedy reply, and hot
    ones differ.
    """
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server

    model, tokenizer = loaded
    settings = [{"temperature": 2}, {"temperature": 0}, {"temperature": 2, "top_p": 0.999}, {}, {"temperature": 2, "top_p": 1e-9}]
    replies: dict[int, str] = {}
    with TestClient(server(folder, name="tiny", batching=True)) as client:

        def ask(i: int) -> None:
            body = {"prompt": "<tok7> <tok9>", "max_tokens": 20, **settings[i % 5]}
            replies[i] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        _at_once(ask, 10)
        refused = client.post("/v1/completions", json={"prompt": "<tok7>", "seed": 1}).json()["error"]
        assert "seed is not taken with --batching" in refused["message"]
    alone = Generation(model, tokenizer, "<tok7> <tok9>", max_tokens=20)
    list(alone)
    greedy = tokenizer.decode(alone.tokens, skip_special_tokens=True).split()
    for i in range(10):
        assert (replies[i].split() == greedy) == (i % 5 in (1, 3, 4)), (i, replies)
    assert len({replies[i] for i in (0, 2, 5, 7)}) == 4


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_a_batch_frees_its_place(folder, stream, monkeypatch):
    """Before its reply and in a stream, soon and late: nothing of it is active, waits, or is
    remembered, and the next request is answered.
    """
    import uvicorn
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    from halfbyte.transformers.serve import server

    managers = []
    start = ContinuousBatchingManager.start
    monkeypatch.setattr(ContinuousBatchingManager, "start", lambda self: managers.append(self) or start(self))
    one = uvicorn.Server(uvicorn.Config(server(folder, name="tiny", batching=True), port=0, log_level="error"))
    thread = threading.Thread(target=one.run)
    thread.start()
    while not one.started:
        time.sleep(0.01)
    port = one.servers[0].sockets[0].getsockname()[1]

    async def leave() -> None:
        assert await _raw(port, {"max_tokens": 2}) == 200
        endless = {"max_tokens": 120, "stream": stream}
        await asyncio.gather(*(_raw(port, endless, wait=False, stay=0.02 * i) for i in range(20)))

    try:
        asyncio.run(leave())
        scheduler = managers[0].batch_processor.scheduler
        end = time.monotonic() + 60
        while (scheduler.active_requests or scheduler.waiting_requests) and time.monotonic() < end:
            assert not any(len(r.generated_tokens) >= 120 for r in list(scheduler.active_requests.values()))
            time.sleep(0.01)
        assert (dict(scheduler.active_requests), dict(scheduler.waiting_requests)) == ({}, {})
        assert managers[0].output_router.result_handlers == {}
        assert asyncio.run(_raw(port, {"max_tokens": 2})) == 200
    finally:
        one.should_exit = True
        thread.join(20)
    assert not managers[0].is_running()


async def _raw(port: int, body: dict, sent: float = 1.0, wait: bool = True, stay: float = 0.05) -> int | None:
    """Status of a completion on a connection of its own; without `wait` the client leaves.

    sent  how much of the request is sent
    stay  seconds after which the client leaves
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"prompt": "<tok7>", "temperature": 0, **body}).encode()
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}")
    whole = "\r\n".join([*head, "", ""]).encode() + data
    writer.write(whole[: int(sent * len(whole))])
    await writer.drain()
    try:
        if not wait:
            await asyncio.sleep(stay)
            return None
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_leaves_frees_the_model(listening, stream):
    """Twenty of them take less time than five that are generated to their end."""
    port = listening[0].base_url.port
    long = {"max_tokens": 50, "stream": stream, "stop": None}

    async def run() -> tuple[float, float]:
        assert await _raw(port, {"max_tokens": 2}) == 200
        start = time.perf_counter()
        assert await _raw(port, {**long, "stream": False}) == 200
        one = time.perf_counter() - start
        await asyncio.gather(*(_raw(port, long, wait=False) for _ in range(20)))
        start = time.perf_counter()
        assert await _raw(port, {"max_tokens": 2}) == 200
        return one, time.perf_counter() - start

    one, after = asyncio.run(run())
    assert after < max(5 * one, 1.0), (one, after)


@pytest.mark.ecosystem("applications")
def test_five_hundred_parallel_and_slow_clients(listening):
    """200 that never finish their request, 100 that leave, 200 that are answered; memory grows by
    less than 200 MB.
    """
    port = listening[0].base_url.port
    big = {"prompt": "<tok7> " * 2000, "max_tokens": 2}

    async def run() -> list[int | None]:
        slow = [asyncio.ensure_future(_raw(port, big, sent=0.01 * (i % 100))) for i in range(200)]
        gone = [_raw(port, {"max_tokens": 50, "stream": i % 2 == 0}, wait=False) for i in range(100)]
        asked = [_raw(port, {"max_tokens": 2}) for _ in range(200)]
        answers = await asyncio.gather(*asked, *gone)
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return [*answers[:200], await _raw(port, {"max_tokens": 2})]

    assert asyncio.run(_raw(port, {"max_tokens": 2})) == 200
    before = _peak()
    assert asyncio.run(run()) == [200] * 201
    assert _peak() - before < 200


def _peak() -> float:
    """The largest resident size of this process until now, in MB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("template", [True, False])
def test_every_reply_has_cors_headers_when_asked(folder, tmp_path, template):
    """Whatever answers: a route, the router (404, 405), validation (422), transformers (400), the
    middleware (400), an exception (500). A preflight is allowed at every
    path. Without `cors` no reply has them.
    """
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server
    from halfbyte.transformers.serve_requests import CHAT, RESPONSES

    where = shutil.copytree(folder, tmp_path / "model")
    if not template:
        (where / "chat_template.jinja").unlink()
    talk = {"model": "other", "messages": [{"role": "user", "content": "<tok7>"}]}
    asked = [
        (200, "GET", "/v1/models", None), (404, "GET", "/no/such", None), (405, "DELETE", "/v1/models", None),
        (405, "GET", CHAT, None), (400, "POST", "/v1/completions", ["no", "object"]),
        (400, "POST", "/v1/completions", {"model": "other", "prompt": "<tok7>"}), (400, "POST", CHAT, talk),
        (500, "GET", "/raises", None),
    ]  # fmt: skip
    origin = {"Origin": "https://page.example"}
    for cors in (True, False):
        app = server(where, name="tiny", cors=cors)

        @app.get("/raises")
        def raises():
            raise RuntimeError("no sentence for this")

        with TestClient(app, raise_server_exceptions=False) as client:
            for status, method, path, body in asked:
                reply = client.request(method, path, json=body, headers=origin)
                assert (reply.status_code, method, path) == (status, method, path)
                given = {k: v for k, v in reply.headers.items() if k.startswith("access-control")}
                wanted = {"access-control-allow-origin": origin["Origin"], "access-control-allow-credentials": "true"}
                assert given == (wanted if cors else {})
            for path in (CHAT, RESPONSES, "/v1/completions"):
                wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
                preflight = client.options(path, headers=origin | wish)
                assert preflight.status_code == (200 if cors else 405)
                assert preflight.headers.get("access-control-allow-origin") == (origin["Origin"] if cors else None)
                assert preflight.headers.get("access-control-allow-headers") == ("content-type" if cors else None)


def test_a_server_without_its_packages_says_so(folder, monkeypatch):
    """Each of them, and another version of transformers that has its parts elsewhere."""
    from halfbyte.transformers import serve as serving

    found = {"fastapi", "pydantic", "uvicorn"}
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: name in found or None)
    with pytest.raises(UnsupportedError, match=r"needs openai, not installed here; pip install 'halfbyte\[serve\]'"):
        serving.server(folder)
    found.add("openai")
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.server", None)
    with pytest.raises(UnsupportedError, match=r"is missing, .* pip install 'halfbyte\[serve\]'"):
        serving.server(folder)


TEMPLATES = {
    "{{ raise_exception('only one turn') }}": "TemplateError: only one turn",
    "{{ messages[9].content }}": "UndefinedError",
    "{% for m in messages %}": "TemplateSyntaxError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{{ messages[0].content + 1 }}": "TypeError",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_raises_is_a_message(tmp_path, template):
    with pytest.raises(UnsupportedError, match="the chat template does not render this conversation") as caught:
        render(write_tokenizer(tmp_path), [{"role": "user", "content": "a"}], template=template)
    assert TEMPLATES[template] in str(caught.value)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
FORMS = {
    "a list of tools": ("{% for t in tools %}{{ t }}{% endfor %}{{ messages[0]['content'] }}", "<tok7>"),
    "arguments as text": ("{{ '<tok8>' + messages[1]['tool_calls'][0]['function']['arguments'] }}", '<tok8>{"city": "Rome"}'),
    "arguments as given": ("{{ messages[1]['tool_calls'][0]['function']['arguments']['city'] }}", "Rome"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_gets_the_form_it_was_written_for(tmp_path, form):
    template, text = FORMS[form]
    tokenizer = write_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "<tok7>"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert render(tokenizer, messages, template=template) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert messages[1]["tool_calls"] == [CALL]
    assert isinstance(CALL["function"]["arguments"], dict)
