"""Tasks in the background: their results, and what happens where no thread can be started."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import CancelledError

import pytest

from halfbyte.numerics.background import Background


def never_runs(function, arguments):
    """A thread that dies before its first instruction, as for want of memory."""


def cannot_start(function, arguments):
    raise RuntimeError("can't start new thread")


@pytest.fixture(params=["threads", cannot_start, never_runs])
def start(request, monkeypatch):
    if request.param != "threads":
        monkeypatch.setattr(_thread, "start_new_thread", request.param)


def test_every_task_is_called_once_and_gives_its_own_result(start):
    called = []
    with Background(3) as background:
        tasks = [background.submit(lambda i: called.append(i) or i * i, i) for i in range(50)]
        assert [task.result() for task in tasks] == [i * i for i in range(50)]
    assert sorted(called) == list(range(50))


def test_an_error_is_raised_where_the_result_is_asked_for(start):
    with Background(1) as background:
        bad, good = background.submit(int, "x"), background.submit(int, "7")
        with pytest.raises(ValueError, match="invalid literal"):
            bad.result()
        assert good.result() == 7


def test_tasks_run_beside_the_caller():
    met = threading.Barrier(3, timeout=20)
    with Background(2) as background:
        tasks = [background.submit(met.wait) for _ in range(2)]
        met.wait()
        assert sorted(task.result() >= 0 for task in tasks) == [True, True]


def test_the_end_waits_for_what_has_begun_and_drops_the_rest():
    begun, go, ended = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        go.wait(20)
        ended.append("slow")

    with Background(1) as background:
        first, second = background.submit(slow), background.submit(ended.append, "second")
        assert begun.wait(20)
        threading.Timer(0.05, go.set).start()
    assert first.done()
    assert ended == ["slow"]
    with pytest.raises(CancelledError):
        second.result()
