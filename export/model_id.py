"""The name and version of a model, and the folder in which a repository keeps them."""

import re
from dataclasses import dataclass
from pathlib import Path

from artifact.manifest import NAME_PATTERN


@dataclass(frozen=True)
class ModelId:
    """Name and version of a model.

    Raises:
        ValueError: The name does not match `NAME_PATTERN`, or the version is not a positive integer.
    """

    name: str
    version: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"name={self.name!r}: must match {NAME_PATTERN}")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise ValueError(f"version={self.version!r}: must be a positive integer")

    def folder(self, repository: Path) -> Path:
        """The folder of this version in a repository."""
        return repository / self.name / str(self.version)

    def next_free_version(self, repository: Path) -> int:
        """One more than the largest version of this name in a repository."""
        found = [int(path.name) for path in (repository / self.name).glob("*") if path.name.isdecimal()]
        return max(found, default=0) + 1
