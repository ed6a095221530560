"""An unmodified tritonclient receives the same outputs as attention_client."""

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.presets import SENTENCE, build_preset
from scripts.local_server import ServerProcess
from tests.support import triton
from tests.support.eager import assert_parity, attend

QUERY = np.random.default_rng(3).standard_normal((2, 7, 768), dtype=np.float32)
KEY = np.random.default_rng(4).standard_normal((2, 12, 768), dtype=np.float32)


def test_self_attention_with_weights(server: ServerProcess, client: AttentionClient) -> None:
    names = ["attention_weights", "context_vectors"]
    found = triton.infer(server.target, "multi-head-768x12", {"query": QUERY}, names)
    ours = client.attend("multi-head-768x12", QUERY, return_weights=True)
    np.testing.assert_array_equal(found["context_vectors"], ours.context_vectors)
    np.testing.assert_array_equal(found["attention_weights"], ours.attention_weights)


def test_inputs_in_any_order_and_default_outputs(server: ServerProcess, client: AttentionClient) -> None:
    found = triton.infer(server.target, "cross-768x12", {"value": KEY + 1, "key": KEY, "query": QUERY})
    assert list(found) == ["context_vectors"]
    ours = client.attend("cross-768x12", QUERY, KEY, KEY + 1)
    np.testing.assert_array_equal(found["context_vectors"], ours.context_vectors)


def test_lengths_and_masks(server: ServerProcess) -> None:
    module = build_preset("multi-head-768x12")
    mask = np.random.default_rng(5).random((2, 12, 7, 7)) < 0.6
    inputs = {"query": QUERY, "key_lengths": np.array([7, 4]), "attention_mask": mask}
    found = triton.infer(server.target, "multi-head-768x12", inputs)["context_vectors"]
    assert_parity(found[0], attend(module, QUERY[0], mask=mask[0])[0])
    assert_parity(found[1, :4], attend(module, QUERY[1, :4], mask=mask[1, :, :4, :4])[0])
    assert not found[1, 4:].any()


def test_text(server: ServerProcess, client: AttentionClient) -> None:
    texts = np.array([SENTENCE.encode(), b"eat dessert"], dtype=object)
    found = triton.infer(server.target, "sentence-self-attention", {"text": texts})
    ours = client.attend_text("sentence-self-attention", [SENTENCE, "eat dessert"]).context_vectors
    np.testing.assert_array_equal(found["lengths"], [6, 2])
    np.testing.assert_array_equal(found["context_vectors"][0], ours[0])
    np.testing.assert_array_equal(found["context_vectors"][1, :2], ours[1])
    assert not found["context_vectors"][1, 2:].any()


def test_describes_server_and_model(server: ServerProcess) -> None:
    found = triton.describe(server.target, "cross-768x12")
    assert found["live"]
    assert found["ready"]
    assert found["model_ready"]
    assert found["server"]["name"] == "attention-serving"
    assert [tensor["name"] for tensor in found["model"]["inputs"]] == ["query", "key", "value"]
    assert found["model"]["inputs"][0] == {"name": "query", "datatype": "FP32", "shape": ["-1", "-1", "768"]}
    assert found["model"]["versions"] == ["1"]


REFUSALS = {
    "wrong rank": ({"query": QUERY[0]}, [], "query: has 2 axes; the model takes 3"),
    "wrong width": ({"query": QUERY[..., :7]}, [], "query: rows are 7 wide; the model takes 768"),
    "no tokens": ({"query": QUERY[:, :0]}, [], "every size must be 1 or more"),
    "no sequences": ({"query": QUERY[:0]}, [], "every size must be 1 or more"),
    "wrong type": ({"query": QUERY.astype(np.float64)}, [], "query: is float64; the model takes float32"),
    "unknown input": (
        {"query": QUERY, "other": QUERY},
        [],
        "other: is not an input; model 'multi-head-768x12' takes query",
    ),
    "unknown output": ({"query": QUERY}, ["logits"], "outputs[logits]: is unknown"),
    "lengths too long": ({"query": QUERY, "key_lengths": np.array([7, 8])}, [], "must lie in 1..7"),
    "mask of another shape": (
        {"query": QUERY, "attention_mask": np.ones((2, 7, 6), bool)},
        [],
        "must be bool (2, 7), (2, 7, 7)",
    ),
}


@pytest.mark.parametrize(("inputs", "outputs", "text"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refused_with_the_reason(
    server: ServerProcess, inputs: dict[str, triton.Array], outputs: list[str], text: str
) -> None:
    with pytest.raises(triton.TritonError, match=r"StatusCode\.INVALID_ARGUMENT") as caught:
        triton.infer(server.target, "multi-head-768x12", inputs, outputs)
    assert text in str(caught.value)


def test_unknown_model_is_not_found(server: ServerProcess) -> None:
    with pytest.raises(triton.TritonError, match=r"StatusCode\.NOT_FOUND: model 'nonesuch' does not exist"):
        triton.infer(server.target, "nonesuch", {"query": QUERY})
