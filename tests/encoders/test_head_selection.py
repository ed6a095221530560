"""Attention weights of some layers and heads: equal to those of all, and no larger than they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient, HeadSelection, InvalidArgumentError, TextInputs

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import HeadSelection as Selection
from attention_serving.server.engine.types import Ragged, Request
from tests.encoders.repository import SENTENCE
from tests.server.samples import SELF
from tests.server.seams import engine_of, outcome

TEXTS = ["life is short", "eat"]


@pytest.fixture(scope="module")
def bert(sentence_repository: Path) -> LoadedModel:
    return load_model(sentence_repository / SENTENCE / "1", Device(threads=1))


@pytest.fixture(scope="module")
def attention(artifacts: Path) -> LoadedModel:
    return load_model(artifacts / SELF / "1", Device(threads=1))


def asked(model: LoadedModel, length: int, **selection: Any) -> Request:
    ids = model.inputs[0].data_type == "int64"
    rows: Any = np.ones(length, np.int64)
    if not ids:
        rows = np.ones((length, int(model.inputs[0].axes[2])), np.float32)
    inputs = {model.inputs[0].name: Ragged(rows, (length,))}
    chosen = Selection(**selection) if selection else None
    return Request(inputs=inputs, return_weights=True, head_selection=chosen, return_tokens=True)


@pytest.mark.parametrize(("layers", "heads"), [((2, 0), ()), ((), (1,)), ((1,), (3, 0, 2))], ids=str)
def test_the_chosen_weights_equal_those_of_all(
    sentence_client: AttentionClient, layers: tuple[int, ...], heads: tuple[int, ...]
) -> None:
    every = sentence_client.attend_text(SENTENCE, TEXTS, return_weights=True)
    chosen = HeadSelection(layers=layers, heads=heads)
    found = sentence_client.attend_text(SENTENCE, TEXTS, return_weights=chosen)
    streamed = next(iter(sentence_client.attend_stream(SENTENCE, [TextInputs(TEXTS)], return_weights=chosen)))
    assert every.attention_weights is not None
    for result in (found, streamed):
        assert result.attention_weights is not None
        for own, all_weights in zip(result.attention_weights, every.attention_weights, strict=True):
            of_layers = all_weights[list(layers) or slice(None)]
            np.testing.assert_array_equal(own, of_layers[:, list(heads) or slice(None)])
    for vectors, same in zip(found.context_vectors, every.context_vectors, strict=True):
        np.testing.assert_array_equal(vectors, same)


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (HeadSelection(layers=[9]), "head_selection.layers: contains 9; the model has 0 to 2"),
        (HeadSelection(heads=[0, 4]), "head_selection.heads: contains 4; the model has 0 to 3"),
        (HeadSelection(heads=[1, 1]), "head_selection.heads: names one of them twice"),
        (HeadSelection(layers=[-1]), "return_weights.layers"),
        (HeadSelection(heads=["a"]), "return_weights.heads"),  # type: ignore[list-item]
    ],
    ids=["layer", "head", "twice", "negative", "text"],
)
def test_what_the_model_lacks_is_refused(
    sentence_client: AttentionClient, selection: HeadSelection, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words.replace(".", r"\.")):
        sentence_client.attend_text(SENTENCE, "eat", return_weights=selection)


def test_a_single_module_has_heads_and_no_layers(attention: LoadedModel) -> None:
    limits = Limits()
    engine = engine_of(limits)
    try:
        asking = (asked(attention, 5), asked(attention, 5, heads=(1, 0)))
        requests = [validate(request, attention, limits) for request in asking]
        for request in requests:
            engine.submit(request)
        weights = [outcome(request) for request in requests]
    finally:
        engine.close()
    every, chosen = (result.outputs[ATTENTION_WEIGHTS][0] for result in weights)
    np.testing.assert_array_equal(chosen, every[[1, 0]])
    with pytest.raises(InvalidRequestError, match="is not a text encoder"):
        validate(asked(attention, 5, layers=(0,)), attention, limits)
