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
FLOATS = hnp.arrays(np.float32, SHAPES)
FINITE = st.floats(-1e6, 1e6)
INF, NAN = np.inf, np.nan


@given(array=FLOATS)
def test_an_array_has_no_error_against_itself(array: Array) -> None:
    assert FP32.error(array, array.copy()) == 0
    assert FP32.holds(array, array.copy())


@given(pairs=st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=6))
def test_the_error_is_the_largest_difference_of_any_element(pairs: list[tuple[float, float]]) -> None:
    value, eager = np.array(pairs).T
    assert FP32.error(value, eager) == max(abs(one - other) for one, other in pairs)


@pytest.mark.parametrize(("value", "error"), [(True, 0.0), (False, 1.0)], ids=["equal", "different"])
def test_booleans_count_as_0_and_1(value: bool, error: float) -> None:
    """NumPy refuses to subtract booleans."""
    found, eager = np.array([value, True]), np.array([True, True])
    assert FP32.error(found, eager) == error
    assert FP32.holds(found, eager) == (error == 0)


@given(array=FLOATS, data=st.data())
def test_a_nan_on_one_side_never_passes(array: Array, data: st.DataObject) -> None:
    place = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
    good, bad = np.nan_to_num(array), np.nan_to_num(array)
    bad[place] = NAN
    for pair in ((bad, good), (good, bad)):
        assert FP32.error(*pair) == INF
        assert not FP32.holds(*pair)


@given(array=hnp.arrays(np.float64, SHAPES, elements=FINITE), data=st.data())
def test_one_element_outside_fails_wherever_it_stands(array: Array, data: st.DataObject) -> None:
    place = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
    inside, outside = array.copy(), array.copy()
    tolerated = FP32.atol + FP32.rtol * abs(array[place])
    inside[place] += 0.99 * tolerated
    outside[place] += 1.01 * tolerated
    assert FP32.holds(inside, array)
    assert not FP32.holds(outside, array)


@pytest.mark.parametrize(
    ("shape", "other"),
    [((2, 3), (3, 2)), ((1, 3), (3,)), ((0, 3), (3,)), ((), (1,))],
)
def test_another_shape_never_passes(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert FP32.error(np.zeros(shape), np.zeros(other)) == INF
    assert not FP32.holds(np.zeros(shape), np.zeros(other))


def test_empty_arrays_of_one_shape_pass() -> None:
    assert FP32.error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert FP32.holds(np.zeros((0, 3)), np.zeros((0, 3)))


@pytest.mark.parametrize(("value", "eager"), [(INF, 1.0), (1.0, INF), (INF, -INF)])
def test_an_infinity_only_passes_against_the_same_infinity(value: float, eager: float) -> None:
    found, expected = np.array([value], np.float32), np.array([eager], np.float32)
    assert not FP32.holds(found, expected)
    assert FP32.error(found, expected) == INF
    assert FP32.holds(found, found)


def test_the_relative_part_is_that_of_eager_pytorch() -> None:
    half = Tolerance(rtol=0.5, atol=0)
    assert half.holds(np.array([1.0]), np.array([2.0]))
    assert not half.holds(np.array([2.0]), np.array([1.0]))


@given(array=hnp.arrays(np.float64, SHAPES, elements=FINITE), data=st.data(), part=st.floats(0, 3))
def test_the_ratio_is_the_part_of_the_tolerance_that_is_used(
    array: Array, data: st.DataObject, part: float
) -> None:
    place = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
    moved = array.copy()
    moved[place] += part * (FP32.atol + FP32.rtol * abs(array[place]))
    assert FP32.ratio(moved, array) == pytest.approx(part, abs=1e-4)
    assert FP32.holds(moved, array) == (FP32.ratio(moved, array) <= 1)


@pytest.mark.parametrize(
    ("value", "eager", "ratio"),
    [(1.0, 1.0, 0.0), (1.0, 2.0, INF), (INF, INF, 0.0), (NAN, NAN, 0.0), (1.0, INF, INF), (NAN, 1.0, INF)],
)
def test_without_a_tolerance_the_ratio_is_0_or_infinite(value: float, eager: float, ratio: float) -> None:
    exact = Tolerance(rtol=0, atol=0)
    assert exact.ratio(np.array([value]), np.array([eager])) == ratio
    assert exact.ratio(np.zeros(2), np.zeros(3)) == INF


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
ARRAYS = st.one_of(*(hnp.arrays(dtype, SHAPES) for dtype in (np.float32, np.int64, np.bool_)))
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


def test_a_scalar_is_read_back_as_a_scalar(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    save_file(dict(golden_tensors([GoldenCase(GraphKind.PLAIN, {"rows": np.array(3)}, {})])), path)
    (case,) = load_golden(path)
    assert case.inputs["rows"].shape == ()
    assert case.inputs["rows"] == 3


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
