"""Operators that a device lacks are named."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from attention_serving.server.engine.run.session import (
    SHAPE_OPERATORS,
    HostNodes,
    left_on_host,
)
from tests.server.samples import CROSS, SELF

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
