"""Exported graphs compared with eager PyTorch: the grid, the report, the golden vectors."""

import re
from pathlib import Path

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import GRAPH_FILES
from attention_serving.export.errors import ParityError
from attention_serving.export.parity import (
    PARITY_GRID,
    ParityCase,
    compare,
    report,
)
from attention_serving.export.precision import FP32_TOLERANCE, TOLERANCES, Precision
from scripts.local_server import ROOT
from tests.export.modules import attention, signature
from tests.server.samples import CONFIGS, CROSS, eager_module

PAGE = (ROOT / "docs/parity.md").read_text()


def case(*, passed: bool, error: float = 1e-7, kind: GraphKind = GraphKind.PLAIN) -> ParityCase:
    return ParityCase(kind, {"batch": 2, "query_length": 7}, error, passed)


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
