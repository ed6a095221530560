"""The engine in the caller's own process: load, submit, close."""

from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.server.engine.errors import InvalidRequestError, ModelNotReadyError
from attention_serving.server.engine.in_process import InProcessModel
from tests.server.samples import SELF, TEXT, eager_module
from tests.support import eager
from tests.support.eager import Array

WIDTH = 4


@pytest.fixture(scope="module")
def model(artifacts: Path) -> InProcessModel:
    return InProcessModel.load(artifacts, SELF, parallel_runs=2)


def rows(lengths: list[int], width: int = WIDTH) -> list[Array]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.standard_normal((length, width), np.float32) for length in lengths]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_each_sequence_gets_its_own_result(model: InProcessModel, lengths: list[int]) -> None:
    sequences = rows(lengths)
    result = model.submit({"query": sequences}, return_weights=True).result()
    outputs = zip(result.outputs["context_vectors"], result.outputs["attention_weights"], strict=True)
    for sequence, (context, weights) in zip(sequences, outputs, strict=True):
        expected, expected_weights = eager.attend(eager_module(SELF), sequence)
        eager.assert_parity(context, expected)
        eager.assert_parity(weights, expected_weights)


def test_equal_requests_give_bitwise_equal_results(model: InProcessModel) -> None:
    sequences = rows([3, 1, 4, 1, 5, 9, 2, 6])
    first, second = (model.submit({"query": sequences}).result() for _ in range(2))
    for one, other in zip(first.outputs["context_vectors"], second.outputs["context_vectors"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_texts_replace_inputs(artifacts: Path) -> None:
    model = InProcessModel.load(artifacts, TEXT)
    assert (model.name, model.version, model.takes_text) == (TEXT, "1", True)
    result = model.submit(texts=["Life is short", "eat"]).result()
    assert [len(vectors) for vectors in result.outputs["context_vectors"]] == [3, 1]
    model.close()


def test_a_bad_request_is_refused_and_the_next_one_is_answered(model: InProcessModel) -> None:
    with pytest.raises(InvalidRequestError, match="rows are 3 wide"):
        model.submit({"query": rows([2], width=3)}).result()
    assert len(model.submit({"query": rows([2])}).result().outputs["context_vectors"][0]) == 2


@pytest.mark.parametrize("sequences", [[], [rows([2])[0], rows([2], width=3)[0]]], ids=["none", "mixed"])
def test_sequences_that_cannot_be_joined_are_refused(model: InProcessModel, sequences: list[Array]) -> None:
    with pytest.raises(InvalidRequestError, match="query"):
        model.submit({"query": sequences}).result()


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    with pytest.raises(ModelNotReadyError, match=r"manifest\.json"):
        InProcessModel.load(tmp_path, "model")


def test_closing_cancels_what_has_not_started(artifacts: Path) -> None:
    model = InProcessModel.load(artifacts, SELF, parallel_runs=1)
    futures = [model.submit({"query": rows([500] * 8)}) for _ in range(50)]
    model.close()
    assert all(future.done() for future in futures)
    assert not futures[0].cancelled()
    with pytest.raises(CancelledError):
        futures[-1].result()
    with pytest.raises(RuntimeError):
        model.submit({"query": rows([1])})
