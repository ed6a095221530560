"""A soak: every kind of caller at once, good and bad, while threads, descriptors and memory stay flat.

Two workers serve while a version of a model comes and goes, the folder of contexts is full, streams wait, and
four scrapers read metrics.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import repeat
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, AttentionClientError

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from benchmarks.processes import process_tree
from scripts.local_server import ServerProcess, serving
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
    wait_until,
)
from tests.server.http.clients import ask
from tests.server.samples import CROSS, SELF, eager_module
from tests.support import eager
from tests.support.contradictions import good_and_changed
from tests.support.eager import ATOL, RTOL
from tests.support.mutations import ATTEND
from tests.support.prometheus import scrape, value

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
SOAK_SECONDS, WARM_SHARE, SAMPLES = scaled(60, 600), 0.25, 20
# What gRPC's core opens once for its threads, and keeps, in both workers.
SPARE_DESCRIPTORS = 16
OPTIONS = (
    *("--workers=2", "--http-port=0", "--message-timeout-seconds=5"),
    *("--model-control=poll", "--repository-poll-seconds=0.5", "--max-context-bytes=16MiB"),
)
# Runs a command with a file system of its own at the folder $0, which a few hundred contexts fill.
IN_SMALL_FOLDER = ("unshare", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
SCRAPERS, WAITING_STREAMS = 4, 8
GOOD = ("good", "streams", "contexts", "replaced")
ALLOWED = {
    **{name: {"OK", "RESOURCE_EXHAUSTED"} for name in GOOD},
    **{name: {"OK"} for name in ("scrapes", "waiting")},
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


def contexts(target: str, tally: Tally, rng: random.Random) -> Actor:
    """Puts contexts of new rows, and attends to one of the last, which may have made room for others."""
    client, numbers = AttentionClient(target, max_retries=0, timeout=CALL_SECONDS), np.random.default_rng(0)
    kept = deque[Any](maxlen=100)

    def step() -> None:
        query, key, value = (numbers.standard_normal((6, width), np.float32) for width in (4, 6, 5))
        try:
            kept.append((client.context(CROSS, key, value), key, value))
            context, key, value = rng.choice(kept)
            answer = client.attend(CROSS, query, context=context).context_vectors
        except AttentionClientError as error:
            tally.failed(error)
        else:
            expected, _ = eager.attend(eager_module(CROSS), query, key, value)
            tally.answered(right=np.allclose(answer, expected, rtol=RTOL, atol=ATOL))

    return Actor(step, client.close)


def replaced(repository: Path, target: str, tally: Tally) -> Actor:
    """Asks a model whose second version comes and goes."""
    client, rows = AttentionClient(target, max_retries=0, timeout=CALL_SECONDS), random_rows(6, 4)
    expected, _ = eager.attend(eager_module(SELF), rows)
    exported = repository.parent / "exported"
    write_artifact(eager_module(SELF), ModelId(SELF, 2), exported)
    folder, hidden = repository / SELF / "2", exported / SELF / "2"

    def step() -> None:
        if folder.exists():
            folder.rename(hidden)
        else:
            hidden.rename(folder)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            try:
                answer = client.attend(SELF, rows).context_vectors
            except AttentionClientError as error:
                tally.failed(error)
            else:
                tally.answered(right=np.allclose(answer, expected, rtol=RTOL, atol=ATOL))

    return Actor(step, client.close)


def waiting(target: str, tally: Tally) -> Actor:
    """Opens streams, has a large message refused on each, and lets them wait."""
    refused = attend_message(MODEL, np.zeros((4096, 77), np.float32))
    channel = grpc.insecure_channel(target, OWN_CONNECTION)

    def step() -> None:
        over = time.monotonic() + 3

        def requests() -> Iterator[pb.AttendStreamRequest]:
            yield pb.AttendStreamRequest(request=refused)
            time.sleep(max(0, over - time.monotonic()))

        streams = [AttentionServiceStub(channel).AttendStream(requests()) for _ in range(WAITING_STREAMS)]
        for replies in streams:
            counted(tally, partial(list, replies))

    return Actor(step, channel.close)


def scraper(port: int, tally: Tally) -> Actor:
    """Reads the metrics all the time."""

    def step() -> None:
        try:
            scrape(port)
        except OSError as error:
            tally.answered(status=str(error))
        else:
            tally.answered()
        time.sleep(0.2)

    return Actor(step)


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


def start(server: ServerProcess, repository: Path, tallies: dict[str, Tally]) -> Iterator[Actor]:
    """Starts every caller."""
    target, rng = server.target, random.Random(0)  # noqa: S311 - not for secrets
    for rows, pause in ((1, 0), (37, 0), (128, 0), (2048, 1)):
        yield callers.retrying(target, Question(rows), tallies["good"], pause=pause, max_retries=0)
    yield Actor(partial(streams, target, Question(37), tallies["streams"], rng))
    yield Actor(hostile(target, server.http_port, tallies["hostile"], rng))
    yield Actor(impatient(target, tallies["impatient"], rng))
    yield contexts(target, tallies["contexts"], rng)
    yield replaced(repository, target, tallies["replaced"])
    yield waiting(target, tallies["waiting"])
    for _ in range(SCRAPERS):
        yield scraper(server.metrics_port, tallies["scrapes"])


def with_small_folder(folder: Path) -> Path:
    """A program that runs Python where a folder is a small file system, if the system allows that."""
    folder.mkdir()
    program, python = folder.parent / "python", f"exec {sys.executable}"
    mounted = subprocess.run([*IN_SMALL_FOLDER, MOUNT, folder, "true"], capture_output=True, check=False)
    if mounted.returncode == 0:
        python = f"exec {' '.join(IN_SMALL_FOLDER)} '{MOUNT}' {folder} {sys.executable}"
    program.write_text(f'#!/bin/sh\n{python} "$@"\n')
    program.chmod(0o755)
    return program


def test_soak(models: Path, tmp_path: Path) -> None:
    """All callers mixed: every answer is right, and nothing grows."""
    tallies = {name: Tally() for name in ALLOWED}
    repository, folder = tmp_path / "models", tmp_path / "contexts"
    shutil.copytree(models, repository, copy_function=os.link)
    python, options = with_small_folder(folder), (*OPTIONS, f"--context-folder={folder}")
    with (
        Figures(f"soak: {SOAK_SECONDS} s of everything mixed") as figures,
        serving(repository, tmp_path / "log", *options, python=python) as server,
    ):
        wait_until(lambda: " http process started " in server.log.read_text())
        idle = sample(server)
        actors = list(start(server, repository, tallies))
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
        good = sum((tallies[name].statuses for name in GOOD), Counter[str]())
        figures.at_most("good calls refused, share", 1 - good["OK"] / max(1, good.total()), 0.01)
        figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)
        reloads = server.log.read_text().count(f"model ready model={SELF} version=2")
        figures.at_least("loads of the version that comes and goes", reloads, SOAK_SECONDS // 10)
        full = value(scrape(server.metrics_port), "attention_context_folder_errors_total")
        figures.note("contexts that found the folder full", full)
        figures.note("idle, warm and late: bytes and counts", (idle, warm, late))
        figures.at_most("threads, late above warm", late.threads - warm.threads, 4)
        figures.at_most("descriptors, late above warm", late.descriptors - warm.descriptors, 16)
        figures.at_most("resident, late above warm, MiB", (late.resident - warm.resident) / MIB, 64)
        empty(figures, server, idle)


def sample(server: ServerProcess) -> Readings:
    """The largest of some readings under load, which vary with the calls of the moment."""
    samples = []
    for _ in range(SAMPLES):
        samples.append(vars(tree_readings(server)).values())
        time.sleep(0.1)
    return Readings(*map(max, zip(*samples, strict=True)))


def tree_readings(server: ServerProcess) -> Readings:
    """The sums of the readings of all processes of a server."""
    processes = [vars(readings(pid)).values() for pid in process_tree(server.process.pid)]
    return Readings(*map(sum, zip(*processes, strict=True)))


def gauges_of_requests(server: ServerProcess) -> dict[str, float]:
    """The gauges of what requests hold; stored contexts outlast theirs."""
    gauges = gauges_in_use(server)
    return {name: gauges[name] for name in gauges.keys() - {"attention_context_bytes"}}


def empty(figures: Figures, server: ServerProcess, idle: Readings) -> None:
    """Adds whether the server lives and holds nothing once every caller has left."""
    figures.equal("errors in the log", server.log.read_text().count(" ERROR "), 0)
    with AttentionClient(server.target) as client:
        client.wait_until_ready(5)
    wait_until(lambda: not any(gauges_of_requests(server).values()), 15)
    held = gauges_of_requests(server)
    figures.at_least("gauges of what requests hold", len(held), 1)
    figures.equal("of these not 0 at the end", [name for name, value in held.items() if value], [])
    wait_until(lambda: tree_readings(server).descriptors <= idle.descriptors + 4, 15)
    descriptors = tree_readings(server).descriptors
    figures.at_most("descriptors, end above idle", descriptors - idle.descriptors, SPARE_DESCRIPTORS)
