"""Invalid requests: the field and the message of each refusal."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged, Request
from tests.server.samples import CROSS, SELF, TEXT, ragged, request_of

LENGTHS = ((2, 3), (1, 4))
Build = Callable[[LoadedModel], Request]


def changed(**inputs: Ragged | None) -> Build:
    """A good request with some inputs replaced, added or, for None, left out."""

    def build(model: LoadedModel) -> Request:
        merged = {**request_of(model, LENGTHS).inputs, **inputs}
        return Request(inputs={name: rows for name, rows in merged.items() if rows is not None})

    return build


def of_lengths(*lengths: int, width: int) -> Ragged:
    return ragged(np.random.default_rng(0), lengths, width)


def of_type(dtype: str) -> Ragged:
    return Ragged(np.zeros((3, 4), dtype), (2, 1))


FLAT = Ragged(np.zeros(3, np.float32), (3,))


def texts(*given: str) -> Build:
    return lambda _: Request(texts=given)


def ids(*given: int) -> Build:
    rows = Ragged(np.array(given, np.int64), (len(given),))
    return lambda _: Request(inputs={"token_ids": rows})


def masked(kind: MaskKind, data: Array) -> Build:
    def build(model: LoadedModel) -> Request:
        good = request_of(model, LENGTHS)
        return Request(inputs=good.inputs, mask=Mask(kind, data))

    return build


def weighted(model: LoadedModel) -> Request:
    return request_of(model, LENGTHS, return_weights=True)


TAKEN = "model 'tiny-self' takes query and optionally attention_mask"
# Model, request, message; and for limits, the one that is set.
INPUTS: dict[str, tuple[str, Build, str]] = {
    "missing": (
        CROSS, changed(value=None),
        "value: is missing; model 'tiny-cross' takes query, key, value and optionally attention_mask",
    ),
    "missing query": (SELF, changed(query=None), f"query: is missing; {TAKEN}"),
    "unknown": (SELF, changed(key=of_lengths(3, width=6)), f"key: is not an input; {TAKEN}"),
    "float64": (SELF, changed(query=of_type("f8")), "query: is float64; the model takes float32"),
    "float16": (SELF, changed(query=of_type("f2")), "query: is float16; the model takes float32"),
    "width": (SELF, changed(query=of_lengths(2, width=3)), "query: rows are 3 wide; the model takes 4"),
    "flat rows": (SELF, changed(query=FLAT), "query: rows are 1 wide; the model takes 4"),
    "zero rows": (SELF, changed(query=of_lengths(2, 0, width=4)), "query: sequence 1 is empty"),
    "no sequences": (SELF, changed(query=of_lengths(width=4)), "query: does not contain any sequence"),
    "fewer keys": (CROSS, changed(key=of_lengths(3, width=6)), "key: contains 1 sequences; query contains 2"),
    "value unlike key": (
        CROSS, changed(value=of_lengths(3, 5, width=5)), "value: sequence 1 has 5 rows; key has 4",
    ),
    "text to vectors": (SELF, texts("Life"), "text: model 'tiny-self' takes query, not text"),
    "text beside ids": (
        TEXT, lambda _: Request(texts=("Life",), inputs={"token_ids": Ragged(np.zeros(1), (1,))}),
        "text: cannot be combined with token_ids; send one of them",
    ),
    "id too large": (TEXT, ids(0, 6), "token_ids: contains id 6; ids must be between 0 and 5"),
    "id negative": (TEXT, ids(-1, 3), "token_ids: contains id -1; ids must be between 0 and 5"),
    "unknown word": (TEXT, texts("Life", "Death"), "text: unknown words: 'Death'"),
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
        (0, np.bool_, "0 flags"),
        (expected - 1, np.bool_, f"{expected - 1} flags"),
        (expected + 1, np.bool_, f"{expected + 1} flags"),
        (0, np.uint8, "0 bytes of 8 flags each"),
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


def refusal(model: LoadedModel, request: Request, limits: Limits) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(request, model, limits)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


@pytest.mark.parametrize(("name", "build", "message"), (WRONG := INPUTS | MASKS).values(), ids=WRONG)
def test_a_refusal_names_the_field_what_was_found_and_what_was_expected(
    name: str, build: Build, message: str, models: dict[str, LoadedModel]
) -> None:
    error = refusal(models[name], build(models[name]), Limits())
    assert (type(error), error.message) == (InvalidRequestError, message)


@pytest.mark.parametrize(("name", "build", "message", "limits"), SIZES.values(), ids=SIZES)
def test_a_refusal_of_what_is_too_large_states_the_limit(
    name: str, build: Build, message: str, limits: Limits, models: dict[str, LoadedModel]
) -> None:
    error = refusal(models[name], build(models[name]), limits)
    assert (type(error), error.message) == (LimitExceededError, message)


@pytest.mark.parametrize(
    "limits",
    [Limits(max_sequence_length=1), Limits(max_result_bytes=1)],
    ids=["too long", "result too large"],
)
def test_a_refusal_of_text_names_the_text(limits: Limits, text_model: LoadedModel) -> None:
    with pytest.raises(LimitExceededError) as caught:
        validate(Request(texts=("Life is",)), text_model, limits)
    assert caught.value.field == "text"


def test_a_request_at_each_limit_is_accepted(cross_model: LoadedModel) -> None:
    limits = Limits(max_sequence_length=4, max_sequences=2, max_result_bytes=128)
    assert len(validate(weighted(cross_model), cross_model, limits).sequences) == len(LENGTHS)


def bounded(model: LoadedModel, **max_lengths: int) -> LoadedModel:
    """The same model, which states its largest lengths."""
    manifest = model.manifest.model_copy(update={"max_lengths": max_lengths})
    return dataclasses.replace(model, manifest=manifest)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((5, 6), "query: a sequence has 5 rows; this model takes at most 4"),
        ((4, 7), "key: a sequence has 7 rows; this model takes at most 6"),
    ],
    ids=["query", "key"],
)
def test_a_sequence_beyond_the_largest_length_of_its_model_is_refused(
    cross_model: LoadedModel, lengths: tuple[int, int], message: str
) -> None:
    model = bounded(cross_model, query_length=4, key_length=6)
    validate(request_of(model, [(4, 6), (1, 1)]), model, Limits())
    error = refusal(model, request_of(model, [(1, 1), lengths]), Limits())
    assert (error.reason, error.message) == ("LIMIT_EXCEEDED", message)


def test_a_text_beyond_the_largest_length_of_its_model_is_refused(text_model: LoadedModel) -> None:
    model = bounded(text_model, query_length=2)
    error = refusal(model, Request(texts=("eat dessert first",)), Limits())
    assert (error.field, error.reason) == ("text", "LIMIT_EXCEEDED")
    assert "text 0 has 3 or more tokens" in error.message
