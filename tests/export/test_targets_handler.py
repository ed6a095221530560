"""TorchServe's handler in this process, with the files of an archive and real ONNX Runtime sessions."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.artifact.manifest import Manifest
from attention_serving.export.deployment import torchserve, torchserve_handler
from attention_serving.export.deployment.torchserve_handler import AttentionHandler
from tests.support import deployment
from tests.support.deployment import CROSS, ENCODER, ROTARY, SELF, TEXT
from tests.support.eager import ATOL, RTOL, assert_parity


class Context:
    """What TorchServe gives to a handler, and what the handler sets for each request."""

    def __init__(self, folder: Path, graph: str, settings: dict[str, Any] | None = None) -> None:
        self.system_properties = {"model_dir": str(folder)}
        self.manifest = {"model": {"serializedFile": graph}}
        self.model_yaml_config = {"handler": settings} if settings else {}
        self.statuses: dict[int, tuple[int, str]] = {}
        self.types: dict[int, str] = {}

    def set_response_status(self, code: int, phrase: str, index: int) -> None:
        self.statuses[index] = (code, phrase)

    def set_response_content_type(self, index: int, value: str) -> None:
        self.types[index] = value


class Archive:
    """The unpacked archive of a model, and its initialized handler."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any] | None = None) -> None:
        self.name, self.artifact = name, deployment.link_model(name, folder / "repository")
        self.folder = folder / "archive"
        self.folder.mkdir()
        self.graph = torchserve.stage(self.artifact, Manifest.load(self.artifact), self.folder)
        self.settings = settings
        self.handler = AttentionHandler()

    def initialize(self) -> "Archive":
        self.handler.initialize(Context(self.folder, self.graph, self.settings))
        return self

    def handle(self, *requests: dict[str, Any]) -> tuple[list[bytes], Context]:
        context = Context(self.folder, self.graph)
        return self.handler.handle(list(requests), context), context

    def sequence(self, *lengths: int) -> dict[str, Any]:
        return deployment.sequence(self.artifact, np.random.default_rng(list(lengths)), *lengths)


@pytest.fixture
def archive(tmp_path: Path, request: pytest.FixtureRequest) -> Archive:
    return Archive(request.param, tmp_path).initialize()


def npy(array: Any) -> bytearray:
    stream = io.BytesIO()
    np.save(stream, array)
    return bytearray(stream.getvalue())


def refusal(reply: bytes, context: Context, index: int = 0) -> str:
    """The message of a refused request."""
    assert context.statuses[index][0] == 400
    assert context.types[index] == "application/json"
    content = json.loads(reply)
    assert content["code"] == 400
    return str(content["message"])


FURTHER = [pytest.param(name, marks=pytest.mark.thorough) for name in (ROTARY, TEXT, ENCODER)]
BOTH = pytest.mark.parametrize("archive", [SELF, CROSS], indirect=True)
EVERY = pytest.mark.parametrize("archive", [SELF, CROSS, *FURTHER], indirect=True)


@EVERY
def test_requests_of_unequal_lengths_in_one_batch_equal_pytorch(archive: Archive) -> None:
    inputs = [archive.sequence(*lengths) for lengths in ((5, 3), (1, 7), (6, 6), (5, 3), (4, 1))]
    replies, context = archive.handle(*({name: npy(a) for name, a in each.items()} for each in inputs))

    assert context.statuses == {}
    assert set(context.types.values()) == {"application/x-npy"}
    served = [np.load(io.BytesIO(reply)) for reply in replies]
    assert_parity(served, [deployment.eager(archive.name, each) for each in inputs])


@BOTH
def test_unequal_lengths_run_together_if_the_graph_takes_lengths(archive: Archive) -> None:
    sequences = {index: archive.sequence(*lengths) for index, lengths in enumerate(((5, 3), (1, 7), (5, 3)))}
    assert [sorted(group) for group in archive.handler._groups(sequences)] == [[0, 1, 2]]
    archive.handler._lengths = {}
    assert archive.handler._groups(sequences) == [[1], [0, 2]]


@pytest.mark.parametrize("archive", [SELF], indirect=True)
def test_padding_that_costs_more_than_a_run_is_avoided(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve_handler, "RUN_FLOPS", 1e6)
    sequences = {index: archive.sequence(length) for index, length in enumerate((900, 2, 3, 901))}
    assert archive.handler._groups(sequences) == [[1, 2], [0, 3]]
    monkeypatch.setattr(torchserve_handler, "MAX_SCORE_BYTES", 2 * 4 * 901 * 901)
    assert archive.handler._groups(sequences) == [[1, 2], [0], [3]]


@BOTH
def test_json_raw_and_npy_give_the_same_rows(archive: Archive) -> None:
    inputs = archive.sequence(5, 3)
    eager = deployment.eager(archive.name, inputs)
    forms: list[dict[str, Any]] = [
        {name: npy(array) for name, array in inputs.items()},
        {name: bytearray(array.tobytes()) for name, array in inputs.items()},
        {"body": {name: array.tolist() for name, array in inputs.items()}},
        {"body": bytearray(json.dumps({name: array.tolist() for name, array in inputs.items()}).encode())},
        {name: npy(np.asfortranarray(array.astype(np.float64))) for name, array in inputs.items()},
    ]
    replies, context = archive.handle(*forms)

    assert context.statuses == {}
    types = [context.types[index].rpartition("/")[2] for index in range(5)]
    assert types == ["x-npy", "octet-stream", "json", "json", "x-npy"]
    served = [
        np.load(io.BytesIO(replies[0])),
        np.frombuffer(replies[1], "<f4").reshape(eager.shape),
        np.array(json.loads(replies[2])["context_vectors"], np.float32),
        np.array(json.loads(replies[3])["context_vectors"], np.float32),
        np.load(io.BytesIO(replies[4])),
    ]
    assert_parity(served, [eager] * 5)


@pytest.mark.parametrize("archive", [SELF], indirect=True)
def test_a_model_with_one_input_takes_the_body_alone(archive: Archive) -> None:
    inputs = archive.sequence(4)
    eager = deployment.eager(SELF, inputs)
    replies, _ = archive.handle({"data": npy(inputs["query"])}, {"body": inputs["query"].tolist()})
    served = [np.load(io.BytesIO(replies[0])), np.array(json.loads(replies[1])["context_vectors"])]
    assert_parity(served, [eager, eager])


@pytest.mark.thorough
@pytest.mark.parametrize("archive", [ROTARY], indirect=True)
def test_positions_are_optional(archive: Archive) -> None:
    inputs = archive.sequence(5)
    shifted = inputs | {"positions": np.arange(7, 12)}
    replies, _ = archive.handle(
        {"body": npy(inputs["query"])}, {name: npy(array) for name, array in shifted.items()}
    )
    eager = [deployment.eager(ROTARY, each) for each in (inputs, shifted)]
    assert_parity([np.load(io.BytesIO(reply)) for reply in replies], eager)
    replies, context = archive.handle({"query": npy(inputs["query"]), "positions": npy(np.arange(2))})
    assert refusal(replies[0], context) == "positions has 2 rows; an input before it has 5"


ROWS = np.zeros((2, 4), np.float32)
REFUSED = {
    "empty": ({}, "query is missing; this model takes query"),
    "unknown": ({"query": npy(ROWS), "qury": npy(ROWS)}, "qury is unknown; this model takes query"),
    "width": ({"body": npy(ROWS[:, :3])}, "query has shape [2, 3]; it must be one sequence, [T, 4]"),
    "no-rows": ({"body": npy(ROWS[:0])}, "query has 0 rows; it must have 1 to 4096"),
    "raw": ({"body": bytearray(255)}, "query has 255 bytes"),
    "ragged": ({"body": [[0.0] * 4, [0.0]]}, "query has rows of different lengths"),
    "not-finite": ({"body": [[1e39] + [0.0] * 3]}, "query has values that are not finite"),
    "bool": ({"body": npy(ROWS > 0)}, "query has elements of type bool; they must be float32"),
    "pickle": ({"body": npy(np.array([None, {}], object))}, "query is a damaged .npy file"),
    "cut": ({"body": npy(ROWS)[:-4]}, "query is a damaged .npy file"),
    "huge": ({"body": npy(ROWS).replace(b"(2, 4)", b"(9999999999999, 4)")}, "query is a damaged .npy file"),
    "deep": ({"body": bytearray(b"[" * 100_001)}, "query has 100001 bytes: neither JSON"),
}


@pytest.mark.parametrize("archive", [SELF], indirect=True)
@pytest.mark.parametrize(("request_", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_without_its_neighbours(
    archive: Archive, request_: dict[str, Any], message: str
) -> None:
    good = [archive.sequence(length) for length in (3, 5)]
    replies, context = archive.handle(
        {"body": npy(good[0]["query"])}, request_, {"body": npy(good[1]["query"])}
    )
    assert message in refusal(replies[1], context, 1)
    assert list(context.statuses) == [1]
    served = [np.load(io.BytesIO(replies[index])) for index in (0, 2)]
    assert_parity(served, [deployment.eager(SELF, each) for each in good])


@pytest.mark.parametrize("archive", [SELF], indirect=True)
def test_a_result_that_json_cannot_express_is_refused_and_sent_as_npy(archive: Archive) -> None:
    vast = np.full((1, 4), 3e38, np.float32)
    replies, context = archive.handle({"body": vast.tolist()}, {"body": npy(vast)})
    assert "the result has values that are not finite" in refusal(replies[0], context)
    assert not np.isfinite(np.load(io.BytesIO(replies[1]))).all()


@pytest.mark.parametrize("archive", [CROSS], indirect=True)
def test_two_inputs_need_names(archive: Archive) -> None:
    inputs = archive.sequence(2, 3)
    replies, context = archive.handle({"body": npy(inputs["query"])}, {"query": npy(inputs["query"])})
    assert "a body that is one array has one input; this model takes query, key" in refusal(
        replies[0], context
    )
    assert "key is missing" in refusal(replies[1], context, 1)


@pytest.mark.parametrize("archive", [TEXT], indirect=True)
def test_ids_are_checked_against_the_vocabulary(archive: Archive) -> None:
    replies, context = archive.handle({"body": [0, 99]}, {"body": [-1]}, {"body": [0.5]}, {"body": [0, 1]})
    assert "token_ids must contain ids from 0 to" in refusal(replies[0], context)
    assert "token_ids must contain ids from 0 to" in refusal(replies[1], context, 1)
    assert "elements of type float64; they must be int64" in refusal(replies[2], context, 2)
    eager = deployment.eager(TEXT, {"token_ids": np.array([0, 1])})
    assert_parity(np.array(json.loads(replies[3])["context_vectors"]), eager)


def test_a_limit_of_the_archive_applies(tmp_path: Path) -> None:
    archive = Archive(SELF, tmp_path, {"maxRows": 4, "threads": 1}).initialize()
    replies, context = archive.handle({"body": npy(ROWS)}, {"body": npy(np.zeros((5, 4), np.float32))})
    assert "query has 5 rows; it must have 1 to 4" in refusal(replies[1], context, 1)
    assert np.load(io.BytesIO(replies[0])).shape == (2, 4)


@pytest.mark.parametrize("change", ["outputs", "shape", "none"])
def test_a_model_that_misses_its_golden_vectors_does_not_start(tmp_path: Path, change: str) -> None:
    archive = Archive(SELF, tmp_path)
    with np.load(archive.folder / "golden.npz") as golden:
        arrays = dict(golden)
    name = "1/outputs/context_vectors"
    off = arrays[name] + np.float32(2 * (ATOL + RTOL * np.abs(arrays[name]).max()))
    arrays = {"outputs": arrays | {name: off}, "shape": arrays | {name: arrays[name][:1]}, "none": {}}[change]
    np.savez(archive.folder / "golden.npz", **arrays)

    message = (
        "no golden vectors" if change == "none" else "context_vectors of golden case 1 differs from eager"
    )
    with pytest.raises(RuntimeError, match=message):
        archive.initialize()


def test_a_run_that_fails_is_reported_to_its_requests_only(tmp_path: Path) -> None:
    archive = Archive(SELF, tmp_path).initialize()
    archive.handler._specs[0] = archive.handler._specs[0] | {"axes": ["batch", "query_length", 5]}
    replies, context = archive.handle({"body": npy(np.zeros((2, 5), np.float32))})
    assert context.statuses[0][0] == 500
    assert json.loads(replies[0]) == {"code": 500, "message": "the run failed; the log has details"}
