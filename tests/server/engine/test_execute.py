"""Sequences that run together get the answers that each would get alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.manifest import GraphKind
from server.engine.execute import choose_graph, run_batch
from server.engine.model import LoadedModel
from server.engine.types import Array, Item, MaskKind
from tests.server.samples import CROSS, HEADS, SELF, assert_outputs, work_of
from tests.server.seams import tapped

# The shape of a batch changes the order of sums, which moves the last bits of a float32.
RTOL, ATOL = 1e-5, 2e-6

sequences = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, *MaskKind])),
    min_size=1,
    max_size=6,
)


def items_of(model: LoadedModel, specs: Sequence[tuple[int, int, MaskKind | None]]) -> list[Item]:
    """One random sequence for each pair of lengths and kind of mask."""
    return [
        work_of(model, [(query, key)], kind=kind, seed=seed).items[0]
        for seed, (query, key, kind) in enumerate(specs)
    ]


@given(specs=sequences, name=st.sampled_from([SELF, CROSS]), return_weights=st.booleans())
@settings(deadline=None, max_examples=60)
def test_together_equals_alone_and_eager(
    models: dict[str, LoadedModel],
    specs: list[tuple[int, int, MaskKind | None]],
    name: str,
    *,
    return_weights: bool,
) -> None:
    items = items_of(models[name], specs)
    together = run_batch(models[name], items, return_weights=return_weights)
    assert len(together) == len(items)
    for item, outputs in zip(items, together, strict=True):
        (alone,) = run_batch(models[name], [item], return_weights=return_weights)
        assert list(outputs) == list(alone)
        for output, array in outputs.items():
            np.testing.assert_allclose(array, alone[output], rtol=RTOL, atol=ATOL)
        assert_outputs(models[name], item, outputs)


@given(specs=sequences)
@settings(deadline=None, max_examples=20)
def test_outputs_have_each_sequences_own_lengths(
    models: dict[str, LoadedModel], specs: list[tuple[int, int, MaskKind | None]]
) -> None:
    results = run_batch(models[CROSS], items_of(models[CROSS], specs), return_weights=True)
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
def test_what_is_not_a_number_in_one_sequence_reaches_no_other(
    models: dict[str, LoadedModel],
    poison: float,
    name: str,
    kind: MaskKind | None,
    lengths: tuple[int, int, int],
    *,
    return_weights: bool,
) -> None:
    items = items_of(models[name], [(length, length, kind) for length in lengths])
    for array in items[1].inputs.values():
        array[:] = poison
    before, poisoned, after = run_batch(models[name], items, return_weights=return_weights)
    assert_outputs(models[name], items[0], before)
    assert_outputs(models[name], items[2], after)
    assert np.isnan(poisoned["context_vectors"]).any()


@pytest.mark.parametrize(
    ("specs", "return_weights", "expected"),
    [
        ([(3, 3, None)], False, GraphKind.PLAIN),
        ([(3, 3, None), (3, 3, None)], False, GraphKind.PLAIN),
        ([(3, 3, None), (4, 3, None)], False, GraphKind.LENGTHS),
        ([(3, 3, None), (3, 4, None)], False, GraphKind.LENGTHS),
        ([(3, 3, None), (3, 3, MaskKind.KEYS)], False, GraphKind.MASK),
        ([(3, 3, None)], True, GraphKind.WEIGHTS),
        ([(3, 3, MaskKind.KEYS)], True, GraphKind.WEIGHTS),
    ],
    ids=["one", "equal", "queries differ", "keys differ", "a mask", "weights", "weights and mask"],
)
def test_the_graph_is_the_cheapest_that_can_answer(
    cross_model: LoadedModel,
    specs: list[tuple[int, int, MaskKind | None]],
    *,
    return_weights: bool,
    expected: GraphKind,
) -> None:
    items = items_of(cross_model, specs)
    assert choose_graph(cross_model, items, return_weights=return_weights) is expected


def seen_inputs(model: LoadedModel, items: list[Item]) -> dict[str, Array]:
    """What a run of those items gives to the session."""
    seen: list[dict[str, Array]] = []
    run_batch(tapped(model, seen.append), items, return_weights=False)
    (inputs,) = seen
    return inputs


def test_a_single_sequence_is_not_copied(cross_model: LoadedModel) -> None:
    (item,) = items_of(cross_model, [(3, 5, None)])
    inputs = seen_inputs(cross_model, [item])
    assert list(inputs) == ["query", "key", "value"]
    for name, array in inputs.items():
        assert np.shares_memory(array, item.inputs[name])


def test_padding_is_zero_and_padded_keys_may_not_be_attended_to(cross_model: LoadedModel) -> None:
    items = items_of(cross_model, [(1, 2, MaskKind.HEADS), (3, 4, None)])
    inputs = seen_inputs(cross_model, items)
    assert not inputs["query"][0, 1:].any()
    assert not inputs["key"][0, 2:].any()
    mask = inputs["attention_mask"]
    assert mask.shape == (2, HEADS, 3, 4)
    np.testing.assert_array_equal(mask[0, :, :1, :2], items[0].mask)
    assert not mask[0, :, 1:].any()
    assert not mask[0, :, :, 2:].any()
    assert mask[1].all()


def test_causal_self_attention_needs_no_lengths_for_padding_lies_after_every_row(
    models: dict[str, LoadedModel],
) -> None:
    items = items_of(models[SELF], [(3, 3, None), (7, 7, None)])
    assert choose_graph(models[SELF], items, return_weights=False) is GraphKind.PLAIN
    for item, outputs in zip(items, run_batch(models[SELF], items, return_weights=False), strict=True):
        assert_outputs(models[SELF], item, outputs)
