"""A batch of rows on its way: cells are read, packed into requests, submitted, and collected as new columns.

Notation: R rows of a batch, S sequences (without passages one for each row), Tq query rows, Tk key rows,
d elements of a vector.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client._values import AnyResult, Array, Embeddings
from attention_client.enrich import cells
from attention_client.enrich.backends import Backend, BackendRequest
from attention_client.enrich.model import JobModel
from attention_client.enrich.options import OnError, PassageLayout, Pool, Role
from attention_client.enrich.outcome import EnrichError, Figures, Refusal, RefusedError
from attention_client.enrich.plan import PASSAGE_TYPES, JobPlan
from attention_client.enrich.tables import BATCH_BYTES, RowBatch, rows_per_batch
from attention_client.enrich.texts import Passage, PassageSplitter, count_tokens, load_tokenizer

# A request holds at most this many sequences, and this many bytes of input or of result unless it holds one.
REQUEST_SEQUENCES = 64
REQUEST_BYTES = 1 << 20
# Attention weights per head of a request: 16 MiB for 16 heads.
REQUEST_PAIRS = 1 << 18
# How many requests a full batch makes at least.
BATCH_REQUESTS = BATCH_BYTES // REQUEST_BYTES
FLOAT_BYTES = 4
# Tokens of a request to a text encoder. Larger runs leave the caches, and each of their tokens takes longer.
REQUEST_TOKENS = 2048
# A guess, for texts that are not encoded here.
CHARACTERS_PER_TOKEN = 4
# Results, by the names that a journal has for them; those of other heads have the names of the heads.
VECTORS, WEIGHTS = "vectors", "weights"
# Reason of a row that was refused before it was sent.
INVALID_CELL = "INVALID_CELL"
# Texts that show whether a tokenizer is the model's. The first has few tokens whatever the tokenizer is.
SHORT_PROBE, PROBES = "a", ("Eat dessert first.", "naïve Größe 42")
POOLS: dict[Pool, Callable[[Array], Array]] = {
    Pool.NONE: lambda rows: rows,
    Pool.MEAN: lambda rows: rows.mean(axis=0, dtype=np.float32),
    Pool.CLS: lambda rows: rows[0],
    Pool.MAX: lambda rows: rows.max(axis=0),
}


def make_splitter(plan: JobPlan, backend: Backend) -> PassageSplitter | None:
    """The splitter of a job's texts; None if they are not cut.

    Raises:
        EnrichError: There is no tokenizer, it is not the model's, or a passage would have no room.
    """
    most, overlap = plan.options.passage_tokens, plan.options.passage_overlap or 0
    if most is None:
        return None
    if backend.tokenizer is None:
        raise EnrichError(
            "passages on servers need the model's tokenizer: name its file tokenizer.json with --tokenizer "
            "(tokenizer)"
        )
    tokenizer = load_tokenizer(backend.tokenizer)
    for probe in PROBES:
        count = count_tokens(tokenizer, probe, special=True)
        expected = backend.count_tokens(probe, prompt="")
        if min(count, plan.model.max_tokens or count) != expected:
            raise EnrichError(
                f"{backend.tokenizer} is not the tokenizer of model {plan.model.name!r}: it makes {count} "
                f"tokens of {probe!r}, the model {expected}"
            )
    added = backend.count_tokens(SHORT_PROBE, prompt=plan.options.prompt)
    added -= count_tokens(tokenizer, SHORT_PROBE)
    room = most - added
    if room < 1:
        raise EnrichError(
            f"passage_tokens is {most}, of which special tokens and the prompt take {added}: none are left "
            "for the text"
        )
    if overlap > room // 2:
        raise EnrichError(
            f"passage_overlap is {overlap}; it must be at most {room // 2}, half of the {room} tokens that a "
            "passage has beside special tokens and the prompt"
        )
    return PassageSplitter(tokenizer, room, overlap)


class Batch:
    """Consecutive rows of a table. Its methods are called once, in their order, but for `save`.

    Attributes:
        first: Number of the first row in its file.
    """

    def __init__(
        self, batch: RowBatch, plan: JobPlan, backend: Backend, splitter: PassageSplitter | None
    ) -> None:
        """Reads the cells; encodes texts.

        Args:
            batch: The rows.
            plan: What to compute.
            backend: Computes it.
            splitter: Cuts texts into passages; None leaves them whole.
        """
        self.first, self._table = batch
        self._plan = plan
        self._model = plan.model
        self._backend = backend
        self._figures = Figures(rows=self._table.num_rows)
        self._refusals: dict[int, Refusal] = {}
        self._truncated: set[int] = set()
        # Sequences with results that `save` has not returned.
        self._unsaved: list[int] = []
        # For each sequence its row, ascending; each row has one sequence or more.
        self._rows: Array = np.arange(self._table.num_rows)
        self._passages: Sequence[Passage | None] | None = None
        # For each input one value for each sequence; None if there is nothing to compute.
        self._values: dict[Role, Sequence[Any]] = {}
        if self._model.accepts_text:
            self._read_texts(splitter)
        else:
            self._read_numbers()
        # For each new column, in their order, one value for each sequence.
        names = [VECTORS if head == "dense" else head for head in plan.options.heads]
        names += [WEIGHTS] * plan.options.weights
        self._results: dict[str, list[Array | None]] = {name: [None] * len(self._rows) for name in names}

    def _read_numbers(self) -> None:
        for role, name in self._plan.options.columns.items():
            values, refused = cells.read_numbers(self._table.column(name), self._model.input_widths[role])
            self._values[role] = values
            self._refuse_cells(name, refused)

    def _refuse_cells(self, column: str, refused: Mapping[int, str]) -> None:
        for row, message in refused.items():
            self._refuse(row, RefusedError(f"column {column!r}: {message}", INVALID_CELL))

    def _read_texts(self, splitter: PassageSplitter | None) -> None:
        template = self._plan.options.text_template
        columns: dict[str, list[str | None]] = {}
        for name in template.columns:
            columns[name], refused = cells.read_texts(self._table.column(name))
            self._refuse_cells(name, refused)
        texts = template.render(columns)
        if splitter is not None:
            texts = self._cut(texts, splitter)
        present = {index: text for index, text in enumerate(texts) if text is not None}
        indices = list(present)
        encoded, truncated = self._backend.encode_texts(list(present.values()))
        values: list[Any] = [None] * len(texts)
        for index, value in zip(indices, encoded, strict=True):
            if isinstance(value, RefusedError):
                self._refuse(self._rows[index], value)
            else:
                values[index] = value
        self._truncated.update(int(self._rows[indices[position]]) for position in truncated)
        self._values[Role.QUERY] = values

    def _cut(self, texts: Sequence[str | None], splitter: PassageSplitter) -> list[str | None]:
        """The texts of the passages; None for a row without."""
        cuts = splitter.split([text for text in texts if text is not None])
        passages: list[Passage | None] = []
        rows: list[int] = []
        for row, text in enumerate(texts):
            parts = [None] if text is None else next(cuts)
            if isinstance(parts, EnrichError):
                self._refuse(row, RefusedError(str(parts), INVALID_CELL))
                parts = [None]
            passages += parts
            rows += [row] * len(parts)
        self._passages, self._rows = passages, np.array(rows, np.int64)
        return [None if passage is None else passage.text for passage in passages]

    def submit(self, saved: Iterable[Mapping[str, Any]] = ()) -> None:
        """Submits the requests.

        Args:
            saved: Results of an interrupted run, as `save` returned them. Their requests are not submitted.
        """
        self._lengths = {role: _lengths(values) for role, values in self._values.items()}
        # The same requests as without the saved results, so that the others are the same numbers.
        groups = pack(self._to_compute(), self._lengths, self._model, weights=self._plan.options.weights)
        finished = {index for results in saved for index in self._restore(results)}
        self._submitted = [(group, self._submit(group)) for group in groups if group[0] not in finished]

    def save(self) -> dict[str, Any]:
        """The results of the requests that finished since the last call, and the batch's state as JSON."""
        sequences, self._unsaved = self._unsaved, []
        state = {
            "first": self.first,
            "sequences": sequences,
            "rows": len(set(self._rows[sequences].tolist())),
            "truncated": sorted(self._truncated),
            "tokens": self._figures.tokens,
            "refusals": [asdict(refusal) for refusal in self._refusals.values()],
        }
        arrays = {
            f"{name}{index}": array
            for name, results in self._results.items()
            for index in sequences
            if (array := results[index]) is not None
        }
        return {"state": json.dumps(state), **arrays}

    def _restore(self, saved: Mapping[str, Any]) -> list[int]:
        """Takes results that `save` returned, and returns the sequences that they are of."""
        state: dict[str, Any] = json.loads(str(saved["state"]))
        if state["first"] != self.first:
            return []  # those of a batch that was recorded
        for name, results in self._results.items():
            for index in state["sequences"]:
                results[index] = saved.get(f"{name}{index}")
        self._truncated.update(state["truncated"])
        self._figures.tokens = state["tokens"]
        for refusal in state["refusals"]:
            self._refusals[refusal["row"] - self.first] = Refusal(**refusal)
        return list(state["sequences"])

    def _to_compute(self) -> Array:
        """Sequences with something to compute: null gives null, an empty query no context vectors."""
        query = self._lengths[Role.QUERY]
        present = np.all([lengths >= 0 for lengths in self._lengths.values()], axis=0)
        present &= ~np.isin(self._rows, list(self._refusals))
        if not self._model.accepts_text:
            if not self._plan.pooled:
                for row in np.flatnonzero(present & (query == 0)).tolist():
                    self._results[VECTORS][row] = np.empty((0, self._model.output_width), np.float32)
            present &= query > 0
        return np.flatnonzero(present)

    def _submit(self, sequences: Sequence[int]) -> Callable[[], AnyResult]:
        request: BackendRequest = {
            role: [values[index] for index in sequences] for role, values in self._values.items()
        }
        return self._backend.submit(request)

    def finish(self, collected: Callable[[], None] = lambda: None) -> Figures:
        """Waits for the results.

        Args:
            collected: Is called after the result of each request.

        Raises:
            EnrichError: The job cannot continue, or a row is refused and the options say to fail.
        """
        for sequences, result in self._submitted:
            self._collect(sequences, result)
            self._unsaved += sequences
            collected()
        if self._refusals and self._plan.options.on_error is OnError.FAIL:
            first = self._refusals[min(self._refusals)]
            raise EnrichError(
                f"row {first.row} is refused: {first.message}; --on-error skip (on_error='skip') gives "
                f"such rows null{self._plan.advice(first)}"
            )
        computed = [row is not None for row in next(iter(self._results.values()))]
        figures = self._figures
        figures.nulls = len(set(self._rows[np.logical_not(computed)].tolist()) - self._refusals.keys())
        if self._passages is not None:
            figures.passages = sum(computed)
        figures.truncated = len(self._truncated - self._refusals.keys())
        figures.refusals = [self._refusals[row] for row in sorted(self._refusals)]
        return figures

    def _collect(self, sequences: Sequence[int], wait: Callable[[], AnyResult]) -> None:
        try:
            result = wait()
        except RefusedError as error:
            if len(sequences) == 1:
                self._refuse(self._rows[sequences[0]], error)
                return
            # Finds those for which the request was refused.
            for index, single in [(index, self._submit([index])) for index in sequences]:
                self._collect([index], single)
            return
        for name, results in self._read_results(result):
            for index, row in zip(sequences, results, strict=True):
                self._results[name][index] = row
        self._truncated.update(int(self._rows[sequences[position]]) for position in result.truncated)
        self._figures.tokens += self._count_tokens(sequences, result)

    def _read_results(self, result: AnyResult) -> Iterator[tuple[str, Iterable[Array]]]:
        """The names of new columns, each with a value for every sequence of a request."""
        vectors: Any = result.context_vectors
        if isinstance(vectors, Embeddings):
            if vectors.sparse is not None:
                yield "sparse", map(cells.sparse_row, vectors.sparse)
            if vectors.token_vectors is not None:
                yield "token_vectors", vectors.token_vectors
            vectors = vectors.dense
        if vectors is not None:
            pool, width = POOLS[self._plan.options.pool], self._model.output_width
            yield VECTORS, [row.reshape(width) if self._model.pooled else pool(row) for row in vectors]
        if result.attention_weights is not None:
            yield WEIGHTS, result.attention_weights

    def _count_tokens(self, sequences: Sequence[int], result: AnyResult) -> int:
        """Query and key rows. A text of unknown length counts one token for each of its vectors."""
        if result.token_counts:
            return sum(result.token_counts)
        if isinstance(self._values[Role.QUERY][sequences[0]], str):
            return sum(vectors.size // self._model.output_width for vectors in result.context_vectors)
        counted = (lengths for role, lengths in self._lengths.items() if role is not Role.VALUE)
        return sum(int(lengths[sequences].sum()) for lengths in counted)

    def _refuse(self, row: int, error: RefusedError) -> None:
        # The request is of this row alone.
        message = re.sub(r"^(\w+: )?(text|sequence) 0\b", r"\1the \2", str(error))
        self._refusals.setdefault(int(row), Refusal(self.first + int(row), error.reason, message))

    def output(self) -> Iterator[pa.RecordBatch]:
        """The rows of the result, in portions of bounded size where rows of the table are repeated."""
        match self._plan.options.layout:
            case PassageLayout.ROWS:
                yield from self._passage_rows()
                return
            case PassageLayout.LISTS:
                added = self._passage_lists()
            case _:
                added = self._result_columns(range(len(self._rows)))
        columns = [*map(self._table.column, self._plan.kept_columns), *added]
        yield pa.RecordBatch.from_arrays(columns, schema=self._plan.output_schema)

    def _passage_rows(self) -> Iterator[pa.RecordBatch]:
        """One row for each passage; one with nulls for a row of the table without passages."""
        first_of_row = np.diff(self._rows, prepend=-1) > 0
        present = ~np.isin(self._rows, list(self._refusals))
        sequences = np.flatnonzero(present | first_of_row)
        schema, table = self._plan.output_schema, self._table
        kept = [table.column(index) for index in self._plan.kept_columns]
        # What one row of the result takes decides how many are made at a time.
        row_bytes = self._model.output_width * self._model.dtype.itemsize
        size = sum(column.nbytes for column in kept) + table.num_rows * row_bytes
        step = rows_per_batch(table.num_rows, size)
        for start in range(0, max(len(sequences), 1), step):
            part = sequences[start : start + step]
            rows = self._rows[part]
            # Arrow takes rows of some types only, such as no views, and concatenates slices of any.
            columns = [
                *(
                    pa.concat_arrays([column.slice(0, 0), *(column.slice(row, 1) for row in rows.tolist())])
                    for column in kept
                ),
                pa.array(rows + self.first, pa.int64()),
                *self._passage_columns([index if present[index] else None for index in part]),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _passage_lists(self) -> list[pa.Array]:
        """For each row of the table, lists of its passages; null for a row without passages."""
        present = ~np.isin(self._rows, list(self._refusals))
        present &= [passage is not None for passage in self._passages or ()]
        counts = np.bincount(self._rows[present], minlength=self._table.num_rows).tolist()
        columns = self._passage_columns(np.flatnonzero(present).tolist())
        return [cells.list_column([count or None for count in counts], column) for column in columns]

    def _passage_columns(self, sequences: Sequence[int | None]) -> list[pa.Array]:
        """The passages of sequences and their vectors; nulls for None."""
        passages = self._passages or ()
        parts = [None if index is None else passages[index] for index in sequences]
        columns = [
            pa.array([part and part[place] for part in parts], kind)
            for place, kind in enumerate(PASSAGE_TYPES.values())
        ]
        return [*columns, *self._result_columns(sequences)]

    def _result_columns(self, sequences: Sequence[int | None]) -> list[pa.Array]:
        """The new columns for sequences; nulls for None."""
        columns, model = [], self._model
        to_column = cells.pooled_column if self._plan.pooled else cells.vectors_column
        for name, results in self._results.items():
            rows = [None if index is None else results[index] for index in sequences]
            if name == "sparse":
                columns.append(cells.sparse_column(rows))
            elif name == "token_vectors":
                columns.append(cells.vectors_column(rows, model.token_width, cells.FLOAT32))
            elif name == WEIGHTS:
                columns.append(cells.weights_column(rows))
            else:
                columns.append(to_column(rows, model.output_width, model.dtype))
        return columns


def _lengths(values: Sequence[Any]) -> Array:
    """The length of each sequence, about that of a text; -1 if there is none."""
    return np.array([_length(value) for value in values], np.int64)


def _length(value: Any) -> int:
    if value is None:
        return -1
    return -(-len(value) // CHARACTERS_PER_TOKEN) if isinstance(value, str) else len(value)


def pack(
    rows: Array, lengths: Mapping[Role, Array], model: JobModel, *, weights: bool
) -> Iterator[list[int]]:
    """Groups sequences into requests: similar lengths together, each request of bounded size.

    Args:
        rows: Numbers of the sequences to compute, integers (n,).
        lengths: For each input the length of each sequence, integers (S,).
        model: The model.
        weights: Whether attention weights are computed too.

    Yields:
        The numbers of the sequences of one request.
    """
    columns = list(lengths.values())
    query, key = columns[0][rows], columns[-1][rows]
    order = np.lexsort((key, query))
    ordered, start = rows[order].tolist(), 0
    most = _sequences_per_request(query[order], key[order], model, weights=weights)
    for index, limit in enumerate(most.tolist()):
        if index - start >= limit:
            yield ordered[start:index]
            start = index
    if ordered:
        yield ordered[start:]


def _sequences_per_request(query: Array, key: Array, model: JobModel, *, weights: bool) -> Array:
    """How many sequences of lengths Tq and Tk a request may hold; at least one."""
    longest = np.maximum(np.maximum(query, key), 1)
    if model.text_encoder is not None:
        most: Array = REQUEST_TOKENS // longest
    else:
        width = max(model.output_width, *(width or 1 for width in model.input_widths.values()))
        most = REQUEST_BYTES // (longest * width * FLOAT_BYTES)
    if weights:
        most = np.minimum(most, REQUEST_PAIRS // np.maximum(query * (model.memory_rows or key), 1))
    few: Array = np.clip(most, 1, REQUEST_SEQUENCES)
    return few
