"""The configurations in a real tritonserver.

They name its C++ backend for ONNX Runtime, which is in no Python package. Without it, the Python backend runs
the same models under the same configurations, in which only the backend is changed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.export import write_target
from tests.support import deployment, tritonserver
from tests.support.deployment import CROSS, SELF
from tests.support.eager import assert_parity
from tests.support.triton import TritonError, infer

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not tritonserver.is_installed(),
        reason="Triton is not installed: tests/support/install_peers.sh triton",
    ),
]
MODELS = (SELF, CROSS)
MAX_BATCH = 32


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the export wrote, for the Python backend."""
    folder = tmp_path_factory.mktemp("triton")
    for name in MODELS:
        write_target(deployment.link_model(name, folder), "triton")
        write_target(folder / name / "1", "onnx")  # a folder in which Triton must not see a version
        tritonserver.for_python_backend(folder / name)
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tritonserver.serving(repository, tmp_path_factory.mktemp("log") / "plain.log") as target:
        yield target


@pytest.fixture(scope="module")
def triton_with_lengths(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "lengths.log"
    with tritonserver.serving(repository, log, "--model-config-name=lengths") as target:
        yield target


def sequences(repository: Path, name: str, *lengths: tuple[int, int]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [deployment.sequence(repository / name / "1", rng, *each) for each in lengths]


def test_triton_accepts_what_the_export_wrote_up_to_the_absent_backend(tmp_path: Path) -> None:
    for name in MODELS:
        write_target(deployment.link_model(name, tmp_path / "repository"), "triton")
    with tritonserver.serving(tmp_path / "repository", tmp_path / "log") as target:
        states = tritonserver.index(target)
    assert {name: state for name, (state, _) in states.items()} == dict.fromkeys(MODELS, "UNAVAILABLE")
    for _, reason in states.values():
        assert "unable to find backend library for backend 'onnxruntime'" in reason


@pytest.mark.parametrize("name", MODELS)
def test_requests_of_unequal_lengths_at_once_equal_pytorch(triton: str, repository: Path, name: str) -> None:
    inputs = sequences(repository, name, (5, 3), (1, 7), (5, 3), (6, 6), (5, 3), (1, 7))
    batches = [{key: array[None] for key, array in each.items()} for each in inputs]
    found = [vectors[0] for vectors in tritonserver.infer_at_once(triton, name, batches)]
    assert_parity(found, [deployment.eager(name, each) for each in inputs])


def test_larger_batches_than_the_configuration_says_are_refused(triton: str) -> None:
    assert infer(triton, SELF, {"query": np.zeros((MAX_BATCH, 2, 4), np.float32)})
    with pytest.raises(TritonError, match=f"must be <= {MAX_BATCH}"):
        infer(triton, SELF, {"query": np.zeros((MAX_BATCH + 1, 2, 4), np.float32)})


@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_with_key_lengths_equal_pytorch(
    triton_with_lengths: str, repository: Path, name: str
) -> None:
    inputs = sequences(repository, name, (5, 3), (1, 7), (6, 6))
    batch = {}
    for key in inputs[0]:
        longest = max(len(each[key]) for each in inputs)
        batch[key] = np.stack([np.pad(each[key], ((0, longest - len(each[key])), (0, 0))) for each in inputs])
    last = list(inputs[0])[-1]
    batch["key_lengths"] = np.array([len(each[last]) for each in inputs])

    found = infer(triton_with_lengths, name, batch)["context_vectors"]
    rows = [vectors[: len(each["query"])] for vectors, each in zip(found, inputs, strict=True)]
    assert_parity(rows, [deployment.eager(name, each) for each in inputs])
