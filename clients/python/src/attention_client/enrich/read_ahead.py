"""Prepares the next item on a thread, while the caller works on the last one."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yields the items of a generator, which runs on a thread, one item ahead.

    Its exceptions are raised here. Closing this generator waits for the item in progress.
    """
    end = object()
    try:
        with ThreadPoolExecutor(1, "read-ahead") as thread:
            item = thread.submit(next, items, end)
            while (ready := item.result()) is not end:
                item = thread.submit(next, items, end)
                yield ready  # type: ignore[misc] - it is not the end
    finally:
        items.close()
