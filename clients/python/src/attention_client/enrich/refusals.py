"""The rows of a job that were refused: their limit, and the file that lists them."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.journal import ChunkRecord
from attention_client.enrich.plan import JobPlan
from attention_client.enrich.storage import Json, Location
from attention_client.enrich.summary import Refusal, were_refused

REJECTS = ".rejects.jsonl"


class NothingComputedError(EnrichError):
    """Every row that had something to compute was refused."""


def all_refusals(records: Sequence[ChunkRecord]) -> tuple[Refusal, ...]:
    """The refused rows of all chunks."""
    return tuple(refusal for record in records for refusal in record.refusals)


def write_rejects(plan: JobPlan, records: Sequence[ChunkRecord], target: Location) -> str | None:
    """Writes one line of JSON for each refused row.

    Args:
        plan: The job.
        records: The records of all chunks in order.
        target: The output.

    Returns:
        The path of the file; None if no row was refused. A file of an earlier job is removed.
    """
    rejects = target.with_suffix(REJECTS)
    rejects.remove()
    if not all_refusals(records):
        return None
    with rejects.replaced() as file:
        for chunk, record in zip(plan.chunks, records, strict=True):
            for refusal in record.refusals:
                line: Json = {"file": plan.source.path(chunk.name), **asdict(refusal)}
                file.write(json.dumps(line).encode() + b"\n")
    return str(rejects)


def read_rejects(target: Location) -> tuple[Refusal, ...]:
    """The refused rows that a finished job listed; none if there is no list."""
    rejects = target.with_suffix(REJECTS)
    if not rejects.exists:
        return ()
    with rejects.system.open_input_stream(rejects.path) as file:
        lines = [json.loads(line) for line in file.read().splitlines()]
    return tuple(Refusal(row=line["row"], reason=line["reason"], message=line["message"]) for line in lines)


def check_refusals(records: Sequence[ChunkRecord], *, skip: bool) -> None:
    """Checks the refused rows of a whole job.

    Raises:
        EnrichError: An earlier run skipped rows and this run is not allowed to.
        NothingComputedError: All rows were refused.
    """
    refusals = all_refusals(records)
    if refusals and not skip:
        raise EnrichError(
            f"{were_refused(len(refusals))} and skipped by an earlier run; pass --on-error skip "
            "(on_error='skip') to accept them"
        )
    if refusals and not any(record.tokens for record in records):
        first = refusals[0]
        raise NothingComputedError(
            f"nothing was computed: {were_refused(len(refusals))}; the first is row {first.row}: "
            f"{first.message}"
        )


class ErrorBudget:
    """Counts refused rows, and ends the job if there are too many."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._refused = 0

    def spend(self, record: ChunkRecord) -> None:
        """Counts the refused rows of a chunk.

        Raises:
            EnrichError: There are more than the limit.
        """
        self._refused += len(record.refusals)
        if self._limit is not None and self._refused > self._limit:
            last = record.refusals[-1]
            raise EnrichError(
                f"{were_refused(self._refused)}, more than max_errors={self._limit}; the last is row "
                f"{last.row}: {last.message}. Finished chunks are kept: --resume with a larger --max-errors "
                "continues"
            )
