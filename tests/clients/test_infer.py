"""`infer`: any model of a real server by the names of its inputs and outputs."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AsyncAttentionClient, AttentionClient, InferResult, InvalidArgumentError
from attention_client._commands.app import app
from typer.testing import CliRunner

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import ServerProcess, serving
from tests.clients.named_module import CAPTION, GATE, IDS, NAMED, OUTPUTS, ROTARY, WIDTH, expected, inputs
from tests.server.samples import CROSS, HEADS, SELF, TEXT
from tests.support import open_inference
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.eager import ATOL, RTOL, Array, assert_parity
from tests.support.mutations import named

LENGTHS = [(3, 5), (1, 2), (8, 5), (40, 1)]
TYPES = {
    "context": "float32",
    "attention_weights": "float32",
    "pooled": "float32",
    "count": "int64",
    "kept": "bool",
}
RANDOM = np.random.default_rng(3)


@pytest.fixture(scope="module")
def server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("infer")
    (named,) = cached_repositories(NAMED)
    for model in (*artifacts.iterdir(), *named.iterdir()):
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(server.target) as client:
        yield client


def ragged(lengths: list[tuple[int, int]] = LENGTHS) -> tuple[dict[str, list[Array]], dict[str, list[Array]]]:
    """The inputs of sequences of different lengths, and the outputs of eager PyTorch."""
    batches = [inputs(rows, words, 1, seed=seed) for seed, (rows, words) in enumerate(lengths)]
    answers = [expected(batch) for batch in batches]
    return (
        {name: [batch[name][0] for batch in batches] for name in batches[0]},
        {name: [answer[name][0] for answer in answers] for name in OUTPUTS},
    )


def check(found: InferResult, eager: dict[str, Any], names: tuple[str, ...] = OUTPUTS) -> None:
    assert tuple(found.outputs) == names
    assert (found.model_name, found.model_version) == (CAPTION, "1")
    for name in names:
        served = found.outputs[name]
        assert isinstance(served, type(eager[name]))
        for one, other in (
            zip(served, eager[name], strict=True) if isinstance(served, list) else [(served, eager[name])]
        ):
            assert (one.shape, one.dtype.name) == (other.shape, TYPES[name])
            assert one.flags.writeable
            np.testing.assert_allclose(one, other, rtol=RTOL, atol=ATOL)


def test_a_batch_of_every_type_is_answered_with_every_output(client: AttentionClient) -> None:
    given = inputs(3, 5, 4)
    check(client.infer(CAPTION, given), expected(given))
    check(client.infer(CAPTION, given, version=1), expected(given))


def test_one_sequence_is_answered_without_the_batch_axis(client: AttentionClient) -> None:
    given = inputs(6, 2)
    batch = {name: array[np.newaxis] for name, array in given.items()}
    check(
        client.infer(CAPTION, given),
        {name: np.asarray(output[0]) for name, output in expected(batch).items()},
    )


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1], [(7, 30)] * 200], ids=["ragged", "one", "many"])
def test_a_list_is_answered_with_lists(client: AttentionClient, lengths: list[tuple[int, int]]) -> None:
    given, eager = ragged(lengths)
    check(client.infer(CAPTION, given), eager)


def test_a_list_and_an_array_together(client: AttentionClient) -> None:
    """The items of the one are the elements of the other's first axis."""
    given = inputs(3, 5, 4)
    eager = {name: list(output) for name, output in expected(given).items()}
    eager["count"] = [np.asarray(number) for number in eager["count"]]
    check(client.infer(CAPTION, given | {"x": list(given["x"])}), eager)


def test_nested_lists_and_other_types_of_numbers(client: AttentionClient) -> None:
    given = inputs(3, 5, 2)
    plain = {name: array.tolist() for name, array in given.items()}
    check(client.infer(CAPTION, plain), expected(given))
    narrow = given | {"x": given["x"].astype(np.float64), "ids": given["ids"].astype(np.uint8)}
    check(client.infer(CAPTION, narrow), expected(given))
    lists, eager = ragged()
    check(
        client.infer(CAPTION, {name: [item.tolist() for item in own] for name, own in lists.items()}), eager
    )


@pytest.mark.parametrize(("wire", "tolerance"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_real_numbers_at_half_the_bytes(server: ServerProcess, wire: Any, tolerance: float) -> None:
    given = inputs(3, 5, 4)
    with AttentionClient(server.target, wire=wire) as client:
        found = client.infer(CAPTION, given).outputs
    for name, output in expected(given).items():
        assert found[name].dtype.name == TYPES[name]
        np.testing.assert_allclose(found[name], output, atol=tolerance, rtol=tolerance)


def test_only_the_outputs_that_are_named_are_returned_in_their_order(client: AttentionClient) -> None:
    given = inputs(3, 5, 2)
    check(client.infer(CAPTION, given, outputs=["count", "context"]), expected(given), ("count", "context"))


def test_the_asynchronous_client(server: ServerProcess) -> None:
    given, eager = ragged()

    async def call() -> InferResult:
        async with AsyncAttentionClient(server.target) as client:
            return await client.infer(CAPTION, given, outputs=["pooled", "kept"])

    check(asyncio.run(call()), eager, ("pooled", "kept"))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (HEADS, 4, 5)], ids=["keys", "pairs", "heads"])
@pytest.mark.parametrize("form", ["one", "batch", "list"])
def test_attention_by_names_with_a_mask_and_weights(
    client: AttentionClient, shape: tuple[int, ...], form: str
) -> None:
    """The same as `attend`: the model's inputs, its mask, and its weights as an output on request."""
    leading = () if form == "one" else (3,)
    widths = {"query": (4, 4), "key": (5, 6), "value": (5, 5)}
    given: dict[str, Any] = {
        name: RANDOM.standard_normal((*leading, *own), np.float32) for name, own in widths.items()
    }
    mask: Any = RANDOM.random((*leading, *shape)) < 0.6
    if form == "list":
        given, mask = {name: list(array) for name, array in given.items()}, list(mask)
    attended: Any = client.attend(CROSS, **given, mask=mask, return_weights=True)
    found = client.infer(
        CROSS, given | {"attention_mask": mask}, outputs=["context_vectors", "attention_weights"]
    ).outputs
    assert_parity(found["context_vectors"], attended.context_vectors)
    assert_parity(found["attention_weights"], attended.attention_weights)
    assert list(client.infer(CROSS, given).outputs) == ["context_vectors"]


def test_token_ids_by_name(client: AttentionClient) -> None:
    ids = [np.array([0, 3, 1]), np.array([2])]
    found = client.infer(TEXT, {"token_ids": ids}).outputs["context_vectors"]
    assert_parity(found, client.attend_tokens(TEXT, ids).context_vectors)


def test_an_output_called_attention_weights_of_a_module_over_the_open_inference_protocol(
    server: ServerProcess,
) -> None:
    given = inputs(3, 5, 2)
    found = open_inference.infer(server.target, CAPTION, given, list(OUTPUTS))
    for name, output in expected(given).items():
        np.testing.assert_allclose(found[name], output, rtol=RTOL, atol=ATOL)


def test_requests_that_differ_in_their_vectors_only(client: AttentionClient) -> None:
    """The server recognises the second one by the bytes around its vectors."""
    for _ in range(3):
        query = RANDOM.standard_normal((5, 4), np.float32)
        found = client.infer(SELF, {"query": query}).outputs["context_vectors"]
        assert_parity(found, client.attend(SELF, query).context_vectors)


def test_the_mask_of_a_model_whose_last_input_is_left_out(client: AttentionClient) -> None:
    """Its positions, which the server then counts."""
    query, mask = RANDOM.standard_normal((5, WIDTH), np.float32), np.arange(5) < 2
    found = client.infer(ROTARY, {"query": query, "attention_mask": mask}).outputs["context_vectors"]
    assert_parity(found, client.attend(ROTARY, query, mask=mask).context_vectors)
    shifted: dict[str, Any] = {"query": query, "positions": np.arange(5) * 3}
    found = client.infer(ROTARY, shifted).outputs["context_vectors"]
    assert_parity(found, client.attend(ROTARY, **shifted).context_vectors)


def test_booleans_are_checked_in_requests_that_are_known_otherwise(server: ServerProcess) -> None:
    x = named("x", np.ones((2, WIDTH), np.float32))
    with grpc.insecure_channel(server.target) as channel:
        stub = AttentionServiceStub(channel)
        for data, accepted in ((b"\1\0", True), (b"\1\2", False)):
            keep = pb.NamedTensors(
                name="keep", data_type=pb.DATA_TYPE_BOOL, num_tensors=1, shapes=[2], data=data
            )
            request = pb.AttendRequest(model_name=GATE, inputs=[x, keep])
            if accepted:
                (output,) = stub.Attend(request, timeout=60).outputs
                assert np.frombuffer(output.data, np.float32).tolist() == [1.0] * WIDTH + [0.0] * WIDTH
                continue
            with pytest.raises(grpc.RpcError, match="contains the byte 2; a boolean must be 0 or 1"):
                stub.Attend(request, timeout=60)


ONE, MANY = inputs(3, 5), ragged()[0]
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": (ONE | {"y": ONE["x"]}, "y", "is not an input; model 'caption' takes x, ids, caption_mask"),
    "missing": ({"x": ONE["x"]}, "ids", "is missing; model 'caption' takes x, ids, caption_mask"),
    "type": (ONE | {"caption_mask": np.ones(5, np.int64)}, "caption_mask", "is int64; the model takes bool"),
    "integers": (ONE | {"x": np.ones((3, 4), np.int64)}, "x", "is int64; the model takes float32"),
    "width": (ONE | {"x": np.ones((3, 5), np.float32)}, "x", "rows are 5 wide; the model takes 4"),
    "axes": (
        ONE | {"x": np.ones((1, 2, 3, 4), np.float32)},
        "x",
        "has a tensor of 4 axes; one sequence has 2",
    ),
    "row widths": (MANY | {"x": [*MANY["x"][:3], np.ones((2, 5))]}, "x", "sequence 3 has rows of shape"),
    "lengths": (ONE | {"ids": np.ones(4, np.int64)}, "caption_mask", "sequence 0 has 5 rows; ids has 4"),
    "batch": (ONE | {"x": np.ones((2, 3, 4))}, "ids", "contains 1 sequences; x contains 2"),
    "empty": (ONE | {"ids": np.ones(0, np.int64)}, "ids", "tensor 0 has an axis without elements"),
    "no batch": (ONE | {"x": np.ones((0, 3, 4))}, "x", "tensor 0 has an axis without elements"),
    "id": (ONE | {"ids": np.full(5, IDS)}, "ids", f"contains id {IDS}; ids must be between 0 and {IDS - 1}"),
    "mask": (ONE | {"attention_mask": np.ones(5, bool)}, "attention_mask", "is not an input"),
    "lists": (MANY | {"ids": MANY["ids"][:2]}, "ids", "expected as many sequences as x, 4; found 2"),
    "item": (MANY | {"x": [*MANY["x"][:3], np.ones(4)]}, r"x\[3\]", "expected 2 axes of float32"),
    "no sequences": (ONE | {"x": []}, "x", "expected at least one sequence; found an empty list"),
    "texts": (ONE | {"x": ["a", "b"]}, "x", "attend_text and embed take texts"),
    "nothing": ({}, "inputs", "expected a mapping of names to arrays"),
    "complex": (ONE | {"x": np.ones((3, 4), complex)}, "x", "expected real numbers; found dtype complex128"),
}


@pytest.mark.parametrize(("given", "field", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(
    client: AttentionClient, given: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}: .*{message}") as refusal:
        client.infer(CAPTION, given)
    assert refusal.value.field == field.replace("\\", "")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["y"], "'y'; must be one of context, attention_weights, pooled, count, kept"),
        (["count", "count"], "has 'count' twice"),
        ("count", "outputs: expected a list of names, or None"),
    ],
    ids=["unknown", "twice", "str"],
)
def test_outputs_that_cannot_be_returned(client: AttentionClient, outputs: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        client.infer(CAPTION, ONE, outputs=outputs)


MASKS = {
    "shape": (
        np.ones((2, 2), bool),
        r"is bool \(2, 2\); must be bool \(5,\), \(4, 5\), \(1, 4, 5\) or \(2, 4, 5\)$",
    ),
    "type": (np.ones(5), r"is float32 \(5,\); must be bool \(5,\), "),
    "count": ([np.ones(5, bool)] * 2, "contains 2 masks for 1 sequences"),
}


@pytest.mark.parametrize(("mask", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_do_not_fit(client: AttentionClient, mask: Any, message: str) -> None:
    widths = {"query": (4, 4), "key": (5, 6), "value": (5, 5)}
    given = {name: np.ones(own, np.float32) for name, own in widths.items()}
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        client.infer(CROSS, given | {"attention_mask": mask})
    assert refusal.value.field == "attention_mask"


class Commands:
    """Runs `attention-client infer` against the server, in a folder with the inputs as files."""

    def __init__(self, target: str, folder: Path, given: dict[str, Any]) -> None:
        self.target, self.folder = target, folder
        for name, value in given.items():
            if isinstance(value, list):
                np.savez(folder / f"{name}.npz", *value)
            else:
                np.save(folder / f"{name}.npy", value)
        self.options = [f"--input={name}={next(folder.glob(f'{name}.np?'))}" for name in given]

    def run(self, *arguments: object, options: list[str] | None = None) -> tuple[int, str]:
        given = [*(self.options if options is None else options), *map(str, arguments)]
        found = CliRunner().invoke(app, ["--server", self.target, "infer", "--model", CAPTION, *given])
        return found.exit_code, found.output


def test_the_command_prints_and_writes_outputs_by_name(server: ServerProcess, tmp_path: Path) -> None:
    given = inputs(3, 5, 2)
    eager, commands = expected(given), Commands(server.target, tmp_path, given)
    code, printed = commands.run()
    assert code == 0
    assert "context  (2, 3, 4) float32, caption 1\n" in printed
    assert f"count  (2,) int64, caption 1\n{eager['count']}\n" in printed
    code, printed = commands.run("--output", tmp_path / "all.npz")
    assert (code, printed.count(f"{tmp_path / 'all.npz'}: ")) == (0, len(OUTPUTS))
    with np.load(tmp_path / "all.npz") as found:
        check(InferResult(dict(found), CAPTION, "1"), eager)
    assert commands.run("--output", tmp_path / "one.npy", "--output-name", "pooled")[0] == 0
    assert_parity(np.load(tmp_path / "one.npy"), eager["pooled"])
    code, printed = commands.run("--output", tmp_path / "one.npy")
    assert code == 2
    assert "name a .npz file" in " ".join(printed.split())


def test_the_command_takes_and_writes_lists(server: ServerProcess, tmp_path: Path) -> None:
    given, eager = ragged()
    commands = Commands(server.target, tmp_path, given)
    assert commands.run("--output", tmp_path / "all.json")[0] == 0
    found = json.loads((tmp_path / "all.json").read_text())
    assert_parity([np.array(each) for each in found["context"]], eager["context"])
    assert commands.run("--output", tmp_path / "all.npz", "--output-name", "kept")[0] == 0
    with np.load(tmp_path / "all.npz") as archive:
        assert archive.files == [f"kept[{index}]" for index in range(len(LENGTHS))]


def test_the_command_refuses_inputs_that_it_cannot_read(server: ServerProcess, tmp_path: Path) -> None:
    commands = Commands(server.target, tmp_path, inputs(3, 5))
    for option, message in {
        "--input=x": "must be NAME=ARRAY",
        "--input=x=absent.npy": "No such file",
        "--input=y=[1.0]": "is not an input; model 'caption' takes x, ids, caption_mask",
    }.items():
        code, printed = commands.run(option, options=[])
        assert code in (1, 2)
        assert message in " ".join(printed.split()).replace("│ ", "")
    code, printed = commands.run("--input=x=[1]")
    assert "is given twice" in printed
    assert code == 2
