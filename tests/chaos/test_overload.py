"""Load above the capacity, with deadlines: what is answered in time, what is refused, how fast, and for whom.

Capacity is measured before and after: closed loop, with the same generator process and the same messages.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import poisson
from benchmarks.processes import worker
from tests.chaos.figures import Figures, scaled
from tests.chaos.load import EXPIRED, OK, REFUSED, Job, Outcomes, capacity, open_loop
from tests.chaos.process import (
    MIB,
    MODEL,
    attend_message,
    increased,
    metrics,
    random_rows,
    readings,
    reset_peak,
    server_of,
)
from tests.server.security.samples import entry, write_tokens

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MESSAGES = tuple(attend_message(MODEL, random_rows(128, seed=seed)).SerializeToString() for seed in range(4))
CAPACITY_SECONDS, OVERLOAD_SECONDS, RECOVERY_SECONDS = scaled(4, 10), scaled(10, 60), 3.0
MAX_MEMORY_MIB = 1024
# Messages that the core has received and not delivered.
SLACK_MIB = 256
# Loads of two identities, as shares of the capacity: together more than the capacity.
MODEST, GREEDY = 0.15, 1.5
# The queue of the greedy one fills in this time.
SETTLE_SECONDS = 2.0


@pytest.mark.parametrize("deadline", [1.0, 10.0], ids=["deadline-1s", "deadline-10s"])
@pytest.mark.parametrize("factor", [1.2, 3.0], ids=["1.2x", "3x"])
def test_goodput(
    wide: Path, tmp_path: Path, generator: ProcessPoolExecutor, factor: float, deadline: float
) -> None:
    options = ("--max-in-flight-bytes=512MiB", f"--max-memory={MAX_MEMORY_MIB}MiB")
    seconds = OVERLOAD_SECONDS
    with (
        Figures(f"overload: {factor} x capacity, deadlines of {deadline:g} s") as figures,
        server_of(wide, tmp_path, *options) as server,
    ):
        job = Job(server.target, MESSAGES)
        rate = generator.submit(capacity, job, CAPACITY_SECONDS).result()
        idle, counters = reset_peak(server.process.pid), metrics(server)
        # After the overload, calls arrive evenly at the capacity.
        recovery = seconds * 1e9 + np.arange(int(rate * RECOVERY_SECONDS)) / rate * 1e9
        due = np.concatenate([poisson(factor * rate, seconds, seed=1), recovery.astype(np.int64)])
        outcomes = generator.submit(open_loop, job, due, deadline).result()
        # The mean of both is the capacity that the machine had in between.
        later = generator.submit(capacity, job, CAPACITY_SECONDS).result()
        figures.note("capacity before and after, answers/s", f"{rate:.0f} and {later:.0f}")
        report(figures, outcomes, (rate + later) / 2, deadline)
        figures.note("resident before, MiB", idle / MIB)
        peak = readings(server.process.pid).peak
        figures.at_most("resident peak, MiB", peak / MIB, idle / MIB + MAX_MEMORY_MIB + SLACK_MIB)
        for name, count in increased(counters, metrics(server), "attention_refused").items():
            figures.note(name, count)


def report(figures: Figures, outcomes: Outcomes, rate: float, deadline: float) -> None:
    """Adds what happened to the calls, beside the capacity."""
    seconds = OVERLOAD_SECONDS
    # The queue fills in the first second or deadline; what is measured is the state after it.
    since = min(deadline, seconds / 2)
    goodput = outcomes.answered(since, seconds, deadline) / (seconds - since) / rate
    figures.note("calls offered", int((outcomes.due < seconds).sum()))
    figures.among("calls by status, with recovery", outcomes.counts(), {OK, REFUSED, EXPIRED})
    figures.note("refused by reason", outcomes.refusals())
    figures.at_least("goodput, share of capacity", goodput, 0.9)
    for percent in (50, 99):
        figures.note(f"answers p{percent}, s", outcomes.latency(OK, percent))
    figures.at_most("refusals p99, s", outcomes.latency(REFUSED, 99), 0.05)
    refused = outcomes.codes == REFUSED
    figures.equal("refusals without RetryInfo", int((refused & ~outcomes.retry_after).sum()), 0)
    share = answered(outcomes, deadline, since=seconds + 1)
    figures.at_least("answered in time from a second after the overload, share", share, 0.9)


@pytest.fixture(scope="module")
def second_generator() -> Iterator[ProcessPoolExecutor]:
    """Another process that generates load."""
    with worker() as pool:
        yield pool


@pytest.mark.parametrize("deadline", [1.0, 5.0], ids=["deadline-1s", "deadline-5s"])
def test_a_modest_identity_keeps_its_answers_beside_a_greedy_one(
    wide: Path,
    tmp_path: Path,
    generator: ProcessPoolExecutor,
    second_generator: ProcessPoolExecutor,
    deadline: float,
) -> None:
    names = ("modest", "greedy")
    file = write_tokens(
        tmp_path / "tokens.json", *(entry(name, f"{name}-token", "infer:*") for name in names)
    )
    with (
        Figures(f"greedy identity: 10 x the load of a modest one, deadlines of {deadline:g} s") as figures,
        server_of(wide, tmp_path, f"--tokens={file}") as server,
    ):
        modest = Job(server.target, MESSAGES, "modest-token")
        greedy = replace(modest, token="greedy-token")  # noqa: S106 - of this test's own server
        rate = generator.submit(capacity, modest, CAPACITY_SECONDS).result()
        figures.note("capacity, answers/s", rate)
        own, other = (poisson(share * rate, OVERLOAD_SECONDS, seed=1) for share in (MODEST, GREEDY))

        def together(beside: Job) -> tuple[Outcomes, Outcomes]:
            second = second_generator.submit(open_loop, beside, other, deadline)
            return generator.submit(open_loop, modest, own, deadline).result(), second.result()

        quiet, noisy = together(greedy)
        same, _ = together(modest)  # shows what the shares are good for
        figures.at_least("modest one answered in time, share", answered(quiet, deadline), 0.95)
        figures.note("modest one, calls by status", quiet.counts())
        for percent in (50, 99):
            figures.note(f"modest one, answers p{percent}, s", quiet.latency(OK, percent))
        figures.note("greedy one answered in time, share", answered(noisy, deadline))
        figures.among("greedy one, calls by status", noisy.counts(), {OK, REFUSED, EXPIRED})
        figures.note("greedy one, refused by reason", noisy.refusals())
        figures.note("both as one identity: modest part answered, share", answered(same, deadline))


def answered(outcomes: Outcomes, deadline: float, since: float = SETTLE_SECONDS) -> float:
    """The share of the calls due from some moment that were answered within their deadline."""
    good = (outcomes.codes == OK) & (outcomes.seconds <= deadline)
    return float(np.mean(good[outcomes.due >= since]))
