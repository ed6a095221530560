"""Long sequences run in blocks of query rows, where the model has a graph for that."""

import dataclasses
import math

import pytest

from artifact.manifest import IN_BLOCKS, GraphKind
from server.engine import model as model_module
from server.engine.execute import run_batch
from server.engine.model import (
    BLOCK_SCORE_BYTES,
    LEAST_BLOCK_ROWS,
    MOST_BLOCK_ROWS,
    WHOLE_SCORE_BYTES,
    LoadedModel,
)
from server.engine.types import Array, MaskKind
from tests.server.samples import CROSS, HEADS, SELF, assert_outputs, validated_of
from tests.server.seams import tapped

# With two heads: the scores of this length need exactly the memory above which sequences run in blocks.
LONGEST_WHOLE = math.isqrt(WHOLE_SCORE_BYTES // (4 * HEADS))


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


@pytest.mark.parametrize("lengths", [(1, 1), (19, 19), (16, 16), (30, 7)], ids=str)
@pytest.mark.parametrize("kind", [None, *MaskKind])
@pytest.mark.parametrize("name", [SELF, CROSS])
def test_a_sequence_in_blocks_equals_eager_pytorch(
    models: dict[str, LoadedModel],
    name: str,
    kind: MaskKind | None,
    lengths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_module, "MOST_BLOCK_ROWS", 8)
    monkeypatch.setattr(model_module, "LEAST_BLOCK_ROWS", 1)
    seen: list[int] = []

    def tap(inputs: dict[str, Array]) -> None:
        seen.append(int(inputs["block_rows"]))

    model = tapped(models[name], tap)
    (sequence,) = validated_of(model, [lengths], kind=kind).sequences
    graph = IN_BLOCKS[GraphKind.PLAIN if kind is None else GraphKind.MASK]
    (outputs,) = run_batch(model, graph, [sequence])
    assert seen == [8]
    assert_outputs(model, sequence, outputs)
