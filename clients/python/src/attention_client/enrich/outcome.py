"""How a job ends: its figures, or an error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


class EnrichError(Exception):
    """The job cannot start or cannot continue. The message says why and what to do."""


class UsageError(EnrichError):
    """Options contradict each other. The message has their names in Python."""


class ServersUnavailableError(EnrichError):
    """No server answered for long enough. The same job may succeed later, and continues with `resume`."""


class RefusedError(Exception):
    """The model refuses these rows and would refuse them again; other rows may pass.

    Attributes:
        reason: Short and stable, for programs, such as "LIMIT_EXCEEDED".
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def counted(count: int, singular: str, plural: str) -> str:
    """A number with the words for one or for several: "1 row is", "2 rows are"."""
    return f"{count:,} {singular if count == 1 else plural}"


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


@dataclass(slots=True)
class Figures:
    """Figures of a batch, of a chunk or of all chunks; see Summary."""

    rows: int = 0
    tokens: int = 0
    nulls: int = 0
    passages: int = 0
    truncated: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, other: "Figures") -> None:
        """Adds the figures of consecutive rows."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a finished job. Those of rows and tokens include its interrupted runs.

    Attributes:
        output: Path or URL of the result; None if it is `table`.
        rows: Rows of the table.
        refused: Rows without a result because they were refused.
        nulls: Rows without a result because there is nothing to compute.
        passages: Passages that texts were cut into; 0 if texts are not cut.
        truncated: Rows of which the text was cut to the tokens that the model takes.
        tokens: Query and key rows that were computed.
        resumed_rows: How many of the rows earlier, interrupted runs had computed.
        resumed_tokens: How many of the tokens earlier, interrupted runs had computed.
        seconds: How long this run took.
        tokens_per_second: The tokens that this run computed, `tokens - resumed_tokens`, divided by `seconds`.
        model: Name of the model.
        version: Version of the model.
        parity_error: Largest absolute difference from the golden vectors that the backend measured; None if
            unknown.
        rejects: File with one line of JSON for each refused row; None if there is none.
        refusals: The refused rows.
        table: The result, if no output was named.
        already_complete: Whether the output was complete before this run. The output states no figures but
            `rows`; the others are then 0, and `rejects` None.
        server_failures: For each server that failed in this run, how many of its requests did, by its
            address. A request that a server has no capacity for does not count.
    """

    output: str | None
    rows: int
    refused: int
    nulls: int = 0
    passages: int = 0
    truncated: int = 0
    tokens: int = 0
    resumed_rows: int
    resumed_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    model: str
    version: str
    parity_error: float | None
    rejects: str | None
    refusals: tuple[Refusal, ...]
    table: "pa.Table | None" = None
    already_complete: bool = False
    server_failures: Mapping[str, int] = field(default_factory=dict)
