"""TorchServe's handler in this process, with the files of an archive and real ONNX Runtime sessions."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_serving.artifact.manifest import Manifest
from attention_serving.export import export_module, write_target
from attention_serving.export.certificate import sign_artifact
from attention_serving.export.deployment import torchserve, triton
from attention_serving.export.deployment.torchserve_handler import AttentionHandler
from attention_serving.export.precision import Precision
from tests.support import deployment, repository
from tests.support.deployment import CROSS, ENCODER, ROTARY, SELF, TEXT
from tests.support.eager import assert_parity
from tests.support.keys import new_key
from tests.support.processes import run_python
from tests.support.triton import parse_configuration


class Context:
    """What TorchServe gives to a handler, and what the handler sets for each request."""

    def __init__(self, folder: Path, graph: str, **settings: Any) -> None:
        self.system_properties = {"model_dir": str(folder)}
        self.manifest = {"model": {"serializedFile": graph}}
        self.model_yaml_config = {"handler": settings}
        self.statuses: dict[int, tuple[int, str]] = {}
        self.types: dict[int, str] = {}

    def set_response_status(self, code: int, phrase: str, index: int) -> None:
        self.statuses[index] = (code, phrase)

    def set_response_content_type(self, index: int, value: str) -> None:
        self.types[index] = value


class Archive:
    """The unpacked archive of a model, and its handler."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.artifact = name, deployment.link_model(name, folder / "repository")
        self.folder, self.handler = folder / "archive", AttentionHandler()
        self.folder.mkdir()
        self.graph = torchserve.stage(self.artifact, Manifest.load(self.artifact), self.folder)

    def initialize(self, **settings: Any) -> "Archive":
        self.handler.initialize(Context(self.folder, self.graph, **settings))
        return self

    def handle(self, *requests: dict[str, Any]) -> tuple[list[bytes], Context]:
        context = Context(self.folder, self.graph)
        return self.handler.handle(list(requests), context), context

    def sequence(self, *lengths: int) -> dict[str, Any]:
        return deployment.sequence(self.artifact, np.random.default_rng(list(lengths)), *lengths)


@pytest.mark.thorough
def test_pytorchs_layers_in_half_precision_open_wherever_they_are_deployed(tmp_path: Path) -> None:
    """With all optimisers of ONNX Runtime, each of these sessions would end its process."""
    module, axes = repository.encoder(), {"src": {0: "batch", 1: "sequence"}}
    options: dict[str, Any] = {"precision": Precision.FP16, "max_length": 16}
    artifact, manifest = export_module(
        module, (torch.zeros(2, 3, 32),), axes, out=tmp_path, name="half", **options
    )
    sign_artifact(artifact, new_key())
    *_, run = write_target(artifact, "onnx")
    assert run_python(run).returncode == 0
    (tmp_path / "archive").mkdir()
    graph = torchserve.stage(artifact, manifest, tmp_path / "archive")
    AttentionHandler().initialize(Context(tmp_path / "archive", graph))
    for text in triton.configurations(manifest).values():
        assert parse_configuration(text)["optimization"] == {"graph": {"level": 1}}


@pytest.fixture
def archive(tmp_path: Path, request: pytest.FixtureRequest) -> Archive:
    return Archive(getattr(request, "param", SELF), tmp_path).initialize()


def npy(array: Any) -> bytearray:
    stream = io.BytesIO()
    np.save(stream, array)
    return bytearray(stream.getvalue())


def loaded(*replies: bytes) -> list[Any]:
    return [np.load(io.BytesIO(reply)) for reply in replies]


def refusal(reply: bytes, context: Context, index: int = 0) -> str:
    """The message of a refused request."""
    assert (context.statuses[index][0], context.types[index]) == (400, "application/json")
    content = json.loads(reply)
    assert content["code"] == 400
    return str(content["message"])


FURTHER = [pytest.param(name, marks=pytest.mark.thorough) for name in (ROTARY, TEXT, ENCODER)]


@pytest.mark.parametrize("archive", [SELF, CROSS, *FURTHER], indirect=True)
def test_requests_of_unequal_lengths_in_one_batch_equal_pytorch(archive: Archive) -> None:
    inputs = [archive.sequence(*lengths) for lengths in ((5, 3), (1, 7), (6, 6), (5, 3), (4, 1))]
    replies, context = archive.handle(*({name: npy(a) for name, a in each.items()} for each in inputs))
    assert context.statuses == {}
    assert set(context.types.values()) == {"application/x-npy"}
    assert_parity(loaded(*replies), [deployment.eager(archive.name, each) for each in inputs])


@pytest.mark.parametrize("archive", [SELF, CROSS], indirect=True)
def test_json_raw_and_npy_give_the_same_rows(archive: Archive) -> None:
    inputs = archive.sequence(5, 3)
    eager = deployment.eager(archive.name, inputs)
    lists = {name: array.tolist() for name, array in inputs.items()}
    replies, context = archive.handle(
        {name: npy(np.asfortranarray(array.astype(np.float64))) for name, array in inputs.items()},
        {name: bytearray(array.tobytes()) for name, array in inputs.items()},
        {"body": lists},
        {"body": bytearray(json.dumps(lists).encode())},
    )
    assert context.statuses == {}
    types = [context.types[index].rpartition("/")[2] for index in range(4)]
    assert types == ["x-npy", "octet-stream", "json", "json"]
    served = [np.load(io.BytesIO(replies[0])), np.frombuffer(replies[1], "<f4").reshape(eager.shape)]
    served += [np.array(json.loads(reply)["context_vectors"], np.float32) for reply in replies[2:]]
    assert_parity(served, [eager] * 4)


ROWS = np.zeros((2, 4), np.float32)
REFUSED = {
    "empty": ({}, "query is missing; this model takes query"),
    "unknown": ({"query": npy(ROWS), "qury": npy(ROWS)}, "qury is unknown; this model takes query"),
    "width": ({"body": npy(ROWS[:, :3])}, "query has shape [2, 3]; it must be one sequence, [T, 4]"),
    "no-rows": ({"body": npy(ROWS[:0])}, "query has 0 rows; it must have 1 to 4"),
    "many-rows": ({"body": npy(np.zeros((5, 4), np.float32))}, "query has 5 rows; it must have 1 to 4"),
    "raw": ({"body": bytearray(255)}, "query has 255 bytes"),
    "ragged": ({"body": [[0.0] * 4, [0.0]]}, "query has rows of different lengths"),
    "not-finite": ({"body": [[1e39] + [0.0] * 3]}, "query has values that are not finite"),
    "bool": ({"body": npy(ROWS > 0)}, "query has elements of type bool; they must be float32"),
    "pickle": ({"body": npy(np.array([None, {}], object))}, "query is a damaged .npy file"),
    "huge": ({"body": npy(ROWS).replace(b"(2, 4)", b"(9999999999999, 4)")}, "query is a damaged .npy file"),
    "deep": ({"body": bytearray(b"[" * 100_001)}, "query has 100001 bytes: neither JSON"),
    "vast result": ({"body": [[3e38] * 4]}, "the result has values that are not finite"),
}


@pytest.mark.parametrize(("request_", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_without_its_neighbours(
    tmp_path: Path, request_: dict[str, Any], message: str
) -> None:
    archive = Archive(SELF, tmp_path).initialize(maxRows=4, threads=1)
    good = [archive.sequence(length) for length in (3, 4)]
    bodies = [{"body": npy(each["query"])} for each in good]
    replies, context = archive.handle(bodies[0], request_, bodies[1])
    assert message in refusal(replies[1], context, 1)
    assert list(context.statuses) == [1]
    assert_parity(loaded(replies[0], replies[2]), [deployment.eager(SELF, each) for each in good])


@pytest.mark.parametrize("archive", [TEXT], indirect=True)
def test_ids_are_checked_against_the_vocabulary(archive: Archive) -> None:
    replies, context = archive.handle({"body": [0, 99]}, {"body": [-1]}, {"body": [0.5]})
    assert "token_ids must contain ids from 0 to" in refusal(replies[0], context)
    assert "token_ids must contain ids from 0 to" in refusal(replies[1], context, 1)
    assert "elements of type float64; they must be int64" in refusal(replies[2], context, 2)


@pytest.mark.parametrize("change", ["outputs", "shape", "none"])
def test_a_model_that_misses_its_golden_vectors_does_not_start(tmp_path: Path, change: str) -> None:
    archive, name = Archive(SELF, tmp_path), "1/outputs/context_vectors"
    with np.load(archive.folder / "golden.npz") as golden:
        arrays = dict(golden)
    changed = {"outputs": {name: arrays[name] + np.float32(1e-3)}, "shape": {name: arrays[name][:1]}}
    np.savez(archive.folder / "golden.npz", **(arrays | changed[change] if change in changed else {}))
    says = (
        "no golden vectors"
        if change == "none"
        else "context_vectors of golden case 1 differs from its outputs"
    )
    with pytest.raises(RuntimeError, match=says):
        archive.initialize()


def test_a_run_that_fails_is_reported_to_its_requests_only(archive: Archive) -> None:
    archive.handler._specs[0] = archive.handler._specs[0] | {"axes": ["batch", "query_length", 5]}
    replies, context = archive.handle({"body": npy(np.zeros((2, 5), np.float32))})
    assert context.statuses[0][0] == 500
    assert json.loads(replies[0]) == {"code": 500, "message": "the run failed; the log has details"}
