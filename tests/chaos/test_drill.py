"""The drill: of three servers some are stopped, frozen, killed and replaced; no call of a client fails.

`make drill` runs it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import pytest

from tests.chaos import callers
from tests.chaos.callers import Question, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import wait_until
from tests.chaos.servers import STOP_SECONDS, Server, three_servers

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
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


def test_no_call_fails_while_servers_stop_freeze_and_start(wide: Path, tmp_path: Path) -> None:
    with Figures("drill of three processes") as figures, three_servers(wide, tmp_path) as servers:
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
