"""Files and folders: local paths, and URLs of the file systems that Arrow or fsspec supports."""

import json
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import fs

from attention_client.enrich.outcome import EnrichError

Json: TypeAlias = dict[str, Any]
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Location:
    """A file or a folder, which need not exist.

    Attributes:
        system: Its file system.
        path: Its path in the file system.
        given: The path or URL as the caller wrote it, for messages; empty for `path`.
    """

    system: fs.FileSystem
    path: str
    given: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.given or self.path

    def __truediv__(self, name: str) -> "Location":
        return Location(self.system, posixpath.join(self.path, name), posixpath.join(str(self), name))

    def with_suffix(self, suffix: str) -> "Location":
        """The location in the same folder whose name has `suffix` appended."""
        return Location(self.system, self.path + suffix, f"{self}{suffix}")

    @property
    def file_type(self) -> fs.FileType:
        """Whether it is a file, a folder, or does not exist."""
        return self.system.get_file_info(self.path).type

    @property
    def exists(self) -> bool:
        """Whether it exists."""
        return self.file_type is not fs.FileType.NotFound

    def open(self) -> pa.NativeFile:
        """Opens a file for random reading."""
        return self.system.open_input_file(self.path)

    def files(self) -> Iterator[tuple[str, fs.FileInfo]]:
        """Every file below a folder, sorted by its path relative to the folder."""
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        for info in sorted(self.system.get_file_info(selector), key=lambda info: info.path):
            if info.is_file:
                yield posixpath.relpath(info.path, self.path), info

    def overlaps(self, other: "Location") -> bool:
        """Whether the two are the same, or one contains the other."""
        one, two = (path.rstrip("/") + "/" for path in (self.path, other.path))
        return self.system.equals(other.system) and (one.startswith(two) or two.startswith(one))

    def make_folder(self) -> None:
        """Creates a folder and its parents; does nothing if it exists."""
        self.system.create_dir(self.path, recursive=True)

    @contextmanager
    def replaced(self) -> Iterator[pa.NativeFile]:
        """Opens a temporary file for writing, and renames it to this location if the block succeeds."""
        temporary = self.with_suffix(TEMPORARY)
        with self.system.open_output_stream(temporary.path) as file:
            yield file
        temporary.move(self)

    def write_json(self, value: Json) -> None:
        """Replaces the file with a JSON document."""
        with self.replaced() as file:
            file.write(json.dumps(value, indent=1).encode())

    def read_json(self) -> Json:
        """Reads a JSON document.

        Raises:
            EnrichError: The file is not JSON.
        """
        with self.system.open_input_stream(self.path) as file:
            try:
                value: Json = json.loads(file.read())
            except ValueError as error:
                raise EnrichError(f"{self} is damaged: {error}") from error
        return value

    def move(self, target: "Location") -> None:
        """Renames a file or a folder. A file system that cannot rename folders moves each file."""
        try:
            self.system.move(self.path, target.path)
        except (OSError, NotImplementedError):
            if self.file_type is not fs.FileType.Directory:
                raise
            for name, info in self.files():
                (target / posixpath.dirname(name)).make_folder()
                self.system.move(info.path, (target / name).path)
            self.remove()

    def remove(self) -> None:
        """Removes a file, or a folder with its content; does nothing if there is none."""
        match self.file_type:
            case fs.FileType.Directory:
                self.system.delete_dir(self.path)
            case fs.FileType.File:
                self.system.delete_file(self.path)


def locate(address: str) -> Location:
    """Finds the file system of a local path or a URL such as s3://bucket/table.

    Raises:
        EnrichError: No file system is known for the URL.
    """
    if "://" not in address:
        path = Path(address).expanduser().absolute().as_posix()
        return Location(fs.LocalFileSystem(), path, address)
    try:
        system, path = fs.FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as unknown:
        return _locate_with_fsspec(address, unknown)
    return Location(system, path, address)


def _locate_with_fsspec(address: str, unknown: Exception) -> Location:
    try:
        import fsspec  # noqa: PLC0415 - optional, needed for some URLs only
    except ImportError as error:
        raise EnrichError(f"{address}: {unknown}; install fsspec, which may support this URL") from error
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise EnrichError(f"{address}: {error}") from error
    return Location(fs.PyFileSystem(fs.FSSpecHandler(system)), path, address)
