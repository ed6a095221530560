"""Folders that processes lock while they use them, so that what a killed process leaves can be removed."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def lock(folder: Path, operation: int) -> Iterator[None]:
    """Locks a folder until the block ends.

    Args:
        folder: The folder.
        operation: Of `fcntl.flock`.

    Raises:
        BlockingIOError: Another process holds a lock, and the operation does not wait.
        OSError: The folder does not exist, or its file system does not have locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def remove_unused(folders: Iterable[Path]) -> None:
    """Removes the folders that no process has locked."""
    for folder in folders:
        with suppress(OSError), lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
