"""Golden vectors are replayed while models serve, and a model whose weights are damaged is withdrawn."""

import dataclasses
import shutil
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.canary import Canary
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, ModelControl, ModelState
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.engine.types import Array
from attention_serving.server.observe.metrics import Metrics
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
        self._healthy, self.provider, self.inputs = session, session.provider, session.inputs
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
        self.changed = partial(metrics.canary.loaded, self.repository)
        self.changed()
        self.control = ModelControl(store, self.repository, self.changed)
        self.engine = Engine(self.repository)
        withdraw = self.control.withdraw
        self.canary = Canary(self.repository, self.engine.load, withdraw, metrics.canary, SECONDS)
        self.canary.start()

    def ratio(self, model: str) -> float:
        return value(published(self.registry), RATIO, model=model, version="1")

    def failures(self, model: str = SELF) -> float:
        return value(published(self.registry), FAILURES, model=model, version="1")

    @property
    def entry(self) -> IndexEntry:
        """The state of the model that can be damaged."""
        return self.control.index()[1]


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
    model = watched.engine.model(name)
    request = validated_of(model, [(3, 2)])
    assert_answers(request, submitted(watched.engine, model, request_of(model, [(3, 2)])).result())


def test_a_healthy_model_is_measured_and_a_damaged_one_is_withdrawn_until_it_is_loaded_again(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, started = weakref.ref(watched.repository.ready(SELF)), time.time()
    wait_until(lambda: watched.ratio(SELF) > 0 and watched.ratio(CROSS) > 0)
    for name in (SELF, CROSS):
        assert watched.ratio(name) <= 1
        at = value(published(watched.registry), REPLAYED_AT, model=name, version="1")
        assert started - 1 < at <= time.time()
        assert watched.failures(name) == 0
        ask(watched, name)
    watched.session.stays_damaged = True
    wait_until(lambda: watched.entry.state is ModelState.UNAVAILABLE)
    reason = watched.entry.reason
    assert reason.startswith("context_vectors of graph plain differs from eager PyTorch by ")
    assert "in service; the tolerance is " in reason
    assert str(tmp_path) not in reason
    with pytest.raises(ModelNotReadyError, match=rf"model '{SELF}' version 1 was taken out of service: "):
        watched.engine.model(SELF)
    assert watched.ratio(SELF) > 1
    assert (watched.failures(), watched.failures(CROSS)) == (1, 0)
    ask(watched, CROSS)
    wait_until(lambda: "model taken out of service" in caplog.text)
    wait_until(lambda: damaged() is None)
    watched.control.load(SELF)
    ask(watched, SELF)
    wait_until(lambda: 0 < watched.ratio(SELF) <= 1)
    assert watched.failures() == 1
    assert watched.entry == IndexEntry(SELF, "1", ModelState.READY)


def test_a_fault_of_one_computation_is_reported_and_the_model_stays(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(lambda: watched.session.runs > 0)
    watched.session.damaged_run = watched.session.runs + 5
    wait_until(lambda: watched.failures() == 1)
    wait_until(lambda: watched.session.runs > 10)
    assert watched.failures() == 1
    assert watched.entry.state is ModelState.READY
    assert 0 < watched.ratio(SELF) <= 1
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
        assert watched.failures() == 0
        assert watched.entry.state is ModelState.READY
    else:
        wait_until(lambda: watched.entry.state is ModelState.UNAVAILABLE)
        assert watched.entry.reason.endswith("does not run in service any more")
        assert watched.ratio(SELF) == float("inf")


@pytest.mark.parametrize("load", [EngineLoad(running=1), EngineLoad(queued_sequences=1), EngineLoad()])
def test_nothing_is_replayed_while_the_engine_is_busy(self_model: LoadedModel, load: EngineLoad) -> None:
    runs: list[object] = []
    repository = Repository([tapped(self_model, runs.append)])
    canary = Canary(repository, lambda: load, lambda *_: True, Metrics().canary, 1000.0)
    canary._look()
    assert len(runs) == (load == EngineLoad())
