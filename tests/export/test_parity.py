"""Exported graphs compared with eager PyTorch: the grid, the report, the golden vectors."""

import re
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, IN_BLOCKS, GraphKind
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import GRAPH_FILES
from attention_serving.export.errors import ParityError
from attention_serving.export.graph import EXAMPLE_LENGTHS
from attention_serving.export.parity import (
    GOLDEN_GRID,
    PARITY_GRID,
    ParityCase,
    compare,
    golden_cases,
    grid_cases,
    report,
)
from attention_serving.export.precision import FP32_TOLERANCE, TOLERANCES, Precision
from attention_serving.export.signature import run_eager
from attention_serving.server.settings.sections import Models
from scripts.local_server import ROOT
from tests.export.modules import attention, signature
from tests.server.samples import CONFIGS, CROSS, eager_module

PAGE = (ROOT / "docs/parity.md").read_text()


def case(*, passed: bool, error: float = 1e-7, kind: GraphKind = GraphKind.PLAIN) -> ParityCase:
    return ParityCase(kind, {"batch": 2, "query_length": 7}, error, passed)


@pytest.mark.parametrize("grid", [PARITY_GRID, GOLDEN_GRID], ids=["parity", "golden"])
def test_a_grid_has_single_and_many_rows_and_lengths_that_the_exporter_did_not_use(
    grid: tuple[tuple[int, int, int], ...],
) -> None:
    assert all({1} < set(sizes) for sizes in zip(*grid, strict=True))
    assert set(EXAMPLE_LENGTHS).isdisjoint(query_length for _, query_length, _ in grid)
    assert len({key_length for *_, key_length in grid} - set(EXAMPLE_LENGTHS)) >= 3
    assert {query > key for _, query, key in grid} == {query < key for _, query, key in grid} == {True, False}


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_a_grid_point_brings_the_inputs_of_the_graph_in_its_sizes(kind: GraphKind) -> None:
    signed, heads = signature(eager_module(CROSS), kind), set()
    for sizes, golden in grid_cases(eager_module(CROSS), signed, GOLDEN_GRID):
        heads.add(sizes.get("mask_heads"))
        assert golden.graph is kind
        for spec in signed.inputs:
            array = golden.inputs[spec.name]
            assert array.dtype == spec.data_type
            assert array.shape == tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes)
    is_masked = any(spec.name == "attention_mask" for spec in signed.inputs)
    assert heads == ({1, CONFIGS[CROSS].num_heads} if is_masked else {None})


def test_golden_vectors_are_what_eager_pytorch_answers_and_never_change() -> None:
    module = eager_module(CROSS)
    signed = signature(module, GraphKind.WEIGHTS)
    first, second = golden_cases(module, signed), golden_cases(module, signed)
    assert len(first) == len(second) == len(GOLDEN_GRID)
    for one, other in zip(first, second, strict=True):
        eager = run_eager(module, signed, one.inputs)
        for name, array in {**one.inputs, **eager}.items():
            np.testing.assert_array_equal((other.inputs | other.outputs)[name], array)
        assert one.outputs.keys() == eager.keys() == {"context_vectors", "attention_weights"}


@pytest.mark.parametrize("kind", IN_BLOCKS.values())
def test_golden_vectors_of_blocks_have_several_blocks_and_one_with_fewer_rows(kind: GraphKind) -> None:
    module = eager_module(CROSS)
    cases = golden_cases(module, signature(module, kind))
    sizes = [(each.inputs["query"].shape[1], int(each.inputs["block_rows"])) for each in cases]
    assert any(length > 2 * rows and length % rows for length, rows in sizes)


def test_a_true_graph_passes_at_every_point_and_that_of_other_weights_at_none(artifacts: Path) -> None:
    graph = str(artifacts / CROSS / "1" / GRAPH_FILES[GraphKind.LENGTHS])
    signed = signature(eager_module(CROSS), GraphKind.LENGTHS)
    cases = compare(eager_module(CROSS), signed, graph, FP32_TOLERANCE)
    points = [(each.sizes["batch"], each.sizes["query_length"], each.sizes["key_length"]) for each in cases]
    assert points == list(PARITY_GRID)
    summary = report(cases, FP32_TOLERANCE)
    assert summary["max_abs_error"] == max(each.max_abs_error for each in cases) < FP32_TOLERANCE.atol
    assert summary["tolerance"] == {"rtol": 1.3e-6, "atol": 1e-5}

    other, generous = attention(CONFIGS[CROSS], seed=1), Tolerance(rtol=0, atol=100)
    wrong = compare(other, signed, graph, FP32_TOLERANCE)
    assert not any(each.within_tolerance for each in wrong)
    with pytest.raises(ParityError, match="graph lengths at"):
        report(wrong, FP32_TOLERANCE)
    accepted = compare(other, signed, graph, generous)
    assert report(accepted, generous)["max_abs_error"] > 0.1


ADVICE = {
    "rounding": (1e-5, "state a wider tolerance"),
    "a branch on a length": (0.25, "It is equal at {'batch': 2, 'query_length': 7}: the module branches on"),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("error", "advice"), ADVICE.values(), ids=ADVICE)
def test_one_case_outside_the_tolerance_is_refused_with_its_place_and_advice(
    place: int, error: float, advice: str
) -> None:
    cases = [case(passed=True, kind=GraphKind.MASK, error=2e-6) for _ in range(3)]
    cases[place] = case(passed=False, error=error, kind=GraphKind.MASK)
    says = f"graph mask at {{'batch': 2, 'query_length': 7}} differs from eager PyTorch by {error:.3g}; the "
    with pytest.raises(
        ParityError, match=f"{re.escape(says)}tolerance is rtol=1.3e-06 atol=1e-05"
    ) as refusal:
        report(cases, FP32_TOLERANCE)
    assert advice in str(refusal.value)


@pytest.mark.parametrize("precision", Precision)
def test_the_page_of_parity_states_each_tolerance(precision: Precision) -> None:
    (row,) = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| {precision} |")]
    assert (float(row[2]), float(row[3])) == (TOLERANCES[precision].rtol, TOLERANCES[precision].atol)


def test_the_page_of_parity_states_the_default_period() -> None:
    default = Models.model_fields["canary_seconds"].default
    assert f"`--canary-seconds` ({default:g}) is the time" in PAGE
