"""Long sequences run in blocks of query rows, where the model has a graph for that."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import IN_BLOCKS, GraphKind
from attention_serving.server.engine import model as model_module
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import (
    BLOCK_SCORE_BYTES,
    LEAST_BLOCK_ROWS,
    MOST_BLOCK_ROWS,
    WHOLE_SCORE_BYTES,
    LoadedModel,
)
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.samples import (
    CROSS,
    HEADS,
    SELF,
    assert_answers,
    assert_outputs,
    eager_module,
    request_of,
    validated_of,
)
from tests.server.seams import Held, outcome, tapped
from tests.support.eager import assert_parity, attend

# With two heads: the scores of this length need exactly the memory above which sequences run in blocks.
LONGEST_WHOLE = math.isqrt(WHOLE_SCORE_BYTES // (4 * HEADS))

# For tests whose sequences are short.
SMALL_BLOCK, SMALL_WHOLE = 8, 20


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of more than 20 rows run in blocks of 8 rows."""
    monkeypatch.setattr(model_module, "MOST_BLOCK_ROWS", SMALL_BLOCK)
    monkeypatch.setattr(model_module, "LEAST_BLOCK_ROWS", 1)
    monkeypatch.setattr(model_module, "WHOLE_SCORE_BYTES", 4 * HEADS * SMALL_WHOLE**2)


def without(model: LoadedModel, *kinds: GraphKind) -> LoadedModel:
    """The same model without some of its graphs, as an earlier exporter wrote it."""
    graphs = {kind: graph for kind, graph in model.manifest.graphs.items() if kind not in kinds}
    sessions = {kind: session for kind, session in model.sessions.items() if kind not in kinds}
    manifest = model.manifest.model_copy(update={"graphs": graphs})
    return dataclasses.replace(model, manifest=manifest, sessions=sessions)


@pytest.mark.parametrize(("whole", "blocks"), IN_BLOCKS.items(), ids=IN_BLOCKS)
def test_a_sequence_runs_in_blocks_if_its_scores_need_much_memory(
    cross_model: LoadedModel, whole: GraphKind, blocks: GraphKind
) -> None:
    assert cross_model.sequence_graph(whole, LONGEST_WHOLE, LONGEST_WHOLE) is whole
    assert cross_model.sequence_graph(whole, LONGEST_WHOLE, LONGEST_WHOLE + 1) is blocks


def test_a_sequence_of_one_block_runs_whole(cross_model: LoadedModel) -> None:
    keys = LONGEST_WHOLE**2
    rows = cross_model.block_rows(keys)
    assert cross_model.sequence_graph(GraphKind.PLAIN, rows, keys) is GraphKind.PLAIN
    assert cross_model.sequence_graph(GraphKind.PLAIN, rows + 1, keys) is GraphKind.BLOCKS


def test_weights_have_no_graph_in_blocks(cross_model: LoadedModel) -> None:
    weights = GraphKind.WEIGHTS
    assert cross_model.sequence_graph(weights, 2 * LONGEST_WHOLE, LONGEST_WHOLE) is weights


@pytest.mark.parametrize("whole", IN_BLOCKS)
def test_a_model_without_graphs_in_blocks_runs_whole(cross_model: LoadedModel, whole: GraphKind) -> None:
    earlier = without(cross_model, *IN_BLOCKS.values())
    assert earlier.sequence_graph(whole, 2 * LONGEST_WHOLE, LONGEST_WHOLE) is whole


@pytest.mark.parametrize("key_length", [1, 2_000, 8_192, 100_000, 10_000_000])
def test_the_scores_of_a_block_are_bounded_unless_that_would_need_too_small_blocks(
    cross_model: LoadedModel, key_length: int
) -> None:
    rows = cross_model.block_rows(key_length)
    assert LEAST_BLOCK_ROWS <= rows <= MOST_BLOCK_ROWS
    assert rows == LEAST_BLOCK_ROWS or 4 * HEADS * rows * key_length <= BLOCK_SCORE_BYTES


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("lengths", [(1, 1), (19, 19), (16, 16), (30, 7)], ids=str)
@pytest.mark.parametrize("kind", [None, *MaskKind])
@pytest.mark.parametrize("name", [SELF, CROSS])
def test_a_sequence_in_blocks_equals_eager_pytorch(
    models: dict[str, LoadedModel],
    name: str,
    kind: MaskKind | None,
    lengths: tuple[int, int],
) -> None:
    seen: list[int] = []

    def tap(inputs: dict[str, Array]) -> None:
        seen.append(int(inputs["block_rows"]))

    model = tapped(models[name], tap)
    (sequence,) = validated_of(model, [lengths], kind=kind).sequences
    graph = IN_BLOCKS[GraphKind.PLAIN if kind is None else GraphKind.MASK]
    (outputs,) = run_batch(model, graph, [sequence])[0]
    assert seen == [SMALL_BLOCK]
    assert_outputs(model, sequence, outputs)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("kind", [None, MaskKind.PAIRS])
@pytest.mark.parametrize("name", [SELF, CROSS])
def test_long_sequences_of_a_request_run_alone_in_blocks_and_the_others_together(
    models: dict[str, LoadedModel], name: str, kind: MaskKind | None
) -> None:
    runs: list[tuple[int, int, bool]] = []

    def tap(inputs: dict[str, Array]) -> None:
        runs.append((*inputs["query"].shape[:2], "block_rows" in inputs))

    with Held(models[name], tap) as held:
        first = held.submit([(3, 3), (30, 30), (5, 5), (31, 31)], kind=kind)
        second = held.submit([(33, 33), (20, 20)], kind=kind)
    # In turns: the first sequence of the second request comes before the later ones of the first.
    assert runs == [(3, 20, False), (1, 33, True), (1, 30, True), (1, 31, True)]
    for request in (first, second):
        assert_answers(request, outcome(request))


@pytest.mark.usefixtures("short_blocks")
def test_weights_of_long_sequences_are_computed_whole(cross_model: LoadedModel) -> None:
    with Held(cross_model) as held:
        request = held.submit([(30, 30)], return_weights=True)
    assert_answers(request, outcome(request))


@pytest.mark.usefixtures("short_blocks")
def test_long_sequences_run_in_blocks_in_process_too(artifacts: Path) -> None:
    model = InProcessModel.load(artifacts, SELF)
    rows = [np.random.default_rng(n).standard_normal((n, 4), np.float32) for n in (30, 3, 30)]
    result = model.submit({"query": rows}).result()
    model.close()
    for own, context in zip(rows, result.outputs["context_vectors"], strict=True):
        assert_parity(context, attend(eager_module(SELF), own)[0])


@pytest.mark.parametrize(("whole", "blocks"), IN_BLOCKS.items(), ids=IN_BLOCKS)
def test_the_expected_memory_grows_with_the_length_and_not_with_its_square(
    cross_model: LoadedModel, whole: GraphKind, blocks: GraphKind
) -> None:
    square = [cross_model.run_bytes(whole, 1, length, length) for length in (10_000, 20_000)]
    linear = [cross_model.run_bytes(blocks, 1, length, length) for length in (10_000, 20_000)]
    assert square[1] > 3.9 * square[0]
    assert linear[1] < 2.1 * linear[0]
    assert linear[0] < square[0] / 10


def test_a_sequence_that_fits_in_blocks_is_accepted(cross_model: LoadedModel) -> None:
    lengths = [(4_000, 4_000)]
    limits = Limits(max_run_bytes=cross_model.run_bytes(GraphKind.PLAIN, 1, 4_000, 4_000) // 2)
    request = validate(request_of(cross_model, lengths), cross_model, limits)
    assert [sequence.shape.graph for sequence in request.sequences] == [GraphKind.BLOCKS]
    earlier = without(cross_model, *IN_BLOCKS.values())
    with pytest.raises(LimitExceededError):
        validate(request_of(earlier, lengths), earlier, limits)
