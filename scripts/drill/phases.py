"""The phases of the drill: what happens to the servers while the callers go on, and what is measured."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from scripts.drill.load import Caller
from scripts.drill.servers import Server

# How long a returned server may take until it has answered a call.
RETURN_SECONDS = 30.0
LOOK_SECONDS = 0.1


@dataclass
class Phase:
    """One phase, and what was measured in it.

    Attributes:
        name: What happened.
        begin: Its begin, on the clock of time.monotonic.
        end: Its end.
        shares: Share of the calls that each server answered, 0 to 1, by name; empty if it was not measured.
        returned_seconds: Until a server that came back answered its first call; None if none came back.
    """

    name: str
    begin: float
    end: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    returned_seconds: float | None = None


class Drill:
    """Runs the phases one after the other."""

    def __init__(self, servers: Sequence[Server], seconds: float, frozen_seconds: float) -> None:
        """Takes servers that are ready and called.

        Args:
            servers: Three or more.
            seconds: How long each phase is watched, in seconds.
            frozen_seconds: How long a server stays frozen, in seconds.
        """
        self.phases: list[Phase] = []
        self._servers, self._seconds, self._frozen_seconds = servers, seconds, frozen_seconds

    def run(self, upgrade: str | None, report: Callable[[Phase], None]) -> None:
        """Runs all phases.

        Args:
            upgrade: Image of the upgrade; None starts the same image or program again.
            report: Called after each phase.
        """
        for phase in self._run(upgrade):
            self.phases.append(phase)
            report(phase)

    def _run(self, upgrade: str | None) -> Iterator[Phase]:
        first, second, third = self._servers[:3]
        yield self._balanced("all servers")
        yield self._during("one is stopped", first.stop, self._seconds)
        yield self._returning("it is started again", first, first.start)
        yield self._during("one is frozen", second.freeze, self._frozen_seconds)
        yield self._returning("it runs again", second, second.thaw)
        yield self._during("one is killed", third.kill, self._seconds)
        yield self._returning("it is started again", third, third.start)
        for server in self._servers:
            yield self._during(f"upgrade: {server.name} is replaced", lambda: _replace(server, upgrade), 0)  # noqa: B023 - run at once
        yield self._balanced("after the upgrade of all")

    def _during(self, name: str, act: Callable[[], None], seconds: float) -> Phase:
        with self._phase(name) as phase:
            act()
            time.sleep(seconds)
        return phase

    def _returning(self, name: str, server: Server, act: Callable[[], None]) -> Phase:
        with self._phase(name) as phase:
            act()
            server.wait_until_ready()
            phase.returned_seconds = _first_answer(server)
            phase.shares = self._shares()
        return phase

    def _balanced(self, name: str) -> Phase:
        with self._phase(name) as phase:
            phase.shares = self._shares()
        return phase

    def _shares(self) -> dict[str, float]:
        before = [server.answered() for server in self._servers]
        time.sleep(self._seconds)
        counts = [server.answered() - count for server, count in zip(self._servers, before, strict=True)]
        total = sum(counts) or 1
        return {server.name: count / total for server, count in zip(self._servers, counts, strict=True)}

    @contextmanager
    def _phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name, time.monotonic())
        yield phase
        phase.end = time.monotonic()


def quantiles(caller: Caller, phase: Phase) -> tuple[int, int, float, float, float]:
    """Of a caller's calls that ended in a phase: number, failures, median, 99th percentile and largest time.

    Times are in milliseconds.
    """
    calls = caller.between(phase.begin, phase.end)
    if not calls:
        return 0, 0, 0.0, 0.0, 0.0
    times = np.array([1000 * call.seconds for call in calls])
    failed = sum(bool(call.error) for call in calls)
    return len(calls), failed, float(np.median(times)), float(np.quantile(times, 0.99)), float(times.max())


def _replace(server: Server, image: str | None) -> None:
    server.stop()
    server.start(image)
    server.wait_until_ready()
    _first_answer(server)


def _first_answer(server: Server) -> float:
    """Seconds from now until a server has answered a call more.

    Raises:
        TimeoutError: It answers none.
    """
    begin, before = time.monotonic(), server.answered()
    while time.monotonic() - begin < RETURN_SECONDS:
        with suppress(OSError):
            if server.answered() > before:
                return time.monotonic() - begin
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"{server.name} is ready, and no call reached it within {RETURN_SECONDS:g} s")
