"""Sessions: providers, page-locked memory, and runs that are bound to it; the device is the host here."""

import ctypes
import dataclasses
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run.cuda import (
    KEPT_BLOCKS,
    KEPT_BYTES,
    SMALLEST_BLOCK,
    HostMemory,
    block_size,
)
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.run.session import (
    SHAPE_OPERATORS,
    BoundSession,
    HostNodes,
    RunControl,
    Session,
    _entries,
    left_on_host,
)
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.samples import CROSS, ROOT, SELF, Sample, assert_outputs, validated_of

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)


@WITHOUT_CUDA
def test_a_model_whose_provider_is_unavailable_fails_to_load(artifacts: Path) -> None:
    model = ModelStore(artifacts, Device(Provider.CUDA)).load(SELF, "1")
    assert isinstance(model, FailedModel)
    assert "CUDAExecutionProvider is not available" in model.reason


def test_the_memory_of_a_gpu_is_limited_only_if_asked_for() -> None:
    unlimited, limited = Device(Provider.CUDA).options, Device(Provider.CUDA, memory_bytes=5 << 30).options
    assert "gpu_mem_limit" not in unlimited
    assert unlimited["use_tf32"] == "0"
    assert Device(Provider.CPU, memory_bytes=5 << 30).options == {}
    assert limited == {
        **unlimited,
        "gpu_mem_limit": str(5 << 30),
        "arena_extend_strategy": "kSameAsRequested",
    }


ON_HOST, ON_DEVICE = "CPUExecutionProvider", "CUDAExecutionProvider"


def test_weights_are_prepacked_and_threads_spin_only_if_asked_for() -> None:
    usual, other = (
        _entries(Device(), prepack_weights=True),
        _entries(Device(spins=True), prepack_weights=False),
    )
    assert "session.disable_prepacking" not in usual
    assert other["session.disable_prepacking"] == "1"
    spinning = "session.intra_op.allow_spinning"
    assert (usual[spinning], other[spinning]) == ("0", "1")


def test_operators_of_tensors_and_of_sizes_are_told_apart(artifacts: Path) -> None:
    """What this runtime, which has the host only, assigned to it."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    graph = artifacts / CROSS / "1/model.lengths.onnx"
    session = onnxruntime.InferenceSession(graph, options, providers=[ON_HOST])
    nodes = session.get_provider_graph_assignment_info()
    assert left_on_host(nodes, ON_HOST) == HostNodes([], [])
    found = left_on_host(nodes, ON_DEVICE)
    kinds = {text.split()[0] for text in found.tensors}
    assert {"MatMul", "Attention"} <= kinds
    assert not kinds & set(SHAPE_OPERATORS)
    assert "Shape" in {text.split()[0] for text in found.shapes}
    assert all(len(text.split()) == 2 for text in (*found.tensors, *found.shapes))


PAGE = 4096


class CountedMemory(HostMemory):
    """Counts what is locked, without CUDA."""

    def __init__(self) -> None:
        super().__init__("libc.so.6")
        self.locked: dict[int, int] = {}
        self.total = 0

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for later arrays."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def _lock(self, address: int, size: int) -> bool:
        assert address % PAGE == size % PAGE == 0
        self.locked[address] = size
        self.total += 1
        return True

    def _unlock(self, address: int) -> None:
        del self.locked[address]


@given(st.integers(0, 1 << 34))
def test_blocks_are_whole_pages_and_at_most_a_quarter_is_unused(count: int) -> None:
    size = block_size(count)
    assert size >= max(count, SMALLEST_BLOCK)
    assert size % PAGE == 0
    assert size <= max(SMALLEST_BLOCK, 1.25 * count)


def test_memory_is_used_again_once_no_view_is_left() -> None:
    memory = CountedMemory()
    view = memory.empty((8, 16), np.float32)[2:, :3]
    view[...] = 7
    other = memory.empty((8, 16), np.float32)
    other[...] = 1
    assert (view == 7).all()
    assert (memory.total, memory.free_bytes) == (2, 0)
    del view, other
    gc.collect()
    assert memory.free_bytes == 2 * SMALLEST_BLOCK
    assert memory.empty((3,), np.int64).shape == (3,)
    assert memory.total == 2


def test_large_blocks_are_not_kept_beyond_a_few() -> None:
    memory = CountedMemory()
    arrays = [memory.empty((KEPT_BYTES // 2,), np.uint8) for _ in range(KEPT_BLOCKS + 2)]
    arrays.clear()
    gc.collect()
    assert memory.free_bytes == KEPT_BLOCKS * KEPT_BYTES // 2
    assert len(memory.locked) == KEPT_BLOCKS


def test_without_the_library_nothing_is_locked_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory("libcudart.so.999")
    assert memory.empty((3,), np.float32).shape == (3,)
    assert not memory._lock(0, PAGE)
    memory._unlock(0)
    (record,) = caplog.records
    assert (record.message, vars(record)["library"]) == ("host memory is not page-locked", "libcudart.so.999")


class Runtime:
    """The library of CUDA, which locks what is at an even number of pages."""

    def __init__(self) -> None:
        self.noted: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: ctypes.c_void_p, size: ctypes.c_size_t, flags: int) -> int:  # noqa: N802 - its name
        self.noted.append(("register", address.value, size.value, flags))
        return (address.value or 0) // PAGE % 2

    def cudaHostUnregister(self, address: ctypes.c_void_p) -> None:  # noqa: N802
        self.noted.append(("unregister", address.value))

    def cudaGetLastError(self) -> None:  # noqa: N802
        self.noted.append(("error",))


def test_the_library_of_cuda_gets_addresses_and_sizes_of_64_bits() -> None:
    memory, runtime = HostMemory("libc.so.6"), Runtime()
    memory._library = runtime  # type: ignore[assignment]
    assert memory._lock(1 << 46, 1 << 33)
    memory._unlock(1 << 46)
    assert not memory._lock((1 << 46) + PAGE, PAGE)
    # The error of the refusal is fetched, so that nobody else finds it.
    refused = [("register", (1 << 46) + PAGE, PAGE, 1), ("error",)]
    assert runtime.noted == [("register", 1 << 46, 1 << 33, 1), ("unregister", 1 << 46), *refused]


class Bound(Session):
    """A session on the host that runs as one on a device does."""

    def __init__(self, session: Session, memory: HostMemory) -> None:
        vars(self).update(vars(session))
        self._bound = BoundSession(session._session, memory)


def bound(model: LoadedModel, memory: HostMemory | None = None) -> LoadedModel:
    """The same model, whose sessions are bound."""
    memory = memory or CountedMemory()
    sessions: dict[GraphKind, Session] = {
        kind: Bound(session, memory) for kind, session in model.sessions.items()
    }
    return dataclasses.replace(model, sessions=sessions)


@pytest.fixture(params=[SELF, CROSS])
def plain(request: pytest.FixtureRequest, artifacts: Path) -> LoadedModel:
    return load_model(artifacts / request.param / "1", Device(threads=1))


def test_golden_vectors_of_every_graph_give_the_same_bytes(plain: LoadedModel, artifacts: Path) -> None:
    model = bound(plain)
    cases = load_golden(artifacts / plain.name / "1" / plain.manifest.golden)
    assert {case.graph for case in cases} == set(plain.sessions)
    for case in cases:
        expected, found = (each.sessions[case.graph].run(case.inputs) for each in (plain, model))
        assert list(found) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype


def test_inputs_of_a_batch_are_made_in_the_memory_of_the_device(plain: LoadedModel) -> None:
    memory = CountedMemory()
    model = bound(plain, memory)
    request = validated_of(plain, [(3, 4), (3, 4)], kind=MaskKind.PAIRS)
    outputs = run_batch(model, request.form.graph, request.sequences)[0]
    # The inputs, the mask, and the output.
    assert memory.total == len(plain.inputs) + 2
    del outputs
    gc.collect()
    run_batch(model, request.form.graph, request.sequences)
    assert memory.total == len(plain.inputs) + 2


def test_results_stay_as_they_are_while_other_runs_go_on(plain: LoadedModel) -> None:
    model = bound(plain)
    requests = [validated_of(plain, [(3 + seed % 5, 6)], seed=seed) for seed in range(40)]

    def run(request: Sample) -> dict[str, Array]:
        return run_batch(model, request.form.graph, request.sequences)[0][0]

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run, requests))
    for request, found in zip(requests, outputs, strict=True):
        assert_outputs(model, request.sequences[0], found)


def test_arrays_of_other_memory_and_layout_are_taken(plain: LoadedModel) -> None:
    session = bound(plain).sessions[GraphKind.PLAIN]
    (sequence,) = validated_of(plain, [(4, 6)]).sequences
    inputs = {name: array[np.newaxis] for name, array in sequence.inputs.items()}
    strided = {name: np.repeat(array, 2, axis=1)[:, ::2] for name, array in inputs.items()}
    expected = plain.sessions[GraphKind.PLAIN].run(inputs)["context_vectors"]
    np.testing.assert_array_equal(session.run(strided)["context_vectors"], expected)
    for array in inputs.values():
        array.flags.writeable = False
    np.testing.assert_array_equal(session.run(inputs)["context_vectors"], expected)


def test_an_output_whose_shape_does_not_follow_from_the_inputs_is_not_bound() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, ["dimensions", "found"])
    graph = helper.make_graph([helper.make_node("NonZero", ["x"], ["y"])], "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[ON_HOST])
    with pytest.raises(ValueError, match="output y"):
        BoundSession(session, CountedMemory())


def test_a_bound_run_can_be_ended_early_and_needs_every_input(plain: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"inputs .*query.* are missing"):
        bound(plain).sessions[GraphKind.PLAIN].run({})
    control = RunControl()
    control.terminate()
    request = validated_of(plain, [(4, 6)])
    with pytest.raises(Exception, match="terminate flag"):
        run_batch(bound(plain), GraphKind.PLAIN, request.sequences, control)


# The arena belongs to the process.
ARENA = """
import sys
from pathlib import Path
import numpy as np
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def run(rows):
    return model.sessions["plain"].run({"query": np.ones((1, rows, 4), np.float32)})["context_vectors"].shape

model = load_model(Path(sys.argv[1]), Device(threads=1, arena_bytes=400 << 20))
before = resident()
print(run(4096), resident() - before > 100)
model.shrink_arena()
print(resident() - before < 40)
try:
    run(8192)
except MemoryError:
    print("refused")
print(run(8))
"""


@pytest.mark.thorough
def test_the_arena_is_bounded_and_gives_memory_back(artifacts: Path, self_model: LoadedModel) -> None:
    """The scores of one sequence of 4,096 rows and two heads take 128 MiB."""
    folder = artifacts / self_model.name / self_model.version
    command = [sys.executable, "-c", ARENA, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().splitlines() == ["(1, 4096, 4) True", "True", "refused", "(1, 8, 4)"]
