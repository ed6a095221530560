"""What settings decide: bounds of a request, a batch and the whole engine; which versions are served.

Does not import ONNX Runtime.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attention_serving.artifact.names import is_version
from attention_serving.server.engine.errors import LimitExceededError

MIB = 1 << 20
UNLIMITED = sys.maxsize
POLICIES = "all, latest, latest:N or specific:V,V,..."
# The largest tolerance of a precision that export offers: the absolute one of int8.
MAX_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds in rows of a sequence, sequences, bytes and seconds.

    Attributes:
        max_sequence_length: Rows of one sequence.
        max_sequences: Sequences of one request.
        max_text_bytes: UTF-8 bytes of one text.
        max_input_bytes: Size of each decoded input of one request; a flag of a mask takes one byte.
        max_run_bytes: Expected memory of all runs at a time, and so of each: inputs, projections and scores.
        max_result_bytes: Size of the result of one request.
        max_in_flight_bytes: Messages, masks, results and replies of all requests, from arrival until the
            reply is sent.
        max_context_bytes: Stored contexts; 0 switches them off.
        max_batch_sequences: Sequences of one batch.
        max_batch_rows: Rows of the run of several sequences together, padding included, on all symbolic axes.
        max_batch_bytes: Expected memory of the run of several sequences together; a single one may need more.
    """

    max_sequence_length: int = 8192
    max_sequences: int = 4096
    max_text_bytes: int = MIB
    max_input_bytes: int = 64 * MIB
    max_run_bytes: int = 4096 * MIB
    max_result_bytes: int = 64 * MIB
    max_in_flight_bytes: int = 1024 * MIB
    max_context_bytes: int = 1024 * MIB
    max_batch_sequences: int = 64
    max_batch_rows: int = UNLIMITED
    max_batch_bytes: int = 256 * MIB

    def check_sequences(self, field: str, count: int) -> None:
        """Checks the number of sequences of a request.

        Raises:
            LimitExceededError: There are too many; names the field.
        """
        if count > self.max_sequences:
            raise LimitExceededError(field, f"contains {count} sequences; the limit is {self.max_sequences}")


def select_versions(policy: str, versions: Sequence[str]) -> list[str]:
    """The versions of a model that are served, out of those that exist, lowest first.

    Args:
        policy: `all`, `latest` (the highest), `latest:N` (the N highest) or `specific:V,V,..`, as Triton's
            version policies.
        versions: Those that exist.

    Raises:
        ValueError: This is not a policy.
    """
    kind, colon, argument = policy.partition(":")
    ordered, names = sorted(versions, key=int), argument.split(",")
    if kind == "all" and not colon:
        return ordered
    if kind == "latest" and (not colon or is_version(argument)):
        return ordered[-int(argument or 1) :]
    if kind == "specific" and all(map(is_version, names)):
        return [version for version in ordered if version in names]
    raise ValueError(f"must be one of {POLICIES}, with numbers above 0")
