"""Sessions: outputs, threads and execution providers."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.run.session import Session
from tests.server.samples import HEADS, SELF, load_repository

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
