"""Drains under load, and workers that are killed: nothing that was accepted is lost."""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import ServerProcess
from tests.chaos import callers
from tests.chaos.callers import CALL_SECONDS, OK, Question, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import MODEL, OWN_CONNECTION, server_of, wait_until
from tests.server.watched import watched
from tests.support.processes import free_ports

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
UNAVAILABLE = "UNAVAILABLE"
DRAINS, KILLS = scaled(5, 50), scaled(4, 20)
LOAD_SECONDS = 0.3
GRACE_SECONDS = 10
RACING, CERTAIN = 64, 4
# A supervisor doubles its pause before each restart of a worker; a new one starts with a short pause.
KILLS_PER_SERVER = 4
PATIENT: dict[str, Any] = {"max_retries": 4, "wait_for_ready": True, "timeout": CALL_SECONDS}
ALLOWED = {
    **{kind: {OK, UNAVAILABLE} for kind in ("connections", "streams", "idle streams", "racing")},
    "accepted": {OK},
    "with retries": {OK},
    "without a message": {UNAVAILABLE},
}


@pytest.fixture(scope="module")
def small() -> Question:
    """A request that takes a millisecond."""
    return Question(6)


def test_drains_under_load(wide: Path, tmp_path: Path, small: Question) -> None:
    """SIGTERM: accepted calls are answered, others end with UNAVAILABLE, and the exit is prompt."""
    long, tallies = Question(1000), {kind: Tally() for kind in ALLOWED}
    (port,), patient = free_ports(), tallies["with retries"]
    options = (f"--port={port}", f"--grace-seconds={GRACE_SECONDS}")
    with Figures(f"drain: {DRAINS} times SIGTERM under load") as figures:
        retry, exits = callers.retrying(f"127.0.0.1:{port}", small, patient, **PATIENT), []
        for _ in range(DRAINS):
            with server_of(wide, tmp_path, *options) as server:
                exits.append(drain(server, small, long, tallies))
        # The client with retries meets one more server before it stops.
        with server_of(wide, tmp_path, *options):
            answered = patient.statuses[OK]
            assert wait_until(lambda: patient.statuses[OK] > answered + 10), "retries are stuck"
            callers.stop([retry])
        for kind, tally in tallies.items():
            figures.among(f"calls: {kind}", dict(tally.statuses), ALLOWED[kind])
        figures.equal("accepted calls answered", tallies["accepted"].statuses[OK], CERTAIN * DRAINS)
        figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)
        figures.at_most("exit after the last answer, longest s", max(exits), 1.0)


def drain(server: ServerProcess, small: Question, long: Question, tallies: dict[str, Tally]) -> float:
    """Drains one server under load; returns the seconds from the last answer to its exit."""
    quiet = threading.Event()
    actors = []
    for _ in range(2):
        actors += [
            callers.unary(server.target, small, tallies["connections"]),
            callers.stream(server.target, small, tallies["streams"], quiet=quiet),
            callers.stream(server.target, small, tallies["idle streams"], window=0),
        ]
    with (
        grpc.insecure_channel(server.target, OWN_CONNECTION) as channel,
        callers.headers_only(channel, 2) as opened,
    ):
        time.sleep(LOAD_SECONDS)
        stub = AttentionServiceStub(channel)
        certain = [stub.Attend.future(long.message, timeout=CALL_SECONDS) for _ in range(CERTAIN)]
        # On one connection calls arrive in the order in which they are made: these have been accepted.
        stub.GetModel(pb.GetModelRequest(name=MODEL), timeout=CALL_SECONDS)
        racing = [stub.Attend.future(small.message, timeout=CALL_SECONDS) for _ in range(RACING // 2)]
        quiet.set()
        server.process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        racing += [stub.Attend.future(small.message, timeout=CALL_SECONDS) for _ in range(RACING // 2)]
        for call in certain:
            callers.count(call, long, tallies["accepted"])
        for call in racing:
            callers.count(call, small, tallies["racing"])
        with suppress(subprocess.TimeoutExpired):  # a server that hangs is killed by its context
            server.process.wait(CALL_SECONDS)
        ended = time.monotonic()
        tallies["without a message"].statuses.update(call.code().name for call in opened)
    callers.stop(actors)
    answered = ("connections", "streams", "racing", "accepted")
    return ended - max(signalled, *(tallies[kind].last_answer for kind in answered))


def test_killed_workers(wide: Path, tmp_path: Path, small: Question) -> None:
    """kill -9 of a worker: one call of each of its connections fails, and none of a client with retries."""
    direct, patient, survived = Tally(), Tally(), 0
    with Figures(f"kill -9 of a worker, {KILLS} times") as figures:
        for number in range(KILLS // KILLS_PER_SERVER):
            (tmp_path / f"{number}").mkdir()
            with watched(wide, tmp_path / f"{number}", "--workers=2") as service:
                target = f"127.0.0.1:{service.ports()[0]}"
                retry = [callers.retrying(target, small, patient, **PATIENT) for _ in range(2)]
                for kill in range(KILLS_PER_SERVER):
                    victim = service.pids(2 + kill)[kill]
                    actors = [callers.unary(target, small, direct) for _ in range(8)]
                    time.sleep(LOAD_SECONDS)
                    os.kill(victim, signal.SIGKILL)
                    service.pids(3 + kill)
                    service.until(" listening ")
                    time.sleep(LOAD_SECONDS)
                    survived += sum(actor.is_alive() for actor in actors)
                    callers.stop(actors)
                callers.stop(retry)
        figures.at_least("connections that lost no call", survived, 1)
        figures.among("calls on connections", dict(direct.statuses), {OK, UNAVAILABLE})
        figures.among("calls with retries", dict(patient.statuses), {OK})
        figures.at_least("calls with retries answered", patient.statuses[OK], 100)
        figures.equal("wrong answers", direct.wrong + patient.wrong, 0)
