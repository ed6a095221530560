"""Requests that are almost right: good messages of both services, changed with regard to their structure."""

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.api.messages import vectors
from tests.server.samples import CROSS, SELF, TEXT

INFER = "/inference.GRPCInferenceService/ModelInfer"
ATTEND = "/attention.v1.AttentionService/Attend"
# Numbers at which something may change: signs, sizes, the ends of types.
EDGES = (0, 1, 2, 3, 7, 8, 127, 128, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
MAX_MUTATIONS = 4


class Good(NamedTuple):
    """A request to send that is answered: of gRPC, or of HTTP if it has headers."""

    method: str
    data: bytes
    headers: dict[str, str] | None = None


def good_requests() -> list[Good]:
    """One request of every form that both services take, some larger than 8 KiB. Their runs are short."""
    return [Good(ATTEND, message.SerializeToString()) for message in _attend()] + [
        Good(INFER, message.SerializeToString()) for message in _infer()
    ]


def _vectors(lengths: Sequence[int], width: int) -> typed.VectorSequences:
    return vectors(*(np.linspace(-1, 1, length * width, dtype="f4").reshape(-1, width) for length in lengths))


def named(
    name: str, *arrays: np.ndarray[Any, Any], data_type: Any = typed.DATA_TYPE_FP32
) -> typed.NamedTensors:
    return typed.NamedTensors(
        name=name,
        data_type=data_type,
        num_tensors=len(arrays),
        shapes=[size for array in arrays for size in array.shape],
        data=b"".join(array.tobytes() for array in arrays),
    )


def _attend() -> list[typed.AttendRequest]:
    ones, ids = np.ones((9, 6), np.float32), np.arange(4)
    mask = typed.AttentionMask(kind=typed.AttentionMask.KIND_PAIRS, bits=b"\xff\xff")
    return [
        typed.AttendRequest(model_name=SELF, query=_vectors([3, 2], 4), mask=mask, return_weights=True),
        typed.AttendRequest(model_name=SELF, query=_vectors([60] * 10, 4)),
        typed.AttendRequest(
            model_name=CROSS,
            model_version="1",
            query=_vectors([2, 1], 4),
            key=_vectors([3, 2], 6),
            value=_vectors([3, 2], 5),
        ),
        typed.AttendRequest(
            model_name=TEXT, text=typed.TextSequences(texts=["Life is short", "eat"]), return_offsets=True
        ),
        typed.AttendRequest(model_name=TEXT, text=typed.TextSequences(texts=["Life is short" + " " * 9000])),
        typed.AttendRequest(
            model_name=TEXT, token_ids=typed.TokenSequences(lengths=[90] * 100, ids=[1] * 9000)
        ),
        typed.AttendRequest(
            model_name=CROSS,
            inputs=[
                named("query", ones[:2, :4], ones[:1, :4]),
                named("key", ones[:3], ones[:2]),
                named("value", ones[:3, :5], ones[:2, :5]),
                named("attention_mask", ones[0, :3] > 0, ones[0, :2] > 0, data_type=typed.DATA_TYPE_BOOL),
            ],
            output_names=["attention_weights", "context_vectors"],
        ),
        typed.AttendRequest(model_name=SELF, inputs=[named("query", np.ones((40, 60, 4), np.float32))]),
        typed.AttendRequest(
            model_name=TEXT, inputs=[named("token_ids", ids, data_type=typed.DATA_TYPE_INT64)]
        ),
    ]


def _infer() -> list[pb.ModelInferRequest]:
    raw = pb.ModelInferRequest(model_name=SELF, id="7", raw_input_contents=[np.ones(24, "f4").tobytes()])
    raw.inputs.add(name="query", datatype="FP32", shape=[2, 3, 4])
    raw.outputs.add(name="attention_weights")
    raw.parameters["timeout"].int64_param = 30_000_000
    lengths = pb.ModelInferRequest(model_name=SELF)
    lengths.inputs.add(name="query", datatype="FP32", shape=[1, 100, 4]).contents.fp32_contents.extend(
        [1.0] * 400
    )
    lengths.inputs.add(name="key_lengths", datatype="INT64", shape=[1]).contents.int64_contents.append(90)
    mask = lengths.inputs.add(name="attention_mask", datatype="BOOL", shape=[1, 100, 100])
    mask.contents.bool_contents.extend([True] * 10_000)
    texts = pb.ModelInferRequest(model_name=TEXT)
    texts.inputs.add(name="text", datatype="BYTES", shape=[2]).contents.bytes_contents.extend(
        [b"Life is", b"short"]
    )
    packed = b"".join(struct.pack("<I", len(text)) + text for text in (b"Life", b"eat " + b" " * 9000))
    long = pb.ModelInferRequest(model_name=TEXT, raw_input_contents=[packed])
    long.inputs.add(name="text", datatype="BYTES", shape=[2])
    return [raw, lengths, texts, long]


def mutated(good: Good, rng: random.Random) -> bytes:
    """The request with up to four changes of its bytes; contradictions.py changes its fields."""
    data = good.data
    for _ in range(rng.randint(1, MAX_MUTATIONS)):
        data = _changed(data, rng)
    return data


def _changed(data: bytes, rng: random.Random) -> bytes:
    """Another byte, another end, or some bytes more."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(3):
        case 0:
            byte = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
            return data[:at] + bytes([byte]) + data[at + 1 :]
        case 1:
            return data[:at]
    return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
