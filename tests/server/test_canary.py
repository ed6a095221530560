"""Golden vectors are replayed while models serve, and a model whose weights are damaged is withdrawn."""

import dataclasses
import gc
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from safetensors.numpy import load_file

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from attention_serving.model.presets import build_preset
from attention_serving.server.canary import Canary
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, ModelState, RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.engine.types import Array, Request
from attention_serving.server.observe.metrics import Metrics
from tests.server.damage import DEVICE, Damageable, damageable
from tests.server.observe.test_metrics import Samples, published, value
from tests.server.samples import CROSS, SELF, assert_answers, ragged, request_of, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, tapped
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.coroutines import submitted

# So short that a period is a few looks: every golden vector is replayed in less than a second.
SECONDS = 0.01
INT8, FP16 = "canary-int8", "canary-fp16"
RATIO, REPLAYED_AT = "attention_canary_error_ratio", "attention_canary_last_replay_timestamp_seconds"
FAILURES = "attention_canary_failures_total"
pytestmark = pytest.mark.timeout(120)


def export_lowered(folder: Path) -> None:
    for name, precision in ((INT8, Precision.INT8), (FP16, Precision.FP16)):
        write_artifact(build_preset("multi-head-64x4"), ModelId(name), folder, precision=precision)


@pytest.fixture(scope="module")
def lowered() -> Path:
    (folder,) = cached_repositories(ModelSet("canary-lowered", [export_lowered], [Path(__file__)]))
    return folder


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


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


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


def test_healthy_models_are_measured_and_stay_in_service(watched: Watched) -> None:
    started = time.time()
    wait_until(lambda: watched.session.runs > 20)
    wait_until(lambda: watched.ratio(CROSS) is not None)
    for name in (SELF, CROSS):
        assert 0 < (watched.ratio(name) or 0) <= 1
        at = value(watched.samples(), REPLAYED_AT, model=name, version="1")
        assert started - 1 < at <= time.time()
        assert watched.failures(name) == 0
        ask(watched, name)
    assert [entry.state for entry in watched.index()] == [ModelState.READY, ModelState.READY]


def test_a_model_that_is_damaged_in_memory_is_withdrawn_and_its_neighbour_goes_on(
    watched: Watched, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert watched.failures() == 1
    assert watched.failures(CROSS) == 0
    ask(watched, CROSS)
    wait_until(lambda: "model taken out of service" in caplog.text)
    (record,) = [vars(each) for each in caplog.records if each.levelno == logging.ERROR]
    assert (record["message"], record["model"], record["reason"]) == (
        "model taken out of service",
        SELF,
        reason,
    )


def test_a_damaged_model_is_freed_and_comes_back_when_it_is_loaded_again(watched: Watched) -> None:
    damaged = weakref.ref(watched.repository.ready(SELF))
    watched.session.stays_damaged = True
    wait_until(lambda: watched.index()[1].state is ModelState.UNAVAILABLE)
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
    wait_until(lambda: watched.session.runs > 20)
    assert watched.failures() == 1
    assert watched.index()[1].state is ModelState.READY
    assert (watched.ratio(SELF) or 2) <= 1
    assert "golden vectors missed" in caplog.text
    assert "taken out of service" not in caplog.text


@pytest.mark.parametrize(
    "busy", [EngineLoad(running=1), EngineLoad(queued_sequences=1)], ids=["runs", "waits"]
)
def test_while_the_engine_is_busy_nothing_is_replayed_before_a_period_has_passed(
    artifacts: Path, busy: EngineLoad
) -> None:
    model = load_model(artifacts / SELF / "1", DEVICE)
    runs, looks = list[object](), list[EngineLoad]()
    load = [busy]

    def look() -> EngineLoad:
        looks.append(load[0])
        return load[0]

    repository = Repository([tapped(model, runs.append)])
    metrics = Metrics().canary
    metrics.loaded(repository)
    canary = Canary(repository, look, lambda _model, _reason: True, metrics, 1000 * SECONDS)
    canary.start()
    wait_until(lambda: len(looks) >= 2)
    assert runs == []
    load[0] = EngineLoad()
    wait_until(lambda: runs)
    canary.close()


def test_a_graph_that_no_longer_runs_is_withdrawn(folder: Path, tmp_path: Path) -> None:
    with watching(folder, tmp_path) as watched:
        original = watched.repository.ready(SELF)

        def fail(_: object) -> None:
            raise RuntimeError(MESSAGE)

        broken = tapped(original, fail)
        watched.repository.replace(SELF, {"1": broken})
        watched.control._changed()
        del original, broken
        wait_until(lambda: watched.index()[1].state is ModelState.UNAVAILABLE)
        assert watched.index()[1].reason.endswith("does not run in service any more")
        assert MESSAGE not in watched.index()[1].reason
        assert watched.ratio(SELF) == float("inf")


def test_a_replay_without_memory_is_not_a_fault(folder: Path, tmp_path: Path) -> None:
    tries = []

    def refuse(_: object) -> None:
        tries.append(1)
        raise MemoryError(MESSAGE)

    with watching(folder, tmp_path) as watched:
        original = watched.repository.ready(SELF)
        watched.repository.replace(SELF, {"1": tapped(original, refuse)})
        watched.control._changed()
        wait_until(lambda: len(tries) > 10)
        assert watched.failures() == 0
        assert watched.index()[1].state is ModelState.READY


def test_an_unloaded_model_is_freed_and_its_gauges_vanish(watched: Watched) -> None:
    wait_until(lambda: watched.ratio(SELF) is not None)
    model = weakref.ref(watched.repository.ready(SELF))
    watched.control.unload(SELF)
    wait_until(lambda: gc.collect() >= 0 and model() is None)
    names = {name for name, labels in watched.samples() if ("model", SELF) in labels}
    assert names.isdisjoint({RATIO, REPLAYED_AT})
    assert watched.ratio(CROSS) is not None


def test_sessions_on_all_threads_are_watched_too(artifacts: Path, tmp_path: Path) -> None:
    model = load_model(artifacts / SELF / "1", Device(threads=2))
    copy, session = damageable(model, artifacts / SELF / "1", tmp_path, [GraphKind.PLAIN])
    session.stays_damaged = True
    # Only the session that computes on all threads is damaged.
    parallel = {**model.parallel_sessions, GraphKind.PLAIN: session}
    repository = Repository([dataclasses.replace(model, parallel_sessions=parallel)])
    published = Metrics()
    metrics = published.canary
    metrics.loaded(repository)
    reasons = list[str]()

    def withdraw(_: LoadedModel, reason: str) -> bool:
        reasons.append(reason)
        return True

    canary = Canary(repository, EngineLoad, withdraw, metrics, SECONDS)
    canary.start()
    wait_until(lambda: reasons)
    canary.close()
    assert reasons[0].startswith("context_vectors of graph plain differs")
    assert copy.parallel_sessions == model.parallel_sessions


@pytest.mark.parametrize("name", [INT8, FP16])
def test_models_of_lower_precision_are_measured_by_their_own_tolerance(
    lowered: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(lowered / name, tmp_path / "models" / name)
    with watching(tmp_path / "models", tmp_path) as watched:
        wait_until(lambda: watched.session.runs > 10)
        assert 0 < (watched.ratio(name) or 0) <= 1
        watched.session.stays_damaged = True
        wait_until(lambda: watched.index()[0].state is ModelState.UNAVAILABLE)
        assert (watched.ratio(name) or 0) > 1


def test_golden_vectors_that_need_too_much_memory_are_replayed_at_load_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / SELF / "1" / "golden.safetensors")
    count = len({name.rsplit("/", 2)[0] for name in tensors})
    whole = ModelStore(folder, DEVICE, max_golden_bytes=1 << 30).load(SELF, "1")
    few = ModelStore(folder, DEVICE, max_golden_bytes=2000).load(SELF, "1")
    off = ModelStore(folder, DEVICE).load(SELF, "1")
    assert isinstance(whole, LoadedModel)
    assert isinstance(few, LoadedModel)
    assert isinstance(off, LoadedModel)
    assert len(whole.golden) == count
    assert 0 < len(few.golden) < count
    assert off.golden == ()
    (record,) = [vars(each) for each in caplog.records if "too large" in each.message]
    assert (record["cases"], record["kept"]) == (count - len(few.golden), len(few.golden))


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


def test_requests_are_answered_while_golden_vectors_are_replayed(watched: Watched) -> None:
    model = watched.engine.model(SELF)
    rng = np.random.default_rng(0)
    futures = [
        submitted(watched.engine, model, Request(inputs={"query": ragged(rng, [3], 4)})) for _ in range(200)
    ]
    assert all(future.result(PATIENCE_SECONDS).outputs for future in futures)
    assert watched.failures() == 0
