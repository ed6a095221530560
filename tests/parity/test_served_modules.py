"""Non-attention modules: two inputs and a pooled output through the engine, an encoder through a server."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError
from torch import Tensor, nn

from attention_serving.export import export_module
from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import codec as attention_codec
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request, Result
from scripts.local_server import ServerProcess
from tests.server.api.messages import answered, decode_infer, raw_request
from tests.server.samples import load_repository
from tests.support import triton
from tests.support.coroutines import submitted
from tests.support.eager import Array, assert_parity
from tests.support.repository import ENCODER, encoder

POOLING = "pooling"
WIDTH, IDS = 6, 11


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


@pytest.mark.parametrize(
    "lengths", [[(4, 7)] * 3, [(4, 7), (1, 9), (4, 7), (12, 1), (4, 8)]], ids=["of one length", "different"]
)
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


def encoded(batch: Array) -> Array:
    """The output of eager PyTorch for (B, T, 32)."""
    with torch.inference_mode():
        found: Array = encoder()(torch.from_numpy(batch)).numpy()
    return found


@pytest.mark.thorough
def test_an_encoder_over_both_protocols(
    presets_server: ServerProcess, presets_client: AttentionClient
) -> None:
    sequences = [normal(length, 32, seed=seed) for seed, length in enumerate((3, 513, 3, 1, 40, 7))]
    found = presets_client.attend(ENCODER, sequences)
    assert_parity(found.context_vectors, [encoded(rows[None])[0] for rows in sequences])
    assert found.attention_weights is None
    batch, lengths = normal(3, 9, 32), (4, 9, 1)
    expected = np.zeros((3, 9, 32), np.float32)
    for index, length in enumerate(lengths):
        expected[index, :length] = encoded(batch[index : index + 1, :length])[0]
    padded = presets_client.attend(ENCODER, batch, lengths=lengths)
    assert_parity(padded.context_vectors, expected)
    for tensors, eager in (({"key_lengths": np.array(lengths)}, expected), ({}, encoded(batch))):
        named = triton.infer(presets_server.target, ENCODER, {"src": batch} | tensors, ["context_vectors"])
        assert_parity(named["context_vectors"], eager)


ROWS = normal(2, 3, 32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"mask": np.ones((2, 3, 3), bool)}, "model 'encoder' does not take a mask"),
    "return_weights": ({"return_weights": True}, "does not have attention weights"),
    "key": ({"key": ROWS}, "model 'encoder' takes src"),
    "positions": ({"positions": np.zeros((2, 3), np.int64)}, "model 'encoder' takes src"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("field", REFUSED)
def test_inputs_and_options_that_it_does_not_take_are_refused(
    presets_client: AttentionClient, field: str
) -> None:
    options, message = REFUSED[field]
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        presets_client.attend(ENCODER, ROWS, **options)
    assert refusal.value.field == field


@pytest.mark.thorough
def test_the_typed_api_describes_it(presets_client: AttentionClient) -> None:
    info = presets_client.model(ENCODER)
    tensors = [(t.name, t.data_type, t.axes, t.optional) for t in (*info.inputs, *info.outputs)]
    axes = ("batch", "sequence", 32)
    assert tensors == [("src", "float32", axes, False), ("context_vectors", "float32", axes, False)]
    assert (info.state, info.description, info.num_heads) == ("ready", "TransformerEncoder", None)
    assert info.parameters == sum(parameter.numel() for parameter in encoder().parameters())
