"""Which GGUF files can be run as models here, and why others cannot: tables over llama.cpp's
architectures and vocabularies.

    refusal(metadata)      None, or "architecture 'mamba2' has no table of its tensors here"

The weights of every file can be opened, inspected, verified, converted and multiplied one by one;
only running it as a model needs more. `gguf_models` builds the models; a test holds these
tables to its registries and to docs/gguf-models.md.
"""

from __future__ import annotations

from .metadata import Metadata

READ = frozenset(
    {
        "afmoe", "apertus", "arcee", "baichuan", "bailingmoe2", "bailingmoe3", "bert", "bitnet", "bloom", "chatglm",
        "codeshell", "cohere2", "cohere2moe", "command-r", "dbrx", "deepseek2", "deepseek32", "deepseek4", "dots1", "dots3note",
        "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma",
        "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4", "glm-dsa", "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox",
        "granite", "granite_swa", "granitehybrid", "granitemoe", "hrm_text", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl",
        "hy_v3", "hy_v4", "internlm2", "jais2", "jamba", "jina-bert-v3", "kimi-linear", "laguna", "lfm2", "lfm2moe", "llama",
        "llama-embed", "llama4", "maincoder", "mamba", "mamba2", "mellum", "mimo2", "minicpm", "minicpm3", "minimax-m2",
        "minimax-m3", "mistral3", "mistral4", "modern-bert", "mpt", "nemotron", "nemotron_h", "nemotron_h_moe", "nomic-bert",
        "olmo", "olmo2", "olmoe", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "phimoe", "qwen", "qwen2", "qwen2moe",
        "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "qwen4exp", "seed_oss",
        "smallthinker", "smollm3", "stablelm", "starcoder", "starcoder2", "t5", "t5encoder", "xverse",
    }
)  # fmt: skip
"""Values of general.architecture whose files become transformers models."""

NO_MODEL = "transformers has no such model"
NO_DECODER = "it does not continue text, and has no table here: an encoder, a projector or a decoder of sound or drafts"
NO_FORMAT = "llama.cpp has its name alone: no files are written, and it does not run them"
WHOLE_HEADS = "its files rotate half of each head, and transformers' class of it the whole"
WITH_VISION = "transformers has it only together with the tower for images, whose tensors the file does not have"

_GROUPS = {
    NO_MODEL: (
        "deci grok refact plamo plamo2 plamo3 maple arctic jais openelm rwkv6 rwkv6qwen2 rwkv7 arwkv7 graniteswitch plm "
        "bailingmoe llada llada-moe dream grovemoe rnd1 cogvlm spark2_5 kimi-k3 talkie nanbeige deepseek"
    ),
    NO_DECODER: ("clip nomic-bert-moe neo-bert jina-bert-v2 wavtokenizer-dec eagle3 dflash gemma4-assistant qwen3tts pockettts"),
    NO_FORMAT: "gptj",
    WHOLE_HEADS: "minimax-01",
    WITH_VISION: "chameleon deepseek2-ocr glm5-next muse-glimmer step35",
}
UNREAD: dict[str, str] = {name: why for why, names in _GROUPS.items() for name in names.split()}
"""llama.cpp's other architectures, and why they are not read."""

VOCABULARIES = ("llama", "gpt2", "gemma4", "bert", "t5", "rwkv", "plamo2", "whitespace")
"""Values of tokenizer.ggml.model that are read."""
PRE_TOKENIZERS = frozenset(
    {
        "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell", "cohere2moe",
        "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "default", "exaone",
        "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5", "gpt-2",
        "gpt-4o", "gpt2", "gpt3-finnish", "granite-docling", "granite-embed-multi-311m", "granite-embed-multi-97m", "grok-2",
        "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code",
        "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna", "lfm2", "llada-moe",
        "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b", "minicpm5",
        "minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "poro-chat", "qwen2", "qwen35", "refact",
        "roberta-bpe", "sarvam-moe", "seed-coder", "smaug-bpe", "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder",
        "superbpe", "talkie", "tekken", "tiny_aya", "trillion", "ufakzeka", "viking", "whitespace", "youtu",
    }
)  # fmt: skip
"""Values of tokenizer.ggml.pre whose expressions are known, for vocabularies of kind gpt2."""
UNREAD_VOCABULARIES: dict[str, str] = {
    "hybriddna": "its DNA markers switch between two vocabularies, which the tokenizers library cannot express",
    "no_vocab": "the file has no vocabulary",
    "none": "the file has no vocabulary",
}
"""Others that llama.cpp knows, and why they are not read."""


def refusal(metadata: Metadata, tokenizer_beside: bool = False) -> str | None:
    """Why a file cannot be run as a model here, None where nothing in its key-values says so.

    tokenizer_beside  there is a `tokenizer.json`, which serves a vocabulary that is not read
    """
    architecture = metadata.typed("general.architecture", "string", "")
    if architecture not in READ:
        return f"architecture {architecture!r}: {UNREAD.get(architecture, 'llama.cpp does not know it either, or it is newer')}"
    kind = metadata.typed("tokenizer.ggml.model", "string")
    if tokenizer_beside:
        return None
    if kind is not None and kind not in VOCABULARIES:
        return f"vocabulary {kind!r}: {UNREAD_VOCABULARIES.get(kind, 'not a kind that llama.cpp writes')}"
    pre = metadata.typed("tokenizer.ggml.pre", "string", "default")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        return f"pre-tokenizer {pre!r}: llama.cpp does not know it either, or it is newer"
    return None
