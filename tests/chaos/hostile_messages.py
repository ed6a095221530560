"""Messages that are as large or as expensive as the transport permits."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.protobuf_bytes import field
from attention_serving.server.engine.limits import MIB
from tests.server.samples import SELF, TEXT

INFER = "/inference.GRPCInferenceService/ModelInfer"
ATTEND = "/attention.v1.AttentionService/Attend"
READY = "/inference.GRPCInferenceService/ModelReady"
INPUTS, RAW = 5, 7


@dataclass(frozen=True)
class Hostile:
    """A message, and how it is answered.

    Attributes:
        method: Full name of the method.
        build: Makes the message.
        answer: The status, and the reason of its ErrorInfo if there is one.
    """

    method: str
    build: Callable[[], bytes]
    answer: tuple[str, str]


REFUSED = ("INVALID_ARGUMENT", "LIMIT_EXCEEDED")
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
ANSWERED = ("OK", "")


def attend(model: str = TEXT, **content: object) -> bytes:
    return typed.AttendRequest(model_name=model, **content).SerializeToString()  # type: ignore[arg-type]


def texts(*texts: str) -> bytes:
    return attend(text=typed.TextSequences(texts=texts))


def words(size: int, word: str) -> str:
    """A text of words that differ from each other."""
    return " ".join(f"{word}{index:07}" for index in range(size // (len(word) + 8)))


def input_of(name: str, datatype: str, shape: list[int], content: bytes = b"") -> bytes:
    """A request with one input, with the serialized content of its typed fields."""
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    serialized = tensor.SerializeToString()
    if content:
        serialized += b"".join(field((5,), [content]))
    return pb.ModelInferRequest(model_name=SELF).SerializeToString() + b"".join(
        field((INPUTS,), [serialized])
    )


def raw(name: str, datatype: str, shape: list[int], content: bytes, model: str = SELF) -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString() + b"".join(field((RAW,), [content]))


def outputs(count: int) -> bytes:
    message = pb.ModelInferRequest(model_name=SELF)
    message.inputs.add(name="query", datatype="FP32", shape=[1, 512, 4])
    for _ in range(count):
        message.outputs.add(name="attention_weights")
    message.raw_input_contents.append(bytes(512 * 4 * 4))
    return message.SerializeToString()


def names_only() -> bytes:
    return pb.ModelReadyRequest(name=SELF).SerializeToString() + b"".join(field((15,), [bytes(60 * MIB)]))


def typed_numbers(number: int, unit: bytes, size: int, datatype: str) -> bytes:
    """Packed numbers of a typed field."""
    content = b"".join(field((number,), [unit * (size // len(unit))]))
    return input_of("query", datatype, [1, 2, 4], content)


def rows(count: int, length: int) -> bytes:
    query = typed.VectorSequences(
        data_type=typed.DATA_TYPE_FP32, width=4, lengths=[length] * count, data=bytes(16 * count * length)
    )
    return attend(SELF, query=query)


def mask_bits() -> bytes:
    query = typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=4, lengths=[2], data=bytes(32))
    mask = typed.AttentionMask(kind=typed.AttentionMask.KIND_PAIRS, bits=bytes(60 * MIB))
    return attend(SELF, query=query, mask=mask)


def ones(path: tuple[int, ...], size: int) -> bytes:
    """A request whose only content is a packed field of ones."""
    return attend(SELF) + b"".join(field(path, [b"\1" * size]))


HOSTILE: dict[str, Hostile] = {
    "20 MB of unknown words": Hostile(ATTEND, lambda: texts(words(20 * MIB, "unknown")), REFUSED),
    "60 MB of unknown words": Hostile(ATTEND, lambda: texts(words(60 * MIB, "unknown")), REFUSED),
    "60 texts of unknown words": Hostile(
        ATTEND, lambda: texts(*[words(MIB - 100, "unknown")] * 60), INVALID
    ),
    "60 MB of known words": Hostile(ATTEND, lambda: texts(*["Life is " * (MIB // 8 - 8)] * 60), REFUSED),
    "one word of 1 MB": Hostile(ATTEND, lambda: texts("x" * (MIB - 8)), INVALID),
    "4096 texts of 1800 words": Hostile(ATTEND, lambda: texts(*["Life is short " * 600] * 4096), REFUSED),
    "BYTES of 15 M empty elements": Hostile(
        INFER, lambda: raw("text", "BYTES", [15_000_000], bytes(60_000_000), TEXT), REFUSED
    ),
    "BYTES of 1 M elements, shape of one": Hostile(
        INFER, lambda: raw("text", "BYTES", [1], struct.pack("<I", 1) * 1_000_000, TEXT), INVALID
    ),
    "9.6 M typed numbers": Hostile(
        INFER, lambda: typed_numbers(6, np.float32(1).tobytes(), 4 * 9_600_000, "FP32"), INVALID
    ),
    "64 M ones as INT64": Hostile(INFER, lambda: typed_numbers(3, b"\1", 62 * MIB, "INT64"), INVALID),
    "64 M ones of the right shape": Hostile(
        INFER,
        lambda: input_of(
            "query", "INT64", [62 * MIB], b"".join(field((3,), [b"\1" * (62 * MIB)]))
        ),
        REFUSED,
    ),
    "300 k inputs": Hostile(INFER, lambda: pb.ModelInferRequest(model_name=SELF).SerializeToString()
        + b"".join(field((INPUTS,), [b"\x0a\x01a"])) * 300_000, REFUSED),
    "30 M empty raw contents": Hostile(INFER, lambda: b"\x3a\x00" * 30_000_000, REFUSED),
    "30 M unknown fields": Hostile(INFER, lambda: b"\xf8\x7f\x01" * 20_000_000, REFUSED),
    "one unknown field of 64 MB": Hostile(
        ATTEND, lambda: attend(SELF) + b"".join(field((99,), [bytes(62 * MIB)])), REFUSED
    ),
    "a shape of 60 M axes": Hostile(
        INFER, lambda: b"".join(field((INPUTS, 3), [b"\1" * (60 * MIB)])), REFUSED
    ),
    "60 M ids": Hostile(ATTEND, lambda: ones((4, 2), 60 * MIB), INVALID),
    "60 M lengths": Hostile(
        ATTEND, lambda: ones((3, 3), 60 * MIB) + b"\x1a\x04\x08\x01\x10\x04", REFUSED
    ),
    "60 M positions": Hostile(
        ATTEND, lambda: ones((10,), 60 * MIB), INVALID
    ),
    "15 M spans": Hostile(ATTEND, lambda: ones((12, 2, 2), 60 * MIB), INVALID),
    "503 M flags of a mask": Hostile(ATTEND, mask_bits, REFUSED),
    "one output 160 times": Hostile(INFER, lambda: outputs(160), INVALID),
    "60 MB to a method of names": Hostile(READY, names_only, REFUSED),
    "60 MB of zeros": Hostile(ATTEND, lambda: bytes(60 * MIB), REFUSED),
    "4096 sequences of 16 rows": Hostile(ATTEND, lambda: rows(4096, 16), ANSWERED),
    "one tensor of 128 KB": Hostile(ATTEND, lambda: rows(1, 8192), ANSWERED),
}  # fmt: skip
