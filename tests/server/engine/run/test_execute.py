"""Sequences that run together, or in blocks of query rows, get the results that each would get alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import facts as facts_module
from attention_serving.server.engine import model as model_module
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Array, MaskKind
from tests.encoders.repository import SENTENCE
from tests.server.samples import CROSS, HEADS, SELF, assert_answers, assert_outputs, validated_of
from tests.server.seams import Held, on_device, outcome, tapped


@pytest.fixture(scope="module")
def encoder(sentence_repository: Path) -> LoadedModel:
    return load_model(sentence_repository / SENTENCE / "1", Device(threads=1))


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
    graph = GraphKind.WEIGHTS if return_weights else graph_of(model, sequences)
    return run_batch(model, graph, sequences)[0]


def graph_of(model: LoadedModel, sequences: list[SequenceInputs]) -> GraphKind:
    """The cheapest graph that can compute them without weights."""
    masked = any(sequence.mask is not None for sequence in sequences)
    equal_lengths = len({sequence.lengths for sequence in sequences}) == 1
    graph = GraphKind.MASK if masked else GraphKind.PLAIN
    return graph if equal_lengths else model.mixed_graph(graph)


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


def assert_padded(
    model: LoadedModel, kind: GraphKind, sequences: list[SequenceInputs], keys: tuple[int, ...]
) -> None:
    """On a device the keys of a run have that shape (B, Tk), and the results are the same."""
    shapes = list[tuple[int, ...]]()
    device = tapped(on_device(model), lambda inputs: shapes.append(inputs[model.inputs[-1].name].shape[:2]))
    padded, expected = (run_batch(each, kind, sequences)[0] for each in (device, model))
    assert shapes == [keys]
    for outputs, others in zip(padded, expected, strict=True):
        assert list(outputs) == list(others)
        for name, array in outputs.items():
            np.testing.assert_allclose(array, others[name], rtol=RTOL, atol=ATOL)


@given(specs=sequences, name=st.sampled_from([SELF, CROSS]), return_weights=st.booleans())
@settings(deadline=None, max_examples=40)
def test_keys_that_a_kernel_needs_in_addition_are_not_seen(
    models: dict[str, LoadedModel], specs: Specs, name: str, *, return_weights: bool
) -> None:
    """Only keys, to a multiple of 8, if 4 does not divide them, and if the graph has a mask."""
    model, sequences = models[name], sequences_of(models[name], specs)
    kind = GraphKind.WEIGHTS if return_weights else graph_of(model, sequences)
    keys = max(model.key_length(sequence.lengths) for sequence in sequences)
    has_mask = kind is not GraphKind.PLAIN or name == SELF  # as a causal one with a window has
    padded = -(-keys // 8) * 8 if keys % 4 and has_mask else keys
    assert_padded(model, kind, sequences, (len(sequences), padded))


@pytest.mark.parametrize("kind", [GraphKind.LENGTHS, GraphKind.TOKENS, GraphKind.WEIGHTS])
@pytest.mark.parametrize(
    ("lengths", "padded"),
    [((3,), 8), ((5, 13, 13), 16), ((2, 12), 12), ((158, 7), 160)],
    ids=["one", "ragged", "aligned", "the longest"],
)
def test_tokens_of_an_encoder_are_padded_unseen(
    encoder: LoadedModel, kind: GraphKind, lengths: tuple[int, ...], padded: int
) -> None:
    ids = encoder.inputs[0].name
    rng = np.random.default_rng(0)
    sequences = [
        SequenceInputs({ids: rng.integers(4, 300, size=rows)}, None, encoder.plan(kind, (rows,)))
        for rows in lengths
    ]
    assert_padded(encoder, kind, sequences, (len(sequences), padded))


def test_the_limits_of_a_model_end_padding(cross_model: LoadedModel) -> None:
    """A longest sequence of 510 rows, as encoders have, and a module of multiples of 3."""
    device, (query, key) = on_device(cross_model), cross_model.axes
    update = {"max_lengths": {key: 510}, "length_multiples": {key: 3, query: 5}}
    model = dataclasses.replace(device, manifest=device.manifest.model_copy(update=update))
    padded = [model.padded_lengths(GraphKind.LENGTHS, (5, keys))[1] for keys in (9, 24, 507, 508)]
    assert padded == [24, 24, 507, 508]
    assert model.padded_lengths(GraphKind.PLAIN, (5, 9)) == (5, 9)


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
