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
from typing import Any, NamedTuple

from attention_serving.server.engine.errors import (
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    RegionNotFoundError,
    UnsupportedError,
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
            key: Name of the file in /dev/shm, with or without a leading slash.
            offset: Where the region begins in the file, in bytes.
            size: Size of the region in bytes.

        Raises:
            InvalidRequestError: The key is not a name of shared memory, or the file is not one of this user,
                or it is smaller than the region.
        """
        if not KEY.fullmatch(key):
            raise InvalidRequestError("key", f"{key[:MAX_NAME]!r} is not a name such as /vectors")
        self.name, self.key, self.offset, self.size = name, key, offset, size
        path, flags = FOLDER / key.removeprefix("/"), os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self.descriptor = os.open(path, os.O_RDWR | flags)
        except OSError as error:
            raise InvalidRequestError("key", f"{key!r} cannot be opened: {error.strerror}") from error
        close = weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            close()
            problem = f"{key!r} is not shared memory of the user that the server runs as"
            raise InvalidRequestError("key", problem)
        if (end := offset + size) > status.st_size:
            problem = f"the region ends at byte {end} of {key!r}, which has {status.st_size} bytes"
            raise InvalidRequestError("byte_size", problem)


class Slice(NamedTuple):
    """The part of a region that holds a tensor.

    Attributes:
        field: The tensor, for errors.
        region: The region.
        offset: Where the tensor begins in the region, in bytes.
        size: The bytes that are set aside for it.
    """

    field: str
    region: Region
    offset: int
    size: int

    def read(self) -> bytes:
        """Copies it.

        Raises:
            InvalidRequestError: The file has become smaller.
        """
        data = os.pread(self.region.descriptor, self.size, self.region.offset + self.offset)
        if len(data) < self.size:
            raise self._shrunk()
        return data

    def shorten(self, size: int) -> "Slice":
        """The beginning of it, for a tensor of a known size.

        Raises:
            InvalidRequestError: The tensor does not fit.
        """
        if size > self.size:
            sizes = f"has {size} bytes; the request sets {self.size} bytes aside for it"
            raise InvalidRequestError(self.field, sizes)
        return self._replace(size=size)

    def write(self, parts: Sequence[Any]) -> None:
        """Writes a tensor of its size, whose parts are bytes or contiguous arrays.

        Raises:
            EngineError: The parts have another size; nothing is written.
            InvalidRequestError: The file has become smaller.
        """
        if (size := sum(memoryview(part).nbytes for part in parts)) != self.size:
            raise EngineError(f"{self.field}: has {size} bytes, which are not those of its shape")
        at = self.region.offset + self.offset
        end = at + self.size
        # A write beyond the end would make the file larger.
        if os.fstat(self.region.descriptor).st_size < end:
            raise self._shrunk()
        for part in parts:
            at += os.pwrite(self.region.descriptor, part, at)
        if at != end:
            raise EngineError(f"{self.field}: shared memory {self.region.name!r} could not be written")

    def _shrunk(self) -> InvalidRequestError:
        return InvalidRequestError(self.field, f"shared memory {self.region.name!r} has become smaller")


class SharedMemory:
    """The registered regions, by name. They change on the thread of calls; any thread may look them up."""

    def __init__(self, *, is_on: bool = False) -> None:
        """Begins without regions, and never has any if shared memory is switched off."""
        self.is_on = is_on
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
            UnsupportedError: Shared memory is switched off.
        """
        if not self.is_on:
            raise UnsupportedError(SHARED_MEMORY_IS_OFF)
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequestError("name", f"must have 1 to {MAX_NAME} characters")
        if name in self._regions:
            raise InvalidRequestError("name", f"{name!r} is registered already; unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise LimitExceededError("name", f"{MAX_REGIONS} regions are registered, which is the limit")
        if size < 1:
            raise InvalidRequestError("byte_size", "must be at least 1")
        self._regions[name] = Region(name, key, offset, size)

    def unregister(self, name: str) -> None:
        """Unregisters a region, or all of them if no name is given.

        Requests in progress that use it are not disturbed. A region that is not registered is no error.
        """
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str) -> list[Region]:
        """The registered regions, or the one of a name.

        Raises:
            RegionNotFoundError: No region of that name is registered.
        """
        return [self._find("name", name)] if name else list(self._regions.values())

    def slice(self, field: str, name: str, offset: int, size: int) -> Slice:
        """The part of a region that holds a tensor.

        Args:
            field: The tensor, for errors.
            name: The name of the region.
            offset: Where the tensor begins in the region, in bytes.
            size: The bytes that are set aside for it.

        Raises:
            InvalidRequestError: It is not inside the region.
            RegionNotFoundError: No region of that name is registered.
            UnsupportedError: Shared memory is switched off.
        """
        if not self.is_on:
            raise UnsupportedError(SHARED_MEMORY_IS_OFF)
        region = self._find(field, name)
        if not 0 <= offset <= region.size or not 0 <= size <= region.size - offset:
            place = f"bytes {offset} to {offset + size} are not in region {name!r} of {region.size} bytes"
            raise InvalidRequestError(field, place)
        return Slice(field, region, offset, size)

    def _find(self, field: str, name: str) -> Region:
        if name not in self._regions:
            message = f"{field}: shared memory {name[:MAX_NAME]!r} is not registered"
            raise RegionNotFoundError(message, field=field)
        return self._regions[name]
