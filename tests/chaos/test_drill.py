"""The drill: of three servers some are stopped, frozen, killed and replaced; no call of a client fails.

`make drill` runs it.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

import pytest
from attention_client import AttentionClient

from scripts import local_server
from tests.chaos import callers
from tests.chaos.callers import Question, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import wait_until
from tests.support.processes import free_ports
from tests.support.prometheus import calls_ended

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
START_SECONDS, STOP_SECONDS = 60.0, 60.0
# Several servers share the cores of one machine.
THREADS = 1
CALLERS = 4
# Pause of a caller between two calls: the load leaves the servers of one machine idle time.
PAUSE = 0.03
# Two attempts and more must fit into the client's timeout, 30 s.
CLIENTS = {"default": {}, "attempt_timeout=2": {"attempt_timeout": 2.0}}
# A server's smallest share of the calls if the balance is restored: a quarter less than a third.
MIN_SHARE = 0.25
RETURN_SECONDS = 30.0
# A client finds out within 20 seconds that a server is frozen.
WATCHED_SECONDS, FROZEN_SECONDS = scaled(2, 5), scaled(4, 25)


class Server:
    """A server on loopback, whose address stays the same when it is ended and started.

    Attributes:
        target: HOST:PORT of gRPC.
        process: The process that was started last.
    """

    def __init__(self, repository: Path, log: Path) -> None:
        port, self._metrics_port = free_ports(2)
        self.target = f"127.0.0.1:{port}"
        options = (f"--port={port}", f"--metrics-port={self._metrics_port}", f"--threads={THREADS}")
        self._start = partial(local_server.start, repository, log, *options)
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it has loaded its models."""
        self.process = self._start()
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def end(self, number: Signals) -> None:
        """Sends a signal that ends it, and waits until it has ended."""
        self.process.send_signal(number)
        self.process.wait(STOP_SECONDS)

    def answered(self) -> float:
        """Number of calls of Attend that it has answered since it started."""
        return calls_ended(self._metrics_port, code="OK", method="/attention.v1.AttentionService/Attend")


def test_no_call_fails_while_servers_stop_freeze_and_start(wide: Path, tmp_path: Path) -> None:
    with Figures("drill of three processes") as figures, ExitStack() as stack:
        servers = []
        for number in range(3):
            servers.append(Server(wide, tmp_path / f"{number}.log"))
            stack.callback(servers[-1].end, SIGKILL)
        targets = [server.target for server in servers]
        question, tallies = Question(6), {name: Tally() for name in CLIENTS}
        actors = [
            callers.retrying(targets, question, tallies[name], pause=PAUSE, **options)
            for name, options in CLIENTS.items()
            for _ in range(CALLERS)
        ]
        end_and_start(servers, figures)
        callers.stop(actors)
        broken = [actor.error for actor in actors if actor.is_alive() or actor.error]
        figures.equal("callers that broke", broken, [])
        for name, tally in tallies.items():
            figures.among(f"calls, {name}", dict(tally.statuses), {"OK"})
            figures.at_least(f"answers, {name}", tally.statuses["OK"], 1)
            figures.equal(f"wrong answers, {name}", tally.wrong, 0)


def end_and_start(servers: Sequence[Server], figures: Figures) -> None:
    """Stops one server, freezes one and kills one, and then replaces all, one by one."""
    shares(servers, figures, "all servers")
    for server, number in zip(servers, (SIGTERM, SIGSTOP, SIGKILL), strict=True):
        server.process.send_signal(number)
        time.sleep(FROZEN_SECONDS if number is SIGSTOP else WATCHED_SECONDS)
        if number is SIGSTOP:
            server.process.send_signal(SIGCONT)
        else:
            server.process.wait(STOP_SECONDS)
            server.start()
        answers_again(server, figures, number.name)
        shares(servers, figures, f"after {number.name} of one")
    for server in servers:
        server.end(SIGTERM)
        server.start()
        answers_again(server, figures, "replaced")
    shares(servers, figures, "all replaced")


def shares(servers: Sequence[Server], figures: Figures, when: str) -> None:
    """Adds the share of the calls that each server answers in an interval, 0 to 1."""
    before = [server.answered() for server in servers]
    time.sleep(WATCHED_SECONDS)
    counts = [server.answered() - count for server, count in zip(servers, before, strict=True)]
    for count in counts:
        figures.at_least(f"{when}: share of a server", count / (sum(counts) or 1), MIN_SHARE)


def answers_again(server: Server, figures: Figures, when: str) -> None:
    """Adds how long a server takes to answer another call."""
    begun, before = time.monotonic(), server.answered()
    wait_until(lambda: server.answered() > before, RETURN_SECONDS)
    figures.at_most(f"{when}: seconds until it answers", time.monotonic() - begun, RETURN_SECONDS)
