"""A sample of real sequences is run again alone, and a model that mixes sequences is withdrawn."""

import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from safetensors.numpy import load_file, save_file

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelControl, ModelState
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import DecodedRequest, MaskKind
from attention_serving.server.observe.metrics import AuditResult, Metrics
from attention_serving.server.process import audit as audits
from attention_serving.server.process.audit import Audit
from tests.server.engine.test_contexts import put
from tests.server.samples import CROSS, SELF, ragged, validated_of
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Held, costing, wait_until
from tests.support.artifacts import vouch
from tests.support.prometheus import published, value

DEVICE = Device(threads=1)
LENGTHS_GRAPH, GOLDEN = "model.lengths.onnx", "golden.safetensors"
COUNTER = "attention_audited_sequences_total"
# Of the keys, the second sequence has fewer than the first.
UNEQUAL = [(3, 9), (3, 2)]


def attend_to_padding(folder: Path) -> None:
    """Lets the graph with lengths ignore them, and removes the golden vectors that would show it."""
    graph = onnx.load(folder / "model.onnx")
    graph.graph.input.append(helper.make_tensor_value_info("key_lengths", onnx.TensorProto.INT64, ["batch"]))
    (folder / LENGTHS_GRAPH).write_bytes(graph.SerializeToString())
    tensors = load_file(folder / GOLDEN)
    padded = tuple(
        name.removesuffix("inputs/key_lengths")
        for name, lengths in tensors.items()
        if name.endswith("key_lengths") and lengths.min() < tensors[name.replace("_lengths", "")].shape[1]
    )
    save_file(
        {name: array for name, array in tensors.items() if not name.startswith(padded)}, folder / GOLDEN
    )
    vouch(folder, LENGTHS_GRAPH, GOLDEN)


class Audited:
    """Models in service, whose runs are sampled as often as possible. The test computes the samples."""

    def __init__(self, store: ModelStore) -> None:
        loaded = [store.load(name, "1") for name in store.names()]
        models = [costing(model, SAME_FOR_ALL) for model in loaded if isinstance(model, LoadedModel)]
        metrics, self.repository = Metrics(), Repository(models)
        self.registry = metrics.registry
        metrics.loaded(self.repository)
        self.control = ModelControl(store, self.repository)
        self.engine = Engine(self.repository, parallel_runs=1)
        self.audit = Audit(self.engine, self.control.withdraw, metrics, 1.0)

    def ask(self, model: LoadedModel, **options: Any) -> None:
        """Runs a request of two sequences, and computes the sample."""
        request = validated_of(model, UNEQUAL, **options)
        self.engine.submit(request)
        wait_until(lambda: request.is_done and not self.engine.load().runs)
        self.audit.audit_next()

    def counts(self, model: str) -> dict[AuditResult, float]:
        """How often each result was counted."""
        labels, samples = {"model": model, "version": "1"}, published(self.registry)
        return {result: value(samples, COUNTER, **labels, result=result.value) for result in AuditResult}


@pytest.fixture
def audited(artifacts: Path) -> Iterator[Audited]:
    started = Audited(ModelStore(artifacts, DEVICE))
    yield started
    started.engine.close()


def only(result: AuditResult, count: float) -> dict[AuditResult, float]:
    return dict.fromkeys(AuditResult, 0.0) | {result: count}


def test_a_model_that_attends_to_padding_is_withdrawn(
    artifacts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(artifacts / CROSS, tmp_path / CROSS)
    attend_to_padding(tmp_path / CROSS / "1")
    audited = Audited(ModelStore(tmp_path, DEVICE))
    model = audited.repository.ready(CROSS)
    while model in audited.repository:  # a sample may be the longest sequence, which has no padding
        audited.ask(model)
    assert audited.counts(CROSS)[AuditResult.FAILED] == 1
    (entry,) = audited.control.index()
    assert entry.state is ModelState.UNAVAILABLE
    assert re.match(
        r"context_vectors of a sequence in a run of 2 on graph lengths differs by 0\.", entry.reason
    )
    assert " from the same sequence alone on graph plain; the tolerance is " in entry.reason
    assert "sequence differs from itself alone" in caplog.text
    assert "model taken out of service" in caplog.text
    count = audited.counts(CROSS)
    audited.ask(model)  # a request that was accepted before
    assert audited.counts(CROSS) == count
    audited.engine.close()


def test_good_models_pass_with_masks_weights_and_contexts(audited: Audited) -> None:
    for name in (SELF, CROSS):
        model = audited.repository.ready(name)
        for kind, weights in product((None, *MaskKind), (False, True)):
            audited.ask(model, kind=kind, return_weights=weights)
        context = put(audited.engine.contexts, model, "context")
        view = audited.engine.contexts.find(model, context.id, "")
        rng = np.random.default_rng(0)
        queries = DecodedRequest(inputs={"query": ragged(rng, [3, 5], 4)})
        request = audited.engine.validate(view, queries)
        audited.engine.submit(request)
        wait_until(lambda request=request: request.is_done)  # type: ignore[misc]
        audited.audit.audit_next()
        assert audited.counts(name) == only(AuditResult.PASSED, 9)


def test_rounding_is_no_reason_to_withdraw_and_any_other_difference_is(audited: Audited) -> None:
    model = audited.repository.ready(CROSS)
    sequences = validated_of(model, UNEQUAL).asked
    for sequence in sequences:
        sequence.inputs = {name: array * np.float32(1e4) for name, array in sequence.inputs.items()}
    outputs, _ = run_batch(model, GraphKind.LENGTHS, sequences)
    rounded = [{name: array * np.float32(1 + 3e-6) for name, array in own.items()} for own in outputs]
    for results, result in ((rounded, AuditResult.EXPLAINED), (outputs[::-1], AuditResult.FAILED)):
        audited.audit.take(model, GraphKind.LENGTHS, sequences, results)
        audited.audit.audit_next()
        assert audited.counts(CROSS)[result] == 1
    assert model not in audited.repository


def test_samples_wait_for_an_idle_moment_at_most_some_seconds_and_then_take_a_part_of_the_time(
    cross_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Held(cross_model) as held:
        held.engine.repository.replace(CROSS, {"1": cross_model})
        audit = Audit(held.engine, lambda *_: True, Metrics(), 1.0)
        sequences = validated_of(cross_model, UNEQUAL).asked
        audit.take(
            cross_model, GraphKind.LENGTHS, sequences, run_batch(cross_model, GraphKind.LENGTHS, sequences)[0]
        )
        audit.audit_next()
        assert audit.seconds == audits.IDLE_SECONDS
        monkeypatch.setattr(audits, "MAX_WAIT_SECONDS", 0.0)
        audit.audit_next()
        busy = audit.seconds
        audit.audit_next()
    assert (0 < busy < PATIENCE_SECONDS, audit.seconds) == (True, audits.POLL_SECONDS)


def test_a_fraction_is_sampled_unless_inputs_are_not_finite_or_memory_lacks(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "MAX_BYTES", 0)
    model, metrics = audited.repository.ready(CROSS), Metrics()
    audit = Audit(audited.engine, audited.control.withdraw, metrics, 0.01)
    sequences = validated_of(model, UNEQUAL).asked
    outputs, _ = run_batch(model, GraphKind.LENGTHS, sequences)
    for _ in range(500):
        audit.take(model, GraphKind.LENGTHS, sequences, outputs)
    for sequence in sequences:
        sequence.inputs = {name: np.full_like(array, np.nan) for name, array in sequence.inputs.items()}
    for _ in range(500):
        audit.take(model, GraphKind.LENGTHS, sequences, outputs)
    audit.audit_next()
    labels = {"model": CROSS, "version": "1", "result": AuditResult.DROPPED.value}
    samples = published(metrics.registry)
    assert (
        value(samples, COUNTER, **labels) == sum(samples[key] for key in samples if key[0] == COUNTER) == 10
    )
