"""The error of checkpoints, and lists in its messages."""

from collections.abc import Sequence

_SHOWN = 12


class CheckpointError(ValueError):
    """A checkpoint cannot be read or lacks the requested attention. The message says what to change."""


def listed(items: Sequence[str], *, separator: str = ", ", shown: int = _SHOWN) -> str:
    """The first few items as text, and the number of the others."""
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return separator.join([*items[:shown], *more])
