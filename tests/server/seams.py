"""The seams through which tests watch, hold and break runs of real sessions."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import grpc

from attention_serving.artifact.kernels import AttentionOperator
from attention_serving.artifact.manifest import IN_BLOCKS, GraphKind
from attention_serving.server.api.calls import Recorder as CallsRecorder
from attention_serving.server.engine.costs import Costs, RunCost
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.events import (
    CallEvent,
    Event,
    EventLog,
    FailureEvent,
    RefusalEvent,
    RunEvent,
    TerminationEvent,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.run.session import RunControl, Session, Value
from attention_serving.server.engine.schedule.queue import Next, Queue
from attention_serving.server.engine.types import Array, Result
from attention_serving.server.process.grpc_server import GrpcServer
from attention_serving.server.security.guard import Guard
from attention_serving.server.settings import Settings
from tests.server.samples import Lengths, Sample, validated_of

PATIENCE_SECONDS = 30
# The message of errors that tests cause.
MESSAGE = "what the runtime said"
Tap = Callable[[dict[str, Array]], None]
# A second that no sequence adds to: to run together always gains.
SAME_FOR_ALL = RunCost(fixed=1, row=0, pair=0)


class Tapped(Session):
    """A real session that shows its inputs to a function before it runs."""

    def __init__(self, session: Session, tap: Tap) -> None:
        vars(self).update(vars(session))
        self._tapped = session
        self._tap = tap

    def run(self, inputs: dict[str, Value], control: RunControl | None = None) -> dict[str, Array]:
        self._tap(inputs)
        return self._tapped.run(inputs, control)

    def shrink_arena(self, inputs: dict[str, Array]) -> None:
        self._tapped.shrink_arena(inputs)


def tapped(model: LoadedModel, tap: Tap) -> LoadedModel:
    """The same model, each run of which is shown first."""
    return dataclasses.replace(
        model, sessions={kind: Tapped(session, tap) for kind, session in model.sessions.items()}
    )


def costing(model: LoadedModel, cost: RunCost) -> LoadedModel:
    """The same model, each graph of which is taken to cost as much."""
    return dataclasses.replace(model, costs=Costs(dict.fromkeys(GraphKind, cost)))


def on_device(model: LoadedModel) -> LoadedModel:
    """The same model as on a device, each graph of which has an Attention operator. Its sessions stay.

    It has a mask in every graph that ignores padding, as those of encoders and of sliding windows have.
    """
    operator = AttentionOperator(
        count=1,
        data_type="float16",
        num_heads=2,
        num_key_heads=2,
        key_width=64,
        value_width=64,
        query_axis=model.axes[0],
        key_axis=model.axes[-1],
        has_mask=False,
        has_lengths=False,
        causal=model.manifest.causal,
    )
    graphs = {}
    for kind, graph in model.manifest.graphs.items():
        has_mask = model.mixed_graph(kind) is kind and kind not in IN_BLOCKS.values()
        attention = (operator.model_copy(update={"has_mask": has_mask}),)
        graphs[kind] = graph.model_copy(update={"attention": attention})
    runtime = Provider.CUDA.runtime
    return dataclasses.replace(
        model,
        manifest=model.manifest.model_copy(update={"graphs": graphs}),
        provider=runtime.name,
        row_multiple=runtime.row_multiple,
    )


class Gate:
    """Holds runs until it is opened, and says when the first has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, inputs: dict[str, Array]) -> None:  # noqa: ARG002 - a tap
        self.entered.set()
        if not self._opened.wait(PATIENCE_SECONDS):
            raise TimeoutError("the gate was not opened in time")

    def open(self) -> None:
        self._opened.set()


class FailOnMarked:
    """A tap that fails every run that holds a marked sequence."""

    def __init__(self) -> None:
        self.marks: set[float] = set()

    def __call__(self, inputs: dict[str, Array]) -> None:
        if self.marks & set(inputs["query"][:, 0, 0].tolist()):
            raise RuntimeError(MESSAGE)


def mark(request: Request, sequence: int = 0) -> float:
    """Tells one sequence from every other."""
    return float(request.sequences[sequence].inputs["query"][0, 0])


def engine_of(limits: Limits | None = None, events: EventLog | None = None, **options: Any) -> Engine:
    """An engine for requests that are submitted with their models."""
    return Engine(Repository(), limits, events, **options)


def withdraw(engine: Engine, request: Request) -> None:
    """Gives up a request that has not ended: nobody waits for it any more."""
    assert not request.is_done
    engine.fail(request, None)
    assert request.is_done


def take(queue: Queue, now: float = 0.0) -> Next:
    """Takes the next batch, whose run ends at once."""
    batch, expired = queue.next(now)
    if batch:
        queue.end_batch(batch, now)
    return batch, expired


class Recorder(EventLog):
    """Keeps every event. Any thread may add them."""

    def __init__(self) -> None:
        self._all: list[Event] = []
        super().__init__(self._all.extend)

    @property
    def all(self) -> list[Event]:
        """The events so far."""
        self.flush()
        return self._all

    @property
    def runs(self) -> list[RunEvent]:
        return [event for event in self.all if isinstance(event, RunEvent)]

    @property
    def failed(self) -> list[tuple[str, str]]:
        return [(event.model, event.code) for event in self.all if isinstance(event, FailureEvent)]

    @property
    def answered(self) -> list[str]:
        assert all(seconds >= 0 for run in self.runs for seconds in run.latencies)
        return [run.model for run in self.runs for _ in run.latencies]

    @property
    def terminated(self) -> list[str]:
        return [event.model for event in self.all if isinstance(event, TerminationEvent)]

    @property
    def sizes(self) -> list[int]:
        return [run.sequences for run in self.runs]


class Held:
    """An engine whose first run is under way and held, so that all that is submitted waits.

    `tap` sees the inputs of every later run. Leaving the block lets everything run to its end. What runs
    together depends on what runs are taken to cost, never on what they were measured to.
    """

    def __init__(
        self,
        model: LoadedModel,
        tap: Tap = lambda _: None,
        **limits: int,
    ) -> None:
        self.gate = Gate()
        self.recorder = Recorder()
        self.model = tapped(costing(model, SAME_FOR_ALL), tap)
        self.engine = engine_of(Limits(**limits), self.recorder, parallel_runs=1)
        self.first = self.submit([(1, 1)], model=tapped(model, self.gate))
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def submit(self, lengths: Lengths, model: LoadedModel | None = None, **options: Any) -> Sample:
        request = validated_of(model or self.model, lengths, **options)
        self.engine.submit(request)
        return request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.open()
        self.engine.close()


def wait(request: Request, callback: Callable[[], object]) -> None:
    """Calls back when a request ends, in place of the coroutine that waits for it."""
    task: Any = SimpleNamespace(wake=callback)
    request.wait(task)


def outcome(request: Request) -> Result:
    """The result of a request, or its error raised."""
    ended = threading.Event()
    wait(request, ended.set)
    assert ended.wait(PATIENCE_SECONDS)
    return request.take_result()


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for what another thread does."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Calls(EventLog):
    """Keeps the status of each call."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._ended: list[tuple[str, str]] = []
        self.refusals: list[str] = []

    def add(self, event: Event) -> None:
        with self._changed:
            match event:
                case CallEvent(method, code, seconds):
                    assert seconds >= 0
                    self._ended.append((method.rsplit("/", 1)[1], code))
                case RefusalEvent(reason):
                    self.refusals.append(reason)
            self._changed.notify_all()

    def ended(self, count: int) -> Counter[tuple[str, str]]:
        """Waits until that many calls have ended; returns the number of calls by method and code."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ended) >= count, PATIENCE_SECONDS), self._ended
            return Counter(self._ended)


class WatchedEngine(Engine):
    """An engine that counts submissions. One thread of the engine does all runs, so that they can be held."""

    def __init__(self, models: list[LoadedModel], limits: Limits, *names: Any) -> None:
        self.recorder = Recorder()
        self._queued = threading.Semaphore(0)
        super().__init__(Repository([*models], *names), limits, self.recorder, parallel_runs=1)

    def submit(self, request: Request, *, wake: bool = True) -> None:
        super().submit(request, wake=wake)
        self._queued.release()

    def run_inline(self, limit_seconds: float = 0) -> bool:
        return super().run_inline(limit_seconds)  # by default none

    def has_queued(self, count: int) -> bool:
        """Waits for that many more submissions; returns whether they came in time."""
        return all(self._queued.acquire(timeout=PATIENCE_SECONDS) for _ in range(count))

    def has_queued_more(self) -> bool:
        return self._queued.acquire(blocking=False)


def unchanged(repository: Repository) -> ModelControl:
    """What changes no model: there are no artifacts."""
    return ModelControl(ModelStore(Path("/nonexistent"), Device()), repository)


def settings_of(**options: Any) -> Settings:
    """Settings of a server of small messages on a free port, and limits of a server that are not options."""
    options = {"model_repository": "unused", "port": 0, "max_message_bytes": 1 << 20} | options
    limits = {name: options.pop(name) for name in options.keys() - Settings.model_fields.keys()}
    namespace = limits | {"__module__": __name__, "__annotations__": dict.fromkeys(limits, ClassVar[Any])}
    subclass: type[Settings] = type("LimitedSettings", (Settings,), namespace)
    return subclass.model_validate(options)


class Served:
    """A real server of some models, which opens its gate and stops at the end of the block."""

    def __init__(
        self,
        *models: LoadedModel,
        limits: Limits | None = None,
        guard: Guard | None = None,
        recorder: CallsRecorder | None = None,
        **options: Any,
    ) -> None:
        self.calls, self.gate = Calls(), Gate()
        defaults = {"max_concurrent_calls": 8, "max_streams": 2, "stream_window": 3}
        settings = settings_of(**defaults | options)
        names = settings.alias, settings.model_id
        self.engine = WatchedEngine([*models], limits or Limits(), *names)
        self.server = GrpcServer(settings, self.calls, guard=guard, recorder=recorder)
        self.address = (settings.host, self.server.bind())
        self.target = f"{settings.host}:{self.address[1]}"
        self.server.start(self.engine, unchanged(self.engine.repository))
        self.channel = self.connect()

    @classmethod
    def held(cls, model: LoadedModel, **options: Any) -> Self:
        """A server whose runs wait until its gate is opened."""
        gate = Gate()
        served = cls(tapped(model, gate), **options)
        served.gate = gate
        return served

    def connect(self) -> grpc.Channel:
        """A new connection. It does not buffer more messages than gRPC must."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        return grpc.insecure_channel(self.target, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.open()
        self.channel.close()
        self.server.stop(PATIENCE_SECONDS)
        self.engine.close()
