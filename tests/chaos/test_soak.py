"""A soak: every kind of caller at once, good and bad, while threads, descriptors and memory stay flat."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import repeat
from pathlib import Path
from typing import Any

import grpc
import pytest
from attention_client import AttentionClient, AttentionClientError

from benchmarks.processes import process_tree
from scripts.local_server import ServerProcess
from tests.chaos import callers
from tests.chaos.callers import CALL_SECONDS, Actor, Question, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import (
    MIB,
    MODEL,
    OWN_CONNECTION,
    Readings,
    attend_message,
    gauges_in_use,
    random_rows,
    readings,
    server_of,
    wait_until,
)
from tests.server.http.clients import ask, http_port
from tests.support.contradictions import good_and_changed
from tests.support.mutations import ATTEND

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
SOAK_SECONDS, WARM_SHARE, SAMPLES = scaled(60, 600), 0.25, 20
# What gRPC's core opens once for its threads, and keeps.
SPARE_DESCRIPTORS = 8
ALLOWED = {
    **{name: {"OK", "RESOURCE_EXHAUSTED"} for name in ("good", "streams")},
    "hostile": {
        *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
        *("FAILED_PRECONDITION", "200", "400", "404", "413", "415", "422", "429", "503", "504"),
    },
    "impatient": {"OK", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"},
}


def streams(target: str, question: Question, tally: Tally, rng: random.Random) -> None:
    """A stream of 40 requests, of which one in three is left before its end."""
    with AttentionClient(target, max_retries=0, timeout=CALL_SECONDS) as client:
        try:
            for result in client.attend_stream(MODEL, repeat(question.rows, 40), max_in_flight=16):
                tally.answered(right=question.matches(result.context_vectors))
                if rng.random() < 0.01:
                    break
        except AttentionClientError as error:
            tally.failed(error)


def hostile(target: str, port: int, tally: Tally, rng: random.Random) -> Callable[[], None]:
    """Messages that no good client sends, of both protocols and over HTTP. Each is refused, or answered."""
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    sources = good_and_changed()

    def step() -> None:
        good, change = rng.choice(sources)
        made = change(rng)
        if good.headers is not None:
            with suppress(HTTPException, OSError):  # the server closes connections of some bad requests
                tally.answered(status=str(ask(port, made.method, made.data, made.headers).status))
            return
        send: Any = channel.unary_unary(made.method)
        counted(tally, partial(send, made.data, timeout=30))

    return step


def impatient(target: str, tally: Tally, rng: random.Random) -> Callable[[], None]:
    """Calls with deadlines of 1 to 20 ms, and calls that are cancelled before, during or after their run."""
    method: Any = grpc.insecure_channel(target, OWN_CONNECTION).unary_unary(ATTEND)
    messages = [attend_message(MODEL, random_rows(rows)).SerializeToString() for rows in (6, 128, 1000)]

    def step() -> None:
        counted(tally, partial(method, rng.choice(messages), timeout=rng.uniform(0.001, 0.02)))
        call = method.future(rng.choice(messages), timeout=30)
        time.sleep(rng.random() * 0.05)
        call.cancel()
        counted(tally, call.result)

    return step


def counted(tally: Tally, call: Callable[[], object]) -> None:
    """Counts how a call ends."""
    try:
        call()
    except grpc.FutureCancelledError:
        tally.answered(status="CANCELLED")
    except grpc.RpcError as error:
        tally.failed(error)
    else:
        tally.answered()


def start(server: ServerProcess, tallies: dict[str, Tally]) -> Iterator[Actor]:
    """Starts every caller."""
    target, rng = server.target, random.Random(0)  # noqa: S311 - not for secrets
    for rows, pause in ((1, 0), (37, 0), (128, 0), (2048, 1)):
        yield callers.retrying(target, Question(rows), tallies["good"], pause=pause, max_retries=0)
    yield Actor(partial(streams, target, Question(37), tallies["streams"], rng))
    yield Actor(hostile(target, http_port(server.log), tallies["hostile"], rng))
    yield Actor(impatient(target, tallies["impatient"], rng))


def test_soak(models: Path, tmp_path: Path) -> None:
    """All callers mixed: every answer is right, and nothing grows."""
    tallies = {name: Tally() for name in ALLOWED}
    with (
        Figures(f"soak: {SOAK_SECONDS} s of everything mixed") as figures,
        server_of(models, tmp_path, "--message-timeout-seconds=5", "--http-port=0") as server,
    ):
        idle = readings(server.process.pid)
        actors = list(start(server, tallies))
        try:
            time.sleep(SOAK_SECONDS * WARM_SHARE)
            warm = sample(server)
            time.sleep(SOAK_SECONDS * (1 - WARM_SHARE))
            late = sample(server)
        finally:
            callers.stop(actors)
        figures.equal("callers that broke", "; ".join(actor.error for actor in actors if actor.error), "")
        for name, tally in tallies.items():
            figures.among(f"calls: {name}", dict(tally.statuses), ALLOWED[name])
            figures.at_least(f"calls answered: {name}", tally.statuses.total(), 1)
        good = sum((tallies[name].statuses for name in ("good", "streams")), Counter[str]())
        figures.at_most("good calls refused, share", 1 - good["OK"] / max(1, good.total()), 0.01)
        figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)
        figures.note("idle, warm and late: bytes and counts", (idle, warm, late))
        figures.at_most("threads, late above warm", late.threads - warm.threads, 4)
        figures.at_most("descriptors, late above warm", late.descriptors - warm.descriptors, 16)
        figures.at_most("resident, late above warm, MiB", (late.resident - warm.resident) / MIB, 64)
        empty(figures, server, idle)


def sample(server: ServerProcess) -> Readings:
    """The largest of some readings under load, which vary with the calls of the moment.

    Those of the server and of its HTTP process are added up.
    """
    found = []
    for _ in range(SAMPLES):
        own = [vars(readings(pid)).values() for pid in process_tree(server.process.pid)]
        found.append([sum(values) for values in zip(*own, strict=True)])
        time.sleep(0.1)
    return Readings(*map(max, zip(*found, strict=True)))


def empty(figures: Figures, server: ServerProcess, idle: Readings) -> None:
    """Adds whether the server lives and holds nothing once every caller has left."""
    figures.equal("errors in the log", server.log.read_text().count(" ERROR "), 0)
    with AttentionClient(server.target) as client:
        client.wait_until_ready(5)
    wait_until(lambda: not any(gauges_in_use(server).values()), 15)
    held = gauges_in_use(server)
    figures.at_least("gauges of what requests hold", len(held), 1)
    figures.equal("of these not 0 at the end", [name for name, value in held.items() if value], [])
    wait_until(lambda: readings(server.process.pid).descriptors <= idle.descriptors + 4, 15)
    descriptors = readings(server.process.pid).descriptors
    figures.at_most("descriptors, end above idle", descriptors - idle.descriptors, SPARE_DESCRIPTORS)
