"""A BERT encoder through a live server: key lengths, pooled outputs and its largest length."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention_client import AttentionClient, AttentionClientError
from torch import Tensor, nn

from attention_serving.export import export_module
from scripts.local_server import ServerProcess, serving
from tests.support import triton
from tests.support.eager import Array, assert_parity
from tests.support.repository import bert

pytestmark = pytest.mark.thorough
BERT, POOLED = "bert", "pooled"
AXES = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
EXAMPLES = {"input_ids": torch.full((2, 3), 49), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
LENGTHS = (5, 64, 1, 5, 17)


class Pooled(nn.Module):
    """Only the pooled output, (B, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = bert()
        self.config = self.encoder.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        pooled: Tensor = self.encoder(input_ids, attention_mask).pooler_output
        return pooled


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hugging-face")
    names = ("context_vectors", "pooled")
    export_module(bert(), EXAMPLES, AXES, out=folder / "models", name=BERT, output_names=names)
    export_module(Pooled(), EXAMPLES, AXES, out=folder / "models", name=POOLED)
    with serving(folder / "models", folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def asking(hugging_face: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(hugging_face.target) as client:
        yield client


def ids(*lengths: int) -> list[Array]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 50, length) for length in lengths]


def eager(sequence: Array) -> tuple[Array, Array]:
    """(T, d) and (d,) of one sequence alone."""
    with torch.inference_mode():
        outputs = bert()(torch.from_numpy(sequence)[None])
    return outputs.last_hidden_state[0].numpy(), outputs.pooler_output[0].numpy()


def test_sequences_of_different_lengths_in_one_request(asking: AttentionClient) -> None:
    sequences = ids(*LENGTHS)
    rows, pooled = (asking.attend_tokens(name, sequences).context_vectors for name in (BERT, POOLED))
    assert_parity(rows, [eager(sequence)[0] for sequence in sequences])
    assert_parity(pooled, [eager(sequence)[1][None] for sequence in sequences])


@pytest.mark.parametrize("model", [BERT, POOLED])
def test_the_open_inference_protocol_pads_by_key_lengths(hugging_face: ServerProcess, model: str) -> None:
    lengths = (9, 4, 1)
    sequences = ids(*lengths)
    padded = np.zeros((3, 9), np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    tensors = {"input_ids": padded, "key_lengths": np.array(lengths)}
    name = "pooled" if model == BERT else "context_vectors"
    found = triton.infer(hugging_face.target, model, tensors, [name])
    assert_parity(found[name], np.stack([eager(sequence)[1] for sequence in sequences]))


def test_a_longer_sequence_is_refused_with_the_limit(
    hugging_face: ServerProcess, asking: AttentionClient
) -> None:
    says = "a sequence has 65 rows; this model takes at most 64"
    with pytest.raises(AttentionClientError, match=says) as refusal:
        asking.attend_tokens(BERT, ids(65))
    assert refusal.value.reason == "LIMIT_EXCEEDED"
    with pytest.raises(triton.TritonError, match=says):
        triton.infer(hugging_face.target, BERT, {"input_ids": np.stack(ids(65))}, ["pooled"])
