"""What the engine tells whoever watches it, at the boundaries of its stages."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that ended.

    Attributes:
        model: Name of the model.
        sequences: How many ran together.
        tokens: Their query rows and, for cross-attention, key rows.
        padding: Rows that were computed beside those.
        waited: Seconds in the queue, one figure for each sequence.
        seconds: How long the run took.
    """

    model: str
    sequences: int
    tokens: int
    padding: int
    waited: list[float]
    seconds: float


class Observer(Protocol):
    """Told of every run."""

    def ran(self, run: Run) -> None:
        """One run ended."""


class Unobserved:
    """Watches nothing."""

    def ran(self, run: Run) -> None:
        """Forgets it."""
