"""Exported graphs compared with eager PyTorch: the grid, the report, the golden vectors."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.artifact import GRAPH_FILES
from attention_serving.export.errors import ParityError
from attention_serving.export.parity import PARITY_GRID, GraphRunner, ParityCase, report
from attention_serving.export.precision import ENCODER_TOLERANCES, FP32_TOLERANCE, TOLERANCES, Precision
from attention_serving.export.signature import Signature
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.projections import SeparateProjections
from scripts.local_server import ROOT
from tests.export.modules import attention, signature
from tests.server.samples import CONFIGS, CROSS, eager_module

PAGE = (ROOT / "docs/parity.md").read_text()


def compare(module: nn.Module, signed: Signature, graph: Path) -> list[ParityCase]:
    return list(GraphRunner(module, signed, graph, FP32_TOLERANCE).cases({}, (), special_values=False))


def test_a_true_graph_passes_at_every_point_and_that_of_other_weights_at_none(artifacts: Path) -> None:
    graph = artifacts / CROSS / "1" / GRAPH_FILES[GraphKind.LENGTHS]
    signed = signature(eager_module(CROSS), GraphKind.LENGTHS)
    cases = compare(eager_module(CROSS), signed, graph)
    points = [(each.sizes["batch"], each.sizes["query_length"], each.sizes["key_length"]) for each in cases]
    assert points == list(PARITY_GRID)
    summary = report(cases, FP32_TOLERANCE)
    assert summary["max_abs_error"] == max(each.max_abs_error for each in cases) < FP32_TOLERANCE.atol

    wrong = compare(attention(CONFIGS[CROSS], seed=1), signed, graph)
    assert not any(each.within_tolerance for each in wrong)
    with pytest.raises(ParityError, match="graph lengths at"):
        report(wrong, FP32_TOLERANCE)


def test_every_output_is_compared(artifacts: Path) -> None:
    graph = artifacts / CROSS / "1" / GRAPH_FILES[GraphKind.PROJECT]
    other = copy.deepcopy(eager_module(CROSS))
    assert isinstance(other, MultiHeadAttention)
    assert isinstance(other.projections, SeparateProjections)
    torch.nn.init.zeros_(other.projections.value.get_parameter("weight"))  # of the second output
    wrong = compare(other, signature(other, GraphKind.PROJECT), graph)
    assert not any(each.within_tolerance for each in wrong)


def test_one_case_outside_the_tolerance_is_refused_with_its_place_and_advice() -> None:
    error, sizes = 1e-5, {"batch": 2, "query_length": 7}
    cases = [ParityCase(GraphKind.MASK, sizes, found, found < error) for found in (2e-6, error, 2e-6)]
    says = (
        f"graph mask at {sizes} differs from eager PyTorch by {error:.3g}; the tolerance is 1e-05 + 1.3e-06"
    )
    with pytest.raises(ParityError, match=f"{re.escape(says)}.*state a wider tolerance"):
        report(cases, FP32_TOLERANCE)


@pytest.mark.parametrize("precision", Precision)
def test_the_page_of_parity_states_each_tolerance(precision: Precision) -> None:
    of_modules, of_encoders = TOLERANCES[precision], ENCODER_TOLERANCES[precision]
    for start, tolerance in (
        (f"| {precision} |", of_modules),
        (f"| {precision}, text encoders |", of_encoders),
    ):
        (line,) = [line for line in PAGE.splitlines() if line.startswith(start)]
        if tolerance.cosine is None:
            assert tuple(map(float, line.split("|")[2:4])) == (tolerance.rtol, tolerance.atol)
        else:
            assert f"a cosine of at least {tolerance.cosine:g}" in line
