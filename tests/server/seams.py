"""The seams through which tests watch, hold and break runs of real sessions."""

import dataclasses
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.observer import Run
from server.engine.scheduler import Scheduler
from server.engine.session import Session
from server.engine.values import Array, Result, Work
from tests.server.samples import Lengths, work_of

PATIENCE_SECONDS = 30
Tap = Callable[[dict[str, Array]], None]


class Tapped(Session):
    """A real session that shows its inputs to a function before it runs."""

    def __init__(self, session: Session, tap: Tap) -> None:
        self._tapped = session
        self._tap = tap
        self.provider = session.provider

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self._tap(inputs)
        return self._tapped.run(inputs)


def tapped(model: LoadedModel, tap: Tap) -> LoadedModel:
    """The same model, each run of which is shown first."""
    return dataclasses.replace(
        model, sessions={kind: Tapped(session, tap) for kind, session in model.sessions.items()}
    )


class Gate:
    """Holds runs until it is opened, and says when the first has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, inputs: dict[str, Array]) -> None:  # noqa: ARG002 - a tap
        self.entered.set()
        if not self._opened.wait(PATIENCE_SECONDS):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._opened.set()


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def ran(self, run: Run) -> None:
        self.runs.append(run)

    @property
    def sizes(self) -> list[int]:
        return [run.sequences for run in self.runs]


class Held:
    """A scheduler whose first run is under way and held, so that all that is submitted waits.

    `tap` sees the inputs of every later run. Leaving the block lets everything run to its end.
    """

    def __init__(self, model: LoadedModel, tap: Tap = lambda _: None, **limits: int) -> None:
        self.gate = Gate()
        self.recorder = Recorder()
        self.model = tapped(model, tap)
        self.scheduler = Scheduler(Limits(**limits), self.recorder)
        self.first = self.submit([(1, 1)], model=tapped(model, self.gate))
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def submit(self, lengths: Lengths, model: LoadedModel | None = None, **options: Any) -> Work:
        work = work_of(model or self.model, lengths, **options)
        self.scheduler.submit(work)
        return work

    def finish(self) -> None:
        self.gate.open()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    @property
    def later_sizes(self) -> list[int]:
        """Sequences of each run after the held one."""
        return self.recorder.sizes[1:]


def outcome(work: Work) -> Result:
    """The result of a work, or its error raised."""
    return work.future.result(PATIENCE_SECONDS)
