"""Slabs of bound runs: they are used again, and never while a result is still there."""

import gc
import math
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime import OrtValue

from attention_serving.artifact.manifest import KEY_POSITIONS, GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run import memory
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.run.memory import SlabPool
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.types import Array, Context, DecodedRequest, Ragged
from tests.server.samples import CROSS, SELF, TEXT, WORDS, validated_of

HOLDERS: dict[str, Callable[[Array], object]] = {
    "array": lambda array: array,
    "view": lambda array: array[1:, :1].T,
    "view of other elements": lambda array: array.view(np.uint8)[3:4],
    "buffer": lambda array: memoryview(array[2]),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_slab_is_used_again_once_the_last_view_of_it_is_gone(hold: Callable[[Array], object]) -> None:
    pool = SlabPool(1 << 20)
    array = pool.empty((100, 250), np.float32)
    address = array.ctypes.data
    holder = hold(array)
    del array
    assert pool.empty((100, 251), np.float32).ctypes.data != address
    del holder
    addresses = [pool.empty((100, 251), np.float32).ctypes.data for _ in range(3)]
    assert address in addresses
    assert (pool.created, pool.held_bytes) == (2, 2 << 17)
    assert all(address % 4096 == 0 for address in addresses)


def test_beyond_the_limit_and_below_the_least_size_arrays_have_memory_of_their_own() -> None:
    pool = SlabPool(1 << 20)
    held = [pool.empty((1 << 18,), np.uint8) for _ in range(5)]
    small = pool.empty((1 << 10,), np.uint8)
    assert [array.base is None for array in (*held, small)] == [False] * 4 + [True] * 2
    assert (pool.created, pool.held_bytes) == (4, pool.limit_bytes)


def test_stale_slabs_give_way_to_those_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool(1 << 20)
    held = [pool.empty((1 << 18,), np.uint8) for _ in range(4)]
    del held[1:]
    assert pool.empty((1 << 19,), np.uint8).base is None  # the others were used just now
    monkeypatch.setattr(memory, "STALE_SECONDS", 0)
    assert pool.empty((1 << 19,), np.uint8).base is not None
    assert pool.held_bytes == (1 << 18) + (1 << 18) + (1 << 19)
    assert pool.empty((1 << 20,), np.uint8).base is None  # the first is in use


def test_an_output_of_other_sizes_than_the_inputs_gets_memory_of_the_runtime(tmp_path: Path) -> None:
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name} rows", 3]) for name in "xyz"]
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0), helper.make_node("Neg", ["x"], ["z"])]
    types[2].type.tensor_type.shape.dim[0].dim_param = "x rows"
    graph = helper.make_graph(nodes, "doubles", types[:1], types[1:])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 23)])
    onnx.save(model, path := tmp_path / "model.onnx")
    doubles = Session(path, Device(threads=1, binds=True))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    outputs = doubles.run({"x": x.T.copy().T})
    del doubles
    np.testing.assert_array_equal(outputs["y"], np.concatenate([x, x]))
    np.testing.assert_array_equal(outputs["z"], -x)


CONTEXT, ROWS = "queries to a context", 7


@pytest.fixture(scope="module")
def context(cross_model: LoadedModel) -> Context:
    """A stored context of noise."""
    noise, tensors = np.random.default_rng(0), dict[str, Array]()
    for spec in cross_model.manifest.graphs[GraphKind.PROJECT].outputs:
        shape = [axis if isinstance(axis, int) else ROWS for axis in spec.axes[1:]]
        tensors[spec.name] = noise.standard_normal((1, *shape), np.float32)
    tensors[KEY_POSITIONS] = np.arange(ROWS)[np.newaxis]
    return Context(id="noise", nbytes=0, length=ROWS, tensors=tensors)


class Batch(NamedTuple):
    """A batch of a property test.

    Attributes:
        name: Its model.
        kind: Its graph, if its sequences have one length.
        lengths: Rows of each sequence.
        delay: How many further batches run before its results are read.
        fails: Whether its run is ended before it starts.
    """

    name: str
    kind: GraphKind
    lengths: list[int]
    delay: int
    fails: bool

    def sequences(self, model: LoadedModel) -> list[SequenceInputs]:
        """Sequences of noise."""
        if self.name != TEXT:
            lengths = [(rows, rows + 3) for rows in self.lengths]
            return list(validated_of(model, lengths, seed=self.delay).asked)
        ids = np.random.default_rng(self.delay).integers(len(WORDS), size=sum(self.lengths))
        decoded = DecodedRequest(inputs={"token_ids": Ragged(ids, tuple(self.lengths))})
        return list(validate(decoded, model, Limits()).sequences)

    def run(self, models: Mapping[str, LoadedModel], control: RunControl | None = None) -> list[Outputs]:
        """The outputs of its sequences."""
        model = models[self.name]
        kind = self.kind if len(set(self.lengths)) == 1 else model.mixed_graph(self.kind)
        return run_batch(model, kind, self.sequences(model), control)[0]


BATCHES = st.lists(
    st.builds(
        Batch,
        name=st.sampled_from([SELF, CROSS, TEXT, CONTEXT]),
        kind=st.sampled_from([GraphKind.PLAIN, GraphKind.MASK, GraphKind.WEIGHTS]),
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6) | st.just([9] * 4),
        delay=st.integers(0, 8),
        fails=st.sampled_from([False, False, False, True]),
    ),
    min_size=4,
    max_size=24,
)


class Consumers:
    """Reads results as late as their batches want, in any order, while threads run further ones."""

    def __init__(self, models: dict[str, LoadedModel], bound: dict[str, LoadedModel], seed: int) -> None:
        self._models, self._bound, self._random = models, bound, random.Random(seed)  # noqa: S311 - no secret
        self._lock, self._runs = threading.Lock(), 0
        self._held: list[tuple[int, Batch, int, Outputs]] = []

    def run(self, batch: Batch) -> None:
        """Runs a batch, and reads what is due then. Some of its sequences are never read."""
        if batch.fails:
            control = RunControl()
            control.terminate()
            with pytest.raises(RuntimeError, match="terminate"):
                batch.run(self._bound, control)
            return
        outputs = batch.run(self._bound)
        with self._lock:
            self._runs += 1
            due = [(self._runs + batch.delay, batch, at, each) for at, each in enumerate(outputs)]
            self._held += due[self._random.randrange(len(due)) :]
            self._random.shuffle(self._held)
            due = [entry for entry in self._held if entry[0] <= self._runs]
            self._held = [entry for entry in self._held if entry[0] > self._runs]
        del outputs
        self.read(due)

    def read(self, entries: list[tuple[int, Batch, int, Outputs]]) -> None:
        """Compares results bit for bit with those of a run that is not bound."""
        while entries:
            _, batch, at, outputs = entries.pop()
            for name, expected in batch.run(self._models)[at].items():
                np.testing.assert_array_equal(outputs[name], expected)

    def read_rest(self) -> None:
        """Compares what nobody has read."""
        self.read(self._held)


@settings(max_examples=15)
@given(batches=BATCHES, seed=st.integers(0, 2**32), stale_seconds=st.sampled_from([0.0, math.inf]))
def test_results_are_never_overwritten_however_late_they_are_read(
    models: dict[str, LoadedModel],
    bound_models: dict[str, LoadedModel],
    slabs: SlabPool,
    context: Context,
    batches: list[Batch],
    seed: int,
    stale_seconds: float,
) -> None:
    unbound, bound = ({**each, CONTEXT: each[CROSS].with_context(context)} for each in (models, bound_models))
    consumers = Consumers(unbound, bound, seed)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(memory, "STALE_SECONDS", stale_seconds)
        for _ in threads.map(consumers.run, batches):
            assert slabs.held_bytes <= slabs.limit_bytes
        consumers.read_rest()
        gc.collect()
        idle_bytes = sum(len(slab.memory) for idle in slabs._idle for slab in idle)
        assert idle_bytes == slabs.held_bytes  # also those of runs that failed
        created = slabs.created
        for batch in batches:
            Consumers(unbound, bound, seed).run(batch._replace(delay=0))
        assert slabs.created == created or not stale_seconds  # no batch needs another slab than before


def test_a_context_is_copied_once_and_freed_with_it(
    bound_models: dict[str, LoadedModel], cross_model: LoadedModel, context: Context
) -> None:
    held: Any = Context(id="held", nbytes=0, length=ROWS, tensors=context.tensors)
    batch = Batch(CONTEXT, GraphKind.PLAIN, [3, 5], 0, fails=False)
    batch.run({CONTEXT: cross_model.with_context(held)})
    assert not held.device_tensors
    for name in (CROSS, SELF):
        assert bound_models[name].sessions[GraphKind.CONTEXT].context_inputs(held) is held.device_tensors
    assert held.device_tensors.keys() == context.tensors.keys()
    tensors = [weakref.ref(tensor) for tensor in held.device_tensors.values()]
    del held
    gc.collect()
    assert not any(tensor() for tensor in tensors)


def test_a_context_for_which_the_device_has_no_memory_is_copied_by_every_run(
    models: dict[str, LoadedModel],
    bound_models: dict[str, LoadedModel],
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Context(id="held", nbytes=0, length=ROWS, tensors=context.tensors)
    with monkeypatch.context() as patch:
        patch.setattr(OrtValue, "ortvalue_from_numpy", lambda *_: 1 / 0)
        bound_models[CROSS].sessions[GraphKind.CONTEXT].context_inputs(held)
    assert [record.message for record in caplog.records] == ["context not kept on the device"]
    batch, unbound, bound = (
        Batch(CONTEXT, GraphKind.PLAIN, [3, 5], 0, fails=False),
        *({CONTEXT: each[CROSS].with_context(held)} for each in (models, bound_models)),
    )
    for outputs, expected in zip(batch.run(bound), batch.run(unbound), strict=True):
        np.testing.assert_array_equal(outputs["context_vectors"], expected["context_vectors"])
