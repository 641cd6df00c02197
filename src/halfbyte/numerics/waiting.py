"""How torch's threads wait: asleep, so that the kernels' own threads find a free core.

libgomp's threads spin for milliseconds after each parallel piece of torch, on the very cores that
halfbyte's pool then wants: with two threads on two cores a prompt took twice as long. The library
reads the policy once, when torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

POLICY = "OMP_WAIT_POLICY"


def let_threads_sleep() -> bool:
    """Sets OMP_WAIT_POLICY to passive unless it is set or torch is already imported; True when it
    did.
    """
    if "torch" in sys.modules or POLICY in os.environ:
        return False
    let_threads_of_started_processes_sleep(os.environ)
    return True


def let_threads_of_started_processes_sleep(environment: MutableMapping[str, str]) -> None:
    """The same in the environment that a process not yet started will get; what the user has set
    stays.
    """
    environment.setdefault(POLICY, "passive")
