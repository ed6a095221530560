"""Rights: what an identity may do, and what a method needs.

infer:PATTERN   compute with the models whose names match the pattern
read:PATTERN    see these models: their metadata, configuration, statistics and state; `read` alone is read:*
admin           load and unload models, register shared memory, change the settings of logs and traces

A pattern is that of a shell: * for any text, ? for one character, [ab] for one of several. Rights are
independent: admin does not imply infer or read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Self

PATTERN = re.compile(r"[\w.*?\[\]!-]{1,200}", re.ASCII)
EVERY_MODEL = "*"
MAX_RIGHTS = 256
FORMS = "infer:PATTERN, read, read:PATTERN or admin"


class Right(StrEnum):
    """The kinds of rights. A method needs one of them, or none."""

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rights:
    """What an identity may do.

    Attributes:
        infer: Patterns of the models that it may compute with.
        read: Patterns of the models that it may see.
        admin: Whether it may change the server.
    """

    infer: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    admin: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Reads rights.

        Raises:
            ValueError: A text is not a right, or there are too many.
        """
        found: dict[Right, list[str]] = {right: [] for right in Right}
        for text in texts:
            right, pattern = _parsed(text)
            found[right].append(pattern)
        if sum(map(len, found.values())) > MAX_RIGHTS:
            raise ValueError(f"there are more than {MAX_RIGHTS} rights")
        return cls(tuple(found[Right.INFER]), tuple(found[Right.READ]), bool(found[Right.ADMIN]))

    @classmethod
    def known(cls, texts: Iterable[str]) -> Self:
        """The rights among texts that may mean something else to others, such as the scopes of a token."""
        return cls.parse([text for text in texts if is_right(text)][:MAX_RIGHTS])

    def has(self, right: Right) -> bool:
        """Whether the identity has a right, for some model at least."""
        if right is Right.ADMIN:
            return self.admin
        return bool(self.infer if right is Right.INFER else self.read)

    def covers(self, right: Right, model: str) -> bool:
        """Whether the identity has a right for a model."""
        if right is Right.ADMIN:
            return self.admin
        patterns = self.infer if right is Right.INFER else self.read
        return any(fnmatchcase(model, pattern) for pattern in patterns)

    @property
    def reads_every_model(self) -> bool:
        """Whether no model is hidden from the identity."""
        return EVERY_MODEL in self.read


def is_right(text: str) -> bool:
    """Whether a text is a right."""
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def _parsed(text: str) -> tuple[Right, str]:
    kind, colon, pattern = text.partition(":")
    shown = repr(text[:100])
    if kind not in Right.__members__.values():
        raise ValueError(f"{shown} is not a right; must be {FORMS}")
    right = Right(kind)
    if right is Right.ADMIN:
        if colon:
            raise ValueError(f"{shown} is not a right: admin takes no pattern")
        return right, ""
    if right is Right.READ and not colon:
        return right, EVERY_MODEL
    if not PATTERN.fullmatch(pattern):
        raise ValueError(
            f"{shown} is not a right: {right} needs a pattern of model names, such as {right}:{EVERY_MODEL}"
        )
    return right, pattern
