"""The journal of a job: finished chunks of the result, each with a record, in a folder beside the output.

A chunk's part is renamed into place before its record is. A job that is killed at any time finds either
both, or computes the chunk again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

from filelock import FileLock, Timeout
from pyarrow import fs

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.pending_batch import EnrichedBatch
from attention_client.enrich.plan import Chunk, JobPlan
from attention_client.enrich.storage import Json, Location
from attention_client.enrich.summary import Refusal

FOLDER = ".partial"
RECORD = ".json"


@dataclass(slots=True)
class ChunkRecord:
    """Figures of a finished chunk.

    Attributes:
        rows: Number of its rows.
        tokens: Query and key rows that were computed.
        nulls: Rows without a result because there is nothing to compute.
        passages: Passages that were computed.
        truncated: Rows of which the text was cut.
        refusals: Rows without a result because they were refused.
    """

    rows: int = 0
    tokens: int = 0
    nulls: int = 0
    passages: int = 0
    truncated: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, batch: EnrichedBatch) -> None:
        """Counts a batch of the chunk."""
        self.rows += batch.rows
        self.tokens += batch.tokens
        self.nulls += batch.nulls
        self.passages += batch.passages
        self.truncated += batch.truncated
        self.refusals += batch.refusals


class Journal:
    """The folder of one job.

    Attributes:
        result: Where the result is assembled.
    """

    def __init__(self, output: Location, plan: JobPlan) -> None:
        self._folder = output.with_suffix(FOLDER)
        self.result = self._folder / "result"
        self._chunks = self._folder / "chunks"
        self._header = self._folder / "job.json"
        self._elapsed = self._folder / "elapsed.json"
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
        with self._lock():
            try:
                self._begin(resume=resume)
                yield
            finally:
                if not self._has_chunks():
                    self.remove()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with ExitStack() as stack:
            if isinstance(self._folder.system, fs.LocalFileSystem):
                try:
                    stack.enter_context(FileLock((self._folder / "lock").path, timeout=0))
                except Timeout as error:
                    raise EnrichError(f"another process is writing {self._folder}") from error
            yield

    def _begin(self, *, resume: bool) -> None:
        if not self._has_chunks():
            self._header.write_json(self._fingerprint)
        elif not resume:
            raise EnrichError(
                f"{self._folder} contains an unfinished job: continue it with --resume (resume=True), or "
                "remove the folder"
            )
        elif changed := _differences(self._header.read_json(), self._fingerprint):
            raise EnrichError(
                f"{self._folder} contains a job that differs in {', '.join(changed)} and cannot be resumed: "
                "run it as it was started, or remove the folder"
            )

    def _has_chunks(self) -> bool:
        return any(name.endswith(RECORD) for name, _ in self._chunks.files())

    def remove(self) -> None:
        """Removes the folder."""
        self._folder.remove()

    def discard(self) -> None:
        """Removes the folder if it belongs to this job."""
        if self._header.exists and not _differences(self._header.read_json(), self._fingerprint):
            self.remove()

    def part(self, chunk: Chunk) -> Location:
        """The Arrow IPC file with the result of a chunk."""
        return self._chunks / f"{chunk.index:06}.arrow"

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk is recorded as finished."""
        return self._record(chunk).exists

    def write(self, chunk: Chunk, record: ChunkRecord) -> None:
        """Records that a chunk is finished."""
        self._record(chunk).write_json(asdict(record))

    def read(self, chunk: Chunk) -> ChunkRecord:
        """The record of a finished chunk."""
        values = self._record(chunk).read_json()
        return ChunkRecord(**{**values, "refusals": [Refusal(**refusal) for refusal in values["refusals"]]})

    def _record(self, chunk: Chunk) -> Location:
        return self._chunks / f"{chunk.index:06}{RECORD}"

    def write_seconds(self, seconds: float) -> None:
        """Records how long the job has run, its earlier runs included."""
        self._elapsed.write_json({"seconds": seconds})

    def read_seconds(self) -> float:
        """How long earlier runs took; 0 if there were none."""
        return float(self._elapsed.read_json()["seconds"]) if self._elapsed.exists else 0.0


def _differences(recorded: Json, now: Json) -> list[str]:
    return [name for name in now if recorded.get(name) != now[name]]
