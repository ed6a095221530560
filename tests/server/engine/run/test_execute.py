"""Sequences that run together get the results that each would get alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.samples import CROSS, HEADS, SELF, assert_outputs, validated_of
from tests.server.seams import tapped

# The shape of a batch changes the order of sums, which moves the last bits of a float32.
RTOL, ATOL = 1e-5, 2e-6

sequences = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, *MaskKind])),
    min_size=1,
    max_size=6,
)


def sequences_of(
    model: LoadedModel, specs: Sequence[tuple[int, int, MaskKind | None]]
) -> list[SequenceInputs]:
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
        graph = model.batch_graph(GraphKind.MASK if masked else GraphKind.PLAIN, equal_lengths=equal_lengths)
    return run_batch(model, graph, sequences)[0]


@given(specs=sequences, name=st.sampled_from([SELF, CROSS]), return_weights=st.booleans())
@settings(deadline=None, max_examples=60)
def test_together_equals_alone_and_eager(
    models: dict[str, LoadedModel],
    specs: list[tuple[int, int, MaskKind | None]],
    name: str,
    *,
    return_weights: bool,
) -> None:
    sequences = sequences_of(models[name], specs)
    together = run(models[name], sequences, return_weights=return_weights)
    assert len(together) == len(sequences)
    for sequence, outputs in zip(sequences, together, strict=True):
        (alone,) = run(models[name], [sequence], return_weights=return_weights)
        assert list(outputs) == list(alone)
        for output, array in outputs.items():
            np.testing.assert_allclose(array, alone[output], rtol=RTOL, atol=ATOL)
        assert_outputs(models[name], sequence, outputs)


@given(specs=sequences)
@settings(deadline=None, max_examples=20)
def test_outputs_have_the_lengths_of_their_sequence(
    models: dict[str, LoadedModel], specs: list[tuple[int, int, MaskKind | None]]
) -> None:
    results = run(models[CROSS], sequences_of(models[CROSS], specs), return_weights=True)
    assert [outputs["context_vectors"].shape for outputs in results] == [(query, 4) for query, _, _ in specs]
    assert [outputs["attention_weights"].shape for outputs in results] == [
        (HEADS, query, key) for query, key, _ in specs
    ]


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "infinity"])
@pytest.mark.parametrize("name", [SELF, CROSS])
@pytest.mark.parametrize(
    ("kind", "lengths", "return_weights"),
    [
        (None, (5, 5, 5), False),
        (None, (5, 2, 7), False),
        (MaskKind.PAIRS, (5, 2, 7), False),
        (None, (5, 2, 7), True),
    ],
    ids=["plain", "lengths", "mask", "weights"],
)
def test_nan_and_infinity_stay_in_their_sequence(
    models: dict[str, LoadedModel],
    poison: float,
    name: str,
    kind: MaskKind | None,
    lengths: tuple[int, int, int],
    *,
    return_weights: bool,
) -> None:
    sequences = sequences_of(models[name], [(length, length, kind) for length in lengths])
    for array in sequences[1].inputs.values():
        array[:] = poison
    before, poisoned, after = run(models[name], sequences, return_weights=return_weights)
    assert_outputs(models[name], sequences[0], before)
    assert_outputs(models[name], sequences[2], after)
    assert np.isnan(poisoned["context_vectors"]).any()


def seen_inputs(model: LoadedModel, sequences: list[SequenceInputs]) -> dict[str, Array]:
    """What a run of those sequences gives to the session."""
    seen: list[dict[str, Array]] = []
    run(tapped(model, seen.append), sequences, return_weights=False)
    (inputs,) = seen
    return inputs


def test_a_single_sequence_is_not_copied(cross_model: LoadedModel) -> None:
    (sequence,) = sequences_of(cross_model, [(3, 5, None)])
    inputs = seen_inputs(cross_model, [sequence])
    assert list(inputs) == ["query", "key", "value"]
    for name, array in inputs.items():
        assert np.shares_memory(array, sequence.inputs[name])


def test_padding_is_zero_and_padded_keys_may_not_be_attended_to(cross_model: LoadedModel) -> None:
    sequences = sequences_of(cross_model, [(1, 2, MaskKind.HEADS), (3, 4, None)])
    inputs = seen_inputs(cross_model, sequences)
    assert not inputs["query"][0, 1:].any()
    assert not inputs["key"][0, 2:].any()
    mask = inputs["attention_mask"]
    assert mask.shape == (2, HEADS, 3, 4)
    np.testing.assert_array_equal(mask[0, :, :1, :2], sequences[0].mask)
    assert not mask[0, :, 1:].any()
    assert not mask[0, :, :, 2:].any()
    assert mask[1].all()


def test_causal_self_attention_does_not_need_lengths_because_padding_follows_every_row(
    models: dict[str, LoadedModel],
) -> None:
    assert models[SELF].batch_graph(GraphKind.PLAIN, equal_lengths=False) is GraphKind.PLAIN
    sequences = sequences_of(models[SELF], [(3, 3, None), (7, 7, None)])
    for sequence, outputs in zip(sequences, run(models[SELF], sequences), strict=True):
        assert_outputs(models[SELF], sequence, outputs)


@pytest.mark.parametrize(
    ("graph", "equal_lengths", "expected"),
    [
        (GraphKind.PLAIN, True, GraphKind.PLAIN),
        (GraphKind.PLAIN, False, GraphKind.LENGTHS),
        (GraphKind.MASK, False, GraphKind.MASK),
        (GraphKind.WEIGHTS, False, GraphKind.WEIGHTS),
    ],
)
def test_only_the_plain_graph_cannot_run_unequal_lengths(
    cross_model: LoadedModel, graph: GraphKind, expected: GraphKind, *, equal_lengths: bool
) -> None:
    assert cross_model.batch_graph(graph, equal_lengths=equal_lengths) is expected
