"""Golden vectors are replayed while models serve, and a model whose weights are damaged is withdrawn."""

import dataclasses
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.canary import Canary
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, ModelState, RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.engine.types import Array
from attention_serving.server.observe.metrics import Metrics
from tests.server.damage import DEVICE, Damageable, damageable
from tests.server.observe.test_metrics import Samples, published, value
from tests.server.samples import CROSS, SELF, assert_answers, request_of, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, tapped, wait_until
from tests.support.coroutines import submitted

# So short that a period is a few looks: every golden vector is replayed in less than a second.
SECONDS = 0.01
RATIO, REPLAYED_AT = "attention_canary_error_ratio", "attention_canary_last_replay_timestamp_seconds"
FAILURES = "attention_canary_failures_total"
pytestmark = pytest.mark.timeout(120)


@dataclasses.dataclass
class Watched:
    """Models in service, and the session that can be damaged."""

    control: RepositoryControl
    engine: Engine
    registry: CollectorRegistry
    session: Damageable

    @property
    def repository(self) -> Repository:
        return self.control.repository

    def samples(self) -> Samples:
        return published(self.registry)

    def ratio(self, model: str) -> float | None:
        return self.samples().get((RATIO, frozenset({("model", model), ("version", "1")})))

    def failures(self, model: str = SELF) -> float:
        return value(self.samples(), FAILURES, model=model, version="1")

    def index(self) -> list[IndexEntry]:
        return self.control.index()


@contextmanager
def watching(folder: Path, scratch: Path) -> Iterator[Watched]:
    """Serves the artifacts of a folder, the last of which can be damaged, and watches them."""
    store = ModelStore(folder, DEVICE, max_golden_bytes=1 << 30)
    names = store.names()
    model = store.load(names[-1], "1")
    assert isinstance(model, LoadedModel)
    first, session = damageable(model, folder / model.name / "1", scratch)
    others = [store.load(name, "1") for name in names if name != model.name]
    del model
    repository = Repository([first, *others])
    published = Metrics()
    registry, metrics = published.registry, published.canary
    metrics.loaded(repository)
    control = RepositoryControl(store, repository, lambda: metrics.loaded(repository))
    engine = Engine(repository)
    del first, others  # which would keep them loaded
    canary = Canary(repository, engine.load, control.withdraw, metrics, SECONDS)
    canary.start()
    try:
        yield Watched(control, engine, registry, session)
    finally:
        canary.close()
        engine.close()


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / "models" / name)
    return tmp_path / "models"


@pytest.fixture
def watched(folder: Path, tmp_path: Path) -> Iterator[Watched]:
    with watching(folder, tmp_path) as found:
        yield found


def ask(watched: Watched, name: str) -> None:
    """A request is answered, and the answer is that of eager PyTorch."""
    model = watched.engine.model(name)
    request = validated_of(model, [(3, 2)])
    assert_answers(request, submitted(watched.engine, model, request_of(model, [(3, 2)])).result())


def test_healthy_models_are_measured_and_answer_meanwhile(watched: Watched) -> None:
    started = time.time()
    wait_until(lambda: watched.session.runs > 10)
    wait_until(lambda: watched.ratio(CROSS) is not None)
    for name in (SELF, CROSS):
        assert 0 < (watched.ratio(name) or 0) <= 1
        at = value(watched.samples(), REPLAYED_AT, model=name, version="1")
        assert started - 1 < at <= time.time()
        assert watched.failures(name) == 0
        ask(watched, name)
    assert [entry.state for entry in watched.index()] == [ModelState.READY, ModelState.READY]


def test_a_damaged_model_is_withdrawn_and_freed_and_comes_back_when_it_is_loaded_again(
    watched: Watched, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = weakref.ref(watched.repository.ready(SELF))
    wait_until(lambda: watched.ratio(SELF) is not None)
    watched.session.stays_damaged = True
    wait_until(lambda: watched.index()[1].state is ModelState.UNAVAILABLE)
    reason = watched.index()[1].reason
    assert reason.startswith("context_vectors of graph plain differs from eager PyTorch by ")
    assert "in service; the tolerance is " in reason
    assert str(folder) not in reason
    with pytest.raises(ModelNotReadyError, match=rf"model '{SELF}' version 1 was taken out of service: "):
        watched.engine.model(SELF)
    assert (watched.ratio(SELF) or 0) > 1
    assert (watched.failures(), watched.failures(CROSS)) == (1, 0)
    ask(watched, CROSS)
    wait_until(lambda: "model taken out of service" in caplog.text)
    wait_until(lambda: damaged() is None)
    watched.control.load(SELF)
    ask(watched, SELF)
    wait_until(lambda: (watched.ratio(SELF) or 2) <= 1)
    assert watched.failures() == 1
    assert watched.index()[1] == IndexEntry(SELF, "1", ModelState.READY)


def test_a_fault_of_one_computation_is_reported_and_the_model_stays(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(lambda: watched.session.runs > 0)
    watched.session.damaged_runs = {watched.session.runs + 5}
    wait_until(lambda: watched.failures() == 1)
    wait_until(lambda: watched.session.runs > 10)
    assert watched.failures() == 1
    assert watched.index()[1].state is ModelState.READY
    assert (watched.ratio(SELF) or 2) <= 1
    assert "golden vectors missed" in caplog.text
    assert "taken out of service" not in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_graph_that_no_longer_runs_is_withdrawn_unless_it_lacks_memory(
    folder: Path, tmp_path: Path, error: type[Exception]
) -> None:
    tries: list[object] = []

    def fail(inputs: object) -> None:
        tries.append(inputs)
        raise error(MESSAGE)

    with watching(folder, tmp_path) as watched:
        watched.repository.replace(SELF, {"1": tapped(watched.repository.ready(SELF), fail)})
        watched.control._changed()
        if error is MemoryError:
            wait_until(lambda: len(tries) > 5)
            assert watched.failures() == 0
            assert watched.index()[1].state is ModelState.READY
            return
        wait_until(lambda: watched.index()[1].state is ModelState.UNAVAILABLE)
        assert watched.index()[1].reason.endswith("does not run in service any more")
        assert watched.ratio(SELF) == float("inf")


@pytest.mark.parametrize(
    ("load", "replays"),
    [(EngineLoad(running=1), 0), (EngineLoad(queued_sequences=1), 0), (EngineLoad(), 1)],
    ids=["runs", "waits", "idle"],
)
def test_nothing_is_replayed_while_the_engine_is_busy(
    self_model: LoadedModel, artifacts: Path, load: EngineLoad, replays: int
) -> None:
    runs: list[object] = []
    model = tapped(load_model(artifacts / self_model.name / "1", DEVICE), runs.append)
    metrics = Metrics().canary
    metrics.loaded(repository := Repository([model]))
    canary = Canary(repository, lambda: load, lambda *_: True, metrics, 1000.0)
    canary._look()
    assert len(runs) == replays


def test_golden_vectors_that_need_too_much_memory_are_replayed_at_load_only(artifacts: Path) -> None:
    kept = []
    for size in (1 << 30, 2000, 0):
        model = ModelStore(artifacts, DEVICE, max_golden_bytes=size).load(SELF, "1")
        assert isinstance(model, LoadedModel)
        kept.append(len(model.golden))
    assert kept[0] > kept[1] > kept[2] == 0


class Held(Session):
    """A real session whose runs begin when they are told to, also if they were ended before."""

    def __init__(self, session: Session) -> None:
        self._held = session
        self.provider = session.provider
        self.controls: list[RunControl] = []
        self.proceed = threading.Event()

    def run(self, inputs: dict[str, Array], control: RunControl | None = None) -> dict[str, Array]:
        assert control is not None
        self.controls.append(control)
        assert self.proceed.wait(PATIENCE_SECONDS)
        return self._held.run(inputs, control)


def test_closing_ends_a_replay_that_is_under_way_and_withdraws_nothing(
    artifacts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(artifacts / SELF / "1", DEVICE)
    held = Held(model.sessions[GraphKind.PLAIN])
    repository = Repository([dataclasses.replace(model, sessions=dict.fromkeys(model.sessions, held))])
    metrics = Metrics().canary
    metrics.loaded(repository)
    withdrawn = list[LoadedModel]()

    def withdraw(model: LoadedModel, _: str) -> bool:
        withdrawn.append(model)
        return True

    canary = Canary(repository, EngineLoad, withdraw, metrics, SECONDS)
    canary.start()
    wait_until(lambda: held.controls)
    closing = threading.Thread(target=canary.close)
    closing.start()
    wait_until(lambda: held.controls[0].options.terminate)
    held.proceed.set()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert (withdrawn, len(held.controls)) == ([], 1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
