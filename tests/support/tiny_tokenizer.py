"""A tokenizer of one token a word for the tiny models, saved beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from support.tiny_configs import VOCAB
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
    " <{{ m.role }}> {{ m.content }} <end>{% endfor %}{% if add_generation_prompt %} <assistant>{% endif %}"
)
"""As Gemma's: it knows no system message."""


def write_tokenizer(folder: Path, template: str | None = None) -> Any:
    """<tok3> … <tok95> and the roles' marks; bos added."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<user>": 3, "<assistant>": 4, "<end>": 5}
    vocabulary = words | {f"<tok{i}>": i for i in range(6, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast
