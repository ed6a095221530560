"""Models of lower precision: within their stated tolerance, and independent of the other sequences."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.artifact.manifest import Manifest
from attention_serving.export.precision import FP32_TOLERANCE, TOLERANCES
from scripts.local_server import ServerProcess, serving
from tests.parity import paths
from tests.server.samples import HEADS, SELF, WIDTHS, eager_module
from tests.support.eager import Array
from tests.support.repository import BF16, FP16, INT8, LOWERED

pytestmark = pytest.mark.thorough
WIDTH = WIDTHS["query"]


@pytest.fixture(scope="module")
def server(further: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the models, without the one that a CPU cannot run."""
    with serving(further, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("path", paths.SERVED.values(), ids=paths.SERVED)
@pytest.mark.parametrize("model", [FP16, INT8])
def test_results_are_within_the_stated_tolerance_and_not_within_that_of_fp32(
    server: ServerProcess, client: AttentionClient, model: str, path: paths.Path
) -> None:
    mask = np.random.default_rng(1).random((3, HEADS, 9, 9)) < 0.6
    mask[0, :, 2] = False
    tolerance, parity = TOLERANCES[LOWERED[model]], client.model(model).parity
    assert parity is not None
    assert (parity.relative_tolerance, parity.absolute_tolerance) == (tolerance.rtol, tolerance.atol)
    assert 1e-5 < parity.measured_max_abs_error < tolerance.atol
    query: paths.Case = {"query": normal(3, 9, WIDTH)}
    for case in (query, query | {"attention_mask": mask}):
        found = path(client, server.target, model, case)
        expected = paths.eager(eager_module(SELF), case)
        for name in paths.NAMES:
            np.testing.assert_allclose(found[name], expected[name], rtol=tolerance.rtol, atol=tolerance.atol)
            assert not FP32_TOLERANCE.holds(found[name], expected[name])
            assert found[name].dtype == np.float32
    assert not found["attention_weights"][0, :, 2].any()


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
    report = json.loads((folder / Manifest.load(folder).parity_report).read_text())
    assert (report["cases"], report["max_abs_error"]) == ([], None)
    (failed,) = (model for model in client.models() if model.name == BF16)
    assert failed.state == "failed"
