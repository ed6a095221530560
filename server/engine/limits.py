"""Bounds of one request, of one batch, and of the whole engine."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds in rows of a sequence, sequences, bytes and seconds."""

    max_sequence_length: int = 8192
    """Rows of one sequence."""
    max_sequences: int = 4096
    """Sequences of one request."""
    max_text_bytes: int = MIB
    """UTF-8 bytes of one text."""
    max_input_bytes: int = 64 * MIB
    """Size of each decoded input of one request; a flag of a mask takes one byte."""
    max_result_bytes: int = 64 * MIB
    """Size of the result of one request."""
    max_in_flight_bytes: int = 1024 * MIB
    """Inputs and results of all requests, from submission to result."""
    max_batch_sequences: int = 64
    """Sequences of one batch."""
    max_batch_bytes: int = 256 * MIB
    """Padded inputs and attention scores of a batch of several sequences; a single one may be larger."""
    batch_delay_seconds: float = 0.0
    """Maximum batching delay: how long the oldest queued sequence may wait for others to join its batch."""
