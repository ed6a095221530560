"""Sessions: outputs, threads, execution providers, and the operators that a device lacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.run.session import SHAPE_OPERATORS, HostNodes, Session, left_on_host
from tests.server.samples import CROSS, HEADS, SELF, load_repository

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)


@pytest.fixture
def graph(artifacts: Path) -> Path:
    return artifacts / SELF / "1" / "model.weights.onnx"


def test_outputs_are_returned_by_name(graph: Path) -> None:
    session = Session(graph, Device(threads=1))
    outputs = session.run(
        {"attention_mask": np.ones((2, 1, 3, 3), np.bool_), "query": np.ones((2, 3, 4), np.float32)}
    )
    assert {name: array.shape for name, array in outputs.items()} == {
        "context_vectors": (2, 3, 4),
        "attention_weights": (2, HEADS, 3, 3),
    }
    rows = outputs["attention_weights"].sum(axis=-1)
    np.testing.assert_allclose(rows, np.ones_like(rows), atol=1e-6)


@pytest.mark.parametrize("threads", [0, 1, 2], ids=["of the runtime", "one", "two"])
def test_the_golden_vectors_hold_for_any_number_of_threads(artifacts: Path, threads: int) -> None:
    folder = artifacts / SELF / "1"
    session = Session(folder / "model.onnx", Device(threads=threads))
    assert session.provider == "CPUExecutionProvider"
    cases = [case for case in load_golden(folder / "golden.safetensors") if case.graph is GraphKind.PLAIN]
    assert cases
    for case in cases:
        outputs = session.run(case.inputs)
        np.testing.assert_allclose(
            outputs["context_vectors"], case.outputs["context_vectors"], rtol=1.3e-6, atol=1e-5
        )


@WITHOUT_CUDA
def test_an_unavailable_provider_is_an_error_rather_than_a_silent_cpu(graph: Path) -> None:
    with pytest.raises(ProviderError, match="CUDAExecutionProvider is not available"):
        Session(graph, Device(Provider.CUDA))


@WITHOUT_CUDA
def test_a_model_whose_provider_is_unavailable_fails_to_load(artifacts: Path) -> None:
    models = list(load_repository(artifacts, Device(Provider.CUDA)))
    assert len(models) == 3
    for model in models:
        assert isinstance(model, FailedModel)
        assert "CUDAExecutionProvider is not available" in model.reason


def test_fp32_on_a_gpu_does_not_use_tf32() -> None:
    assert Device(Provider.CUDA).options["use_tf32"] == "0"


def test_the_memory_of_a_gpu_is_limited_only_if_asked_for() -> None:
    unlimited, limited = Device(Provider.CUDA).options, Device(Provider.CUDA, memory_bytes=5 << 30).options
    assert "gpu_mem_limit" not in unlimited
    assert limited == {
        **unlimited,
        "gpu_mem_limit": str(5 << 30),
        "arena_extend_strategy": "kSameAsRequested",
    }


def test_a_limit_of_device_memory_does_not_concern_the_host() -> None:
    assert Device(Provider.CPU, memory_bytes=5 << 30).options == {}


HOST, DEVICE = "CPUExecutionProvider", "CUDAExecutionProvider"


def assigned(graph: Path) -> list[Any]:
    """What this runtime, which has the host only, assigned."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(graph, options, providers=[HOST])
    found: list[Any] = session.get_provider_graph_assignment_info()
    return found


@pytest.mark.parametrize("name", [SELF, CROSS])
def test_nothing_is_left_where_one_provider_runs_everything(artifacts: Path, name: str) -> None:
    nodes = assigned(artifacts / name / "1/model.lengths.onnx")
    assert sum(len(list(subgraph.get_nodes())) for subgraph in nodes) > 4
    assert left_on_host(nodes, HOST) == HostNodes([], [])


def test_operators_of_tensors_and_of_sizes_are_told_apart(artifacts: Path) -> None:
    found = left_on_host(assigned(artifacts / CROSS / "1/model.lengths.onnx"), DEVICE)
    kinds = {text.split()[0] for text in found.tensors}
    assert {"MatMul", "Attention"} <= kinds
    assert not kinds & set(SHAPE_OPERATORS)
    assert "Shape" in {text.split()[0] for text in found.shapes}
    assert all(len(text.split()) == 2 for text in (*found.tensors, *found.shapes))


@dataclass
class Node:
    op_type: str
    name: str


@dataclass
class Subgraph:
    ep_name: str
    nodes: list[Node]

    def get_nodes(self) -> list[Node]:
        return self.nodes


def test_only_what_runs_elsewhere_is_named() -> None:
    device = Subgraph(DEVICE, [Node("MatMul", "a"), Node("Shape", "b")])
    host = Subgraph(HOST, [Node("Shape", "c"), Node("Softmax", "d"), Node("Loop", "")])
    assert left_on_host([device, host], DEVICE) == HostNodes(["Shape c"], ["Softmax d", "Loop"])
