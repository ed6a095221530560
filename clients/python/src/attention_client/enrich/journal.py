"""What a job leaves on disk: finished chunks and their records, refused rows, the output made of the parts.

A chunk's part is renamed into place before its record is. A job that is killed at any time finds either
both, or computes the chunk again.
"""

import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import groupby

import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import fs

from attention_client.enrich.outcome import EnrichError, Figures, Refusal
from attention_client.enrich.plan import JOB_KEY, Chunk, JobPlan
from attention_client.enrich.tables import Json, Location, format_of, is_table, open_table

FOLDER, RECORD, REJECTS = ".partial", ".json", ".rejects.jsonl"


class Journal:
    """The folder of one job, beside the output.

    Attributes:
        result: Where the result is assembled.
    """

    def __init__(self, output: Location, plan: JobPlan) -> None:
        self._folder = output.with_suffix(FOLDER)
        self.result = self._folder / "result"
        self._chunks = self._folder / "chunks"
        self._header = self._folder / "job.json"
        self._fingerprint = plan.fingerprint

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[None]:
        """Starts or continues a job, and locks the folder. Removes it again if no chunk was recorded.

        Other processes are locked out on a local file system only.

        Raises:
            EnrichError: There is an unfinished job and `resume` is false, it is a different job, or another
                process is running it.
        """
        self._chunks.make_folder()
        with ExitStack() as stack:
            if isinstance(self._folder.system, fs.LocalFileSystem):
                try:
                    stack.enter_context(FileLock((self._folder / "lock").path, timeout=0))
                except Timeout as error:
                    raise EnrichError(f"another process is writing {self._folder}") from error
            try:
                self._begin(resume=resume)
                yield
            finally:
                if not self._has_chunks():
                    self.remove()

    def _begin(self, *, resume: bool) -> None:
        if not self._has_chunks():
            self._header.write_json(self._fingerprint)
        elif not resume:
            raise EnrichError(
                f"{self._folder} contains an unfinished job: continue it with --resume (resume=True), or "
                "remove the folder"
            )
        elif changed := self._differences():
            raise EnrichError(
                f"{self._folder} contains a job that differs in {', '.join(changed)} and cannot be resumed: "
                "run it as it was started, or remove the folder"
            )

    def _differences(self) -> list[str]:
        recorded, now = self._header.read_json(), self._fingerprint
        return [name for name in now if recorded.get(name) != now[name]]

    def _has_chunks(self) -> bool:
        return any(name.endswith(RECORD) for name, _ in self._chunks.files())

    def remove(self) -> None:
        """Removes the folder."""
        self._folder.remove()

    def discard(self) -> None:
        """Removes the folder if it belongs to this job."""
        if self._header.exists and not self._differences():
            self.remove()

    def part(self, chunk: Chunk) -> Location:
        """The Arrow IPC file with the result of a chunk."""
        return self._chunks / f"{chunk.index:06}.arrow"

    def _record(self, chunk: Chunk) -> Location:
        return self._chunks / f"{chunk.index:06}{RECORD}"

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk is recorded as finished."""
        return self._record(chunk).exists

    def write(self, chunk: Chunk, figures: Figures) -> None:
        """Records that a chunk is finished."""
        self._record(chunk).write_json(asdict(figures))

    def read(self, chunk: Chunk) -> Figures:
        """The record of a finished chunk."""
        values = self._record(chunk).read_json()
        return Figures(**{**values, "refusals": [Refusal(**refusal) for refusal in values["refusals"]]})


def write_rejects(plan: JobPlan, records: Sequence[Figures], target: Location) -> str | None:
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
    if not any(record.refusals for record in records):
        return None
    with rejects.replaced() as file:
        for chunk, record in zip(plan.chunks, records, strict=True):
            for refusal in record.refusals:
                line: Json = {"file": plan.source.path(chunk.name), **asdict(refusal)}
                file.write(json.dumps(line).encode() + b"\n")
    return str(rejects)


class OutputAssembler:
    """Writes the output on its own thread, while chunks are computed: each part after all earlier ones."""

    def __init__(self, plan: JobPlan, journal: Journal, target: Location) -> None:
        self._plan = plan
        self._journal = journal
        self._target = target
        self._names = _output_names(plan, target)
        self._finished: dict[int, Future[None]] = {chunk.index: Future() for chunk in plan.chunks}
        self._thread = ThreadPoolExecutor(1, "assembler")
        self._written = self._thread.submit(self._write)

    def add(self, chunk: Chunk) -> None:
        """Adds a finished chunk.

        Raises:
            OSError: The output cannot be written.
        """
        if self._written.done():
            self._written.result()
        self._finished[chunk.index].set_result(None)

    def move_into_place(self) -> None:
        """Waits until all chunks are written, and renames the result to the output.

        Raises:
            OSError: The output cannot be written.
        """
        self._written.result()
        self._target.remove()
        result = self._journal.result
        (result / self._names[""] if is_table(self._target.path) else result).move(self._target)

    def close(self) -> None:
        """Ends the thread."""
        for chunk in self._finished.values():
            chunk.cancel()
        self._thread.shutdown()

    def _write(self) -> None:
        for name, group in groupby(self._plan.chunks, key=lambda chunk: chunk.name):
            written, chunks = self._journal.result / self._names[name], list(group)
            if written.exists:
                continue
            (self._journal.result / posixpath.dirname(self._names[name])).make_folder()
            try:
                self._write_file(written, chunks)
            except CancelledError:  # the job ends before all chunks are finished
                return
            for chunk in chunks:
                self._journal.part(chunk).remove()

    def _write_file(self, written: Location, chunks: Iterable[Chunk]) -> None:
        schema = self._plan.output_schema
        with written.replaced() as file, closing(format_of(written.path).writer(file, schema)) as writer:
            for chunk in chunks:
                self._finished[chunk.index].result()
                with self._journal.part(chunk).open() as source:
                    part = pa.ipc.open_file(source)
                    for index in range(part.num_record_batches):
                        writer.write_batch(part.get_batch(index))


def _output_names(plan: JobPlan, target: Location) -> dict[str, str]:
    """For each file of the source, the path of its result relative to the output's folder."""
    single = posixpath.basename(target.path) if is_table(target.path) else plan.source.name
    return {file.name: file.name or single for file in plan.source.files}


def is_complete(plan: JobPlan, target: Location) -> bool:
    """Whether an existing output is the complete result of the same job."""
    added = plan.output_schema.field(len(plan.output_schema) - 1)
    is_file = is_table(target.path)
    files = [target if is_file else target / name for name in _output_names(plan, target).values()]
    return all(file.exists and _job_of(file, added.name) == added.metadata[JOB_KEY] for file in files)


def _job_of(file: Location, column: str) -> bytes | None:
    """Identifies the job that added a column to a table; None if no job did."""
    with closing(open_table(file)) as table:
        index = table.schema.get_field_index(column)
    metadata = table.schema.field(index).metadata if index >= 0 else None
    return (metadata or {}).get(JOB_KEY)
