"""A caller that has nothing else to do runs its own sequence, where nothing else runs or waits."""

import threading
from collections.abc import Iterator

import pytest

from server.engine.errors import RunFailedError
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.scheduler import Scheduler
from server.engine.values import Array
from tests.server.samples import work_of
from tests.server.seams import PATIENCE_SECONDS, Gate, Held, Recorder, tapped


class Threads:
    """Notes which thread each run is on."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, _: dict[str, Array]) -> None:
        self.names.append(threading.current_thread().name)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(Limits(), Recorder())
    yield scheduler
    scheduler.close()


def test_an_idle_scheduler_lets_the_caller_run(self_model: LoadedModel, scheduler: Scheduler) -> None:
    threads = Threads()
    future = scheduler.submit(work_of(tapped(self_model, threads), [(3, 3)]), run_here=True)
    assert future.done()
    assert threads.names == [threading.current_thread().name]


@pytest.mark.parametrize(("lengths", "run_here"), [([(3, 3)], False), ([(3, 3), (5, 5)], True)])
def test_the_scheduler_runs_what_is_not_one_sequence_of_a_waiting_caller(
    self_model: LoadedModel, scheduler: Scheduler, lengths: list[tuple[int, int]], run_here: bool
) -> None:
    threads = Threads()
    work = work_of(tapped(self_model, threads), lengths)
    scheduler.submit(work, run_here=run_here).result(PATIENCE_SECONDS)
    assert set(threads.names) == {"scheduler"}


def test_while_another_run_goes_on_the_caller_queues(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        work = work_of(held.model, [(3, 3)])
        future = held.scheduler.submit(work, run_here=True)
        assert not future.done()
        held.gate.open()
        assert future.result(PATIENCE_SECONDS).outputs


def test_what_comes_during_a_callers_run_waits_and_then_runs(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    gate = Gate()
    caller = threading.Thread(
        target=scheduler.submit,
        args=(work_of(tapped(self_model, gate), [(2, 2)]),),
        kwargs={"run_here": True},
    )
    caller.start()
    assert gate.entered.wait(PATIENCE_SECONDS)
    later = scheduler.submit(work_of(self_model, [(3, 3)]), run_here=True)
    assert not later.done()
    gate.open()
    assert later.result(PATIENCE_SECONDS).outputs
    caller.join(PATIENCE_SECONDS)


def test_a_callers_failing_run_resolves_its_future_and_the_next_one_runs(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    def fail(_: dict[str, Array]) -> None:
        raise RuntimeError("no")

    failed = scheduler.submit(work_of(tapped(self_model, fail), [(2, 2)]), run_here=True)
    assert isinstance(failed.exception(PATIENCE_SECONDS), RunFailedError)
    assert scheduler.submit(work_of(self_model, [(2, 2)]), run_here=True).done()


def test_closing_waits_for_a_callers_run(self_model: LoadedModel) -> None:
    scheduler, gate = Scheduler(Limits(), Recorder()), Gate()
    work = work_of(tapped(self_model, gate), [(2, 2)])
    caller = threading.Thread(target=scheduler.submit, args=(work,), kwargs={"run_here": True})
    caller.start()
    assert gate.entered.wait(PATIENCE_SECONDS)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    gate.open()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert work.future.result(PATIENCE_SECONDS).outputs
