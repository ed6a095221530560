"""A job from its beginning to its end: plan, do the pieces, put the parts together, rename into place."""

import posixpath
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from attention_client.enrich.computing import Computer
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.journal import REJECTS, Journal, reject_lines
from attention_client.enrich.plan import Options, Piece, Plan, make_plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.storage import Location, locate
from attention_client.enrich.tables import is_table, open_writer
from attention_client.enrich.work import do_pieces

# Does the pieces that are left, here or elsewhere.
DoPieces = Callable[[Plan, Iterable[Piece], Journal, Progress], None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished job did.

    Attributes:
        output: Where the result lies.
        rows: Rows of the table.
        refused: Rows without a result because they were refused; `rejects` lists them.
        nulls: Rows without a result because there is nothing to compute.
        tokens: Query and key rows that were computed for all of them.
        resumed_rows: How many of the rows an earlier run, which was interrupted, had done.
        seconds: How long this run of the job took.
        tokens_per_second: Of what this run computed.
        model: Name of the model.
        version: Its version.
        parity_error: Largest difference from eager PyTorch that was measured where it ran; None if unknown.
        rejects: File with a line of JSON for each refused row; None where there is none.
    """

    output: str
    rows: int
    refused: int
    nulls: int
    tokens: int
    resumed_rows: int
    seconds: float
    tokens_per_second: float
    model: str
    version: str
    parity_error: float | None
    rejects: str | None


def run_job(
    source: str,
    output: str,
    computer: Computer,
    options: Options,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    do: DoPieces | None = None,
) -> Summary:
    """Enriches a table.

    Args:
        source: A file or a folder, local or by its URL.
        output: The same; of a file ending, such as .parquet, a file.
        computer: Computes.
        options: What is asked of every row.
        resume: Whether to go on with an unfinished job.
        overwrite: Whether to replace an output that is there, at the end.
        quiet: Whether to show no progress.
        do: Does the pieces in place of this process.

    Raises:
        EnrichError: There is no result; what was done stays for `resume`.
    """
    started = time.monotonic()
    target = locate(output.rstrip("/") or output)
    if target.exists and not overwrite:
        raise EnrichError(f"{target} exists; --overwrite replaces it")
    plan = make_plan(locate(source), computer.facts, options)
    names = _names(plan, target)
    journal = Journal(target, plan, resume=resume)
    left = [piece for piece in plan.pieces if not journal.is_done(piece)]
    rows_left = sum(piece.stop - piece.start for piece in left)
    with Progress(rows_left, quiet=quiet) as progress:
        if do:
            do(plan, left, journal, progress)
        else:
            do_pieces(plan, left, computer, options, journal, progress)
    computing = time.monotonic() - started
    _put_together(plan, journal, names)
    records = [journal.read(piece) for piece in plan.pieces]
    refused = sum(len(record.refusals) for record in records)
    rejects = target.beside(REJECTS)
    rejects.remove()
    if refused:
        with rejects.replaced() as file:
            for line in reject_lines(plan, records):
                file.write(line)
    target.remove()
    result = journal.result / names[""] if "" in names and is_table(target.path) else journal.result
    result.move(target)
    journal.folder.remove()
    rows = sum(record.rows for record in records)
    return Summary(
        output=str(target),
        rows=rows,
        refused=refused,
        nulls=sum(record.nulls for record in records),
        tokens=sum(record.tokens for record in records),
        resumed_rows=rows - rows_left,
        seconds=time.monotonic() - started,
        tokens_per_second=progress.tokens / computing,
        model=computer.facts.name,
        version=computer.facts.version,
        parity_error=computer.facts.parity_error,
        rejects=str(rejects) if refused else None,
    )


def _names(plan: Plan, target: Location) -> dict[str, str]:
    """By file of the input the name of its result below the output."""
    if not is_table(target.path):
        single = posixpath.basename(plan.source.path)
        return {name: name or single for name, _ in plan.files}
    if [name for name, _ in plan.files] != [""]:
        raise EnrichError(f"{plan.source} is a folder: its result is a folder too, and {target} names a file")
    return {"": posixpath.basename(target.path)}


def _put_together(plan: Plan, journal: Journal, names: dict[str, str]) -> None:
    """Writes each file of the result from its parts."""
    plain = [field.name for field in plan.output_schema if field.name not in plan.schema.names]
    for name, pieces in groupby(plan.pieces, key=lambda piece: piece.name):
        written = journal.result / names[name]
        if written.exists:
            continue
        written.parent.make_folder()
        with written.replaced() as file:
            writer = open_writer(written.path, file, plan.output_schema, plain)
            for piece in pieces:
                _copy(journal.part(piece), writer.write)
            writer.close()


def _copy(part: Location, write: Callable[[pa.RecordBatch], None]) -> None:
    with part.open() as source:
        file = pa.ipc.open_file(source)
        for index in range(file.num_record_batches):
            write(file.get_batch(index))
