"""Callers that ask for too much at once: many calls, large answers, half-sent messages, long sequences."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from benchmarks.processes import process_tree, processor_seconds
from scripts.local_server import ServerProcess
from tests.chaos import callers
from tests.chaos.figures import Figures
from tests.chaos.process import (
    MIB,
    MODEL,
    OWN_CONNECTION,
    attend_message,
    random_rows,
    readings,
    reset_peak,
    server_of,
    wait_until,
)
from tests.server.samples import SELF
from tests.support.prometheus import calls_ended

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
OK, REFUSED = "OK", "RESOURCE_EXHAUSTED"
SMALL, LONG = attend_message(MODEL, random_rows(6)), attend_message(MODEL, random_rows(8192))
# Calls whose answers nobody reads that are sent at a time.
GROUP = 8


@contextmanager
def connected(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A connection of its own, which is established."""
    with grpc.insecure_channel(server.target, OWN_CONNECTION) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        yield channel


def is_answered(figures: Figures, name: str, call: Any, request: object) -> None:
    """Adds that a call is answered within a second."""
    started, status = time.monotonic(), OK
    try:
        call(request, timeout=120)
    except grpc.RpcError as error:
        status = error.code().name
    figures.equal(name, status, OK)
    figures.at_most(f"{name}, s", time.monotonic() - started, 1.0)


def growth(figures: Figures, server: ServerProcess, idle: int, bound: float) -> None:
    """Adds how far the resident memory grew at its peak, in MiB."""
    figures.note("resident before, MiB", idle / MIB)
    peak = readings(server.process.pid).peak
    figures.at_most("resident peak above before, MiB", (peak - idle) / MIB, bound)


def test_large_answers_that_nobody_reads(models: Path, tmp_path: Path) -> None:
    """240 answers of 8 MiB that a connection does not read: memory is bounded, and it is cut."""
    count, limit_mib, send_seconds = 240, 256, 5.0
    options = (f"--max-in-flight-bytes={limit_mib}MiB", f"--message-timeout-seconds={send_seconds}")
    message = attend_message(SELF, random_rows(1024, 4), return_weights=True)
    with (
        Figures("flood: 240 answers of 8 MiB that nobody reads") as figures,
        server_of(models, tmp_path, *options) as server,
        connected(server) as reader,
    ):
        idle, calls = reset_peak(server.process.pid), []  # a call that nobody refers to is cancelled
        for sent in range(1, count + 1):
            calls.append(callers.unread(reader, message))
            if sent % GROUP == 0:
                # A server that counts what it holds ends none of them; one that forgets it ends all at once.
                wait_until(lambda goal=sent: calls_ended(server.metrics_port) >= goal, 1.0)  # type: ignore[misc]
        wait_until(lambda: settled(server), 30)
        # Beyond the limit: the arenas of two runs with their scores, and the messages being written.
        growth(figures, server, idle, limit_mib + 192)
        wait_until(lambda: calls_ended(server.metrics_port) >= count, 3 * send_seconds)
        ended = calls_ended(server.metrics_port)
        figures.at_least("calls ended 3 times the send timeout later", ended, count)
        with connected(server) as channel:
            small = attend_message(SELF, random_rows(6, 4))
            is_answered(figures, "a small call afterwards", AttentionServiceStub(channel).Attend, small)


def settled(server: ServerProcess) -> bool:
    """Whether the server uses almost no processor time."""
    before = processor_seconds(process_tree(server.process.pid))
    time.sleep(0.5)
    return processor_seconds(process_tree(server.process.pid)) - before < 0.05


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
        is_answered(figures, "small call afterwards", attend, SMALL)
