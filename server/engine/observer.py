"""What the engine reports at the boundaries of its stages."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One completed run of a batch.

    Attributes:
        model: Name of the model.
        sequences: Number of sequences in the batch.
        tokens: Query rows and, for cross-attention, key rows of all sequences.
        padding: Rows that were computed in addition to `tokens`.
        queue_seconds: Time in the queue, for each sequence.
        seconds: Duration of the run.
    """

    model: str
    sequences: int
    tokens: int
    padding: int
    queue_seconds: list[float]
    seconds: float


class Observer(Protocol):
    """Receives the engine's reports, on the thread that ran the batch."""

    def batch_completed(self, report: BatchReport) -> None:
        """Called after each run that succeeded."""


class NullObserver:
    """Ignores all reports."""

    def batch_completed(self, report: BatchReport) -> None:
        """Does nothing."""
