"""The field and the message of each refusal; and the sequences, masks and graph of what is accepted."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import _prompt, tokenize_texts, validate
from attention_serving.server.engine.types import Array, DecodedRequest, HeadSelection, Mask, MaskKind, Ragged
from tests.server.engine.requests.test_text_spans import facts, with_pooling
from tests.server.samples import CROSS, HEADS, SELF, TEXT, ragged, request_of, validated_of
from tests.support.refusals import expect_refusal

LENGTHS = ((2, 3), (1, 4))
Build = Callable[[LoadedModel], DecodedRequest]


def changed(**inputs: Ragged | None) -> Build:
    """A good request with some inputs replaced, added or, for None, left out."""

    def build(model: LoadedModel) -> DecodedRequest:
        merged = {**request_of(model, LENGTHS).inputs, **inputs}
        return DecodedRequest(inputs={name: rows for name, rows in merged.items() if rows is not None})

    return build


def of_lengths(*lengths: int, width: int) -> Ragged:
    return ragged(np.random.default_rng(0), lengths, width)


@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize(
    "names",
    [("query", "document"), ("passage", "corpus"), ("corpus",), ("Query", "DOCUMENT"), ("other",), ()],
)
def test_a_kind_of_texts_chooses_the_prompt_that_sentence_transformers_chooses(
    text_model: LoadedModel, kind: str, names: tuple[str, ...]
) -> None:
    texts = {name.lower(): f"{name} " for name in names}
    library = SimpleNamespace(prompts=texts, encode=lambda **options: options["prompt_name"])
    name = getattr(SentenceTransformer, f"encode_{kind}")(library, "low")
    prompts = {"usual": "usual ", **{name: f"{name} " for name in names}}
    encoder = facts("mean").model_copy(update={"prompts": prompts, "default_prompt": "usual"})
    model = with_pooling(text_model, encoder=encoder)
    assert _prompt(DecodedRequest(input_kind=kind), model) == texts.get(name, "usual ")
    with expect_refusal("input_kind: cannot be combined with prompt"):
        _prompt(DecodedRequest(input_kind=kind, prompt=""), model)


DOUBLE = Ragged(np.zeros((3, 4)), (2, 1))
FLAT = Ragged(np.zeros(3, np.float32), (3,))


def texts(*given: str) -> Build:
    return lambda _: DecodedRequest(texts=given)


def ids(*given: int) -> Build:
    rows = Ragged(np.array(given, np.int64), (len(given),))
    return lambda _: DecodedRequest(inputs={"token_ids": rows})


def masked(kind: MaskKind, data: Array) -> Build:
    return lambda model: DecodedRequest(inputs=request_of(model, LENGTHS).inputs, mask=Mask(kind, data))


def weighted(model: LoadedModel, **fields: Any) -> DecodedRequest:
    return dataclasses.replace(request_of(model, LENGTHS, return_weights=True), **fields)


OF_A_LAYER = partial(weighted, head_selection=HeadSelection(layers=(0,)))


TAKEN = "model 'tiny-self' takes query and optionally attention_mask"
# Model, request, message; and for limits, the one that is set.
INPUTS: dict[str, tuple[str, Build, str]] = {
    "missing": (
        CROSS, changed(value=None),
        "value: is missing; model 'tiny-cross' takes query, key, value and optionally attention_mask",
    ),
    "unknown": (SELF, changed(key=of_lengths(3, width=6)), f"key: is not an input; {TAKEN}"),
    "float64": (SELF, changed(query=DOUBLE), "query: is float64; the model takes float32"),
    "width": (SELF, changed(query=of_lengths(2, width=3)), "query: rows are 3 wide; the model takes 4"),
    "flat rows": (SELF, changed(query=FLAT), "query: rows are 1 wide; the model takes 4"),
    "no sequences": (SELF, changed(query=of_lengths(width=4)), "query: does not contain any sequence"),
    "zero rows": (SELF, changed(query=of_lengths(2, 0, width=4)), "query: sequence 1 is empty"),
    "fewer keys": (CROSS, changed(key=of_lengths(3, width=6)), "key: contains 1 sequences; query contains 2"),
    "value unlike key": (
        CROSS, changed(value=of_lengths(3, 5, width=5)), "value: sequence 1 has 5 rows; key has 4",
    ),
    "text to vectors": (SELF, texts("Life"), "text: model 'tiny-self' takes query, not text"),
    "text beside ids": (
        TEXT, lambda _: DecodedRequest(texts=("Life",), inputs={"token_ids": Ragged(np.zeros(1), (1,))}),
        "text: cannot be combined with token_ids; send one of them",
    ),
    "id too large": (TEXT, ids(0, 6), "token_ids: contains id 6; ids must be between 0 and 5"),
    "id negative": (TEXT, ids(-1, 3), "token_ids: contains id -1; ids must be between 0 and 5"),
    "unknown word": (TEXT, texts("Life", "Death"), "text: unknown words: 'Death'"),
    "layer": (
        SELF, OF_A_LAYER, "head_selection.layers: must be empty: model 'tiny-self' is not a text encoder",
    ),
}  # fmt: skip
# Of two sequences: 3 + 4 keys, 2 x 3 + 1 x 4 pairs, 2 heads of those.
MASKS: dict[str, tuple[str, Build, str]] = {
    f"{kind} {found} of {expected}": (
        CROSS,
        masked(kind, np.ones(size, dtype)),
        f"mask: contains {found}; {kind} masks of these sequences need {expected} flags",
    )
    for kind, expected in ((MaskKind.KEYS, 7), (MaskKind.PAIRS, 10), (MaskKind.HEADS, 20))
    for size, dtype, found in (
        (expected - 1, np.bool_, f"{expected - 1} flags"),
        (expected + 1, np.bool_, f"{expected + 1} flags"),
        (expected // 8 + 2, np.uint8, f"{expected // 8 + 2} bytes of 8 flags each"),
    )
}
SIZES: dict[str, tuple[str, Build, str, Limits]] = {
    "sequence": (
        CROSS, changed(), "key: a sequence has 4 rows; the limit is 3", Limits(max_sequence_length=3),
    ),
    "sequences": (SELF, changed(), "query: contains 2 sequences; the limit is 1", Limits(max_sequences=1)),
    "sequences without rows": (
        SELF, changed(query=of_lengths(*[0] * 4097, width=4)),
        "query: contains 4097 sequences; the limit is 4096", Limits(),
    ),
    "texts": (
        TEXT, texts("Life", "is"), "text: contains 2 sequences; the limit is 1", Limits(max_sequences=1),
    ),
    # 3 rows of 4 floats
    "context": (
        SELF, changed(), "query: the result would be 48 bytes; the limit is 47", Limits(max_result_bytes=47),
    ),
    # The same, and 2 heads of 2 x 3 and 1 x 4 floats.
    "weights": (
        CROSS, weighted,
        "return_weights: the result would be 128 bytes; the limit is 127", Limits(max_result_bytes=127),
    ),
}  # fmt: skip


REFUSED: dict[str, tuple[Any, ...]] = INPUTS | MASKS | SIZES


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_field_value_and_limit(row: Any, models: dict[str, LoadedModel]) -> None:
    name, build, message, *limits = row
    with expect_refusal(message, LimitExceededError if limits else InvalidRequestError) as caught:
        model, bounds = models[name], limits[0] if limits else Limits()
        validate(tokenize_texts(build(model), model, bounds), model, bounds)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((5, 6), "query: a sequence has 5 rows; this model takes at most 4"),
        ((4, 7), "key: a sequence has 7 rows; this model takes at most 6"),
        ((4, 1), "key: a sequence has 1 rows; this model takes at least 2"),
        ((4, 5), "key: a sequence has 5 rows; this model takes multiples of 2"),
    ],
    ids=["query", "key", "short key", "odd key"],
)
def test_the_lengths_of_a_model_are_limits(cross_model: LoadedModel, lengths: Any, message: str) -> None:
    bounds = {
        "max_lengths": {"query_length": 4, "key_length": 6},
        "min_lengths": {"key_length": 2},
        "length_multiples": {"key_length": 2},
    }
    model = dataclasses.replace(cross_model, manifest=cross_model.manifest.model_copy(update=bounds))
    validate(request_of(model, [(4, 6), (1, 2)]), model, Limits())
    with expect_refusal(message, LimitExceededError) as caught:
        validate(request_of(model, [(1, 2), lengths]), model, Limits())
    assert caught.value.message == message


lengths_of_requests = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@given(
    lengths=lengths_of_requests,
    name=st.sampled_from([SELF, CROSS]),
    kind=st.sampled_from(MaskKind),
    packed=st.booleans(),
)
@settings(max_examples=80)
def test_each_sequence_has_views_of_its_own_rows_and_of_its_part_of_the_mask(
    models: dict[str, LoadedModel], lengths: list[tuple[int, int]], name: str, kind: MaskKind, packed: bool
) -> None:
    request = request_of(models[name], lengths, kind=kind)
    assert request.mask is not None
    flags = request.mask.flags(request.mask.data.size)
    mask = Mask(kind, np.packbits(flags, bitorder="little") if packed else flags)
    validated = validate(DecodedRequest(inputs=request.inputs, mask=mask), models[name], Limits())
    for spec in models[name].inputs:
        rows = request.inputs[spec.name].rows
        own = [sequence.inputs[spec.name] for sequence in validated.sequences]
        assert all(np.shares_memory(part, rows) for part in own)
        assert [len(part) for part in own] == list(request.inputs[spec.name].lengths)
        np.testing.assert_array_equal(np.concatenate(own), rows)
    parts = [sequence.mask for sequence in validated.sequences if sequence.mask is not None]
    pairs = lengths if name == CROSS else [(query, query) for query, _ in lengths]
    spans = {MaskKind.KEYS: (1, 0), MaskKind.PAIRS: (1, 1), MaskKind.HEADS: (HEADS, 1)}
    heads, per_query = spans[kind]
    assert [part.shape for part in parts] == [(heads, q if per_query else 1, k) for q, k in pairs]
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), flags)
    assert packed or all(np.shares_memory(part, flags) for part in parts)


@pytest.mark.parametrize(
    ("kind", "return_weights", "graph", "held_bytes"),
    [
        # 3 context vectors of 4 and, if requested, 20 weights, all of 4 bytes; twice, for the reply.
        (None, False, GraphKind.PLAIN, 2 * 4 * 12),
        (MaskKind.PAIRS, False, GraphKind.MASK, 2 * 4 * 12 + 10),
        (None, True, GraphKind.WEIGHTS, 2 * 4 * (12 + 20)),
        (MaskKind.KEYS, True, GraphKind.WEIGHTS, 2 * 4 * (12 + 20) + 7),
    ],
    ids=["plain", "mask", "weights", "weights and mask"],
)
def test_the_cheapest_graph_answers_and_mask_result_and_reply_are_held(
    cross_model: LoadedModel, kind: MaskKind | None, graph: GraphKind, held_bytes: int, return_weights: bool
) -> None:
    request = validated_of(cross_model, [(2, 3), (1, 4)], kind=kind, return_weights=return_weights)
    assert (request.plan.graph, request.plan.required_bytes) == (graph, held_bytes)


def test_a_sequence_whose_run_can_never_fit_is_refused(self_model: LoadedModel) -> None:
    limit = self_model.run_bytes(GraphKind.PLAIN, 1, (5,))
    limits = Limits(max_run_bytes=limit)
    validate(request_of(self_model, [(5, 5)] * 9), self_model, limits)
    with pytest.raises(LimitExceededError, match=rf"sequence 2 needs about \d+ bytes .* limit is {limit};"):
        validate(request_of(self_model, [(5, 5), (2, 2), (6, 6)]), self_model, limits)
