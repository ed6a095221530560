"""Callers share the runs, whatever each of them has queued; and one caller alone notices nothing."""

import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.run.cost import RunCost
from attention_serving.server.engine.schedule import fair_shares
from attention_serving.server.engine.schedule.fair_shares import Caller, FairShares
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import Lengths, validated_of
from tests.server.seams import Held, costing, take

GREEDY, MODEST, HEAVY = Caller("greedy"), Caller("modest"), Caller("heavy", 3.0)
ALONE = Limits(max_batch_sequences=1)


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    """A model whose sequences cost what their rows do, and whose runs do not gain by more of them."""
    return costing(self_model, RunCost(call=0, row=1, pair=0))


def request_of(model: LoadedModel, caller: Caller, lengths: Lengths = ((2, 2),)) -> ValidatedRequest:
    request = validated_of(model, lengths)
    request.caller = caller
    return request


def served(queue: Queue, count: int) -> list[str]:
    """Names of the callers of the next runs."""
    names = []
    for _ in range(count):
        batch, _ = take(queue)
        assert batch is not None
        names.append(batch.sequences[0].request.caller.name)
    return names


def test_a_modest_caller_does_not_wait_for_the_queue_of_a_greedy_one(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    for _ in range(100):
        queue.add(request_of(model, GREEDY), 0)
    assert served(queue, 3) == ["greedy"] * 3
    queue.add(request_of(model, MODEST), 0)
    assert "modest" in served(queue, 2)


def test_two_callers_take_turns_by_what_they_ran(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    for _ in range(40):
        queue.add(request_of(model, GREEDY, [(6, 6)]), 0)
        queue.add(request_of(model, MODEST, [(2, 2)]), 0)
    # A run of the one costs three times a run of the other.
    assert Counter(served(queue, 40))["greedy"] in (9, 10, 11)


def test_a_weight_is_a_share(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    for _ in range(40):
        queue.add(request_of(model, HEAVY), 0)
        queue.add(request_of(model, MODEST), 0)
    assert Counter(served(queue, 40))["heavy"] in (29, 30, 31)


def test_a_share_that_was_not_used_is_not_saved_up(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    for _ in range(40):
        queue.add(request_of(model, GREEDY), 0)
    queue.add(request_of(model, MODEST), 0)
    served(queue, 20)
    for _ in range(20):
        queue.add(request_of(model, MODEST), 0)
    assert Counter(served(queue, 20))["greedy"] in (9, 10, 11)


def test_what_a_caller_ran_is_not_forgotten_while_it_has_nothing_queued(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    for _ in range(100):
        queue.add(request_of(model, MODEST), 0)
    names = []
    for _ in range(10):  # a request from time to time, which costs ten times as much
        queue.add(request_of(model, GREEDY, [(20, 20)]), 0)
        names += served(queue, 8)
    # Of 80 runs, 7 of ten times the cost are half of the work; all 10 would be more than that.
    assert Counter(names)["greedy"] in (6, 7, 8)


def test_the_requests_of_one_caller_take_turns_as_if_it_were_alone(model: LoadedModel) -> None:
    def order(*others: ValidatedRequest) -> list[tuple[int, int]]:
        queue = Queue(ALONE)
        queue.add(request_of(model, MODEST, [(5, 5)] * 9), 0)
        for other in others:
            queue.add(other, 0)
        queue.add(request_of(model, MODEST, [(3, 3)]), 0)
        found = []
        while queue:
            batch, _ = take(queue)
            assert batch is not None
            found += [own.lengths for own in batch.sequences if own.request.caller == MODEST]
        return found

    assert order(*(request_of(model, GREEDY) for _ in range(30))) == order()


def test_sequences_of_several_callers_run_together(self_model: LoadedModel) -> None:
    queue = Queue(Limits(max_batch_sequences=8))
    model = costing(self_model, RunCost(call=1, row=0, pair=0))
    for caller in (GREEDY, MODEST, HEAVY):
        for _ in range(2):
            queue.add(request_of(model, caller), 0)
    batch, _ = take(queue)
    assert batch is not None
    assert Counter(own.request.caller.name for own in batch) == {"greedy": 2, "modest": 2, "heavy": 2}
    assert not queue
    assert (queue.sequences, queue.work) == (0, 0.0)


def test_work_before_a_request_leaves_out_what_others_run_later(model: LoadedModel) -> None:
    seconds = request_of(model, MODEST).sequences[0].shape.seconds
    queue = Queue(ALONE)
    for _ in range(100):
        queue.add(request_of(model, GREEDY), 0)
    assert queue.work_before(seconds, GREEDY) == pytest.approx(100 * seconds)
    assert queue.work_before(seconds, MODEST) == pytest.approx(seconds)
    queue.add(request_of(model, MODEST), 0)
    # Its own run before, and two of the greedy one beside its two.
    assert queue.work_before(seconds, MODEST) == pytest.approx(3 * seconds)
    assert queue.work_before(seconds, HEAVY) == pytest.approx(2 * seconds / 3)


def test_a_released_request_leaves_its_caller(model: LoadedModel) -> None:
    queue = Queue(ALONE)
    large = request_of(model, GREEDY, [(2, 2)] * 50)
    queue.add(large, 0)
    queue.add(request_of(model, MODEST), 0)
    assert queue.release(large)
    seconds = request_of(model, MODEST).sequences[0].shape.seconds
    assert queue.work_before(seconds, GREEDY) == pytest.approx(seconds)
    assert served(queue, 1) == ["modest"]
    assert not queue


@pytest.mark.parametrize("callers", [[GREEDY], [GREEDY, MODEST]], ids=["one", "two"])
def test_a_cleared_queue_begins_anew(model: LoadedModel, callers: list[Caller]) -> None:
    queue = Queue(ALONE)
    for caller in callers:
        queue.add(request_of(model, caller), 0)
    assert len(queue.clear()) == len(callers)
    assert [queue.work_before(1.0, caller) for caller in callers] == [0.0] * len(callers)


def test_idle_callers_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "MAX_IDLE", 10)
    shares = FairShares()
    busy = shares.of(GREEDY)
    busy.sequences = 1
    for number in range(100):
        shares.of(Caller(f"caller-{number}"))
    assert len(shares._shares) <= 10
    assert shares.of(GREEDY) is busy


CALLERS = [Caller(), GREEDY, MODEST, HEAVY]


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9)),
            st.just("run"),
            st.just("cancel"),
        ),
        max_size=60,
    ),
    batch=st.sampled_from([1, 3, 64]),
)
def test_every_sequence_of_every_caller_runs_once(
    self_model: LoadedModel, steps: Sequence[tuple[int, int, int] | str], batch: int
) -> None:
    model = costing(self_model, RunCost(call=1, row=0.1, pair=0))
    queue = Queue(Limits(max_batch_sequences=batch))
    live: dict[ValidatedRequest, list[tuple[int, int]]] = {}
    ran: Counter[tuple[int, int]] = Counter()
    expected: Counter[tuple[int, int]] = Counter()

    def run() -> None:
        taken, expired = take(queue)
        assert not expired
        for own in taken or ():
            ran[own.request.number, own.index] += 1

    for step in steps:
        if isinstance(step, tuple):
            caller, count, length = step
            request = request_of(model, CALLERS[caller], [(length, length)] * count)
            queue.add(request, 0)
            live[request] = [(request.number, index) for index in range(count)]
            expected.update(live[request])
        elif step == "run":
            run()
        elif live:
            request, numbers = live.popitem()
            assert queue.release(request)
            request.end(None)
            for number in numbers:
                del expected[number], ran[number]
    while queue:
        run()
    assert ran == expected
    assert (queue.sequences, queue.work) == (0, 0.0)
    assert take(queue) == (None, [])


def test_a_deadline_is_predicted_for_the_caller(self_model: LoadedModel) -> None:
    with Held(self_model) as held:  # each run takes a second, of which one is under way
        for _ in range(50):
            held.engine.submit(request_of(held.model, GREEDY))
        deadline = time.monotonic() + 10
        held.engine.check_deadline(deadline, MODEST)
        with pytest.raises(OverloadedError):
            held.engine.check_deadline(deadline, GREEDY)
        late = request_of(held.model, GREEDY)
        late.deadline = deadline
        with pytest.raises(OverloadedError):
            held.engine.submit(late)
        early = request_of(held.model, MODEST)
        early.deadline = deadline
        held.engine.submit(early)
