"""Attention weights of some layers and heads: equal to those of all, and no larger than they are."""

from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, HeadSelection, InvalidArgumentError, TextInputs

from scripts.local_server import serving
from tests.encoders.repository import SENTENCE
from tests.server.samples import SELF

TEXTS = ["life is short", "eat"]


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


WRONG = {
    "head_selection.layers: contains 9; the model has 0 to 2": HeadSelection(layers=[9]),
    "head_selection.heads: contains 4; the model has 0 to 3": HeadSelection(heads=[0, 4]),
    "head_selection.heads: names one of them twice": HeadSelection(heads=[1, 1]),
    "return_weights.layers": HeadSelection(layers=[-1]),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_the_model_lacks_is_refused(sentence_client: AttentionClient, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words.replace(".", r"\.")):
        sentence_client.attend_text(SENTENCE, "eat", return_weights=WRONG[words])


def test_a_single_module_has_heads_and_no_layers(artifacts: Path, tmp_path: Path) -> None:
    rows = np.ones((5, 4), np.float32)
    with serving(artifacts, tmp_path / "log") as server, AttentionClient(server.target) as client:
        every = client.attend(SELF, rows, return_weights=True).attention_weights
        chosen = client.attend(SELF, rows, return_weights=HeadSelection(heads=[1, 0])).attention_weights
        np.testing.assert_array_equal(chosen, np.asarray(every)[[1, 0]])
        with pytest.raises(InvalidArgumentError, match="is not a text encoder"):
            client.attend(SELF, rows, return_weights=HeadSelection(layers=[0]))
