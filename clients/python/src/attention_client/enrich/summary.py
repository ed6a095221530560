"""What a finished job reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def counted(count: int, one: str, many: str) -> str:
    """A number with the words for one or for several: "1 row is", "2 rows are"."""
    return f"{count:,} {one if count == 1 else many}"


def were_refused(rows: int) -> str:
    """The number of rows that were refused, for messages."""
    return f"{counted(rows, 'row was', 'rows were')} refused"


@dataclass(frozen=True)
class Refusal:
    """A row that has no result although its cells are not null.

    Attributes:
        row: Number of the row in its file, from 0.
        reason: Short and stable, for programs.
        message: For people.
    """

    row: int
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a finished job. They cover the whole job, its interrupted runs included.

    Attributes:
        output: Path or URL of the result; None if it is `table`.
        rows: Rows of the table.
        refused: Rows without a result because they were refused.
        nulls: Rows without a result because there is nothing to compute.
        passages: Passages that texts were cut into; 0 if texts are not cut.
        truncated: Rows of which the text was cut to the tokens that the model takes.
        tokens: Query and key rows that were computed.
        resumed_rows: How many of the rows earlier, interrupted runs had computed.
        seconds: How long all runs took; an interrupted run counts up to its last finished chunk.
        tokens_per_second: `tokens` divided by `seconds`.
        model: Name of the model.
        version: Version of the model.
        parity_error: Largest absolute difference from eager PyTorch that the backend measured; None if
            unknown.
        rejects: File with one line of JSON for each refused row; None if there is none.
        refusals: The refused rows.
        table: The result, if no output was named.
        already_complete: Whether the output was complete before this run. `nulls`, `passages`, `truncated`,
            `tokens`, `seconds` and `tokens_per_second` are then 0, because the output does not state them.
        server_failures: For each server that failed in this run, how often it did, by its address. A request
            that a server has no capacity for does not count.
    """

    output: str | None
    rows: int
    refused: int
    nulls: int
    passages: int
    truncated: int
    tokens: int
    resumed_rows: int
    seconds: float
    tokens_per_second: float
    model: str
    version: str
    parity_error: float | None
    rejects: str | None
    refusals: tuple[Refusal, ...]
    table: "pa.Table | None" = None
    already_complete: bool = False
    server_failures: Mapping[str, int] = field(default_factory=dict)
