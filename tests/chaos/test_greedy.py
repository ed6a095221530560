"""One greedy identity beside a modest one: what the modest one is answered within its deadline.

The greedy one offers more than the capacity, ten times what the modest one does. Then both offer the same as
one identity, which shows what the shares are good for.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import poisson
from benchmarks.processes import worker
from benchmarks.wire import METHODS, Api
from tests.chaos.figures import Figures
from tests.chaos.load import EXPIRED, OK, REFUSED, Job, Outcomes, capacity, open_loop
from tests.chaos.process import increased, metrics, server_of
from tests.chaos.requests import attend_request, random_rows
from tests.chaos.scale import Scale
from tests.server.security.samples import entry, write_tokens

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MODEL, ROWS, WIDTH = "multi-head-768x12", 128, 768
IN_FLIGHT = 32
# Of the capacity. Together they offer 1.65 of it.
MODEST_LOAD, TIMES = 0.15, 10
# The queue of the greedy one fills in this time.
SETTLE_SECONDS = 2.0


@pytest.fixture(scope="module")
def second_generator() -> Iterator[ProcessPoolExecutor]:
    """Another process that generates load."""
    with worker() as pool:
        yield pool


@pytest.mark.parametrize("deadline", [1.0, 5.0], ids=["deadline-1s", "deadline-5s"])
def test_a_modest_identity_keeps_its_answers(
    wide: Path,
    tmp_path: Path,
    generator: ProcessPoolExecutor,
    second_generator: ProcessPoolExecutor,
    scale: Scale,
    deadline: float,
) -> None:
    messages = tuple(attend_request(MODEL, random_rows(ROWS, WIDTH, seed)) for seed in range(4))
    names = ("modest", "greedy")
    file = write_tokens(
        tmp_path / "tokens.json", *(entry(name, f"{name}-token", "infer:*") for name in names)
    )
    with (
        Figures(
            f"greedy identity: {TIMES} x the load of a modest one, deadlines of {deadline:g} s"
        ) as figures,
        server_of(wide, tmp_path, f"--tokens={file}") as server,
    ):
        modest = Job(server.target, METHODS[Api.ATTENTION], messages, "modest-token")
        greedy = replace(modest, token="greedy-token")  # noqa: S106 - of this test's own server
        rate, _ = generator.submit(capacity, modest, IN_FLIGHT, scale.capacity_seconds).result()
        figures.note("capacity, answers/s", rate)
        loads = MODEST_LOAD * rate, TIMES * MODEST_LOAD * rate
        own, other = (poisson(load, scale.overload_seconds, seed=1) for load in loads)

        def together(beside: Job) -> tuple[Outcomes, Outcomes]:
            second = second_generator.submit(open_loop, beside, other, deadline)
            return generator.submit(open_loop, modest, own, deadline).result(), second.result()

        counters = metrics(server)
        quiet, noisy = together(greedy)
        refused = increased(counters, metrics(server), "attention_refused")
        same, _ = together(modest)
        figures.note("offered, calls/s", " and ".join(f"{load:.0f}" for load in loads))
        figures.at_least("modest one answered in time, share", answered(quiet, deadline), 0.95)
        figures.note("modest one, calls by status", quiet.counts())
        figures.note("modest one, answers p50, s", quiet.latency(OK, 50))
        figures.note("modest one, answers p99, s", quiet.latency(OK, 99))
        figures.note("greedy one answered in time, share", answered(noisy, deadline))
        figures.note("greedy one, calls by status", noisy.counts())
        figures.note("greedy one, refused by reason", noisy.refusals())
        figures.note("both as one identity: modest part answered, share", answered(same, deadline))
        for name, count in refused.items():
            figures.note(name, count)
        figures.among("statuses", noisy.counts(), {OK, REFUSED, EXPIRED})


def answered(outcomes: Outcomes, deadline: float) -> float:
    """The share of the calls that were answered within their deadline, after the queue has filled."""
    settled = outcomes.due >= SETTLE_SECONDS
    good = (outcomes.codes == OK) & (outcomes.seconds <= deadline)
    return float(np.mean(good[settled]))
