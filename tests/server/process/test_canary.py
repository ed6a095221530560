"""Golden vectors are replayed while models serve, and a model whose weights are damaged is withdrawn."""

import dataclasses
import math
import shutil
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, ModelControl, ModelState
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.types import Array
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.process import canary
from attention_serving.server.process.canary import Canary, checks_of
from tests.server.samples import CROSS, SELF, assert_answers, request_of, validated_of
from tests.server.seams import MESSAGE, tapped, wait_until
from tests.support.coroutines import submitted
from tests.support.prometheus import published, value

# So short that a period is a few looks: every golden vector is replayed in less than a second.
SECONDS = 0.01
DEVICE = Device(threads=1)
RATIO, REPLAYED_AT = "attention_canary_error_ratio", "attention_canary_last_replay_timestamp_seconds"
FAILURES = "attention_canary_failures_total"
pytestmark = pytest.mark.timeout(120)


class Damageable(Session):
    """A real session whose outputs are wrong in some runs, or from some moment on."""

    def __init__(self, session: Session) -> None:
        vars(self).update(vars(session))
        self._healthy = session
        self.runs, self.damaged_run, self.stays_damaged = 0, 0, False

    def run(self, inputs: dict[str, Array], control: RunControl | None = None) -> dict[str, Array]:
        self.runs += 1
        wrong = self.stays_damaged or self.runs == self.damaged_run
        return {name: array + wrong for name, array in self._healthy.run(inputs, control).items()}


class Watched:
    """The models of a folder in service, and the session of one of them that can be damaged."""

    def __init__(self, folder: Path) -> None:
        store = ModelStore(folder, DEVICE)
        models = {name: store.load(name, "1") for name in store.names()}
        model = models[SELF]
        assert isinstance(model, LoadedModel)
        self.session = Damageable(model.sessions[GraphKind.PLAIN])
        models[SELF] = dataclasses.replace(model, sessions={**model.sessions, GraphKind.PLAIN: self.session})
        metrics = Metrics()
        self.repository, self.registry = Repository(models.values()), metrics.registry
        self.changed = partial(metrics.loaded, self.repository)
        self.changed()
        self.control = ModelControl(store, self.repository, self.changed)
        self.engine = Engine(self.repository)
        self.canary = Canary(self.repository, self.control.withdraw, metrics, SECONDS)
        self.canary.start()

    def metric(self, name: str, model: str = SELF) -> float:
        return value(published(self.registry), name, model=model, version="1")

    @property
    def entry(self) -> IndexEntry:
        """The state of the model that can be damaged."""
        return self.control.index()[1]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said here of how much time replays may take."""
    monkeypatch.setattr(canary, "MAX_TIME_FRACTION", 1.0)


@pytest.fixture
def watched(artifacts: Path, tmp_path: Path) -> Iterator[Watched]:
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / name)
    found = Watched(tmp_path)
    yield found
    found.canary.close()
    found.engine.close()


def ask(watched: Watched, name: str) -> None:
    """A request is answered, and the answer is that of eager PyTorch."""
    model = watched.engine.repository.ready(name)
    request = validated_of(model, [(3, 2)])
    assert_answers(request, submitted(watched.engine, model, request_of(model, [(3, 2)])).result())


def test_a_healthy_model_is_measured_and_a_damaged_one_is_withdrawn_until_it_is_loaded_again(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, started = weakref.ref(watched.repository.ready(SELF)), time.time()
    wait_until(lambda: max(watched.metric(REPLAYED_AT, name) for name in (SELF, CROSS)) < math.inf)
    for name in (SELF, CROSS):
        assert watched.metric(RATIO, name) <= 1
        assert started - 1 < watched.metric(REPLAYED_AT, name) <= time.time()
        assert watched.metric(FAILURES, name) == 0
        ask(watched, name)
    watched.session.stays_damaged = True
    wait_until(lambda: watched.entry.state is ModelState.UNAVAILABLE)
    reason = watched.entry.reason
    assert reason.startswith("context_vectors of graph plain differs from eager PyTorch by ")
    assert "in service; the tolerance is " in reason
    assert str(tmp_path) not in reason
    with pytest.raises(ModelNotReadyError, match=rf"model '{SELF}' version 1 was taken out of service: "):
        watched.engine.repository.ready(SELF)
    assert watched.metric(RATIO) > 1
    assert (watched.metric(FAILURES), watched.metric(FAILURES, CROSS)) == (1, 0)
    ask(watched, CROSS)
    wait_until(lambda: "model taken out of service" in caplog.text)
    wait_until(lambda: damaged() is None)
    watched.control.load(SELF)
    ask(watched, SELF)
    wait_until(lambda: watched.metric(RATIO) <= 1)
    assert watched.metric(FAILURES) == 1
    assert watched.entry == IndexEntry(SELF, "1", ModelState.READY)


def test_a_fault_of_one_computation_is_reported_and_the_model_stays(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(lambda: watched.session.runs > 0)
    watched.session.damaged_run = watched.session.runs + 5
    wait_until(lambda: watched.metric(FAILURES) == 1)
    wait_until(lambda: watched.session.runs > 10)
    assert watched.metric(FAILURES) == 1
    assert watched.entry.state is ModelState.READY
    assert watched.metric(RATIO) <= 1
    assert "golden vectors missed" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_graph_that_no_longer_runs_is_withdrawn_unless_it_lacks_memory(
    watched: Watched, error: type[Exception]
) -> None:
    tries: list[object] = []

    def fail(inputs: object) -> None:
        tries.append(inputs)
        raise error(MESSAGE)

    watched.repository.replace(SELF, {"1": tapped(watched.repository.ready(SELF), fail)})
    watched.changed()
    if error is MemoryError:
        wait_until(lambda: len(tries) > 5)
        assert watched.metric(FAILURES) == 0
        assert watched.entry.state is ModelState.READY
    else:
        wait_until(lambda: watched.entry.state is ModelState.UNAVAILABLE)
        assert watched.entry.reason.endswith("does not run in service any more")
        assert watched.metric(RATIO) == float("inf")


def test_every_case_is_replayed_on_each_session_of_its_graph_once_in_a_period(artifacts: Path) -> None:
    model = load_model(artifacts / SELF / "1", Device(threads=2))
    sessions = [*model.sessions.values(), *model.parallel_sessions.values()]
    assert {id(session) for *_, session in checks_of(Repository([model]))} == set(map(id, sessions))
    runs: list[object] = []
    repository = Repository([tapped(model, runs.append), FailedModel("name", "1", "")])
    replaying = Canary(repository, lambda *_: True, Metrics(), 1000.0)
    for _ in checks_of(repository):
        replaying.replay_next()
    assert len(runs) == len(model.golden)
    assert replaying.seconds == 1000.0 / len(checks_of(repository))


def test_replays_take_a_small_part_of_the_time(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "MAX_TIME_FRACTION", 0.01)
    replaying, started = Canary(Repository([self_model]), lambda *_: True, Metrics(), 1e-9), time.monotonic()
    replaying.replay_next()
    assert 1e-9 < replaying.seconds <= (time.monotonic() - started) / 0.01


def test_what_is_published_lasts_until_the_model_is_gone(self_model: LoadedModel) -> None:
    metrics, key = Metrics(), (SELF, "1")

    def shown() -> list[float]:
        samples = published(metrics.registry)
        return [value(samples, name, model=SELF, version="1") for name in (RATIO, REPLAYED_AT, FAILURES)]

    metrics.loaded(Repository([self_model]))
    assert shown() == [0, math.inf, 0]
    metrics.replayed(key, 3.0, 7.0)
    metrics.replay_missed(key)
    metrics.loaded(Repository([FailedModel(SELF, "1", "drift", is_withdrawn=True)]))
    assert shown() == [3, 7, 1]
    metrics.loaded(Repository([]))
    assert shown() == [0, math.inf, 1]


def test_what_is_replayed_while_its_model_is_unloaded_is_not_published(self_model: LoadedModel) -> None:
    metrics, repository = Metrics(), Repository()

    def unload(_: object) -> None:
        repository.replace(SELF, {})
        metrics.loaded(repository)

    repository.replace(SELF, {"1": tapped(self_model, unload)})
    metrics.loaded(repository)
    Canary(repository, lambda *_: True, metrics, 1000.0).replay_next()
    assert value(published(metrics.registry), REPLAYED_AT, model=SELF, version="1") == math.inf
