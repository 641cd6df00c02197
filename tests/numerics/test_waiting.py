"""torch's idle threads sleep in our commands, unless the user says otherwise, and peers are left as
they are.
"""

from __future__ import annotations

import os
import sys

import pytest

from halfbyte.bench.model import race as model
from halfbyte.cli import main
from halfbyte.numerics.waiting import POLICY


@pytest.mark.parametrize(
    ("command", "before", "torch_there", "after"),
    [
        ("backends", None, False, "passive"),
        ("backends", "active", False, "active"),
        ("backends", None, True, None),
        ("bench", None, False, None),
    ],
)
def test_who_waits_how(monkeypatch, command, before, torch_there, after):
    monkeypatch.setenv(POLICY, before or "")
    if before is None:
        monkeypatch.delenv(POLICY)
    if torch_there:
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    main([command, "--help"])
    assert os.environ.get(POLICY) == after


@pytest.mark.parametrize(("what", "policy"), [("int8", "passive"), ("exact", "passive"), (model.LLAMA, None)])
def test_a_contender_gets_the_policy_and_a_peer_does_not(monkeypatch, tmp_path, what, policy):
    monkeypatch.delenv(POLICY, raising=False)
    seen = {}

    class Done:
        returncode, stdout, stderr = 0, "{}", ""

    monkeypatch.setattr(model.subprocess, "run", lambda command, env, **rest: seen.update(env) or Done())
    assert model.run_one(what, tmp_path, 2, 8, 8, "wall") == {}
    assert seen.get(POLICY) == policy
    assert seen["OMP_NUM_THREADS"] == "2"
