"""Texts of a batch: columns joined by the template, cut into passages, encoded as the backend takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from attention_client.enrich.backend import Backend
from attention_client.enrich.cells import read_texts
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.enrich.options import JobOptions
from attention_client.enrich.passages import Passage, PassageSplitter, count_tokens, load_tokenizer

# Texts that show whether a tokenizer is the model's. The first has few tokens whatever the tokenizer is.
SHORT_PROBE, PROBES = "a", ("Eat dessert first.", "naïve Größe 42")


@dataclass(frozen=True, eq=False)
class TextSequences:
    """The texts of a batch, as requests carry them.

    Attributes:
        values: For each sequence a text or its token ids (T,); None if there is nothing to compute.
        rows: For each sequence the row of the batch that it belongs to, ascending; at least one for each row.
        passages: For each sequence its passage, None for a row without; None if texts are not cut.
        refused: The reason for each row that is refused.
        truncated: Rows of which the text was cut.
    """

    values: list[Any]
    rows: list[int]
    passages: list[Passage | None] | None
    refused: dict[int, RefusedError]
    truncated: frozenset[int]


class TextReader:
    """Reads the texts of batches."""

    def __init__(self, backend: Backend, options: JobOptions, *, invalid: str) -> None:
        """Loads the tokenizer if texts are cut into passages.

        Args:
            backend: Computes the texts.
            options: Options of the job.
            invalid: Reason of rows that are refused before they are encoded.

        Raises:
            EnrichError: Passages cannot be cut as the options ask for.
        """
        self._backend = backend
        self._template = options.text_template
        self._splitter = make_splitter(backend, options)
        self._invalid = invalid

    def read(self, batch: pa.RecordBatch) -> TextSequences:
        """The sequences of a batch."""
        cells = {name: read_texts(batch.column(name)).values for name in self._template.columns}
        texts = self._template.render(cells)
        if self._splitter is None:
            return self._encoded(texts, list(range(len(texts))), None, {})
        return self._cut(texts, self._splitter)

    def _cut(self, texts: Sequence[str | None], splitter: PassageSplitter) -> TextSequences:
        cuts = splitter.split([text for text in texts if text is not None])
        passages: list[Passage | None] = []
        rows: list[int] = []
        refused = {}
        for row, text in enumerate(texts):
            found = None if text is None else next(cuts)
            if isinstance(found, EnrichError):
                refused[row] = RefusedError(str(found), self._invalid)
            own: Sequence[Passage | None] = found if isinstance(found, list) else [None]
            passages += own
            rows += [row] * len(own)
        return self._encoded(
            [None if passage is None else passage.text for passage in passages], rows, passages, refused
        )

    def _encoded(
        self,
        texts: Sequence[str | None],
        rows: list[int],
        passages: list[Passage | None] | None,
        refused: dict[int, RefusedError],
    ) -> TextSequences:
        given = [index for index, text in enumerate(texts) if text is not None]
        encoded = self._backend.encode_texts([text for text in texts if text is not None])
        values: list[Any] = [None] * len(texts)
        for index, value in zip(given, encoded.values, strict=True):
            values[index] = value
        for position, error in encoded.refused.items():
            refused.setdefault(rows[given[position]], error)
        truncated = frozenset(rows[given[position]] for position in encoded.truncated)
        return TextSequences(values, rows, passages, refused, truncated)


def make_splitter(backend: Backend, options: JobOptions) -> PassageSplitter | None:
    """The splitter of a job's texts; None if they are not cut.

    Raises:
        EnrichError: There is no tokenizer, it is not the model's, or a passage would have no room.
    """
    if options.passage_tokens is None:
        return None
    if backend.tokenizer is None:
        raise EnrichError(
            "passages on servers need the model's tokenizer: name its file tokenizer.json with --tokenizer "
            "(tokenizer)"
        )
    tokenizer = load_tokenizer(backend.tokenizer)
    encoder, most = backend.model.encoder, options.passage_tokens
    for probe in PROBES:
        own, known = count_tokens(tokenizer, probe, special=True), backend.count_tokens(probe, prompt="")
        if min(own, (encoder and encoder.max_tokens) or own) != known:
            raise EnrichError(
                f"{backend.tokenizer} is not the tokenizer of model {backend.model.name!r}: it makes {own} "
                f"tokens of {probe!r}, the model {known}"
            )
    added = backend.count_tokens(SHORT_PROBE, prompt=options.prompt) - count_tokens(tokenizer, SHORT_PROBE)
    room, overlap = most - added, options.passage_overlap or 0
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
