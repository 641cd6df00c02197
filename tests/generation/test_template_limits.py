"""A chat template cannot loop for ever or fill memory."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfbyte.errors import HalfbyteError
from halfbyte.generation import template_limits as limits
from halfbyte.generation.chat import Chat
from halfbyte.generation.template_limits import TemplateLimitError, template_limits

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(x='x' * 4096) %}{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


class Tokenizer:
    """Renders as transformers does, in the immutable sandbox."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages, chat_template=None, **_):
        template = ImmutableSandboxedEnvironment().from_string(chat_template or self.chat_template)
        return {"input_ids": [len(template.render(messages=messages))]}


@pytest.mark.parametrize(
    "template", [LOOPS, pytest.param(GROWS, marks=pytest.mark.skipif(sys.platform != "linux", reason="/proc"))]
)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.3 if template == LOOPS else 60)
    monkeypatch.setattr(limits, "MEGABYTES", 100)
    chat = Chat(None, Tokenizer(template))
    chat.messages.append({"role": "user", "content": "hello"})
    start = time.monotonic()
    with pytest.raises(HalfbyteError, match="the chat template takes over"):
        chat.prompt()
    assert time.monotonic() - start < 20


def test_what_ends_in_time_is_untouched():
    chat = Chat(None, Tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))
    chat.messages.append({"role": "user", "content": "hello"})
    assert chat.prompt() == [5]
    assert not [t for t in threading.enumerate() if t.name == "halfbyte-template"]


def test_the_error_comes_within_the_block_only():
    for _ in range(20):
        raised = None
        try:
            with template_limits(seconds=0.02):
                end = time.monotonic() + 0.03
                while time.monotonic() < end:
                    pass
        except TemplateLimitError as error:
            raised = error
        assert raised is not None or time.monotonic() >= end
    time.sleep(0.05)  # an error that comes late would be raised here


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10000000000000 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{% set n = 100000 * 100000 %}{{ 'ab' * n }}",
    ],
)
def test_one_operation_cannot_fill_memory(template):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    chat = Chat(None, Tokenizer(template))
    chat.messages.append({"role": "user", "content": "hello"})
    with pytest.raises(HalfbyteError, match=r"the chat template (takes over|does not render)"):
        chat.prompt()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 << 20


@pytest.mark.parametrize(
    "template", ["{{ 9 ** 9 ** 9 }}", "{% set x = 9 %}{{ x\n**x**x }}", "{% generation %}{{ 9**9**9 }}{% endgeneration %}"]
)
def test_powers_are_refused(template):
    start = time.monotonic()
    chat = Chat(None, Tokenizer(template))
    chat.messages.append({"role": "user", "content": "hello"})
    with pytest.raises(HalfbyteError, match="raises a number to a power"):
        chat.prompt()
    assert time.monotonic() - start < 5


def test_stars_that_are_no_power_are_rendered():
    chat = Chat(None, Tokenizer("**{{ '**' }}{% for m in messages %}{{ m.content }}{% endfor %}"))
    chat.messages.append({"role": "user", "content": "hello"})
    assert chat.prompt() == [9]
