"""One item is prepared while the caller works on the one before."""

import threading
from collections.abc import Generator
from contextlib import closing

import pytest
from attention_client.enrich.job import read_ahead

PATIENCE_SECONDS = 60


def test_items_come_in_order_and_one_ahead() -> None:
    began = [threading.Event() for _ in range(3)]
    threads = set()

    def items() -> Generator[int, None, None]:
        for index, event in enumerate(began):
            threads.add(threading.current_thread().name)
            event.set()
            yield index

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert began[1].wait(PATIENCE_SECONDS)  # without being asked for
    assert not began[2].is_set()
    assert list(ahead) == [1, 2]
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_an_exception_comes_after_the_items_before_it() -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        raise OSError("the disk is gone")

    ahead = read_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert list(read_ahead(iter_of())) == []


def test_closing_closes_the_items() -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield from range(100)
        finally:
            closed.set()

    with closing(read_ahead(items())) as ahead:
        assert next(ahead) == 0
    assert closed.is_set()


def iter_of(*items: int) -> Generator[int, None, None]:
    yield from items
