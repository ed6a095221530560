"""Models of lower precision: within their stated tolerance, and independent of the other sequences."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_client import AttentionClient
from onnx import TensorProto

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind, Manifest
from attention_serving.export.precision import FP32_TOLERANCE, TOLERANCES, Precision
from scripts.local_server import ServerProcess, serving
from tests.parity import paths
from tests.server.samples import HEADS, SELF, WIDTHS, eager_module
from tests.support.eager import Array
from tests.support.repository import BF16, FP16, INT8

pytestmark = pytest.mark.thorough
WIDTH = WIDTHS["query"]
# By model, its precision and the type of its weights.
LOWERED = {FP16: (Precision.FP16, TensorProto.FLOAT16), INT8: (Precision.INT8, TensorProto.INT8)}
EACH = pytest.mark.parametrize("model", LOWERED)


@pytest.fixture(scope="module")
def server(further: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the models, without the one that a CPU cannot run."""
    with serving(further, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of that server."""
    with AttentionClient(server.target) as client:
        yield client


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("path", paths.SERVED.values(), ids=paths.SERVED)
@EACH
def test_results_are_within_the_stated_tolerance_and_not_within_that_of_fp32(
    further: Path,
    server: ServerProcess,
    client: AttentionClient,
    model: str,
    path: paths.Path,
) -> None:
    mask = np.random.default_rng(1).random((3, HEADS, 9, 9)) < 0.6
    mask[0, :, 2] = False
    tolerance = Manifest.load(further / model / "1").tolerance
    query: paths.Case = {"query": normal(3, 9, WIDTH)}
    for case in (query, query | {"attention_mask": mask}):
        found = path(client, server.target, model, case)
        expected = paths.eager(eager_module(SELF), case)
        for name in paths.NAMES:
            np.testing.assert_allclose(found[name], expected[name], rtol=tolerance.rtol, atol=tolerance.atol)
            assert not FP32_TOLERANCE.holds(found[name], expected[name])
            assert found[name].dtype == np.float32
    assert not found["attention_weights"][0, :, 2].any()


@EACH
def test_the_artifact_states_its_error_and_its_graphs_hold_weights_of_the_lower_precision(
    further: Path, client: AttentionClient, model: str
) -> None:
    folder, (precision, weight_type) = further / model / "1", LOWERED[model]
    manifest = Manifest.load(folder)
    assert (manifest.precision, manifest.tolerance) == (precision, TOLERANCES[precision])
    parity = client.model(model).parity
    assert parity is not None
    assert (parity.relative_tolerance, parity.absolute_tolerance) == (
        manifest.tolerance.rtol,
        manifest.tolerance.atol,
    )
    assert 1e-5 < parity.measured_max_abs_error < manifest.tolerance.atol
    weights = sum(own.numel() for own in eager_module(SELF).parameters() if own.ndim == 2)
    for kind in ATTENTION_GRAPHS:
        assert matrices(folder, kind) == {weight_type: weights}


def matrices(folder: Path, kind: GraphKind) -> Counter[int]:
    """The elements of a graph's matrices by their type."""
    sizes = Counter[int]()
    for tensor in onnx.load(folder / Manifest.load(folder).graphs[kind].file).graph.initializer:
        if len(tensor.dims) == 2:
            sizes[tensor.data_type] += tensor.dims[0] * tensor.dims[1]
    return sizes


def test_int8_sequences_of_a_request_equal_each_alone_bit_for_bit(client: AttentionClient) -> None:
    lengths = (5, 5, 9, 5, 1, 9)
    queries = [normal(length, WIDTH, seed=seed) * (seed + 1) for seed, length in enumerate(lengths)]
    together = client.attend(INT8, queries, return_weights=True)
    assert together.attention_weights is not None
    for index, query in enumerate(queries):
        alone = client.attend(INT8, query, return_weights=True)
        np.testing.assert_array_equal(together.context_vectors[index], alone.context_vectors)
        np.testing.assert_array_equal(together.attention_weights[index], alone.attention_weights)


def test_a_bf16_model_is_not_measured_and_fails_to_load_on_a_cpu(
    further: Path, client: AttentionClient
) -> None:
    folder = further / BF16 / "1"
    manifest = Manifest.load(folder)
    assert (manifest.precision, manifest.tolerance) == ("bf16", TOLERANCES[Precision.BF16])
    report = json.loads((folder / manifest.parity_report).read_text())
    assert (report["cases"], report["max_abs_error"]) == ([], None)
    assert set(matrices(folder, GraphKind.PLAIN)) == {TensorProto.BFLOAT16}
    (failed,) = (model for model in client.models() if model.name == BF16)
    assert failed.state == "failed"
