"""A loaded model: its facts, what its runs cost, and the sessions that compute them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import ref

import numpy as np

from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.kernels import Kernel
from attention_serving.artifact.manifest import (
    BATCH_AXIS,
    IN_BLOCKS,
    Cost,
    Graph,
    GraphKind,
    TensorSpec,
    all_sizes,
)
from attention_serving.server.engine.costs import UNTIMED, Costs, Pace, RunCost
from attention_serving.server.engine.errors import InvalidRequestError, UnsupportedError
from attention_serving.server.engine.events import ModelStatistics
from attention_serving.server.engine.facts import ModelFacts
from attention_serving.server.engine.models.copies import ArtifactCopy
from attention_serving.server.engine.requests.tokenizer import TEXT, TextTokenizer
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.run.session import Session
from attention_serving.server.engine.types import Context, SequencePlan

# Callers send the same few lengths again and again.
CACHED_PLANS = 1024
# Sequences whose scores need more memory run in blocks. On a device, which has more of it, fused kernels hold
# no scores at all, and a run in blocks excludes batching.
WHOLE_SCORE_BYTES, WHOLE_SCORE_BYTES_ON_DEVICE = 64 << 20, 2 << 30
# Graphs whose scores Attention operators do not hold alone.
OTHER_ATTENTION = (GraphKind.WEIGHTS, *IN_BLOCKS.values())
# Tensors as large as the scores of all heads that CUDA's unfused kernel holds: the scores and the weights.
UNFUSED_TENSORS = 2
# Tensors as large as the scores of one head that a mask takes there: the flags, and the same as numbers.
MASK_TENSORS = 1.25


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel(ModelFacts):
    """A model that can answer requests.

    Attributes:
        sessions: Sessions that compute one run on the thread of their caller.
        tokenizer: None if the model does not take text.
        measured_error: Largest difference from the golden vectors when they were replayed here.
        provider: ONNX Runtime's name of the execution provider.
        row_multiple: See `server.engine.run.provider.RuntimeProvider`.
        costs: What its runs cost.
        parallel_sessions: Sessions that compute one run on all threads.
        golden: Golden vectors that are replayed while it serves.
        statistics: What it has done.
        files: The copy of the artifact that its sessions map.
        context: The stored context or the prefix that every sequence attends to; None for a model of the
            repository.
        base_model: The model of the repository, of one with a prefix.
    """

    sessions: dict[GraphKind, Session]
    tokenizer: TextTokenizer | None
    measured_error: float
    provider: str
    row_multiple: int = 1
    costs: Costs = field(default_factory=Costs)
    parallel_sessions: Mapping[GraphKind, Session] = field(default_factory=dict)
    golden: tuple[GoldenCase, ...] = ()
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    files: ArtifactCopy | None = None
    context: Context | None = None
    base_model: "LoadedModel | None" = None

    def __post_init__(self) -> None:
        for kind in self.manifest.graphs:
            pace = Pace(has_all_threads=kind in self.parallel_sessions)
            self.costs.paces.setdefault(kind, pace)

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer.

        Raises:
            InvalidRequestError: The model has none.
        """
        if self.tokenizer is None:
            problem = f"model {self.name!r} takes {', '.join(self.inputs_by_name)}, not text"
            raise InvalidRequestError(TEXT, problem)
        return self.tokenizer

    @cached_property
    def projector(self) -> "LoadedModel":
        """The same model as one that projects the rows of contexts: see `GraphKind.PROJECT`.

        Raises:
            UnsupportedError: The model has no contexts.
        """
        if GraphKind.PROJECT not in self.manifest.graphs:
            message = f"model {self.name!r} has no stored contexts: only multi-vector encoders and attention"
            raise UnsupportedError(
                f"{message} modules without texts have, unless they were exported before there were contexts"
            )
        cost = Cost(flops_per_query=0, flops_per_key=self.manifest.cost.flops_per_key, flops_per_pair=0)
        graphs = {GraphKind.PLAIN: self.manifest.graphs[GraphKind.PROJECT]}
        return LoadedModel(**self._with_graphs(cost, graphs, {}))

    def with_context(self, context: Context) -> "ContextModel":
        """The same model as one that takes queries, which attend to a context or are compared with it."""
        if self.encoder is not None:
            attributes = {attribute.name: getattr(self, attribute.name) for attribute in fields(LoadedModel)}
            return ContextModel(**attributes | {"context": context})
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
        cost, timed = Cost(flops_per_query=1, flops_per_key=0, flops_per_pair=1), self.costs.context_cost
        run = RunCost(timed.fixed + context.rows * timed.key_row, timed.query_row, timed.pair)
        attributes = self._with_graphs(cost, graphs, dict.fromkeys(graphs, run))
        return ContextModel(**attributes | {"context": context})

    def with_prefix(self, context: Context) -> "PrefixModel":
        """The same causal reranker as one that takes what follows a prefix: see `GraphKind.SUFFIX`."""
        graph = self.manifest.graphs[GraphKind.SUFFIX]
        inputs = tuple(spec for spec in graph.inputs if spec.name not in context.tensors)
        suffix = graph.model_copy(update={"inputs": inputs})
        plain = graph.model_copy(update={"inputs": inputs[:1]})
        graphs = {GraphKind.PLAIN: plain, GraphKind.SUFFIX: suffix}
        # Its layers are those of the whole model, and its pairs of rows cost the same.
        run_costs = {GraphKind.SUFFIX: self.run_cost(GraphKind.LENGTHS)}
        attributes = self._with_graphs(self.manifest.cost, graphs, run_costs)
        return PrefixModel(**attributes | {"context": context, "base_model": self})

    def _with_graphs(
        self, cost: Cost, graphs: Mapping[GraphKind, Graph], run_costs: Mapping[GraphKind, RunCost]
    ) -> dict[str, Any]:
        """The attributes of the same model with other graphs, each of which has the session of its file."""
        kinds = {graph.file: kind for kind, graph in self.manifest.graphs.items()}
        sessions, parallel = (
            {kind: opened[kinds[graph.file]] for kind, graph in graphs.items() if kinds[graph.file] in opened}
            for opened in (self.sessions, self.parallel_sessions)
        )
        paces = {kind: self.costs.paces[kinds[graph.file]] for kind, graph in graphs.items()}
        attributes = {attribute.name: getattr(self, attribute.name) for attribute in fields(LoadedModel)}
        return attributes | {
            "manifest": self.manifest.model_copy(update={"graphs": graphs, "cost": cost}),
            "costs": Costs(run_costs, paces=paces),
            "sessions": sessions,
            "parallel_sessions": parallel,
            "golden": (),
        }

    @cached_property
    def plan(self) -> Callable[[GraphKind, tuple[int, ...]], SequencePlan]:
        """The derived sizes of a sequence of a graph, given its length on each of `axes`."""
        return partial(_plan, ref(self))

    def sequence_graph(self, kind: GraphKind, lengths: tuple[int, ...]) -> GraphKind:
        """The graph that runs one sequence alone: `kind`, or the same in blocks if that saves memory."""
        query_length, key_length = lengths[0], self.key_length(lengths)
        if self.runs_on_host:
            is_small = 4 * self.manifest.num_heads * query_length * key_length <= WHOLE_SCORE_BYTES
        else:
            elements = self.pair_elements(kind, self.padded_lengths(kind, lengths))
            is_small = 4 * elements <= WHOLE_SCORE_BYTES_ON_DEVICE
        if is_small:
            return kind
        blocks = IN_BLOCKS.get(kind)
        saves = blocks in self.manifest.graphs and query_length > self.block_rows(key_length)
        return blocks if blocks and saves else kind

    @cached_property
    def runs_on_host(self) -> bool:
        """Whether runs take the cores and the memory of the host."""
        return self.provider == Provider.CPU.runtime.name

    def pair_elements(self, kind: GraphKind, lengths: Sequence[int]) -> float:
        """See `ModelFacts`: on a device, what the kernels of the graph hold."""
        if self.runs_on_host or kind in OTHER_ATTENTION or not self.manifest.graphs[kind].attention:
            return super().pair_elements(kind, lengths)
        return self.pairs(lengths) * _pair_tensors(ref(self), kind, tuple(lengths))

    def padded_lengths(self, kind: GraphKind, longest: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths to which a run pads its sequences: on a device sometimes a few rows more.

        The fast kernels for masks need aligned rows. Keys are padded for them if the graph ignores padding,
        and the limits of the model allow it.

        Args:
            kind: The graph.
            longest: The largest length on each of `axes`.
        """
        return longest if self.row_multiple == 1 else _padded_lengths(ref(self), kind, longest)

    def run_size(
        self,
        kind: GraphKind,
        count: int,
        longest: tuple[int, ...],
        query_rows: int,  # noqa: ARG002 - see `ContextModel`
    ) -> tuple[int, tuple[int, ...]]:
        """The size of a run of several sequences.

        Args:
            kind: The graph.
            count: Number of sequences.
            longest: The largest length on each of `axes`.
            query_rows: Sum of the lengths on the first of them.

        Returns:
            Number of sequences that the graph sees, and their length on each axis.
        """
        return count, self.padded_lengths(kind, longest)

    def shrink_arena(self) -> None:
        """Returns memory that earlier runs left in the arena to the system, by running a single row."""
        sizes = self.manifest.min_lengths
        shapes = [
            [axis if isinstance(axis, int) else sizes.get(axis, 1) for axis in s.axes] for s in self.inputs
        ]
        rows = {s.name: np.zeros(shape, s.data_type) for s, shape in zip(self.inputs, shapes, strict=True)}
        self.sessions[GraphKind.PLAIN].shrink_arena(rows)

    def seconds(self, kind: GraphKind, batch: int, lengths: Sequence[int]) -> float:
        """Expected duration of one run on one thread as measured at the load, in seconds.

        Args:
            kind: The graph.
            batch: Number of sequences.
            lengths: The length on each of `axes`, to which all are padded.
        """
        return self.run_cost(kind).seconds(*self.operations(batch, lengths))

    def least_seconds(self, plan: SequencePlan) -> float:
        """Expected duration of a run of a sequence now, on one thread or on all, whichever is faster."""
        return self.costs.paces[plan.graph].least_seconds(plan.seconds)

    def run_cost(self, kind: GraphKind) -> RunCost:
        """Cost of runs of a graph on this machine."""
        return self.costs.run_costs.get(kind, UNTIMED)


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextModel(LoadedModel):
    """A view of a model that takes queries, which attend to a stored context.

    Sequences that run together are concatenated to one: nothing is padded. Queries that are compared with
    documents run on the model itself instead, together with its other requests.
    """

    context: Context
    supports_padding = True

    def mixed_graph(self, kind: GraphKind) -> GraphKind:
        """See `ModelFacts`."""
        return kind

    def first_position(self, query_length: int) -> int:
        """See `ModelFacts`: of self-attention, the rows of a query are the last ones of the context."""
        is_cross = self.manifest.config.get("cross")
        return 0 if is_cross else max(0, self.context.length - query_length)

    def key_length(self, lengths: Sequence[int]) -> int:  # noqa: ARG002 - the same for all
        """Rows of the context."""
        return self.context.rows

    def run_bytes(self, kind: GraphKind, batch: int, lengths: Sequence[int]) -> int:
        """See `ModelFacts`: with a mask, the graph makes the weights too."""
        with_weights = GraphKind.WEIGHTS if kind is GraphKind.MASK else kind
        return super().run_bytes(with_weights, batch, lengths)

    def padded_lengths(self, kind: GraphKind, longest: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        """See `LoadedModel`: unchanged."""
        return longest

    def run_size(
        self,
        kind: GraphKind,  # noqa: ARG002 - rows are concatenated
        count: int,  # noqa: ARG002
        longest: tuple[int, ...],  # noqa: ARG002
        query_rows: int,
    ) -> tuple[int, tuple[int, ...]]:
        """See `LoadedModel`."""
        return 1, (query_rows,)


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixModel(LoadedModel):
    """A view of a causal reranker that takes what follows a prefix in the sequences of one request."""

    context: Context
    supports_padding = True

    def mixed_graph(self, kind: GraphKind) -> GraphKind:
        """See `ModelFacts`."""
        return kind

    def pairs(self, lengths: Sequence[int]) -> int:
        """See `ModelFacts`: keys are also those of the prefix."""
        return lengths[0] * (self.context.length + lengths[0])


def output_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """The size of an output of one sequence, given that of each symbolic axis."""
    axes = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes if axis != BATCH_AXIS]
    return np.dtype(spec.data_type).itemsize * math.prod(axes)


# Functions of a model are cached by references that do not keep it alive. References to one model are equal.
@lru_cache(maxsize=CACHED_PLANS)
def _pair_tensors(reference: Callable[[], Any], kind: GraphKind, lengths: tuple[int, ...]) -> float:
    """Elements of 4 bytes for each pair of rows: see `LoadedModel.pair_elements`."""
    model: LoadedModel = reference()
    sizes = dict(zip(model.axes, lengths, strict=True))
    # Graphs that take a mask may get one for each head.
    masks = max(1, model.manifest.num_heads) if kind is GraphKind.MASK else 1
    return max(
        UNFUSED_TENSORS * operator.num_heads * (operator.kernel(sizes) is Kernel.UNFUSED)
        + MASK_TENSORS * masks * operator.has_mask
        for operator in model.manifest.graphs[kind].attention
    )


@lru_cache(maxsize=CACHED_PLANS)
def _padded_lengths(
    reference: Callable[[], Any], kind: GraphKind, longest: tuple[int, ...]
) -> tuple[int, ...]:
    """See `LoadedModel.padded_lengths`."""
    model: LoadedModel = reference()
    manifest, ignores_padding = model.manifest, model.supports_padding and model.mixed_graph(kind) is kind
    if not ignores_padding or kind in IN_BLOCKS.values():
        return longest
    operators = [operator for operator in manifest.graphs[kind].attention if operator.has_mask]
    padded, axes = list(longest), {operator.key_axis for operator in operators}
    for at, (axis, rows) in enumerate(zip(model.axes, longest, strict=True)):
        step = math.lcm(model.row_multiple, manifest.length_multiples.get(axis, 1))
        more = -(-rows // step) * step
        if axis in axes and more <= manifest.max_lengths.get(axis, more):
            padded[at] = more
    sizes, padded_sizes = (dict(zip(model.axes, lengths, strict=True)) for lengths in (longest, padded))
    gains = any(operator.kernel(padded_sizes) < operator.kernel(sizes) for operator in operators)
    return tuple(padded) if gains else longest


@lru_cache(maxsize=CACHED_PLANS)
def _plan(reference: Callable[[], Any], kind: GraphKind, lengths: tuple[int, ...]) -> SequencePlan:
    """The derived sizes of a sequence of a graph: see `LoadedModel.plan`."""
    model: LoadedModel = reference()
    sizes = all_sizes(dict(zip(model.axes, lengths, strict=True)), model.manifest.derived_axes)
    kind_alone = model.sequence_graph(kind, lengths)
    padded = model.padded_lengths(kind_alone, lengths)
    return SequencePlan(
        sizes=sizes,
        lengths=lengths,
        graph=kind_alone,
        seconds=model.seconds(kind_alone, 1, padded),
        fixed_seconds=model.run_cost(kind_alone).fixed,
        run_bytes=model.run_bytes(kind_alone, 1, padded),
        result_bytes=sum(output_bytes(spec, sizes) for spec in model.manifest.graphs[kind].outputs),
        rows=sum(model.rows(lengths)),
        computed_rows=sum(model.rows(padded)),
        runs_alone=model.manifest.runs_alone or kind_alone is not kind,
    )
