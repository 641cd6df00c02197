"""A plug-in for vLLM: its layers multiply the packed weights of any checkpoint that halfbyte reads.

    pip install 'halfbyte[vllm]'
    vllm serve FOLDER                            where this vLLM cannot read the folder's weights
    vllm serve FOLDER --quantization halfbyte    always

`register` is the entry point of the group `vllm.general_plugins`. It adds the quantization method
"halfbyte" and the load format "halfbyte", and changes nothing that vLLM has: a checkpoint that this
vLLM reads by itself on this device is left to it unless `--quantization halfbyte` is given.
"""

from __future__ import annotations


def register() -> None:
    """Add the quantization method and the load format to vLLM. May be called more than once."""
    from .config import register_config
    from .loader import register_loader

    register_config()
    register_loader()
