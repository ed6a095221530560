"""Modules with a largest length: found or stated, kept in the manifest, and never exceeded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import Manifest
from attention_serving.export import export_module
from attention_serving.export.max_length import find_max_lengths

AXES = {"rows": {0: "batch", 1: "sequence"}}
EXAMPLE = {"rows": torch.zeros(2, 3, 4)}


class Positioned(nn.Module):
    """Adds a row of a table to each row, as models with learnt positions do."""

    def __init__(self, rows: int, **config: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4)
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, rows: Tensor) -> Tensor:
        positions: Tensor = self.table(torch.arange(rows.shape[1]))
        return rows + positions


def export(module: nn.Module, out: Path, **options: Any) -> tuple[Path, Manifest]:
    return export_module(module, EXAMPLE, AXES, out=out, name="positioned", **options)


def test_a_length_stated_in_the_configuration_is_kept(tmp_path: Path) -> None:
    folder, manifest = export(Positioned(40, max_position_embeddings=40), tmp_path)
    assert manifest.max_lengths == Manifest.load(folder).max_lengths == {"sequence": 40}
    report = json.loads((folder / manifest.parity_report).read_bytes())
    assert max(case["sizes"]["sequence"] for case in report["cases"]) == 40
    lengths = {case.inputs["rows"].shape[1] for case in load_golden(folder / manifest.golden)}
    assert max(lengths) == 40


def test_a_length_stated_by_the_caller_counts_before_the_configuration(tmp_path: Path) -> None:
    _, manifest = export(Positioned(12, max_position_embeddings=99), tmp_path, max_length={"sequence": 12})
    assert manifest.max_lengths == {"sequence": 12}


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Positioned(40), r"the module fails for rows \[1, 513, 4\]: IndexError: .* as max_length"),
        (Positioned(40, n_positions=42), r"the module fails for rows \[1, 42, 4\]: .* as max_length"),
    ],
    ids=["not stated", "stated too large"],
)
def test_a_module_that_fails_at_its_largest_length_is_refused_in_a_sentence(
    module: nn.Module, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        export(module, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED: dict[str, tuple[Any, str]] = {
    "one row": (1, "max_length=1 of axis 'sequence': must be an integer of at least 2"),
    "a boolean": (True, "max_length=True"),
    "a fraction": (2.5, "max_length=2.5"),
    "another axis": ({"length": 3}, "max_length names length; the sequence axes are sequence"),
}


@pytest.mark.parametrize(("given", "says"), REFUSED.values(), ids=REFUSED)
def test_a_limit_that_cannot_hold_is_refused(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        export(Positioned(40), tmp_path, max_length=given)


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_the_configurations_of_other_projects_are_understood(field: str) -> None:
    module = Positioned(9, **{field: 9})
    assert find_max_lengths(module, ["rows", "ids"], None) == {
        "rows": 9,
        "ids": 9,
    }


def test_a_module_without_a_configuration_has_no_limit() -> None:
    assert find_max_lengths(nn.Linear(2, 2), ["sequence"], None) == {}
