"""`infer`: any model of a real server by the names of its inputs and outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AsyncAttentionClient, AttentionClient, InferResult, InvalidArgumentError
from attention_client._commands.app import app
from typer.testing import CliRunner

from scripts.local_server import ServerProcess
from tests.clients.named_module import CAPTION, OUTPUTS, expected, inputs
from tests.server.samples import CROSS, HEADS
from tests.support.eager import ATOL, RTOL, Array, assert_parity

LENGTHS = [(3, 5), (1, 2), (8, 5), (40, 1)]
TYPES = dict(zip(OUTPUTS, ["float32", "float32", "float32", "int64", "bool"], strict=True))
RANDOM = np.random.default_rng(3)
thorough = pytest.mark.thorough


def ragged() -> tuple[dict[str, list[Array]], dict[str, list[Array]]]:
    """The inputs of sequences of different lengths, and the outputs of eager PyTorch."""
    batches = [inputs(rows, words, 1, seed=seed) for seed, (rows, words) in enumerate(LENGTHS)]
    answers = [expected(batch) for batch in batches]
    return (
        {name: [batch[name][0] for batch in batches] for name in batches[0]},
        {name: [answer[name][0] for answer in answers] for name in OUTPUTS},
    )


def check(found: InferResult, eager: dict[str, Any], names: tuple[str, ...] = OUTPUTS) -> None:
    assert tuple(found.outputs) == names
    assert (found.model_name, found.model_version) == (CAPTION, "1")
    for name in names:
        served, own = found.outputs[name], eager[name]
        assert isinstance(served, type(own))
        for one, other in zip(served, own, strict=True) if isinstance(own, list) else [(served, own)]:
            assert (one.shape, one.dtype.name) == (other.shape, TYPES[name])
            assert one.flags.writeable
            np.testing.assert_allclose(one, other, rtol=RTOL, atol=ATOL)


ONE, MANY = inputs(3, 5), ragged()[0]


def test_what_is_wrong_is_named() -> None:
    """What the client refuses; what the server refuses is tested beside it."""
    for given, field, message in (
        (MANY | {"ids": MANY["ids"][:2]}, "ids", "expected as many sequences as x, 4; found 2"),
        (MANY | {"x": [*MANY["x"][:3], np.ones(4)]}, "x[3]", "expected 2 axes of float32"),
        (ONE | {"x": ["a", "b"]}, "x", "attend_text and embed take texts"),
        ({}, "inputs", "expected a mapping of names to arrays"),
        (ONE | {"x": np.ones((3, 4), complex)}, "x", "expected real numbers; found dtype complex128"),
    ):
        with AttentionClient() as client, pytest.raises(InvalidArgumentError, match=message) as refusal:
            client.infer(CAPTION, given)
        assert refusal.value.field == field


@thorough
def test_a_batch_one_sequence_a_list_and_both_together(client: AttentionClient) -> None:
    given = inputs(3, 5, 4)
    eager: dict[str, Any] = expected(given)
    check(client.infer(CAPTION, given), eager)
    one = {name: array[0] for name, array in given.items()}
    check(
        client.infer(CAPTION, one, version=1),
        {name: np.asarray(own[0]) for name, own in eager.items()},
    )
    narrow = given | {"x": given["x"].astype(np.float64), "ids": given["ids"].astype(np.uint8)}
    for other in ({name: array.tolist() for name, array in given.items()}, narrow):
        check(client.infer(CAPTION, other), eager)
    lists, answers = ragged()
    check(client.infer(CAPTION, lists), answers)
    nested = {name: [item.tolist() for item in own] for name, own in lists.items()}
    check(client.infer(CAPTION, nested), answers)
    # The items of the list are the elements of the first axis of the others.
    listed = {name: [np.asarray(each) for each in own] for name, own in eager.items()}
    check(client.infer(CAPTION, given | {"x": list(given["x"])}), listed)


@thorough
async def test_named_outputs_of_the_asynchronous_client_at_half_the_bytes(
    server: ServerProcess,
) -> None:
    given = inputs(3, 5, 2)
    async with AsyncAttentionClient(server.target, wire="bf16") as client:
        found = (await client.infer(CAPTION, given, outputs=["count", "context"])).outputs
    assert list(found) == ["count", "context"]
    for name, output in found.items():
        assert output.dtype.name == TYPES[name]
        np.testing.assert_allclose(output, expected(given)[name], atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (HEADS, 4, 5)], ids=["keys", "pairs", "heads"])
def test_attention_by_names_is_that_of_attend(client: AttentionClient, shape: tuple[int, ...]) -> None:
    widths = {"query": (4, 4), "key": (5, 6), "value": (5, 5)}
    given: Any = {name: list(RANDOM.standard_normal((3, *own), np.float32)) for name, own in widths.items()}
    mask = list(RANDOM.random((3, *shape)) < 0.6)
    names = ["context_vectors", "attention_weights"]
    attended: Any = client.attend(CROSS, **given, mask=mask, return_weights=True)
    found = client.infer(CROSS, given | {"attention_mask": mask}, outputs=names).outputs
    assert_parity(found["context_vectors"], attended.context_vectors)
    assert_parity(found["attention_weights"], attended.attention_weights)


@thorough
def test_the_command_prints_and_writes_outputs_by_name(server: ServerProcess, tmp_path: Path) -> None:
    given = inputs(3, 5, 2)
    for name, array in given.items():
        np.save(tmp_path / name, array)
    options = [f"--input={name}={tmp_path / name}.npy" for name in given]

    def run(*more: object) -> Any:
        command = ["--server", server.target, "infer", "--model", CAPTION, *options, *map(str, more)]
        return CliRunner().invoke(app, command)

    printed = run().output
    assert "context  (2, 3, 4) float32, caption 1\n" in printed
    assert f"count  (2,) int64, caption 1\n{expected(given)['count']}\n" in printed
    assert run("--output", tmp_path / "all.npz").output.count(f"{tmp_path / 'all.npz'}: ") == len(OUTPUTS)
    with np.load(tmp_path / "all.npz") as found:
        check(InferResult(dict(found), CAPTION, "1"), expected(given))
    assert run("--output", tmp_path / "one.npy", "--output-name", "pooled").exit_code == 0
    assert_parity(np.load(tmp_path / "one.npy"), expected(given)["pooled"])
