"""Everyday modules with everyday masks: exported, served, and equal to eager PyTorch.

tests/support/everyday.py is the table. Callers of eager PyTorch pad sequences and pass masks; callers of the
server send the sequences themselves.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError

from attention_serving.export import export_module
from attention_serving.export.precision import Precision
from scripts.local_server import ServerProcess, serving
from tests.support import everyday, triton
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array, assert_parity
from tests.support.everyday import IDS, ROWS, Input, Row

pytestmark = pytest.mark.thorough
# Some are equal on one axis, and differ on the other.
LENGTHS = ({"T": 7, "S": 5}, {"T": 4, "S": 9}, {"T": 4, "S": 3}, {"T": 7, "S": 3})
NAMES = {name: f"everyday-{index}" for index, name in enumerate(ROWS)}
# Those that ONNX Runtime computes on a CPU.
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.INT8)


def export_row(name: str, precision: Precision, folder: Path) -> None:
    row = ROWS[name]
    export_module(
        row.module(),
        {key: own.example for key, own in row.inputs.items()},
        {key: own.axes for key, own in row.inputs.items()},
        out=folder,
        name=f"{NAMES[name]}-{precision}",
        description=name,
        output_names=row.outputs,
        precision=precision,
        max_length=64,
    )


MODELS = ModelSet(
    "everyday",
    [partial(export_row, *row) for row in product(ROWS, PRECISIONS)],
    [Path(__file__), Path(everyday.__file__)],
    ["everyday_client"],
)


@pytest.fixture(scope="module")
def everyday_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    (repository,) = cached_repositories(MODELS)
    with serving(repository, tmp_path_factory.mktemp("everyday") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def everyday_client(everyday_server: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(everyday_server.target) as client:
        yield client


def random_array(own: Input, lengths: dict[str, int], rng: np.random.Generator) -> Array:
    """One sequence of an input that is not a mask."""
    shape = [lengths.get(size) or int(size) for size in own.sizes[1:]]
    if own.dtype is torch.int64:
        return rng.integers(0, IDS, shape)
    return rng.standard_normal(shape, np.float32)


def neutral_mask(name: str, mask: Input, lengths: dict[str, int]) -> Array:
    """A mask of keys (1, T) that hides nothing."""
    shape = [1, *(lengths[size] for size in mask.sizes[1:])]
    return np.full(shape, not name.endswith("key_padding_mask"), str(mask.dtype).removeprefix("torch."))


def eager(row: Row, tensors: dict[str, Array]) -> list[Array]:
    """The outputs of eager PyTorch for one sequence, without the batch axis."""
    with torch.inference_mode():
        outputs = row.module()(**{name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
    if not isinstance(outputs, tuple):
        outputs = (getattr(outputs, "last_hidden_state", outputs),)
    return [output[0].numpy() for output in outputs]


@pytest.mark.parametrize("name", ["ranker", "columns", "patches", "strided", "class token, keys"])
def test_equals_eager_over_the_open_inference_protocol(everyday_server: ServerProcess, name: str) -> None:
    """One batch of equal lengths, odd and even, and one of a single sequence."""
    row, rng = ROWS[name], np.random.default_rng(4)
    masks = [each for each in row.inputs if each.endswith("mask")]
    for batch, rows in ((3, 7), (2, 8), (1, 1)):
        lengths = {"T": rows, "S": rows}
        sent = {
            each: np.stack([random_array(own, lengths, rng) for _ in range(batch)])
            for each, own in row.inputs.items()
            if each not in masks
        }
        found = triton.infer(everyday_server.target, f"{NAMES[name]}-fp32", sent)
        for at in range(batch):
            neutral = {each: neutral_mask(each, row.inputs[each], lengths) for each in masks}
            answers = eager(row, {each: array[at : at + 1] for each, array in sent.items()} | neutral)
            for output, answer in zip(row.outputs, answers, strict=True):
                assert_parity(found[output][at], answer)


RANKER: dict[str, Array] = {
    "history": np.zeros((2, 5), np.int64),
    "item": np.zeros(2, np.int64),
    "price": np.zeros(2, np.float32),
}
COLUMNS, IMAGE = np.zeros((2, 7), np.float32), np.zeros((2, 3, 8, 9), np.float32)
OF_IDS, OF_COLUMNS = "item: contains id 20", "sequence 0 has 7 rows; the model takes 6 in each"
OF_IMAGES = "image: rows are 8x9 wide; the model takes 8x8"
# What is sent to which row, and the message over attention.v1 and over the Open Inference Protocol.
REFUSALS: dict[str, tuple[str, dict[str, Array], str, str]] = {
    "another batch": (
        "ranker",
        RANKER | {"item": np.zeros(3, np.int64)},
        "item: contains 3 sequences; history contains 2",
        "item: has batch 3; it must be 2",
    ),
    "scalars with an axis": (
        "ranker",
        RANKER | {"price": np.zeros((2, 1), np.float32)},
        "one sequence has 0, and one batch has 1",
        "has 2 axes; the model takes 1",
    ),
    "no such id": ("ranker", RANKER | {"item": np.full(2, IDS)}, OF_IDS, OF_IDS),
    "columns": ("columns", {"columns": COLUMNS}, OF_COLUMNS, OF_COLUMNS),
    "size of an image": (
        "patches",
        {"image": IMAGE, "question": np.zeros((2, 16), np.float32)},
        OF_IMAGES,
        OF_IMAGES,
    ),
}


@pytest.mark.parametrize(("name", "sent", "typed", "named"), REFUSALS.values(), ids=REFUSALS)
def test_other_sizes_are_refused(
    everyday_client: AttentionClient,
    everyday_server: ServerProcess,
    name: str,
    sent: dict[str, Array],
    typed: str,
    named: str,
) -> None:
    model = f"{NAMES[name]}-fp32"
    with pytest.raises(InvalidArgumentError, match=typed):
        everyday_client.infer(model, sent)
    with pytest.raises(triton.TritonError, match=named):
        triton.infer(everyday_server.target, model, sent)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ROWS)
def test_equals_eager(everyday_client: AttentionClient, name: str, precision: Precision) -> None:
    """The sequences of a request have different lengths; eager PyTorch computes each of them alone."""
    model = f"{NAMES[name]}-{precision}"
    parity = everyday_client.model(model).parity
    assert parity is not None
    row, rng = ROWS[name], np.random.default_rng(3)
    masks = [each for each in row.inputs if each.endswith("mask")]
    sent: list[dict[str, Array]] = []
    expected: list[list[Array]] = []
    for lengths in LENGTHS:
        vectors = {
            each: random_array(own, lengths, rng) for each, own in row.inputs.items() if each not in masks
        }
        sent.append(vectors)
        neutral = {name: neutral_mask(name, row.inputs[name], lengths) for name in masks}
        expected.append(eager(row, {each: array[None] for each, array in vectors.items()} | neutral))
    lists = {each: [own[each] for own in sent] for each in sent[0]}
    found = everyday_client.infer(model, lists, outputs=row.outputs).outputs
    for output, answers in zip(row.outputs, zip(*expected, strict=True), strict=True):
        for rows, answer in zip(found[output], answers, strict=True):
            np.testing.assert_allclose(
                rows, answer, rtol=parity.relative_tolerance, atol=parity.absolute_tolerance
            )
