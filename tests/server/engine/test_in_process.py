"""The engine in the caller's own process: load, submit, close."""

from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.in_process import InProcessModel
from tests.server.samples import SELF
from tests.support.eager import Array

WIDTH = 4


@pytest.fixture(scope="module")
def model(artifacts: Path) -> InProcessModel:
    return InProcessModel.load(artifacts, SELF, parallel_runs=2)


def rows(lengths: list[int], width: int = WIDTH) -> list[Array]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.standard_normal((length, width), np.float32) for length in lengths]


@pytest.mark.parametrize("sequences", [[], [rows([2])[0], rows([2], width=3)[0]]], ids=["none", "mixed"])
def test_sequences_that_cannot_be_joined_are_refused(model: InProcessModel, sequences: list[Array]) -> None:
    with pytest.raises(InvalidRequestError, match="query"):
        model.submit({"query": sequences}).result()


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
