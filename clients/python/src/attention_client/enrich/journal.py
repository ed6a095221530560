"""What of a job is done: parts of the result, each with a record, in a folder beside the output.

A part is renamed into its place before its record is, so that a job that is killed at any moment finds
either both or does the chunk again.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

from filelock import FileLock, Timeout
from pyarrow import fs

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.plan import Chunk, Plan
from attention_client.enrich.row_batch import Done, Refusal
from attention_client.enrich.storage import Json, Location

FOLDER = ".partial"
REJECTS = ".rejects.jsonl"
RECORD = ".json"


@dataclass(slots=True)
class Record:
    """What became of a chunk.

    Attributes:
        rows: Its rows.
        tokens: Query and key rows that were computed for them.
        nulls: Rows without a result because their cell is null, or because a pool of nothing is asked for.
        refusals: Rows without a result because they were refused.
    """

    rows: int = 0
    tokens: int = 0
    nulls: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, done: Done) -> None:
        """Counts a window of the chunk."""
        self.rows += done.batch.num_rows
        self.tokens += done.tokens
        self.nulls += done.nulls
        self.refusals += done.refusals


class Journal:
    """The folder of one job.

    Attributes:
        result: Where the parts are put together.
    """

    def __init__(self, output: Location, plan: Plan) -> None:
        self._folder = output.beside(FOLDER)
        self.result = self._folder / "result"
        self._chunks = self._folder / "chunks"
        self._fingerprint = plan.fingerprint

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[None]:
        """Begins a job, or goes on with one. No other job of this machine comes near it meanwhile.

        Only on a local file system can others be kept away. Where nothing is recorded, nothing stays.

        Raises:
            EnrichError: There is an unfinished job and `resume` does not say to go on with it, or it is
                another one, or another job is at it.
        """
        self._chunks.make_folder()
        with self._held():
            try:
                self._begin(resume=resume)
                yield
            finally:
                if not self._is_begun():
                    self._folder.remove()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with ExitStack() as held:
            if isinstance(self._folder.system, fs.LocalFileSystem):
                try:
                    held.enter_context(FileLock((self._folder / "lock").path, timeout=0))
                except Timeout as error:
                    raise EnrichError(f"another job is at {self._folder}") from error
            yield

    def _begin(self, *, resume: bool) -> None:
        header = self._folder / "job.json"
        if not self._is_begun():
            header.write_json(self._fingerprint)
        elif not resume:
            raise EnrichError(
                f"{self._folder} holds an unfinished job: --resume goes on with it, or remove it"
            )
        elif changed := _differences(header.read_json(), self._fingerprint):
            raise EnrichError(
                f"{self._folder} holds a job with other {', '.join(changed)}; it cannot be resumed"
            )

    def _is_begun(self) -> bool:
        """Whether any chunk is recorded."""
        return any(name.endswith(RECORD) for name, _ in self._chunks.files())

    def remove(self) -> None:
        """Removes all of it: the result is in its place."""
        self._folder.remove()

    def part(self, chunk: Chunk) -> Location:
        """Where the result of a chunk lies, an Arrow IPC file."""
        return self._chunks / f"{chunk.index:06}.arrow"

    def is_done(self, chunk: Chunk) -> bool:
        """Whether a chunk has its record."""
        return self._record(chunk).exists

    def write(self, chunk: Chunk, record: Record) -> None:
        """Records that a chunk is done."""
        self._record(chunk).write_json(asdict(record))

    def read(self, chunk: Chunk) -> Record:
        """The record of a chunk that is done."""
        values = self._record(chunk).read_json()
        return Record(**{**values, "refusals": [Refusal(**refusal) for refusal in values["refusals"]]})

    def _record(self, chunk: Chunk) -> Location:
        return self._chunks / f"{chunk.index:06}{RECORD}"


def reject_lines(plan: Plan, records: Iterable[Record]) -> Iterator[bytes]:
    """A line of JSON for each row that was refused, of the records of all chunks in their order."""
    for chunk, record in zip(plan.chunks, records, strict=True):
        for refusal in record.refusals:
            line: Json = {"file": plan.source.path(chunk.name), **asdict(refusal)}
            yield json.dumps(line).encode() + b"\n"


def _differences(begun: Json, now: Json) -> list[str]:
    return [name for name in now if begun.get(name) != now[name]]
