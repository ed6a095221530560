"""The end of a request: one outcome, of which whoever waits is told once; and memory that is freed."""

import pytest

from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import EngineError, OverloadedError, RunFailedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Result
from tests.server.samples import validated_of
from tests.server.seams import MESSAGE, wait


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "outcome", [Result({}), RunFailedError(MESSAGE), None], ids=["result", "error", "withdrawn"]
)
def test_whoever_waits_is_told_once_and_takes_the_outcome_once(
    self_model: LoadedModel,
    outcome: Result | EngineError | None,
    order: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = validated_of(self_model, [(2, 2)])
    told: list[object] = []

    def take() -> None:
        try:
            told.append(request.result())
        except EngineError as error:
            told.append(error)
        raise RuntimeError(MESSAGE)  # others must not notice

    with pytest.raises(ValueError, match="has not ended"):
        request.result()
    if order == "before":
        wait(request, take)
        assert told == []
    request.end(outcome)
    if order == "after":
        wait(request, take)
    assert told == ([] if outcome is None else [outcome])
    assert caplog.text.count("callback failed") == len(told)
    with pytest.raises(ValueError, match="was taken"):
        request.result()


def test_the_limit_is_kept_unless_a_reservation_is_alone_and_released_bytes_are_free() -> None:
    budget = MemoryBudget(10)
    first, second = budget.reserve(4), budget.reserve(6)
    with pytest.raises(OverloadedError, match="would hold 11 bytes; the limit is 10; try again later"):
        budget.reserve(1)
    for _ in range(2):
        first.release()
    assert budget.held_bytes == 6
    third = budget.reserve(3)
    with pytest.raises(OverloadedError):
        third.add(2)
    second.release()
    third.release()
    assert budget.held_bytes == 0
    alone = budget.reserve(8)
    alone.add(8)  # beyond the limit, which is granted if nothing else is reserved
    assert budget.held_bytes == 16
    with pytest.raises(OverloadedError):
        budget.reserve(1)
