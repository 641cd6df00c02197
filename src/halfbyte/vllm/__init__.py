"""A plug-in for vLLM: its layers multiply the packed weights of any checkpoint that halfbyte reads.

    pip install 'halfbyte[vllm]'
    vllm serve FOLDER                            where this vLLM cannot read the folder's weights
    vllm serve FOLDER --quantization halfbyte    always
    vllm serve model.gguf --config-format halfbyte --tokenizer-mode halfbyte

`register` is the entry point of the group `vllm.general_plugins`. It adds a quantization method, a
load format, a config format and a tokenizer mode, all named "halfbyte". Of what vLLM has it changes
one function: the one that looks for a speculative model passes over GGUF files (`gguf`). A
checkpoint that this vLLM reads by itself on this device is left to it unless `--quantization
halfbyte` is given.
"""

from __future__ import annotations


def register() -> None:
    """Add the names to vLLM. May be called more than once."""
    from .config import register_config
    from .gguf import register_gguf
    from .loader import register_loader

    register_config()
    register_loader()
    register_gguf()
