"""Positions to integers; changes with what a call of a rotary model accepts."""

import numpy as np
import pytest

from attention_client import AttendInputs
from attention_client._encoding import encode_vectors
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")


@pytest.mark.parametrize(
    ("inputs", "sent"),
    [
        pytest.param(AttendInputs(np.ones((3, 1)), positions=np.array([7, 8, 9])), [7, 8, 9], id="one"),
        pytest.param(AttendInputs(np.ones((3, 1)), positions=[7, 8, 9]), [7, 8, 9], id="plain-list-for-one"),
        pytest.param(AttendInputs(np.ones((3, 1)), positions=range(3)), [0, 1, 2], id="range"),
        pytest.param(
            AttendInputs(np.ones((2, 2, 1)), positions=np.array([[5, 6], [0, 1]], np.int32)),
            [5, 6, 0, 1],
            id="batch",
        ),
        pytest.param(
            AttendInputs(np.ones((1, 2, 2, 1)), positions=np.array([[[5, 6], [0, 1]]])),
            [5, 6, 0, 1],
            id="leading-axes",
        ),
        pytest.param(
            AttendInputs(np.ones((2, 2, 1)), positions=np.array([[5, 6], [0, 1]]), lengths=[1, 2]),
            [5, 0, 1],
            id="padded-batch",
        ),
        pytest.param(
            AttendInputs(
                np.ones((2, 2, 1)), np.ones((2, 3, 1)), positions=np.ones((2, 2), int), lengths=[1, 2]
            ),
            [1, 1, 1, 1],
            id="lengths-are-the-keys-in-cross-attention",
        ),
        pytest.param(
            AttendInputs([np.ones((1, 1)), np.ones((2, 1))], positions=[[4], np.array([2, 3])]),
            [4, 2, 3],
            id="list",
        ),
        pytest.param(AttendInputs(np.ones((3, 1))), [], id="none"),
    ],
)
def test_positions_travel_concatenated(inputs: AttendInputs, sent: list[int]):
    assert list(encode_vectors(OPTIONS, inputs).request.positions) == sent
