"""Callers that ask for too much at once: many calls, large answers, half-sent messages, long sequences."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from benchmarks.wire import METHODS, Api
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures, mib
from tests.chaos.http2 import RawConnection
from tests.chaos.load import OK, REFUSED, Job, at_once
from tests.chaos.process import (
    busy_seconds,
    increased,
    metrics,
    readings,
    reset_peak,
    server_of,
    supported,
    wait_until,
)
from tests.chaos.requests import attend_message, attend_request, random_rows
from tests.chaos.scale import Scale
from tests.server.samples import SELF

UnaryMethod: TypeAlias = "grpc.UnaryUnaryMultiCallable[Any, Any]"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
MIB = 1 << 20
MODEL, WIDTH = "multi-head-768x12", 768
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
ATTEND = "/attention.v1.AttentionService/Attend"
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
SMALL = attend_message(MODEL, random_rows(6, WIDTH))
LONG_ROWS = 8192
# Calls whose answers nobody reads that are sent at a time.
GROUP = 8
# Seconds between a long call and a small one, which spread the small ones over its first stages.
DELAYS = (0.0, 0.001, 0.003, 0.01)


@pytest.fixture
def server(wide: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of one model with the default limits."""
    with server_of(wide, tmp_path) as process:
        yield process


@contextmanager
def connected(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A connection of its own, which is established."""
    with grpc.insecure_channel(server.target, ANY_SIZE) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        yield channel


def status_of(call: "grpc.Future[pb.AttendResponse]") -> str:
    """The status of a call, once it has ended."""
    try:
        call.result()
    except grpc.RpcError as error:
        return error.code().name
    return OK


def timed(call: UnaryMethod, request: object, timeout: float = 30) -> tuple[str, float]:
    """The status of a call and its seconds."""
    started = time.monotonic()
    try:
        call(request, timeout=timeout)
    except grpc.RpcError as error:
        return error.code().name, time.monotonic() - started
    return OK, time.monotonic() - started


def test_unary_calls_at_once_on_one_connection(server: ServerProcess, generator: ProcessPoolExecutor) -> None:
    """5,000 small calls: each is served or refused, and counted; the core cancels none."""
    count = 5000
    with Figures("flood: 5,000 unary calls at once on one connection") as figures:
        job = Job(server.target, METHODS[Api.ATTENTION], (SMALL.SerializeToString(),))
        idle, before = reset_peak(server.process.pid), metrics(server)
        outcomes = generator.submit(at_once, job, count, 60.0).result()
        counted = increased(before, metrics(server), "attention_requests_total")
        figures.among("calls by status", outcomes.counts(), {OK, REFUSED})
        figures.note("refused by reason", outcomes.refusals())
        # One more call, which established the connection.
        figures.equal("counted in the server's metrics", int(sum(counted.values())), count + 1)
        figures.note("seconds until the last ended", float((outcomes.due + outcomes.seconds).max()))
        figures.note("refusals p99, s", outcomes.latency(REFUSED, 99))
        figures.note("resident before, MiB", mib(idle))
        figures.note("resident peak, MiB", mib(readings(server.process.pid).peak))


def test_large_answers_that_nobody_reads(models: Path, tmp_path: Path) -> None:
    """369 answers of 8 MiB on a connection whose window stays closed: memory is bounded, and it is cut."""
    count, rows, limit, send_seconds = 369, 1024, 256 * MIB, 5.0
    options = [f"--max-in-flight-bytes={limit}", *supported(message_timeout_seconds=send_seconds)]
    message = attend_request(SELF, random_rows(rows, 4), return_weights=True)
    with (
        Figures("flood: 369 answers of 8 MiB that nobody reads") as figures,
        server_of(models, tmp_path, *options) as server,
        RawConnection(server.port, window=0) as reader,
    ):
        idle, counters = reset_peak(server.process.pid), metrics(server)
        for sent in range(1, count + 1):
            reader.call(ATTEND, message)
            if sent % GROUP == 0:
                # A server that counts what it holds ends none of them; one that forgets it ends all at once.
                wait_until(lambda goal=sent: ended_calls(server) >= goal, 1.0)  # type: ignore[misc]
                reader.receive(0.001)
        wait_until(lambda: settled(server), 30)
        peak = readings(server.process.pid).peak
        figures.note("resident before, MiB", mib(idle))
        # Beyond the limit: the arenas of two runs with their scores, and the messages being written.
        figures.at_most("resident peak above before, MiB", mib(peak - idle), mib(limit) + 192)
        reader.receive_for(3 * send_seconds)
        ends = Counter(
            ending(call.status, call.reset, closed=reader.closed) for call in reader.calls.values()
        )
        figures.note("calls by end", dict(ends))
        figures.note("farewell", reader.farewell)
        figures.equal("calls open 3 times the send timeout later", reader.open_calls, 0)
        figures.note("resident then above before, MiB", mib(readings(server.process.pid).resident - idle))
        for name, cut in increased(counters, metrics(server), "attention_cut_readers").items():
            figures.note(name, cut)
        with connected(server) as channel:
            status, seconds = timed(AttentionServiceStub(channel).Attend, SMALL)
        figures.equal("a small call afterwards", status, OK)
        figures.note("its seconds", seconds)


def ended_calls(server: ServerProcess) -> float:
    """Number of calls that have ended, as the server counts them."""
    found = metrics(server)
    return sum(value for name, value in found.items() if name.startswith("attention_requests_total"))


def ending(status: int | None, reset: int | None, *, closed: bool) -> str:
    """How a raw call ended, in words."""
    if status is not None:
        return next(code.name for code in grpc.StatusCode if code.value[0] == status)
    if reset is not None:
        return f"RST_STREAM {reset}"
    return "connection closed" if closed else "open"


def settled(server: ServerProcess) -> bool:
    """Whether the server uses almost no processor time."""
    before = busy_seconds(server.process.pid)
    time.sleep(0.5)
    return busy_seconds(server.process.pid) - before < 0.05


def test_calls_that_send_headers_only(server: ServerProcess) -> None:
    """256 calls whose message never comes, on one connection: others are served meanwhile."""
    with Figures("flood: 256 calls that send headers only") as figures:
        hold_by_headers(figures, server, connections=1)


def test_calls_that_send_headers_only_on_many_connections(wide: Path, tmp_path: Path) -> None:
    """The same on 16 connections; the time limit to receive a message frees their places."""
    options = supported(message_timeout_seconds=3)
    with (
        Figures("flood: 256 calls that send headers only on 16 connections") as figures,
        server_of(wide, tmp_path, *options) as server,
    ):
        hold_by_headers(figures, server, connections=16, wait_seconds=10)


def hold_by_headers(
    figures: Figures, server: ServerProcess, *, connections: int, wait_seconds: float = 0
) -> None:
    """Opens the calls, and times those of others meanwhile and, after a wait, again."""
    with ExitStack() as stack:
        holders = [stack.enter_context(RawConnection(server.port)) for _ in range(connections)]
        channel = stack.enter_context(connected(server))
        for at in range(256):
            holders[at % connections].open(ATTEND)
        for holder in holders:
            holder.receive(0.2)
        time_others(figures, channel, "meanwhile", attend=connections == 1)
        if wait_seconds:
            until = time.monotonic() + wait_seconds
            while time.monotonic() < until and any(holder.open_calls for holder in holders):
                for holder in holders:
                    holder.receive(0.01)
            held = sum(holder.open_calls for holder in holders)
            figures.equal(f"held calls after {wait_seconds:g} s", held, 0)
            time_others(figures, channel, "after the time limit", attend=True)
        statuses = Counter(
            ending(call.status, call.reset, closed=holder.closed)
            for holder in holders
            for call in holder.calls.values()
        )
        figures.note("held calls by end", dict(statuses))
        figures.note("farewells", "; ".join(sorted({holder.farewell for holder in holders} - {""})))


def time_others(figures: Figures, channel: grpc.Channel, when: str, *, attend: bool) -> None:
    """Times a health check, ServerLive, ServerReady and a small call of another connection."""
    inference = GRPCInferenceServiceStub(channel)
    probes = {
        "health check": (health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()),
        "ServerLive": (inference.ServerLive, open_inference_pb2.ServerLiveRequest()),
        "ServerReady": (inference.ServerReady, open_inference_pb2.ServerReadyRequest()),
    }
    for name, (call, request) in probes.items():
        status, seconds = timed(call, request)
        figures.equal(f"{name} {when}", status, OK)
        figures.at_most(f"{name} {when}, s", seconds, 1.0)
    status, seconds = timed(AttentionServiceStub(channel).Attend, SMALL)
    if attend:
        figures.equal(f"small call {when}", status, OK)
    else:
        figures.note(f"small call {when}", status)
    figures.note(f"small call {when}, s", seconds)


@pytest.mark.parametrize(
    ("count", "max_memory"),
    [(1, ""), (2, ""), (2, "1GiB")],
    ids=["one", "two-at-once", "two-at-once-in-1GiB"],
)
def test_long_sequences(wide: Path, tmp_path: Path, count: int, max_memory: str) -> None:
    """Sequences of 8,192 x 768, which are legal: the peak of memory stays within a bound."""
    request = attend_message(MODEL, random_rows(LONG_ROWS, WIDTH))
    options = supported(max_memory=max_memory) if max_memory else []
    with (
        Figures(f"flood: {count} of 8,192 x 768, max_memory {max_memory or 'as by default'}") as figures,
        server_of(wide, tmp_path, *options) as server,
        connected(server) as channel,
    ):
        attend = AttentionServiceStub(channel).Attend
        attend(SMALL, timeout=30)
        idle, started = reset_peak(server.process.pid), time.monotonic()
        sent = [attend.future(request, timeout=120) for _ in range(count)]
        ends = Counter(status_of(call) for call in sent)
        figures.among("calls by status", dict(ends), {OK, REFUSED, "INVALID_ARGUMENT"})
        figures.note("seconds", time.monotonic() - started)
        figures.note("resident before, MiB", mib(idle))
        # The scores of 12 heads as a whole would take 3,072 MiB for each sequence.
        bound = 1280 if max_memory else count * 1024
        peak = readings(server.process.pid).peak
        figures.at_most("resident peak above before, MiB", mib(peak - idle), bound)
        status, _ = timed(attend, SMALL)
        figures.equal("a small call afterwards", status, OK)


def test_a_small_call_after_a_cancelled_long_run(server: ServerProcess) -> None:
    """Two long runs are cancelled under way: a small call does not wait for their end."""
    request = attend_message(MODEL, random_rows(LONG_ROWS, WIDTH))
    with (
        Figures("flood: a small call after cancelled long runs") as figures,
        connected(server) as first,
        connected(server) as second,
    ):
        attend = AttentionServiceStub(second).Attend
        figures.note("small call alone, s", timed(attend, SMALL)[1])
        busy = busy_seconds(server.process.pid)
        counters = metrics(server)
        runs = [AttentionServiceStub(first).Attend.future(request, timeout=120) for _ in range(2)]
        assert wait_until(lambda: busy_seconds(server.process.pid) - busy > 1), "no run began"
        for run in runs:
            run.cancel()
        status, seconds = timed(attend, SMALL, timeout=120)
        figures.equal("small call", status, OK)
        figures.at_most("small call, s", seconds, 1.0)
        started = time.monotonic()
        wait_until(lambda: settled(server), 60)
        figures.at_most("seconds until the server is idle", time.monotonic() - started, 3.0)
        for name, ended in increased(counters, metrics(server), "attention_terminated_runs").items():
            figures.note(name, ended)


def test_small_calls_beside_long_ones(server: ServerProcess, scale: Scale) -> None:
    """A small call uses the free slot beside a long run and does not wait for its end."""
    group = attend_message(MODEL, *(random_rows(512, WIDTH, seed) for seed in range(8)))
    with (
        Figures(f"flood: small calls beside long ones, 2 x {scale.pairs} pairs") as figures,
        connected(server) as first,
        connected(server) as second,
    ):
        long, small = AttentionServiceStub(first).Attend, AttentionServiceStub(second).Attend
        for call in (long, small):
            call(SMALL, timeout=30)
        pairs = [pair(long, small, group, DELAYS[at % len(DELAYS)]) for at in range(scale.pairs)]
        # On one connection, both arrive in one turn of the thread that takes calls.
        pairs += [pair(long, long, group, DELAYS[at % len(DELAYS)]) for at in range(scale.pairs)]
        waits, runs = np.array(pairs).T
        figures.note("long call alone with its small one, median s", float(np.median(runs)))
        figures.note("small call, median s", float(np.median(waits)))
        figures.note("small call, longest s", float(waits.max()))
        # A wait for the end of the long run would take most of its duration.
        figures.equal("small calls that waited for half of the long one", int((waits > runs / 2).sum()), 0)


def pair(
    long: UnaryMethod,
    small: UnaryMethod,
    group: pb.AttendRequest,
    delay: float,
) -> tuple[float, float]:
    """Sends a long call and then a small one; returns the seconds of the small one and of the long one."""
    started = time.monotonic()
    running = long.future(group, timeout=60)
    time.sleep(delay)
    sent = time.monotonic()
    small(SMALL, timeout=60)
    waited = time.monotonic() - sent
    running.result()
    return waited, time.monotonic() - started


def test_headers_that_refer_to_one_large_header_many_times(artifacts: Path, tmp_path: Path) -> None:
    with (
        Figures("flood: 500 calls, 6 MB in all, whose headers refer 12,000 times to one of 4 KB") as figures,
        server_of(artifacts, tmp_path) as server,
        RawConnection(server.port) as connection,
    ):
        idle = reset_peak(server.process.pid)
        for _ in range(500):
            connection.open_whole(METADATA, references=12_000)
        connection.receive_for(60)
        figures.equal("calls open", connection.open_calls, 0)
        peak = readings(server.process.pid).peak
        figures.note("resident before, MiB", mib(idle))
        figures.at_most("resident peak above before, MiB", mib(peak - idle), 400)
