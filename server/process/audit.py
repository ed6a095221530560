"""Watches real batches: runs a sample of their sequences again alone, and withdraws a model that differs."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attention_serving.artifact.encoder import SPARSE_EMBEDDING
from attention_serving.artifact.manifest import IN_BLOCKS, OF_RERANKERS, GraphKind
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import compare
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.types import SPARSE_INDICES, SPARSE_VALUES, Array
from attention_serving.server.observe.metrics import AuditResult, Metrics
from attention_serving.server.process.canary import MAX_TIME_FRACTION, Withdraw
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)
# Memory of the samples that wait.
MAX_BYTES = 64 << 20
# How often the thread looks for samples, and for a moment at which nothing is queued or runs, in seconds.
POLL_SECONDS, IDLE_SECONDS = 1.0, 0.02
# How long a sample waits for such a moment. Then it is computed anyway, so that busy servers are audited too.
MAX_WAIT_SECONDS = 10.0
# Two results that both pass differ by at most twice the tolerance.
MAX_RATIO = 2.0
# The relative error of rounding by precision. Sums in another order differ by a few times what results change
# by if every input changes by that much: by fewer times than this.
ROUNDING = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2.0**-7}
MAX_ROUNDINGS = 32.0


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of a run, with copies of what the run took and returned.

    Attributes:
        model: The model that ran, which may be that of a stored context.
        graph: The graph that computes the sequence alone.
        run: What ran, for messages.
        sequence: The sequence.
        outputs: Its outputs in the run, (1, ...) by name.
        nbytes: Size of the copies.
        taken_at: When it ran, on `time.monotonic`'s clock.
    """

    model: LoadedModel
    graph: GraphKind
    run: str
    sequence: SequenceInputs
    outputs: Outputs
    nbytes: int
    taken_at: float

    def run_alone(self, change: float = 0.0) -> Outputs:
        """The outputs of the sequence in a run of its own.

        Args:
            change: Is added to or subtracted from each number of the inputs, as a part of it.
        """
        random, factors = np.random.default_rng(0), np.array([1 - change, 1 + change], np.float32)
        inputs = dict(self.sequence.inputs)
        for name, array in inputs.items():
            if change and array.dtype == np.float32:
                inputs[name] = array * random.choice(factors, array.shape)
        (outputs,), _ = run_batch(self.model, self.graph, [replace(self.sequence, inputs=inputs)])
        return fill_weights({name: array[np.newaxis] for name, array in outputs.items()}, self.model)


class Audit(PeriodicThread):
    """Computes a sample of sequences again, each alone, on a thread of its own at idle moments.

    A result that differs is compared with a second computation, so that a fault of the first does not count.
    Nor does a difference that rounding explains: large inputs may make a model so sensitive that the order of
    sums shows, which depends on the size of a batch.
    """

    def __init__(self, engine: Engine, withdraw: Withdraw, metrics: Metrics, fraction: float) -> None:
        """The thread starts with `start`.

        Args:
            engine: The engine, whose runs are sampled.
            withdraw: Takes a model out of service.
            metrics: Receives every result.
            fraction: The part of the sequences that is sampled, above 0.
        """
        self._engine, self._withdraw, self._metrics = engine, withdraw, metrics
        self._interval = self._countdown = 1 / fraction
        self._random = np.random.default_rng()
        self._samples, self._lock = deque[Sample](), threading.Lock()
        engine.on_run_completed = self.take
        super().__init__("audit", self.audit_next, POLL_SECONDS)

    def take(
        self,
        model: LoadedModel,
        graph: GraphKind,
        sequences: Sequence[SequenceInputs],
        outputs: Sequence[Outputs],
    ) -> None:
        """Copies a sequence of a run if it is the turn of one. Called by all threads of the engine.

        They count without a lock: now and then, sequences of one of two runs are not counted.

        Args:
            model: The model that ran.
            graph: The graph that ran.
            sequences: The sequences of the run, whose inputs may be views of received messages.
            outputs: The outputs of each.
        """
        self._countdown -= len(sequences)
        if self._countdown > 0:
            return
        at = int(self._random.integers(len(sequences)))
        sequence, results = sequences[at], outputs[at]
        alone = comparison_graph(model, graph, sequence, len(sequences))
        if alone is None or not all(np.isfinite(array).all() for array in sequence.inputs.values()):
            return  # the next run is considered
        self._countdown = self._interval
        # A prefix is of one request, and is kept in memory by the sample.
        prefix = model.context.tensors.values() if graph is GraphKind.SUFFIX and model.context else ()
        size = sum(array.nbytes for array in (*sequence.inputs.values(), *results.values(), *prefix))
        with self._lock:
            if size + sum(sample.nbytes for sample in self._samples) > MAX_BYTES:
                self._metrics.audited(model, AuditResult.DROPPED)
                return
            inputs = {name: array.copy() for name, array in sequence.inputs.items()}
            mask = None if sequence.mask is None else sequence.mask.copy()
            copy = replace(sequence, inputs=inputs, mask=mask)
            results = {name: array[np.newaxis].copy() for name, array in results.items()}
            run = f"a run of {len(sequences)} on graph {graph}"
            self._samples.append(Sample(model, alone, run, copy, results, size, time.monotonic()))

    def audit_next(self) -> None:
        """Computes the oldest sample, if this is the moment for it."""
        self.seconds = POLL_SECONDS
        if not self._samples:
            return
        is_idle, started = self._engine.is_idle, time.monotonic()
        if not is_idle and started - self._samples[0].taken_at < MAX_WAIT_SECONDS:
            self.seconds = IDLE_SECONDS
            return
        with self._lock:
            sample = self._samples.popleft()
        self._audit(sample)
        self.seconds = 0.0 if is_idle else (time.monotonic() - started) / MAX_TIME_FRACTION

    def _audit(self, sample: Sample) -> None:
        models = self._engine.repository.loaded_models
        served = [model for model in models if model.statistics is sample.model.statistics]
        if not served:  # it was unloaded meanwhile
            return
        try:
            result, reason = audit(sample)
        except Exception as error:  # such as too little memory, which requests took
            log.warning("sequence not audited", extra={"model": sample.model.name, "reason": str(error)})
            result, reason = AuditResult.DROPPED, ""
        self._metrics.audited(sample.model, result)
        if result is AuditResult.FAILED:
            self._withdraw(served[0], reason)


def audit(sample: Sample) -> tuple[AuditResult, str]:
    """Compares a sequence of a run with the same sequence alone; returns the result and the difference.

    Raises:
        MemoryError: The run needs more memory than the arena may take.
        Exception: The run fails.
    """
    tolerance, outputs = sample.model.manifest.tolerance, fill_weights(sample.outputs, sample.model)
    ratio, error, name = max(compare(outputs, sample.run_alone(), tolerance))
    if ratio <= MAX_RATIO:
        return AuditResult.PASSED, ""
    reason = (
        f"{name} of a sequence in {sample.run} differs by {error:.3g} from the same sequence alone on graph "
        f"{sample.graph}; the tolerance is {tolerance}"
    )
    fields = {"model": sample.model.name, "version": sample.model.version, "reason": reason}
    log.warning("sequence differs from itself alone", extra=fields)
    again, changed = sample.run_alone(), sample.run_alone(ROUNDING[sample.model.manifest.precision])
    ratio, *_ = max(compare(outputs, again, tolerance))
    rounding, *_ = max(compare(changed, again, tolerance))
    is_real = ratio > MAX_RATIO and ratio > MAX_ROUNDINGS * rounding
    return AuditResult.FAILED if is_real else AuditResult.EXPLAINED, reason


def fill_weights(outputs: Outputs, model: LoadedModel) -> Outputs:
    """The outputs with the weights of all token ids (1, V) in place of those that are not 0.

    A weight that rounding makes 0 is absent from the latter.
    """
    if SPARSE_INDICES not in outputs or model.encoder is None or model.encoder.sparse is None:
        return outputs
    weights: Array = np.zeros((1, model.encoder.sparse.width), np.float32)
    weights[0, outputs[SPARSE_INDICES]] = outputs[SPARSE_VALUES]
    further = {name: array for name, array in outputs.items() if name not in (SPARSE_INDICES, SPARSE_VALUES)}
    return {**further, SPARSE_EMBEDDING: weights}


def comparison_graph(
    model: LoadedModel, graph: GraphKind, sequence: SequenceInputs, count: int
) -> GraphKind | None:
    """The graph that a sequence of a run is compared on, alone; None if there is nothing to compare.

    Args:
        model: The model that ran.
        graph: The graph that ran.
        sequence: A sequence of the run.
        count: The number of sequences of the run.
    """
    if sequence.encoder_outputs is not None and sequence.encoder_outputs.most_weights:
        return None  # rounding may decide which of two weights is among the largest
    if count > 1:
        return sequence.plan.graph
    plain = GraphKind.PLAIN if sequence.mask is None else GraphKind.MASK
    selects = sequence.encoder_outputs is not None or sequence.head_selection is not None
    incomparable = (plain, *IN_BLOCKS.values(), *OF_RERANKERS, GraphKind.QUERY)
    is_comparable = graph not in incomparable and not selects
    return plain if is_comparable and plain in model.sessions else None
