"""A soak: every kind of caller at once, good and bad, while threads, descriptors and memory stay flat."""

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttendInputs, AttentionClient, AttentionClientError

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
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
from tests.server.samples import SELF
from tests.support.contradictions import contradicted
from tests.support.eager import ATOL, RTOL, Array
from tests.support.mutations import ATTEND, Good, good_requests, mutated

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
LONG_PAUSE_SECONDS = 1.0
STREAM_ITEMS = 40
SOAK_SECONDS, WARM_SHARE, SAMPLES = scaled(60, 600), 0.25, 20
# What gRPC's core opens once for its threads, and keeps.
SPARE_DESCRIPTORS = 8
ALLOWED = {
    **{name: {"OK", "RESOURCE_EXHAUSTED"} for name in ("good", "streams", "long")},
    "hostile": {
        "OK",
        "RESOURCE_EXHAUSTED",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
        "DEADLINE_EXCEEDED",
    },
    "cancelled": {"OK", "RESOURCE_EXHAUSTED", "CANCELLED"},
    "deadlines": {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"},
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


def hostile(target: str, tally: Tally, rng: random.Random) -> Step:
    """Messages that no good client sends. Each must be refused, or answered if it can be."""
    channel, good = grpc.insecure_channel(target, OWN_CONNECTION), good_requests()

    def step() -> None:
        own = rng.choice(good)
        send: Any = channel.unary_unary(own.method)
        counted(tally, partial(send, rng.choice((mutated, contradicted))(own, rng), timeout=30))

    return step


def cancelled(target: str, tally: Tally, rng: random.Random) -> Step:
    """Calls that their caller cancels after a while, before, during or after their run."""
    method: Any = grpc.insecure_channel(target, OWN_CONNECTION).unary_unary(ATTEND)
    messages = [attend_message(MODEL, random_rows(rows)).SerializeToString() for rows in (6, 128, 1000)]

    def step() -> None:
        call = method.future(rng.choice(messages), timeout=30)
        time.sleep(rng.random() * 0.05)
        call.cancel()
        counted(tally, call.result)

    return step


def short_deadlines(target: str, tally: Tally, rng: random.Random) -> Step:
    """Calls with deadlines of 1 to 20 ms."""
    method: Any = grpc.insecure_channel(target, OWN_CONNECTION).unary_unary(ATTEND)
    message = attend_message(MODEL, random_rows(64)).SerializeToString()

    def step() -> None:
        counted(tally, partial(method, message, timeout=rng.uniform(0.001, 0.02)))
        time.sleep(0.02)

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


def slow_readers(port: int, rng: random.Random) -> None:
    """A caller who does not read answers of 512 KiB for some seconds, and then leaves."""
    message = attend_message(SELF, random_rows(256, 4), return_weights=True).SerializeToString()
    with RawConnection(port, window=0) as reader:
        for _ in range(4):
            reader.call(ATTEND, message)
        reader.receive_for(rng.uniform(0.5, 8))


def half_senders(port: int, rng: random.Random) -> None:
    """A caller who sends headers, or half a message, and then leaves after some seconds."""
    message = attend_message(SELF, random_rows(256, 4)).SerializeToString()
    with RawConnection(port) as sender:
        for _ in range(4):
            sender.open(ATTEND)
            sender.send_part(sender.open(ATTEND), message, rng.randrange(len(message)))
        sender.receive_for(rng.uniform(0.5, 8))


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
        hostile(target, tallies["hostile"], rng),
        cancelled(target, tallies["cancelled"], rng),
        short_deadlines(target, tallies["deadlines"], rng),
        partial(slow_readers, port, rng),
        partial(half_senders, port, rng),
        partial(visitors, port, rng),
    ]
    return [Actor(step) for step in steps]


def test_soak(models: Path, tmp_path: Path) -> None:
    """All callers mixed: every answer is right, and nothing grows."""
    tallies = {name: Tally() for name in ALLOWED}
    with (
        Figures(f"soak: {SOAK_SECONDS} s of everything mixed") as figures,
        server_of(models, tmp_path, "--message-timeout-seconds=5") as server,
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
    """The largest of some readings under load, which vary with the calls of the moment."""
    found = []
    for _ in range(SAMPLES):
        found.append(readings(server.process.pid))
        time.sleep(0.1)
    return Readings(*(max(values) for values in zip(*(vars(one).values() for one in found), strict=True)))


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
        figures.note(f"{name}: threads, descriptors, resident MiB", in_words(own))
    figures.at_most("threads, late above warm", late.threads - warm.threads, 4)
    figures.at_most("descriptors, late above warm", late.descriptors - warm.descriptors, 16)
    figures.at_most("resident, late above warm, MiB", (late.resident - warm.resident) / MIB, 64)


def in_words(found: Readings) -> str:
    return f"{found.threads}, {found.descriptors}, {found.resident // MIB}"


def empty(figures: Figures, server: ServerProcess, idle: Readings) -> None:
    """Adds whether the server lives and holds nothing once every caller has left."""
    figures.equal("SERVING at the end", is_serving(server.target), expected=True)

    def held() -> dict[str, int]:
        return {name: int(value) for name, value in gauges_in_use(server).items() if value}

    wait_until(lambda: not held(), 15)
    figures.at_least("gauges of what requests hold", len(gauges_in_use(server)), 1)
    figures.equal("of these not 0 at the end", held(), {})
    wait_until(lambda: readings(server.process.pid).descriptors <= idle.descriptors + 4, 15)
    last = readings(server.process.pid)
    figures.note("end: threads, descriptors, resident MiB", in_words(last))
    figures.at_most("descriptors, end above idle", last.descriptors - idle.descriptors, SPARE_DESCRIPTORS)
    with AttentionClient(server.target) as client:
        figures.at_least("models served at the end", len(client.models()), 1)
