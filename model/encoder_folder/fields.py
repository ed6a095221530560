"""Reads the values of a JSON file. A value that nobody reads is refused, because it might change results."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, TypeVar

from attention_serving.model.checkpoints import CheckpointError, listed
from attention_serving.model.checkpoints.files import read_json

T = TypeVar("T")
NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "an object",
         list: "a list"}  # fmt: skip


class Fields:
    """The members of an object. Members that are null count as absent."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        """Reads nothing yet; `source` is the name of the file, for errors."""
        self.source = source
        self._unread = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """The members of the object in a JSON file.

        Raises:
            CheckpointError: The file is not a JSON object.
        """
        values = read_json(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path.name} must contain an object")
        return cls(path.name, values)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer that is not less than `least`."""
        value = self._take(name, int, default)
        if value < least:
            raise self.error(name, value, f"must be {least} or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number that is not negative."""
        value = self._take(name, float, default)
        if not 0 <= value < float("inf"):
            raise self.error(name, value, "must be a number from 0")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        return self._take(name, str, default)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        return self._take(name, bool, default)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; an empty one if it is absent."""
        return self._take(name, dict, {})

    def items(self, name: str) -> list[Any]:
        """A list; an empty one if it is absent."""
        return self._take(name, list, [])

    def get(self, name: str) -> object:
        """A member that stays unread; None if it is absent or was read."""
        return self._unread.get(name)

    def expect(self, name: str, *allowed: object) -> None:
        """Refuses a member that is there and has another value."""
        value = self._unread.pop(name, allowed[0])
        if value not in allowed:
            rule = f"is not supported; only {' or '.join(map(repr, allowed))} is"
            raise self.error(name, value, rule)

    def ignore(self, *patterns: str) -> None:
        """Drops members that do not change results."""
        self._unread = {
            name: value
            for name, value in self._unread.items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    def finish(self) -> None:
        """Refuses members that nobody has read."""
        if self._unread:
            names = listed(sorted(self._unread))
            raise CheckpointError(f"{self.source}: {names} not supported: it might change the results")

    def error(self, name: str, value: object, rule: str) -> CheckpointError:
        """The error of a member."""
        shown = repr(value)
        return CheckpointError(f"{self.source}: {name}={shown[:100]} {rule}")

    def _take(self, name: str, kind: type[T], default: T | None) -> T:
        if name not in self._unread:
            if default is None:
                raise CheckpointError(f"{self.source}: {name} is missing")
            return default
        value = self._unread.pop(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise self.error(name, value, f"must be {NAMES[kind]}")
        return value
