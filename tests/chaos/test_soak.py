"""A soak: every kind of caller at once, good and bad, while threads, descriptors and memory stay flat."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.chaos import misuse
from tests.chaos.callers import Actor, Tally
from tests.chaos.figures import MIB, Figures, mib
from tests.chaos.process import (
    Readings,
    gauges_in_use,
    is_serving,
    readings,
    server_of,
    supported,
    wait_until,
)
from tests.chaos.scale import Scale
from tests.chaos.traffic import Exchange, pool
from tests.chaos.use import good_calls, streams

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
LONG_ROWS = 2048
LONG_PAUSE_SECONDS = 1.0
WARM_SHARE = 0.25
SAMPLES = 20
# What gRPC's core opens once for its threads, and keeps.
SPARE_DESCRIPTORS = 8
GOOD = {"OK", "RESOURCE_EXHAUSTED"}
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNIMPLEMENTED"}


@pytest.fixture(scope="module")
def exchanges() -> list[Exchange]:
    """Requests with the answers of eager PyTorch."""
    return pool(LONG_ROWS)


def test_soak(models: Path, tmp_path: Path, scale: Scale, exchanges: list[Exchange]) -> None:
    """All callers mixed: every answer is right, and nothing grows."""
    options = supported(message_timeout_seconds=5)
    tallies = {name: Tally() for name in ("good", "streams", "long", "hostile", "cancelled", "deadlines")}
    with (
        Figures(f"soak: {scale.soak_seconds:g} s of everything mixed") as figures,
        server_of(models, tmp_path, *options) as server,
    ):
        idle = readings(server.process.pid)
        with ExitStack() as stack:
            actors = start(server, exchanges, tallies)
            stack.callback(stop, actors)
            time.sleep(scale.soak_seconds * WARM_SHARE)
            warm = sample(server)
            time.sleep(scale.soak_seconds * (1 - WARM_SHARE))
            late = sample(server)
        figures.equal("callers that broke", "; ".join(actor.error for actor in actors if actor.error), "")
        report(figures, tallies)
        flat(figures, idle, warm, late)
        empty(figures, server, idle)


def start(server: ServerProcess, exchanges: list[Exchange], tallies: dict[str, Tally]) -> list[Actor]:
    """Starts every caller."""
    short = [exchange for exchange in exchanges if exchange.rows < LONG_ROWS]
    long = [exchange for exchange in exchanges if exchange.rows == LONG_ROWS]
    target, rng = server.target, random.Random(0)  # noqa: S311 - not for secrets
    steps: list[Callable[[], None]] = [
        *(good_calls(target, short, tallies["good"], rng) for _ in range(3)),
        streams(target, short, tallies["streams"], rng),
        good_calls(target, long, tallies["long"], rng, pause=LONG_PAUSE_SECONDS),
        misuse.hostile(target, tallies["hostile"], rng),
        misuse.cancelled(target, tallies["cancelled"], rng),
        misuse.short_deadlines(target, tallies["deadlines"], rng),
        misuse.slow_readers(server.port, rng),
        misuse.half_senders(server.port, rng),
        misuse.visitors(server.port, target, rng),
    ]
    return [Actor(repeated(step)) for step in steps]


def repeated(step: Callable[[], None]) -> Callable[[], bool]:
    """The step of an actor that goes on until it is stopped."""

    def run() -> bool:
        step()
        return True

    return run


def stop(actors: list[Actor]) -> None:
    """Stops every caller and waits for its last step."""
    for actor in actors:
        actor.stop()
    for actor in actors:
        actor.join(60)


def sample(server: ServerProcess) -> Readings:
    """The largest of some readings under load, which vary with the calls of the moment."""
    found = []
    for _ in range(SAMPLES):
        found.append(readings(server.process.pid))
        threading.Event().wait(0.1)
    return Readings(*(max(values) for values in zip(*(vars(one).values() for one in found), strict=True)))


def report(figures: Figures, tallies: dict[str, Tally]) -> None:
    """Adds what the callers saw."""
    allowed = {
        "hostile": REFUSALS | {"OK"},
        "cancelled": {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"},
        "deadlines": {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"},
    }
    for name, tally in tallies.items():
        figures.among(f"calls: {name}", dict(tally.statuses), allowed.get(name, GOOD))
        figures.at_least(f"calls answered: {name}", tally.statuses.total(), 1)
    answered = sum(tallies[name].statuses["OK"] for name in ("good", "streams", "long"))
    refused = sum(tallies[name].statuses.total() for name in ("good", "streams", "long")) - answered
    figures.at_most("good calls refused, share", refused / max(1, answered + refused), 0.01)
    figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)
    failed = sum((tally.details for tally in tallies.values()), start=Counter[str]())
    unexpected = {text: count for text, count in failed.items() if text.startswith(("INTERNAL", "UNKNOWN"))}
    figures.equal("INTERNAL or UNKNOWN", unexpected, {})


def flat(figures: Figures, idle: Readings, warm: Readings, late: Readings) -> None:
    """Adds what the process held after the warm-up and at the end, both under load."""
    figures.note("idle: threads, descriptors, resident MiB", _three(idle))
    figures.note("warm: threads, descriptors, resident MiB", _three(warm))
    figures.note("late: threads, descriptors, resident MiB", _three(late))
    figures.at_most("threads, late above warm", late.threads - warm.threads, 4)
    figures.at_most("descriptors, late above warm", late.descriptors - warm.descriptors, 16)
    figures.at_most("resident, late above warm, MiB", mib(late.resident - warm.resident), 64)


def _three(found: Readings) -> str:
    return f"{found.threads}, {found.descriptors}, {found.resident // MIB}"


def empty(figures: Figures, server: ServerProcess, idle: Readings) -> None:
    """Adds whether the server lives and holds nothing once every caller has left."""
    figures.equal("SERVING at the end", is_serving(server.target), expected=True)

    def gauges() -> dict[str, int]:
        return {name: int(value) for name, value in gauges_in_use(server).items() if value}

    wait_until(lambda: not gauges(), 15)
    figures.at_least("gauges of what requests hold", len(gauges_in_use(server)), 1)
    figures.equal("of these not 0 at the end", gauges(), {})
    wait_until(lambda: readings(server.process.pid).descriptors <= idle.descriptors + 4, 15)
    last = readings(server.process.pid)
    figures.note("end: threads, descriptors, resident MiB", _three(last))
    figures.at_most("descriptors, end above idle", last.descriptors - idle.descriptors, SPARE_DESCRIPTORS)
    with AttentionClient(server.target) as client:
        figures.at_least("models served at the end", len(client.models()), 1)
