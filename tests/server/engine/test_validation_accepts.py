"""What validation makes of a good request."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.types import Mask, MaskKind, Request
from server.engine.validation import validate
from tests.server.samples import CROSS, HEADS, SELF, request_of, work_of

lengths_of_requests = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@given(lengths=lengths_of_requests, name=st.sampled_from([SELF, CROSS]))
@settings(deadline=None)
def test_items_are_views_of_the_request_in_its_order(
    models: dict[str, LoadedModel], lengths: list[tuple[int, int]], name: str
) -> None:
    request = request_of(models[name], lengths)
    work = validate(request, models[name], Limits())
    for spec in models[name].inputs:
        rows = request.inputs[spec.name].rows
        parts = [item.inputs[spec.name] for item in work.items]
        assert all(np.shares_memory(part, rows) for part in parts)
        assert [len(part) for part in parts] == list(request.inputs[spec.name].lengths)
        np.testing.assert_array_equal(np.concatenate(parts), rows)


@given(lengths=lengths_of_requests)
@settings(deadline=None)
def test_sizes_carry_the_query_axis_first_and_the_key_axis_last(
    models: dict[str, LoadedModel], lengths: list[tuple[int, int]]
) -> None:
    cross = work_of(models[CROSS], lengths)
    alone = work_of(models[SELF], lengths)
    assert [list(item.sizes.items()) for item in cross.items] == [
        [("query_length", query), ("key_length", key)] for query, key in lengths
    ]
    assert [dict(item.sizes) for item in alone.items] == [{"query_length": query} for query, _ in lengths]


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
    work = validate(Request(inputs=request.inputs, mask=mask), models[name], Limits())
    parts = [item.mask for item in work.items if item.mask is not None]
    pairs = lengths if name == CROSS else [(query, query) for query, _ in lengths]
    spans = {MaskKind.KEYS: (1, 0), MaskKind.PAIRS: (1, 1), MaskKind.HEADS: (HEADS, 1)}
    heads, per_query = spans[kind]
    assert [part.shape for part in parts] == [(heads, q if per_query else 1, k) for q, k in pairs]
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), flags)
    assert packed or all(np.shares_memory(part, flags) for part in parts)
    assert work.masked


def test_a_request_without_a_mask_gives_items_without_one(self_model: LoadedModel) -> None:
    work = work_of(self_model, [(2, 2), (3, 3)])
    assert not work.masked
    assert [item.mask for item in work.items] == [None, None]


def test_text_becomes_the_ids_of_its_words(text_model: LoadedModel) -> None:
    work = validate(Request(texts=("Life is short", "eat")), text_model, Limits())
    assert [item.inputs["token_ids"].tolist() for item in work.items] == [[0, 4, 5], [2]]


@pytest.mark.parametrize(
    ("kind", "return_weights", "expected"),
    [
        # 3 query rows of 4, 7 key rows of 6, 7 value rows of 5; 3 context vectors of 4; all of 4 bytes.
        (None, False, 4 * (12 + 42 + 35 + 12)),
        (MaskKind.PAIRS, False, 4 * (12 + 42 + 35 + 12) + 10),
        (None, True, 4 * (12 + 42 + 35 + 12 + 20)),
    ],
    ids=["plain", "mask", "weights"],
)
def test_bytes_in_flight_count_inputs_mask_and_result(
    cross_model: LoadedModel, kind: MaskKind | None, *, return_weights: bool, expected: int
) -> None:
    work = work_of(cross_model, [(2, 3), (1, 4)], kind=kind, return_weights=return_weights)
    assert work.in_flight_bytes == expected


@pytest.mark.parametrize("deadline", [12.5, math.inf], ids=["finite", "none"])
def test_work_keeps_the_deadline(self_model: LoadedModel, deadline: float) -> None:
    assert work_of(self_model, [(1, 1)], deadline=deadline).deadline == deadline
