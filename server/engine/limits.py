"""How much one request, one run and the whole engine may hold."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds in rows (of a sequence), sequences and bytes."""

    max_sequence_length: int = 8192
    """Rows of one sequence."""
    max_sequences: int = 4096
    """Sequences of one request."""
    max_result_bytes: int = 64 * MIB
    """Size of one request's result."""
    max_in_flight_bytes: int = 1024 * MIB
    """Inputs and results of all requests between submission and answer."""
    max_batch_sequences: int = 64
    """Sequences of one run."""
    max_batch_bytes: int = 256 * MIB
    """Padded inputs and attention scores of a run of several sequences; a single one may be larger."""
    batch_delay_seconds: float = 0.0
    """How long the oldest sequence that waits may wait for company that has not arrived."""
