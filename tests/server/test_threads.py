"""Periodic threads."""

import queue
import threading
from pathlib import Path

import pytest

from attention_serving.server.threads import PeriodicThread


def test_the_work_is_called_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    calls: queue.Queue[str] = queue.Queue()

    def work() -> None:
        calls.put(Path("/proc/self/task", str(threading.get_native_id()), "comm").read_text().strip())
        raise ValueError("of the work")

    thread = PeriodicThread("counts", work, 0.0)
    thread.start()
    assert [calls.get(timeout=30) for _ in range(3)] == ["counts"] * 3
    thread.close()
    assert "periodic work failed" in caplog.text
    assert "of the work" in caplog.text


def test_the_time_to_wait_is_asked_before_each_call() -> None:
    asked: queue.Queue[int] = queue.Queue()
    worked: queue.Queue[int] = queue.Queue()

    def seconds() -> float:
        asked.put(worked.qsize())
        return 0.0 if worked.qsize() < 2 else 3600.0

    thread = PeriodicThread("waits", lambda: worked.put(0), seconds)
    thread.start()
    assert [asked.get(timeout=30) for _ in range(3)] == [0, 1, 2]
    thread.close()
    assert worked.qsize() == 2


def test_a_thread_that_was_not_started_is_closed() -> None:
    PeriodicThread("idle", lambda: pytest.fail("called"), 0.0).close()
