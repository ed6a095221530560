"""The name and version of a model, and the folder in which a repository keeps them."""

from dataclasses import dataclass
from pathlib import Path

from attention_serving.artifact.names import MAX_VERSION, NAME_PATTERN, is_model_name, is_version


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
        found = [int(path.name) for path in (repository / self.name).glob("*") if is_version(path.name)]
        return max(found, default=0) + 1
