"""Where tables lie: local paths, and any address that Arrow's or fsspec's file systems know."""

import json
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from attention_client.enrich.errors import EnrichError

Json = dict[str, Any]
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Location:
    """A file or a folder of some file system.

    Attributes:
        system: The file system.
        path: Its path there.
    """

    system: fs.FileSystem
    path: str

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> "Location":
        return Location(self.system, posixpath.join(self.path, name))

    def beside(self, suffix: str) -> "Location":
        """Its neighbour of the same name with something behind it."""
        return Location(self.system, self.path + suffix)

    @property
    def parent(self) -> "Location":
        """The folder that it lies in."""
        return Location(self.system, posixpath.dirname(self.path))

    @property
    def kind(self) -> fs.FileType:
        """Whether it is a file, a folder or nothing."""
        return self.system.get_file_info(self.path).type

    @property
    def exists(self) -> bool:
        """Whether there is anything."""
        return self.kind is not fs.FileType.NotFound

    def open(self) -> pa.NativeFile:
        """Opens a file to read from any place in it."""
        return self.system.open_input_file(self.path)

    def files(self, *, hidden: bool = False) -> Iterator[tuple[str, fs.FileInfo]]:
        """Every file below a folder by its path from there, sorted; hidden ones where they are asked for."""
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        for info in sorted(self.system.get_file_info(selector), key=lambda info: info.path):
            name = posixpath.relpath(info.path, self.path)
            is_hidden = any(part.startswith((".", "_")) for part in name.split("/"))
            if info.is_file and (hidden or not is_hidden):
                yield name, info

    def overlaps(self, other: "Location") -> bool:
        """Whether one is the other, or lies in it."""
        one, two = (path.rstrip("/") + "/" for path in (self.path, other.path))
        return self.system.equals(other.system) and (one.startswith(two) or two.startswith(one))

    def make_folder(self) -> None:
        """Makes a folder and those above it."""
        self.system.create_dir(self.path, recursive=True)

    @contextmanager
    def replaced(self) -> Iterator[pa.NativeFile]:
        """Opens a file to write, which is there when the block has ended well, and not before."""
        temporary = self.beside(TEMPORARY)
        with self.system.open_output_stream(temporary.path) as file:
            yield file
        temporary.move(self)

    def write_json(self, value: Json) -> None:
        """Writes a small file at once."""
        with self.replaced() as file:
            file.write(json.dumps(value, indent=1).encode())

    def read_json(self) -> Json:
        """Reads a small file.

        Raises:
            EnrichError: It is not JSON.
        """
        with self.system.open_input_stream(self.path) as file:
            try:
                value: Json = json.loads(file.read())
            except ValueError as error:
                raise EnrichError(f"{self} is damaged: {error}") from error
        return value

    def move(self, target: "Location") -> None:
        """Renames a file or a folder; file systems without folders move each file."""
        try:
            self.system.move(self.path, target.path)
        except (OSError, NotImplementedError):
            if self.kind is not fs.FileType.Directory:
                raise
            for name, info in self.files():
                (target / posixpath.dirname(name)).make_folder()
                self.system.move(info.path, (target / name).path)
            self.remove()

    def remove(self) -> None:
        """Removes a file or a folder with all in it; does nothing where there is none."""
        match self.kind:
            case fs.FileType.Directory:
                self.system.delete_dir(self.path)
            case fs.FileType.File:
                self.system.delete_file(self.path)


def locate(address: str) -> Location:
    """Finds the file system of an address: a local path, or a URL such as s3://bucket/table.

    Raises:
        EnrichError: No file system is known for it.
    """
    if "://" not in address:
        return Location(fs.LocalFileSystem(), Path(address).expanduser().absolute().as_posix())
    try:
        return Location(*fs.FileSystem.from_uri(address))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as unknown:
        return _through_fsspec(address, unknown)


def _through_fsspec(address: str, unknown: Exception) -> Location:
    try:
        import fsspec  # noqa: PLC0415 - only where an address needs it
    except ImportError as error:
        raise EnrichError(f"{address}: {unknown}; fsspec, which may know it, is not installed") from error
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise EnrichError(f"{address}: {error}") from error
    return Location(fs.PyFileSystem(fs.FSSpecHandler(system)), path)
