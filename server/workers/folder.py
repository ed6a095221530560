"""The temporary folder of a service: removed when it ends, also if its supervisor was killed.

A supervisor that is killed cannot remove its folder. Its workers do so when they find the pipe closed. If
those were killed too, the next service of the same user that starts removes the folder: a lock that the
system releases with the process shows which folders are in use.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attention_serving.server.errors import WorkerError

PREFIX = "attention-metrics-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder that only this user can read, and removes it and abandoned ones of the same kind.

    Raises:
        WorkerError: The system's folder for temporary files cannot be written to.
    """
    try:
        _remove_abandoned()
        folder, descriptor = _make_locked()
    except OSError as error:
        raise WorkerError(f"a temporary folder is needed: {error.strerror}") from error
    try:
        yield folder
    finally:
        remove(folder)
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a folder. Processes that still write to its files are not disturbed."""
    shutil.rmtree(folder, ignore_errors=True)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)  # another service that started at this moment took it for abandoned


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or has just been removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)
            finally:
                os.close(descriptor)
