"""Valid requests: their sequences, sizes, masks, graph and bytes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Mask, MaskKind, Request
from tests.server.samples import CROSS, HEADS, SELF, request_of, validated_of

lengths_of_requests = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@given(lengths=lengths_of_requests, name=st.sampled_from([SELF, CROSS]))
@settings(deadline=None)
def test_sequences_are_views_of_the_request_in_its_order(
    models: dict[str, LoadedModel], lengths: list[tuple[int, int]], name: str
) -> None:
    request = request_of(models[name], lengths)
    validated = validate(request, models[name], Limits())
    for spec in models[name].inputs:
        rows = request.inputs[spec.name].rows
        parts = [sequence.inputs[spec.name] for sequence in validated.sequences]
        assert all(np.shares_memory(part, rows) for part in parts)
        assert [len(part) for part in parts] == list(request.inputs[spec.name].lengths)
        np.testing.assert_array_equal(np.concatenate(parts), rows)


@given(lengths=lengths_of_requests)
@settings(deadline=None)
def test_sizes_name_the_query_axis_first_and_the_key_axis_last(
    models: dict[str, LoadedModel], lengths: list[tuple[int, int]]
) -> None:
    cross = validated_of(models[CROSS], lengths)
    alone = validated_of(models[SELF], lengths)
    assert [list(sequence.sizes.items()) for sequence in cross.sequences] == [
        [("query_length", query), ("key_length", key)] for query, key in lengths
    ]
    assert [dict(sequence.sizes) for sequence in alone.sequences] == [
        {"query_length": query} for query, _ in lengths
    ]


@given(
    lengths=lengths_of_requests,
    name=st.sampled_from([SELF, CROSS]),
    kind=st.sampled_from(MaskKind),
    packed=st.booleans(),
)
@settings(deadline=None)
def test_each_sequence_gets_its_own_part_of_the_mask(
    models: dict[str, LoadedModel],
    lengths: list[tuple[int, int]],
    name: str,
    kind: MaskKind,
    packed: bool,
) -> None:
    request = request_of(models[name], lengths, kind=kind)
    assert request.mask is not None
    flags = request.mask.flags(request.mask.data.size)
    mask = Mask(kind, np.packbits(flags, bitorder="little") if packed else flags)
    validated = validate(Request(inputs=request.inputs, mask=mask), models[name], Limits())
    parts = [sequence.mask for sequence in validated.sequences if sequence.mask is not None]
    pairs = lengths if name == CROSS else [(query, query) for query, _ in lengths]
    spans = {MaskKind.KEYS: (1, 0), MaskKind.PAIRS: (1, 1), MaskKind.HEADS: (HEADS, 1)}
    heads, per_query = spans[kind]
    assert [part.shape for part in parts] == [(heads, q if per_query else 1, k) for q, k in pairs]
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), flags)
    assert packed or all(np.shares_memory(part, flags) for part in parts)


def test_sequences_of_a_request_without_a_mask_do_not_have_one(self_model: LoadedModel) -> None:
    request = validated_of(self_model, [(2, 2), (3, 3)])
    assert [sequence.mask for sequence in request.sequences] == [None, None]


def test_text_becomes_the_ids_of_its_words(text_model: LoadedModel) -> None:
    request = validate(Request(texts=("Life is short", "eat")), text_model, Limits())
    assert [sequence.inputs["token_ids"].tolist() for sequence in request.sequences] == [[0, 4, 5], [2]]


@pytest.mark.parametrize(
    ("kind", "return_weights", "expected"),
    [
        # 3 context vectors of 4 and, if requested, 20 weights, all of 4 bytes; twice, for the reply.
        (None, False, 2 * 4 * 12),
        (MaskKind.PAIRS, False, 2 * 4 * 12 + 10),
        (None, True, 2 * 4 * (12 + 20)),
    ],
    ids=["plain", "mask", "weights"],
)
def test_held_bytes_count_mask_result_and_reply(
    cross_model: LoadedModel, kind: MaskKind | None, *, return_weights: bool, expected: int
) -> None:
    request = validated_of(cross_model, [(2, 3), (1, 4)], kind=kind, return_weights=return_weights)
    assert request.form.held_bytes == expected
    # 3 query rows of 4, 7 key rows of 6, 7 value rows of 5.
    assert request.form.input_bytes == 4 * (12 + 42 + 35)


@pytest.mark.parametrize("deadline", [12.5, math.inf], ids=["finite", "none"])
def test_the_deadline_is_kept(self_model: LoadedModel, deadline: float) -> None:
    assert validated_of(self_model, [(1, 1)], deadline=deadline).deadline == deadline


@pytest.mark.parametrize(
    ("kind", "return_weights", "expected"),
    [
        (None, False, GraphKind.PLAIN),
        (MaskKind.KEYS, False, GraphKind.MASK),
        (None, True, GraphKind.WEIGHTS),
        (MaskKind.KEYS, True, GraphKind.WEIGHTS),
    ],
    ids=["plain", "mask", "weights", "weights and mask"],
)
def test_the_graph_is_the_cheapest_that_can_answer(
    cross_model: LoadedModel, kind: MaskKind | None, expected: GraphKind, *, return_weights: bool
) -> None:
    request = validated_of(cross_model, [(2, 3), (1, 4)], kind=kind, return_weights=return_weights)
    assert request.form.graph is expected
