"""Why a checkpoint cannot be read."""

from collections.abc import Sequence

_SHOWN = 12


class CheckpointError(ValueError):
    """A file, or what it holds, is not the attention that was asked for; the message says what to change."""


def listed(items: Sequence[str], *, separator: str = ", ", shown: int = _SHOWN) -> str:
    """The first few of `items` in one text, and how many more there are."""
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return separator.join([*items[:shown], *more])
