"""Requests of the chaos cases as bytes on the wire."""

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from tests.support.eager import Array


def random_rows(rows: int, width: int, seed: int = 0) -> Array:
    """Standard normal rows, (T, d)."""
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def attend_message(model: str, *sequences: Array, return_weights: bool = False) -> pb.AttendRequest:
    """A request of attention.v1 for sequences (T, d) of one width."""
    query = pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32,
        width=sequences[0].shape[1],
        lengths=[len(rows) for rows in sequences],
        data=b"".join(rows.tobytes() for rows in sequences),
    )
    return pb.AttendRequest(model_name=model, query=query, return_weights=return_weights)


def attend_request(model: str, *sequences: Array, return_weights: bool = False) -> bytes:
    """The same, encoded."""
    return attend_message(model, *sequences, return_weights=return_weights).SerializeToString()
