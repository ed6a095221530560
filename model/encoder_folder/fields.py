"""Reads the values of a JSON file. A value that nobody reads is refused, because it might change results."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, TypeVar

from attention_serving.model.checkpoints.errors import CheckpointError, listed

T = TypeVar("T")
NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "an object",
         list: "a list"}  # fmt: skip
# Larger files are not configurations.
MAX_BYTES = 16 << 20


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: The file cannot be read, is too large or is not JSON.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path.name} is larger than {MAX_BYTES} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error


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

    def has(self, name: str) -> bool:
        """Whether a member is there and has not been read."""
        return name in self._unread

    def restore(self, name: str, value: object) -> None:
        """Makes a member unread again."""
        self._unread[name] = value

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
