"""What is known of a model by its manifest: what it takes and returns, and the sizes of its runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from attention_serving.artifact.encoder import (
    ATTENTION_WEIGHTS,
    CONTEXT_VECTORS,
    EMBEDDING,
    LOGITS,
    SCORES,
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    ClassifierFacts,
    EncoderFacts,
    LateInteractionFacts,
)
from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    IN_BLOCKS,
    KEY_LENGTHS,
    OF_ENCODERS,
    POSITIONS,
    QUERY_LENGTHS,
    TOKEN_TYPES,
    GraphKind,
    Manifest,
    TensorSpec,
    sequence_axes,
)
from attention_serving.server.engine.errors import InvalidRequestError

# Query rows of a block. With fewer, the kernels spend more time on packing the keys anew for each block: at
# 8,192 x 768, 128 rows take 1.2 times as long as 256, and 512 gain nothing.
MOST_BLOCK_ROWS = 256
# Blocks of very long sequences have fewer rows, so that their scores need this memory, but not less than
# these rows.
BLOCK_SCORE_BYTES, LEAST_BLOCK_ROWS = 128 << 20, 64
# Tensors as large as an input that a run holds at a time: the input, its projections, the output.
ROW_TENSORS = 6
# Tensors as large as the attention scores that a run holds at a time: the scores, a mask converted to
# numbers, and the weights with a copy. Measured with ONNX Runtime 1.31 at lengths of 1,024 and 2,048.
PAIR_TENSORS = {
    GraphKind.PLAIN: 1.0,
    GraphKind.LENGTHS: 1.25,
    GraphKind.MASK: 1.25,
    GraphKind.WEIGHTS: 3.25,
    GraphKind.TOKENS: 1.25,
    GraphKind.QUERY: 0.0,
    GraphKind.PREFIX: 2.25,
    GraphKind.SUFFIX: 3.25,
    # Of one block.
    GraphKind.BLOCKS: 1.5,
    GraphKind.MASK_BLOCKS: 2.75,
}
# What a text encoder may return for a text, by the field of requests that asks for it: the outputs of graphs
# that it is made of.
EMBEDS, SPARSE, TOKEN_VECTORS = "embedding", "sparse", "return_token_vectors"
HEADS = {
    EMBEDS: (EMBEDDING,),
    SPARSE: (SPARSE_EMBEDDING, TOKEN_WEIGHTS),
    TOKEN_VECTORS: (CONTEXT_VECTORS,),
}
# Heads that are expected of a module that does not state them.
UNKNOWN_HEADS = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelFacts:
    """The facts of one version of a model.

    Attributes:
        manifest: The manifest of its artifact.
        digest: SHA-256 of the manifest, in hex, which identifies the artifact.
    """

    manifest: Manifest
    digest: str

    @cached_property
    def name(self) -> str:
        """Name of the model."""
        return self.manifest.name

    @cached_property
    def version(self) -> str:
        """Version of the model."""
        return str(self.manifest.version)

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's own inputs, without masks and lengths. Requests may omit some of them."""
        return self.manifest.graphs[GraphKind.PLAIN].inputs

    @cached_property
    def inputs_by_name(self) -> dict[str, TensorSpec]:
        """The model's own inputs by name."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def input_list(self) -> str:
        """The inputs that a request may have, as a text for error messages."""
        names = ", ".join(spec.name for spec in self.inputs)
        optional = [ATTENTION_MASK] if GraphKind.MASK in self.manifest.graphs else []
        optional += self.manifest.lengths
        return f"{names} and optionally {', '.join(optional)}" if optional else names

    @cached_property
    def length_inputs(self) -> list[TensorSpec]:
        """The lengths that stand in for masks of keys, for padded tensors in the Open Inference Protocol.

        Requests of any model with sequences may have such lengths; other modules do without. They are (B, 1)
        or (B,): Triton's load generator refuses descriptions of the latter.
        """
        axes = (BATCH_AXIS, 1)
        return [TensorSpec(name=name, data_type="int64", axes=axes) for name in self.manifest.lengths]

    def input(self, name: str) -> TensorSpec:
        """The input of a name.

        Raises:
            InvalidRequestError: There is none.
        """
        if name not in self.inputs_by_name:
            raise InvalidRequestError(name, f"is not an input; model {self.name!r} takes {self.input_list}")
        return self.inputs_by_name[name]

    @cached_property
    def encoder(self) -> EncoderFacts | None:
        """What sets a text encoder apart; None for any other model."""
        return self.manifest.encoder

    @cached_property
    def classifier(self) -> ClassifierFacts | None:
        """What sets a text classifier apart; None for any other model."""
        return self.manifest.classifier

    @cached_property
    def late_interaction(self) -> LateInteractionFacts | None:
        """What sets a multi-vector encoder apart; None for any other model."""
        return None if self.encoder is None else self.encoder.late_interaction

    @cached_property
    def takes_token_types(self) -> bool:
        """Whether tokens of the first and the second text of a pair are told apart."""
        return self.classifier is not None and TOKEN_TYPES in self.inputs_by_name

    @cached_property
    def optional_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that a request may omit."""
        return (POSITIONS, TOKEN_TYPES) if self.takes_token_types else (POSITIONS,)

    @cached_property
    def outputs(self) -> dict[str, TensorSpec]:
        """Every output that a request may ask for, by name."""
        graphs = self.manifest.graphs
        first = GraphKind.WEIGHTS if GraphKind.WEIGHTS in graphs else GraphKind.PLAIN
        kinds = [first, *(kind for kind in OF_ENCODERS if kind in graphs)]
        return {spec.name: spec for kind in kinds for spec in graphs[kind].outputs}

    @cached_property
    def output_names(self) -> Mapping[GraphKind, frozenset[str]]:
        """The names of the outputs of each graph."""
        graphs = self.manifest.graphs.items()
        return {kind: frozenset(spec.name for spec in graph.outputs) for kind, graph in graphs}

    @cached_property
    def heads(self) -> list[str]:
        """The heads of a text encoder, by their fields: see `HEADS`; empty for any other model."""
        is_encoder = self.encoder is not None
        return [field for field, names in HEADS.items() if is_encoder and self.outputs.keys() & names]

    @cached_property
    def length_limits(self) -> dict[str, dict[str, int]]:
        """By name in descriptions, what limits the rows on symbolic axes; axes without a limit are absent."""
        manifest = self.manifest
        return {
            "max_length": manifest.max_lengths,
            "min_length": manifest.min_lengths,
            "length_multiple": manifest.length_multiples,
        }

    @cached_property
    def weights_output(self) -> TensorSpec | None:
        """The output with attention weights (B, H, Tq, Tk); None without.

        That of text encoders is (B, L, H, T, T), that of non-attention modules may be (B, Tq, Tk).
        """
        has_graph = GraphKind.WEIGHTS in self.manifest.graphs
        return self.outputs.get(ATTENTION_WEIGHTS if has_graph else self.manifest.attention_weights)

    @cached_property
    def default_outputs(self) -> list[str]:
        """Names of the outputs of a request that does not name any."""
        if self.classifier is not None:
            return [SCORES]
        return [spec.name for spec in self.manifest.graphs[GraphKind.PLAIN].outputs]

    @cached_property
    def raw_scores_output(self) -> str:
        """The output of a text classifier with the scores before its activation; empty if there is none."""
        if self.classifier is None:
            return ""
        is_raw = self.classifier.activation == "identity"
        return SCORES if is_raw else LOGITS if LOGITS in self.outputs else ""

    @cached_property
    def attends_to_padding(self) -> bool:
        """Whether rows attend to padding after their sequence unless lengths or a mask prevent it.

        Rows of causal self-attention attend to earlier rows only, all of which belong to their sequence. The
        embedding of a text encoder, and the scores of a classifier, are made of all rows, or of the last.
        """
        own_keys = len(self.axes) == 1
        takes_texts = (self.encoder or self.classifier) is not None
        return takes_texts or not (self.manifest.causal and own_keys)

    @property
    def supports_padding(self) -> bool:
        """Whether sequences of unequal lengths can run together."""
        return GraphKind.LENGTHS in self.manifest.graphs

    def mixed_graph(self, kind: GraphKind) -> GraphKind:
        """The graph that runs sequences of unequal lengths together, each of which alone runs on `kind`."""
        return GraphKind.LENGTHS if kind is GraphKind.PLAIN and self.attends_to_padding else kind

    def first_position(self, query_length: int) -> int:  # noqa: ARG002 - see `ContextModel`
        """The position of the first of a sequence's rows, where a request does not state them."""
        return 0

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The length axes of the inputs, the first input's first. The name of a fixed one is its size."""
        return tuple(dict.fromkeys(str(spec.length_axis) for spec in self.inputs))

    @cached_property
    def _sequence_axes(self) -> list[str]:
        """The symbolic length axis of each input that has one."""
        return sequence_axes(self.inputs)

    def lengths(self, rows: int) -> tuple[int, ...]:
        """The length on each of `axes` of a sequence of so many rows on all symbolic ones."""
        return tuple(rows if axis in self._sequence_axes else int(axis) for axis in self.axes)

    @cached_property
    def axes_of_lengths(self) -> dict[str, str]:
        """The symbolic axes by the names of the inputs that hold their lengths."""
        axes = self._sequence_axes
        names = {f"{axis}_lengths": axis for axis in axes}
        names |= dict(zip((QUERY_LENGTHS, KEY_LENGTHS), axes[:1] + axes[-1:], strict=False))
        return {name: axis for name, axis in names.items() if name not in self.inputs_by_name}

    def key_length(self, lengths: Sequence[int]) -> int:
        """Rows of the last input with a sequence axis, given the length on each of `axes`; 1 without one."""
        return lengths[self.axes.index(self._sequence_axes[-1])] if self._sequence_axes else 1

    def block_rows(self, key_length: int) -> int:
        """Query rows of a block on the graphs that attend in blocks."""
        rows = BLOCK_SCORE_BYTES // (4 * max(self.manifest.num_heads, 1) * key_length)
        return max(LEAST_BLOCK_ROWS, min(rows, MOST_BLOCK_ROWS))

    def operations(self, batch: int, lengths: Sequence[int]) -> tuple[int, int]:
        """Floating-point operations of one run: on rows, and on pairs of rows.

        For a module whose operations are unknown, each row and each pair counts as one operation.
        """
        cost = self.manifest.cost
        per_query, per_key, per_pair = cost.flops_per_query, cost.flops_per_key, cost.flops_per_pair
        if not (per_query or per_key or per_pair):
            return batch * sum(self.rows(lengths)), batch * self.pairs(lengths)
        rows = lengths[0] * per_query + self.key_length(lengths) * per_key
        return batch * rows, batch * self.pairs(lengths) * per_pair

    def pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of query and key rows; of a module with more axes, those of the two longest."""
        rows = self.rows(lengths)
        if len(rows) == 1:
            return rows[0] * self.key_length(lengths)
        *_, second, longest = sorted(rows)
        return second * longest

    def rows(self, lengths: Sequence[int]) -> Sequence[int]:
        """The lengths on the symbolic ones of `axes`; one row for each sequence of a model without any."""
        symbolic = self._sequence_axes
        if len(lengths) == 1 and symbolic:  # the usual case
            return lengths
        return [rows for axis, rows in zip(self.axes, lengths, strict=True) if axis in symbolic] or [1]

    def run_bytes(self, kind: GraphKind, batch: int, lengths: Sequence[int]) -> int:
        """Expected memory of one run on this machine, in bytes; arguments as for `seconds`."""
        rows = sum(map(mul, lengths, self._row_elements))
        if (weights := self.outputs.get(SPARSE_EMBEDDING)) is not None:
            rows += int(weights.axes[1])
        return int(4 * batch * (rows + self.pair_elements(kind, lengths)))

    def pair_elements(self, kind: GraphKind, lengths: Sequence[int]) -> float:
        """Elements of 4 bytes that a run holds at a time for the pairs of rows of each sequence."""
        pairs, heads = self.pairs(lengths), self.manifest.num_heads or UNKNOWN_HEADS
        if kind in IN_BLOCKS.values():
            key_length = self.key_length(lengths)
            pairs = min(lengths[0], self.block_rows(key_length)) * key_length
        pair_tensors = PAIR_TENSORS[kind]
        if self.encoder is not None and kind is GraphKind.WEIGHTS:
            # The weights of every layer, and all of them once more as one output.
            pair_tensors += 2 * self.encoder.layers
        return pairs * heads * pair_tensors

    @cached_property
    def _row_elements(self) -> list[int]:
        """Elements that a run holds at a time for each row of each axis."""
        rows = dict.fromkeys(self.axes, 0)
        for spec in self.inputs:
            width = math.prod(axis for axis in spec.axes[2:] if isinstance(axis, int))
            rows[str(spec.length_axis)] += ROW_TENSORS * width
        if facts := self.encoder or self.classifier:
            rows[self.axes[0]] += facts.row_elements
        return list(rows.values())
