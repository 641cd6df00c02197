"""A session that goes back to its first tokens is that of those tokens alone, in both engines; a
text that begins as another one did computes the rest alone.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import torch
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.generation import native_model as native_module
from halfbyte.generation.chat import Chat
from halfbyte.generation.native_model import native_model
from halfbyte.generation.single import Generation, GenerationError, check_continues, resumed
from halfbyte.transformers import load_model
from halfbyte.transformers.decode.session import DecodeSession
from support.cpu_weights import needs_native
from support.gguf_families import FAMILIES, family_model
from support.gguf_models import dense_model, write
from support.gguf_writer import Q8_0
from support.tiny_models import agree, write_tiny
from support.tiny_tokenizer import TEMPLATE, write_tokenizer

COMPUTED = ("llama", "llama-3", "qwen2", "qwen3", "gemma3")
"""Models of both engines; gemma3 has layers with a window of 4 tokens."""
PROMPT, SINGLE, OTHER = [5, 7, 11, 9, 3, 8, 6, 4, 10], range(20, 27), [15, 16, 17, 18]
LENGTH = len(PROMPT) + len(SINGLE)


def fed(session, *feeds):
    for feed in feeds:
        logits = session(feed)
    return torch.from_numpy(np.array(logits)) if isinstance(logits, np.ndarray) else logits.float().clone()


def started(make):
    session = make()
    fed(session, PROMPT, *([t] for t in SINGLE))
    assert session.tokens == [*PROMPT, *SINGLE]
    return session


def check(make, count):
    """Whether the session went back; either way the next logits are those of a fresh session."""
    session, wanted = started(make), make()
    back = session.rewind(count)
    feeds = [list(session.tokens)] if back else [PROMPT, *([t] for t in SINGLE)]
    assert session.tokens == [*PROMPT, *SINGLE][: count if back else LENGTH]
    fed(wanted, *feeds)
    for feed in (OTHER, [19]):
        assert agree(fed(session, feed), fed(wanted, feed))
    return back


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    @functools.cache
    def of(name, engine):
        path = write(tmp_path_factory.mktemp("sessions") / f"{name}.gguf", name, dense_model(name), packed=True, kinds=(Q8_0,))
        if engine == "transformers":
            model = load_model(path)[0]
            return functools.partial(DecodeSession, model)
        with open_checkpoint(path) as checkpoint:
            return native_model(checkpoint).session

    return of


@needs_native
@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("name", COMPUTED)
def test_any_number_of_tokens_is_taken_back(engines, monkeypatch, name, engine):
    monkeypatch.setattr(native_module, "SPARE", 5)  # caches move now and then
    back = [check(engines(name, engine), count) for count in range(1, LENGTH + 1)]
    assert back[-1], "nothing to take back"
    assert all(back) == (name != "gemma3"), "a window of 4 has moved on"


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_architecture_goes_back_or_keeps_all(arch):
    model = family_model(arch).eval()
    if not model.can_generate():
        with pytest.raises(GenerationError, match="makes vectors"):
            check_continues("generate", model)
        return
    with torch.inference_mode():
        check(functools.partial(DecodeSession, model), LENGTH - 2)


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_architecture_goes_on_as_if_it_read_the_text_at_once(arch):
    """A text that goes on behind a session's, by several tokens: some models with other states than
    keys and values compute such tokens as if none preceded them.
    """
    model = family_model(arch).eval()
    if not model.can_generate() or model.config.is_encoder_decoder:
        return
    whole = [*PROMPT, *SINGLE, *OTHER]
    with torch.inference_mode():
        session, first = resumed(started(functools.partial(DecodeSession, model)), whole)
        session = session or DecodeSession(model)
        assert agree(fed(session, whole[first:]), fed(DecodeSession(model), whole))
    assert first == LENGTH or model._is_stateful or "conv" in str(getattr(model.config, "layer_types", ""))


@pytest.mark.parametrize("arch", ["mamba", "mamba2", "mamba:falcon", "jamba", "gptneox"])
def test_a_long_prompt_of_a_model_with_states_is_one_pass(talker, arch, monkeypatch):
    """Their attention is transformers' "eager" one, which would divide it."""
    monkeypatch.setattr("halfbyte.generation.single.STORED_SCORES", 64)
    model = family_model(arch).eval()
    model.config._attn_implementation = "eager"
    passes, plain = [], DecodeSession.__call__
    monkeypatch.setattr(DecodeSession, "__call__", lambda self, ids: passes.append(len(ids)) or plain(self, ids))
    prompt = [token % 40 for token in range(40)]
    found = Generation(model, talker[1], prompt, max_tokens=1, stop_ids=set(range(model.config.vocab_size)))
    list(found)
    assert passes == ([16, 16, 8] if arch == "gptneox" else [40])
    with torch.inference_mode():
        assert found.tokens == [int(model(torch.tensor([prompt])).logits[0, -1].argmax())]


@pytest.mark.parametrize(("ids", "first"), [
    ([1, 2, 3, 4, 9], 4), ([1, 2, 3, 4], 3), ([1, 2, 9], 2), ([1], 0), ([9, 2], 0), ([1, 2, 3, 4, 5, 6], 4),
])  # fmt: skip
def test_what_two_texts_begin_with(ids, first):
    """All that the session computed at most, and never the last token, whose logits are wanted."""

    class Session:
        tokens, went = [1, 2, 3, 4], None

        def rewind(self, count):
            self.went = count
            return True

    session = Session()
    assert resumed(session, ids) == ((session, first) if first else (None, 0))
    assert session.went == (first or None)
    assert resumed(None, ids) == (None, 0)


def test_a_session_that_cannot_go_back_is_left():
    class Session:
        tokens = (1, 2, 3)
        rewind = staticmethod(lambda count: count == 3)

    assert resumed(Session(), [1, 2, 9]) == (None, 0)
    assert resumed(Session(), [1, 2, 3, 9])[1] == 3


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_tiny(folder, "llama", "mlx")
    write_tokenizer(folder, TEMPLATE)
    return load_model(folder)


def test_a_conversation_computes_each_token_once(talker, monkeypatch):
    """Replies are those of a conversation that begins anew at each turn."""
    fed, plain = [], DecodeSession.__call__
    monkeypatch.setattr(DecodeSession, "__call__", lambda self, ids: fed.extend(ids) or plain(self, ids))
    chat = Chat(*talker, max_tokens=4)
    for number, message in enumerate(["<tok7> <tok8>", "<tok9>", "<tok10> <tok11> <tok12>"]):
        fed.clear()
        before = list(chat.last.session.tokens) if chat.last else []
        reply = "".join(chat.say(message))
        assert len(fed) == len(chat.last.session.tokens) - len(before)
        assert chat.last.session.tokens == [*chat.last.prompt_ids, *chat.last.tokens[:-1]]
        anew = Generation(*talker, chat.last.prompt_ids, max_tokens=4)
        assert "".join(piece.text for piece in anew) == reply
        assert number == 0 or before == chat.last.prompt_ids[: len(before)]


def test_a_turn_that_is_broken_off_leaves_no_session(talker, monkeypatch):
    chat = Chat(*talker, max_tokens=4)
    list(chat.say("<tok7>"))
    plain = DecodeSession.__call__

    def broken(self, ids):
        plain(self, ids)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DecodeSession, "__call__", broken)
        with pytest.raises(KeyboardInterrupt):
            list(chat.say("<tok8>"))
    assert chat.last.session is None
    reply = "".join(chat.say("<tok9>"))
    anew = Generation(*talker, chat.last.prompt_ids, max_tokens=4)
    assert "".join(piece.text for piece in anew) == reply


def test_a_conversation_begun_anew_keeps_what_it_has_in_common(talker):
    chat = Chat(*talker, max_tokens=2)
    list(chat.say("<tok7> <tok8> <tok9>"))
    chat.reset()
    list(chat.say("<tok7> <tok8> <tok10>"))
    assert chat.last.session.tokens[: len(chat.last.prompt_ids)] == chat.last.prompt_ids


def test_a_message_without_a_reply_does_not_join_the_conversation(talker):
    """Its prompt does not fit the context: the next message is answered as if it had not been."""
    chat, other = Chat(*talker, max_tokens=2), Chat(*talker, max_tokens=2)
    list(chat.say("<tok7>"))
    before = list(chat.messages)
    with pytest.raises(GenerationError, match="tokens; the model takes up to"):
        list(chat.say("<tok8> " * chat.last.context))
    assert chat.messages == before
    list(other.say("<tok7>"))
    assert "".join(chat.say("<tok9>")) == "".join(other.say("<tok9>"))
    assert chat.messages == other.messages
