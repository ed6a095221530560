"""Values that pass through the engine: decoded requests, plans of sequences, contexts, results.

Notation: S sequences of a request, T rows of one sequence, Tq and Tk query and key rows, H heads.

Values of each request are not frozen: that would make them take three times as long to create. Handlers set
deadline and caller of a decoded request, and the store of contexts what it knows of a context.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_serving.artifact.manifest import KEY_POSITIONS, GraphKind
from attention_serving.server.engine.budget import ANYONE, Caller

Array = NDArray[Any]
# A text, or its UTF-8 bytes.
Text: TypeAlias = str | bytes | memoryview
BITS_PER_BYTE = 8
# Bytes that a context takes in addition to its tensors.
CONTEXT_BYTES = 32 << 10
# The tensors of stored documents: their token vectors (sum of lengths, d), and the lengths (documents,).
DOCUMENT_VECTORS, DOCUMENT_LENGTHS = "document_vectors", "document_lengths"
# Of results: the token ids (n,) uint32 and the weights (n,) float32 of a sparse embedding.
SPARSE_INDICES, SPARSE_VALUES = "sparse_indices", "sparse_values"


@dataclass(eq=False, slots=True)
class Ragged:
    """Sequences of different lengths, their rows concatenated.

    Attributes:
        rows: (sum of lengths, ...).
        lengths: Number of rows of each of the S sequences. Python integers, because NumPy's reductions cost
            more than they save on the few sequences of a request.
    """

    rows: Array
    lengths: tuple[int, ...]


class MaskKind(StrEnum):
    """What the mask of one sequence spans."""

    KEYS = "keys"
    """(Tk,): the same for every query row and head."""
    PAIRS = "pairs"
    """(Tq, Tk): the same for every head."""
    HEADS = "heads"
    """(H, Tq, Tk)."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The masks of all sequences of a request; True means "may attend".

    Attributes:
        kind: What each sequence's mask spans.
        data: The flags of all masks, row-major and concatenated: either one boolean each, or one bit each
            with the first flag in the lowest bit of the first byte. Unused bits of the last byte are ignored.
    """

    kind: MaskKind
    data: NDArray[np.bool_] | NDArray[np.uint8]

    def holds(self, count: int) -> bool:
        """Whether `data` has the size that `count` flags need."""
        size = self.data.size
        return size == (count if self.data.dtype == np.bool_ else -(-count // BITS_PER_BYTE))

    def flags(self, count: int) -> NDArray[np.bool_]:
        """The first `count` flags as booleans."""
        if self.data.dtype == np.bool_:
            return self.data.view(np.bool_)
        return np.unpackbits(self.data.view(np.uint8), count=count, bitorder="little").view(np.bool_)


class EncoderOutputs(NamedTuple):
    """What a result has of the heads of a text encoder.

    Attributes:
        names: The outputs that it is made of. Others of the graph are dropped after the run, and so are token
            vectors that a multi-vector encoder skips.
        most_weights: Number of the largest weights that a sparse embedding has, 0 for all.
    """

    names: frozenset[str]
    most_weights: int = 0


class HeadSelection(NamedTuple):
    """Some layers and heads of attention weights, counted from 0, in the order of the result.

    Attributes:
        layers: Empty for all.
        heads: Empty for all.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


@dataclass(eq=False, slots=True, kw_only=True)
class DecodedRequest:
    """A decoded request, not yet validated.

    Attributes:
        inputs: Sequences by name of the model's input.
        texts: Texts in place of `inputs`, for models with a tokenizer.
        second_texts: For text classifiers: the second text of each pair; empty for single texts.
        mask: None if every key may be attended to.
        return_weights: Whether the result contains the attention weights.
        head_selection: Which of them, if the result contains them; None for all.
        output_names: Outputs that the result contains, if the cheapest graph does not have all of them.
        encoder_outputs: For text encoders, in place of `output_names`: what the result is made of.
        kinds: The kind of each sequence, in place of `input_kind`, if they differ; otherwise empty.
        dimensions: For text encoders: number of leading elements of each embedding; 0 for all.
        normalised: For text encoders: whether embeddings have length 1; None for the setting of the model.
        prompt: For texts: the name of the prompt that is put before each, empty for none; None for that of
            the model.
        truncate: For texts: whether one with too many tokens is cut; None for the setting of the model.
        truncation_side: For texts: which end of one that is cut loses tokens; None for the setting of the
            model.
        input_kind: For texts, in place of `prompt`: query, document, classification or clustering; empty for
            none of them.
        truncated: Indices of the texts that were cut.
        spans: For text encoders: start and end (n, 2) of the parts of each sequence whose embeddings are
            returned in place of that of the sequence. They count characters of texts, or tokens.
        return_offsets: For texts: whether `offsets` are computed.
        offsets: The characters of each token (T, 2); see `server.engine.requests.tokenizer.EncodedTexts`.
        max_result_bytes: Largest size of a result that is not sent; 0 for that of results that are.
        deadline: On `time.monotonic`'s clock, in seconds.
        caller: Whose request it is, for the shares of callers.
    """

    inputs: Mapping[str, Ragged] = field(default_factory=dict)
    texts: tuple[Text, ...] = ()
    second_texts: tuple[Text, ...] = ()
    mask: Mask | None = None
    return_weights: bool = False
    head_selection: HeadSelection | None = None
    output_names: Collection[str] = ()
    encoder_outputs: EncoderOutputs | None = None
    kinds: tuple[str, ...] = ()
    dimensions: int = 0
    normalised: bool | None = None
    prompt: str | None = None
    truncate: bool | None = None
    truncation_side: Literal["right", "left"] | None = None
    input_kind: str = ""
    truncated: tuple[int, ...] = ()
    spans: Ragged | None = None
    return_offsets: bool = False
    offsets: Ragged | None = None
    max_result_bytes: int = 0
    deadline: float = math.inf
    caller: Caller = ANYONE


class SequencePlan(NamedTuple):
    """Derived sizes of one sequence.

    Attributes:
        sizes: Length by axis, such as {"query_length": 7}; derived axes of outputs too.
        lengths: The same in the order of the model's axes. Sequences have equal shapes if all are equal.
        graph: The graph that computes it alone: that of its request, or the same in blocks.
        seconds: Expected duration of a run of it alone, on one thread, as measured at the load.
        fixed_seconds: The part of that which does not depend on its lengths.
        run_bytes: Expected memory of that run.
        result_bytes: Size of the outputs of its request's graph.
        rows: Number of its rows on all symbolic axes: for cross-attention, those of query and key.
        computed_rows: The same in a run of it alone, padding included.
        runs_alone: Whether it needs a run of its own: in blocks, and any of some models.
    """

    sizes: Mapping[str, int]
    lengths: tuple[int, ...]
    graph: GraphKind
    seconds: float
    fixed_seconds: float
    run_bytes: int
    result_bytes: int
    rows: int
    computed_rows: int
    runs_alone: bool


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Context:
    """What queries attend to or are compared with: see `server.engine.contexts`.

    Attributes:
        id: The same for the same model, rows, mask and order of appends.
        nbytes: Memory that it takes.
        length: The position of the next row that is appended.
        tensors: The inputs of runs by name: `projected_keys` (1, Hkv, Tk, d_k), `projected_values`
            (1, Hkv, Tk, d_v) and `key_positions` (1, Tk). Of a multi-vector encoder, `DOCUMENT_VECTORS` and
            `DOCUMENT_LENGTHS`.
        device_tensors: The same where bound runs compute; empty before the first of them.
        owner: The name of the caller who put it.
        shared: Whether other callers may use it.
        expires_at: Unix time in seconds.
        used: When it was used last; grows with each use of any context.
        is_stored: False once it was dropped.
    """

    id: str
    nbytes: int
    length: int
    tensors: Mapping[str, Array] = field(default_factory=dict)
    device_tensors: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    shared: bool = False
    expires_at: float = math.inf
    used: int = 0
    is_stored: bool = True

    @property
    def rows(self) -> int:
        """Number of rows that may be attended to, Tk, or of token vectors of documents."""
        return int(self.tensors[KEY_POSITIONS].shape[1]) if not self.documents else self.length

    @property
    def documents(self) -> int:
        """Number of documents, of a multi-vector encoder."""
        return len(self.tensors.get(DOCUMENT_LENGTHS, ()))


@dataclass(eq=False, slots=True)
class Result:
    """The answer to one request.

    Attributes:
        outputs: For each output one array per sequence, in the request's order: `context_vectors` (Tq, d_out)
            and, if requested, `attention_weights` (H, Tq, Tk); of a sparse embedding `SPARSE_INDICES` and
            `SPARSE_VALUES`.
    """

    outputs: Mapping[str, list[Array]]
