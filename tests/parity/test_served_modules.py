"""Non-attention modules: a transformer encoder through the server, two inputs through the engine."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError
from torch import Tensor, nn

from attention_serving.export import export_module
from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.api.attention import codec as attention_codec
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request, Result
from scripts.local_server import ServerProcess
from tests.server.api.messages import answered, decode_infer, raw_request
from tests.server.samples import load_repository
from tests.support import open_inference
from tests.support.coroutines import submitted
from tests.support.eager import Array, assert_parity
from tests.support.modules import ENCODER, encoder

POOLING = "pooling"
WIDTH, IDS = 6, 11


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def encoded(batch: Array) -> Array:
    """The output of eager PyTorch for (B, T, 32)."""
    with torch.inference_mode():
        answer: Array = encoder()(torch.from_numpy(batch)).numpy()
    return answer


@pytest.mark.parametrize("length", [1, 2, 7, 128, 513])
def test_one_sequence(client: AttentionClient, length: int) -> None:
    rows = normal(length, 32)
    result = client.attend(ENCODER, rows)
    assert_parity(result.context_vectors, encoded(rows[None])[0])
    assert result.attention_weights is None


def test_a_list_of_different_lengths(client: AttentionClient) -> None:
    sequences = [normal(length, 32, seed=seed) for seed, length in enumerate((3, 7, 3, 1, 40, 7))]
    found = client.attend(ENCODER, sequences).context_vectors
    assert_parity(found, [encoded(rows[None])[0] for rows in sequences])


def test_a_batch(client: AttentionClient) -> None:
    batch = normal(5, 9, 32)
    assert_parity(client.attend(ENCODER, batch).context_vectors, encoded(batch))


@pytest.mark.parametrize("lengths", [(4, 9, 1), (9, 9, 9)], ids=["padded", "full"])
def test_padding_that_a_caller_names_is_not_computed(
    server: ServerProcess, client: AttentionClient, lengths: tuple[int, ...]
) -> None:
    batch = normal(3, 9, 32)
    expected = np.zeros((3, 9, 32), np.float32)
    for index, length in enumerate(lengths):
        expected[index, :length] = encoded(batch[index : index + 1, :length])[0]
    assert_parity(client.attend(ENCODER, batch, lengths=lengths).context_vectors, expected)
    tensors = {"src": batch, "key_lengths": np.array(lengths)}
    found = open_inference.infer(server.target, ENCODER, tensors, ["context_vectors"])
    assert_parity(found["context_vectors"], expected)


@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 9, 32), (2, 200, 32)], ids=str)
def test_the_open_inference_protocol(server: ServerProcess, shape: tuple[int, ...]) -> None:
    batch = normal(*shape)
    found = open_inference.infer(server.target, ENCODER, {"src": batch}, ["context_vectors"])
    assert_parity(found["context_vectors"], encoded(batch))


ROWS = normal(2, 3, 32)
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "mask": ({"mask": np.ones((2, 3, 3), bool)}, "mask", "model 'encoder' does not take a mask"),
    "weights": ({"return_weights": True}, "return_weights", "does not have attention weights"),
    "key": ({"key": ROWS}, "key", "model 'encoder' takes src"),
    "positions": ({"positions": np.zeros((2, 3), np.int64)}, "positions", "model 'encoder' takes src"),
}


@pytest.mark.parametrize(("options", "field", "message"), REFUSED.values(), ids=REFUSED)
def test_inputs_and_options_that_it_does_not_take_are_refused(
    client: AttentionClient, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        client.attend(ENCODER, ROWS, **options)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("tensors", "outputs", "message"),
    [
        (
            {"attention_mask": np.ones((2, 3, 3), bool)},
            ["context_vectors"],
            "attention_mask: model .*take a mask",
        ),
        (
            {"attention_mask": np.ones((2, 1, 3, 3), bool)},
            ["context_vectors"],
            "attention_mask: model .*take a mask",
        ),
        (
            {},
            ["attention_weights"],
            r"outputs\[attention_weights\]: is unknown; must be one of context_vectors",
        ),
        ({"query": ROWS}, ["context_vectors"], "query: is not an input; model 'encoder' takes src"),
    ],
    ids=["mask", "mask of one head", "weights", "another input"],
)
def test_the_open_inference_protocol_refuses_them_too(
    server: ServerProcess, tensors: dict[str, Array], outputs: list[str], message: str
) -> None:
    with pytest.raises(grpc.RpcError, match=message) as refusal:
        open_inference.infer(server.target, ENCODER, {"src": ROWS} | tensors, outputs)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_typed_api_describes_it(client: AttentionClient) -> None:
    info = client.model(ENCODER)
    tensors = [(t.name, t.data_type, t.axes, t.optional) for t in (*info.inputs, *info.outputs)]
    axes = ("batch", "sequence", 32)
    assert tensors == [("src", "float32", axes, False), ("context_vectors", "float32", axes, False)]
    assert (info.state, info.description, info.num_heads) == ("ready", "TransformerEncoder", None)
    assert not info.causal
    assert not info.accepts_text
    assert info.parameters == sum(parameter.numel() for parameter in encoder().parameters())
    assert info.parity is not None
    assert info.parity.measured_max_abs_error < info.parity.absolute_tolerance == 1e-5


def test_the_open_inference_protocol_describes_it(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        found = stub.ModelMetadata(pb.ModelMetadataRequest(name=ENCODER), timeout=60)
    tensors = [(t.name, t.datatype, list(t.shape)) for t in (*found.inputs, *found.outputs)]
    assert tensors == [("src", "FP32", [-1, -1, 32]), ("context_vectors", "FP32", [-1, -1, 32])]
    assert (found.name, list(found.versions)) == (ENCODER, ["1"])


class Pooling(nn.Module):
    """Rows attend to the embeddings of ids; gives their mean, and all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH)

    def forward(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, Tq, d) and (B, Tk) to (B, d) and (B, Tq, d)."""
        keys = self.embedding(ids)
        context = (rows @ keys.transpose(1, 2)).softmax(dim=-1) @ keys
        return context.mean(dim=1), context


def pooling() -> Pooling:
    torch.manual_seed(2)
    return Pooling().eval()


EXAMPLES = {"rows": torch.zeros(2, 3, WIDTH), "ids": torch.full((2, 4), IDS - 1)}
AXES = {"rows": {0: "batch", 1: "rows_length"}, "ids": {0: "batch", 1: "ids_length"}}
OUTPUTS = ("pooled", "context")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("pooling")
    export_module(pooling(), EXAMPLES, AXES, out=folder, name=POOLING, output_names=OUTPUTS)
    engine = Engine(load_repository(folder, Device(threads=1)))
    yield engine
    engine.close()


LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one": [(1, 1)],
    "of one length": [(4, 7)] * 3,
    "of different lengths": [(4, 7), (1, 9), (4, 7), (12, 1), (4, 8)],
}


def random_case(lengths: list[tuple[int, int]]) -> tuple[list[Array], list[Array]]:
    rng = np.random.default_rng(7)
    rows = [rng.standard_normal((length, WIDTH), np.float32) for length, _ in lengths]
    return rows, [rng.integers(0, IDS, length) for _, length in lengths]


def ragged(arrays: list[Array]) -> Ragged:
    return Ragged(np.concatenate(arrays), tuple(map(len, arrays)))


def expected(rows: Array, ids: Array) -> tuple[Array, Array]:
    with torch.inference_mode():
        pooled, context = pooling()(torch.from_numpy(rows)[None], torch.from_numpy(ids)[None])
    return pooled[0].numpy(), context[0].numpy()


def answer(engine: Engine, rows: list[Array], ids: list[Array]) -> Result:
    inputs = {"rows": ragged(rows), "ids": ragged(ids)}
    return submitted(engine, engine.model(POOLING), Request(inputs=inputs)).result(60)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_two_inputs_of_different_lengths_and_a_pooled_output(
    engine: Engine, lengths: list[tuple[int, int]]
) -> None:
    rows, ids = random_case(lengths)
    outputs = answer(engine, rows, ids).outputs
    assert list(outputs) == list(OUTPUTS)
    eager = [expected(*pair) for pair in zip(rows, ids, strict=True)]
    assert_parity(outputs["pooled"], [pooled for pooled, _ in eager])
    assert_parity(outputs["context"], [context for _, context in eager])


@pytest.mark.parametrize("unknown", [IDS, -1], ids=["too large", "negative"])
def test_an_id_outside_the_tested_range_is_refused(engine: Engine, unknown: int) -> None:
    """Eager PyTorch raises IndexError; the runtime fails on the one and wraps the other around."""
    with pytest.raises(InvalidRequestError, match="ids"):
        answer(engine, [normal(3, WIDTH)], [np.array([0, unknown])])


def test_both_protocols_carry_a_pooled_output(engine: Engine) -> None:
    rows, ids = random_case([(4, 7)] * 3)
    pooled = np.stack([expected(*pair)[0] for pair in zip(rows, ids, strict=True)])
    model = engine.model(POOLING)
    reply = attention_codec.reply(attention_codec.facts(Request(), model), model)
    response = attention_pb2.AttendResponse.FromString(b"".join(reply.parts(answer(engine, rows, ids))))
    vectors = response.context_vectors
    assert (vectors.width, list(vectors.lengths)) == (WIDTH, [1, 1, 1])
    assert_parity(np.frombuffer(vectors.data, np.float32).reshape(3, WIDTH), pooled)
    message = raw_request(model, {"ids": np.stack(ids), "rows": np.stack(rows)}, ["pooled"])
    request, reply = decode_infer(message, model)
    encoded = b"".join(reply.parts(submitted(engine, model, request).result(60)))
    assert_parity(answered(pb.ModelInferResponse.FromString(encoded))["pooled"], pooled)
