"""A soak: every kind of caller at once, good and bad, while threads, descriptors and memory stay flat."""

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttendInputs, AttentionClient, AttentionClientError

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from benchmarks.processes import process_tree
from scripts.local_server import ServerProcess
from tests.chaos import callers
from tests.chaos.callers import Actor, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.http2 import RawConnection
from tests.chaos.process import (
    MIB,
    MODEL,
    OWN_CONNECTION,
    Readings,
    attend_message,
    gauges_in_use,
    is_serving,
    random_rows,
    readings,
    server_of,
    wait_until,
)
from tests.server.http.clients import HOST, http_port
from tests.server.samples import SELF
from tests.support.contradictions import Made, good_and_contradicted
from tests.support.eager import ATOL, RTOL, Array
from tests.support.mutations import ATTEND, Good, good_requests, mutated

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
LONG_PAUSE_SECONDS = 1.0
STREAM_ITEMS = 40
# Of the contradictory messages, as many again are changed byte by byte.
BYTES_SHARE = 0.3
SOAK_SECONDS, WARM_SHARE, SAMPLES = scaled(60, 600), 0.25, 20
# What gRPC's core opens once for its threads, and keeps.
SPARE_DESCRIPTORS = 8
ALLOWED = {
    **{name: {"OK", "RESOURCE_EXHAUSTED"} for name in ("good", "streams", "long")},
    "hostile": {
        *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
        *("FAILED_PRECONDITION", "200", "400", "404", "413", "415", "422", "429", "503", "504"),
    },
    "impatient": {"OK", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"},
}
Step = Callable[[], object]


def requests_to(name: str) -> list[Good]:
    """One sequence of a few lengths, and several at once."""
    batches = [(1,), (37,), (128,), (3, 50, 1, 17, 128)]
    messages = [attend_message(name, *map(random_rows, lengths)) for lengths in batches]
    return [Good(ATTEND, message.SerializeToString()) for message in messages]


def good_calls(target: str, requests: list[Good], tally: Tally, rng: random.Random, pause: float = 0) -> Step:
    """Unary calls, one after another; a connection serves a hundred of them.

    An answer is right if it is that of a server which has nothing else to do, whose parity other tests show.
    """
    channels = [grpc.insecure_channel(target, OWN_CONNECTION)]

    def ask(request: Good) -> Array:
        method: Any = channels[0].unary_unary(request.method)
        return numbers(request, method(request.data, timeout=callers.CALL_SECONDS))

    expected = [ask(request) for request in requests]

    def step() -> None:
        if rng.random() < 0.01:
            channels.pop().close()
            channels.append(grpc.insecure_channel(target, OWN_CONNECTION))
        at = rng.randrange(len(requests))
        try:
            found = ask(requests[at])
        except grpc.RpcError as error:
            tally.failed(error)
        else:
            is_alike = found.shape == expected[at].shape
            tally.answered(right=is_alike and np.allclose(found, expected[at], rtol=RTOL, atol=ATOL))
        time.sleep(pause)

    return step


def numbers(request: Good, reply: bytes) -> Array:
    """All context vectors and attention weights of a reply."""
    if request.method == ATTEND:
        answer = typed.AttendResponse.FromString(reply)
        data = [answer.context_vectors.data, answer.attention_weights.data]
    else:
        data = [*pb.ModelInferResponse.FromString(reply).raw_output_contents]
    return np.frombuffer(b"".join(data), np.float32)


def streams(target: str, tally: Tally, rng: random.Random) -> Step:
    """Streams of some requests, of which one in four is left before its end."""
    questions = [callers.Question(length) for length in (1, 37, 128)]

    def step() -> None:
        sent = rng.choices(questions, k=STREAM_ITEMS)
        last = rng.randrange(STREAM_ITEMS) if rng.random() < 0.25 else STREAM_ITEMS
        try:
            with AttentionClient(target, max_retries=0, timeout=callers.CALL_SECONDS) as client:
                items = (AttendInputs(question.rows) for question in sent)
                results = client.attend_stream(MODEL, items, max_in_flight=16)
                for number, (question, result) in enumerate(zip(sent, results, strict=False)):
                    tally.answered(right=question.matches(result.context_vectors))
                    if number == last:
                        results.close()
                        break
        except AttentionClientError as error:
            tally.failed(error)

    return step


def hostile(target: str, port: int, tally: Tally, rng: random.Random) -> Step:
    """Messages that no good client sends, of both protocols and over HTTP. Each is refused, or answered."""
    channel, connection = (
        grpc.insecure_channel(target, OWN_CONNECTION),
        HTTPConnection(HOST, port, timeout=60),
    )
    sources = good_and_contradicted()

    def step() -> None:
        good, contradict = rng.choice(sources)
        made = contradict(rng)
        if good.headers is not None:
            with suppress(HTTPException, OSError):  # the server has closed a connection that was idle
                tally.answered(status=str(post(connection, made)))
                return
            connection.close()
        else:
            if rng.random() < BYTES_SHARE:
                made = Made(good.method, mutated(Good(good.method, good.data), rng))
            send: Any = channel.unary_unary(made.method)
            counted(tally, partial(send, made.data, timeout=30))

    return step


def post(connection: HTTPConnection, made: Made) -> int:
    """Sends a request and reads its answer; returns its status."""
    connection.request("POST", made.method, made.data, made.headers or {})
    response = connection.getresponse()
    response.read()
    return response.status


def impatient(target: str, tally: Tally, rng: random.Random) -> Step:
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


def idlers(port: int, rng: random.Random) -> None:
    """Callers who leave after some seconds: of answers that they did not read, of messages sent in part."""
    message = attend_message(SELF, random_rows(256, 4), return_weights=True).SerializeToString()
    with RawConnection(port, window=0) as reader, RawConnection(port) as sender:
        for _ in range(4):
            reader.call(ATTEND, message)
            sender.open(ATTEND)
            sender.send_part(sender.open(ATTEND), message, rng.randrange(len(message)))
        reader.receive_for(rng.uniform(0.5, 8))


def visitors(port: int, rng: random.Random) -> None:
    """Connections that are opened and closed: without a byte, with garbage, and with a health check."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as visitor:
        if rng.random() < 0.5:
            visitor.sendall(os.urandom(rng.randrange(1, 400)))
            visitor.recv(64)
    is_serving(f"127.0.0.1:{port}")
    time.sleep(0.05)


def start(server: ServerProcess, tallies: dict[str, Tally]) -> list[Actor]:
    """Starts every caller."""
    target, port, rng = server.target, server.port, random.Random(0)  # noqa: S311 - not for secrets
    short = [*good_requests(), *requests_to(MODEL), *requests_to("rotary-768x12")]
    long = Good(ATTEND, attend_message(MODEL, random_rows(2048)).SerializeToString())
    steps: list[Step] = [
        *(good_calls(target, short, tallies["good"], rng) for _ in range(3)),
        good_calls(target, [long], tallies["long"], rng, LONG_PAUSE_SECONDS),
        streams(target, tallies["streams"], rng),
        hostile(target, http_port(server.log), tallies["hostile"], rng),
        impatient(target, tallies["impatient"], rng),
        partial(idlers, port, rng),
        partial(visitors, port, rng),
    ]
    return [Actor(step) for step in steps]


def test_soak(models: Path, tmp_path: Path) -> None:
    """All callers mixed: every answer is right, and nothing grows."""
    tallies = {name: Tally() for name in ALLOWED}
    with (
        Figures(f"soak: {SOAK_SECONDS} s of everything mixed") as figures,
        server_of(models, tmp_path, "--message-timeout-seconds=5", "--http-port=0") as server,
    ):
        idle = readings(server.process.pid)
        actors = start(server, tallies)
        try:
            time.sleep(SOAK_SECONDS * WARM_SHARE)
            warm = sample(server)
            time.sleep(SOAK_SECONDS * (1 - WARM_SHARE))
            late = sample(server)
        finally:
            callers.stop(actors)
        figures.equal("callers that broke", "; ".join(actor.error for actor in actors if actor.error), "")
        report(figures, tallies)
        flat(figures, idle, warm, late)
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


def report(figures: Figures, tallies: dict[str, Tally]) -> None:
    """Adds what the callers saw."""
    for name, tally in tallies.items():
        figures.among(f"calls: {name}", dict(tally.statuses), ALLOWED[name])
        figures.at_least(f"calls answered: {name}", tally.statuses.total(), 1)
    good = sum((tallies[name].statuses for name in ("good", "streams", "long")), Counter[str]())
    figures.at_most("good calls refused, share", 1 - good["OK"] / max(1, good.total()), 0.01)
    figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)


def flat(figures: Figures, idle: Readings, warm: Readings, late: Readings) -> None:
    """Adds what the process held after the warm-up and at the end, both under load."""
    for name, own in (("idle", idle), ("warm", warm), ("late", late)):
        figures.note(f"{name}: bytes and counts", own)
    figures.at_most("threads, late above warm", late.threads - warm.threads, 4)
    figures.at_most("descriptors, late above warm", late.descriptors - warm.descriptors, 16)
    figures.at_most("resident, late above warm, MiB", (late.resident - warm.resident) / MIB, 64)


def empty(figures: Figures, server: ServerProcess, idle: Readings) -> None:
    """Adds whether the server lives and holds nothing once every caller has left."""
    figures.equal("errors in the log", server.log.read_text().count(" ERROR "), 0)
    figures.equal("SERVING at the end", is_serving(server.target), expected=True)

    def held() -> dict[str, int]:
        return {name: int(value) for name, value in gauges_in_use(server).items() if value}

    wait_until(lambda: not held(), 15)
    figures.at_least("gauges of what requests hold", len(gauges_in_use(server)), 1)
    figures.equal("of these not 0 at the end", held(), {})
    wait_until(lambda: readings(server.process.pid).descriptors <= idle.descriptors + 4, 15)
    last = readings(server.process.pid)
    figures.note("end: bytes and counts", last)
    figures.at_most("descriptors, end above idle", last.descriptors - idle.descriptors, SPARE_DESCRIPTORS)
