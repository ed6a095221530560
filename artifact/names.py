"""The name and version of a model, which are the names of the folders of an artifact."""

import re
from dataclasses import dataclass
from pathlib import Path

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
MAX_VERSION = 2**63 - 1


def is_model_name(text: str) -> bool:
    """Whether a text may be the name of a model."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def is_version(text: str) -> bool:
    """Whether a text is a version as its folder is named: a number without leading zeros."""
    return re.fullmatch(r"[1-9][0-9]{0,18}", text) is not None and int(text) <= MAX_VERSION


@dataclass(frozen=True)
class ModelId:
    """Name and version of a model.

    Raises:
        ValueError: The name does not match `NAME_PATTERN`, or the version is not an integer from 1 to
            `MAX_VERSION`.
    """

    name: str
    version: int = 1

    def __post_init__(self) -> None:
        if not is_model_name(self.name):
            raise ValueError(f"name={self.name!r}: must match {NAME_PATTERN}")
        if type(self.version) is not int or not is_version(str(self.version)):
            raise ValueError(f"version={self.version!r}: must be a positive integer, at most {MAX_VERSION}")

    def folder(self, repository: Path) -> Path:
        """The folder of this version in a repository."""
        return repository / self.name / str(self.version)

    def next_free_version(self, repository: Path) -> int:
        """One more than the largest version of this name in a repository."""
        versions = [int(path.name) for path in (repository / self.name).glob("*") if is_version(path.name)]
        return max(versions, default=0) + 1
