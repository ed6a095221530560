"""Bound runs are those of a plain session. The device is the host here; it takes the same calls."""

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.cuda import HostMemory
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import BoundSession, RunControl, Session
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.engine.run.test_pinned import CountedMemory
from tests.server.samples import CROSS, SELF, assert_outputs, validated_of


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


@pytest.mark.parametrize("kind", [None, *MaskKind], ids=["every key", *MaskKind])
@pytest.mark.parametrize("lengths", [[(5, 7)], [(5, 7), (5, 7)], [(1, 9), (6, 2), (3, 3)]], ids=str)
def test_batches_of_a_bound_model_equal_eager_pytorch(
    plain: LoadedModel, lengths: list[tuple[int, int]], kind: MaskKind | None
) -> None:
    model = bound(plain)
    request = validated_of(plain, lengths, kind=kind)
    same = len(set(lengths)) == 1
    graph = plain.batch_graph(request.form.graph, equal_lengths=same)
    for sequence, outputs in zip(
        request.sequences, run_batch(model, graph, request.sequences)[0], strict=True
    ):
        assert_outputs(model, sequence, outputs)


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


def test_results_stay_as_they_are_while_later_runs_go_on(plain: LoadedModel) -> None:
    model = bound(plain)
    requests = [validated_of(plain, [(4, 5)], seed=seed) for seed in range(6)]
    outputs = [run_batch(model, each.form.graph, each.sequences)[0][0] for each in requests]
    for request, found in zip(requests, outputs, strict=True):
        assert_outputs(model, request.sequences[0], found)


def test_several_runs_go_on_at_once(plain: LoadedModel) -> None:
    model = bound(plain)
    requests = [validated_of(plain, [(3 + seed % 5, 6)], seed=seed) for seed in range(40)]

    def run(at: int) -> None:
        request = requests[at]
        (found,) = run_batch(model, request.form.graph, request.sequences)[0]
        assert_outputs(model, request.sequences[0], found)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(len(requests))))


def test_arrays_of_other_memory_and_layout_are_taken(plain: LoadedModel) -> None:
    model = bound(plain)
    (sequence,) = validated_of(plain, [(4, 6)]).sequences
    inputs = {name: array[np.newaxis] for name, array in sequence.inputs.items()}
    strided = {name: np.repeat(array, 2, axis=1)[:, ::2] for name, array in inputs.items()}
    frozen = {
        name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
        for name, array in inputs.items()
    }
    expected = plain.sessions[GraphKind.PLAIN].run(inputs)["context_vectors"]
    for given in (strided, frozen):
        np.testing.assert_array_equal(model.sessions[GraphKind.PLAIN].run(given)["context_vectors"], expected)


def one_node(
    operator: str, output_shape: list[str | int], output_type: int = TensorProto.FLOAT
) -> onnxruntime.InferenceSession:
    """A session of x (batch, length, 4) to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])
    y = helper.make_tensor_value_info("y", output_type, output_shape)
    node = helper.make_node(operator, ["x"], ["y"])
    graph = helper.make_graph([node], "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)], ids=["no sequence", "no row"])
def test_an_empty_axis_gives_an_empty_output(shape: tuple[int, ...]) -> None:
    session = BoundSession(one_node("Relu", ["batch", "length", 4]), CountedMemory())
    assert session.run({"x": np.empty(shape, np.float32)})["y"].shape == shape


def test_an_output_whose_shape_does_not_follow_from_the_inputs_is_not_bound() -> None:
    with pytest.raises(ValueError, match="output y"):
        BoundSession(one_node("NonZero", ["dimensions", "found"], TensorProto.INT64), CountedMemory())


def failing_inputs(plain: LoadedModel) -> list[dict[str, Array]]:
    (sequence,) = validated_of(plain, [(4, 6)]).sequences
    good = {name: array[np.newaxis] for name, array in sequence.inputs.items()}
    wide = {name: np.repeat(array, 2, axis=2) for name, array in good.items()}
    flat = {name: array.reshape(-1) for name, array in good.items()}
    return [{}, wide, flat, {**good, "other": np.ones(1, np.float32)}]


def test_what_a_plain_session_refuses_a_bound_one_refuses_too(plain: LoadedModel) -> None:
    model = bound(plain)
    for inputs in failing_inputs(plain):
        for each in (plain, model):
            with pytest.raises(Exception, match=r"(?i)inputs?|dimensions|rank"):
                each.sessions[GraphKind.PLAIN].run(inputs)
    good = validated_of(plain, [(4, 6)])
    assert_outputs(model, good.sequences[0], run_batch(model, GraphKind.PLAIN, good.sequences)[0][0])


def test_a_bound_run_can_be_ended_early(plain: LoadedModel) -> None:
    control = RunControl()
    control.terminate()
    request = validated_of(plain, [(4, 6)])
    with pytest.raises(Exception, match="terminate flag"):
        run_batch(bound(plain), GraphKind.PLAIN, request.sequences, control)
