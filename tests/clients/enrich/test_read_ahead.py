"""One item is prepared while the caller works on the one before."""

import threading
from collections.abc import Generator

import pytest
from attention_client.enrich.job import read_ahead

PATIENCE_SECONDS = 60


def test_items_come_in_order_one_ahead_and_end_with_their_exception() -> None:
    began = [threading.Event() for _ in range(3)]
    threads = set()

    def items() -> Generator[int, None, None]:
        for index, event in enumerate(began):
            threads.add(threading.current_thread().name)
            event.set()
            yield index
        raise OSError("the disk is gone")

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert began[1].wait(PATIENCE_SECONDS)  # without being asked for
    assert not began[2].is_set()
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert len(threads - {threading.current_thread().name}) == 1


def test_closing_closes_the_items() -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield from range(100)
        finally:
            closed.set()

    ahead = read_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert closed.is_set()
