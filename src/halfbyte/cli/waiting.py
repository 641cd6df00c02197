"""How torch's threads wait: asleep, so that the kernels' own threads find a free core.

libgomp's threads spin for milliseconds after each parallel piece of torch, on the very cores that
halfbyte's pool then wants: with two threads on two cores a prompt took twice as long. The library
reads the policy once, when torch is imported.
"""

from __future__ import annotations

import os
import sys

POLICY = "OMP_WAIT_POLICY"


def let_threads_sleep() -> bool:
    """Sets OMP_WAIT_POLICY to passive unless it is set or torch is already imported; True when it
    did.
    """
    if "torch" in sys.modules or POLICY in os.environ:
        return False
    os.environ[POLICY] = "passive"
    return True
