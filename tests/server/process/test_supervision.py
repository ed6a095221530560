"""How processes of a child end, what its parent then knows, and when the next one starts."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from attention_serving.server.errors import ServerError
from attention_serving.server.lifecycle import SERVES, run_child
from attention_serving.server.process.supervision import Child, Event, backoff

PATIENCE_SECONDS = 60


def serve(connection: Any, assignment: str) -> None:
    """The program of a child, which begins to serve and then does as it was assigned."""
    if assignment == "fail":
        raise ServerError("has no models")
    if os.environ["CUDA_VISIBLE_DEVICES"] != "GPU-3":
        raise ServerError("has another device")
    connection.send(SERVES)
    time.sleep(PATIENCE_SECONDS)


@contextmanager
def started(assignment: str) -> Iterator[tuple[Child, "queue.Queue[Event]"]]:
    """A child, and what it reports."""
    events: queue.Queue[Event] = queue.Queue()
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-3"}
    child = Child("child", __name__, assignment, 2, 3, events.put, variables=variables)
    child.start()
    yield child, events
    child.close(0)


@pytest.mark.parametrize(
    ("assignment", "kind", "reason"),
    [
        ("fail", "exited", "has no models"),
        ("be killed", "killed", "child 3 was killed by signal 9"),
        ("be silent", "unresponsive", "child 3 did not answer for 2 s and was killed"),
    ],
)
def test_an_end_is_reported_and_the_process_replaced(assignment: str, kind: str, reason: str) -> None:
    with started(assignment) as (child, events):
        if assignment != "fail":
            assert events.get(timeout=PATIENCE_SECONDS) == (3, None, "")
            assert child.serves
        if assignment == "be killed":
            assert child.pid
            os.kill(child.pid, signal.SIGKILL)
        assert events.get(timeout=PATIENCE_SECONDS) == (3, kind, reason)
        assert events.get(timeout=PATIENCE_SECONDS)


def test_a_drain_ends_the_process_and_is_not_an_end_that_is_reported() -> None:
    with started("wait") as (child, events):
        assert events.get(timeout=PATIENCE_SECONDS) == (3, None, "")
        child.drain()
        assert child.ended.wait(PATIENCE_SECONDS)
    assert (child.pid, child.serves, events.empty()) == (None, False, True)


def test_the_delay_doubles_up_to_its_maximum_while_processes_keep_ending() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(backoff(delays[-1], lived_seconds=29.0))
    assert delays[1:] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff(30, lived_seconds=31.0) == 0.5  # after long service


if __name__ == "__main__":
    run_child(serve)
