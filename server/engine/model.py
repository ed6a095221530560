"""A loaded model: what it takes and returns, which graph runs what, and what a run is expected to cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from operator import mul
from typing import Any
from weakref import ref

import numpy as np

from attention_serving.artifact.encoder import ClassifierFacts, EncoderFacts
from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    IN_BLOCKS,
    KEY_LENGTHS,
    POSITIONS,
    QUERY_LENGTHS,
    TOKEN_TYPES,
    Cost,
    Graph,
    GraphKind,
    Manifest,
    TensorSpec,
)
from attention_serving.server.engine.errors import InvalidRequestError, UnsupportedError
from attention_serving.server.engine.events import ModelStatistics
from attention_serving.server.engine.models.copies import ArtifactCopy
from attention_serving.server.engine.requests.tokenizer import TextEncoder
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.run.session import Session
from attention_serving.server.engine.schedule.pace import Pace
from attention_serving.server.engine.types import (
    UNTIMED,
    UNTIMED_CONTEXT,
    Context,
    ContextCost,
    RunCost,
    SequencePlan,
)

# Callers send the same few lengths again and again.
CACHED_PLANS = 1024
# Query rows of a block. With fewer, the kernels spend more time on packing the keys anew for each block: at
# 8,192 x 768, 128 rows take 1.2 times as long as 256, and 512 gain nothing.
MOST_BLOCK_ROWS = 256
# Blocks of very long sequences have fewer rows, so that their scores need this memory, but not less than
# these rows.
BLOCK_SCORE_BYTES, LEAST_BLOCK_ROWS = 128 << 20, 64
# Sequences whose scores need more memory run in blocks. On a device, fused kernels hold no scores, and a run
# in blocks excludes batching.
WHOLE_SCORE_BYTES, WHOLE_SCORE_BYTES_ON_DEVICE = 64 << 20, 2 << 30
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
    # Of one block.
    GraphKind.BLOCKS: 1.5,
    GraphKind.MASK_BLOCKS: 2.75,
}
# Heads that are expected of a module that does not state them.
UNKNOWN_HEADS = 8


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that can answer requests.

    Attributes:
        text_encoder: None if the model does not take text.
        measured_error: Largest difference from eager PyTorch when the golden vectors were replayed here.
        provider: ONNX Runtime's name of the execution provider.
        digest: SHA-256 of the manifest, in hex, which identifies the artifact.
        costs: Measured cost of runs of each graph on this machine, if it was calibrated.
        parallel_sessions: Sessions that compute one run on all threads. Those of `sessions` use the thread of
            their caller.
        paces: How long runs of each graph take in relation to that, and on all threads; see `pace`.
        golden: Golden vectors that are replayed while it serves.
        statistics: What it has done.
        context_cost: Measured cost of runs of queries to a context.
        files: The copy of the artifact that its sessions map.
        context: The stored context that every sequence attends to; None for a model of the repository.
    """

    manifest: Manifest
    sessions: dict[GraphKind, Session]
    text_encoder: TextEncoder | None
    measured_error: float
    provider: str
    digest: str
    costs: Mapping[GraphKind, RunCost] = field(default_factory=dict)
    parallel_sessions: Mapping[GraphKind, Session] = field(default_factory=dict)
    paces: dict[GraphKind, Pace] = field(default_factory=dict)
    golden: tuple[GoldenCase, ...] = ()
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    context_cost: ContextCost = UNTIMED_CONTEXT
    files: ArtifactCopy | None = None
    context: Context | None = None

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
    def input_names(self) -> str:
        """The names of the inputs that a request may have, as messages list them."""
        names = ", ".join(spec.name for spec in self.inputs)
        takes_mask = GraphKind.MASK in self.manifest.graphs
        return f"{names} and optionally {ATTENTION_MASK}" if takes_mask else names

    def input(self, name: str) -> TensorSpec:
        """The input of a name.

        Raises:
            InvalidRequestError: There is none.
        """
        if name not in self.inputs_by_name:
            raise InvalidRequestError(name, f"is not an input; model {self.name!r} takes {self.input_names}")
        return self.inputs_by_name[name]

    @property
    def encoder(self) -> EncoderFacts | None:
        """What sets a text encoder apart; None for any other model."""
        return self.manifest.encoder

    @property
    def classifier(self) -> ClassifierFacts | None:
        """What sets a text classifier apart; None for any other model."""
        return self.manifest.classifier

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
        return {spec.name: spec for spec in graphs.get(GraphKind.WEIGHTS, graphs[GraphKind.PLAIN]).outputs}

    @cached_property
    def default_outputs(self) -> list[str]:
        """Names of the outputs of a request that does not name any."""
        return [spec.name for spec in self.manifest.graphs[GraphKind.PLAIN].outputs]

    @cached_property
    def attends_to_padding(self) -> bool:
        """Whether rows attend to padding after their sequence unless lengths or a mask prevent it.

        Rows of causal self-attention attend to earlier rows only, all of which belong to their sequence. The
        embedding of a text encoder, and the scores of a classifier, are made of all rows, or of the last.
        """
        own_keys = len({spec.axes[1] for spec in self.inputs}) == 1
        takes_texts = (self.encoder or self.classifier) is not None
        return takes_texts or not (self.manifest.causal and own_keys)

    def mixed_graph(self, graph: GraphKind) -> GraphKind:
        """The graph that runs sequences of unequal lengths together, each of which alone runs on `graph`."""
        is_plain = graph is GraphKind.PLAIN and self.context is None
        return GraphKind.LENGTHS if is_plain and self.attends_to_padding else graph

    def first_position(self, query_length: int) -> int:
        """The position of the first of a sequence's rows, where a request does not state them.

        The rows of a query to a context of self-attention are by default its last ones.
        """
        own_rows = self.context is not None and not self.manifest.config.get("cross")
        return max(0, self.context.length - query_length) if self.context is not None and own_rows else 0

    @cached_property
    def supports_padding(self) -> bool:
        """Whether sequences of unequal lengths can run together."""
        return self.context is not None or GraphKind.LENGTHS in self.manifest.graphs

    @cached_property
    def projector(self) -> "LoadedModel":
        """The same model as one that projects the rows of contexts: see `GraphKind.PROJECT`.

        Raises:
            UnsupportedError: The model has no contexts.
        """
        if GraphKind.PROJECT not in self.manifest.graphs:
            message = f"model {self.name!r} has no stored contexts: only attention modules without texts have"
            raise UnsupportedError(
                f"{message}, and artifacts that were exported before there were contexts lack them"
            )
        cost = Cost(flops_per_query=0, flops_per_key=self.manifest.cost.flops_per_key, flops_per_pair=0)
        return self._with_graphs(cost, {GraphKind.PLAIN: self.manifest.graphs[GraphKind.PROJECT]})

    def with_context(self, context: Context) -> "LoadedModel":
        """The same model as one that takes queries, which attend to a context."""
        rows = {self.manifest.graphs[GraphKind.PROJECT].inputs[0].axes[1]: context.rows}

        def queries(kind: GraphKind) -> Graph:
            """A graph with the inputs that requests have, and the rows of the context as a fixed axis."""
            graph = self.manifest.graphs[kind]
            inputs, outputs = (
                tuple(
                    spec.model_copy(update={"axes": tuple(rows.get(axis, axis) for axis in spec.axes)})
                    for spec in specs
                    if spec.name not in context.tensors
                )
                for specs in (graph.inputs, graph.outputs)
            )
            return graph.model_copy(update={"inputs": inputs, "outputs": outputs})

        weights = queries(GraphKind.CONTEXT_WEIGHTS)
        mask = weights.model_copy(update={"outputs": weights.outputs[:1]})
        graphs = {
            GraphKind.PLAIN: queries(GraphKind.CONTEXT),
            GraphKind.MASK: mask,
            GraphKind.WEIGHTS: weights,
        }
        cost, timed = Cost(flops_per_query=1, flops_per_key=0, flops_per_pair=1), self.context_cost
        run = RunCost(timed.call + context.rows * timed.key_row, timed.query_row, timed.pair)
        return self._with_graphs(cost, graphs, costs=dict.fromkeys(graphs, run), context=context)

    def _with_graphs(self, cost: Cost, graphs: Mapping[GraphKind, Graph], **changes: Any) -> "LoadedModel":
        """The same model with other graphs, each of which has the session of its file."""
        kinds = {graph.file: kind for kind, graph in self.manifest.graphs.items()}
        manifest = self.manifest.model_copy(update={"graphs": graphs, "cost": cost})
        sessions, parallel = (
            {kind: opened[kinds[graph.file]] for kind, graph in graphs.items() if kinds[graph.file] in opened}
            for opened in (self.sessions, self.parallel_sessions)
        )
        paces = {kind: self.pace(kinds[graph.file]) for kind, graph in graphs.items()}
        changes |= {"sessions": sessions, "parallel_sessions": parallel, "paces": paces, "golden": ()}
        return replace(self, manifest=manifest, **changes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The symbolic axes of the inputs: that of the query rows first, and others if they differ."""
        return tuple(dict.fromkeys(str(spec.axes[1]) for spec in self.inputs))

    @cached_property
    def axes_of_lengths(self) -> dict[str, str]:
        """The symbolic axes by the names of the inputs that hold their lengths."""
        query_axis, key_axis = (str(self.inputs[at].axes[1]) for at in (0, -1))
        names = {f"{axis}_lengths": axis for axis in self.axes} | {
            QUERY_LENGTHS: query_axis,
            KEY_LENGTHS: key_axis,
        }
        return {name: axis for name, axis in names.items() if name not in self.inputs_by_name}

    def key_length(self, lengths: Sequence[int]) -> int:
        """Rows of the last input, or of the context, given the length on each of `axes`."""
        if self.context is not None:
            return self.context.rows
        return lengths[self.axes.index(str(self.inputs[-1].axes[1]))]

    @cached_property
    def plan(self) -> Callable[[GraphKind, tuple[int, ...]], SequencePlan]:
        """The derived sizes of a sequence of a graph, given its length on each of `axes`."""
        return partial(_plan, ref(self))

    def sequence_graph(self, graph: GraphKind, lengths: Sequence[int]) -> GraphKind:
        """The graph that runs one sequence alone: `graph`, or the same in blocks if that saves memory."""
        query_length, key_length = lengths[0], self.key_length(lengths)
        most_bytes = WHOLE_SCORE_BYTES if self.runs_on_host else WHOLE_SCORE_BYTES_ON_DEVICE
        if 4 * self.manifest.num_heads * query_length * key_length <= most_bytes:
            return graph
        blocks = IN_BLOCKS.get(graph)
        saves = blocks in self.manifest.graphs and query_length > self.block_rows(key_length)
        return blocks if blocks and saves else graph

    @cached_property
    def runs_on_host(self) -> bool:
        """Whether runs take the cores and the memory of the host."""
        return self.provider == Provider.CPU.runtime.name

    def block_rows(self, key_length: int) -> int:
        """Query rows of a block on the graphs that attend in blocks."""
        rows = BLOCK_SCORE_BYTES // (4 * max(self.manifest.num_heads, 1) * key_length)
        return max(LEAST_BLOCK_ROWS, min(rows, MOST_BLOCK_ROWS))

    def shrink_arena(self) -> None:
        """Returns memory that earlier runs left in the arena to the system, by running a single row."""
        sizes = self.manifest.min_lengths
        shapes = [
            [axis if isinstance(axis, int) else sizes.get(axis, 1) for axis in s.axes] for s in self.inputs
        ]
        rows = {s.name: np.zeros(shape, s.data_type) for s, shape in zip(self.inputs, shapes, strict=True)}
        self.sessions[GraphKind.PLAIN].shrink_arena(rows)

    def seconds(self, graph: GraphKind, batch: int, lengths: Sequence[int]) -> float:
        """Expected duration of one run on one thread as measured at the load, in seconds.

        Args:
            graph: The graph.
            batch: Number of sequences.
            lengths: The length on each of `axes`, to which all are padded.
        """
        return self.cost(graph).seconds(*self.operations(batch, lengths))

    def pace(self, graph: GraphKind) -> Pace:
        """How long runs of a graph take now in relation to what is expected of them."""
        pace = self.paces.get(graph)
        if pace is None:
            pace = self.paces[graph] = Pace(has_all_threads=graph in self.parallel_sessions)
        return pace

    def least_seconds(self, plan: SequencePlan) -> float:
        """Expected duration of a run of a sequence now, on one thread or on all, whichever is faster."""
        return self.pace(plan.graph).least_seconds(plan.seconds)

    def cost(self, graph: GraphKind) -> RunCost:
        """Cost of runs of a graph on this machine."""
        return self.costs.get(graph, UNTIMED)

    def operations(self, batch: int, lengths: Sequence[int]) -> tuple[int, int]:
        """Floating-point operations of one run: on rows, and on pairs of rows.

        For a module whose operations are unknown, each row and each pair counts as one operation.
        """
        cost = self.manifest.cost
        per_query, per_key, per_pair = cost.flops_per_query, cost.flops_per_key, cost.flops_per_pair
        if not (per_query or per_key or per_pair):
            return batch * sum(lengths), batch * self._pairs(lengths)
        rows = lengths[0] * per_query + self.key_length(lengths) * per_key
        return batch * rows, batch * self._pairs(lengths) * per_pair

    def _pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of query and key rows; of a module with more axes, those of the two longest."""
        if len(lengths) == 1:
            return lengths[0] * self.key_length(lengths)
        *_, second, longest = sorted(lengths)
        return second * longest

    def run_bytes(self, graph: GraphKind, batch: int, lengths: Sequence[int]) -> int:
        """Expected memory of one run on this machine, in bytes; arguments as for `seconds`."""
        row_elements, heads = self._row_elements
        rows = sum(map(mul, lengths, row_elements))
        pairs = self._pairs(lengths)
        if graph in IN_BLOCKS.values():
            key_length = self.key_length(lengths)
            pairs = min(lengths[0], self.block_rows(key_length)) * key_length
        pair_tensors = PAIR_TENSORS[graph]
        if self.encoder is not None and graph is GraphKind.WEIGHTS:
            # The weights of every layer, and all of them once more as one output.
            pair_tensors += 2 * self.encoder.layers
        return int(4 * batch * (rows + pairs * heads * pair_tensors))

    @cached_property
    def _row_elements(self) -> tuple[list[int], int]:
        """Elements that a run holds at a time for each row of each axis, and for each pair of rows."""
        rows = dict.fromkeys(self.axes, 0)
        for spec in self.inputs:
            width = math.prod(axis for axis in spec.axes[2:] if isinstance(axis, int))
            rows[str(spec.axes[1])] += ROW_TENSORS * width
        if facts := self.encoder or self.classifier:
            rows[self.axes[0]] += facts.row_elements
        return list(rows.values()), self.manifest.num_heads or UNKNOWN_HEADS


@lru_cache(maxsize=CACHED_PLANS)
def _plan(reference: Callable[[], Any], graph: GraphKind, lengths: tuple[int, ...]) -> SequencePlan:
    """A plan, by a reference to its model that does not keep it alive. References to one model are equal."""
    model: LoadedModel = reference()
    sizes = dict(zip(model.axes, lengths, strict=True))
    graph_alone = model.sequence_graph(graph, lengths)
    result_bytes = 0
    for spec in model.manifest.graphs[graph].outputs:
        axes = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes if axis != BATCH_AXIS]
        result_bytes += np.dtype(spec.data_type).itemsize * math.prod(axes)
    return SequencePlan(
        sizes=sizes,
        lengths=lengths,
        graph=graph_alone,
        seconds=model.seconds(graph_alone, 1, lengths),
        call_seconds=model.cost(graph_alone).call,
        run_bytes=model.run_bytes(graph_alone, 1, lengths),
        result_bytes=result_bytes,
        rows=sum(lengths),
        runs_alone=model.manifest.runs_alone or graph_alone is not graph,
    )
