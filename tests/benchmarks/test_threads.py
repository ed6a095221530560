"""The trace of threads: what they used between two readings."""

import os
import threading

from attention_serving.server.threads import publish_name
from benchmarks.threads import Reading, ThreadUse, idle_seconds, read, used


def test_threads_of_one_name_are_added_and_the_busiest_comes_first() -> None:
    before = {"1": Reading("calls", 1.0, 0.5, 10), "2": Reading("scheduler", 0.0, 0.0, 0)}
    after = {
        "1": Reading("calls", 1.5, 0.5, 30),
        "2": Reading("scheduler", 1.0, 0.0, 100),
        "3": Reading("scheduler", 0.5, 0.5, 100),
    }
    found = used(before, after, seconds=2.0, requests=100)
    assert found == [ThreadUse("scheduler", 0.75, 0.25, 2.0), ThreadUse("calls", 0.25, 0.0, 0.2)]


def test_a_thread_that_publishes_its_name_is_read_by_it() -> None:
    names: list[str] = []

    def body() -> None:
        publish_name()
        names.extend(reading.name for reading in read(os.getpid()).values())

    thread = threading.Thread(target=body, name="calls (with spaces)")
    thread.start()
    thread.join()
    assert "calls (with spa" in names


def test_idle_time_does_not_run_backwards() -> None:
    before = idle_seconds()
    assert 0 < before <= idle_seconds()
