"""Exported graphs compared with eager PyTorch: the grid, the report, the golden vectors."""

from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.errors import ParityError
from attention_serving.export.graph import EXAMPLE_LENGTHS
from attention_serving.export.parity import (
    GOLDEN_GRID,
    PARITY_GRID,
    ParityCase,
    as_json,
    compare,
    golden_cases,
    grid_cases,
    report,
)
from attention_serving.export.precision import FP32_TOLERANCE
from attention_serving.export.signature import run_eager
from tests.export.modules import CROSS, attention, graph, named_module, signature

GRIDS = pytest.mark.parametrize(
    "grid", [pytest.param(PARITY_GRID, id="parity"), pytest.param(GOLDEN_GRID, id="golden")]
)


def case(*, passed: bool, error: float = 1e-7, kind: GraphKind = GraphKind.PLAIN) -> ParityCase:
    return ParityCase(kind, {"batch": 2, "query_length": 7}, error, passed)


@pytest.fixture(scope="module")
def lengths_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of the cross-attention module of seed 0 that takes key lengths."""
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    path.write_bytes(graph("cross", GraphKind.LENGTHS).SerializeToString())
    return path


@GRIDS
def test_a_grid_has_one_sequence_many_sequences_and_single_tokens(
    grid: tuple[tuple[int, int, int], ...],
) -> None:
    batches, query_lengths, key_lengths = map(set, zip(*grid, strict=True))
    assert {1} < batches
    assert {1} < query_lengths
    assert {1} < key_lengths


@GRIDS
def test_a_grid_has_lengths_that_the_exporter_did_not_use(grid: tuple[tuple[int, int, int], ...]) -> None:
    assert set(EXAMPLE_LENGTHS).isdisjoint(query_length for _, query_length, _ in grid)
    assert len({key_length for *_, key_length in grid} - set(EXAMPLE_LENGTHS)) >= 3
    assert any(query > key for _, query, key in grid)
    assert any(query < key for _, query, key in grid)


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_a_grid_point_brings_the_inputs_of_the_graph_in_its_sizes(kind: GraphKind) -> None:
    module = named_module("cross")
    signed = signature(module, kind)
    for sizes, golden in grid_cases(module, signed, GOLDEN_GRID):
        assert golden.graph is kind
        for spec in signed.inputs:
            array = golden.inputs[spec.name]
            assert array.dtype == spec.data_type
            assert array.shape == tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes)


def test_masks_come_for_all_heads_at_once_and_for_each_head() -> None:
    module = named_module("cross")
    cases = grid_cases(module, signature(module, GraphKind.MASK), PARITY_GRID)
    assert {sizes["mask_heads"] for sizes, _ in cases} == {1, CROSS.num_heads}


def test_golden_vectors_are_what_eager_pytorch_answers_and_never_change() -> None:
    module = named_module("cross")
    signed = signature(module, GraphKind.WEIGHTS)
    first, second = golden_cases(module, signed), golden_cases(module, signed)
    assert len(first) == len(second) == len(GOLDEN_GRID)
    for one, other in zip(first, second, strict=True):
        eager = run_eager(module, signed, one.inputs)
        for name, array in {**one.inputs, **eager}.items():
            np.testing.assert_array_equal((other.inputs | other.outputs)[name], array)
        assert one.outputs.keys() == eager.keys() == {"context_vectors", "attention_weights"}


def test_a_true_graph_passes_at_every_point_of_the_grid(lengths_graph: Path) -> None:
    module = named_module("cross")
    cases = compare(module, signature(module, GraphKind.LENGTHS), str(lengths_graph), FP32_TOLERANCE)
    assert [(c.sizes["batch"], c.sizes["query_length"], c.sizes["key_length"]) for c in cases] == list(
        PARITY_GRID
    )
    assert all(c.within_tolerance for c in cases)
    summary = report(cases, FP32_TOLERANCE)
    assert summary.max_abs_error == max(c.max_abs_error for c in cases) < FP32_TOLERANCE.atol
    assert as_json(summary)["tolerance"] == {"rtol": 1.3e-6, "atol": 1e-5}


def test_a_case_is_held_against_the_tolerance_that_is_stated(lengths_graph: Path) -> None:
    module = attention(CROSS, seed=1)
    signed, generous = signature(module, GraphKind.LENGTHS), Tolerance(rtol=0, atol=100)
    cases = compare(module, signed, str(lengths_graph), generous)
    assert all(c.within_tolerance for c in cases)
    summary = report(cases, generous)
    assert summary.max_abs_error is not None
    assert summary.max_abs_error > 0.1


def test_the_graph_of_other_weights_is_refused(lengths_graph: Path) -> None:
    module = attention(CROSS, seed=1)
    cases = compare(module, signature(module, GraphKind.LENGTHS), str(lengths_graph), FP32_TOLERANCE)
    assert not any(c.within_tolerance for c in cases)
    with pytest.raises(ParityError, match="graph lengths at"):
        report(cases, FP32_TOLERANCE)


@pytest.mark.parametrize("place", range(3))
def test_one_case_outside_the_tolerance_is_refused_by_graph_sizes_and_error(place: int) -> None:
    cases = [case(passed=True) for _ in range(3)]
    cases[place] = case(passed=False, error=0.25, kind=GraphKind.MASK)
    with pytest.raises(ParityError) as refusal:
        report(cases, FP32_TOLERANCE)
    for part in ("graph mask", "'batch': 2", "'query_length': 7", "by 0.25", "rtol=1.3e-06", "atol=1e-05"):
        assert part in str(refusal.value)
