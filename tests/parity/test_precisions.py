"""Models of lower precision: within their stated tolerance, and independent of the other sequences."""

import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from attention_client import AttentionClient
from onnx import TensorProto

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind, Manifest
from attention_serving.export import export_module
from attention_serving.export.__main__ import export as export_command
from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import FP32_TOLERANCE, TOLERANCES, Precision
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request
from scripts.local_server import ServerProcess
from tests.parity import paths
from tests.server.samples import load_repository
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.coroutines import submitted
from tests.support.eager import Array, assert_parity, attend

FP16, INT8 = "self-attention-fp16", "multi-head-64x4-int8"
BF16, HEALTHY = "tiny-bf16", "self-attention"


@dataclass(frozen=True)
class Lowered:
    """A model, the preset that it was exported from, and its precision."""

    model: str
    preset: str
    precision: Precision

    @property
    def width(self) -> int:
        return build_preset(self.preset).config.d_query


MODELS = {
    "fp16": Lowered(FP16, "self-attention", Precision.FP16),
    "int8": Lowered(INT8, "multi-head-64x4", Precision.INT8),
}
EACH = pytest.mark.parametrize("lowered", MODELS.values(), ids=MODELS)
PROTOCOLS = pytest.mark.parametrize("protocol", ["attention.v1", "open inference"])


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def served(
    protocol: str, server: ServerProcess, client: AttentionClient, model: str, case: paths.Case
) -> paths.Outputs:
    typed = protocol == "attention.v1"
    return paths.typed(client, model, case) if typed else paths.open_protocol(server, model, case)


@PROTOCOLS
@pytest.mark.parametrize("masked", [False, True], ids=["every key", "masked"])
@EACH
def test_results_are_within_the_stated_tolerance_and_not_within_that_of_fp32(
    repository: Path,
    server: ServerProcess,
    client: AttentionClient,
    lowered: Lowered,
    masked: bool,
    protocol: str,
) -> None:
    module = build_preset(lowered.preset)
    case: paths.Case = {"query": normal(3, 9, lowered.width)}
    if masked:
        mask = np.random.default_rng(1).random((3, module.config.num_heads, 9, 9)) < 0.6
        mask[0, :, 2] = False
        case["attention_mask"] = mask
    found, expected = served(protocol, server, client, lowered.model, case), paths.eager(module, case)
    tolerance = Manifest.load(repository / lowered.model / "1").tolerance
    for name in paths.NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance.rtol, atol=tolerance.atol)
        assert not FP32_TOLERANCE.holds(found[name], expected[name])
        assert found[name].dtype == np.float32
    if masked:
        assert not found["attention_weights"][0, :, 2].any()


@EACH
def test_the_artifact_states_precision_tolerance_and_measured_error(
    repository: Path, client: AttentionClient, lowered: Lowered
) -> None:
    folder = repository / lowered.model / "1"
    manifest = Manifest.load(folder)
    assert (manifest.precision, manifest.tolerance) == (lowered.precision, TOLERANCES[lowered.precision])
    report = json.loads((folder / manifest.parity_report).read_text())
    assert report["tolerance"] == manifest.tolerance.model_dump()
    assert {case["graph"] for case in report["cases"]} == set(ATTENTION_GRAPHS)
    assert report["max_abs_error"] == max(case["max_abs_error"] for case in report["cases"])
    assert 1e-5 < report["max_abs_error"] < manifest.tolerance.atol
    parity = client.model(lowered.model).parity
    assert parity is not None
    assert parity.relative_tolerance == manifest.tolerance.rtol
    assert parity.absolute_tolerance == manifest.tolerance.atol
    assert 1e-5 < parity.measured_max_abs_error < manifest.tolerance.atol


@PROTOCOLS
@EACH
def test_fp32_is_the_default(
    repository: Path, server: ServerProcess, client: AttentionClient, lowered: Lowered, protocol: str
) -> None:
    folder, case = repository / lowered.preset / "1", {"query": normal(3, 9, lowered.width)}
    manifest = Manifest.load(folder)
    assert (manifest.precision, manifest.tolerance) == ("fp32", FP32_TOLERANCE)
    for kind in ATTENTION_GRAPHS:
        assert matrices(folder, kind) == {TensorProto.FLOAT}
    found = served(protocol, server, client, lowered.preset, case)
    expected = paths.eager(build_preset(lowered.preset), case)
    for name in paths.NAMES:
        assert_parity(found[name], expected[name])


@pytest.mark.parametrize(
    "function", [write_artifact, export_module, export_command], ids=["attention", "module", "command"]
)
def test_every_exporter_defaults_to_fp32(function: Any) -> None:
    assert inspect.signature(function).parameters["precision"].default is Precision.FP32


def initializers(folder: Path, kind: GraphKind) -> list[TensorProto]:
    return list(onnx.load(folder / Manifest.load(folder).graphs[kind].file).graph.initializer)


def matrices(folder: Path, kind: GraphKind) -> set[int]:
    """Returns the element types of a graph's matrices."""
    return {tensor.data_type for tensor in initializers(folder, kind) if len(tensor.dims) == 2}


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
@pytest.mark.parametrize(
    ("model", "element_type"), [(FP16, TensorProto.FLOAT16), (INT8, TensorProto.INT8)], ids=["fp16", "int8"]
)
def test_every_graph_holds_its_weights_in_the_lower_precision(
    repository: Path, model: str, element_type: int, kind: GraphKind
) -> None:
    folder = repository / model / "1"
    assert matrices(folder, kind) == {element_type}
    proto = onnx.load(folder / Manifest.load(folder).graphs[kind].file)
    assert {node.domain for node in proto.graph.node} == {""}
    assert [opset.domain for opset in proto.opset_import] == [""]
    types = [node.op_type for node in proto.graph.node]
    assert types.count("MatMulInteger") == (4 if model == INT8 else 0)  # query, key, value, output


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_weights_of_int8_are_smaller_than_a_third_of_those_of_fp32(repository: Path, kind: GraphKind) -> None:
    """Counts the weights with their scales and zero points; the size of the nodes does not change."""
    small, large = (
        sum(len(tensor.raw_data) for tensor in initializers(repository / model / "1", kind))
        for model in (INT8, "multi-head-64x4")
    )
    assert 64 * 64 * 4 < small < large / 3


LENGTHS = (5, 5, 9, 5, 1, 9)
NEIGHBOURS = pytest.mark.parametrize("neighbour", [np.nan, 1e4], ids=["NaN", "1e4"])


@pytest.mark.parametrize("return_weights", [False, True], ids=["context only", "with weights"])
def test_int8_sequences_of_a_request_equal_each_alone_bit_for_bit(
    client: AttentionClient, return_weights: bool
) -> None:
    queries = [normal(length, 64, seed=seed) * (seed + 1) for seed, length in enumerate(LENGTHS)]
    together = client.attend(INT8, queries, return_weights=return_weights)
    for index, query in enumerate(queries):
        alone = client.attend(INT8, query, return_weights=return_weights)
        np.testing.assert_array_equal(together.context_vectors[index], alone.context_vectors)
        if return_weights:
            assert together.attention_weights is not None
            assert alone.attention_weights is not None
            np.testing.assert_array_equal(together.attention_weights[index], alone.attention_weights)


@PROTOCOLS
@NEIGHBOURS
def test_int8_results_do_not_depend_on_other_sequences(
    server: ServerProcess, client: AttentionClient, neighbour: float, protocol: str
) -> None:
    batch = normal(4, 7, 64)
    disturbed = batch.copy()
    disturbed[1] = neighbour
    quiet, loud = (
        served(protocol, server, client, INT8, {"query": query})["context_vectors"]
        for query in (batch, disturbed)
    )
    np.testing.assert_array_equal(loud[[0, 2, 3]], quiet[[0, 2, 3]])
    assert not np.array_equal(loud[1], quiet[1])


@NEIGHBOURS
def test_int8_sequences_do_not_depend_on_others_of_the_same_run(repository: Path, neighbour: float) -> None:
    """Runs the graph without the server, which could compute sequences one by one."""
    folder, batch = repository / INT8 / "1", normal(3, 7, 64)
    batch[1] = neighbour
    path = str(folder / Manifest.load(folder).graphs[GraphKind.PLAIN].file)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (together,) = session.run(None, {"query": batch})
    for index in (0, 2):
        (alone,) = session.run(None, {"query": batch[index : index + 1]})
        np.testing.assert_array_equal(together[index], alone[0])


def export_bf16(folder: Path) -> None:
    module = MultiHeadAttention(AttentionConfig(d_query=4, num_heads=2))
    write_artifact(module, ModelId(BF16), folder, precision=Precision.BF16)


@pytest.fixture(scope="module")
def with_bf16(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a bf16 model and of a healthy one."""
    (exported,) = cached_repositories(ModelSet("bf16", [export_bf16], [Path(__file__)]))
    folder = tmp_path_factory.mktemp("with-bf16")
    shutil.copytree(exported / BF16, folder / BF16)
    shutil.copytree(repository / HEALTHY, folder / HEALTHY)
    return folder


def test_bf16_is_not_measured_without_cpu_kernels(with_bf16: Path) -> None:
    manifest = Manifest.load(with_bf16 / BF16 / "1")
    assert (manifest.precision, manifest.tolerance) == ("bf16", TOLERANCES[Precision.BF16])
    report = json.loads((with_bf16 / BF16 / "1" / manifest.parity_report).read_text())
    assert (report["cases"], report["max_abs_error"]) == ([], None)
    assert matrices(with_bf16 / BF16 / "1", GraphKind.PLAIN) == {TensorProto.BFLOAT16}


def test_a_bf16_model_fails_to_load_on_a_cpu_and_the_other_model_is_served(with_bf16: Path) -> None:
    models = load_repository(with_bf16, Device(threads=1))
    failed = models.find(BF16)
    assert isinstance(failed, FailedModel)
    assert failed.reason.endswith("the bf16 graph does not load on cpu")
    engine = Engine(models)
    query = normal(6, 16)
    rows = Ragged(query, (6,))
    with pytest.raises(ModelNotReadyError, match=f"'{BF16}' version 1 failed to load: .*bf16 graph"):
        engine.model(BF16)
    result = submitted(engine, engine.model(HEALTHY), Request(inputs={"query": rows})).result(60)
    engine.close()
    assert_parity(result.outputs["context_vectors"][0], attend(build_preset(HEALTHY), query)[0])
