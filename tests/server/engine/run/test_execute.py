"""Sequences that run together, or in blocks of query rows, get the results that each would get alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import facts as facts_module
from attention_serving.server.engine import model as model_module
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.samples import CROSS, HEADS, SELF, assert_answers, assert_outputs, validated_of
from tests.server.seams import Held, outcome, tapped

# The shape of a batch changes the order of sums, which moves the last bits of a float32.
RTOL, ATOL = 1e-5, 2e-6

sequences = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, *MaskKind])),
    min_size=1,
    max_size=6,
)


Specs = Sequence[tuple[int, int, MaskKind | None]]


def sequences_of(model: LoadedModel, specs: Specs) -> list[SequenceInputs]:
    """One random sequence for each pair of lengths and kind of mask."""
    return [
        validated_of(model, [(query, key)], kind=kind, seed=seed).sequences[0]
        for seed, (query, key, kind) in enumerate(specs)
    ]


def run(
    model: LoadedModel, sequences: list[SequenceInputs], *, return_weights: bool = False
) -> list[Outputs]:
    """Runs sequences together on the cheapest graph that can compute them."""
    graph = GraphKind.WEIGHTS
    if not return_weights:
        masked = any(sequence.mask is not None for sequence in sequences)
        equal_lengths = len({sequence.lengths for sequence in sequences}) == 1
        graph = GraphKind.MASK if masked else GraphKind.PLAIN
        graph = graph if equal_lengths else model.mixed_graph(graph)
    return run_batch(model, graph, sequences)[0]


@pytest.fixture(scope="module", params=["models", "bound_models"])
def either_models(request: pytest.FixtureRequest) -> dict[str, LoadedModel]:
    """The models of the tests, whose runs are bound or not."""
    models: dict[str, LoadedModel] = request.getfixturevalue(request.param)
    return models


@given(specs=sequences, name=st.sampled_from([SELF, CROSS]), return_weights=st.booleans())
@settings(deadline=None, max_examples=40)
def test_together_equals_alone_and_eager(
    either_models: dict[str, LoadedModel], specs: Specs, name: str, *, return_weights: bool
) -> None:
    models = either_models
    sequences = sequences_of(models[name], specs)
    together = run(models[name], sequences, return_weights=return_weights)
    assert len(together) == len(sequences)
    for sequence, outputs in zip(sequences, together, strict=True):
        (alone,) = run(models[name], [sequence], return_weights=return_weights)
        assert list(outputs) == list(alone)
        for output, array in outputs.items():
            np.testing.assert_allclose(array, alone[output], rtol=RTOL, atol=ATOL)
        assert_outputs(models[name], sequence, outputs)


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "infinity"])
@pytest.mark.parametrize("return_weights", [False, True])
@pytest.mark.parametrize("kind", [None, MaskKind.PAIRS])
@pytest.mark.parametrize("length", [5, 2], ids=["equal lengths", "padded"])
def test_nan_and_infinity_stay_in_their_sequence(
    cross_model: LoadedModel, poison: float, kind: MaskKind | None, length: int, *, return_weights: bool
) -> None:
    sequences = sequences_of(cross_model, [(own, own, kind) for own in (5, length, 5)])
    for array in sequences[1].inputs.values():
        array[:] = poison
    before, poisoned, after = run(cross_model, sequences, return_weights=return_weights)
    assert_outputs(cross_model, sequences[0], before)
    assert_outputs(cross_model, sequences[2], after)
    assert np.isnan(poisoned["context_vectors"]).any()


def test_a_single_sequence_is_not_copied(cross_model: LoadedModel) -> None:
    (sequence,) = sequences_of(cross_model, [(3, 5, None)])
    seen: list[dict[str, Array]] = []
    run(tapped(cross_model, seen.append), [sequence])
    (inputs,) = seen
    assert list(inputs) == ["query", "key", "value"]
    for name, array in inputs.items():
        assert np.shares_memory(array, sequence.inputs[name])


# For tests whose sequences are short.
SMALL_BLOCK, SMALL_WHOLE = 8, 20


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of more than 20 rows run in blocks of 8 rows."""
    monkeypatch.setattr(facts_module, "MOST_BLOCK_ROWS", SMALL_BLOCK)
    monkeypatch.setattr(facts_module, "LEAST_BLOCK_ROWS", 1)
    monkeypatch.setattr(model_module, "WHOLE_SCORE_BYTES", 4 * HEADS * SMALL_WHOLE**2)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("kind", [None, *MaskKind])
@pytest.mark.parametrize("name", [SELF, CROSS])
def test_blocks_run_alone(either_models: dict[str, LoadedModel], name: str, kind: MaskKind | None) -> None:
    runs: list[tuple[int, int, bool]] = []

    def tap(inputs: dict[str, Array]) -> None:
        runs.append((*inputs["query"].shape[:2], "block_rows" in inputs))

    with Held(either_models[name], tap) as held:
        first = held.submit([(3, 3), (30, 30), (5, 5), (31, 25)], kind=kind)
        second = held.submit([(33, 33), (20, 20)], kind=kind)
    # In turns: the first sequence of the second request comes before the later ones of the first.
    assert runs == [(3, 20, False), (1, 33, True), (1, 30, True), (1, 31, True)]
    for request in (first, second):
        assert_answers(request, outcome(request))
