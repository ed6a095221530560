"""No work waits while a slot is free and the memory suffices, whoever submits and whoever runs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.fair_shares import ANYONE, Caller
from attention_serving.server.engine.schedule.queue import Queue
from attention_serving.server.engine.types import RunCost
from tests.server.samples import validated_of
from tests.server.seams import SAME_FOR_ALL, costing

SLOTS = 2
SHORT, LONG = 2, 40
INLINE_SECONDS = 1.5
CALLERS = [ANYONE, Caller("other"), Caller("heavy", 3.0)]


class SlotsMachine(RuleBasedStateMachine):
    """Two threads, and one that submits and runs inline, as the scheduler and a transport do.

    Between two rules every thread that is needed may be at any point. The invariants hold at each of them.
    """

    def __init__(self, models: Sequence[LoadedModel], max_run_bytes: int) -> None:
        super().__init__()
        self.models = models
        self.max_run_bytes = max_run_bytes
        self.queue = Queue(Limits(max_run_bytes=max_run_bytes, max_batch_sequences=3), SLOTS)
        self.requests: list[ValidatedRequest] = []
        self.on_threads: list[Batch] = []
        self.inline: Batch | None = None
        # The inline thread has submitted, runs a batch inline or has ended that, and will ask next.
        self.inline_will_ask = False
        self.started: set[tuple[int, int]] = set()
        self.submitted = 0

    @rule(
        model=st.integers(0, 1),
        length=st.sampled_from([SHORT, LONG]),
        count=st.integers(1, 3),
        inline=st.booleans(),
        caller=st.sampled_from(CALLERS),
    )
    def submit(self, model: int, length: int, count: int, inline: bool, caller: Caller) -> None:
        inline = inline and self.inline is None
        request = validated_of(self.models[model], [(length, length)] * count)
        request.caller = caller
        self.queue.add(request, 0.0, inline=inline)
        self.requests.append(request)
        self.inline_will_ask = self.inline_will_ask or inline
        self.submitted += count

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        assert self.queue.release(request)
        request.end(None)

    @precondition(lambda self: self.inline is None)
    @rule()
    def ask_inline(self) -> None:
        self.inline_will_ask = False
        self.inline, expired = self.queue.next_inline(0.0, INLINE_SECONDS)
        assert not expired
        self.inline_will_ask = self.inline is not None
        self._note(self.inline)

    @precondition(lambda self: self.queue.needs_thread)
    @rule()
    def ask_on_a_thread(self) -> None:
        batch, expired = self.queue.next(0.0)
        assert not expired
        if batch:
            self.on_threads.append(batch)
            self._note(batch)

    @precondition(lambda self: self.on_threads)
    @rule(data=st.data())
    def end_on_a_thread(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.on_threads))
        self.on_threads.remove(batch)
        self.queue.ended(batch, 0.0)

    @precondition(lambda self: self.inline is not None)
    @rule()
    def end_inline(self) -> None:
        assert self.inline is not None
        self.queue.ended(self.inline, 0.0)
        self.inline, self.inline_will_ask = None, True

    def _note(self, batch: Batch | None) -> None:
        for queued in batch or ():
            assert (queued.request.number, queued.index) not in self.started
            self.started.add((queued.request.number, queued.index))

    @invariant()
    def nothing_waits_while_a_slot_is_free(self) -> None:
        if not self.queue or len(self.queue.running) >= SLOTS or self.inline_will_ask:
            return
        free = self.max_run_bytes - sum(self.queue.running.values())
        first = self.queue._next_bucket()[0]
        if first.shape.run_bytes <= free or not self.queue.running:
            assert self.queue.needs_thread

    @invariant()
    def the_memory_of_runs_is_bounded(self) -> None:
        running = self.queue.running
        assert len(running) <= SLOTS
        assert len(running) == 1 or sum(running.values()) <= self.max_run_bytes

    def teardown(self) -> None:
        """Without further submissions, everything runs, and the queue completes."""
        self.queue.close()
        for _ in range(4 * self.submitted + SLOTS):
            if self.inline:
                self.end_inline()
            if self.queue.needs_thread and not self.queue.is_complete:
                self.ask_on_a_thread()
            for batch in self.on_threads[:1]:
                self.on_threads.remove(batch)
                self.queue.ended(batch, 0.0)
        assert self.queue.is_complete
        assert (self.queue.sequences, self.queue.work) == (0, 0.0)


@pytest.mark.parametrize("runs", [1, 2, 100], ids=["one long run", "two", "many"])
def test_no_work_waits_while_a_slot_is_free(self_model: LoadedModel, runs: int) -> None:
    mixed = RunCost(call=1.0, row=3e-4, pair=3e-4)
    models = [costing(self_model, SAME_FOR_ALL), costing(self_model, mixed)]
    long_run = self_model.run_bytes(GraphKind.PLAIN, 1, LONG, LONG)
    machine: Any = partial(SlotsMachine, models, runs * long_run)  # the stubs ask for a class
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )
