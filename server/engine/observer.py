"""What the engine tells whoever watches it, at the boundaries of its stages."""

from typing import Protocol


class Observer(Protocol):
    """Told of every run."""

    def ran(
        self,
        model: str,
        *,
        sequences: int,
        tokens: int,
        padding: int,
        waited: list[float],
        seconds: float,
    ) -> None:
        """One run ended.

        Args:
            model: Name of the model.
            sequences: How many ran together.
            tokens: Their query rows and, for cross-attention, key rows.
            padding: Rows that were computed beside those.
            waited: Seconds in the queue, one figure for each sequence.
            seconds: How long the run took.
        """


class Unobserved:
    """Watches nothing."""

    def ran(self, model: str, **_: object) -> None:
        """Forgets it."""
