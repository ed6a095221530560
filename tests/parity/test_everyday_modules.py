"""Everyday modules with everyday masks: exported, served over both APIs, and equal to eager PyTorch.

tests/support/everyday.py is the table. Callers of eager PyTorch pad sequences and pass masks; callers of the
server send the sequences themselves, or padded tensors with their lengths.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from attention_client import AttentionClient

from attention_serving.export import export_module
from scripts.local_server import ServerProcess, serving
from tests.support import everyday, triton
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array, assert_parity
from tests.support.everyday import IDS, ROWS, Input, Row

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
    """Three sequences for a row of the table, padded as callers of eager PyTorch pad them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.inputs = row.inputs
        masked = {own.sizes[-1] for name, own in self.inputs.items() if self._hides_keys(name)}
        # Sequences differ in length on axes that have a mask of keys.
        self.lengths = {
            size: own if size in masked else (own[0],) * len(own) for size, own in LENGTHS.items()
        }
        rng = np.random.default_rng(3)
        self.allowed: dict[str, Array] = {}
        self.tensors = {name: self._tensor(name, own, rng) for name, own in self.inputs.items()}

    @property
    def pairs(self) -> Array | None:
        """The mask of pairs (B, Tq, Tk) if the row has one; True = may attend."""
        return next((mask for mask in self.allowed.values() if mask.ndim == 3), None)

    @property
    def vectors(self) -> dict[str, Array]:
        """What is not a mask, or is one that the server takes as an input."""
        return {name: own for name, own in self.tensors.items() if name not in self.allowed}

    def _hides_keys(self, name: str) -> bool:
        return name.endswith("mask") and self.inputs[name].sizes[-2] != "T"

    def _tensor(self, name: str, own: Input, rng: np.random.Generator) -> Array:
        sizes = {"B": 3} | {size: max(lengths) for size, lengths in self.lengths.items()}
        shape = [sizes.get(size) or int(size) for size in own.sizes]
        if not name.endswith("mask"):
            if own.dtype is torch.int64:
                return rng.integers(0, IDS, shape)
            return (
                rng.random(shape) < 0.7 if own.dtype is torch.bool else rng.standard_normal(shape, np.float32)
            )
        key = own.sizes[-1]
        if self._hides_keys(name):
            allowed = np.arange(sizes[key]) < np.array(self.lengths[key])[:, None]  # (B, Tk)
        else:
            allowed = rng.random((3, sizes["T"], sizes[key])) < 0.6  # (B, Tq, Tk)
            allowed[..., 0] = True
        self.allowed[name] = allowed
        wide = np.broadcast_to(
            allowed.reshape([3, *[1] * (len(shape) - allowed.ndim), *allowed.shape[1:]]), shape
        )
        hides = self.row.masks.get(name) == "True hides" or name.endswith("key_padding_mask")
        if own.dtype is torch.float32 and not name.endswith("attention_mask"):
            return np.where(wide, 0, -np.inf).astype(np.float32)
        return (~wide if hides else wide).astype(str(own.dtype).removeprefix("torch."))

    def eager(self) -> dict[str, list[Array]]:
        """The outputs of eager PyTorch for the padded batch, without padding."""
        with torch.inference_mode():
            outputs = self.row.module()(
                **{name: torch.from_numpy(t.copy()) for name, t in self.tensors.items()}
            )
        if not isinstance(outputs, tuple):
            outputs = (getattr(outputs, "last_hidden_state", outputs),)
        return {
            name: self.without_padding(output.numpy(), name)
            for name, output in zip(self.row.outputs, outputs, strict=True)
        }

    def without_padding(self, output: Array, name: str) -> list[Array]:
        """Each sequence's part of (B, T, ...); weights (B, ..., Tq, Tk) end with the key axis."""
        keys = self.lengths["S" if any("S" in own.sizes for own in self.inputs.values()) else "T"]
        parts = []
        for rows, length, key_length in zip(output, self.lengths["T"], keys, strict=True):
            parts.append(rows[..., :length, :key_length] if name == "weights" else rows[:length])
        return parts


def ask_open_inference(served: Served, name: str, case: Case) -> dict[str, list[Array]]:
    """Sends padded tensors with lengths; masks of keys become lengths."""
    names = list(case.vectors)
    first, last = names[0], names[-1]
    tensors = dict(case.vectors)
    for field, own in (("query_lengths", first), ("key_lengths", last)):
        size = case.inputs[own].sizes[1]
        if len(set(case.lengths[size])) > 1 and (field == "key_lengths" or first != last):
            tensors[field] = np.array(case.lengths[size])
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
