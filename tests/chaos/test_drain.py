"""Drains under load, and workers that are killed or stopped: nothing that was accepted is lost."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from benchmarks.processes import PROC, is_running, process_tree
from scripts.local_server import ServerProcess
from tests.chaos import callers
from tests.chaos.callers import OWN_CONNECTION, Actor, Question, Tally
from tests.chaos.figures import Figures
from tests.chaos.http2 import RawConnection
from tests.chaos.process import is_serving, server_of, supported, wait_until
from tests.chaos.scale import Scale

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
MODEL, WIDTH = "multi-head-768x12", 768
ATTEND = "/attention.v1.AttentionService/Attend"
OK, UNAVAILABLE = "OK", "UNAVAILABLE"
LOAD_SECONDS = 0.3
GRACE_SECONDS = 10
RACING, CERTAIN = 64, 4
# Calls that may fail with UNAVAILABLE, and calls that end without an answer.
MAY_FAIL = ("one connection", "new connections", "streams", "racing with SIGTERM")
MAY_END = ("idle streams", "health Watches")
EXIT_SECONDS = 60.0
# How long after the grace a process that has not ended may be there.
KILL_SECONDS = 8.0
KILLS_PER_SERVER = 4
"""A supervisor doubles its pause before each restart of a worker; a new one starts with a short pause."""


@pytest.fixture(scope="module")
def small() -> Question:
    """A request that takes a millisecond."""
    return Question.of(MODEL, 6, WIDTH)


@pytest.fixture(scope="module")
def long() -> Question:
    """A request that takes a good part of a second."""
    return Question.of(MODEL, 1000, WIDTH)


def test_drains_under_load(wide: Path, tmp_path: Path, scale: Scale, small: Question, long: Question) -> None:
    """SIGTERM: accepted calls are answered, others end with UNAVAILABLE, and the exit is prompt."""
    tallies = {kind: Tally() for kind in (*MAY_FAIL, *MAY_END, "accepted", "half-sent", "with retries")}
    patient = tallies["with retries"]
    with Figures(f"drain: {scale.drains} times SIGTERM under load") as figures, ExitStack() as stack:
        exits, port, retry = [], 0, None
        for _ in range(scale.drains):
            with server_of(wide, tmp_path, f"--port={port}", f"--grace-seconds={GRACE_SECONDS}") as server:
                port = server.port
                if retry is None:
                    retry = callers.retrying(server.target, small, patient)
                    stack.callback(retry.stop)
                exits.append(drain(server, small, long, tallies))
        # The client with retries meets one more server before it stops.
        with server_of(wide, tmp_path, f"--port={port}"):
            answered = patient.statuses[OK]
            assert wait_until(lambda: patient.statuses[OK] > answered + 10), "retries are stuck"
            assert retry is not None
            retry.stop()
            retry.join(callers.CALL_SECONDS)
        allowed = {"accepted": {OK}, "with retries": {OK}, "half-sent": {UNAVAILABLE}}
        for kind, tally in tallies.items():
            figures.among(f"calls: {kind}", dict(tally.statuses), allowed.get(kind, {OK, UNAVAILABLE}))
            if tally.details:
                figures.note(f"failed: {kind}", dict(tally.details))
        figures.equal("accepted calls answered", tallies["accepted"].statuses[OK], CERTAIN * scale.drains)
        figures.equal("wrong answers", sum(tally.wrong for tally in tallies.values()), 0)
        figures.note("exit after the last answer, median s", sorted(exits)[len(exits) // 2])
        figures.at_most("exit after the last answer, longest s", max(exits), 1.0)


def drain(server: ServerProcess, small: Question, long: Question, tallies: dict[str, Tally]) -> float:
    """Drains one server under load; returns the seconds from the last answer to its exit."""
    quiet = threading.Event()
    actors = load(server.target, small, tallies, quiet)
    with (
        RawConnection(server.port) as half,
        RawConnection(server.port),
        grpc.insecure_channel(server.target, OWN_CONNECTION) as channel,
    ):
        half.open(ATTEND)
        half.send_part(half.open(ATTEND), small.message.SerializeToString(), 1000)
        half.receive(0.05)
        time.sleep(LOAD_SECONDS)
        stub = AttentionServiceStub(channel)
        certain = [stub.Attend.future(long.message, timeout=EXIT_SECONDS) for _ in range(CERTAIN)]
        # On one connection calls arrive in the order in which they are made: these have been accepted.
        stub.GetModel(pb.GetModelRequest(name=MODEL), timeout=EXIT_SECONDS)
        racing = [stub.Attend.future(small.message, timeout=EXIT_SECONDS) for _ in range(RACING // 2)]
        quiet.set()
        server.process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        racing += [stub.Attend.future(small.message, timeout=EXIT_SECONDS) for _ in range(RACING // 2)]
        list(callers.collect(certain, long, tallies["accepted"]))
        list(callers.collect(racing, small, tallies["racing with SIGTERM"]))
        with suppress(subprocess.TimeoutExpired):  # a server that hangs is killed by its context
            server.process.wait(EXIT_SECONDS)
        ended = time.monotonic()
        half.receive_for(2)
        ends = [raw_status(call.status, call.reset) for call in half.calls.values()]
        tallies["half-sent"].statuses.update(ends)
    for actor in actors:
        actor.stop()
    for actor in actors:
        actor.join(EXIT_SECONDS)
    return ended - max(signalled, *(tallies[kind].last_answer for kind in (*MAY_FAIL, "accepted")))


def load(target: str, small: Question, tallies: dict[str, Tally], quiet: threading.Event) -> list[Actor]:
    """Starts callers of every kind; those of streams send nothing more once `quiet` is set."""
    actors = []
    for _ in range(2):
        actors += [
            callers.unary(target, small, tallies["one connection"]),
            callers.reconnecting(target, small, tallies["new connections"]),
            callers.stream(target, small, tallies["streams"], quiet=quiet),
            callers.stream(target, small, tallies["idle streams"], window=0),
            callers.watch(target, tallies["health Watches"]),
        ]
    return actors


def test_drain_of_a_busy_stream(wide: Path, tmp_path: Path, small: Question) -> None:
    """A caller who never stops sending on a stream cannot hold the drain beyond the grace."""
    grace, tally = 3.0, Tally()
    with (
        Figures("drain: a stream whose caller never stops sending") as figures,
        server_of(wide, tmp_path, f"--grace-seconds={grace}") as server,
    ):
        actor = callers.stream(server.target, small, tally)
        assert wait_until(lambda: tally.statuses[OK] > 100)
        started = time.monotonic()
        figures.equal("exit status", server.stop(), 0)
        figures.at_most("seconds of the drain, with a grace of 3 s", time.monotonic() - started, grace + 2)
        actor.join(EXIT_SECONDS)
        figures.among("answers, and the end of the stream", dict(tally.statuses), {OK, UNAVAILABLE})
        figures.equal("wrong answers", tally.wrong, 0)


def raw_status(status: int | None, reset: int | None) -> str:
    """The status that a gRPC client makes of a raw call's end."""
    if status is not None:
        return next(code.name for code in grpc.StatusCode if code.value[0] == status)
    # RST_STREAM with CANCEL is CANCELLED; with REFUSED_STREAM, or a closed connection, UNAVAILABLE.
    return {8: "CANCELLED", 7: UNAVAILABLE, None: UNAVAILABLE}.get(reset, f"RST_STREAM {reset}")


def test_killed_workers(wide: Path, tmp_path: Path, scale: Scale, small: Question) -> None:
    """kill -9 of a worker: only its own calls fail, with UNAVAILABLE, and none of a client with retries."""
    own, others, patient, attached = Tally(), Tally(), Tally(), 0
    with Figures(f"kill -9 of a worker, {scale.kills} times") as figures:
        for first in range(0, scale.kills, KILLS_PER_SERVER):
            with workers_of(wide, tmp_path) as server:
                retry = [callers.retrying(server.target, small, patient) for _ in range(2)]
                answered = patient.statuses[OK]
                assert wait_until(lambda least=answered: patient.statuses[OK] > least)  # type: ignore[misc]
                for kill in range(first, min(first + KILLS_PER_SERVER, scale.kills)):
                    attached += kill_worker(server, kill % 2, small, own, others)
                for actor in retry:
                    actor.stop()
                for actor in retry:
                    actor.join(callers.CALL_SECONDS)
        figures.note("connections to the killed workers", attached)
        figures.among("calls on them", dict(own.statuses), {OK, UNAVAILABLE})
        figures.at_most("failed calls on them", own.statuses[UNAVAILABLE], attached)
        figures.among("calls on connections to the other worker", dict(others.statuses), {OK})
        figures.among("client with retries", dict(patient.statuses), {OK})
        figures.equal("wrong answers", own.wrong + others.wrong + patient.wrong, 0)
        figures.note("failed, by details", dict(own.details + others.details + patient.details))


def kill_worker(server: ServerProcess, number: int, question: Question, own: Tally, others: Tally) -> int:
    """Kills a worker under load and waits for its replacement; returns the connections that it had."""
    workers = worker_pids(server)
    victim = workers[number]
    actors: list[Actor] = []
    attached = 0
    for _ in range(8):
        channel, port = connect(server)
        is_own = port in peer_ports(victim, server.port)
        attached += is_own
        tally, stub = own if is_own else others, AttentionServiceStub(channel)
        step = partial(callers.call_once, stub, question.message, question, tally)
        actors.append(Actor(step, channel.close))
    time.sleep(LOAD_SECONDS)
    os.kill(victim, signal.SIGKILL)
    assert wait_until(lambda: victim not in worker_pids(server) and len(worker_pids(server)) == 2, 60)
    time.sleep(LOAD_SECONDS)
    for actor in actors:
        actor.stop()
    for actor in actors:
        actor.join(callers.CALL_SECONDS)
    return attached


def connect(server: ServerProcess) -> tuple[grpc.Channel, int]:
    """A connection of its own that is established, and its local port."""
    while True:
        before = client_ports(server.port)
        channel = grpc.insecure_channel(server.target, OWN_CONNECTION)
        grpc.channel_ready_future(channel).result(timeout=30)
        new = client_ports(server.port) - before
        if len(new) == 1:
            return channel, new.pop()
        channel.close()  # a client with retries connected at the same moment


def test_a_stopped_worker_is_replaced(wide: Path, tmp_path: Path) -> None:
    """SIGSTOP of a worker: it is noticed, killed and replaced; and SIGTERM ends the service all the same."""
    limit, grace = 3.0, 5.0
    options = [f"--grace-seconds={grace}", *supported(worker_timeout_seconds=limit)]
    with Figures("SIGSTOP of a worker") as figures, workers_of(wide, tmp_path, *options) as server:
        victim = worker_pids(server)[0]
        os.kill(victim, signal.SIGSTOP)
        started = time.monotonic()
        noticed = wait_until(lambda: not is_running(victim), 4 * limit)
        figures.equal("killed", noticed, expected=True)
        figures.at_most("seconds until then", time.monotonic() - started, 2 * limit)
        replaced = wait_until(lambda: len(worker_pids(server)) == 2, 30) if noticed else False
        figures.equal("replaced", replaced, expected=True)
        victim = worker_pids(server)[-1]
        os.kill(victim, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        ended = wait_until(lambda: server.process.poll() is not None, 4 * grace)
        figures.equal("SIGTERM with a stopped worker ends the service", ended, expected=True)
        figures.at_most(
            "seconds until then, with a grace of 5 s", time.monotonic() - started, grace + KILL_SECONDS
        )


@contextmanager
def workers_of(repository: Path, folder: Path, *options: str) -> Iterator[ServerProcess]:
    """A server of two workers. No worker outlives the block, stopped or not."""
    pids: set[int] = set()
    try:
        with server_of(repository, folder, "--workers=2", *options) as server:
            assert wait_until(lambda: len(worker_pids(server)) == 2)
            assert is_serving(server.target)
            yield server
            pids.update(process_tree(server.process.pid)[1:])
    finally:
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def worker_pids(server: ServerProcess) -> list[int]:
    """The workers that listen on the server's port, in order of their start."""
    listeners = sockets(server.port, listening=True)
    return sorted(pid for pid in process_tree(server.process.pid)[1:] if own_inodes(pid) & listeners.keys())


def client_ports(port: int) -> set[int]:
    """The local ports of this process's connections to a port."""
    mine = own_inodes(os.getpid())
    return {local for inode, (local, remote) in sockets().items() if remote == port and inode in mine}


def peer_ports(pid: int, port: int) -> set[int]:
    """The clients' ports of a process's connections on a port, once it has accepted them."""
    inodes = own_inodes(pid)
    return {remote for inode, (local, remote) in sockets().items() if local == port and inode in inodes}


def sockets(port: int | None = None, *, listening: bool = False) -> dict[str, tuple[int, int]]:
    """The TCP sockets of this machine by inode: local and remote port; listening ones on a port if asked."""
    state, found = "0A" if listening else "01", {}
    for name in ("tcp", "tcp6"):
        for line in (PROC / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            local, remote = (int(fields[at].rpartition(":")[2], 16) for at in (1, 2))
            if fields[3] == state and port in (None, local):
                found[fields[9]] = (local, remote)
    return found


def own_inodes(pid: int) -> set[str]:
    """The inodes of a process's sockets; none once it has ended."""
    found = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found
