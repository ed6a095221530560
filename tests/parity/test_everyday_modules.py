"""Everyday modules with everyday masks: exported, served over both APIs, and equal to eager PyTorch.

tests/support/everyday.py is the table. Callers of eager PyTorch pad sequences and pass masks; callers of the
server send the sequences themselves, or padded tensors with their lengths.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError

from attention_serving.export import export_module
from scripts.local_server import ServerProcess, serving
from tests.support import everyday, triton
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array, assert_parity
from tests.support.everyday import ENCODER, IDS, ROWS, Input, Row

pytestmark = pytest.mark.thorough
LENGTHS = {"T": (7, 4, 6), "S": (5, 9, 3)}
NAMES = {name: f"everyday-{index}" for index, name in enumerate(ROWS)}


def export_row(name: str, folder: Path) -> None:
    row = ROWS[name]
    export_module(
        row.module(),
        {key: own.example for key, own in row.inputs.items()},
        {key: own.axes for key, own in row.inputs.items()},
        out=folder,
        name=NAMES[name],
        description=name,
        output_names=row.outputs,
        masks=row.masks,
    )


class Served(NamedTuple):
    server: ServerProcess
    client: AttentionClient


MODELS = ModelSet(
    "everyday",
    [partial(export_row, name) for name in ROWS],
    [Path(__file__), Path(everyday.__file__)],
    ["everyday_server"],
)


@pytest.fixture(scope="module")
def everyday_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    (repository,) = cached_repositories(MODELS)
    with (
        serving(repository, tmp_path_factory.mktemp("everyday") / "log") as server,
        AttentionClient(server.target) as client,
    ):
        yield Served(server, client)


class Case:
    """Three sequences for a row of the table, padded as callers of eager PyTorch pad them.

    Attributes:
        lengths: Those of each symbolic size; sequences differ where a mask hides keys.
        vectors: Inputs that are not masks.
        pairs: The mask of pairs (B, Tq, Tk) if the row has one; True = may attend.
        masks: The masks as the module takes them.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.inputs = row, row.inputs
        masks = {name: own for name, own in self.inputs.items() if name.endswith("mask")}
        padded = {own.sizes[-1] for own in masks.values() if own.sizes[-2] != "T"}
        self.lengths = {
            size: own if size in padded else (own[0],) * len(own) for size, own in LENGTHS.items()
        }
        self._sizes = {"B": 3} | {size: max(own) for size, own in self.lengths.items()}
        rng = np.random.default_rng(3)
        self.vectors = {name: self._rows(own, rng) for name, own in self.inputs.items() if name not in masks}
        self.pairs: Array | None = None
        self.masks = {name: self._mask(name, own, rng) for name, own in masks.items()}

    def _shape(self, own: Input) -> list[int]:
        return [self._sizes.get(size) or int(size) for size in own.sizes]

    def _rows(self, own: Input, rng: np.random.Generator) -> Array:
        if own.dtype is torch.int64:
            return rng.integers(0, IDS, self._shape(own))
        return rng.standard_normal(self._shape(own), np.float32)

    def _mask(self, name: str, own: Input, rng: np.random.Generator) -> Array:
        shape, keys = self._shape(own), own.sizes[-1]
        if own.sizes[-2] == "T":
            self.pairs = rng.random((3, *shape[-2:])) < 0.6
            self.pairs[..., 0] = True
            allowed = np.broadcast_to(self.pairs if len(shape) == 3 else self.pairs[:, None], shape)
        else:
            allowed = np.arange(shape[-1]) < np.array(self.lengths[keys])[:, None]  # (B, Tk)
        if own.dtype is torch.float32:
            return np.where(allowed, 0, -np.inf).astype(np.float32)
        hides = self.row.masks.get(name) == "True hides" or name.endswith("key_padding_mask")
        return (~allowed if hides else allowed).astype(str(own.dtype).removeprefix("torch."))

    def eager(self) -> dict[str, list[Array]]:
        """The outputs of eager PyTorch for the padded batch, without padding."""
        tensors = {name: torch.from_numpy(array) for name, array in (self.vectors | self.masks).items()}
        with torch.inference_mode():
            outputs = self.row.module()(**tensors)
        if not isinstance(outputs, tuple):
            outputs = (getattr(outputs, "last_hidden_state", outputs),)
        return {
            name: self.without_padding(output.numpy(), name)
            for name, output in zip(self.row.outputs, outputs, strict=True)
        }

    def without_padding(self, output: Array, name: str) -> list[Array]:
        """Each sequence's part of (B, T, ...); weights (B, H, T, T) end with the key axis."""
        return [
            rows[:, :length, :length] if name == "weights" else rows[:length]
            for rows, length in zip(output, self.lengths["T"], strict=True)
        ]


def ask_open_inference(served: Served, name: str, case: Case) -> dict[str, list[Array]]:
    """Sends padded tensors with lengths; masks of keys become lengths."""
    tensors, names = dict(case.vectors), list(case.vectors)
    for field, own in {"query_lengths": names[0], "key_lengths": names[-1]}.items():
        lengths = case.lengths[case.inputs[own].sizes[1]]
        if len(set(lengths)) > 1 and (field == "key_lengths" or len(names) > 1):
            tensors[field] = np.array(lengths)
    if case.pairs is not None:
        tensors["attention_mask"] = case.pairs
    outputs = case.row.outputs
    answer = triton.infer(served.server.target, NAMES[name], tensors, outputs)
    return {output: case.without_padding(answer[output], output) for output in outputs}


def ask_attention(served: Served, name: str, case: Case) -> dict[str, list[Array]]:
    """Sends sequences of different lengths; attention.v1 answers with the first output."""
    sequences = [
        [rows[:length] for rows, length in zip(own, case.lengths[case.inputs[key].sizes[1]], strict=True)]
        for key, own in case.vectors.items()
    ]
    mask = None if case.pairs is None else list(case.pairs)
    if sequences[0][0].dtype == np.int64:
        answer = served.client.attend_tokens(NAMES[name], sequences[0], mask=mask)
    else:
        answer = served.client.attend(NAMES[name], *sequences, mask=mask)
    return {case.row.outputs[0]: answer.context_vectors}


APIS = {"attention.v1": ask_attention, "open inference": ask_open_inference}


def carried(row: Row) -> bool:
    """Whether the fields of attention.v1 suffice: vectors, except that the first input may be ids."""
    return all(own.ndim == 3 for own in list(Case(row).vectors.values())[1:])


ASKED = [(name, api) for name, row in ROWS.items() for api in APIS if api != "attention.v1" or carried(row)]


@pytest.mark.parametrize(("name", "api"), ASKED, ids=[f"{name}-{api}" for name, api in ASKED])
def test_equals_eager(everyday_server: Served, name: str, api: str) -> None:
    case = Case(ROWS[name])
    eager = case.eager()
    for output, found in APIS[api](everyday_server, name, case).items():
        assert_parity(found, eager[output])


BATCH = np.zeros((2, 3, 16), np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"mask": np.ones((2, 3, 3), bool)}, "does not take a mask"),
    "return_weights": ({"return_weights": True}, "does not have attention weights"),
    "key": ({"key": BATCH}, "takes x"),
    "positions": ({"positions": np.zeros((2, 3), np.int64)}, "takes x"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_a_module_does_not_take_is_refused(everyday_server: Served, field: str) -> None:
    options, message = REFUSED[field]
    with pytest.raises(InvalidArgumentError, match=f"model '{NAMES[ENCODER]}' {message}") as refusal:
        everyday_server.client.attend(NAMES[ENCODER], BATCH, **options)
    assert refusal.value.field == field
