"""The name and version of a model, which are the names of the folders of an artifact."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
# A further name: parts as those of a name, such as the organisation and the name of a model on a hub.
MAX_ALIAS = 256
ALIAS_PATTERN = rf"^(?=.{{1,{MAX_ALIAS}}}$)[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*$"
MAX_VERSION = 2**63 - 1


def is_model_name(text: str) -> bool:
    """Whether a text may be the name of a model."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def check_aliases(aliases: Iterable[str], models: Iterable[str]) -> None:
    """Checks the aliases of some models.

    Raises:
        ValueError: One is not an alias, occurs twice, or is the name of one of the models.
    """
    names = set(models)
    for alias in aliases:
        if not re.fullmatch(ALIAS_PATTERN, alias) or alias in names:
            rule = f"must match {ALIAS_PATTERN}, and differ from the model's name and other aliases"
            raise ValueError(f"alias {alias[:MAX_ALIAS]!r}: {rule}")
        names.add(alias)


def is_version(text: str) -> bool:
    """Whether a text is a version as its folder is named: a number without leading zeros."""
    return re.fullmatch(r"[1-9][0-9]{0,18}", text) is not None and int(text) <= MAX_VERSION


@dataclass(frozen=True)
class ModelId:
    """Name and version of a model, and the further names that its manifest states.

    Raises:
        ValueError: The name does not match `NAME_PATTERN`, the version is not an integer from 1 to
            `MAX_VERSION`, or `check_aliases` refuses the aliases.
    """

    name: str
    version: int = 1
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_model_name(self.name):
            raise ValueError(f"name={self.name!r}: must match {NAME_PATTERN}")
        if type(self.version) is not int or not is_version(str(self.version)):
            raise ValueError(f"version={self.version!r}: must be a positive integer, at most {MAX_VERSION}")
        check_aliases(self.aliases, [self.name])

    def folder(self, repository: Path) -> Path:
        """The folder of this version in a repository."""
        return repository / self.name / str(self.version)

    def next_free_version(self, repository: Path) -> int:
        """One more than the largest version of this name in a repository."""
        versions = [int(path.name) for path in (repository / self.name).glob("*") if is_version(path.name)]
        return max(versions, default=0) + 1
