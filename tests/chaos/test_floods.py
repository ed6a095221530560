"""Callers that ask for too much at once: many calls, large answers, half-sent messages, long sequences."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures
from tests.chaos.http2 import RawConnection
from tests.chaos.process import (
    MIB,
    MODEL,
    OWN_CONNECTION,
    attend_message,
    busy_seconds,
    random_rows,
    readings,
    reset_peak,
    server_of,
    wait_until,
)
from tests.server.samples import SELF
from tests.support.prometheus import calls_ended

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
ATTEND = "/attention.v1.AttentionService/Attend"
OK, REFUSED = "OK", "RESOURCE_EXHAUSTED"
SMALL, LONG = attend_message(MODEL, random_rows(6)), attend_message(MODEL, random_rows(8192))
# Calls whose answers nobody reads that are sent at a time.
GROUP = 8


@pytest.fixture
def server(wide: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of one model with the default limits."""
    with server_of(wide, tmp_path) as process:
        yield process


@contextmanager
def connected(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A connection of its own, which is established."""
    with grpc.insecure_channel(server.target, OWN_CONNECTION) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        yield channel


def timed(call: Any, request: object, timeout: float = 30) -> tuple[str, float]:
    """The status of a call and its seconds."""
    started = time.monotonic()
    try:
        call(request, timeout=timeout)
    except grpc.RpcError as error:
        return error.code().name, time.monotonic() - started
    return OK, time.monotonic() - started


def answers_a_small_call(figures: Figures, channel: grpc.Channel, when: str) -> None:
    """Adds that a small call is answered within a second."""
    status, seconds = timed(AttentionServiceStub(channel).Attend, SMALL, timeout=120)
    figures.equal(f"small call {when}", status, OK)
    figures.at_most(f"small call {when}, s", seconds, 1.0)


def growth(figures: Figures, server: ServerProcess, idle: int, bound: float) -> None:
    """Adds how far the resident memory grew at its peak, in MiB."""
    figures.note("resident before, MiB", idle / MIB)
    peak = readings(server.process.pid).peak
    figures.at_most("resident peak above before, MiB", (peak - idle) / MIB, bound)


def test_large_answers_that_nobody_reads(models: Path, tmp_path: Path) -> None:
    """369 answers of 8 MiB on a connection whose window stays closed: memory is bounded, and it is cut."""
    count, limit_mib, send_seconds = 369, 256, 5.0
    options = (f"--max-in-flight-bytes={limit_mib}MiB", f"--message-timeout-seconds={send_seconds}")
    message = attend_message(SELF, random_rows(1024, 4), return_weights=True).SerializeToString()
    with (
        Figures("flood: 369 answers of 8 MiB that nobody reads") as figures,
        server_of(models, tmp_path, *options) as server,
        RawConnection(server.port, window=0) as reader,
    ):
        idle = reset_peak(server.process.pid)
        for sent in range(1, count + 1):
            reader.call(ATTEND, message)
            if sent % GROUP == 0:
                # A server that counts what it holds ends none of them; one that forgets it ends all at once.
                wait_until(lambda goal=sent: calls_ended(server.metrics_port) >= goal, 1.0)  # type: ignore[misc]
                reader.receive(0.001)
        wait_until(lambda: settled(server), 30)
        # Beyond the limit: the arenas of two runs with their scores, and the messages being written.
        growth(figures, server, idle, limit_mib + 192)
        reader.receive_for(3 * send_seconds)
        figures.equal("calls open 3 times the send timeout later", reader.open_calls, 0)
        with connected(server) as channel:
            status, _ = timed(AttentionServiceStub(channel).Attend, attend_message(SELF, random_rows(6, 4)))
        figures.equal("a small call afterwards", status, OK)


def settled(server: ServerProcess) -> bool:
    """Whether the server uses almost no processor time."""
    before = busy_seconds(server.process.pid)
    time.sleep(0.5)
    return busy_seconds(server.process.pid) - before < 0.05


@pytest.mark.parametrize("connections", [1, 16])
def test_calls_that_send_headers_only(wide: Path, tmp_path: Path, connections: int) -> None:
    """256 calls whose message never comes: others are served meanwhile, or after a time limit."""
    limit = 3
    with (
        Figures(f"flood: 256 calls that send headers only on {connections} connections") as figures,
        server_of(wide, tmp_path, f"--message-timeout-seconds={limit}") as server,
        ExitStack() as stack,
    ):
        holders = [stack.enter_context(RawConnection(server.port)) for _ in range(connections)]
        channel = stack.enter_context(connected(server))
        for at in range(256):
            holders[at % connections].open(ATTEND)
        for holder in holders:
            holder.receive(0.2)
        asks_about_the_server(figures, channel)
        if connections == 1:  # whose calls may not take all places
            answers_a_small_call(figures, channel, "meanwhile")
        until = time.monotonic() + 3 * limit
        while time.monotonic() < until and any(holder.open_calls for holder in holders):
            for holder in holders:
                holder.receive(0.01)
        answers_a_small_call(figures, channel, "after the time limit")
        figures.equal("held calls then", sum(holder.open_calls for holder in holders), 0)


def asks_about_the_server(figures: Figures, channel: grpc.Channel) -> None:
    """Adds that a health check and ServerReady are answered within a second."""
    ready = GRPCInferenceServiceStub(channel).ServerReady
    for name, call, request in (
        ("health check", health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()),
        ("ServerReady", ready, open_inference_pb2.ServerReadyRequest()),
    ):
        status, seconds = timed(call, request)
        figures.equal(name, status, OK)
        figures.at_most(f"{name}, s", seconds, 1.0)


# The scores of 12 heads as a whole would take 3,072 MiB for each sequence.
@pytest.mark.parametrize(
    ("count", "options", "bound"),
    [(1, (), 1024), (2, (), 2048), (2, ("--max-memory=1GiB",), 1280)],
    ids=["one", "two-at-once", "two-at-once-in-1GiB"],
)
def test_long_sequences(
    wide: Path, tmp_path: Path, count: int, options: tuple[str, ...], bound: float
) -> None:
    """Sequences of 8,192 x 768, which are legal: the peak of memory stays within a bound."""
    with (
        Figures(f"flood: {count} of 8,192 x 768, {' '.join(options) or 'default limits'}") as figures,
        server_of(wide, tmp_path, *options) as server,
        connected(server) as channel,
    ):
        attend = AttentionServiceStub(channel).Attend
        attend(SMALL, timeout=30)
        idle = reset_peak(server.process.pid)
        sent = [attend.future(LONG, timeout=120) for _ in range(count)]
        codes = Counter(call.code().name for call in sent)
        figures.among("calls by status", dict(codes), {OK, REFUSED, "INVALID_ARGUMENT"})
        growth(figures, server, idle, bound)
        answers_a_small_call(figures, channel, "afterwards")


def test_a_small_call_after_a_cancelled_long_run(server: ServerProcess) -> None:
    """Two long runs are cancelled under way: a small call does not wait for their end."""
    with (
        Figures("flood: a small call after cancelled long runs") as figures,
        connected(server) as first,
        connected(server) as second,
    ):
        busy = busy_seconds(server.process.pid)
        runs = [AttentionServiceStub(first).Attend.future(LONG, timeout=120) for _ in range(2)]
        assert wait_until(lambda: busy_seconds(server.process.pid) - busy > 1), "no run began"
        for run in runs:
            run.cancel()
        answers_a_small_call(figures, second, "after they were cancelled")
        started = time.monotonic()
        wait_until(lambda: settled(server), 60)
        figures.at_most("seconds until the server is idle", time.monotonic() - started, 3.0)


def test_headers_that_refer_to_one_large_header_many_times(artifacts: Path, tmp_path: Path) -> None:
    with (
        Figures("flood: 500 calls, 6 MB in all, whose headers refer 12,000 times to one of 4 KB") as figures,
        server_of(artifacts, tmp_path) as server,
        RawConnection(server.port) as connection,
    ):
        idle = reset_peak(server.process.pid)
        for _ in range(500):
            connection.open(METADATA, references=12_000)
        connection.receive_for(60)
        figures.equal("calls open", connection.open_calls, 0)
        growth(figures, server, idle, 400)
