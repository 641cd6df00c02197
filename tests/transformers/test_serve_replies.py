"""Replies of the server: where they end, and by which reason, streamed and whole."""

from __future__ import annotations

import json
import shutil

import pytest

from halfbyte.generation.single import Generation
from halfbyte.generation.streams import until_stop
from halfbyte.transformers import load_model
from support.tiny_models import write_tiny
from support.tiny_tokenizer import TEMPLATE, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("replies") / "tiny"
    where.mkdir()
    write_tiny(where, "llama", "mlx")
    write_tokenizer(where, TEMPLATE)
    return where


def _streamed(reply: str) -> tuple[str, str, int]:
    """(text, finish_reason, completion tokens) of an event stream."""
    text, finish, tokens = "", "", 0
    for line in filter(None, reply.splitlines()):
        if (data := line.removeprefix("data: ")) != "[DONE]":
            chunk = json.loads(data)
            choice = chunk["choices"][0]
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return text, finish, tokens


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stop_string_and_what_follows_are_left_out(folder, path, stream):
    """Every part of an answer as a stop string, alone and beside others, as OpenAI's API has it:
    the text before it, "stop", and not a token more than its end takes.
    """
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server

    prompt = {"prompt": "<tok7>"} if path == "completions" else {"messages": [{"role": "user", "content": "<tok7>"}]}
    with TestClient(server(folder, name="tiny")) as client:

        def ask(count: int, stop: str | list[str] | None = None) -> tuple[str, str, int]:
            body = {**prompt, "max_tokens": count, "temperature": 0, "stream": stream, "stop": stop}
            reply = client.post(f"/v1/{path}", json=body)
            assert reply.status_code == 200, reply.text
            if stream:
                return _streamed(reply.text)
            choice, used = reply.json()["choices"][0], reply.json()["usage"]["completion_tokens"]
            return choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"], used

        parts = [ask(count) for count in range(1, 4)]
        assert [(finish, used) for _, finish, used in parts] == [("length", count) for count in range(1, 4)]
        texts = [text for text, _, _ in parts]
        whole = texts[-1]
        assert len(whole) > 12
        stops = sorted({whole[i:j] for i in range(len(whole)) for j in range(i + 1, len(whole) + 1)})
        lists = [[stops[i], stops[-i]] for i in range(1, len(stops), 7)] + [["no", stops[5] + "!"], []]
        for stop in [*stops, *lists, None]:
            every = [stop] if isinstance(stop, str) else stop or []
            found = any(s in whole for s in every)
            used = next(count for count, text in enumerate(texts, 1) if not found or any(s in text for s in every))
            used = used if found else 3
            assert ask(3, stop) == (until_stop(whole, every), "stop" if found else "length", used), stop


@pytest.mark.ecosystem("applications")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batching", [False, True])
def test_a_reply_that_ends_with_its_last_allowed_token(folder, batching, stream):
    """It ended itself: "stop"."""
    from fastapi.testclient import TestClient

    from halfbyte.transformers.serve import server

    free = Generation(*load_model(folder), "<tok7>", max_tokens=3, stop_ids=set())
    list(free)
    where = folder.parent / f"ends-{batching}-{stream}"
    shutil.copytree(folder, where)
    (where / "generation_config.json").write_text(json.dumps({"eos_token_id": free.tokens[2]}))
    ends = free.tokens.index(free.tokens[2]) + 1
    with TestClient(server(where, name="tiny", batching=batching)) as client:
        body = {"prompt": "<tok7>", "max_tokens": ends, "temperature": 0, "stream": stream}
        reply = client.post("/v1/completions", json=body)
        finish = _streamed(reply.text)[1] if stream else reply.json()["choices"][0]["finish_reason"]
    assert finish == "stop"
