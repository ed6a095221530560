"""Tolerances and golden vectors: pure functions of arrays."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from safetensors.numpy import save_file

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.golden import GoldenCase, golden_tensors, load_golden
from attention_serving.artifact.manifest import GraphKind
from attention_serving.artifact.tolerance import Tolerance, least_cosine

Array = NDArray[Any]
FP32 = Tolerance(rtol=1.3e-6, atol=1e-5)
SHAPES = hnp.array_shapes(max_dims=3, max_side=3)
FINITE = st.floats(-1e6, 1e6)
INF, NAN = np.inf, np.nan


EXACT, HALF = Tolerance(rtol=0, atol=0), Tolerance(rtol=0.5, atol=0)
PAIRS: dict[str, tuple[Tolerance, Any, Any, float, float]] = {
    "equal": (EXACT, [1.0, 2.0], [1.0, 2.0], 0, 0),
    "the largest difference": (Tolerance(rtol=0, atol=0.5), [1.0, 5.0, 2.0], [1.5, 4.0, 2.0], 1, 2),
    "relative to eager PyTorch": (HALF, [1.0], [2.0], 1, 1),
    "not relative to the value": (HALF, [2.0], [1.0], 1, 2),
    "without a tolerance": (EXACT, [1.0], [2.0], 1, INF),
    "equal booleans": (EXACT, [True, False], [True, False], 0, 0),  # NumPy refuses to subtract them
    "integers": (HALF, [2**62], [-(2**62)], 2.0**63, 4),
    "NaN twice": (FP32, [NAN], [NAN], 0, 0),
    "a NaN": (FP32, [1.0, NAN], [1.0, 1.0], INF, INF),
    "a NaN of eager PyTorch": (FP32, [1.0, 1.0], [NAN, 1.0], INF, INF),
    "two infinities": (FP32, [INF], [-INF], INF, INF),
    "an infinity": (FP32, [INF], [1.0], INF, INF),
    "an infinity of eager PyTorch": (FP32, [1.0], [INF], INF, INF),
    "nothing": (FP32, [], [], 0, 0),
    "another shape": (FP32, [0.0], [[0.0]], INF, INF),
}


@pytest.mark.parametrize(("tolerance", "value", "eager", "error", "ratio"), PAIRS.values(), ids=PAIRS)
def test_errors_and_ratios(tolerance: Tolerance, value: Any, eager: Any, error: float, ratio: float) -> None:
    found, expected = np.array(value), np.array(eager)
    assert tolerance.error(found, expected) == error
    assert tolerance.ratio(found, expected) == ratio
    assert tolerance.holds(found, expected) == (ratio <= 1)


@given(array=hnp.arrays(np.float64, SHAPES, elements=FINITE), data=st.data(), part=st.floats(0, 3))
def test_the_ratio_is_the_part_of_the_tolerance_that_is_used(
    array: Array, data: st.DataObject, part: float
) -> None:
    place = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
    moved = array.copy()
    moved[place] += part * (FP32.atol + FP32.rtol * abs(array[place]))
    assert FP32.ratio(moved, array) == pytest.approx(part, abs=1e-4)
    assert FP32.holds(moved, array) == (FP32.ratio(moved, array) <= 1)


@pytest.mark.parametrize("bad", [-1e-9, NAN, INF])
@pytest.mark.parametrize("field", ["rtol", "atol"])
def test_a_tolerance_is_a_finite_number_of_at_least_zero(field: str, bad: float) -> None:
    with pytest.raises(ValueError, match=field):
        Tolerance(**{"rtol": 0.0, "atol": 0.0, field: bad})


def test_the_least_cosine_is_that_of_the_worst_pair() -> None:
    eager = np.eye(3, dtype=np.float32)
    turned = eager.copy()
    turned[1] = (0, 1, 1)
    assert least_cosine(eager, eager) == 1
    assert least_cosine(turned, eager) == pytest.approx(0.5**0.5)
    turned[2] = np.nan
    assert least_cosine(turned, eager) == 0


NAMES = st.text("abcdefgh_", min_size=1, max_size=5)
ARRAYS = st.one_of(*(hnp.arrays(dtype, SHAPES | st.just(())) for dtype in (np.float32, np.int64, np.bool_)))
CASES = st.builds(
    GoldenCase,
    graph=st.sampled_from(GraphKind),
    inputs=st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=2),
    outputs=st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=2),
)


def content(case: GoldenCase) -> str:
    """All of a case, to the bit."""
    sides = [sorted(side.items()) for side in (case.inputs, case.outputs)]
    arrays = [(name, array.dtype.str, array.shape, array.tobytes()) for side in sides for name, array in side]
    return repr((case.graph, len(case.inputs), arrays))


@settings(max_examples=20)
@given(cases=st.lists(CASES, min_size=1, max_size=12))
def test_golden_vectors_are_read_back_to_the_bit_as_they_were_written(cases: list[GoldenCase]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "golden.safetensors"
        save_file(dict(golden_tensors(cases)), path)
        found = load_golden(path)
    # Cases are independent of each other; their order is not kept.
    assert sorted(map(content, found)) == sorted(map(content, cases))


@pytest.mark.parametrize("data", [None, b"", b"no tensors"], ids=["absent", "empty", "damaged"])
def test_golden_vectors_that_cannot_be_read_are_refused_by_path(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"golden\.safetensors: "):
        load_golden(path)
    for key in ("plain/0/query", "other/0/inputs/query"):
        save_file({key: np.zeros(1, np.float32)}, path)
        with pytest.raises(ArtifactError, match=r"golden\.safetensors: contains a tensor"):
            load_golden(path)
