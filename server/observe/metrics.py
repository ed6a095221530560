"""Every metric of a server, and what counts it: calls, batches, models, certificates, load and limits."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from importlib.metadata import distributions
from itertools import chain, product

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server import VERSION
from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.events import (
    CallEvent,
    EngineLoad,
    Event,
    EventLog,
    ExpiryStage,
    FailureEvent,
    RefusalEvent,
    RunEvent,
    TerminationEvent,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ChangeKind
from attention_serving.server.engine.models.repository import Key, Repository
from attention_serving.server.engine.run.driver import Gpu
from attention_serving.server.observe.prometheus import AmongWorkers, BulkHistogram
from attention_serving.server.security.tls import CERTIFICATES, Certificates
from attention_serving.server.settings import Settings

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
# The code of requests that have their results, and the results of changes, as labels.
ANSWERED, OK, FAILED = "OK", "ok", "failed"
UNKNOWN = "unknown"

HELP = {
    "attention_requests": "Calls that ended, by status code; a stream is one call.",
    "attention_request_seconds": "Duration of a call, until its reply has been sent, in seconds.",
    "attention_model_requests": "Requests to a loaded model, each of a stream included, by status code.",
    "attention_model_request_seconds": "Time of an answered request from queue to result, in seconds.",
    "attention_batch_sequences": "Number of sequences in a batch.",
    "attention_batch_seconds": "Time to run a batch, in seconds.",
    "attention_queue_seconds": "Time that a sequence was queued before it ran, in seconds.",
    "attention_sequences": "Number of sequences that ran.",
    "attention_tokens": "Number of query and key rows that ran, without padding.",
    "attention_padding_tokens": "Number of padding rows that ran in addition.",
    "attention_refused_requests": "Calls and messages of streams that were refused, by reason of the error.",
    "attention_expired_requests": "Requests whose deadline passed while they were queued or running.",
    "attention_terminated_runs": "Runs that were stopped because no caller waited for their results.",
    "attention_security_reloads": "Changes of certificates, tokens or keys; after a failure, old ones stay.",
    "attention_tls_certificate_expiry_timestamp_seconds": "When a certificate expires, in Unix seconds.",
    "attention_parity_error": "Largest absolute difference from golden vectors, measured here at the load.",
    "attention_parity_tolerance": "Absolute tolerance of the model; the relative one comes in addition.",
    "attention_model_ready": "1 if the model is ready, 0 if it loads, failed to load or was unloaded.",
    "attention_model_failed": "1 if the model is to be served and cannot be, otherwise 0.",
    "attention_model_changes": "Versions that were loaded, replaced or unloaded in a process, by result.",
    "attention_canary_error_ratio": "Difference from golden vectors in service, as a part of the tolerance.",
    "attention_canary_last_replay_timestamp_seconds": "Latest replay of golden vectors, in Unix seconds.",
    "attention_canary_failures": "Golden vectors that missed the tolerance in service, repetitions excluded.",
    "attention_audited_sequences": "Sequences of real runs that were to be run again alone, by result.",
    "attention_open_calls": "Number of inference calls in progress, streams included.",
    "attention_waiting_calls": "Number of calls whose request has not arrived yet.",
    "attention_open_connections": "Number of connections, counted at most every 10 seconds.",
    "attention_open_streams": "Number of open streams.",
    "attention_in_flight_bytes": "Memory reserved for requests until their replies are sent, in bytes.",
    "attention_queue_depth": "Number of sequences that wait for a run.",
    "attention_queue_age_seconds": "How long the oldest queued sequence has waited, in seconds.",
    "attention_predicted_queue_seconds": "Expected time to run what is queued and running, in seconds.",
    "attention_runs": "Number of runs in progress.",
    "attention_context_bytes": "Memory of stored contexts, in bytes.",
    "attention_context_limit_bytes": "Most memory of stored contexts, in bytes: max_context_bytes.",
    "attention_context_hits": "Requests that found the stored context that they name.",
    "attention_context_misses": "Requests that name a stored context which does not exist.",
    "attention_context_evictions": "Stored contexts that made room for others.",
    "attention_context_folder_errors": "Errors of context_folder; contexts then stay in memory only.",
    "attention_run_memory_bytes": "Expected memory of the runs in progress, in bytes.",
    "attention_open_calls_limit": "Most inference calls in progress: max_concurrent_calls of all workers.",
    "attention_open_connections_limit": "Most connections: max_connections of all workers.",
    "attention_in_flight_limit_bytes": "Most memory of requests, in bytes: max_in_flight_bytes of workers.",
    "attention_run_memory_limit_bytes": "Most expected memory of runs, in bytes: the rest of max_memory.",
    "attention_batch_sequences_limit": "Most sequences of one run: max_batch_sequences.",
    "attention_device_processes": "Number of server processes whose runs go to a GPU, by its name and UUID.",
    "attention_build_info": "Always 1; the labels are versions of server and libraries, and the provider.",
}
# What the engine counts by itself, since its start. The rest of its load is what it holds at one moment.
COUNTED = ("context_hits", "context_misses", "context_evictions", "context_folder_errors")
LOAD = [name for name in asdict(CallLoad()) | asdict(EngineLoad()) if name not in COUNTED]
MODEL = ("model", "version")


class AuditResult(StrEnum):
    """What became of a sequence that was to be run again alone.

    Attributes:
        PASSED: Both results agree.
        EXPLAINED: They differ, but not again, or not by more than rounding explains.
        FAILED: They differ.
        DROPPED: There was no memory for it, or the run failed.
    """

    PASSED = "passed"
    EXPLAINED = "explained"
    FAILED = "failed"
    DROPPED = "dropped"


class Metrics:
    """All metrics of one server: of calls, runs of the engine, and files that are reloaded.

    What is counted, and what the server holds at one moment, is published by `refresh`: before a scrape, and
    in a worker, whose metrics another process collects, with every heartbeat.

    Attributes:
        events: What happens in the server, which is counted here.
        refusals: The counter of refusals, by reason.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.events = EventLog(self._count)
        self._calls = self._counter("attention_requests", "method", "code")
        self._call_seconds = self._histogram("attention_request_seconds", "method")
        self._model_requests = self._counter("attention_model_requests", "model", "code")
        self._model_seconds = self._histogram("attention_model_request_seconds", "model")
        self._batch_sequences = self._histogram("attention_batch_sequences", "model", SEQUENCES)
        self._batch_seconds = self._histogram("attention_batch_seconds", "model")
        self._queue_seconds = self._histogram("attention_queue_seconds", "model")
        self._sequences = self._counter("attention_sequences", "model")
        self._tokens = self._counter("attention_tokens", "model")
        self._padding = self._counter("attention_padding_tokens", "model")
        self.refusals = self._counter("attention_refused_requests", "reason")
        self._expired = self._counter("attention_expired_requests", "model", "stage")
        self._terminated = self._counter("attention_terminated_runs", "model")
        self._security_reloads = self._counter("attention_security_reloads", "what", "result")
        self._parity = self._gauge("attention_parity_error", "livemax", MODEL)
        self._tolerance = self._gauge("attention_parity_tolerance", "livemax", MODEL)
        self._ready = self._gauge("attention_model_ready", "livemin", MODEL)
        self._failed = self._gauge("attention_model_failed", "livemax", MODEL)
        self._changes = self._counter("attention_model_changes", "model", "change", "result")
        # Of several workers, the load is added up, except for durations.
        self._load = {
            name: self._gauge(f"attention_{name}", "livemax" if name.endswith("_seconds") else "livesum")
            for name in LOAD
        }
        self._counted = {
            name: Counter(f"attention_{name}", HELP[f"attention_{name}"], registry=self.registry)
            for name in COUNTED
        }
        self._published_counts = dict.fromkeys(COUNTED, 0)
        self._refreshing = threading.Lock()
        self._canary_ratio = self._gauge("attention_canary_error_ratio", "livemax", MODEL)
        replayed_at = "attention_canary_last_replay_timestamp_seconds"
        self._canary_replayed_at = self._gauge(replayed_at, "livemin", MODEL)
        self._canary_failures = self._counter("attention_canary_failures", *MODEL)
        self._audited = self._counter("attention_audited_sequences", *MODEL, "result")
        expiry = "attention_tls_certificate_expiry_timestamp_seconds"
        self._tls_expiry = self._gauge(expiry, "livemin", ("certificate",))
        self._published: set[tuple[str, str]] = set()
        self._engine_load: Callable[[], EngineLoad] = EngineLoad
        self._call_load: Callable[[], CallLoad] = CallLoad

    # Metrics are stored as the cached look-up of their children: the look-up takes longer than the count.
    def _histogram(
        self, name: str, label: str, buckets: tuple[float, ...] = SECONDS
    ) -> Callable[[str], BulkHistogram]:
        return cache(BulkHistogram(name, HELP[name], [label], buckets=buckets, registry=self.registry).labels)

    def _counter(self, name: str, *labels: str) -> Callable[..., Counter]:
        counter = Counter(name, HELP[name], labels, registry=self.registry)
        return cache(counter.labels)

    def _gauge(self, name: str, among_workers: AmongWorkers, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, HELP[name], labels, registry=self.registry, multiprocess_mode=among_workers)

    def configured(self, settings: Settings, gpu: Gpu | None = None) -> None:
        """Publishes what does not change: the build, the GPU of runs, and what the server holds at most."""
        limits, runtime = settings.limits, settings.device.provider.runtime
        self._gauge("attention_open_calls_limit", "livesum").set(settings.max_concurrent_calls)
        self._gauge("attention_open_connections_limit", "livesum").set(settings.max_connections)
        self._gauge("attention_in_flight_limit_bytes", "livesum").set(limits.max_in_flight_bytes)
        self._gauge("attention_run_memory_limit_bytes", "livesum").set(limits.max_run_bytes)
        self._gauge("attention_context_limit_bytes", "livesum").set(limits.max_context_bytes)
        self._gauge("attention_batch_sequences_limit", "livemax").set(limits.max_batch_sequences)
        # ONNX Runtime can be built under another name.
        version, *_ = [*(package.version for package in distributions(name=runtime.package)), UNKNOWN]
        labels = {"version": VERSION, "provider": runtime.name, "onnxruntime": version}
        self._gauge("attention_build_info", "livemax", list(labels)).labels(**labels).set(1)
        processes = self._gauge("attention_device_processes", "livesum", Gpu._fields)
        if gpu is not None:
            processes.labels(*gpu).set(1)

    def loading(self, models: Iterable[tuple[str, str]]) -> None:
        """Publishes that these models, given by name and version, are not ready yet."""
        for name, version in models:
            self._ready.labels(name, version).set(0)

    def loaded(self, repository: Repository) -> None:
        """Publishes the state of every model, and the measured parity error of those that are ready.

        Models that were published before and are gone are not ready.
        """
        models = {(model.name, model.version) for model in repository}
        for key in self._published - models:
            self._ready.labels(*key).set(0)
            self._failed.labels(*key).set(0)
        for key in self._published ^ models:
            self.replayed(key)
            self._canary_failures(*key)
            for result in AuditResult:
                self._audited(*key, result.value)
        self._published |= models
        for model in repository:
            key, is_ready = (model.name, model.version), isinstance(model, LoadedModel)
            self._ready.labels(*key).set(is_ready)
            self._failed.labels(*key).set(not is_ready)
            self._begin(model.name)
            if isinstance(model, LoadedModel):
                self._parity.labels(*key).set(model.measured_error)
                self._tolerance.labels(*key).set(model.manifest.tolerance.atol)

    def _begin(self, model: str) -> None:
        """Publishes what is rare from 0 on, so that the first time is an increase."""
        for change, result in product(ChangeKind, (OK, FAILED)):
            self._changes(model, change.value, result)
        for stage in ExpiryStage:
            self._expired(model, stage.value)
        self._terminated(model)

    def model_changed(self, model: str, kind: ChangeKind, succeeded: bool) -> None:  # noqa: FBT001 - see `Report`
        """Counts a version of a model that changed, or failed to."""
        self._changes(model, kind.value, OK if succeeded else FAILED).inc()

    def watch(self, engine: Callable[[], EngineLoad], calls: Callable[[], CallLoad]) -> None:
        """Sets where `refresh` finds the load; before, the load is 0.

        Args:
            engine: Returns the load of the engine. Called on any thread.
            calls: Returns the load of the gRPC server. Called on any thread.
        """
        self._engine_load, self._call_load = engine, calls

    def refresh(self) -> None:
        """Publishes the load of this moment, and what was counted. May be called on any thread."""
        with self._refreshing:  # counts never decrease
            load = asdict(self._engine_load()) | asdict(self._call_load())
            for name, gauge in self._load.items():
                gauge.set(load[name])
            for name, counter in self._counted.items():
                counter.inc(load[name] - self._published_counts[name])
                self._published_counts[name] = load[name]
        self.events.flush()

    def _count(self, events: Sequence[Event]) -> None:
        calls: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        runs: defaultdict[str, list[RunEvent]] = defaultdict(list)
        for event in events:
            match event:
                case CallEvent():
                    calls[event.method, event.code].append(event.seconds)
                case RunEvent():
                    runs[event.model].append(event)
                case RefusalEvent():
                    self.refusals(event.reason).inc()
                case FailureEvent():
                    self._model_requests(event.model, event.code).inc()
                    if event.stage is not None:
                        self._expired(event.model, event.stage.value).inc()
                case TerminationEvent():
                    self._terminated(event.model).inc()
        for (method, code), durations in calls.items():
            self._calls(method, code).inc(len(durations))
            self._call_seconds(method).observe_all(durations)
        for model, model_runs in runs.items():
            self._count_runs(model, model_runs)

    def _count_runs(self, model: str, runs: Sequence[RunEvent]) -> None:
        sequences, latencies = [run.sequences for run in runs], list(chain(*(run.latencies for run in runs)))
        self._batch_sequences(model).observe_all(sequences)
        self._batch_seconds(model).observe_all([run.seconds for run in runs])
        self._queue_seconds(model).observe_all(list(chain(*(run.queue_seconds for run in runs))))
        self._sequences(model).inc(sum(sequences))
        self._tokens(model).inc(sum(run.rows for run in runs))
        self._padding(model).inc(sum(run.padding for run in runs))
        self._model_requests(model, ANSWERED).inc(len(latencies))
        self._model_seconds(model).observe_all(latencies)

    def reloaded(self, what: str, value: object) -> None:
        """Counts that certificates, tokens or keys were read again: see `server.threads.Reloaded`."""
        self._security_reloads(what, "failure" if value is None else "success").inc()
        if isinstance(value, Certificates):
            self.certificates_in_use(value)

    def certificates_in_use(self, certificates: Certificates) -> None:
        """Publishes when certificates expire that are used from now on."""
        self._security_reloads(CERTIFICATES, "failure")
        self._tls_expiry.labels("server").set(certificates.expires.timestamp())
        if certificates.client_ca_expires is not None:
            self._tls_expiry.labels("client_ca").set(certificates.client_ca_expires.timestamp())

    def replayed(self, key: Key, ratio: float = 0.0, at: float = math.inf) -> None:
        """Publishes the latest replay of a golden vector of a model, in Unix seconds; by default, of none."""
        self._canary_ratio.labels(*key).set(ratio)
        self._canary_replayed_at.labels(*key).set(at)

    def replay_missed(self, key: Key) -> None:
        """Counts a golden vector that missed the tolerance."""
        self._canary_failures(*key).inc()

    def audited(self, model: LoadedModel, result: AuditResult) -> None:
        """Counts a sequence that was to be run again alone."""
        self._audited(model.name, model.version, result.value).inc()
