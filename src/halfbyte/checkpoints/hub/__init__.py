"""Checkpoints on the Hugging Face hub: headers over HTTP range requests, whole files through its
cache.

    parse_name("org/name@main")     HubName, None for what is no repository's name
    open_remote(name, ...)          a checkpoint of which only headers are read
    local_copy(name)                the files of a checkpoint in the hub's cache, sizes reported first

`huggingface_hub` (extra `halfbyte[hub]`) is imported when it is first used; its cache, token,
endpoint (HF_ENDPOINT) and offline switch (HF_HUB_OFFLINE) hold.
"""

from .names import HubName, parse_name
from .open import is_offline, local_copy, open_remote
from .repository import HubWarning

__all__ = ["HubName", "HubWarning", "is_offline", "local_copy", "open_remote", "parse_name"]
