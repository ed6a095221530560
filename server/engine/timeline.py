"""When one request passed the boundaries of its stages, for callers who ask for it.

Nothing is recorded of a request without a timeline: it costs the test of one attribute.
All moments are on `time.monotonic`'s clock. A record holds names and numbers only, so that it keeps neither a
model nor tensors in memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# Identifies a request among the records of its owner, such as the span of a trace.
Reference = tuple[bytes, bytes]


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedRun:
    """One run, which its requests share.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        precision: Precision of its weights, such as fp32.
        graph: The graph that ran.
        sequences: Number of sequences in the run.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        padding: Rows that were computed in addition.
        started_at: When the inputs began to be padded.
        ended_at: When the outputs were split.
        requests: Those that have a reference.
        reference: What its first reader identifies it by; None until then.
    """

    model: str
    version: str
    precision: str
    graph: str
    sequences: int
    rows: int
    padding: int
    started_at: float
    ended_at: float
    requests: list[Reference] = field(default_factory=list)
    reference: Reference | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several of its requests have a reference."""
        return len(self.requests) > 1


class Timeline:
    """The stages of one request. Filled by one thread at a time, and read once the request has ended.

    Attributes:
        model: Name of the model; empty until it is found.
        version: Version of the model.
        sequences: Number of sequences; 0 until the request is validated.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        queued_at: When the request was handed to the scheduler; 0 if it was refused before.
        runs: The runs that computed its sequences.
        reference: What the runs refer to the request by; None if they do not.
    """

    # Of the class, so that a timeline is made quickly.
    model = version = ""
    sequences = rows = 0
    queued_at = 0.0
    runs: tuple[RecordedRun, ...] = ()
    reference: Reference | None = None

    @property
    def run_started_at(self) -> float:
        """When its first run began; 0 without a run."""
        if len(self.runs) == 1:  # of most requests
            return self.runs[0].started_at
        return min([run.started_at for run in self.runs], default=0.0)

    @property
    def run_ended_at(self) -> float:
        """When its last run ended; 0 without a run."""
        return max([run.ended_at for run in self.runs], default=0.0)


def record_run(run: RecordedRun, timelines: Iterable[Timeline]) -> None:
    """Adds a run to the requests that it computed, each of which may be given once for each sequence."""
    for timeline in dict.fromkeys(timelines):
        timeline.runs += (run,)
        if timeline.reference is not None:
            run.requests.append(timeline.reference)
