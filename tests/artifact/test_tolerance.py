"""Tolerances and golden vectors: pure functions of arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.golden import GoldenCase, golden_tensors, load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.artifact.tolerance import Tolerance, cosines

FP32 = Tolerance(rtol=1.3e-6, atol=1e-5)
INF, NAN = np.inf, np.nan


EXACT, HALF = Tolerance(rtol=0, atol=0), Tolerance(rtol=0.5, atol=0)
PAIRS: dict[str, tuple[Tolerance, Any, Any, float, float]] = {
    "the largest difference": (Tolerance(rtol=0, atol=0.5), [1.0, 5.0, 2.0], [1.5, 4.0, 2.0], 1, 2),
    "relative to eager PyTorch": (HALF, [1.0], [2.0], 1, 1),
    "not relative to the value": (HALF, [2.0], [1.0], 1, 2),
    "without a tolerance": (EXACT, [1.0], [2.0], 1, INF),
    "equal booleans": (EXACT, [True, False], [True, False], 0, 0),  # NumPy refuses to subtract them
    "integers": (HALF, [2**62], [-(2**62)], 2.0**63, 4),
    "NaN twice": (FP32, [NAN], [NAN], INF, INF),
    "a NaN": (FP32, [1.0, NAN], [1.0, 1.0], INF, INF),
    "two infinities": (FP32, [INF], [-INF], INF, INF),
    "an infinity": (FP32, [INF], [1.0], INF, INF),
    "nothing": (FP32, [], [], 0, 0),
    "another shape": (FP32, [0.0], [[0.0]], INF, INF),
}


@pytest.mark.parametrize(("tolerance", "value", "eager", "error", "ratio"), PAIRS.values(), ids=PAIRS)
def test_errors_and_ratios(tolerance: Tolerance, value: Any, eager: Any, error: float, ratio: float) -> None:
    found, expected = np.array(value), np.array(eager)
    assert tolerance.error(found, expected) == error
    assert tolerance.ratio(found, expected) == ratio
    assert tolerance.holds(found, expected) == (ratio <= 1)


@pytest.mark.parametrize("bad", [-1e-9, NAN, INF])
def test_a_tolerance_is_a_finite_number_of_at_least_zero(bad: float) -> None:
    with pytest.raises(ValueError, match="atol"):
        Tolerance(rtol=0.0, atol=bad)


def test_vectors_pass_by_their_cosine_where_one_is_stated() -> None:
    eager = np.eye(3, dtype=np.float32)
    turned = eager.copy()
    turned[1] = (0, 1, 1)
    assert cosines(turned, eager).tolist() == pytest.approx([1, 0.5**0.5, 1])
    tolerance = Tolerance(rtol=0, atol=0, cosine=0.7)
    assert tolerance.ratio(turned, eager) == pytest.approx((1 - 0.5**0.5) / 0.3)
    # Of one vector for each row, the mean counts.
    assert tolerance.ratio(turned[None], eager[None]) == pytest.approx((1 - 0.5**0.5) / 0.9)
    zero = np.zeros_like(eager)
    assert (tolerance.holds(zero, zero), tolerance.holds(zero, eager)) == (True, False)
    turned[2] = np.nan
    assert cosines(turned, eager)[2] == 0


def test_golden_vectors_are_read_back_to_the_bit_as_they_were_written(tmp_path: Path) -> None:
    rows, path = np.arange(6, dtype=np.float32).reshape(2, 3).T, tmp_path / "golden.safetensors"
    inputs = {"query": rows, "mask": rows > 2, "rows": np.array(3), "none": np.zeros((0, 4), np.int64)}
    cases = [GoldenCase(kind, inputs, {"y": rows * kind.value.count("s")}) for kind in GraphKind]
    save_file(dict(golden_tensors(cases)), path)
    copies = {case.graph: case for case in load_golden(path)}
    for case in cases:
        copy = copies[case.graph]
        for written, read in ((case.inputs, copy.inputs), (case.outputs, copy.outputs)):
            assert written.keys() == read.keys()
            for name, array in written.items():
                assert array.dtype == read[name].dtype
                np.testing.assert_array_equal(array, read[name], strict=True)


@pytest.mark.parametrize("data", [b"", b"no tensors"], ids=["empty", "damaged"])
def test_golden_vectors_that_cannot_be_read_are_refused_by_path(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    with pytest.raises(ArtifactError, match=r"golden\.safetensors: cannot be read"):
        load_golden(path)
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"golden\.safetensors: is not a file of tensors"):
        load_golden(path)
    for key in ("plain/0/query", "other/0/inputs/query"):
        save_file({key: np.zeros(1, np.float32)}, path)
        with pytest.raises(ArtifactError, match=r"golden\.safetensors: contains a tensor"):
            load_golden(path)
