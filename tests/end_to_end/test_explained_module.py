"""A module with a mask of keys, windows and attention weights: what its metadata says, and its weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_client import AttentionClient, HeadSelection, InvalidArgumentError
from attention_client._commands.app import app
from torch import Tensor, nn
from typer.testing import CliRunner

from attention_serving.export import export_module
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripts.local_server import ServerProcess, serving
from tests.support import triton
from tests.support.eager import Array, assert_parity

WIDTH, HEADS, WINDOW, LONGEST = 8, 2, 4, 16
AVERAGED = "averaged"


class Explained(nn.Module):
    """Rows and the means of their windows attend to a memory and to one learned key."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        self.averages = averages
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.key = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor, memory: Tensor, memory_key_padding_mask: Tensor) -> dict[str, Tensor]:
        means = x.reshape(len(x), -1, WINDOW, WIDTH).mean(2).repeat_interleave(WINDOW, 1)
        keys, hidden = torch.cat([self.key.expand(len(x), -1, -1), memory], 1), memory_key_padding_mask
        options = {"key_padding_mask": F.pad(hidden, (1, 0)), "average_attn_weights": self.averages}
        rows, weights = self.attention(x + means, keys, keys, **options)
        return {"rows": rows, "heads": weights}  # (B, Tq, d), (B, H, Tq, Tk + 1) or (B, Tq, Tk + 1)


def module(model: str = "m") -> Explained:
    torch.manual_seed(0)
    return Explained(averages=model == AVERAGED).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder, hidden = tmp_path_factory.mktemp("explained"), torch.zeros(2, 5, dtype=torch.bool)
    example = {"x": torch.randn(2, 8, WIDTH), "memory": torch.randn(2, 5, WIDTH)}
    example["memory_key_padding_mask"] = hidden
    for name in ("m", AVERAGED):
        export_module(module(name), example, out=folder, name=name, max_length=LONGEST)
    with serving(folder, folder / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(server.target) as connected:
        yield connected


def sequences() -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal((rows, WIDTH), np.float32), rng.standard_normal((keys, WIDTH), np.float32))
        for rows, keys in ((4, 3), (8, 6))
    ]


def eager(x: Array, memory: Array, model: str = "m") -> dict[str, Array]:
    """The outputs of a sequence; weights are (H or 1, Tq, Tk + 1)."""
    hidden = torch.zeros(1, len(memory), dtype=torch.bool)
    with torch.inference_mode():
        outputs = module(model)(torch.from_numpy(x)[None], torch.from_numpy(memory)[None], hidden)
    rows, weights = (output[0].numpy() for output in outputs.values())
    return {"rows": rows, "heads": weights.reshape(-1, *weights.shape[-2:])}


@pytest.mark.parametrize(("model", "head"), [("m", 1), (AVERAGED, 0)])
def test_weights_are_returned_on_request(client: AttentionClient, model: str, head: int) -> None:
    queries, memories = zip(*sequences(), strict=True)
    result: Any = client.attend(model, list(queries), list(memories), return_weights=True)
    selection = HeadSelection(heads=[head])
    selected: Any = client.attend(model, list(queries), list(memories), return_weights=selection)
    assert client.attend(model, queries[0], memories[0]).attention_weights is None
    for at, pair in enumerate(sequences()):
        expected = eager(*pair, model)
        assert_parity(result.context_vectors[at], expected["rows"])
        assert_parity(result.attention_weights[at], expected["heads"])
        assert_parity(selected.attention_weights[at], expected["heads"][head:])
    # More keys than rows of the memory.
    batch = client.attend(model, queries[0][None], memories[0][None], return_weights=True)
    assert_parity(np.asarray(batch.attention_weights)[0], eager(*sequences()[0], model)["heads"])


def test_weights_are_drawn(server: ServerProcess, tmp_path: Path) -> None:
    query, memory = (tmp_path / f"{name}.npy" for name in ("query", "memory"))
    for path, array in zip((query, memory), sequences()[0], strict=True):
        np.save(path, array)
    arguments = ["--server", server.target, "weights", "--model", "m", "--query", str(query)]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, [*arguments, "--key", str(memory), "--html", str(page)])
    assert result.exit_code == 0, result.output
    start = page.read_text().index('id="answers">') + len('id="answers">')
    (answer,), _ = json.JSONDecoder().raw_decode(page.read_text()[start:])
    assert (answer["heads"], len(answer["queries"]), len(answer["keys"])) == (HEADS, 4, 4)


def test_both_protocols_describe_lengths_and_their_limits(
    server: ServerProcess, client: AttentionClient
) -> None:
    described = client.model("m")
    assert (described.attention_weights, described.num_heads) == ("heads", HEADS)
    x, _, lengths = described.inputs
    (rows,) = x.max_lengths
    assert (x.min_lengths, x.length_multiples) == ({rows: WINDOW}, {rows: WINDOW})
    assert (lengths.name, lengths.data_type, lengths.axes, lengths.optional) == (
        "key_lengths", "int64", ("batch", 1), True,
    )  # fmt: skip
    printed = CliRunner().invoke(app, ["--server", server.target, "describe", "m"]).output
    assert f"{WINDOW} <= {rows} <= {LONGEST} in multiples of {WINDOW}" in printed
    metadata = triton.ask(server.target, "get_model_metadata", "m", as_json=True)
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["x", "memory", "key_lengths"]
    config: Any = triton.ask(server.target, "get_model_config", "m", as_json=True)["config"]
    assert [tensor.get("optional", False) for tensor in config["input"]] == [False, False, True]
    assert config["parameters"]["x.length_multiple"] == {"string_value": str(WINDOW)}
    with pytest.raises(InvalidArgumentError, match="key_lengths: is for padded tensors"):
        client.infer("m", {"x": sequences()[0][0][None], "key_lengths": np.array([3])})


@pytest.mark.parametrize("last_row", [0, 1], ids=["zeros", "values"])
@pytest.mark.parametrize("lengths", [None, [5, 3]], ids=["no lengths", "lengths"])
def test_zeros_without_lengths_are_warned_of(
    server: ServerProcess, lengths: list[int] | None, last_row: int
) -> None:
    """Also after a request of the same form without zeros."""
    (x, _), (_, memory) = sequences()
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[np.stack([x, x]).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[2, len(x), WIDTH])
    rows = np.stack([memory[:5], memory[:5]])
    rows[1, 3:] *= last_row
    request.inputs.add(name="memory", datatype="FP32", shape=rows.shape)
    request.raw_input_contents.append(np.ones_like(rows).tobytes())
    if lengths is not None:
        request.inputs.add(name="key_lengths", datatype="INT64", shape=[2, 1])
        request.raw_input_contents.append(np.array(lengths).tobytes())
    with grpc.insecure_channel(server.target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        replies = [stub.ModelInfer(request)]
        request.raw_input_contents[1] = rows.tobytes()
        replies += [stub.ModelInfer(request) for _ in range(2)]
    is_warned = lengths is None and last_row == 0
    assert ["warning" in reply.parameters for reply in replies] == [False, is_warned, is_warned]
    result = np.frombuffer(replies[1].raw_output_contents[0], np.float32).reshape(2, len(x), WIDTH)
    rows_of_second = rows[1] if lengths is None else rows[1, :3]
    assert_parity(result[1], eager(x, rows_of_second)["rows"])
