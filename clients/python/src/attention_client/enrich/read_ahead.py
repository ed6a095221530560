"""Prepares the next item on a thread, while the caller works on the last one."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

Item = TypeVar("Item")


class _End(Enum):
    REACHED = "no item is left"


def read_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yields the items of a generator, which runs on a thread, one item ahead.

    Its exceptions are raised here. Closing this generator waits for the item in progress.
    """
    try:
        with ThreadPoolExecutor(1, "read-ahead") as thread:
            item = thread.submit(next, items, _End.REACHED)
            while not isinstance(ready := item.result(), _End):
                item = thread.submit(next, items, _End.REACHED)
                yield ready
    finally:
        items.close()
