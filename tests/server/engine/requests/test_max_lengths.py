"""A model that states its largest lengths: longer requests are refused, and calibration stays below."""

import dataclasses

import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.types import Array, Request
from tests.server.samples import CROSS, TEXT, request_of
from tests.server.seams import tapped


def bounded(model: LoadedModel, **max_lengths: int) -> LoadedModel:
    manifest = model.manifest.model_copy(update={"max_lengths": max_lengths})
    return dataclasses.replace(model, manifest=manifest)


def test_a_sequence_of_the_largest_length_is_accepted(cross_model: LoadedModel) -> None:
    model = bounded(cross_model, query_length=4, key_length=6)
    validate(request_of(model, [(4, 6), (1, 1)]), model, Limits())


@pytest.mark.parametrize(("lengths", "field"), [((5, 6), "query"), ((4, 7), "key")], ids=["query", "key"])
def test_a_longer_sequence_is_refused_with_the_limit(
    cross_model: LoadedModel, lengths: tuple[int, int], field: str
) -> None:
    model = bounded(cross_model, query_length=4, key_length=6)
    limit = {"query": 4, "key": 6}[field]
    with pytest.raises(LimitExceededError, match=f"this model takes at most {limit}") as refusal:
        validate(request_of(model, [(1, 1), lengths]), model, Limits())
    assert refusal.value.field == field
    assert refusal.value.reason == "LIMIT_EXCEEDED"


def test_a_text_that_is_too_long_is_refused_by_its_field(models: dict[str, LoadedModel]) -> None:
    model = bounded(models[TEXT], query_length=2)
    with pytest.raises(LimitExceededError, match="text 0 has 3 or more tokens") as refusal:
        validate(Request(texts=("eat dessert first",)), model, Limits())
    assert refusal.value.field == "text"


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_calibration_runs_no_longer_sequence(models: dict[str, LoadedModel], kind: GraphKind) -> None:
    model = bounded(models[CROSS], query_length=20, key_length=30)
    seen: set[int] = set()

    def tap(inputs: dict[str, Array]) -> None:
        seen.add(inputs["query"].shape[1])
        seen.add(inputs["key"].shape[1])

    calibrated(
        dataclasses.replace(model, sessions={**model.sessions, kind: tapped(model, tap).sessions[kind]})
    )
    assert max(seen) == 20
