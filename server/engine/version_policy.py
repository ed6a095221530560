"""Which versions of a model are served, as Triton's version policies."""

from collections.abc import Sequence
from dataclasses import dataclass

from attention_serving.artifact.names import is_version

SYNTAX = "all, latest, latest:N or specific:V,V,..."


@dataclass(frozen=True)
class VersionPolicy:
    """Chooses among the versions of a model.

    Attributes:
        latest: How many of the highest versions; 0 for all.
        specific: Certain versions, in place of the highest.
    """

    latest: int = 0
    specific: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "VersionPolicy":
        """The policy of a setting.

        Raises:
            ValueError: The text is not a policy.
        """
        kind, colon, argument = text.partition(":")
        if kind == "all" and not colon:
            return cls()
        if kind == "latest" and (not colon or is_version(argument)):
            return cls(latest=int(argument or 1))
        versions = tuple(argument.split(","))
        if kind == "specific" and all(map(is_version, versions)):
            return cls(specific=versions)
        raise ValueError(f"must be one of {SYNTAX}, with numbers above 0")

    def choose(self, versions: Sequence[str]) -> list[str]:
        """The versions that are served, out of those that exist, lowest first."""
        ordered = sorted(versions, key=int)
        if self.specific:
            return [version for version in ordered if version in self.specific]
        return ordered[-self.latest :]
