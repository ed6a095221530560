"""Regions of system shared memory that callers register, and that tensors are read from and written to.

The regions are files in /dev/shm. They are read and written with system calls, not mapped: access to a
mapping of a file that was truncated would end the process, whereas a read returns less than was asked for.
"""

import os
import re
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_serving.server.engine.errors import (
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    RegionNotFoundError,
)

FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of shared memory, not of temporary files
# A name in that folder. Clients write it with a leading slash.
KEY = re.compile(r"/?(?!\.)[A-Za-z0-9_.-]{1,200}")
MAX_NAME = 256
SHARED_MEMORY_IS_OFF = "shared memory is switched off; start the server with --allow-shared-memory"
# Each region has an open file.
MAX_REGIONS = 256


class Region:
    """A registered region. Its file stays open as long as the region is used."""

    def __init__(self, name: str, key: str, offset: int, size: int) -> None:
        """Opens the file.

        Args:
            name: Name for requests to use.
            key: Name of the file.
            offset: Where the region begins in the file, in bytes.
            size: Size of the region in bytes.

        Raises:
            InvalidRequestError: The key is not a name of shared memory, or the file is not one of this user,
                or it is smaller than the region.
        """
        self.name, self.key, self.offset, self.size = name, key, offset, size
        self._descriptor = _opened(key)
        weakref.finalize(self, os.close, self._descriptor)
        length = os.fstat(self._descriptor).st_size
        if offset + size > length:
            raise InvalidRequestError(
                "byte_size", f"the region ends at byte {offset + size} of {key!r}, which has {length} bytes"
            )

    def read(self, field: str, offset: int, size: int) -> bytes:
        """Copies a part of the region.

        Args:
            field: The tensor that it holds, for errors.
            offset: Where it begins in the region.
            size: Its size in bytes.

        Raises:
            InvalidRequestError: It is not inside the region, or the file has become smaller.
        """
        self._check(field, offset, size)
        data = os.pread(self._descriptor, size, self.offset + offset)
        if len(data) < size:
            raise InvalidRequestError(field, f"shared memory {self.name!r} has become smaller")
        return data

    def check_write(self, field: str, offset: int, space: int, size: int) -> None:
        """Checks that a tensor of a known size can be written.

        Args:
            field: The tensor, for errors.
            offset: Where it is to begin in the region.
            space: The bytes that the request sets aside for it.
            size: Its size in bytes.

        Raises:
            InvalidRequestError: It does not fit.
        """
        self._check(field, offset, space)
        if size > space:
            raise InvalidRequestError(field, f"has {size} bytes; the request sets {space} bytes aside for it")

    def write(self, field: str, offset: int, contents: Sequence[Any]) -> None:
        """Writes a tensor that fits: its parts, which are bytes or contiguous arrays.

        Raises:
            InvalidRequestError: The file has become smaller.
        """
        at = self.offset + offset
        for part in contents:
            content = memoryview(part).cast("B")
            # A write beyond the end would make the file larger.
            if os.fstat(self._descriptor).st_size < at + content.nbytes:
                raise InvalidRequestError(field, f"shared memory {self.name!r} has become smaller")
            if os.pwrite(self._descriptor, content, at) != content.nbytes:
                raise EngineError(f"{field}: shared memory {self.name!r} could not be written")
            at += content.nbytes

    def _check(self, field: str, offset: int, size: int) -> None:
        if not 0 <= offset <= self.size or not 0 <= size <= self.size - offset:
            raise InvalidRequestError(
                field,
                f"bytes {offset} to {offset + size} are not in region {self.name!r} of {self.size} bytes",
            )


class SharedMemory:
    """The registered regions, by name. Only one thread may change them; any thread may call `find`."""

    def __init__(self) -> None:
        """Begins without regions."""
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Registers a region.

        Args:
            name: Name for requests to use.
            key: Name of the file in /dev/shm, with or without a leading slash.
            offset: Where the region begins in the file, in bytes.
            size: Size of the region in bytes, at least 1.

        Raises:
            InvalidRequestError: The name is registered, or the region cannot be used.
            LimitExceededError: Too many regions are registered.
        """
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequestError("name", f"must have 1 to {MAX_NAME} characters")
        if size < 1:
            raise InvalidRequestError("byte_size", "must be at least 1")
        if name in self._regions:
            raise InvalidRequestError("name", f"{name!r} is registered already; unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise LimitExceededError("name", f"{MAX_REGIONS} regions are registered, which is the limit")
        self._regions[name] = Region(name, key, offset, size)

    def unregister(self, name: str = "") -> None:
        """Unregisters a region, or all of them. Requests in progress that use it are not disturbed."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str = "") -> list[Region]:
        """The registered regions, or the one of a name.

        Raises:
            RegionNotFoundError: No region of that name is registered.
        """
        return [self.find("name", name)] if name else list(self._regions.values())

    def find(self, field: str, name: str) -> Region:
        """The region of a name.

        Raises:
            RegionNotFoundError: No region of that name is registered.
        """
        found = self._regions.get(name)
        if found is None:
            raise RegionNotFoundError(
                f"{field}: shared memory {name[:MAX_NAME]!r} is not registered", field=field
            )
        return found


def _opened(key: str) -> int:
    if not KEY.fullmatch(key):
        raise InvalidRequestError("key", f"{key[:MAX_NAME]!r} is not a name such as /vectors")
    path = FOLDER / key.removeprefix("/")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequestError("key", f"{key!r} cannot be opened: {error.strerror}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise InvalidRequestError("key", f"{key!r} is not shared memory of the user that the server runs as")
    return descriptor
